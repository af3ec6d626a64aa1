"""Pictures of every size, turn and kind, from every source: what the model's patches show of them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from data_prep.cli import app
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from tests.datasets.toy_data import make_job, steps_of_epoch, write_jsonl

Build = Callable[..., Any]
TEXT = {"type": "text", "text": "what?"}
ANSWER = {"role": "assistant", "content": "red"}


def row(id_: str, *parts: Any, **keys: Any) -> dict[str, Any]:
    return {"id": id_, "messages": [{"role": "user", "content": [*parts, TEXT]}, ANSWER], **keys}


def encoded(image: Image.Image, format_: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format_, **options)
    return buffer.getvalue()


def run(job: Any, build: Build) -> tuple[dict[str, PackedBatch], dict[str, tuple[str, str]]]:
    """One epoch: id -> its batch (one row each), and of the rows left out id -> (kind, reason)."""
    loader = Loader(job, build, dp_rank=0, dp_size=1)
    seen = {micro.rows[0].id: micro for micros in steps_of_epoch(loader) for micro in micros}
    skipped = loader.take_skipped()
    assert loader.skipped_total == len(skipped)
    return seen, {record.id: (record.kind, record.reason) for record in skipped}


def one_by_one(path: Path, **keys: Any) -> Any:
    return make_job(path, packing=False, max_length=2048, num_logical_shards=1, **keys)


def slots_of(batch: PackedBatch, processor: Any) -> int:
    """Slots, after a look at whether there are as many features."""
    slots = int((batch.input_ids[: batch.num_tokens] == processor.image_token).sum())
    assert slots * processor.merge**2 == int(batch.media["image_grid_thw"].prod(1).sum())
    assert slots * processor.merge**2 == len(batch.media["pixel_bytes"])
    return slots


def patch(batch: PackedBatch, processor: Any, line: int, column: int) -> Tensor:
    """A patch of the batch's picture, uint8 [3, side, side]."""
    _, _, columns = batch.media["image_grid_thw"][0].tolist()
    merge, side = processor.merge, processor.patch
    block = line // merge * (columns // merge) + column // merge
    at = block * merge**2 + line % merge * merge + column % merge
    return batch.media["pixel_bytes"][at].view(3, side, side)


# Sizes -----------------------------------------------------------------------------------------------

EXTREMES = ((1, 1), (27, 100), (1, 200), (1, 201), (5, 1001), (1024, 5), (3000, 4000))
# least and most pixels, then the slots of each extreme; None: refused
EXPECTED: dict[str, tuple[int, int, list[int | None]]] = {
    "qwen2_5_vl": (56 * 56, 1280 * 28 * 28, [4, 4, 29, None, None, None, 1230]),
    "qwen3_vl": (65_536, 1280 * 32 * 32, [64, 80, 114, None, None, None, 1230]),
}


def test_extreme_pictures(build: Build, family: str, tmp_path: Path) -> None:
    """In one set with usual rows; what cannot be resized is counted and named, all others are used."""
    least, most, expected = EXPECTED[family]
    sizes = {"first": (64, 64), **{f"{w}x{h}": (w, h) for w, h in EXTREMES}, "last": (64, 64)}
    for name, (width, height) in sizes.items():
        Image.new("RGB", (width, height), "red").save(tmp_path / f"{name}.png", compress_level=1)
    rows = [row(name, {"type": "image", "path": f"{name}.png"}) for name in sizes]
    limits = {"image_min_pixels": least, "image_max_pixels": most}
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    seen, skipped = run(one_by_one(path, on_bad_row="skip"), partial(build, extra_kwargs=limits))
    processor = build()
    usual = slots_of(seen["first"], processor)
    wanted = dict(zip(list(sizes)[1:-1], expected, strict=True))
    used = {name: slots for name, slots in wanted.items() if slots is not None}
    assert {name: slots_of(batch, processor) for name, batch in seen.items()} == {
        "first": usual, **used, "last": usual
    }  # fmt: skip
    assert skipped.keys() == wanted.keys() - used.keys() == {"1x201", "5x1001", "1024x5"}
    for name, (kind, reason) in skipped.items():
        assert kind == "aspect_ratio"
        assert f"{name}.png is {name.replace('x', '×')}" in reason


# Turned by the camera ---------------------------------------------------------------------------------


def sideways() -> bytes:
    """200 x 100 with a red upper left corner, to be shown turned by 90 degrees clockwise."""
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[:50, :50] = [255, 0, 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.fromarray(pixels), "JPEG", quality=95, exif=exif)


