"""What a person sees while training: a progress bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

log = logging.getLogger(__name__)


class _CurrentStderr(logging.Handler):
    """Writes to whatever `sys.stderr` is now, so that lines appear above a live progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # a closed terminal must not end the run
            self.handleError(record)


def setup_logging(*, is_main: bool = True, rank: int = 0, debug: bool = False) -> None:
    """Sends the engine's messages to stderr: all of rank 0's, only errors of the others, with their rank.

    Idempotent; touches no other library's logger.
    """
    logger = logging.getLogger("lmms_engine")
    for handler in [h for h in logger.handlers if isinstance(h, _CurrentStderr)]:
        logger.removeHandler(handler)
    handler = _CurrentStderr()
    prefix = "" if is_main else f"[rank {rank}] "
    handler.setFormatter(_Formatter(prefix))
    logger.addHandler(handler)
    logger.propagate = False
    quiet = logging.INFO if is_main else logging.ERROR
    logger.setLevel(logging.DEBUG if debug else quiet)


class _Formatter(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{self._prefix}{level}{super().format(record)}"


class TrainProgress:
    """Progress of a run by the fraction of the whole that is done.

    Use as a context manager. bar: None asks whether stdout is a terminal.
    """

    def __init__(
        self, *, enabled: bool, max_steps: int | None, fraction: float, bar: bool | None = None
    ) -> None:
        self._enabled = enabled
        self._max_steps = max_steps
        self._first = fraction
        self._began = time.monotonic()
        self._bar: Progress | None = None
        if enabled and (sys.stdout.isatty() if bar is None else bar):
            self._bar = Progress(
                BarColumn(bar_width=10),
                TaskProgressColumn(),
                TextColumn("{task.fields[line]}"),
                TextColumn("eta {task.fields[eta]}"),
                console=Console(),
            )
            self._task = self._bar.add_task("train", total=1.0, completed=fraction, line="", eta="?")

    def __enter__(self) -> TrainProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, rows: list[dict[str, Any]], fraction: float) -> None:
        """Shows the last of some training rows, with their mean speed; `fraction` of the run is done."""
        if not self._enabled:
            return
        row, eta, short = with_mean_speed(rows), self._eta(fraction), self._bar is not None
        line = describe(row, self._max_steps, short=short)
        if self._bar:
            self._bar.update(self._task, completed=fraction, line=line, eta=eta)
        else:
            print(f"{line}  eta {eta}", flush=True)

    def note(self, text: str) -> None:
        """Prints one line among the progress."""
        if not self._enabled:
            return
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def _eta(self, fraction: float) -> str:
        done = fraction - self._first
        if done <= 0:
            return "?"
        return clock_time((time.monotonic() - self._began) * (1 - fraction) / done)


def with_mean_speed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last row, with tokens per second and MFU over the time of all, and the rows that all left out."""
    seconds = sum(row["step_s"] for row in rows)
    speed: dict[str, Any] = {"tokens_per_s": sum(row["tokens"] for row in rows) / seconds}
    if rows[-1]["mfu"] is not None:
        speed["mfu"] = sum(row["mfu"] * row["step_s"] for row in rows) / seconds
    left_out = sum(row["skipped"] or 0 for row in rows)
    return {**rows[-1], **speed, "skipped": left_out}


def describe(row: dict[str, Any], max_steps: int | None = None, *, short: bool = False) -> str:
    """One line for a metrics row: step, loss, speed, MFU; unless short also rate, norm and memory."""
    step = f"step {row['step']}" + (f"/{max_steps}" if max_steps else "")
    left_out = [f"rows left out: {row['skipped']:,}"] if row["skipped"] else []
    if row["split"] == "eval":
        loss = f"eval loss {row['loss']:.4f} over {row['supervised_tokens']:,} supervised tokens"
        return "  ".join([step, loss, *left_out])
    speed = f"{row['tokens_per_s']:,.0f} tokens/s"
    mfu = "mfu n/a" if row["mfu"] is None else f"mfu {row['mfu']:.1%}"
    parts = [step, f"loss {row['loss']:.4f}", speed, mfu]
    if not short:
        parts[2:2] = [f"lr {max(row['lr'].values()):.2e}", f"norm {row['grad_norm']:.3f}"]
        parts.append(f"{row['peak_gb']:.1f} GB")
    return "  ".join(parts + left_out)


def clock_time(seconds: float) -> str:
    """12:05 or 3:12:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
