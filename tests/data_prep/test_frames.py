"""Clips that are lists of pictures go through the data verbs with every frame."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from data_prep.cli import app
from data_prep.rows import open_data
from lmms_engine.datasets.schema import Row, parse_row
from lmms_engine.datasets.video import load_clip


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """One row with a clip of three pictures: two files and one in the row."""
    folder = tmp_path / "data"
    (folder / "frames").mkdir(parents=True)
    for i in range(2):
        (folder / "frames" / f"{i}.png").write_bytes(png(40 * i))
    inside = "data:image/png;base64," + base64.b64encode(png(80)).decode()
    content = [
        {"type": "video", "video": ["frames/0.png", "frames/1.png", inside], "fps": 2},
        {"type": "text", "text": "What changes?"},
    ]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "The light."}]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


def only_row(path: Path) -> Row:
    source = open_data(path)
    ((_, raw),) = source.rows(0)
    return parse_row(raw, source.folder(0))


def levels(row: Row) -> list[int]:
    (part,) = row.media()
    assert part.fps == 2.0
    return load_clip(part, fps=1.0, min_frames=1, max_frames=8).frames[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("media", ["embed", "relative"])
def test_shards_hold_the_frames(data: Path, tmp_path: Path, media: str) -> None:
    arguments = ["shard", str(data), "--out", str(tmp_path / "shards"), "--media", media]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    row = only_row(tmp_path / "shards")
    assert levels(row) == [0, 40, 80]
    (part,) = row.media()
    assert [frame.bytes is None for frame in part.frames] == [media == "relative"] * 2 + [False]
    if media == "embed":
        for file in (data.parent / "frames").iterdir():
            file.unlink()
        assert levels(only_row(tmp_path / "shards")) == [0, 40, 80]


def test_rows_that_are_converted_name_the_frames_files(data: Path) -> None:
    out = data.parent / "again.jsonl"
    result = CliRunner().invoke(app, ["convert", "llava", str(data), "--out", str(out)])
    assert result.exit_code == 0, result.output
    names = json.loads(out.read_text())["messages"][0]["content"][0]["video"]
    assert names[:2] == ["frames/0.png", "frames/1.png"]
    assert names[2].startswith("again_media/")
    assert levels(only_row(out)) == [0, 40, 80]


def test_preview_shows_frames(data: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["preview", str(data), "--out", str(page)]).exit_code == 0
    assert page.read_text().count("data:image/jpeg") == 3
    assert "at 0.0, 0.5, 1.0 s" in page.read_text()


def test_a_missing_frame_is_found(data: Path) -> None:
    (data.parent / "frames" / "1.png").unlink()
    result = CliRunner().invoke(app, ["validate", str(data)])
    assert result.exit_code == 1
    assert "media_missing" in result.output
