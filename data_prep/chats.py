"""Question-answer chats about generated pictures, clips and tones: what the sample data ask, and how.

Every answer is one word, and nearly every answer can be had only by looking (or listening). Kinds:

    colour, shape       one large shape; what colour, what shape
    count, position     one to four equal shapes; one shape near an edge
    pictures            two pictures in one question: which of them has the red circle
    turns               several questions about one picture, or a second picture in the second turn
    clip                an MP4 of a moving shape: where to, or what colour
    text                no picture: small sums, mixed colours, opposites
    talk                several of these questions in one conversation (in files of their own, for recipes
                        without pictures)
    tone                a WAV of beeps: how many, or how high (in files of their own, for recipes with sound)
    drawing             the other way round: asked for is a colour and a shape, the answer is a small picture
                        (in files of their own, for recipes that draw)

A kind is a function of (random generator, media writer, file stem) that returns the messages in OpenAI chat
form.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.clips import write_clip
from data_prep.shapes import BACKGROUNDS, COLOURS, SHAPES, Shape, picture
from data_prep.tones import beeps, write_wav

Message = dict[str, Any]

# Share of the rows of each kind. Single large shapes dominate: they are what a tiny model learns first.
SHARES: dict[str, float] = {
    "colour": 0.36,
    "shape": 0.36,
    "count": 0.06,
    "position": 0.06,
    "pictures": 0.04,
    "turns": 0.06,
    "clip": 0.02,
    "text": 0.04,
}

# Picture sizes (width, height) and how often: several grids, most of them small.
_SIZES: dict[tuple[int, int], int] = {(64, 64): 14, (96, 64): 2, (64, 96): 2, (80, 64): 1, (96, 96): 1}
_DRAWING_SIDE = 16
_FPS = 8
_DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
_PLACES: dict[str, tuple[float, float]] = {
    "left": (0.25, 0.5),
    "right": (0.75, 0.5),
    "top": (0.5, 0.25),
    "bottom": (0.5, 0.75),
}  # fractions of width and height
_PITCHES: dict[str, tuple[int, int]] = {"low": (180, 300), "high": (900, 1500)}  # Hz
_COUNTS = ("1", "2", "3", "4")
_ORDINALS = ("first", "second")

SYSTEM = "Answer in one word."
QUESTIONS: dict[str, tuple[str, ...]] = {
    "colour": ("What colour is the {shape}?", "Name the colour of the {shape}."),
    "shape": ("Which shape is in the picture?", "What shape is {colour}?"),
    "count": ("How many {shape}s are there?", "Count the {shape}s."),
    "position": ("Where is the {shape}?", "On which side is the {shape}?"),
    "pictures": ("Which picture has the {colour} {shape}, first or second?",),
    "clip_motion": ("Which way does the {shape} move?",),
    "clip_colour": ("What colour is the moving {shape}?",),
    "tone_count": ("How many beeps are there?",),
    "tone_pitch": ("Is the tone high or low?",),
    "sum": ("What is {a} plus {b}?",),
    "mix": ("Which colour do {a} and {b} make?",),
    "opposite": ("What is the opposite of {a}?",),
}
_MIXES = {("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple"}
_OPPOSITES = (("left", "right"), ("top", "bottom"), ("up", "down"), ("high", "low"), ("first", "last"))


class Media:
    """Writes pictures, clips and tones under one folder and hands out their relative paths.

    No two pictures and no two clips of one Media are equal, so what is held out never occurs in training.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[bytes] = set()
        for name in ("images", "videos", "audio"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def image(
        self, stem: str, rng: random.Random, draw: Callable[[], Image.Image], *, jpeg: float = 0.25
    ) -> Message:
        """A content part for a new picture: a JPEG with probability `jpeg`, else a PNG."""
        image = self._new(draw, lambda drawn: drawn.tobytes())
        if rng.random() < jpeg:
            url = f"images/{stem}.jpg"
            image.save(self._folder / url, quality=90, subsampling=0)
        else:
            url = f"images/{stem}.png"
            image.save(self._folder / url, compress_level=6)
        return {"type": "image_url", "image_url": {"url": url}}

    def clip(self, stem: str, draw: Callable[[], list[np.ndarray]]) -> Message:
        """A content part for a new clip at 8 frames per second."""
        frames = self._new(draw, lambda drawn: b"".join(frame.tobytes() for frame in drawn))
        url = f"videos/{stem}.mp4"
        write_clip(self._folder / url, frames, [Fraction(i, _FPS) for i in range(len(frames))])
        return {"type": "video_url", "video_url": {"url": url}}

    def tone(self, stem: str, draw: Callable[[], np.ndarray]) -> Message:
        """A content part for a new WAV file."""
        url = f"audio/{stem}.wav"
        write_wav(self._folder / url, self._new(draw, lambda drawn: drawn.tobytes()))
        return {"type": "audio_url", "audio_url": {"url": url}}

    def _new(self, draw: Callable[[], Any], content: Callable[[Any], bytes]) -> Any:
        for _ in range(1000):
            drawn = draw()
            key = content(drawn)
            if key not in self._seen:
                self._seen.add(key)
                return drawn
        raise AssertionError("a kind of media has too few different members for this many rows")


def make_row(kind: str, row_id: str, rng: random.Random, media: Media) -> dict[str, Any]:
    """One row: `id`, `messages`, and `meta` with the kind and the last answer."""
    messages = KINDS[kind](rng, media, row_id)
    if kind == "drawing":
        asked = messages[0]["content"][0]["text"]
        return {"id": row_id, "messages": messages, "meta": {"kind": kind, "answer": asked}}
    if rng.random() < 0.1:
        messages = [{"role": "system", "content": [_text(SYSTEM)]}, *messages]
    answer = messages[-1]["content"][0]["text"]
    return {"id": row_id, "messages": messages, "meta": {"kind": kind, "answer": answer}}


def corpus() -> list[str]:
    """Every sentence that rows can hold, for training the tokenizer; independent of seed and row count."""
    sums = [str(n) for n in range(10)]
    opposites = [word for pair in _OPPOSITES for word in pair]
    words = {
        "colour": list(COLOURS),
        "shape": list(SHAPES),
        "a": [*COLOURS, *sums, *opposites],
        "b": [*COLOURS, *sums],
    }
    texts = [SYSTEM]
    for templates in QUESTIONS.values():
        for template in templates:
            fields = [name for name in words if "{" + name + "}" in template]
            for n in range(max(len(words[name]) for name in fields) if fields else 1):
                texts.append(template.format(**{name: words[name][n % len(words[name])] for name in fields}))
    return texts


def answers() -> list[str]:
    """Every word that an assistant turn can hold; the tokenizer keeps each whole."""
    opposites = [word for pair in _OPPOSITES for word in pair]
    words = [
        *COLOURS,
        *SHAPES,
        *_DIRECTIONS,
        *_PLACES,
        *_PITCHES,
        *_ORDINALS,
        *opposites,
        *map(str, range(10)),
    ]
    return list(dict.fromkeys(words))


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _ask(*parts: Message | str) -> Message:
    return {"role": "user", "content": [_text(part) if isinstance(part, str) else part for part in parts]}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": [_text(text)]}


def _question(kind: str, rng: random.Random, **words: str) -> str:
    return rng.choice(QUESTIONS[kind]).format(**words)


def _size(rng: random.Random) -> tuple[int, int]:
    return rng.choices(list(_SIZES), weights=list(_SIZES.values()))[0]


def _single(rng: random.Random, kind: str, colour: str) -> Image.Image:
    """One shape that fills most of the picture."""
    width, height = _size(rng)
    radius = rng.uniform(0.36, 0.46) * min(width, height)
    room = 0.5 * min(width, height) - radius
    centre = (width / 2 + rng.uniform(-room, room), height / 2 + rng.uniform(-room, room))
    return picture((width, height), rng.choice(list(BACKGROUNDS)), [Shape(kind, colour, centre, radius)])


def _one_shape(question: str) -> Callable[[random.Random, Media, str], list[Message]]:
    def chat(rng: random.Random, media: Media, stem: str) -> list[Message]:
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        image = media.image(stem, rng, lambda: _single(rng, shape, colour))
        text = _question(question, rng, shape=shape, colour=colour)
        return [_ask(image, text), _answer(colour if question == "colour" else shape)]

    return chat


def _count(rng: random.Random, media: Media, stem: str) -> list[Message]:
    shape, colour, count = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(_COUNTS)

    def draw() -> Image.Image:
        # One quarter of the picture each, so that shapes never overlap.
        width, height = _size(rng)
        background = rng.choice(list(BACKGROUNDS))
        shapes = []
        for cell in rng.sample(range(4), int(count)):
            radius = rng.uniform(9, 13)
            x, y = (cell % 2 + 0.5) * width / 2, (cell // 2 + 0.5) * height / 2
            shapes.append(Shape(shape, colour, (x + rng.uniform(-2, 2), y + rng.uniform(-2, 2)), radius))
        return picture((width, height), background, shapes)

    return [_ask(media.image(stem, rng, draw), _question("count", rng, shape=shape)), _answer(count)]


def _position(rng: random.Random, media: Media, stem: str) -> list[Message]:
    shape, colour, place = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(_PLACES))

    def draw() -> Image.Image:
        width, height = _size(rng)
        x, y = _PLACES[place][0] * width, _PLACES[place][1] * height
        centre = (x + rng.uniform(-3, 3), y + rng.uniform(-3, 3))
        radius = rng.uniform(9, 13)
        return picture((width, height), rng.choice(list(BACKGROUNDS)), [Shape(shape, colour, centre, radius)])

    return [_ask(media.image(stem, rng, draw), _question("position", rng, shape=shape)), _answer(place)]


def _pictures(rng: random.Random, media: Media, stem: str) -> list[Message]:
    colours = rng.sample(list(COLOURS), 2)
    shapes = rng.sample(SHAPES, 2)
    images = [
        media.image(f"{stem}-{n}", rng, lambda s=shape, c=colour: _single(rng, s, c))
        for n, (shape, colour) in enumerate(zip(shapes, colours, strict=True), start=1)
    ]
    wanted = rng.randrange(2)
    text = _question("pictures", rng, shape=shapes[wanted], colour=colours[wanted])
    return [_ask(*images, text), _answer(_ORDINALS[wanted])]


def _turns(rng: random.Random, media: Media, stem: str) -> list[Message]:
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    first = media.image(f"{stem}-1", rng, lambda: _single(rng, shape, colour))
    if rng.random() < 0.5:  # a new picture in the second turn
        shape2, colour2 = rng.choice(SHAPES), rng.choice(list(COLOURS))
        second = media.image(f"{stem}-2", rng, lambda: _single(rng, shape2, colour2))
        return [
            _ask(first, QUESTIONS["shape"][0]),
            _answer(shape),
            _ask(second, _question("colour", rng, shape=shape2)),
            _answer(colour2),
        ]
    return [
        _ask(first, QUESTIONS["shape"][0]),
        _answer(shape),
        _ask(_question("colour", rng, shape=shape)),
        _answer(colour),
    ]


def _clip(rng: random.Random, media: Media, stem: str) -> list[Message]:
    shape, colour, direction = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(_DIRECTIONS))

    def draw() -> list[np.ndarray]:
        background, radius = rng.choice(list(BACKGROUNDS)), rng.uniform(11, 15)
        num_frames = rng.randint(_FPS, 2 * _FPS)
        dx, dy = _DIRECTIONS[direction]
        aside = rng.uniform(-8, 8)  # the path lies beside the middle by this much
        frames = []
        for n in range(num_frames):
            along = 34 * (n / (num_frames - 1) - 0.5)
            centre = (32 + dx * along + abs(dy) * aside, 32 + dy * along + abs(dx) * aside)
            frames.append(np.asarray(picture((64, 64), background, [Shape(shape, colour, centre, radius)])))
        return frames

    kind, answer = rng.choice([("clip_motion", direction), ("clip_colour", colour)])
    return [_ask(media.clip(stem, draw), _question(kind, rng, shape=shape)), _answer(answer)]


