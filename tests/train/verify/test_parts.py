"""The parts of `verify`: how far apart tensors are, when a case fails, and how rows are dealt out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Degrees
from lmms_engine.train.data import build_processor
from lmms_engine.train.verify.cases import CASES, changed, choose, plain_job
from lmms_engine.train.verify.certificate import Certificate, Result, furthest, judge
from lmms_engine.train.verify.deal import DEALS, Rows, deal, read_rows
from lmms_engine.train.verify.ranks import Reply
from lmms_engine.train.verify.run import Outcome, Worst, relative_difference
from tests.runs import make_config, make_corpus, make_row, write_rows

REFERENCE = Outcome([2.0, 1.5], [3.0, 3.0], [{"ce": 7.0}, {"ce": 9.0}])


def test_a_gradient_is_measured_by_its_own_tensor() -> None:
    want = torch.tensor([1e-3, -4e-3])
    ours = want + torch.tensor([0.0, 4e-6])
    assert relative_difference(ours, want, norm=1.0) == pytest.approx(1e-3, rel=1e-2)
    assert relative_difference(want, want, norm=1.0) == 0
    assert relative_difference(want * math.nan, want, norm=1.0) == math.inf
    assert relative_difference(want[:1], want, norm=1.0) == math.inf


def test_a_negligible_gradient_is_measured_by_the_whole() -> None:
    want = torch.tensor([1e-9])
    assert relative_difference(want * 51, want, norm=1.0) == pytest.approx(5e-6)
    assert relative_difference(want * 0 + 2e-7, want, norm=1.0) > 1e-5
    assert relative_difference(want + 1, want * 0, norm=0.0) == math.inf


def test_the_furthest_of_several_numbers() -> None:
    assert furthest([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert furthest([], []) == furthest([1.0], [1.0, 2.0]) == furthest([math.nan], [1.0]) == math.inf


@pytest.mark.parametrize(
    ("got", "reason"),
    [
        (Outcome([2.0, 1.5], [3.0, 3.0], REFERENCE.totals, Worst(9e-6, "a")), ""),
        (Outcome([2.0, 1.50001], [3.0, 3.0], REFERENCE.totals, Worst(0.0, "a")), "differs: loss"),
        (Outcome([2.0, 1.5], [3.0, 3.1], REFERENCE.totals, Worst(0.0, "a")), "differs: gradient norm"),
        (Outcome([2.0, 1.5], [3.0, 3.0], REFERENCE.totals, Worst(2e-5, "a")), "differs: gradients"),
        (Outcome([2.0, 1.5], [3.0, 3.0], [{"ce": 7.0}] * 2, Worst(0.0, "a")), "differs: denominators"),
        (Outcome([5.0], [1.0], [], expected=([5.0], [1.0])), ""),
        (Outcome([5.0], [1.0], [], expected=([5.1], [1.0])), "differs: loss"),
    ],
)
def test_a_case_fails_on_each_difference_alone(got: Outcome, reason: str) -> None:
    result = judge(CASES[0], Reply("done", got), REFERENCE, on_gpu=False)
    assert (result.status, result.reason) == ("failed" if reason else "ok", reason)


def test_nothing_compared_is_no_pass() -> None:
    def passed(*states: str) -> bool:
        results = tuple(Result(f"{i}", "", 1, state) for i, state in enumerate(states))
        return Certificate((), (), "", {}, results, {}).passed

    assert passed("ok", "not run")
    assert not passed("not run")
    assert not passed("ok", "failed")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("deal")
    return plain_job(Job.from_dict(make_config(make_corpus(folder / "data"), Path("unused"))), 2)


@pytest.fixture(scope="module")
def rows(job: Job) -> Rows:
    return read_rows(job, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_job_that_its_ranks_can_be_split_into(case, job: Job) -> None:
    Degrees.of(changed(job, case.changes).trainer, case.ranks)
    assert case.deal in DEALS


def test_what_a_recipe_asks_for_is_taken_out_of_every_case(job: Job) -> None:
    """Or the reference would not be plain, and cases that cannot go with it would not run."""
    asked = {
        "trainer_args.fsdp_config.cpu_offload": True,
        "trainer_args.fsdp_config.reshard_after_forward": False,
        "trainer_args.use_liger_kernel": True,
    }
    assert plain_job(changed(job, asked), 2) == job


def test_names_are_unique_and_chosen_in_the_order_of_the_table() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert [case.name for case in choose(["sp-2", "packed"])] == ["packed", "sp-2"]
    assert choose([]) == list(CASES)
    with pytest.raises(UserError, match="did you mean 'packed'"):
        choose(["paked"])


@pytest.mark.parametrize("how", DEALS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_deal_gives_each_row_once_and_ranks_equal_numbers(how, size: int, job: Job, rows: Rows) -> None:
    processor = build_processor(job)
    assert len(rows.steps) == 2
    for packs in rows.steps:
        dealt = [deal(how, packs, processor, rank, size) for rank in range(size)]
        assert len({len(micros) for micros in dealt}) == 1
        refs = [row for micros in dealt for batch in micros for row in batch.rows]
        assert sorted(refs) == sorted(row for pack in packs for row in pack.batch.rows)
        if how == "modalities":
            media = {s.row for pack in packs for s in pack.samples if s.media}
            assert {row for batch in dealt[0] for row in batch.rows} == media


def test_rows_of_which_none_can_be_used_are_named_by_kind(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    row = make_row("train-0", 0)
    row["messages"][1]["content"] = "word " * 200
    write_rows(corpus / "train.jsonl", [row, row])
    job = plain_job(Job.from_dict(make_config(corpus, Path("unused"))), 2)
    with pytest.raises(UserError, match=r"no usable row \(overlong 2\); `data-prep validate"):
        read_rows(job, 2)


def test_rows_that_are_all_alike_are_not_dealt_by_modality(job: Job, rows: Rows) -> None:
    texts = [type(p)(p.batch, tuple(s for s in p.samples if not s.media)) for p in rows.steps[0]]
    with pytest.raises(UserError, match="these rows all have no pictures"):
        deal("modalities", texts, build_processor(job), 0, 2)
