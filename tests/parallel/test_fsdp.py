import pytest
import torch
from torch.distributed.tensor import DTensor

from lmms_engine.errors import UserError
from lmms_engine.parallel.fsdp import Unit, apply_fsdp, materialise, tied_names
from lmms_engine.parallel.grad_norm import global_norm
from lmms_engine.parallel.mesh import build_mesh
from tests import toy
from tests.distributed import run_ranks


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def start(mesh, tied):
    objective = toy.build(mesh, toy.job(), seed=3, tied=tied)
    sharded = all(isinstance(p, DTensor) for p in objective.model.parameters())
    local = sum(p.to_local().numel() for p in objective.model.parameters())
    buffer = objective.model.model.language_model.inv_freq
    return sharded, local, toy.weights(objective.model), buffer.clone(), tied_names(objective.model)


@pytest.mark.parametrize("tied", [True, False])
def test_one_and_two_ranks_start_bit_equal_to_the_unsharded_model(mesh, tied):
    plain = toy.reference(3, tied=tied)
    total = sum(p.numel() for p in plain.parameters())
    runs = [start(mesh, tied), *run_ranks(start, 2, tied)]
    for sharded, _, weights, buffer, ties in runs:
        assert sharded
        assert ties == ([["model.language_model.embed_tokens.weight", "lm_head.weight"]] if tied else [])
        assert weights.keys() == dict(plain.named_parameters()).keys()
        for name, parameter in plain.named_parameters():
            assert torch.equal(weights[name], parameter), name
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, plain.model.language_model.inv_freq)
    assert [local for _, local, *_ in runs] == [total, *(local for _, local, *_ in runs[1:])]
    assert sum(local for _, local, *_ in runs[1:]) == total   # each number lives on one rank


def bf16_stream(mesh):
    objective = toy.build(mesh, toy.job(), fill=False)
    stream = ((n, t.bfloat16()) for n, t in toy.reference_weights(1))
    buffers = dict(toy.reference().named_buffers())
    materialise(objective, objective.model, mesh, lambda: stream, lambda: buffers)
    return {p.dtype for p in objective.model.parameters()}, toy.weights(objective.model)


def test_a_bf16_checkpoint_fills_float32_masters():
    for dtypes, weights in run_ranks(bf16_stream, 2):
        assert dtypes == {torch.float32}
        for name, parameter in toy.reference_weights(1):
            assert torch.equal(weights[name], parameter.bfloat16().float())


def fail_in_stream(mesh, kind):
    def weights():
        for i, (name, tensor) in enumerate(toy.reference_weights()):
            if kind == "corrupt" and i == 3:
                raise UserError("model.safetensors: cut short")
            if kind == "missing" and name == "model.visual.merger.bias":
                continue
            if kind == "shape" and i == 3:
                tensor = tensor[:-1]
            yield name, tensor
        if kind == "unknown":
            yield "model.visual.extra", torch.zeros(1)

    objective = toy.build(mesh, toy.job(), fill=False)
    buffers = {} if kind == "buffer" else dict(toy.reference().named_buffers())
    try:
        materialise(objective, objective.model, mesh, weights, lambda: buffers)
    except (UserError, AssertionError) as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("corrupt", "cut short"),
        ("missing", "lack model.visual.merger.bias"),
        ("shape", "has the shape"),
        ("unknown", "hold 'model.visual.extra'"),
        ("buffer", "inv_freq"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(mesh, kind, message):
    assert message in fail_in_stream(mesh, kind)


def test_a_stream_that_fails_on_rank_0_fails_every_rank():
    assert all("cut short" in message for message in run_ranks(fail_in_stream, 2, "corrupt"))


def test_a_tie_across_two_units_is_caught(mesh):
    with torch.device("meta"):
        model = toy.ToyModel(tied=True)
    objective = toy.ToyObjective(model)
    embed = model.model.language_model.embed_tokens
    units = [Unit("embed", (embed,)), Unit("head", (model.lm_head,))]
    with pytest.raises(AssertionError, match="tie"):
        apply_fsdp(objective, units, mesh, bf16=False, reshard_after_forward=True)


def test_a_block_asks_for_the_next_one_of_its_row(mesh):
    body = toy.build(mesh, toy.job()).model.model
    for row in (body.language_model.layers, body.visual.blocks):
        wanted = [block._get_fsdp_state()._states_to_forward_prefetch for block in row]
        assert wanted == [[row[1]._get_fsdp_state()], []]


def test_a_block_also_asks_for_the_units_inside_the_next_one(mesh):
    with torch.device("meta"):
        objective = toy.ToyObjective(toy.ToyModel())
    layers = objective.model.model.language_model.layers
    inner = [Unit(f"layers.{i}.up", (layer.up,)) for i, layer in enumerate(layers)]
    outer = [Unit(f"layers.{i}", (layer,)) for i, layer in enumerate(layers)]
    apply_fsdp(objective, [*inner, *outer], mesh, bf16=False, reshard_after_forward=True)
    wanted = layers[0]._get_fsdp_state()._states_to_forward_prefetch
    assert wanted == [layers[1]._get_fsdp_state(), layers[1].up._get_fsdp_state()]


def replicas(mesh):
    """Gradients and norm of one step of the toy on a 2 x 2 mesh, each rank with a batch of its own."""
    job = toy.job(fsdp_config={"hsdp_shard_size": 2})
    mesh = build_mesh(job.trainer)
    objective = toy.build(mesh, job)
    held = sum(p.to_local().numel() for p in objective.model.parameters())
    batches = [toy.batch([5, 4], pictures=2 * (i % 2), seed=i) for i in range(mesh.world_size)]
    targets = sum(float(batch.loss_weights.sum()) for batch in batches)
    (objective(batches[mesh.rank])["ce"] / targets).backward()
    return held, toy.gradients(objective.model), float(global_norm(objective.parameters(), mesh.device))


def test_replicas_of_shards_equal_the_plain_model():
    plain = toy.ToyObjective(toy.reference())
    batches = [toy.batch([5, 4], pictures=2 * (i % 2), seed=i) for i in range(4)]
    targets = sum(float(batch.loss_weights.sum()) for batch in batches)
    (sum(plain(batch)["ce"] for batch in batches) / targets).backward()
    want = toy.gradients(plain.model)
    norm = float(sum(grad.double().square().sum() for grad in want.values()) ** 0.5)
    total = sum(p.numel() for p in plain.parameters())
    ranks = run_ranks(replicas, 4)
    assert [ranks[0][0] + ranks[1][0], ranks[2][0] + ranks[3][0]] == [total, total]   # a copy on each pair
    for _, gradients, found in ranks:
        toy.assert_same_gradients(gradients, want)
        assert found == pytest.approx(norm, rel=1e-5)
