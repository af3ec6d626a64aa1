import pytest
import torch

from lmms_engine.errors import UserError
from lmms_engine.parallel.activation_checkpoint import choose_blocks
from tests import toy


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def run(mesh, setting, freeze=(), **kinds):
    """Gradients and forward calls per block of one forward and backward."""
    job = toy.job(freeze_modules=list(freeze))
    settings = job.trainer.fsdp_config.model_copy(update={"activation_checkpointing": setting})
    job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"fsdp_config": settings})})
    objective = toy.build(mesh, job, **kinds)
    torch.manual_seed(0)
    objective(toy.batch([5, 4], pictures=3, seed=0))["ce"].backward()
    body = objective.model.model
    calls = [[block.calls for block in blocks] for blocks in (body.language_model.layers, body.visual.blocks)]
    return toy.gradients(objective.model), calls


def test_blocks_run_once_without_and_twice_with_recomputation_at_equal_gradients(mesh):
    off, calls_off = run(mesh, False)
    on, calls_on = run(mesh, True)
    assert calls_off == [[1, 1], [1, 1]]
    assert calls_on == [[2, 2], [2, 2]]
    toy.assert_same_gradients(on, off, rtol=1e-6)


def test_dropout_masks_are_the_same_in_the_recomputation(mesh):
    off, _ = run(mesh, False, dropout=0.5)
    on, _ = run(mesh, True, dropout=0.5)
    toy.assert_same_gradients(on, off, rtol=1e-6)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("encoders", [[1, 1], [2, 2]]),
        (("language_model.layers.1", "visual"), [[1, 2], [2, 2]]),
        (("visual.blocks.*",), [[1, 1], [2, 2]]),
    ],
)
def test_recomputation_of_some_blocks_gives_equal_gradients(mesh, setting, expected):
    off, _ = run(mesh, False, dropout=0.5)
    on, calls = run(mesh, setting, dropout=0.5)
    assert calls == expected
    toy.assert_same_gradients(on, off, rtol=1e-6)


def test_a_frozen_embedding_costs_no_gradient(mesh):
    frozen = ["language_model.embed_tokens", "visual"]
    off, _ = run(mesh, False, frozen)
    on, calls = run(mesh, True, frozen)
    assert "model.language_model.layers.0.up.weight" in on
    assert calls == [[2, 2], [1, 1]]   # a frozen tower saves nothing and recomputes nothing
    toy.assert_same_gradients(on, off, rtol=1e-6)


def test_names_and_state_dict_stay_as_they_are(mesh):
    objective = toy.build(mesh, toy.job(fsdp_config={"activation_checkpointing": True}))
    plain = toy.reference()
    assert [n for n, _ in objective.model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in objective.model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(objective.model.state_dict()) == list(plain.state_dict())


def test_no_graph_is_kept_in_evaluation(mesh):
    objective = toy.build(mesh, toy.job(fsdp_config={"activation_checkpointing": True}))
    with torch.no_grad():
        loss = objective(toy.batch([4], pictures=1, seed=0))["ce"]
    assert loss.grad_fn is None


def test_a_pattern_that_matches_no_block_is_an_error():
    model = toy.ToyModel()
    blocks = {"model.visual.blocks.0": model.model.visual.blocks[0]}
    with pytest.raises(UserError, match=r"'lm_head' matches no block.*model\.visual\.blocks\.0"):
        choose_blocks(model, ["lm_head"], blocks, {})
