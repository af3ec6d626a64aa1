"""How torchrun's own process, the parent of the ranks, reacts to SIGTERM and to a rank that fails.

torchrun loads it by name: `torchrun --logs-specs lmms_engine --signals-to-handle SIGINT,SIGHUP,SIGQUIT …`.

Left to itself torchrun 2.11 answers SIGTERM by sending it to the ranks and their loader workers, giving
them 30 seconds, less than a large checkpoint takes, and ending with code 1 and a traceback. With this,
SIGTERM goes to the ranks alone, they save in their own time, and torchrun ends with the exit code of the
first rank that failed. A "logs specification" is the door that torchrun offers to code in its process;
logs are left alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# They repeat, at length, what the failed rank has said already.
NOISY_LOGGERS = tuple(f"torch.distributed.elastic.{name}.api" for name in ("multiprocessing", "agent.server"))


class Agent(DefaultLogsSpecs):
    """torchrun's default log handling; making one installs the handlers in torchrun's process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        signal.signal(signal.SIGTERM, pass_on)
        if "--debug" not in sys.argv:
            sys.excepthook = leave
            for name in NOISY_LOGGERS:
                logging.getLogger(name).setLevel(logging.CRITICAL)


def pass_on(signum: int, frame: FrameType | None) -> None:
    """Send a signal on to every rank; without ranks yet, end as the signal asks."""
    ranks = psutil.Process().children()
    if not ranks:
        raise SystemExit(128 + signum)
    for rank in ranks:
        rank.send_signal(signum)


def exit_code(error: BaseException) -> tuple[int, str] | None:
    """(code, message) of a launcher that ends by `error`; the message is empty if a rank has said why.

    None for errors of the launcher itself.
    """
    if isinstance(error, SignalException):
        return 128 + error.sigval, f"stopped by {signal.Signals(error.sigval).name}"
    if not isinstance(error, ChildFailedError):
        return None
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode, ""
    name = signal.Signals(-failure.exitcode).name
    hint = ": out of host memory? A new start goes on from the last checkpoint" if name == "SIGKILL" else ""
    return 128 - failure.exitcode, f"error: rank {rank} was killed by {name}{hint}"


def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook of torchrun's process: end with the right code and at most one line."""
    known = exit_code(error)
    if known is None:
        sys.__excepthook__(kind, error, trace)
        return
    code, message = known
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an exception hook cannot choose the code otherwise
