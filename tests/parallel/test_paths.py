import pytest

from lmms_engine.errors import UserError
from lmms_engine.parallel.paths import match, match_short, resolve, under
from tests.toy import ToyModel

MODEL = ToyModel()


def test_a_star_stays_within_one_component():
    assert list(match(MODEL, "model.language_model.layers.*")) == [
        "model.language_model.layers.0",
        "model.language_model.layers.1",
    ]
    assert match(MODEL, "model.*.0") == {}


def test_a_dot_is_a_dot():
    assert match(MODEL, "modelxvisual") == {}
    assert list(match(MODEL, "model.vis*")) == ["model.visual"]


def test_users_may_leave_out_the_leading_model():
    assert list(match_short(MODEL, "visual")) == list(match_short(MODEL, "model.visual")) == ["model.visual"]
    assert list(match_short(MODEL, "lm_head")) == ["lm_head"]
    assert match_short(MODEL, "blocks") == {}


def test_a_layout_that_matches_nothing_is_an_error_with_a_hint():
    with pytest.raises(UserError, match=r"'model.visul'.*did you mean 'model.visual'"):
        resolve(MODEL, "model.visul")


def test_under_compares_components_not_letters():
    parents = {"model.visual": MODEL}
    assert under("model.visual.blocks.0", parents)
    assert under("model.visual", parents)
    assert not under("model.visual_two.blocks.0", parents)
