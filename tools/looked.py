"""Does an exported model answer from the picture? Asked with transformers alone, on the held-out sample rows.

    lmms-engine export runs/qwen3_vl-smoke --dtype fp32
    python tools/looked.py runs/qwen3_vl-smoke/export

Rows with one question about one picture are read twice: with their own picture, and with that of another row
of the same kind that has another answer. A model that looks has a much higher loss on its answers the second
time; one that guesses from the question does not. For colours and shapes its greedy answers are also counted.
Prints a table and one line of JSON; the exit status is 1 if a figure is below its threshold.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoProcessor

ANSWERED = ("colour", "shape")  # the kinds whose greedy answers are counted
END = "<|im_end|>"
MAX_NEW_TOKENS = 4  # an answer of the sample data is one token and the end marker


@dataclass(frozen=True)
class Question:
    """A row with one question about one picture. messages: up to the question; picture: file."""

    kind: str
    messages: list[dict[str, Any]]
    answer: str
    picture: Path


@dataclass(frozen=True)
class Findings:
    """Losses are nats per answer token (with its end marker); right is a fraction of the answered rows."""

    rows: int
    loss: float
    loss_swapped: float
    answered: int
    right: float

    @property
    def ratio(self) -> float:
        """How many times higher the loss is with another row's picture."""
        return self.loss_swapped / self.loss


def read_questions(data: Path, split: str = "heldout") -> list[Question]:
    """The rows of `<data>/<split>.jsonl` that have one picture and one answer."""
    found = []
    for line in (data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        *asked, last = row["messages"]
        parts = [part for message in asked for part in message["content"]]
        pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        other = [part for part in parts if part["type"] not in ("image_url", "text")]
        if len(pictures) == 1 and not other and [m["role"] for m in asked].count("user") == 1:
            messages = [{**m, "content": [_plain(part) for part in m["content"]]} for m in asked]
            answer = last["content"][0]["text"]
            found.append(Question(row["meta"]["kind"], messages, answer, data / pictures[0]))
    return found


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image_url" else part


def swapped_pictures(questions: list[Question]) -> list[Path]:
    """For each question the picture of another one of its kind with a different answer; each is used once."""
    pictures: list[Path] = [question.picture for question in questions]
    for kind in dict.fromkeys(question.kind for question in questions):
        # In order of answers, a turn by the size of the largest group leaves nobody in its own group.
        members = [n for n, question in enumerate(questions) if question.kind == kind]
        members.sort(key=lambda n: questions[n].answer)
        largest = max(Counter(questions[n].answer for n in members).values())
        if 2 * largest > len(members):
            raise ValueError(f"{kind}: one answer has more than half of the {len(members)} rows")
        for n, other in zip(members, members[largest:] + members[:largest], strict=True):
            pictures[n] = questions[other].picture
    return pictures


class Reader:
    """An exported folder, opened by transformers as anybody would; float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    def _inputs(self, text: str, picture: Path) -> dict[str, Any]:
        with Image.open(picture) as image:
            return dict(self.processor(text=[text], images=[image.convert("RGB")], return_tensors="pt"))

    def _prompt(self, question: Question) -> str:
        return self.processor.apply_chat_template(
            question.messages, tokenize=False, add_generation_prompt=True
        )

    @torch.inference_mode()
    def losses(self, question: Question, picture: Path) -> list[float]:
        """Loss of each token of the true answer and its end marker, given `picture`."""
        prompt = self._prompt(question)
        before = self._inputs(prompt, picture)["input_ids"]
        inputs = self._inputs(prompt + question.answer + END, picture)
        ids, start = inputs["input_ids"], before.shape[1]
        if not torch.equal(ids[:, :start], before):
            raise ValueError(f"the prompt's tokens change when {question.answer!r} follows")
        logits = self.model(**inputs).logits[0, start - 1 : -1]
        return functional.cross_entropy(logits, ids[0, start:], reduction="none").tolist()

    @torch.inference_mode()
    def answer(self, question: Question) -> str:
        """The greedy answer."""
        inputs = self._inputs(self._prompt(question), question.picture)
        (ids,) = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=self.processor.tokenizer.convert_tokens_to_ids(END),
            pad_token_id=self.processor.tokenizer.pad_token_id,
        )
        text = self.processor.decode(ids[inputs["input_ids"].shape[1] :])
        return text.removesuffix(END)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def look(reader: Reader, questions: list[Question]) -> dict[str, Findings]:
    """Findings for each kind of question, and for `all` of them."""
    own = [reader.losses(question, question.picture) for question in questions]
    swapped = [
        reader.losses(question, picture)
        for question, picture in zip(questions, swapped_pictures(questions), strict=True)
    ]
    right = {
        n: reader.answer(question) == question.answer
        for n, question in enumerate(questions)
        if question.kind in ANSWERED
    }
    kinds = sorted({question.kind for question in questions})
    findings = {}
    for name, members in {"all": kinds, **{kind: [kind] for kind in kinds}}.items():
        chosen = [n for n, question in enumerate(questions) if question.kind in members]
        answered = [n for n in chosen if n in right]
        findings[name] = Findings(
            rows=len(chosen),
            loss=_mean(loss for n in chosen for loss in own[n]),
            loss_swapped=_mean(loss for n in chosen for loss in swapped[n]),
            answered=len(answered),
            right=_mean(right[n] for n in answered) if answered else float("nan"),
        )
    return findings


def shortfalls(findings: dict[str, Findings], min_right: float, min_ratio: float) -> list[str]:
    """What is below its threshold, over all kinds; empty if the model looked."""
    total, found = findings["all"], []
    if not total.right >= min_right:  # also true of a nan
        found.append(f"{total.right:.1%} of colours and shapes are right; at least {min_right:.0%} wanted")
    if not total.ratio >= min_ratio:
        found.append(f"other pictures raise the loss {total.ratio:.2f} times; at least {min_ratio:g} wanted")
    return found


def table(findings: dict[str, Findings]) -> str:
    """The findings for people."""
    lines = [f"{'kind':<10}{'rows':>6}{'loss':>9}{'swapped':>9}{'ratio':>8}{'right':>8}"]
    for name, found in findings.items():
        right = f"{found.right:.1%}" if found.answered else "-"
        lines.append(
            f"{name:<10}{found.rows:>6}{found.loss:>9.4f}{found.loss_swapped:>9.4f}"
            f"{found.ratio:>8.1f}{right:>8}"
        )
    return "\n".join(lines)


def as_dict(findings: dict[str, Findings]) -> dict[str, dict[str, Any]]:
    """The findings for programs; what was not counted is null."""
    return {
        name: {**asdict(found), "ratio": found.ratio, "right": found.right if found.answered else None}
        for name, found in findings.items()
    }


def main(
    export: Annotated[Path, typer.Argument(help="Folder written by `lmms-engine export`.")],
    data: Annotated[Path, typer.Option(help="Sample data with heldout.jsonl.")] = Path("data/shapes"),
    min_right: Annotated[float, typer.Option(help="Least share of right colours and shapes.")] = 0.75,
    min_ratio: Annotated[float, typer.Option(help="Least swapped loss over own loss.")] = 2.0,
) -> None:
    """Measure whether an exported model answers from the picture."""
    findings = look(Reader(export), read_questions(data))
    print(table(findings))
    print(json.dumps(as_dict(findings)))
    failed = shortfalls(findings, min_right, min_ratio)
    for line in failed:
        print(line, file=sys.stderr)
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
