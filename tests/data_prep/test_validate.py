"""`data-prep validate` on files with planted faults of every kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from data_prep.cli import app
from lmms_engine.datasets.schema import parse_row

runner = CliRunner()


def chat(name: str, *content: dict[str, Any], answer: str = "red") -> dict[str, Any]:
    parts = [*content, {"type": "text", "text": "What colour?"}]
    return {
        "id": name,
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}],
    }


def image(path: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": path}}


def run(*arguments: object) -> Result:
    return runner.invoke(app, ["validate", *map(str, arguments)], env={"COLUMNS": "300"})


@pytest.fixture
def folder(tmp_path: Path, sample: Path) -> Path:
    """Good and bad media beside each other."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "good.jpg", quality=95)
    whole = (tmp_path / "good.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "not.wav").write_bytes(b"RIFF and nothing more")
    clip = sorted((sample / "videos").glob("*.mp4"))[0]
    shutil.copy(clip, tmp_path / "good.mp4")
    (tmp_path / "cut.mp4").write_bytes(clip.read_bytes()[: clip.stat().st_size * 2 // 3])
    shutil.copy(sorted((sample / "audio").glob("*.wav"))[0], tmp_path / "good.wav")
    return tmp_path


def faulty_rows() -> list[tuple[str, dict[str, Any]]]:
    """(kind of the fault, row)."""
    good = chat("x")["messages"]
    clip = {"type": "video_url", "video_url": {"url": "cut.mp4"}}
    sound = {"type": "audio_url", "audio_url": {"url": "not.wav"}}
    return [
        ("media_corrupt", chat("cut picture", image("cut.jpg"))),
        ("media_corrupt", chat("cut clip", clip)),
        ("media_corrupt", chat("no sound", sound)),
        ("media_missing", chat("no file", image("nowhere.png"))),
        ("media_missing", {"id": "mark", "messages": [{"role": "user", "content": "<image>?"}, good[1]]}),
        ("media_unused", {**chat("unplaced", image("good.jpg")), "image": ["good.jpg"]}),
        ("unknown_key", {**chat("key"), "massages": []}),
        ("role", {"id": "role", "messages": [{"role": "robot", "content": "a"}]}),
        ("role_order", {"id": "system", "messages": [*good, {"role": "system", "content": "late"}]}),
        ("role_order", {"id": "tool", "messages": [good[0], {"role": "tool", "content": "3"}, good[1]]}),
        ("assistant_first", {"id": "first", "messages": [good[1]]}),
        ("empty_answer", chat("empty", answer="")),
        ("no_answer", {"id": "none", "messages": good[:1]}),
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_good_rows_pass_with_exit_code_zero(folder: Path) -> None:
    clip = {"type": "video_url", "video_url": {"url": "good.mp4"}}
    sound = {"type": "audio_url", "audio_url": {"url": "good.wav"}}
    rows = [chat("a", image("good.jpg")), chat("b", clip), chat("c", sound), chat("d")]
    result = run(write(folder / "rows.jsonl", rows))
    assert (result.exit_code, result.stdout) == (0, "4 rows, 0 with faults\n")


def test_every_planted_fault_is_found_by_kind_with_its_address(folder: Path) -> None:
    planted = faulty_rows()
    rows = [chat("good", image("good.jpg")), *(row for _, row in planted)]
    path = write(folder / "rows.jsonl", rows)
    with path.open("a") as file:
        file.write('\n{"id": "cut off", "messages": [\n')
    result = run(path, "--report", folder / "faults.jsonl")
    assert result.exit_code == 1
    faults = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    expected = [(kind, row["id"], n) for n, (kind, row) in enumerate(planted, 1)]
    assert [(f["kind"], f["id"], f["row"]) for f in faults] == [*expected, ("json", None, len(rows) + 1)]
    assert all(f["place"] == f"{path}, line {f['row'] + 1}" for f in faults)
    assert f"{len(rows) + 1} rows, {len(planted) + 1} with faults" in result.stdout
    for kind, name in (("media_corrupt", "cut.jpg"), ("media_missing", "nowhere.png"), ("json", "line 16")):
        assert kind in result.stdout
        assert name in result.stdout


def test_two_bad_media_in_a_row_are_two_faults_and_one_row(folder: Path) -> None:
    path = write(folder / "rows.jsonl", [chat("a", image("cut.jpg"), image("nowhere.png"))])
    result = run(path)
    assert {"media_corrupt", "media_missing"} <= set(result.stdout.split())
    assert result.stdout.endswith("1 rows, 1 with faults\n")


def test_half_a_letter_is_named_as_json_writes_it(folder: Path) -> None:
    path = write(folder / "half.jsonl", [chat("s\ud800"), {**chat("t"), "note\udc00": 1}, chat("u")])
    report = folder / "faults.jsonl"
    result = run(path, "--report", report)
    assert result.exit_code == 1, result.output
    first, second = map(json.loads, report.read_text(encoding="utf-8").splitlines())
    assert (first["id"], first["kind"]) == (r"s\ud800", "text_invalid")
    assert r"unknown key 'note\udc00'" in second["message"]


def test_fix_writes_the_good_rows_and_again_the_same_bytes(folder: Path) -> None:
    good = [chat("a", image("good.jpg")), chat("z")]
    path = write(folder / "rows.jsonl", [good[0], *(row for _, row in faulty_rows()), good[1]])
    clean = folder / "clean.jsonl"
    assert run(path, "--fix", clean).exit_code == 1
    kept = [json.loads(line) for line in clean.read_text().splitlines()]
    assert [parse_row(row, folder) for row in kept] == [parse_row(row, folder) for row in good]
    assert kept[0]["messages"][0]["content"][0] == image("good.jpg")   # still relative
    before = clean.read_bytes()
    run(path, "--fix", clean)
    assert clean.read_bytes() == before
    assert run(clean).exit_code == 0
    elsewhere = folder / "other" / "clean.jsonl"
    run(path, "--fix", elsewhere)
    assert run(elsewhere).exit_code == 0
    assert not [*folder.rglob("*.partial"), *folder.rglob("*.parts")]


def test_pictures_inside_parquet_are_opened(folder: Path) -> None:
    data = [(folder / name).read_bytes() for name in ("good.jpg", "cut.jpg", "good.jpg")]
    turns = json.dumps(chat("x", {"type": "image"})["messages"])
    table = pa.table({
        "messages": [turns] * 3,
        "images": [[{"bytes": item, "path": "p.jpg"}] for item in data],
    })
    pq.write_table(table, folder / "rows.parquet", row_group_size=2)
    result = run(folder / "rows.parquet")
    assert result.exit_code == 1
    assert "rows.parquet, row 2, row group 0" in result.stdout
    assert "3 rows, 1 with faults" in result.stdout


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_processor_adds_lengths_and_template(folder: Path, sample: Path, family: str) -> None:
    clip = {"type": "video_url", "video_url": {"url": "good.mp4"}}
    rows = [
        chat("fits", image("good.jpg"), clip),
        chat("long", answer="red " * 200),
        chat("marker", answer="red <|im_end|>"),
    ]
    path = write(folder / "rows.jsonl", rows)
    assert run(path).exit_code == 0
    processor = ("--processor", sample / "processor" / family)
    result = run(path, *processor, "--max-length", 150, "--report", folder / "faults.jsonl")
    assert result.exit_code == 1, result.output
    faults = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    assert [(fault["id"], fault["kind"]) for fault in faults] == [
        ("long", "overlong"),
        ("marker", "special_token"),
    ]
    assert "more than --max-length 150" in faults[0]["message"]


def test_two_workers_report_what_one_does(folder: Path) -> None:
    rows = [chat(str(n), image("cut.jpg" if n % 50 == 0 else "good.jpg")) for n in range(150)]
    path = write(folder / "rows.jsonl", rows)
    one = run(path, "--report", folder / "one.jsonl")
    two = run(path, "--report", folder / "two.jsonl", "--workers", 2)
    assert "150 rows, 3 with faults" in one.stdout
    assert two.stdout == one.stdout
    assert (folder / "two.jsonl").read_text() == (folder / "one.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-length", 10), "--max-length needs --processor"),
        (("--fix", "x.parquet"), "the copy is JSONL"),
        (("--processor", "nowhere"), "there is no such folder"),
        (("--processor", "."), "cannot tell the model"),
    ],
)
def test_misuse_is_one_line(folder: Path, arguments: tuple, message: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    result = run(write(folder / "rows.jsonl", [chat("a")]), *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr


def test_nothing_good_leaves_no_copy(folder: Path) -> None:
    path = write(folder / "rows.jsonl", [row for _, row in faulty_rows()])
    result = run(path, "--fix", folder / "clean.jsonl")
    assert (result.exit_code, "no row is good" in result.stderr) == (1, True)
    assert not (folder / "clean.jsonl").exists()


def test_killed_at_any_instant_it_goes_on_to_the_same_bytes(
    folder: Path, killed: Callable[..., int]
) -> None:
    rows = [chat(str(n), image("cut.jpg" if n % 9 == 0 else "good.jpg")) for n in range(60)]
    path = write(folder / "rows.jsonl", rows)
    clean, faults = folder / "clean.jsonl", folder / "faults.jsonl"
    arguments = (path, "--fix", clean, "--report", faults)
    run(*arguments)
    whole = clean.read_bytes(), faults.read_bytes()
    clean.unlink()
    parts = folder / ".clean.jsonl.parts"
    for count in (1, 4, 9):   # two files a part, so also between them
        assert killed(["validate", *arguments], parts, count) >= count
        assert not clean.exists()
    done = sorted(parts.glob("part-*.json"))
    seen = {file: file.stat().st_mtime_ns for file in done}
    assert killed(["validate", *arguments], parts, len(list(parts.glob("part-*"))) + 1)
    assert {file: file.stat().st_mtime_ns for file in done} == seen   # not done again
    assert "60 rows, 7 with faults" in run(*arguments).stdout
    assert (clean.read_bytes(), faults.read_bytes()) == whole
    assert not parts.exists()


def test_what_was_found_in_other_rows_is_not_taken_over(folder: Path, killed: Callable[..., int]) -> None:
    rows = [chat(str(n), image("cut.jpg")) for n in range(40)]
    path, faults = write(folder / "rows.jsonl", rows), folder / "faults.jsonl"
    killed(["validate", path, "--report", faults], folder / ".faults.jsonl.parts", 2)
    text = path.read_text()
    path.write_text(text.replace("cut.jpg", "good.jpg"))
    assert run(path, "--report", faults).stdout == "40 rows, 0 with faults\n"
    assert faults.read_text() == ""


def test_help_has_an_example() -> None:
    result = run("--help")
    assert "data-prep validate data/shapes/train.jsonl" in result.stdout
