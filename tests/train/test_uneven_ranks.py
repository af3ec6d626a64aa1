"""Ranks whose data make unlike numbers of packs, or none: they take equal steps, and every row counts once.

Rank 0 has five packs of training and of held-out rows where rank 1 has seven; in the last run it has the only
row, and rank 1 none.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmms_engine.commands.inspect import batches
from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train import TrainRunner, checkpoint
from lmms_engine.train.runner import Window
from tests.distributed import run_ranks
from tests.runs import logged, make_config, make_row, row_ids, write_rows

pytestmark = pytest.mark.xdist_group("uneven ranks")
ROWS, PACKS = 14, (5, 7)
LONG, SHORT = 70, 25                    # words of an answer: one long row fills a pack, or two short ones
PAIRED = {4, 6, 8, 10}                  # rows of rank 0, in two packs
WAIT_S = 20                             # for the other rank: one that goes on alone fails the test soon
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {"trainer__num_train_epochs": 2},
    "steps": {"trainer__max_steps": 6},
    "one row": {"trainer__num_train_epochs": 2},
}


class Compared(TrainRunner):
    """Fails at once where the ranks go into a step with unlike numbers of micro-batches."""

    def _next_window(self) -> Window:
        window = super()._next_window()
        numbers = self.mesh.gather(len(window.micros))
        assert len(set(numbers)) == 1, f"micro-batches of the ranks in step {self.step + 1}: {numbers}"
        return window


def until_refused(mesh: Mesh, config: dict[str, Any]) -> tuple[str, int]:
    """What ended this rank's run, and the step that it was in."""
    job = Job.from_dict(config)
    runner = Compared(job, build_mesh(job.trainer)).build()
    with pytest.raises(UserError) as refused:
        runner.run()
    return str(refused.value), runner.step


def on_two_ranks(mesh: Mesh, configs: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many steps this rank has taken in each run."""
    steps = {}
    for name, config in configs.items():
        job = Job.from_dict(config)
        runner = Compared(job, build_mesh(job.trainer)).build()
        runner.run()
        steps[name] = runner.step
    return steps


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any]]:
    folder = tmp_path_factory.mktemp("uneven")
    rows = [make_row(f"r{i}", 0) for i in range(ROWS)]
    for i, row in enumerate(rows):
        row["messages"][1]["content"] = "word " * (SHORT if i in PAIRED else LONG)
    write_rows(folder / "all.jsonl", rows)
    write_rows(folder / "one.jsonl", rows[:1])
    configs = {}
    for name, changes in RUNS.items():
        path = str(folder / ("one.jsonl" if name == "one row" else "all.jsonl"))
        configs[name] = make_config(
            corpus, folder / name, **changes, data__datasets=[{"path": path}], data__shuffle=False,
            data__eval_datasets=[{"path": path}], trainer__eval_steps=3, trainer__ddp_timeout=WAIT_S,
        )  # fmt: skip
    return folder, configs, run_ranks(on_two_ranks, 2, configs, timeout=120)


def test_the_ranks_have_five_packs_and_seven(runs) -> None:
    _, configs, _ = runs
    job = Job.from_dict(configs["epochs"])
    for rank, count in enumerate(PACKS):
        micros = [micro for _, window in batches(job, rank, 2, 4) for micro in window]
        assert sum(bool(micro.rows) for micro in micros) == count
        assert sum(len(micro.rows) for micro in micros) == ROWS / 2


def test_both_ranks_take_the_steps_of_the_one_with_more_packs(runs) -> None:
    folder, _, steps = runs
    assert steps[0] == steps[1] == {"epochs": 8, "steps": 6, "one row": 2}   # 2 + 2 + 2 + 1 packs an epoch
    for name, count in steps[0].items():
        assert [line["step"] for line in logged(folder / name)] == list(range(1, count + 1))
        assert all(line["supervised_tokens"] for line in logged(folder / name))


def seen(run_dir: Path, first: int, last: int) -> Counter[str]:
    """How often each row was trained on in these steps, on both ranks."""
    lines = [line for rank in range(2) for line in row_ids(run_dir, rank)]
    return Counter(name for step, _, names in lines if first <= step <= last for name in names)


def test_no_row_is_dropped_or_repeated(runs) -> None:
    folder, _, _ = runs
    once = Counter({f"r{i}": 1 for i in range(ROWS)})
    for first in (1, 5):
        assert seen(folder / "epochs", first, first + 3) == once
    assert seen(folder / "steps", 1, 4) == once
    assert seen(folder / "steps", 5, 6) == seen(folder / "steps", 1, 2)   # the next epoch
    assert [seen(folder / "one row", step, step) for step in (1, 2)] == [Counter({"r0": 1})] * 2
    for name, first, last in (("epochs", 1, 8), ("steps", 1, 6), ("one row", 1, 2)):
        total = sum(line["samples"] for line in logged(folder / name))
        assert total == seen(folder / name, first, last).total()
    for name, rows in (("epochs", ROWS), ("steps", ROWS), ("one row", 1)):
        assert {line["samples"] for line in logged(folder / name, "eval")} == {rows}


def test_a_bad_held_out_row_of_one_rank_ends_both_and_loses_no_step(corpus: Path, tmp_path: Path) -> None:
    """No checkpoint is due when validation finds it: what was trained is saved before the run ends."""
    rows = [make_row(f"h{i}", 0) for i in range(6)]
    rows[3]["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": "no.png"}})
    write_rows(tmp_path / "heldout.jsonl", rows)
    config = make_config(
        corpus, tmp_path / "run", data__eval_datasets=[{"path": str(tmp_path / "heldout.jsonl")}],
        trainer__max_steps=6, trainer__eval_steps=2, trainer__save_steps=4, trainer__ddp_timeout=WAIT_S,
    )  # fmt: skip
    ends = run_ranks(until_refused, 2, config, timeout=60)
    assert ends[0] == ends[1]
    said, step = ends[0]
    assert step == 2
    assert "heldout.jsonl" in said
    assert "no.png" in said
    assert checkpoint.latest(tmp_path / "run") == checkpoint.folder_of(tmp_path / "run", 2)
