"""Rows of every shape in one set, from every kind of file, with the families' own processors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.sources import text
from lmms_engine.errors import UserError
from tests.datasets.test_sources import ODD, odd_file
from tests.datasets.toy_data import ids_of, make_job, steps_of_epoch, write_jsonl

Build = Callable[..., Any]
WORDS, ANSWER = "Which colour?", "red"
ASKED = [{"from": "human", "value": f"<image>\n{WORDS}"}, {"from": "gpt", "value": ANSWER}]
TWICE = [{"from": "human", "value": f"<image>\n<image>\n{WORDS}"}, {"from": "gpt", "value": ANSWER}]


def turns(content: Any, answer: str = ANSWER) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


IMAGE, QUESTION = {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": WORDS}
SHAPES = [
    {"id": "a", "messages": turns([IMAGE, QUESTION])},
    {"id": "b", "messages": turns("What is 1 plus 2?", "3")},
    {"id": "c", "image": "a.png", "conversations": ASKED},
    {"id": "d", "image": ["a.png", "b.png"], "conversations": TWICE},
]


def as_lines(folder: Path) -> Path:
    return write_jsonl(folder / "rows.jsonl", SHAPES)


def as_list(folder: Path) -> Path:
    (folder / "rows.json").write_text(json.dumps(SHAPES), encoding="utf-8")
    return folder / "rows.json"


def as_table() -> pa.Table:
    """A column has one type: conversations as JSON, one picture as a list of one."""
    lists = {"image": lambda value: value if isinstance(value, list) else [value]}
    cells = {"messages": json.dumps, "conversations": json.dumps, **lists}
    rows = [{key: cells.get(key, str)(value) for key, value in row.items()} for row in SHAPES]
    keys = ("id", "messages", "conversations", "image")
    return pa.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])


def as_parquet(folder: Path) -> Path:
    pq.write_table(as_table(), folder / "rows.parquet", row_group_size=3)
    return folder / "rows.parquet"


def as_arrow(folder: Path) -> Path:
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, as_table().schema) as out:
        out.write_table(as_table(), max_chunksize=3)
    return folder / "rows.arrow"


def as_saved(folder: Path) -> Path:
    datasets.Dataset(as_table()).save_to_disk(folder / "saved")
    for name in ("a.png", "b.png"):
        os.link(folder / name, folder / "saved" / name)
    return folder / "saved"


def as_unlike_files(folder: Path, write: Callable[[pa.Table, Path], None], suffix: str) -> Path:
    """A folder of tables whose columns are of other types in each: a string in one, a list in another."""
    (folder / "shards").mkdir()
    for row in SHAPES:
        write(pa.Table.from_pylist([without_mixtures(row)]), folder / "shards" / f"{row['id']}.{suffix}")
    for name in ("a.png", "b.png"):
        os.link(folder / name, folder / "shards" / name)
    return folder / "shards"


def without_mixtures(row: dict[str, Any]) -> dict[str, Any]:
    """A row of parts has parts in all of its turns, as one column must."""
    if not any(isinstance(turn["content"], list) for turn in row.get("messages", ())):
        return row
    parts = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn["content"], str)
        else turn
        for turn in row["messages"]
    ]
    return {**row, "messages": parts}


def write_arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)


FILES: dict[str, Callable[[Path], Path]] = {
    "jsonl": as_lines,
    "jsonl by the byte": as_lines,
    "json": as_list,
    "parquet": as_parquet,
    "arrow": as_arrow,
    "saved": as_saved,
    "unlike parquet": partial(as_unlike_files, write=pq.write_table, suffix="parquet"),
    "unlike arrow": partial(as_unlike_files, write=write_arrow, suffix="arrow"),
}


def micros(build: Build, path: Path, **keys: Any) -> list[PackedBatch]:
    """One row each, in file order."""
    keys = {"packing": False, "shuffle": False, "num_logical_shards": 1, "max_length": 512, **keys}
    loader = Loader(make_job(path, **keys), build, dp_rank=0, dp_size=1)
    steps = steps_of_epoch(loader)
    loader.close()
    return [micro for step in steps for micro in step]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", FILES)
def test_shapes_of_one_file_are_the_same_conversation(
    build: Build, pictures: Path, monkeypatch: pytest.MonkeyPatch, form: str, workers: int
) -> None:
    """Four samples with 1, 0, 1 and 2 pictures; (a) and (c) are equal; so are all readers."""
    if form == "jsonl by the byte":
        monkeypatch.setattr(text, "NUMBERED_BYTES", 0)
    seen = micros(build, FILES[form](pictures), dataloader_num_workers=workers)
    assert [row.id for micro in seen for row in micro.rows] == ["a", "b", "c", "d"]
    processor = build()
    slots = [int((micro.input_ids[: micro.num_tokens] == processor.image_token).sum()) for micro in seen]
    each = slots[0]
    assert slots == [each, 0, each, 2 * each]
    counts = [len(micro.media["image_grid_thw"]) for micro in seen]
    assert counts == [1, 1, 1, 2]   # the text's one is the stand-in
    a, b, c, d = seen
    assert a.input_ids.tolist() == c.input_ids.tolist()
    assert a.labels.tolist() == c.labels.tolist()
    assert torch.equal(a.media["pixel_bytes"], c.media["pixel_bytes"])
    assert torch.equal(d.media["pixel_bytes"][: len(a.media["pixel_bytes"])], a.media["pixel_bytes"])
    decode = processor.tokenizer.decode
    learnt = [decode(micro.labels[micro.labels != -100]) for micro in seen]
    assert learnt == ["red<|im_end|>", "3<|im_end|>", "red<|im_end|>", "red<|im_end|>"]
    assert decode(b.input_ids[: b.num_tokens]) == (
        "<|im_start|>user\nWhat is 1 plus 2?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    )


# A row that mentions a picture, and what a run says of it; None: it is used
MENTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...] | None]] = {
    "image": ({"image": "a.png"}, None),
    "images": ({"images": ["a.png"]}, None),
    "imgs": ({"imgs": ["a.png"]}, ("unknown_key", "'imgs'", "did you mean 'images'")),
    "a part without source": (
        {"messages": turns([{"type": "image"}, QUESTION])}, ("media_missing", "messages[0].content[0]")
    ),
    "a file that is not there": (
        {"messages": turns([{"type": "image", "image": "no.png"}, QUESTION])}, ("media_missing", "no.png")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MENTIONS)
def test_a_picture_that_is_mentioned_is_used_or_named(build: Build, pictures: Path, name: str) -> None:
    """Never a sample without pictures from a row that mentions one."""
    keys, refusal = MENTIONS[name]
    path = write_jsonl(pictures / "rows.jsonl", [{"id": "r0", "messages": turns(WORDS), **keys}])
    if refusal is None:
        (micro,) = micros(build, path)
        processor = build()
        slots = int((micro.input_ids == processor.image_token).sum())
        assert slots * processor.merge**2 == micro.media["image_grid_thw"].prod() > 0
        assert len(micro.media["pixel_bytes"]) == slots * processor.merge**2
        assert micro.rows[0].id == "r0"
        assert micro.segments.num_segments == 1   # no stand-in beside it
        return
    kind, *words = refusal
    with pytest.raises(UserError) as caught:
        micros(build, path)
    loader = Loader(
        make_job(path, on_bad_row="skip", max_skip_fraction=1.0), build, dp_rank=0, dp_size=1
    )
    assert ids_of(steps_of_epoch(loader)) == []
    (skipped,) = loader.take_skipped()
    assert (skipped.id, skipped.kind, loader.skipped_total) == ("r0", kind, 1)
    for word in (*words, "line 1"):
        assert word in str(caught.value)
    for word in words:
        assert word in skipped.reason


def test_odd_lines_survive_the_round_trip(build: Build, tmp_path: Path) -> None:
    """What separates lines elsewhere is text here, down to the tokens; the cut line is counted."""
    path = odd_file(tmp_path)
    Image.new("RGB", (64, 64)).save(tmp_path / "图片.png")
    keys = {"packing": False, "shuffle": False, "num_logical_shards": 1}
    job = make_job(path, on_bad_row="skip", max_length=512, **keys)
    loader = Loader(job, build, dp_rank=0, dp_size=1)
    steps = steps_of_epoch(loader)
    assert ids_of(steps) == ["first", "second", "三"]
    second, third = steps[1][0], steps[2][0]
    processor = build()
    shown = processor.tokenizer.decode(second.input_ids[: second.num_tokens])
    assert shown == f"<|im_start|>user\n{ODD}<|im_end|>\n"
    assert int((third.input_ids == processor.image_token).sum()) == third.media["image_grid_thw"].prod() // 4
    (skipped,) = loader.take_skipped()
    assert (skipped.kind, loader.skipped_total) == ("json", 1)
    assert f"{path}, line 5" in skipped.reason
