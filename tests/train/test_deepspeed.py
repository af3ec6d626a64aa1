"""DeepSpeed ZeRO on two processes gives the numbers of one plain process, and FSDP2's checkpoints."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lmms_engine.commands.export import Dtype, export
from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.train import checkpoint
from lmms_engine.train.backend import build_backend
from lmms_engine.train.metrics import read_lines
from lmms_engine.train.step import train_step
from tests import toy
from tests.distributed import run_ranks
from tests.runs import make_config, make_corpus
from tests.runs import train as train_run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed"
)

BUCKETS = {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000, "stage3_prefetch_bucket_size": 500}
TRAINER = {"weight_decay": 0.1, "max_grad_norm": 0.5}
# Micro-batches of two ranks in two steps and a third; one rank has pictures where the other has none.
STEPS = [
    [[toy.batch([5, 4], pictures=3, seed=0)], [toy.batch([6], pictures=0, seed=1)]],
    [
        [toy.batch([3], pictures=1, seed=2), toy.batch([7, 2], pictures=0, seed=3, supervised=0.9)],
        [toy.batch([5], pictures=0, seed=6), toy.batch([2], pictures=2, seed=7)],
    ],
    [[toy.batch([4], pictures=0, seed=4)], [toy.batch([8], pictures=5, seed=5)]],
]


def zero_job(stage: int | None, zero: dict | None = None, **trainer: object) -> Job:
    """A toy job with ZeRO; stage None: with FSDP2. Two micro-batches a step, as some steps have."""
    tree = toy.job(**TRAINER, gradient_accumulation_steps=2, bf16=False, **trainer).to_dict()
    if stage is not None:
        tree["trainer_type"] = "deepspeed_trainer"
        tree["trainer_args"] |= {
            "fsdp2": False,
            "deepspeed": {"zero_optimization": {"stage": stage, **BUCKETS, **(zero or {})}},
        }
    return Job.from_dict(tree)


def start(mesh, stage, *, kinds=None, fill=True, **options):
    job = zero_job(stage, **options)
    objective = toy.build(mesh, job, fill=fill, **(kinds or {}))
    return objective, build_backend(objective, job, mesh)


def train(mesh, objective, backend, numbers):
    """(loss, gradient norm) of each of these steps; one rank takes the micro-batches of both."""
    found = []
    for number in numbers:
        ranks = STEPS[number - 1]
        micros = [m for rank in ranks for m in rank] if mesh.world_size == 1 else ranks[mesh.rank]
        backend.set_progress(0.5, number)
        stats = train_step(objective, backend, micros, mesh, torch.Generator())
        loss = sum(mesh.gather(float(stats.sums["ce"]))) / stats.totals["ce"]
        found.append((loss, float(stats.grad_norm)))
    return found


def whole_state(backend):
    return {
        f"{part}.{name}": toy.whole(tensor)
        for part, source in backend.state().items()
        for name, tensor in source.state_dict().items()
    }


def three_steps(mesh, stage, options):
    objective, backend = start(mesh, stage, **options)
    first = whole_state(backend)
    return first, train(mesh, objective, backend, (1, 2, 3)), whole_state(backend)


def plain_steps(frozen: str | None, tied: bool):
    """The same training written with nothing of ours: one process, torch's own clip and AdamW."""
    model = toy.reference(tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    objective = toy.ToyObjective(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    vectors = [p for n, p in trained.items() if p.ndim < 2 or "_tokens" in n or "pos_" in n]
    matrices = [p for p in trained.values() if all(p is not v for v in vectors)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    found = []
    for ranks in STEPS:
        micros = [m for rank in ranks for m in rank]
        total = sum(objective.weights(m)["ce"] for m in micros)
        loss = sum(objective(m)["ce"] for m in micros) / total
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append((float(loss.detach()), float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return found, toy.weights(model)


KINDS = {
    "tied head": (None, True, {}),
    "own head, recomputed": (
        None, False, {"kinds": {"tied": False}, "fsdp_config": {"activation_checkpointing": True}}
    ),
    "frozen tower": ("visual", True, {"freeze_modules": ["visual"]}),
}  # fmt: skip


def resumed(mesh, folder, before, after):
    """(losses and norms, state) of steps 2 and 3: trained straight through, and resumed after step 1."""
    objective, backend = start(mesh, before)
    train(mesh, objective, backend, (1,))
    checkpoint.save(folder, 1, backend.state(), mesh, {})
    straight = train(mesh, objective, backend, (2, 3)), whole_state(backend)
    objective, backend = start(mesh, after, fill=False)
    checkpoint.load(checkpoint.latest(folder), backend.state(), mesh)
    return straight, (train(mesh, objective, backend, (2, 3)), whole_state(backend))


def refusal(mesh, stage):
    """What a gradient that is no number ends in, and what changed of weights and moments in that step."""
    objective, backend = start(mesh, stage)
    train(mesh, objective, backend, (1,))
    before = whole_state(backend)
    backend.set_progress(0.5, 2)
    with backend.micro(last=True):
        backend.backward(objective(STEPS[0][mesh.rank][0])["ce"] * (float("nan") if mesh.rank else 1.0))
    with pytest.raises(UserError) as caught:
        backend.step()
    after = whole_state(backend)
    return str(caught.value), [name for name in before if not torch.equal(before[name], after[name])]


def without_gradient(mesh, stage):
    objective, backend = start(mesh, stage)
    batch = replace(STEPS[0][0][0], media={})
    with backend.micro(last=True):
        backend.backward(objective(batch)["ce"])
    with pytest.raises(UserError) as caught:
        backend.step()
    return str(caught.value)


def of_one_stage(mesh, stage, folder):
    """Everything about a stage in one start of the processes, which takes longest."""
    return {
        "kinds": {kind: three_steps(mesh, stage, options) for kind, (_, _, options) in KINDS.items()},
        "resumed": resumed(mesh, folder, stage, stage),
        "refusal": refusal(mesh, stage),
        "without gradient": without_gradient(mesh, stage),
    }


@pytest.fixture(scope="module", params=(0, 1, 2, 3), ids=lambda stage: f"zero-{stage}")
def ranks(request, tmp_path_factory):
    """What both ranks found at one stage."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(of_one_stage, 2, request.param, folder, timeout=240)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_norms_and_weights_are_those_of_one_plain_process(ranks, kind: str) -> None:
    frozen, tied, _ = KINDS[kind]
    want, weights = plain_steps(frozen, tied)
    assert min(norm for _, norm in want) > 0.5   # clipping is at work
    begun = toy.weights(toy.reference(tied=tied))
    for first, got, last in (rank["kinds"][kind] for rank in ranks[1]):
        assert all(torch.equal(first[f"model.{name}"], begun[name]) for name in begun)
        assert torch.tensor(got) == pytest.approx(torch.tensor(want), rel=1e-5)
        assert {n for n in last if n.startswith("model.")} == {f"model.{n}" for n in weights}
        for name, weight in weights.items():
            torch.testing.assert_close(last[f"model.{name}"], weight, rtol=1e-4, atol=2e-6, msg=name)
        moments = {n for n in last if n.startswith("optimizer.") and n.endswith(".exp_avg")}
        trained = {n for n in weights if frozen is None or frozen not in n}
        assert moments == {f"optimizer.{n}.exp_avg" for n in trained}
        assert {float(t) for n, t in last.items() if n.endswith(".step")} == {3.0}


def test_a_resumed_run_equals_the_uninterrupted_one(ranks) -> None:
    for straight, again in (rank["resumed"] for rank in ranks[1]):
        assert again[0] == straight[0]
        assert all(torch.equal(again[1][name], tensor) for name, tensor in straight[1].items())


def test_a_checkpoint_is_read_without_ranks(ranks) -> None:
    held = dict(checkpoint.model_only_state(checkpoint.latest(ranks[0])))
    model = toy.reference()
    assert {name: t.shape for name, t in held.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert {t.dtype for t in held.values()} == {torch.float32}


def test_a_norm_that_is_no_number_stops_the_run_and_moves_nothing(ranks) -> None:
    for message, moved in (rank["refusal"] for rank in ranks[1]):
        assert "the gradient norm of step 2 is" in message
        assert moved == []


def test_a_trainable_parameter_without_gradient_stops_the_run(ranks) -> None:
    for rank in ranks[1]:
        assert "15 trainable parameters got no gradient in the first step: model.visual." in (
            rank["without gradient"]
        )


CHAIN = ((None, 2), (2, 3), (3, None))   # None: FSDP2


def chain(mesh, folder):
    return [resumed(mesh, folder / f"{i}", *pair) for i, pair in enumerate(CHAIN)]


def test_another_backend_goes_on(tmp_path) -> None:
    for rank in run_ranks(chain, 2, tmp_path, timeout=240):
        for straight, again in rank:
            assert torch.tensor(again[0]) == pytest.approx(torch.tensor(straight[0]), rel=1e-5)
            assert again[1].keys() == straight[1].keys()
            for name, tensor in straight[1].items():
                torch.testing.assert_close(again[1][name], tensor, rtol=1e-4, atol=2e-6, msg=name)


def whole_runs(mesh, configs):
    for config in configs:
        train_run(mesh, config)


def test_a_whole_run_with_zero_3_logs_what_fsdp2_logs_and_is_exported(tmp_path) -> None:
    corpus = make_corpus(tmp_path / "data")
    changes = {
        "trainer__max_steps": 3,
        "trainer__eval_steps": 2,
        "trainer__fsdp_config": {"activation_checkpointing": True},
        "trainer__bf16": False,
        "data__eval_datasets": [{"path": str(corpus / "heldout.jsonl")}],
    }
    fsdp2 = make_config(corpus, tmp_path / "fsdp2", **changes)
    zero = {"zero_optimization": {"stage": 3, **BUCKETS, "stage3_param_persistence_threshold": 500}}
    other = make_config(corpus, tmp_path / "zero", **changes, trainer__deepspeed=zero)
    other["trainer_type"] = "deepspeed_trainer"
    run_ranks(whole_runs, 2, [fsdp2, other], timeout=240)
    ours, theirs = (read_lines(tmp_path / run / "metrics.jsonl") for run in ("zero", "fsdp2"))
    assert [row["split"] for row in ours] == ["train", "train", "eval", "train", "eval"]
    for row, want in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert row["grad_norm"] == (want["grad_norm"] and pytest.approx(want["grad_norm"], rel=1e-4))
        for key in ("split", "step", "lr", "tokens", "supervised_tokens", "samples", "epoch"):
            assert row[key] == want[key]
    written = []
    for run in ("zero", "fsdp2"):
        export(tmp_path / run, tmp_path / f"{run}-export", Dtype.fp32)
        written.append(load_file(tmp_path / f"{run}-export" / "model.safetensors"))
    assert written[0].keys() == written[1].keys()
    for name, tensor in written[1].items():
        torch.testing.assert_close(written[0][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
