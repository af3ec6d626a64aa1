"""The rows say what the media show: each held-out answer is worked out again from pixels and samples."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.chats import KINDS, SHARES, Media, answers, corpus, facts, kinds_for
from data_prep.clips import read_clip
from data_prep.shapes import COLOURS, SHAPES, Shape, holds_colour, picture
from data_prep.tones import SAMPLE_RATE, read_wav


def parts(row: dict[str, Any], type_: str) -> list[Any]:
    """The values of all parts of one type, in order of appearance."""
    return [
        part[type_] for message in row["messages"] for part in message["content"] if part["type"] == type_
    ]


def images(row: dict[str, Any], folder: Path) -> list[Image.Image]:
    return [Image.open(folder / part["url"]).convert("RGB") for part in parts(row, "image_url")]


def question(row: dict[str, Any]) -> str:
    return row["messages"][-2]["content"][-1]["text"]


def mask(pixels: np.ndarray) -> np.ndarray:
    """True where a picture [height, width, 3] differs from its background, whose colour the corner has."""
    pixels = pixels.astype(int)
    return np.abs(pixels - pixels[0, 0]).max(axis=-1) > 60


def middle(pixels: np.ndarray) -> tuple[float, float]:
    """Middle (x, y) of what is drawn, as fractions of width and height."""
    y, x = np.nonzero(mask(pixels))
    return (x.min() + x.max() + 1) / 2 / pixels.shape[1], (y.min() + y.max() + 1) / 2 / pixels.shape[0]


def shown_shape(image: Image.Image) -> str:
    drawn = mask(np.asarray(image))
    y, x = np.nonzero(drawn)
    box = drawn[y.min() : y.max() + 1, x.min() : x.max() + 1]

    def filled(across: float, down: float) -> bool:
        return bool(box[int(down * box.shape[0]), int(across * box.shape[1])])

    if filled(0.06, 0.06):
        return "square"
    if filled(0.25, 0.25):
        return "circle"
    return "triangle" if filled(0.12, 0.92) else "cross"


def shown_colour(image: Image.Image) -> str:
    shares = {colour: holds_colour(image, colour) for colour in COLOURS}
    best = max(shares, key=shares.__getitem__)
    assert shares[best] > 0.05
    assert sum(shares.values()) - shares[best] < 0.02
    return best


def shown_count(image: Image.Image) -> str:
    drawn = mask(np.asarray(image))
    height, width = drawn.shape
    quarters = drawn[: height // 2 * 2, : width // 2 * 2].reshape(2, height // 2, 2, width // 2)
    return str(int((quarters.mean(axis=(1, 3)) > 0.05).sum()))


def shown_place(pixels: np.ndarray) -> str:
    x, y = middle(pixels)
    across, down = x - 0.5, y - 0.5
    if abs(across) > abs(down):
        return "left" if across < 0 else "right"
    return "top" if down < 0 else "bottom"


def shown_motion(frames: list[np.ndarray]) -> str:
    (x0, y0), (x1, y1) = middle(frames[0]), middle(frames[-1])
    if abs(x1 - x0) > abs(y1 - y0):
        return "left" if x1 < x0 else "right"
    return "up" if y1 < y0 else "down"


def seen(row: dict[str, Any], folder: Path) -> str:
    """The answer to a row's last question, from the media alone."""
    kind, text = row["meta"]["kind"], question(row)
    if kind == "text":
        return dict(facts())[text]
    if kind == "clip":
        frames = read_clip(folder / parts(row, "video_url")[0]["url"])[0]
        return shown_motion(frames) if "move?" in text else shown_colour(Image.fromarray(frames[-1]))
    shown = images(row, folder)
    if kind == "count":
        return shown_count(shown[0])
    if kind == "position":
        return shown_place(np.asarray(shown[0]))
    if kind == "pictures":
        colour, shape = re.search(r"the (\w+) (\w+),", text).groups()
        found = [shown_colour(image) == colour and shown_shape(image) == shape for image in shown]
        assert sum(found) == 1
        return ("first", "second")[found.index(True)]
    return shown_shape(shown[-1]) if kind == "shape" else shown_colour(shown[-1])


@pytest.mark.parametrize("stem", ["train", "heldout"])
def test_every_answer_can_be_seen(stem: str, rows: dict[str, list[dict[str, Any]]], sample: Path) -> None:
    chats = rows[stem]
    assert {row["meta"]["kind"] for row in chats} == set(SHARES)
    assert [seen(row, sample) for row in chats] == [row["meta"]["answer"] for row in chats]


