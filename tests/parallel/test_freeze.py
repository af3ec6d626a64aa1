import pytest

from lmms_engine.errors import UserError
from lmms_engine.parallel.freeze import apply_freeze, keep_in_eval
from tests.toy import ToyModel


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_patterns_with_and_without_the_prefix_freeze_the_same():
    short, long = ToyModel(), ToyModel()
    assert apply_freeze(short, ["visual"]) == apply_freeze(long, ["model.visual"]) == ["model.visual"]
    assert trainable(short) == trainable(long)
    assert not any(".visual." in name for name in trainable(short))
    assert any(".language_model." in name for name in trainable(short))


def test_an_exclamation_mark_thaws_again():
    model = ToyModel()
    frozen = apply_freeze(model, ["visual", "!visual.merger"])
    assert {n for n in trainable(model) if ".visual." in n} == {
        "model.visual.merger.weight",
        "model.visual.merger.bias",
    }
    # the tower's own position table keeps it from being listed as a whole
    assert frozen == ["model.visual.patch_embed", "model.visual.blocks"]


def test_a_tied_head_is_frozen_with_the_embedding():
    model = ToyModel(tied=True)
    apply_freeze(model, ["language_model"])
    assert not model.lm_head.weight.requires_grad
    model = ToyModel(tied=False)
    apply_freeze(model, ["language_model"])
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize("pattern", ["vision", "visul", "visual.blocks.7", "language_model.layers.0.dropout"])
def test_a_pattern_without_parameters_is_an_error_with_candidates(pattern):
    with pytest.raises(UserError, match=rf"'{pattern}' matches no part .*candidates:.* visual, .*lm_head"):
        apply_freeze(ToyModel(), [pattern])


def test_freezing_everything_is_an_error():
    with pytest.raises(UserError, match="leaves nothing to train"):
        apply_freeze(ToyModel(), ["visual", "language_model"])


def test_nothing_is_frozen_by_default():
    model = ToyModel()
    assert apply_freeze(model, ()) == []
    assert len(trainable(model)) == len(list(model.parameters()))


def test_frozen_parts_stay_in_eval_mode_through_train():
    model = ToyModel(dropout=0.5)
    keep_in_eval(model.model, [model.get_submodule(name) for name in apply_freeze(model, ["visual.blocks"])])
    model.train()
    import torch

    pixels, ids = torch.randn(2, 6), torch.tensor([0, 0, 5])
    model.model(ids, pixels)
    assert not any(m.training for m in model.model.visual.blocks.modules())
    assert model.model.language_model.layers[0].dropout.training
