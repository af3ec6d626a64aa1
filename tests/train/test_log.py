"""What is printed while training: plain lines without a terminal, a bar on one, rank 0 only."""

from __future__ import annotations

import logging

from lmms_engine.train.log import TrainProgress, clock_time, describe, setup_logging, with_mean_speed
from lmms_engine.train.metrics import make_row


def _row(step: int, **values) -> dict:
    base = {"loss": 2.5, "lr": {"a": 1e-5, "b": 2e-5}, "grad_norm": 1.0, "step_s": 1.0, "tokens": 100,
            "tokens_per_s": 100.0, "peak_gb": 3.0, "supervised_tokens": 40}  # fmt: skip
    return make_row(step=step, split="train", **{**base, **values})


def test_a_line_has_loss_speed_mfu_and_what_is_left(capsys):
    with TrainProgress(enabled=True, max_steps=4, fraction=0.0, bar=False) as progress:
        progress.show([_row(1), _row(2, step_s=3.0)], 0.5)
        progress.note("a note")
    line, note = capsys.readouterr().out.splitlines()
    what = "step 2/4  loss 2.5000  lr 2.00e-05  norm 1.000  50 tokens/s  mfu n/a  3.0 GB"
    assert line.startswith(f"{what}  eta 0:0")
    assert note == "a note"


def test_speed_is_over_the_time_of_all_rows():
    rows = [_row(1, mfu=0.5, step_s=1.0, tokens=300), _row(2, mfu=0.1, step_s=3.0, tokens=100)]
    shown = with_mean_speed(rows)
    assert (shown["tokens_per_s"], shown["mfu"]) == (100.0, 0.2)
    assert "mfu 20.0%" in describe(shown)


def test_validation_says_over_how_many_tokens():
    row = make_row(step=3, split="eval", loss=1.25, supervised_tokens=1234)
    assert describe(row, 9) == "step 3/9  eval loss 1.2500 over 1,234 supervised tokens"


def test_rows_that_were_left_out_are_on_the_line():
    shown = with_mean_speed([_row(1, skipped=3), _row(2, skipped=2), _row(3)])
    assert describe(shown).endswith("  rows left out: 5")
    assert "left out" not in describe(with_mean_speed([_row(4, skipped=0)]))
    row = make_row(step=3, split="eval", loss=1.25, supervised_tokens=1234, skipped=1)
    assert describe(row).endswith("supervised tokens  rows left out: 1")


def test_a_terminal_gets_a_bar(capsys):
    with TrainProgress(enabled=True, max_steps=4, fraction=0.0, bar=True) as progress:
        progress.show([_row(2)], 0.5)
    shown = capsys.readouterr().out
    for part in ("50%", "step 2/4", "loss 2.5000", "100 tokens/s", "mfu n/a", "eta 0:00"):   # on 80 columns
        assert part in shown


def test_other_ranks_print_nothing(capsys):
    with TrainProgress(enabled=False, max_steps=4, fraction=0.0) as progress:
        progress.show([_row(1)], 0.25)
        progress.note("x")
    assert capsys.readouterr().out == ""


def test_other_ranks_log_errors_alone_and_once(capsys):
    logger = logging.getLogger("lmms_engine")
    before = logger.level, logger.propagate, list(logger.handlers)
    try:
        for _ in range(2):   # a second call replaces the first
            setup_logging(is_main=False, rank=3)
        logger.info("quiet")
        logger.warning("quiet too")
        logger.error("bad")
        setup_logging()
        logger.info("plain")
        logger.warning("careful")
    finally:
        logger.level, logger.propagate, logger.handlers = before
        logger.setLevel(before[0])
    assert capsys.readouterr().err.splitlines() == ["[rank 3] error: bad", "plain", "warning: careful"]


def test_times():
    assert [clock_time(s) for s in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]
