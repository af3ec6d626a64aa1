"""`data-prep shard`: the same rows from the shards, balanced, resumed, and refused where they cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from data_prep.cli import app
from data_prep.rows import chunks_of, open_data, rows_of
from data_prep.shard import cut
from lmms_engine.datasets.schema import MediaPart, Row, parse_row

runner = CliRunner()


def run(data: Path, out: Path, *arguments: object) -> Result:
    return runner.invoke(app, ["shard", str(data), "--out", str(out), *map(str, arguments)])


def read(path: Path) -> Iterator[Row]:
    source = open_data(path)
    for chunk in chunks_of(source):
        for _, raw in rows_of(source, chunk):
            yield parse_row(raw, source.folder(chunk.shard))


def contents(row: Row) -> dict[str, Any]:
    """The row with its media as bytes, wherever they lie."""
    out = row.model_dump()
    for message in out["messages"]:
        for part in message["content"]:
            if part["kind"] != "text" and part["path"]:
                part["bytes"], part["path"] = Path(part["path"]).read_bytes(), None
    return out


@pytest.mark.parametrize(("form", "to"), [("jsonl", "parquet"), ("parquet", "parquet"), ("jsonl", "arrow")])
@pytest.mark.parametrize("media", ["embed", "relative"])
def test_the_shards_hold_the_same_rows_in_order(
    sample: Path, tmp_path: Path, form: str, to: str, media: str
) -> None:
    data = sample / f"heldout.{form}"
    result = run(data, tmp_path / "out", "--shards", 3, "--media", media, "--format", to)
    assert result.exit_code == 0, result.output
    rows = list(read(tmp_path / "out"))
    assert [contents(row) for row in rows] == [contents(row) for row in read(data)]
    inside = [part.bytes is not None for row in rows for part in row.media()]
    assert inside
    assert set(inside) == {media == "embed"}
    files = sorted(path.name for path in (tmp_path / "out").glob("part-*"))
    assert files == [f"part-0000{n}-of-00003.{to}" for n in range(3)]


def test_everything_that_a_row_may_hold_survives(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"a clip")
    call = {"name": "f", "arguments": {"a": [1, None, {"b": ""}]}, "id": "c1"}
    row = {
        "id": "r",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}],
        "meta": {"deep": {"n": None}, "list": []},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "an <image> mark"}]},
            {"role": "user", "content": [
                {"type": "video", "video": "a.mp4", "start": 0.5, "end": 2, "fps": 4},
                {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
                {"type": "text", "text": ""},
            ]},
            {"role": "assistant", "content": [], "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
            {"role": "assistant", "content": "three"},
        ],
    }  # fmt: skip
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps({**row, "id": None}) + "\n")
    assert run(tmp_path / "d.jsonl", tmp_path / "out", "--shards", 2).exit_code == 0
    expected = [contents(found) for found in read(tmp_path / "d.jsonl")]
    assert [contents(found) for found in read(tmp_path / "out")] == expected
    assert expected[0]["messages"][1]["content"][0]["bytes"] == b"a clip"
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 2


def test_cut_by_hand() -> None:
    assert [(s.first, s.stop) for s in cut([1, 1, 1, 1], 2)] == [(0, 2), (2, 4)]
    assert [(s.first, s.stop) for s in cut([6, 1, 1, 1, 1, 1, 1], 2)] == [(0, 1), (1, 7)]
    assert [(s.first, s.stop) for s in cut([1, 1, 10], 3)] == [(0, 1), (1, 2), (2, 3)]
    assert [(s.first, s.stop) for s in cut([10, 1, 1], 3)] == [(0, 1), (1, 2), (2, 3)]


def test_shards_are_balanced_by_size_not_by_rows(tmp_path: Path) -> None:
    """Rows sorted by size: equal numbers of rows would give 1 : 3."""
    lines = []
    for n in range(200):
        (tmp_path / f"{n}.bin").write_bytes(bytes([n]) * 100 * (n + 1))
        part = MediaPart(kind="image", path=f"{n}.bin")
        content = [{"type": "image", "image": part.path}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
        lines.append(json.dumps({"messages": turns}))
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    assert run(tmp_path / "d.jsonl", tmp_path / "out", "--size-mb", 0.5).exit_code == 0
    sizes = []
    for path in sorted((tmp_path / "out").glob("*.parquet")):
        rows = list(read(path))
        sizes.append(sum(len(part.bytes) for row in rows for part in row.media()))
    assert len(sizes) == 5   # 2.01 MB
    assert max(sizes) < 1.05 * min(sizes)


def test_killed_at_any_instant_it_goes_on_and_a_whole_folder_is_left_alone(
    sample: Path, tmp_path: Path, killed: Callable[..., int]
) -> None:
    data, out, parts = sample / "heldout.jsonl", tmp_path / "out", tmp_path / ".out.parts"
    undisturbed = tmp_path / "undisturbed"
    assert run(data, undisturbed, "--shards", 3).exit_code == 0
    whole = {path.name: path.read_bytes() for path in undisturbed.iterdir()}
    for count in (1, 2, 4, 5):   # three parts are measured, three shards written
        assert killed(["shard", data, "--out", out, "--shards", 3], parts, count) >= count
        assert not out.exists()
    first = next(parts.glob("part-00000*"))
    kept = first.stat().st_mtime_ns
    (parts / ".tmp" / "other-1-part-00001-of-00003.parquet").write_bytes(b"half")   # left by the killed
    result = run(data, out, "--shards", 3)
    assert result.stdout.startswith("wrote: ")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert (out / first.name).stat().st_mtime_ns == kept   # not written again
    assert run(data, out, "--shards", 3).stdout.startswith("present: ")
    other = run(data, out, "--shards", 2)
    assert (other.exit_code, "other data or settings" in other.stderr) == (1, True)
    assert not parts.exists()


def test_two_local_tasks_write_what_the_plain_command_does(sample: Path, tmp_path: Path) -> None:
    written = []
    for name, options in (("plain", ()), ("local", ("--executor", "local", "--tasks", 2))):
        result = run(sample / "heldout.jsonl", tmp_path / name, "--shards", 3, *options)
        assert result.exit_code == 0, result.output
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert written[0] == written[1]


def test_two_workers_write_what_one_does(sample: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        arguments = ("--shards", 2, "--workers", workers)
        assert run(sample / "heldout.parquet", tmp_path / f"out{workers}", *arguments).exit_code == 0
    one, two = (
        [path.read_bytes() for path in sorted((tmp_path / f"out{n}").glob("*.parquet"))] for n in (1, 2)
    )
    assert one == two


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "line 1 (the last one"),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]}', "not exist"),
    ],
)
def test_bad_rows_end_the_call_with_their_place(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text(line + "\n")
    result = run(tmp_path / "d.jsonl", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr
    assert "d.jsonl, line 1" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    result = run(sample / "heldout.jsonl", tmp_path)
    assert (result.exit_code, "something else than shards" in result.stderr) == (1, True)
    assert (tmp_path / "mine").exists()


def test_row_groups_stay_small(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.shard.GROUP_ROWS", 5)
    run(sample / "heldout.jsonl", tmp_path / "out", "--shards", 1)
    meta = pq.ParquetFile(next((tmp_path / "out").glob("*.parquet"))).metadata
    assert {meta.row_group(n).num_rows for n in range(meta.num_row_groups - 1)} == {5}
