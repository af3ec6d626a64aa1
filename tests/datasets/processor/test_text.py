"""Rows to samples for models that read text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.tokenizer import IDS, build_tokenizer
from lmms_engine.datasets.collate import collate
from lmms_engine.datasets.processor import PROCESSORS
from lmms_engine.datasets.processor.text import TextProcessor
from lmms_engine.datasets.schema import parse_row
from lmms_engine.errors import BadRow, UserError
from lmms_engine.segments import RowRef

REF = RowRef("text", 0, 0, "row")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(path)
    return path


def row(*turns: Any) -> Any:
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return parse_row({"messages": messages}, Path("."))


def test_answers_are_the_targets(folder: Path) -> None:
    processor = PROCESSORS.get("qwen3_moe").from_pretrained(folder)
    sample = processor(row("What is 1 plus 2?", "3", "What is the opposite of up?", "down"), REF)
    text = processor.tokenizer.decode(sample.input_ids)
    assert text == (
        "<|im_start|>user\nWhat is 1 plus 2?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\nWhat is the opposite of up?<|im_end|>\n<|im_start|>assistant\ndown<|im_end|>\n"
    )
    targets = sample.labels[sample.loss_weights > 0]
    assert processor.tokenizer.decode(targets) == "3<|im_end|>down<|im_end|>"
    assert sample.supervised == 4
    at = (sample.labels != -100).nonzero().flatten()
    assert torch.equal(sample.input_ids[at + 1], targets)   # each the token after its position
    assert torch.equal(sample.position_ids, torch.arange(len(sample)))
    assert not sample.truncated
    assert not sample.media


def test_packs_without_a_stand_in_and_an_empty_one(folder: Path) -> None:
    processor = TextProcessor.from_pretrained(folder)
    samples = [processor(row("What is 1 plus 1?", "2"), REF), processor(row("Which?", "blue"), REF)]
    batch = collate(samples, processor)
    assert batch.segments.lengths() == [len(sample) for sample in samples]
    assert batch.position_ids.ndim == 1
    empty = collate([], processor)
    assert (empty.num_tokens, empty.input_ids.numel(), float(empty.loss_weights.sum())) == (0, 1, 0.0)


def test_truncation_drops_whole_turns(folder: Path) -> None:
    chat = row("Which?", "blue", "What is 1 plus 2?", "3")
    whole, first = (TextProcessor.from_pretrained(folder)(of, REF) for of in (chat, row("Which?", "blue")))
    for limit in (len(first) - 1, len(first), len(whole) - 2, len(whole)):
        cut = TextProcessor.from_pretrained(folder, max_length=limit, overlong="truncate")
        sample = cut(chat, REF)
        kept = len(whole) if limit == len(whole) else len(first) - 1   # without the line break after it
        assert sample.truncated == (kept < len(whole))
        assert torch.equal(sample.input_ids, whole.input_ids[:kept])
        assert int(sample.labels[-1]) == -100
        assert sample.supervised == (whole.supervised if kept == len(whole) else first.supervised)
    assert cut.fingerprint != TextProcessor.from_pretrained(folder).fingerprint
    short = TextProcessor.from_pretrained(folder, max_length=len(first) - 2, overlong="truncate")
    with pytest.raises(BadRow, match=rf"{len(whole)} tokens, more than {len(first) - 2}, ") as bad:
        short(chat, REF)
    assert bad.value.kind == "overlong"
    with pytest.raises(BadRow, match="no answer to cut at"):
        short(row("Which of the many things that there are do you mean when you ask?"), REF)


def test_media_are_refused(folder: Path) -> None:
    content = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What?"}]
    with pytest.raises(BadRow, match=r"the row holds image .*reads text alone") as caught:
        TextProcessor.from_pretrained(folder)(row(content, "blue"), REF)
    assert caught.value.kind == "unsupported_media"


def test_a_template_of_ones_own(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    processor = TextProcessor.from_pretrained(folder, extra_kwargs={"chat_template": str(template)})
    sample = processor(row("Which?", "blue"), REF)
    assert processor.tokenizer.decode(sample.input_ids).startswith("user: Which?<|im_end|>\nassistant: blue")
    assert int((sample.input_ids == IDS["<|im_end|>"]).sum()) == 2
    processor.save_pretrained(tmp_path / "out")
    assert TextProcessor.from_pretrained(tmp_path / "out").fingerprint == processor.fingerprint


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"chat_templat": "x"}, r"unknown key 'chat_templat' \(legal: chat_template\); did you mean"),
        ({"chat_template": "nowhere.jinja"}, "chat_template='nowhere.jinja': cannot be read"),
    ],
)
def test_settings_that_do_not_exist(folder: Path, extra: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextProcessor.from_pretrained(folder, extra_kwargs=extra)


def test_no_tokenizer_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer can be opened from"):
        TextProcessor.from_pretrained(tmp_path)
