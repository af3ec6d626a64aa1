import itertools
import logging

import pytest
import torch

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.train.backend.fsdp2 import FSDP2Backend
from lmms_engine.train.parallelize import build_model, check_wrapped_classes, plan_units
from lmms_engine.train.step import train_step
from tests import toy
from tests.distributed import run_ranks

PARTS = {
    "tower": ["visual", "!visual.merger"],
    "connector": ["visual.merger"],
    "language": ["language_model"],
}


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


def part_of(name):
    if ".visual." not in name:
        return "language"
    return "connector" if ".merger." in name else "tower"


@pytest.mark.parametrize("frozen", [f for n in range(4) for f in itertools.combinations(PARTS, n)])
def test_a_part_moves_if_and_only_if_it_is_not_frozen(mesh, frozen, caplog):
    job = toy.job(freeze_modules=[pattern for part in frozen for pattern in PARTS[part]])
    if len(frozen) == 3:
        with pytest.raises(UserError, match="leaves nothing to train"):
            toy.build(mesh, job)
        return
    with caplog.at_level(logging.INFO, "lmms_engine"):
        objective = toy.build(mesh, job, dropout=0.5)
    backend = FSDP2Backend(objective, job, mesh)
    before = toy.weights(objective.model)
    micros = [toy.batch([6, 4], pictures=3, seed=0, supervised=0.9)]
    for step in (1, 2):
        backend.set_progress(0.5, step)
        train_step(objective, backend, micros, mesh, torch.Generator())
    moved = {part: set() for part in PARTS}
    for name, weight in toy.weights(objective.model).items():
        moved[part_of(name)].add(not torch.equal(weight, before[name]))
    assert moved == {part: {part not in frozen} for part in PARTS}   # every tensor of a part, or none
    trained = sum(p.numel() for n, p in toy.reference().named_parameters() if part_of(n) not in frozen)
    total = sum(p.numel() for p in toy.reference().parameters())
    assert f"{trained:,} of {total:,} parameters are trained, {total - trained:,} are frozen" in caplog.text
    tower = objective.model.model.visual
    assert any(block.dropout.training for block in tower.blocks) is ("tower" not in frozen)


def test_a_frozen_tower_saves_no_activations(mesh):
    objective = toy.build(mesh, toy.job(freeze_modules=["visual"]))
    seen = []
    tower = objective.model.model.visual
    tower.register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
    objective(toy.batch([5], pictures=2, seed=0))
    assert seen == [False]


def test_the_resolved_table_names_every_unit(mesh, caplog):
    with caplog.at_level(logging.INFO, "lmms_engine"):
        toy.build(mesh, toy.job(fsdp_config={"activation_checkpointing": True}))
    lines = [line.split() for line in caplog.text.splitlines()]
    rows = {words[0]: words[1:] for words in lines if words and words[0].startswith("model.")}
    assert rows["model.language_model.layers.*"] == ["2", "2", "full", "1,298", "1,298"]
    assert rows["model.visual.blocks.*"] == ["2", "2", "full", "1,298", "1,298"]
    assert "(tied)" in caplog.text


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_unit(tied):
    model = toy.ToyModel(tied=tied)
    both = [*model.model.language_model.layers, *model.model.visual.blocks]
    blocks = {f"block {i}": block for i, block in enumerate(both)}
    units = plan_units(model, toy.LAYOUT, blocks, {"model.visual": model.model.visual})
    assert [len(unit.modules) for unit in units] == [1, 1, 1, 1, 1, *([3] if tied else [1, 2])]
    assert [unit.name for unit in units].index("model.visual") == 4   # the tower, after its blocks


def test_wrapped_classes_must_be_the_layouts():
    model = toy.ToyModel()
    blocks = {f"model.language_model.layers.{i}": b for i, b in enumerate(model.model.language_model.layers)}
    blocks |= {f"model.visual.blocks.{i}": b for i, b in enumerate(model.model.visual.blocks)}
    towers = {"model.visual": model.model.visual}
    for legal in (None, "ToyBlock", ["ToyBlock"], ["ToyVisionBlock", "ToyBlock"]):
        check_wrapped_classes(legal, blocks, towers)
    for illegal in ("ToyVisionBlock", ["ToyBlock", "Qwen2DecoderLayer"], []):
        with pytest.raises(UserError, match=r"blocks are \['ToyBlock', 'ToyVisionBlock'\]"):
            check_wrapped_classes(illegal, blocks, towers)


def test_a_wrong_class_stops_before_sharding(mesh):
    with pytest.raises(UserError, match=r"transformer_layer_cls_to_wrap=\['Other'\]"):
        toy.build(mesh, toy.job(fsdp_config={"transformer_layer_cls_to_wrap": ["Other"]}))


# ---- the real families, from a config ----------------------------------------------------------------


def family_job(name, **trainer):
    from importlib import import_module

    config = import_module(f"lmms_engine.models.{name}.tiny").tiny_config().to_diff_dict()
    drop = ("transformers_version", "architectures", "dtype", "_attn_implementation")
    config = {key: value for key, value in config.items() if key not in drop}
    return Job.from_dict(
        {
            "model_config": {"load_from_config": config},
            "dataset_config": {"datasets": [{"path": "unused.jsonl"}]},
            "trainer_args": {"report_to": "none", **trainer},
        }
    )


def start(mesh, name, seed):
    objective, spec, _ = build_model(family_job(name, seed=seed), mesh)
    buffers = dict(objective.model.named_buffers())
    return toy.weights(objective.model), buffers, spec.name


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_one_and_two_ranks_start_bit_equal_from_a_config(mesh, name):
    from lmms_engine.models import hf
    from lmms_engine.models.spec import for_type

    config = hf.read_config(family_job(name).model)
    with torch.random.fork_rng():
        fresh = for_type(config.model_type).model_class(config)   # the library's own tables
    tables = dict(fresh.named_buffers())
    one = start(mesh, name, 3)
    for weights, buffers, found in (one, *run_ranks(start, 2, name, 3)):
        assert found == name
        assert weights.keys() == one[0].keys()
        assert all(torch.equal(weights[n], one[0][n]) for n in weights)
        assert buffers.keys() == tables.keys()
        for n, table in tables.items():
            assert buffers[n].dtype == torch.float32
            assert torch.equal(buffers[n], table), n
    other = start(mesh, name, 4)[0]
    assert not all(torch.equal(other[n], one[0][n]) for n in other)
