"""Validation gives one number, whatever the training settings, and leaves training as it was.

That two ranks agree with one is in test_runner_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmms_engine.config import Job
from lmms_engine.datasets.collate import collate
from lmms_engine.datasets.schema import parse_row
from lmms_engine.errors import UserError
from lmms_engine.segments import RowRef
from lmms_engine.train import TrainRunner
from lmms_engine.train.data import eval_loaders
from lmms_engine.train.evaluate import evaluate
from lmms_engine.train.metrics import read_lines
from tests.runs import make_config, make_row, write_rows

NAMES = ("heldout", "other")


def _config(corpus: Path, run_dir: Path, **changes) -> dict:
    entries = [{"path": str(corpus / f"{name}.jsonl")} for name in NAMES]
    return make_config(corpus, run_dir, **{"data__eval_datasets": entries, **changes})


@pytest.fixture
def runner(corpus, mesh, tmp_path):
    return TrainRunner(Job.from_dict(_config(corpus, tmp_path / "run")), mesh).build()


def _by_hand(runner, corpus: Path, name: str) -> tuple[float, int, int]:
    """Loss sum, supervised tokens and tokens of a file, one row at a time."""
    processor = runner.loader.processor
    total, supervised, tokens = 0.0, 0, 0
    for i, raw in enumerate(read_lines(corpus / f"{name}.jsonl")):
        batch = collate([processor(parse_row(raw, corpus), RowRef(name, 0, i, ""))], processor)
        with torch.no_grad():
            total += runner.objective(batch.to(runner.mesh.device))["ce"].item()
        supervised += int((batch.labels != -100).sum())
        tokens += batch.num_tokens
    return total, supervised, tokens


def test_it_is_the_sum_of_losses_over_the_supervised_tokens(runner, corpus):
    result = evaluate(runner.objective, runner.eval_loaders, runner.mesh, seed=0)
    hand = [_by_hand(runner, corpus, name) for name in NAMES]
    assert result.loss == pytest.approx(sum(h[0] for h in hand) / sum(h[1] for h in hand), rel=1e-6)
    assert result.loss_terms == {"ce": result.loss}
    assert result.supervised_tokens == sum(h[1] for h in hand)
    assert result.tokens == sum(h[2] for h in hand)
    assert result.samples == 9
    for (name, loss), (total, supervised, _) in zip(result.source_loss.items(), hand, strict=True):
        assert Path(name).stem in NAMES
        assert loss == pytest.approx(total / supervised, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__gradient_accumulation_steps": 1},
        {"trainer__gradient_accumulation_steps": 4, "trainer__per_device_train_batch_size": 3},
        {"data__packing": False},
        {"data__packing_length": 50, "trainer__seed": 5, "data__shuffle": False},
    ],
)
def test_training_settings_do_not_change_it(runner, corpus, tmp_path, changes):
    expected = evaluate(runner.objective, runner.eval_loaders, runner.mesh, seed=0)
    other = Job.from_dict(_config(corpus, tmp_path / "run", **changes))
    result = evaluate(runner.objective, eval_loaders(other, 0, 1), runner.mesh, seed=0)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert (result.supervised_tokens, result.samples) == (expected.supervised_tokens, expected.samples)


def test_it_can_be_repeated_and_leaves_training_as_it_was(corpus, mesh, tmp_path):
    runner = TrainRunner(Job.from_dict(_config(corpus, tmp_path / "run")), mesh).build()
    runner.loader.next_step()
    visual = runner.objective.model.model.visual
    visual.eval()  # as a frozen tower is
    modes = [module.training for module in runner.objective.modules()]
    random, position = torch.get_rng_state(), runner.loader.state_dict()
    first = evaluate(runner.objective, runner.eval_loaders, mesh, seed=0)
    assert evaluate(runner.objective, runner.eval_loaders, mesh, seed=0) == first
    assert [module.training for module in runner.objective.modules()] == modes
    assert runner.objective.training
    assert not visual.training
    assert torch.equal(torch.get_rng_state(), random)
    assert runner.loader.state_dict() == position
    assert all(parameter.grad is None for parameter in runner.objective.parameters())


def test_held_out_rows_without_targets_are_an_error(runner, corpus, tmp_path):
    rows = [make_row("a", 0)]
    rows[0]["messages"][1]["content"] = "word " * 200  # too long: dropped
    write_rows(tmp_path / "long.jsonl", rows)
    config = _config(corpus, tmp_path / "run", data__eval_datasets=[{"path": str(tmp_path / "long.jsonl")}])
    said = r"no supervised token in the 0 usable rows of .*long\.jsonl; `data-prep validate"
    with pytest.raises(UserError, match=said):
        evaluate(runner.objective, eval_loaders(Job.from_dict(config), 0, 1), runner.mesh, seed=0)
