"""`data-prep stats`: counts that are known beforehand, figures, and the packing it predicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from data_prep.cli import app
from data_prep.stats import histogram, percentiles

runner = CliRunner()


def run(*arguments: object) -> Result:
    return runner.invoke(app, ["stats", *map(str, arguments)])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Five rows of 3, 3, 3, 7 and 12 words from two sources; and a broken line and one without turns."""
    texts = ["one two", "one two", "one two", "one two three four five six", " ".join(["word"] * 11)]
    lines = []
    for n, text in enumerate(texts):
        parts = [{"type": "image", "image": "nowhere.png"}] * (n == 0) + [{"type": "text", "text": text}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
        meta = {"source": "web"} if n < 2 else {}
        lines.append(json.dumps({"messages": turns, "meta": meta}))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines, '{"messages": [', '{"id": "a"}']) + "\n")
    return path


def test_words_turns_media_sources_and_unusable_rows(rows: Path, tmp_path: Path) -> None:
    result = run(rows, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("5 rows, 2 unusable (json 1, messages 1)\n")
    found = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert found["rows"] == 5
    assert found["lengths"] == {"sum": 28, "min": 3, "p50": 3, "p90": 12, "p99": 12, "max": 12}
    assert found["turns"]["sum"] == 10
    assert found["images"]["sum"] == 1
    assert "videos" not in found
    assert found["sources"] == {"rows.jsonl": 3, "web": 2}
    bars = [line for line in result.stdout.splitlines() if "█" in line]
    assert bars[0].split() == ["3", "█" * 40, "3"]
    assert any(line.split()[0] == "web" and line.endswith(" 2") for line in bars)


def test_figures_are_pictures_with_something_on_them(rows: Path, tmp_path: Path) -> None:
    run(rows, "--out", tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["images.png", "lengths.png", "sources.png", "stats.json", "turns.png"]
    for name in names:
        if name.endswith(".png"):
            with Image.open(tmp_path / "out" / name) as image:
                assert image.width > 400
                assert len(image.convert("RGB").getcolors(1 << 20)) > 2


def test_tokens_with_a_processor_equal_the_processors_own(sample: Path, tmp_path: Path) -> None:
    from data_prep.lengths import Tokens
    from lmms_engine.datasets.schema import parse_row

    folder = sample / "processor" / "qwen3_vl"
    data = sample / "heldout.jsonl"
    result = run(data, "--processor", folder, "--packing-length", 256, "--limit", 10, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = data.read_text().splitlines()[:10]
    samples = [Tokens(folder, "qwen3_vl").sample(parse_row(json.loads(line), sample)) for line in lines[:3]]
    found = json.loads((tmp_path / "stats.json").read_text())
    assert (found["rows"], found["unit"]) == (10, "tokens")
    assert found["lengths"]["sum"] > sum(map(len, samples))
    assert found["lengths"]["min"] <= min(map(len, samples))
    few = run(data, "--processor", folder, "--limit", 3)
    total, supervised = sum(map(len, samples)), sum(sample.supervised for sample in samples)
    assert f"{total} tokens, {supervised} supervised" in few.stdout
    packing = found["packing"]["strategies"]["first_fit"]
    assert packing["fill"] == pytest.approx(found["lengths"]["sum"] / (packing["packs"] * 256))
    (shown,) = (line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["first_fit"])
    assert shown[1:4] == [str(packing["packs"]), f"{packing['fill']:.1%}", str(packing["steps"])]
    assert packing["cost"] > found["lengths"]["sum"] / packing["steps"]   # attention and the tower too


def test_histogram_and_percentiles_by_hand() -> None:
    assert histogram([1, 1, 3], 12) == [(1, 1, 2), (2, 2, 0), (3, 3, 1)]
    assert histogram([0, 5, 9], 5) == [(0, 1, 1), (2, 3, 0), (4, 5, 1), (6, 7, 0), (8, 9, 1)]
    assert percentiles(range(1, 101)) == {"min": 1, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert percentiles([7]) == {"min": 7, "p50": 7, "p90": 7, "p99": 7, "max": 7}


def test_misuse_is_one_line(rows: Path, tmp_path: Path) -> None:
    result = run(rows, "--packing-length", 100)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "--packing-length needs --processor" in result.stderr
    assert "--ranks 2 needs --packing-length" in run(rows, "--ranks", 2).stderr
    (tmp_path / "bad.jsonl").write_text("{\n")
    result = run(tmp_path / "bad.jsonl")
    assert result.exit_code == 1
    assert "no usable row (json 1)" in result.stderr
