"""Packers: which samples share a flat sequence. Pure Python; of a sample they see its length, its media units
and its cost, and nothing else.

No pack is ever longer than `length`, none is empty, and every sample goes into exactly one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Generic, Protocol, TypeVar

from lmms_engine.registry import Registry

S = TypeVar("S", bound=Sized)
DEFAULT_OPEN_BINS = 16
DEAR_EVERY = 16  # one pack in so many may be dear; see `Balanced`


class Packer(Protocol[S]):
    """Takes samples one by one and gives packs whenever one is complete."""

    @property
    def bins(self) -> list[list[S]]:
        """Samples taken but not yet given, bin by bin: the packer's state, together with `given`."""
        ...

    def add(self, sample: S) -> list[list[S]]:
        """Takes a sample; returns the packs that this completes."""
        ...

    def flush(self) -> list[list[S]]:
        """Closes all bins and returns them as packs, oldest first; `given` starts at 0 again."""
        ...

    def restore(self, bins: Sequence[Sequence[S]], given: int = 0) -> None:
        """Puts back what `bins` gave, after `given` packs of the epoch."""
        ...


class FirstFit(Generic[S]):
    """First-fit with a bounded number of open bins.

    A sample goes into the oldest open bin that it fits in. If it fits in none, it opens a new one; if
    `open_bins` are open already, the fullest is given away first (the oldest of equals). A bin that is
    exactly full is given at once. A sample longer than `length`, or with more than `media_units`, is the
    caller's mistake.

    media_units: most media units of a pack; None: no limit. units: the media units of a sample.
    """

    def __init__(
        self,
        length: int,
        open_bins: int = DEFAULT_OPEN_BINS,
        *,
        media_units: int | None = None,
        units: Callable[[S], int] | None = None,
    ) -> None:
        if length < 1 or open_bins < 1:
            raise ValueError(f"length and open_bins must be positive, got {length} and {open_bins}")
        if (media_units is None) != (units is None):
            raise ValueError("media_units and units go together")
        self.length = length
        self.open_bins = open_bins
        self.media_units = media_units
        self._units = units
        self._bins: list[list[S]] = []
        self._room: list[int] = []  # tokens left, bin by bin
        self._places: list[int] = []  # media units left, bin by bin; not kept without a limit

    @property
    def bins(self) -> list[list[S]]:
        return [list(bin_) for bin_ in self._bins]

    def add(self, sample: S) -> list[list[S]]:
        size, units = self._measure(sample)
        i = self._find(size, units)
        done = []
        if i < 0:
            while len(self._bins) >= self.open_bins:  # more than one only after a resume with fewer bins
                done.append(self._close(self._fullest()))
            i = self._open()
        self._put(i, sample, size, units)
        if self._room[i] == 0:
            done.append(self._close(i))
        return done

    def flush(self) -> list[list[S]]:
        done, self._bins, self._room, self._places = self._bins, [], [], []
        return done

    def restore(self, bins: Sequence[Sequence[S]], given: int = 0) -> None:
        self.flush()
        for bin_ in bins:
            i = self._open()
            for sample in bin_:
                self._put(i, sample, *self._measure(sample))
        if min(self._room, default=0) < 0:
            raise ValueError(f"a restored bin holds more than {self.length} tokens")
        if min(self._places, default=0) < 0:
            raise ValueError(f"a restored bin holds more than {self.media_units} media units")

    def _measure(self, sample: S) -> tuple[int, int]:
        size = len(sample)
        if not 0 < size <= self.length:
            raise ValueError(f"a sample of {size} tokens does not fit in packs of {self.length}")
        if self._units is None:
            return size, 0
        units = self._units(sample)
        if units > self.media_units:
            raise ValueError(f"a sample of {units} media units does not fit in packs of {self.media_units}")
        return size, units

    def _find(self, size: int, units: int) -> int:
        """The bin to use, -1 if the sample fits in none."""
        places = self._places
        for i, free in enumerate(self._room):
            if size <= free and (not places or units <= places[i]):
                return i
        return -1

    def _put(self, i: int, sample: S, size: int, units: int) -> None:
        self._bins[i].append(sample)
        self._room[i] -= size
        if self._units is not None:
            self._places[i] -= units

    def _fullest(self) -> int:
        left = self._left_of_each()
        return left.index(min(left))

    def _left_of_each(self) -> list[float]:
        """The part of each bin that is free, of tokens or of media units, whatever is less."""
        tokens = [free / self.length for free in self._room]
        if not self._places:
            return tokens
        return [
            min(free, places / self.media_units)
            for free, places in zip(tokens, self._places, strict=True)
        ]

    def _open(self) -> int:
        self._bins.append([])
        self._room.append(self.length)
        if self.media_units is not None:
            self._places.append(self.media_units)
        return len(self._bins) - 1

    def _close(self, i: int) -> list[S]:
        del self._room[i]
        if self._places:
            del self._places[i]
        return self._bins.pop(i)


class BestFit(FirstFit[S]):
    """As first-fit, but a sample goes into the bin that it leaves the least room in; of equals the oldest."""

    def _find(self, size: int, units: int) -> int:
        best, least = -1, self.length + 1
        places = self._places
        for i, free in enumerate(self._room):
            if size <= free < least and (not places or units <= places[i]):
                best, least = i, free
        return best


