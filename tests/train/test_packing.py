"""packing.jsonl: how full packs were and how unequal the ranks' shares, and where a run shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.cost import SampleCost
from lmms_engine.segments import RowRef, Segments
from lmms_engine.train.metrics import append_lines, cut_back, read_lines
from lmms_engine.train.packing import PACKING_FILE, Packing, describe, means
from lmms_engine.train.report import render
from tests.runs import logged, make_config, row_ids, train
from tests.train.test_report import TRAIN

COST = SampleCost(attention_length=100, media_unit=0.5)


def batch(*lengths: int, patches: int = 0, stand_in: int = 0) -> PackedBatch:
    """Rows of these lengths, and perhaps a stand-in, which is no row."""
    return PackedBatch(
        segments=Segments.from_lengths([*lengths, *([stand_in] if stand_in else [])]),
        input_ids=None,
        position_ids=None,
        labels=None,
        loss_weights=None,
        media={"pixel_values": torch.zeros(patches, 3)} if patches else {},
        rows=tuple(RowRef("s", 0, n, str(n)) for n in range(len(lengths))),
    )


def test_by_hand() -> None:
    packing = Packing(200, 2, COST)
    # Two micro-batches of two packs: 50 + 25, 100 + 100 and a picture; the other rank: 20 + 4 and nothing.
    shares = [packing.measure([batch(50), batch(100, patches=8)]), packing.measure([batch(20, stand_in=9)])]
    assert shares == [{"packs": 4, "cost": 75 + 200 + 4}, {"packs": 2, "cost": 24}]
    row = packing.row(7, 170, shares)
    assert row == {"step": 7, "packs": 6, "fill": 170 / 1200, "spread": pytest.approx(279 / 151.5 - 1)}
    alone = Packing(None, 1, COST).row(1, 50, [{"packs": 1, "cost": 75.0}])
    assert (alone["fill"], alone["spread"]) == (None, 0.0)


def test_means_weigh_packs_and_words_leave_out_what_is_not_known() -> None:
    rows = [
        {"step": 1, "packs": 3, "fill": 1.0, "spread": 0.5},
        {"step": 2, "packs": 1, "fill": 0.2, "spread": 0.1},
    ]
    assert means(rows) == (pytest.approx(0.8), pytest.approx(0.3))
    assert describe(rows) == {
        "packing fill": "80.0% of the room in packs",
        "predicted spread of ranks": "30.0% over the mean rank",
    }
    assert describe([{"step": 1, "packs": 1, "fill": None, "spread": None}]) == describe([]) == {}


def test_a_run_notes_it_each_step_and_says_it_at_the_end(corpus: Path, tmp_path: Path, mesh, said) -> None:
    sizes = {"trainer__max_steps": 3, "trainer__per_device_train_batch_size": 2}
    config = make_config(corpus, tmp_path / "run", **sizes)
    train(mesh, config)
    rows = read_lines(tmp_path / "run" / PACKING_FILE)
    micros = [step for step, _, _ in row_ids(tmp_path / "run")]
    tokens = {row["step"]: row["tokens"] for row in logged(tmp_path / "run")}
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["packs"] for row in rows] == [2 * micros.count(step) for step in (1, 2, 3)]
    assert [row["fill"] for row in rows] == [tokens[row["step"]] / (96 * row["packs"]) for row in rows]
    assert {row["spread"] for row in rows} == {0.0}   # one rank
    words = describe(rows)
    assert f"packing fill: {words['packing fill']}" in said.text
    page = (tmp_path / "run" / "report.html").read_text()
    assert words["packing fill"] in page
    assert "Predicted spread of ranks" in page


def test_the_report_of_a_run_without_it_says_so() -> None:
    page = render("run", TRAIN, {}, {}, [])
    assert "Packing fill: does not apply to this run" in page
    assert "predicted spread of ranks" not in page


def test_a_resume_cuts_it_back(tmp_path: Path) -> None:
    append_lines(tmp_path / PACKING_FILE, [{"step": step, "fill": 1.0} for step in (1, 2, 3)])
    cut_back(tmp_path, 2)
    assert [row["step"] for row in read_lines(tmp_path / PACKING_FILE)] == [1, 2]
    assert [row["step"] for row in read_lines(tmp_path / f"{PACKING_FILE}.discarded")] == [3]


def test_the_job_says_what_packs_are_measured_by(corpus: Path, tmp_path: Path) -> None:
    job = Job.from_dict(make_config(corpus, tmp_path))
    assert Packing.of(job) == Packing(96, 1, SampleCost(25000.0, 0.1))
    plain = Job.from_dict(make_config(corpus, tmp_path, data__packing=False))
    assert Packing.of(plain).length is None