def _fact(rng: random.Random, media: Media, stem: str) -> list[Message]:
    text, answer = rng.choice(list(facts()))
    return [_ask(text), _answer(answer)]


def _talk(rng: random.Random, media: Media, stem: str) -> list[Message]:
    asked = rng.sample(list(facts()), rng.randint(1, 5))
    return [message for text, answer in asked for message in (_ask(text), _answer(answer))]


def facts() -> Iterator[tuple[str, str]]:
    """All text-only questions with their answers."""
    for a in range(1, 5):
        for b in range(1, 5):
            yield QUESTIONS["sum"][0].format(a=a, b=b), str(a + b)
    for (a, b), answer in _MIXES.items():
        yield QUESTIONS["mix"][0].format(a=a, b=b), answer
    for pair in _OPPOSITES:
        for a, answer in (pair, pair[::-1]):
            yield QUESTIONS["opposite"][0].format(a=a), answer


def _tone(rng: random.Random, media: Media, stem: str) -> list[Message]:
    if rng.random() < 0.5:
        count = rng.choice(_COUNTS)
        tone = media.tone(stem, lambda: beeps([rng.uniform(300, 900)] * int(count), seconds=0.15))
        return [_ask(tone, _question("tone_count", rng)), _answer(count)]
    pitch = rng.choice(list(_PITCHES))
    tone = media.tone(stem, lambda: beeps([rng.uniform(*_PITCHES[pitch])], seconds=0.5))
    return [_ask(tone, _question("tone_pitch", rng)), _answer(pitch)]