class Balanced(FirstFit[S]):
    """Packs of equal cost, so that ranks and micro-batches take equally long, without a word between ranks.

    Best-fit by cost: a pack is full when it costs `budget`, or when it holds `length` tokens. A sample that
    costs `budget` or more by itself is *dear*: it is a pack of its own, and is held back until the shard has
    given 15 packs, 31, 47, … of the epoch (`DEAR_EVERY`). All shards count alike, so dear packs fall into the
    same steps at all ranks. The dearest goes first. Those that wait count as open bins, and one bin is always
    left for other samples; if more wait, the least dear goes out of turn.

    cost: what a sample costs, in the unit of `budget`.
    """

    def __init__(
        self,
        length: int,
        open_bins: int = DEFAULT_OPEN_BINS,
        *,
        cost: Callable[[S], float],
        budget: float,
        media_units: int | None = None,
        units: Callable[[S], int] | None = None,
    ) -> None:
        super().__init__(length, open_bins, media_units=media_units, units=units)
        if budget <= 0:
            raise ValueError(f"budget must be positive, got {budget}")
        self.budget = budget
        self._cost = cost
        self._left: list[float] = []  # cost left, bin by bin
        self._dear: list[tuple[float, S]] = []  # dearest first
        self._given = 0  # packs of this epoch

    @property
    def bins(self) -> list[list[S]]:
        return [*super().bins, *([sample] for _, sample in self._dear)]

    def add(self, sample: S) -> list[list[S]]:
        size, units = self._measure(sample)
        cost = self._cost(sample)
        done: list[list[S]] = []
        if cost >= self.budget:
            self._hold(cost, sample)
            while len(self._dear) >= self.open_bins:
                self._give([self._dear.pop()[1]], done)
            while self._bins and len(self._bins) + len(self._dear) > self.open_bins:
                self._give(self._close(self._fullest()), done)
            return done
        i = self._find_by_cost(size, units, cost)
        if i < 0:
            while self._bins and len(self._bins) + len(self._dear) >= self.open_bins:
                self._give(self._close(self._fullest()), done)
            i = self._open()
        self._put(i, sample, size, units, cost)
        if self._room[i] == 0:
            self._give(self._close(i), done)
        return done

    def flush(self) -> list[list[S]]:
        done = [*super().flush(), *([sample] for _, sample in self._dear)]
        self._left, self._dear, self._given = [], [], 0
        return done

    def restore(self, bins: Sequence[Sequence[S]], given: int = 0) -> None:
        dear = [bin_[0] for bin_ in bins if self._is_dear(bin_)]
        super().restore([bin_ for bin_ in bins if not self._is_dear(bin_)])
        for sample in dear:
            self._hold(self._cost(sample), sample)
        self._given = given

    def _is_dear(self, bin_: Sequence[S]) -> bool:
        return len(bin_) == 1 and self._cost(bin_[0]) >= self.budget

    def _put(self, i: int, sample: S, size: int, units: int, cost: float | None = None) -> None:
        super()._put(i, sample, size, units)
        self._left[i] -= self._cost(sample) if cost is None else cost

    def _hold(self, cost: float, sample: S) -> None:
        self._dear.append((cost, sample))
        self._dear.sort(key=lambda item: -item[0])  # stable: of equals the first stays first

    def _give(self, pack: list[S], done: list[list[S]]) -> None:
        """Adds a pack to those done, and a dear one after it where it is time for that."""
        done.append(pack)
        self._given += 1
        if self._dear and self._given % DEAR_EVERY == DEAR_EVERY - 1:
            self._give([self._dear.pop(0)[1]], done)

    def _find_by_cost(self, size: int, units: int, cost: float) -> int:
        best, least = -1, float("inf")
        room, places = self._room, self._places
        for i, left in enumerate(self._left):
            if cost <= left < least and size <= room[i] and (not places or units <= places[i]):
                best, least = i, left
        return best

    def _fullest(self) -> int:
        tokens = super()._left_of_each()
        left = [min(free, cost / self.budget) for free, cost in zip(tokens, self._left, strict=True)]
        return left.index(min(left))

    def _open(self) -> int:
        self._left.append(self.budget)
        return super()._open()

    def _close(self, i: int) -> list[S]:
        del self._left[i]
        return super()._close(i)


class Single(Generic[S]):
    """No packing: every sample is its own pack."""

    @property
    def bins(self) -> list[list[S]]:
        return []

    def add(self, sample: S) -> list[list[S]]:
        return [[sample]]

    def flush(self) -> list[list[S]]:
        return []

    def restore(self, bins: Sequence[Sequence[S]], given: int = 0) -> None:
        if bins:
            raise ValueError("without packing no sample waits in a bin")


# packing_strategy -> (length, open_bins, **what it measures) -> Packer
PACKERS: Registry[Callable[..., Packer]] = Registry("packing strategy")
PACKERS.register("first_fit")(FirstFit)
PACKERS.register("best_fit")(BestFit)
PACKERS.register("balanced")(Balanced)
