"""What the fuzz tests share: how many cases, how bytes are damaged, and a limit of time for each case."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("FUZZ_CASES", "0"))  # 0: the few of the suite
CASE_SECONDS = 10


def cases(few: int) -> settings:
    """The same `few` cases in every run, or FUZZ_CASES new ones."""
    return settings(
        max_examples=CASES or few,
        derandomize=not CASES,
        deadline=None,  # `limited` stops a case that hangs
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def limited(seconds: int = CASE_SECONDS) -> Iterator[None]:
    """TimeoutError if the body takes longer; a body that never comes back from C is ended by the suite's
    own limit."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with some bytes changed, and perhaps a piece cut out, doubled, or the end missing."""
    out = bytearray(data)
    # Formats keep what matters most at one end.
    places = st.one_of(
        st.integers(0, len(out) - 1),
        st.integers(0, min(len(out), 64) - 1),
        st.integers(max(len(out) - 256, 0), len(out) - 1),
    )
    for _ in range(draw(st.integers(0, 6))):
        out[draw(places)] = draw(st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255))
    how = draw(st.sampled_from(["as it is", "as it is", "cut", "end", "twice"]))
    at, size = draw(places), draw(st.integers(1, 64))
    if how == "cut":
        del out[at : at + size]
    elif how == "end":
        del out[at:]
    elif how == "twice":
        out[at:at] = out[at : at + size]
    return bytes(out)
