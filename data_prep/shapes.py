"""Pictures of coloured shapes and of readable numbers, drawn with Pillow.

`picture((64, 64), "white", [Shape("circle", "red", (32, 32), 20)])` gives an RGB image. The same arguments
give the same pixels: there is no anti-aliasing and no font. Nothing here draws at random; `chats` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 225),
    "yellow": (240, 220, 40),
    "purple": (140, 45, 170),
    "orange": (250, 140, 20),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "grey": (205, 205, 205),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")


@dataclass(frozen=True)
class Shape:
    """One shape: `kind` of SHAPES, `colour` of COLOURS, centre (x, y) and radius in pixels."""

    kind: str
    colour: str
    centre: tuple[float, float]
    radius: float


def picture(size: tuple[int, int], background: str, shapes: Sequence[Shape]) -> Image.Image:
    """An RGB image of (width, height) pixels with the shapes in order, later ones on top."""
    image = Image.new("RGB", size, BACKGROUNDS[background])
    canvas = ImageDraw.Draw(image)
    for shape in shapes:
        draw_shape(canvas, shape)
    return image


def draw_shape(canvas: ImageDraw.ImageDraw, shape: Shape) -> None:
    """Draw one filled shape; its outline lies within `radius` of the centre, except a square's corners."""
    x, y = shape.centre
    r = shape.radius
    fill = COLOURS[shape.colour]
    if shape.kind == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape.kind == "square":
        s = 0.85 * r  # about the area of the circle, so that size alone does not tell the shapes apart
        canvas.rectangle((x - s, y - s, x + s, y + s), fill=fill)
    elif shape.kind == "triangle":
        corners = [math.radians(angle) for angle in (-90, 30, 150)]
        canvas.polygon([(x + r * math.cos(a), y + r * math.sin(a)) for a in corners], fill=fill)
    elif shape.kind == "cross":
        arm = 0.3 * r
        canvas.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
        canvas.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
    else:
        raise ValueError(f"shape={shape.kind!r}: legal are {', '.join(SHAPES)}")


def holds_colour(image: Image.Image, colour: str, tolerance: int = 40) -> float:
    """Share of pixels whose every channel is within `tolerance` of the named colour (JPEG shifts them)."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.int16)
    return float((np.abs(pixels - np.array(COLOURS[colour])).max(axis=-1) <= tolerance).mean())


# Seven-segment digits: segment name -> (x, y) of its middle on a grid of 2 columns by 4 rows.
_SEGMENTS = {"a": (1, 0), "b": (2, 1), "c": (2, 3), "d": (1, 4), "e": (0, 3), "f": (0, 1), "g": (1, 2)}
_DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcfgd")
_NUM_DIGITS = 3


def number_frame(number: int, size: tuple[int, int] = (96, 64)) -> np.ndarray:
    """A black frame [height, width, 3] uint8 with `number` (0..999) in large white digits.

    The digits survive lossy video coding and `read_number` reads them back, so that a test can ask a decoded
    frame which frame or which second it is.
    """
    if not 0 <= number < 10**_NUM_DIGITS:
        raise ValueError(f"number={number}: legal are 0 to {10**_NUM_DIGITS - 1}")
    image = Image.new("RGB", size, (0, 0, 0))
    canvas = ImageDraw.Draw(image)
    for place, digit in enumerate(f"{number:0{_NUM_DIGITS}d}"):
        for segment in _DIGITS[int(digit)]:
            x, y, unit = _segment_middle(place, segment, size)
            # Horizontal segments lie on even rows, upright ones on odd rows.
            across, along = (0.8, 0.3) if _SEGMENTS[segment][1] % 2 == 0 else (0.3, 0.8)
            box = (x - across * unit, y - along * unit, x + across * unit, y + along * unit)
            canvas.rectangle(box, fill=(255, 255, 255))
    return np.asarray(image).copy()


def read_number(frame: np.ndarray) -> int:
    """The number that `number_frame` drew, from a frame [height, width, 3] of the same aspect ratio."""
    height, width = frame.shape[:2]
    lit = frame.mean(axis=-1) > 127
    digits = []
    for place in range(_NUM_DIGITS):
        on = set()
        for segment in _SEGMENTS:
            x, y, _ = _segment_middle(place, segment, (width, height))
            if lit[round(y), round(x)]:
                on.add(segment)
        digits.append([set(code) for code in _DIGITS].index(on))
    return int("".join(map(str, digits)))


def _segment_middle(place: int, segment: str, size: tuple[int, int]) -> tuple[float, float, float]:
    """Pixel (x, y) of a segment's middle in the digit at `place`, and the grid unit in pixels."""
    width, height = size
    unit = min(width / (4 * _NUM_DIGITS), height / 6)
    column, row = _SEGMENTS[segment]
    return (4 * place + 1 + column) * unit, (1 + row) * unit, unit
