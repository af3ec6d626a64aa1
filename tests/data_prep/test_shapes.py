"""Drawing: shapes stay where they should, numbers can be read back."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.shapes import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Shape,
    holds_colour,
    number_frame,
    picture,
    read_number,
)


@pytest.mark.parametrize("kind", SHAPES)
def test_shape_fills_its_radius_and_no_more(kind: str) -> None:
    image = np.asarray(picture((64, 48), "white", [Shape(kind, "blue", (30, 24), 15)])).astype(int)
    y, x = np.nonzero(np.abs(image - BACKGROUNDS["white"]).max(axis=-1) > 0)
    assert x.min() >= 15
    assert x.max() <= 45
    assert y.min() >= 9
    assert y.max() <= 39
    assert len(x) > 0.3 * 30 * 30


def test_shapes_differ_from_one_another() -> None:
    images = {picture((64, 64), "white", [Shape(kind, "red", (32, 32), 25)]).tobytes() for kind in SHAPES}
    assert len(images) == len(SHAPES)


@pytest.mark.parametrize("colour", COLOURS)
def test_holds_colour_tells_colours_apart(colour: str) -> None:
    image = picture((64, 64), "grey", [Shape("circle", colour, (32, 32), 25)])
    shares = {name: holds_colour(image, name) for name in COLOURS}
    assert shares[colour] > 0.4
    assert max(share for name, share in shares.items() if name != colour) == 0


def test_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="shape='hexagon': legal are circle"):
        picture((64, 64), "white", [Shape("hexagon", "red", (32, 32), 25)])


def test_every_number_can_be_read_back() -> None:
    assert [read_number(number_frame(n)) for n in range(1000)] == list(range(1000))
    assert read_number(number_frame(507, (192, 128))) == 507


def test_number_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="number=1000: legal are 0 to 999"):
        number_frame(1000)
