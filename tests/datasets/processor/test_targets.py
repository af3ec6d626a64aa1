"""What is learnt of a row, of every family that reads chats: the answers, each with its end marker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

from data_prep.tokenizer import IDS
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.processor import PROCESSORS
from lmms_engine.datasets.schema import parse_row
from lmms_engine.segments import RowRef
from tests.datasets.toy_data import ids_of, make_job, steps_of_epoch, write_jsonl

END = "<|im_end|>"
CONFIGS: dict[str, Any] = {"qwen3_vl": Qwen3VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig, "qwen3_moe": None}


@pytest.fixture(params=CONFIGS)
def of_family(request: pytest.FixtureRequest, folders: Path) -> Callable[..., Any]:
    """of_family(**settings) -> the processor of a family, one that reads text alone among them."""
    config = CONFIGS[request.param]
    make = PROCESSORS.get(request.param).from_pretrained
    return partial(make, folders / request.param, config=config and config())


def talk(questions: list[str], answers: list[str], picture: str | None) -> dict[str, Any]:
    first = [{"type": "text", "text": questions[0]}]
    if picture is not None:
        first.insert(0, {"type": "image", "path": picture})
    asked = [first, *questions[1:]]
    turns = [turn for pair in zip(asked, answers, strict=True) for turn in pair]
    roles = ("user", "assistant") * len(answers)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}


QUESTIONS = ["first?", "second?", "third?"]
ANSWERS = {
    "one token": ["A", "B", "C"],
    "a space first": [" A", " red", " 3"],
    "empty": ["", "B", ""],
    "the question": QUESTIONS,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answers_and_nothing_else(of_family: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """Three turns with a picture in the first; each target stands where the token before it is read."""
    processor, answers = of_family(), ANSWERS[name]
    sees = hasattr(processor, "image_token")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    raw = talk(QUESTIONS, answers, "a.png" if sees else None)
    sample = processor(parse_row(raw, tmp_path), RowRef("test", 0, 0, "row"))
    learnt = sample.labels != -100
    decode, encode = processor.tokenizer.decode, processor.tokenizer.encode
    assert decode(sample.labels[learnt]) == "".join(answer + END for answer in answers)
    # the token after each header's line break is the first target
    header = encode("<|im_start|>assistant\n", add_special_tokens=False)
    ids = sample.input_ids.tolist()
    starts = [i + len(header) for i in range(len(ids)) if ids[i : i + len(header)] == header]
    expected = torch.zeros_like(learnt)
    for start, answer in zip(starts, answers, strict=True):
        count = len(encode(answer + END, add_special_tokens=False))
        expected[start - 1 : start - 1 + count] = True
    assert torch.equal(learnt, expected)
    at = learnt.nonzero().flatten()
    assert torch.equal(sample.labels[at], sample.input_ids[at + 1])
    assert torch.equal(sample.loss_weights, learnt.float())
    if name == "one token":
        assert sample.supervised == 6
    if sees:
        slots = sample.input_ids == processor.image_token
        assert slots.any()
        assert not learnt[slots].any()
        assert not torch.isin(sample.labels[learnt], sample.input_ids[slots]).any()


def batches(job: Any, make: Callable[[], Any]) -> list[PackedBatch]:
    loader = Loader(job, make, dp_rank=0, dp_size=1)
    return [micro for micros in steps_of_epoch(loader) for micro in micros]


def with_pad(folder: Path, to: Path, pad: str) -> Path:
    """A copy of a processor's folder whose tokenizer pads with another token."""
    shutil.copytree(folder, to)
    config = json.loads((to / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": pad}))
    return to


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_pad_token_is_a_token_like_others(
    folders: Path, tmp_path: Path, family: str, packing: bool
) -> None:
    """Pad = end marker, and pad 0 with token 0 in the text: all positions count, all ends are learnt."""
    rows = [{"id": f"r{i}", **talk(["q!", "what!"], ["!", f"{i}!!"], None)} for i in range(4)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    job = make_job(path, packing=packing, packing_length=128, max_length=128, num_logical_shards=1)
    seen = []
    for pad, pad_id in (("<|endoftext|>", IDS["<|endoftext|>"]), (END, IDS[END]), ("!", 0)):
        folder = with_pad(folders / family, tmp_path / f"pad{pad_id}", pad)
        config = CONFIGS[family]
        processor = PROCESSORS.get(family).from_pretrained(folder, config=config and config())
        assert processor.tokenizer.pad_token_id == pad_id
        micros = batches(job, lambda processor=processor: processor)
        parsed = [parse_row(raw, tmp_path) for raw in rows]
        lengths = [len(processor(of, RowRef("test", 0, 0, "row"))) for of in parsed]
        assert sum(micro.num_tokens for micro in micros) == sum(lengths)
        targets = torch.cat([micro.labels[micro.labels != -100] for micro in micros])
        assert int((targets == IDS[END]).sum()) == 8
        assert int((targets == 0).sum()) == 12   # one, and two, in each row
        assert sum(sum(micro.row_supervised()) for micro in micros) == len(targets)
        seen.append([(m.input_ids.tolist(), m.labels.tolist(), m.segments.lengths()) for m in micros])
    assert seen[0] == seen[1] == seen[2]


def test_rows_without_an_answer_are_kept_and_counted(
    of_family: Callable[..., Any], tmp_path: Path
) -> None:
    """Nothing to learn from them, and they are in the batch, by name."""
    question = {"messages": [{"role": "user", "content": "only a question"}]}
    rows = [{"id": "q", **question}, {"id": "a", **talk(["q?"], ["red"], None)}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    job = make_job(path, packing=False, shuffle=False, max_length=64, num_logical_shards=1)
    loader = Loader(job, of_family, dp_rank=0, dp_size=1)
    steps = steps_of_epoch(loader)
    assert ids_of(steps) == ["q", "a"]
    first, second = (micros[0] for micros in steps)
    assert first.num_tokens > 0
    assert (first.row_supervised(), second.row_supervised()) == ([0], [2])
    assert float(first.loss_weights.sum()) == 0.0
    assert (first.labels == -100).all()
