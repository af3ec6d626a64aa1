"""Tables of questions about pictures: CSV, TSV, JSON, JSONL or Parquet; open answers or choices."""

from __future__ import annotations

import string
from collections import Counter
from pathlib import Path
from typing import Any

from data_prep.convert.common import (
    Options,
    Records,
    answer,
    as_list,
    as_text,
    ask,
    identified,
    medium,
    need,
    part,
    pick,
    read_records,
)
from lmms_engine.errors import BadRow

IMAGE = ("image", "images", "image_path", "img", "file_name", "picture")
QUESTION = ("question", "query", "prompt")
ANSWER = ("answer", "answers", "multiple_choice_answer", "label")
CHOICES = ("choices", "options")
ID = ("id", "question_id", "index")
LETTERS = string.ascii_uppercase


def records(path: Path) -> Records:
    """The rows as they stand."""
    return read_records(path)


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The picture, the question with its choices by letter, and the answer (by letter if there are choices).

    Of several answers the most frequent is taken, the first of equals.
    """
    question = as_text(need(record, "question", QUESTION, options), "question")
    choices = _choices(record, options)
    reply = _answer(need(record, "answer", ANSWER, options))
    if choices:
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
        question, reply = "\n".join([question, *lines]), _letter(reply, choices)
    pictures = pick(record, "image", IMAGE, options)
    listed = as_list(pictures)
    shown = listed if listed is not None else [] if pictures is None else [pictures]
    content = [*(medium("image", picture) for picture in shown), part(question)]
    return {**identified(record, ID, options), "messages": [ask(*content), answer(reply)]}


def _choices(record: dict[str, Any], options: Options) -> list[str]:
    value = pick(record, "choices", CHOICES, options)
    if value is None:   # a column for each letter
        letters = [letter for letter in LETTERS if record.get(letter) not in (None, "")]
        return [as_text(record[letter], letter) for letter in letters] if letters[:2] == ["A", "B"] else []
    found = as_list(value)
    if not found or len(found) > len(LETTERS):
        raise BadRow("column", f"the choices must be a list of 1 to {len(LETTERS)}, got {str(value)[:60]!r}")
    return [as_text(choice, "choice") for choice in found]


def _answer(value: Any) -> str:
    found = as_list(value)
    if found is None:
        return as_text(value, "answer")
    texts = [as_text(item.get("answer") if isinstance(item, dict) else item, "answer") for item in found]
    if not texts:
        raise BadRow("column", "the list of answers is empty")
    return Counter(texts).most_common(1)[0][0]


def _letter(reply: str, choices: list[str]) -> str:
    """The letter of an answer given as letter, number from 0, or text of a choice."""
    if reply in choices:
        return LETTERS[choices.index(reply)]
    if len(reply) == 1 and reply in LETTERS[: len(choices)]:
        return reply
    if reply.isdecimal() and int(reply) < len(choices):
        return LETTERS[int(reply)]
    raise BadRow("column", f"the answer {reply!r} is none of the choices: {', '.join(choices)}")
