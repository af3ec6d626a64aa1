"""An error that all ranks share is said once; one that a single rank has, by that rank."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import timedelta

PATIENCE = timedelta(seconds=3)   # ranks come upon a shared error at about the same time


def is_to_say(message: str, rank: int) -> bool:
    """Whether this rank prints `message`: rank 0 if it has it too, else the first that has.

    The ranks ask the store of torchrun's own process, which outlives them. Where there is none, or it does
    not answer, every rank says what it has.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    import torch.distributed as dist

    key = f"lmms_engine/said/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=PATIENCE)
        if rank:
            with suppress(dist.DistStoreError):   # rank 0 has no such error
                store.wait([key], PATIENCE)
        return store.add(key, 1) == 1
    except (dist.DistError, OSError):
        return True