def drawing_classes() -> list[str]:
    """What can be drawn, by number: every colour with every shape."""
    return [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]


def _drawing(rng: random.Random, media: Media, stem: str) -> list[Message]:
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))

    def draw() -> Image.Image:
        middle = _DRAWING_SIDE / 2
        radius = rng.uniform(0.3, 0.45) * _DRAWING_SIDE
        centre = (middle + rng.uniform(-1.5, 1.5), middle + rng.uniform(-1.5, 1.5))
        return picture((_DRAWING_SIDE, _DRAWING_SIDE), "white", [Shape(shape, colour, centre, radius)])

    image = media.image(stem, rng, draw, jpeg=0.0)   # its blocks are as large as the shapes
    return [_ask(f"{colour} {shape}"), {"role": "assistant", "content": [image]}]


KINDS: dict[str, Callable[[random.Random, Media, str], list[Message]]] = {
    "colour": _one_shape("colour"),
    "shape": _one_shape("shape"),
    "count": _count,
    "position": _position,
    "pictures": _pictures,
    "turns": _turns,
    "clip": _clip,
    "text": _fact,
    "talk": _talk,
    "tone": _tone,
    "drawing": _drawing,
}


def kinds_for(num_rows: int, rng: random.Random) -> list[str]:
    """A kind for each of `num_rows` rows, by SHARES, in random order; each kind at least once.

    num_rows must be at least len(SHARES).
    """
    counts = {kind: max(1, math.floor(share * num_rows)) for kind, share in SHARES.items()}
    while (missing := num_rows - sum(counts.values())) != 0:
        commonest = max(counts, key=counts.__getitem__) if missing < 0 else "colour"
        counts[commonest] += 1 if missing > 0 else -1
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return kinds
