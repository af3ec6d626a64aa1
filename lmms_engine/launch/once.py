"""An error that all ranks share is said once; one that a single rank has, by that rank; what follows from
another rank's error, by nobody."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PATIENCE = timedelta(seconds=3)   # ranks come upon a shared error at about the same time
POLL_S = 0.05                     # torch's own waiting prints a warning when it is in vain
SAID = "lmms_engine/said"


def is_to_say(message: str, rank: int) -> bool:
    """Whether this rank prints `message`: rank 0 if it has it too, else the first that has.

    The ranks ask the store of torchrun's own process, which outlives them. Where there is none, or it does
    not answer, every rank says what it has.
    """
    import torch.distributed as dist

    key = f"{SAID}/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        store = _store()
        if store is None:
            return True
        if rank:
            _wait(store, key)
        first = store.add(key, 1) == 1
        if first:
            store.add(SAID, 1)
        return first
    except (dist.DistError, OSError):
        return True


def another_has_spoken() -> bool:
    """Whether some rank of this run has said an error, or does so in a few seconds."""
    import torch.distributed as dist

    try:
        store = _store()
        return store is not None and _wait(store, SAID)
    except (dist.DistError, OSError):
        return False


def _store() -> TCPStore | None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=PATIENCE)


def _wait(store: TCPStore, key: str) -> bool:
    """Whether `key` is there, or appears in time."""
    end = time.monotonic() + PATIENCE.total_seconds()
    while not (found := store.check([key])) and time.monotonic() < end:
        time.sleep(POLL_S)
    return found