def sources_of(folder: Path) -> Path:
    """One row for each way to give the picture."""
    data, path = sideways(), folder / "r.jpg"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    rows = [
        row("path", {"type": "image", "path": "r.jpg"}),
        row("absolute", {"type": "image_url", "image_url": {"url": str(path)}}),
        row("file url", {"type": "image_url", "image_url": {"url": path.as_uri()}}),
        row("data url", {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{text}"}}),
        row("base64", image=text),
        row("key", images=["r.jpg"]),
    ]
    return write_jsonl(folder / "rows.jsonl", rows)


def as_bytes(folder: Path) -> Path:
    """A table that holds the picture itself, as `datasets` writes pictures."""
    messages = json.dumps(row("", {"type": "image"})["messages"])
    images = [[{"bytes": sideways(), "path": "r.jpg"}]]
    table = pa.table({"id": ["bytes"], "messages": [messages], "images": images})
    pq.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def by_the_tool(verb: str, *arguments: str) -> Callable[[Path, Path], Path]:
    def make(folder: Path, processor: Path) -> Path:
        given = [text.replace("PROCESSOR", str(processor)) for text in arguments]
        command = [verb, str(sources_of(folder)), "--out", str(folder / "out"), *given]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return folder / "out"

    return make


WAYS: dict[str, Callable[[Path, Path], Path]] = {
    "rows": lambda folder, _: sources_of(folder),
    "bytes in a table": lambda folder, _: as_bytes(folder),
    "shards that hold them": by_the_tool("shard", "--shards", "1"),
    "shards beside them": by_the_tool("shard", "--shards", "1", "--media", "relative"),
    "encoded": by_the_tool("encode", "--processor", "PROCESSOR"),
}


@pytest.mark.parametrize("way", WAYS)
def test_rotated_pictures_are_upright(
    build: Build, family: str, folders: Path, tmp_path: Path, way: str
) -> None:
    """The slots are as many either way, so it is the grid and the corner's colour that tell."""
    path = WAYS[way](tmp_path, folders / family)
    seen, skipped = run(one_by_one(path), partial(build, fps=1.0))   # 1.0: that of `encode`
    processor = build()
    assert not skipped
    assert len(seen) == (1 if way == "bytes in a table" else 6)
    expected = {"qwen2_5_vl": [1, 14, 8], "qwen3_vl": [1, 12, 6]}[family]
    for name, batch in seen.items():
        assert batch.media["image_grid_thw"].tolist() == [expected], name
        assert slots_of(batch, processor) == {"qwen2_5_vl": 28, "qwen3_vl": 18}[family]
        right, left = (patch(batch, processor, 0, at).float().mean((1, 2)) for at in (expected[2] - 1, 0))
        assert right[0] > 200, name
        assert right[1:].max() < 60, name
        assert left.max() < 60, name
    bytes_ = [batch.media["pixel_bytes"] for batch in seen.values()]
    assert all(torch.equal(one, bytes_[0]) for one in bytes_)


# Colours ---------------------------------------------------------------------------------------------

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def pages(format_: str) -> bytes:
    first, second = (Image.new("RGB", (64, 64), colour) for colour in (RED, BLUE))
    return encoded(first, format_, save_all=True, append_images=[second])


RAMP = np.linspace(0, 65_535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
# The file, and the one colour that is to be seen; None: a ramp
KINDS: dict[str, tuple[bytes, tuple[int, int, int] | None]] = {
    "1": (encoded(Image.new("1", (64, 64), 1), "PNG"), WHITE),
    "L": (encoded(Image.new("L", (64, 64), 90), "PNG"), (90, 90, 90)),
    "LA": (encoded(Image.new("LA", (64, 64), (90, 255)), "PNG"), (90, 90, 90)),
    "LA, transparent": (encoded(Image.new("LA", (64, 64), (90, 0)), "PNG"), WHITE),
    "P": (encoded(Image.new("RGB", (64, 64), RED).convert("P"), "PNG"), RED),
    "P, transparent": (encoded(Image.new("P", (64, 64), 0), "PNG", transparency=0), WHITE),
    "RGBA": (encoded(Image.new("RGBA", (64, 64), (*RED, 0)), "PNG"), WHITE),
    "CMYK": (encoded(Image.new("CMYK", (64, 64), (0, 255, 255, 0)), "TIFF"), RED),
    "I;16": (encoded(Image.fromarray(RAMP), "PNG"), None),
    "F": (encoded(Image.fromarray(np.full((64, 64), 0.5, np.float32)), "TIFF"), (128, 128, 128)),
    "GIF": (pages("GIF"), RED),
    "TIFF": (pages("TIFF"), RED),
}


def test_colours_of_every_kind(build: Build, tmp_path: Path) -> None:
    """Three channels and equal slots for all; white behind; 16 bits scaled; the first of several."""
    rows = []
    for name, (data, _) in KINDS.items():
        (tmp_path / name).write_bytes(data)
        rows.append(row(name, {"type": "image", "path": name}))
    # 64 pixels in either family's patches, so that nothing is resized
    processor = build(extra_kwargs={"image_min_pixels": 1024})
    seen, skipped = run(one_by_one(write_jsonl(tmp_path / "rows.jsonl", rows)), lambda: processor)
    assert not skipped
    assert seen.keys() == KINDS.keys()
    assert {slots_of(batch, processor) for batch in seen.values()} == {4}
    for name, (_, colour) in KINDS.items():
        pixels = seen[name].media["pixel_bytes"].view(-1, 3, processor.patch**2)
        if colour is not None:
            assert (pixels.int() - torch.tensor(colour)[:, None]).abs().max() <= 1, name
        else:
            assert len(pixels.unique()) > 200
            assert (int(pixels.min()), int(pixels.max())) == (0, 255)
            assert torch.equal(pixels[:, 0], pixels[:, 2])
