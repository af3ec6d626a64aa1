import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmms_engine.errors import UserError
from lmms_engine.models.spec import MODELS
from lmms_engine.parallel.activation_checkpoint import choose_blocks, recompute
from lmms_engine.parallel.paths import resolve
from tests import toy
from tests.tiny import DECODERS, assert_same_gradients, build, loss_and_gradients, pack


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


class Products(TorchDispatchMode):
    """Counts matrix products while it is on."""

    def __init__(self):
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


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
        ("selective", [[2, 2], [2, 2]]),
        ({"language_model": "selective", "language_model.layers.1": "full"}, [[2, 2], [1, 1]]),
    ],
)
def test_recomputation_of_some_blocks_gives_equal_gradients(mesh, setting, expected):
    off, _ = run(mesh, False, dropout=0.5)
    on, calls = run(mesh, setting, dropout=0.5)
    assert calls == expected
    toy.assert_same_gradients(on, off, rtol=1e-6)


@pytest.mark.parametrize(
    ("setting", "again"),
    [
        (True, 4),   # the second product of a block is not run again: no gradient needs its result
        ("selective", 0),
        ({"language_model": "selective", "language_model.layers.1": "full"}, 1),
    ],
)
def test_selective_runs_no_product_twice(mesh, setting, again):
    """Of the two linears of each block."""
    counts = []
    for given in (False, setting):
        objective = toy.build(mesh, toy.job(fsdp_config={"activation_checkpointing": given}))
        with Products() as products:
            objective(toy.batch([5, 4], pictures=3, seed=0))["ce"].backward()
        counts.append(products.count)
    assert counts[1] - counts[0] == again


@pytest.mark.parametrize("family", DECODERS)
def test_selective_in_real_families(family):
    """Every gradient as without, and attention and products run once: by the operators that are kept."""
    plain, samples = build(family)
    expected = loss_and_gradients(plain, [pack(samples)])
    objective, _ = build(family)
    for pattern in MODELS.get(family).layout.blocks:
        for block in resolve(objective.model, pattern).values():
            recompute(block, "selective")
    ours = loss_and_gradients(objective, [pack(samples)])
    assert ours[0] == expected[0]
    assert_same_gradients(ours[1], expected[1], tolerance=1e-6)


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
