"""What a rank was doing when it failed, or when it seemed to hang: `crash-rank<k>.json` in the run folder.

Ranks wait for one another in collectives. One that fails takes the others down after a while, and one that
hangs makes all of them time out, each at a place that says nothing. The files say which rank had which rows,
where in the code it was, and what it last asked of the others.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.parallel.flight import last_collectives

LOG = logging.getLogger(__name__)

# NCCL ends the process when a collective times out, without a word to Python; so it is written before that.
PATIENCE = 0.9   # of the collectives' timeout


class CrashReport:
    """Knows the present step of a rank; writes it down on an error, and when the step takes too long.

    with CrashReport(run_dir, rank, timeout_s) as report:
        report.note(step, micros)     # as each step begins
    """

    def __init__(self, run_dir: Path, rank: int, timeout_s: float) -> None:
        self.path = run_dir / f"crash-rank{rank}.json"
        self.patience_s = PATIENCE * timeout_s
        self._rank = rank
        self._thread = threading.get_ident()   # the one that trains
        self._step = 0
        self._micros: list[PackedBatch] = []
        self._since = time.monotonic()
        self._over = threading.Event()
        self._written = False   # whether for the present step
        self._collectives: list[dict[str, Any]] | None = None   # as they were while it waited
        self._watch = threading.Thread(target=self._look, name="crash-report", daemon=True)

    def __enter__(self) -> CrashReport:
        self._since = time.monotonic()
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watch.join()
        if isinstance(error, Exception):   # not a stop that was asked for
            self._write("".join(traceback.format_exception(error)))

    def note(self, step: int, micros: list[PackedBatch]) -> None:
        """The step that begins now and its batches, still on the host."""
        self._step, self._micros, self._since = step, micros, time.monotonic()
        self._written, self._collectives = False, None

    def _look(self) -> None:
        while not self._over.wait(self.patience_s / 10):
            waited = time.monotonic() - self._since
            if waited > self.patience_s and not self._written:
                self._collectives = last_collectives()
                frame = sys._current_frames()[self._thread]
                place = "".join(traceback.format_stack(frame))
                self._write(f"no progress for {waited:.0f} s: a rank may wait for another. It is at\n{place}")
                self._written = True

    def _write(self, error: str) -> None:
        body = {
            "rank": self._rank,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": self._step,
            "error": error,
            "collectives": self._collectives or last_collectives(),
            "micro_batches": [describe(batch) for batch in self._micros],
        }
        text = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
        try:
            self.path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as failure:   # a full disk, say; the error itself is still to be told
            LOG.warning("%s could not be written: %s", self.path, failure.strerror)


def describe(batch: PackedBatch) -> dict[str, Any]:
    """A batch's rows and media; a batch without pictures of its own has a stand-in's."""
    return {
        "rows": [row.id for row in batch.rows],
        "lengths": batch.segments.lengths(),
        "stand_ins": batch.segments.num_segments - len(batch.rows),
        "media": {name: list(tensor.shape) for name, tensor in sorted(batch.media.items())},
    }