def test_the_first_turn_of_several_is_right_too(rows: dict[str, list[dict[str, Any]]], sample: Path) -> None:
    chats = [row for row in rows["train"] if row["meta"]["kind"] == "turns"]
    assert {len(images(row, sample)) for row in chats} == {1, 2}
    for row in chats:
        first = next(message for message in row["messages"] if message["role"] == "assistant")
        assert first["content"][0]["text"] == shown_shape(images(row, sample)[0])


@pytest.mark.parametrize("stem", ["audio", "audio_heldout"])
def test_every_answer_can_be_heard(stem: str, rows: dict[str, list[dict[str, Any]]], sample: Path) -> None:
    for row in rows[stem]:
        tone = read_wav(sample / parts(row, "audio_url")[0]["url"]).astype(float)
        if "beeps" in question(row):
            tenths = np.abs(tone[: len(tone) // 800 * 800].reshape(-1, 800)).max(axis=1) > 100  # of 50 ms
            heard = str(int((np.diff(tenths.astype(int), prepend=0) == 1).sum()))
        else:
            pitch = np.argmax(np.abs(np.fft.rfft(tone))) * SAMPLE_RATE / len(tone)
            heard = "low" if pitch < 600 else "high"
        assert heard == row["meta"]["answer"]


def test_colours_shapes_and_answers_are_all_there(rows: dict[str, list[dict[str, Any]]]) -> None:
    given = {
        kind: {row["meta"]["answer"] for row in rows["train"] if row["meta"]["kind"] == kind}
        for kind in SHARES
    }
    assert given["colour"] == set(COLOURS)
    assert given["shape"] == set(SHAPES)
    assert given["count"] == {"1", "2", "3", "4"}
    assert given["pictures"] == {"first", "second"}
    assert set().union(*given.values()) <= set(answers())


def test_questions_are_those_that_the_tokenizer_knows(rows: dict[str, list[dict[str, Any]]]) -> None:
    known = {word for text in corpus() for word in re.findall(r"\w+|[^\w\s]", text)}
    asked = {
        word
        for chats in rows.values()
        for row in chats
        for text in parts(row, "text")
        for word in re.findall(r"\w+|[^\w\s]", text)
    }
    assert asked <= known | set(answers())


def test_some_rows_have_a_system_turn_and_all_end_with_an_answer(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    roles = [[message["role"] for message in row["messages"]] for row in rows["train"]]
    share = sum(turns[0] == "system" for turns in roles) / len(roles)
    assert 0.03 < share < 0.2
    assert all(turns[-2:] == ["user", "assistant"] for turns in roles)


@pytest.mark.parametrize("num_rows", [8, 9, 50, 2000])
def test_kinds_follow_their_shares(num_rows: int) -> None:
    kinds = kinds_for(num_rows, random.Random(0))
    assert len(kinds) == num_rows
    assert set(kinds) == set(SHARES) == set(KINDS) - {"tone", "talk", "drawing"}
    assert all(kinds.count(kind) <= max(1, share * num_rows + 8) for kind, share in SHARES.items())


def test_equal_media_are_never_written_twice(tmp_path: Path) -> None:
    media = Media(tmp_path)
    drawn = iter([0, 0, 0, 1])
    rng = random.Random(0)

    def draw() -> Image.Image:
        return picture((64, 64), "white", [Shape("circle", "red", (32 + next(drawn), 32), 20)])

    first, second = media.image("a", rng, draw), media.image("b", rng, draw)
    pixels = [np.asarray(Image.open(tmp_path / part["image_url"]["url"])) for part in (first, second)]
    assert not np.array_equal(*pixels)
    with pytest.raises(AssertionError, match="too few different members"):
        media.image("c", rng, lambda: picture((64, 64), "white", [Shape("circle", "red", (32, 32), 20)]))


@pytest.mark.parametrize("stem", ["text", "text_heldout"])
def test_talks_ask_facts_in_turn(rows: dict[str, list[dict[str, Any]]], stem: str) -> None:
    known = dict(facts())
    lengths = set()
    for row in rows[stem]:
        said = [m["content"][0]["text"] for m in row["messages"] if m["role"] != "system"]
        assert {part["type"] for m in row["messages"] for part in m["content"]} == {"text"}
        questions, replies = said[::2], said[1::2]
        assert [known[question] for question in questions] == replies
        assert len(set(questions)) == len(questions)
        lengths.add(len(questions))
    assert len(lengths) > 1
    assert lengths <= set(range(1, 6))
