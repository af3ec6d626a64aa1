"""Experiment trackers: guests of a run. One that fails or hangs is dropped with a warning; training goes on.

Only global rank 0 has trackers, on a thread of their own, so no other rank ever waits for one. The record of
a run is `metrics.jsonl`; what a tracker gets is a copy.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmms_engine.registry import Registry

log = logging.getLogger(__name__)

QUEUE_ROWS = 10_000  # rows a slow tracker may lag behind before it loses some


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of the run. start_step: the step it resumed from, 0 for a new run."""

    run_dir: Path
    name: str
    start_step: int
    config: dict[str, Any]


class Tracker(Protocol):
    """Receives a run's numbers. All methods are called on one thread, in order; any of them may raise."""

    def start(self, run: RunInfo) -> None: ...

    def log(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


TRACKERS: Registry[Callable[[], Tracker]] = Registry("tracker")


@TRACKERS.register("wandb")
class Wandb:
    """Weights & Biases; offline unless WANDB_API_KEY is set (WANDB_MODE decides if given)."""

    def start(self, run: RunInfo) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lmms-engine"),
            name=run.name,
            id=run_id(run.run_dir),
            resume="allow" if mode == "online" else None,  # offline runs join at `wandb sync` by their id
            dir=str(run.run_dir),
            config=run.config,
            mode=mode,
            # a longer wait for a network that is not there would hold the process back at its end
            settings=wandb.Settings(console="off", silent=True, init_timeout=30),
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()


@TRACKERS.register("tensorboard")
class TensorBoard:
    """Event files under `<run folder>/tensorboard`."""

    def start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.start_step + 1 if run.start_step else None  # hides points after the resumed step
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def run_id(run_dir: Path) -> str:
    """An id that stays with the run folder, so that a resumed run continues the same curve."""
    path = run_dir / "wandb" / "run-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(os.urandom(6).hex(), encoding="ascii")
    return path.read_text(encoding="ascii").strip()


class TrackerThread:
    """One tracker behind a queue: `log` returns at once, whatever the tracker does.

    finish_s: how long the end of a run waits for it.
    """

    def __init__(self, name: str, run: RunInfo, *, finish_s: float = 15.0) -> None:
        self.name = name
        self.failed = False
        self._finish_s = finish_s
        self._rows: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(QUEUE_ROWS)
        self._thread = threading.Thread(
            target=self._work, args=(TRACKERS.get(name), run), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def log(self, values: dict[str, float], step: int) -> None:
        """Hands a row over; a full queue means the tracker hangs, and it is dropped."""
        if self.failed:
            return
        try:
            self._rows.put_nowait((values, step))
        except queue.Full:
            self._drop(f"it is {QUEUE_ROWS} rows behind")

    def finish(self) -> None:
        """Waits for the rows still queued, within the limit."""
        if self.failed:
            return
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self._drop(f"it is {QUEUE_ROWS} rows behind")
            return
        self._thread.join(self._finish_s)
        if self._thread.is_alive():
            self._drop(f"it did not finish within {self._finish_s:g} s")

    def _work(self, build: Callable[[], Tracker], run: RunInfo) -> None:
        try:
            tracker = build()
            tracker.start(run)
            while (item := self._rows.get()) is not None:
                tracker.log(*item)
            tracker.finish()
        except BaseException as error:  # a guest's failure of any kind, SystemExit of a client library too
            self._drop(f"{type(error).__name__}: {error}")

    def _drop(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            log.warning("tracker %s is off from here on (%s); metrics.jsonl has everything", self.name, why)


class Trackers:
    """All trackers of a run. Made on rank 0 only; `names` may hold "none"."""

    def __init__(self, names: list[str], run: RunInfo) -> None:
        self._threads = [TrackerThread(name, run) for name in names if name != "none"]

    def log(self, row: dict[str, Any]) -> None:
        """Sends the numbers of a metrics row, flattened as `<split>/<key>` and `<split>/<key>/<name>`."""
        values = {f"{row['split']}/{name}": value for name, value in flatten(row).items() if name != "step"}
        for thread in self._threads:
            thread.log(values, row["step"])

    def finish(self) -> None:
        """Ends all trackers, each within its limit."""
        for thread in self._threads:
            thread.finish()


def flatten(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in nested mappings under slash-joined names; nulls and texts are left out."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat
