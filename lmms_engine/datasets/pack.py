"""Packers: which samples share a flat sequence. Pure Python; they look at `len(sample)` and at nothing else.

No pack is ever longer than `length`, none is empty, and every sample goes into exactly one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Generic, Protocol, TypeVar

from lmms_engine.registry import Registry

S = TypeVar("S", bound=Sized)
DEFAULT_OPEN_BINS = 16


class Packer(Protocol[S]):
    """Takes samples one by one and gives packs whenever one is complete."""

    @property
    def bins(self) -> list[list[S]]:
        """Samples taken but not yet given, bin by bin: the packer's whole state."""
        ...

    def add(self, sample: S) -> list[list[S]]:
        """Takes a sample; returns the packs that this completes."""
        ...

    def flush(self) -> list[list[S]]:
        """Closes all bins and returns them as packs, oldest first."""
        ...

    def restore(self, bins: Sequence[Sequence[S]]) -> None:
        """Puts back what `bins` gave."""
        ...


class FirstFit(Generic[S]):
    """First-fit with a bounded number of open bins.

    A sample goes into the oldest open bin that it fits in. If it fits in none, it opens a new one; if
    `open_bins` are open already, the fullest is given away first (the oldest of equals). A bin that is
    exactly full is given at once. A sample longer than `length` is the caller's mistake.
    """

    def __init__(self, length: int, open_bins: int = DEFAULT_OPEN_BINS) -> None:
        if length < 1 or open_bins < 1:
            raise ValueError(f"length and open_bins must be positive, got {length} and {open_bins}")
        self.length = length
        self.open_bins = open_bins
        self._bins: list[list[S]] = []
        self._room: list[int] = []  # tokens left, bin by bin

    @property
    def bins(self) -> list[list[S]]:
        return [list(bin_) for bin_ in self._bins]

    def add(self, sample: S) -> list[list[S]]:
        size = len(sample)
        if not 0 < size <= self.length:
            raise ValueError(f"a sample of {size} tokens does not fit in packs of {self.length}")
        room = self._room
        for i, free in enumerate(room):
            if size <= free:
                self._bins[i].append(sample)
                room[i] = free - size
                return [self._close(i)] if free == size else []
        done = []
        while len(room) >= self.open_bins:  # more than one only after a resume with fewer bins
            done.append(self._close(room.index(min(room))))
        self._bins.append([sample])
        room.append(self.length - size)
        if size == self.length:
            done.append(self._close(len(room) - 1))
        return done

    def flush(self) -> list[list[S]]:
        done, self._bins, self._room = self._bins, [], []
        return done

    def restore(self, bins: Sequence[Sequence[S]]) -> None:
        self._bins = [list(bin_) for bin_ in bins]
        self._room = [self.length - sum(map(len, bin_)) for bin_ in self._bins]
        if min(self._room, default=0) < 0:
            raise ValueError(f"a restored bin holds more than {self.length} tokens")

    def _close(self, i: int) -> list[S]:
        del self._room[i]
        return self._bins.pop(i)


class Single(Generic[S]):
    """No packing: every sample is its own pack."""

    @property
    def bins(self) -> list[list[S]]:
        return []

    def add(self, sample: S) -> list[list[S]]:
        return [[sample]]

    def flush(self) -> list[list[S]]:
        return []

    def restore(self, bins: Sequence[Sequence[S]]) -> None:
        if bins:
            raise ValueError("without packing no sample waits in a bin")


# packing_strategy -> (length, **packing_kwargs) -> Packer
PACKERS: Registry[Callable[..., Packer]] = Registry("packing strategy")
PACKERS.register("first_fit")(FirstFit)
