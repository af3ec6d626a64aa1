"""Which rows a logical shard sees in an epoch, and in which order: a pure function of (seed, epoch, shard).

Nothing is shuffled in place and nothing is drawn from a running generator, so a position in the order is
one number.

1. **Per source**: its rows are cut into slices of neighbouring rows (cheap to read); the slices are
   permuted anew in every epoch. Without shuffle they stay in file order. The row sequence of a source is
   endless: after one pass over all rows comes the next pass, permuted anew.
2. **Mixing** deals *chunks*, the next few rows of a source, to the logical shards in turn: draw d goes to
   shard d mod S, so each shard gets rows also from one small file.
   - All weights 1.0 (the default) and `mixture_stop: all`: the sources are one sequence, and an epoch is
     every row of every source exactly once.
   - Else a source is drawn with probability proportional to its weight. `first` ends the epoch when some
     source is used up. `all` ends it when every source has been used up once; until then a source that is
     used up starts over. Draws are stratified: within each block of draws the counts are as near to the
     weights as whole numbers can be.
3. **Per shard**: the rows of some consecutive chunks (a window) are shuffled among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from lmms_engine.datasets.sources import Source

WINDOW_ROWS = 1024
WINDOW_BYTES = 8 * 1024 * 1024  # of raw rows that a shard holds for shuffling
CHUNK_ROWS = 256
CHUNKS_PER_SHARD = 8  # small data are cut finer, so that every shard gets about this many chunks
RUN_BYTES = 16 * 1024 * 1024  # of neighbouring rows that are dealt one after the other: read or fetched once
MAX_SLICES = 1 << 18  # of a pool: what is permuted stays small however many rows there are
DRAWS_PER_BLOCK = 16  # per logical shard, at most
BLOCKS = 32  # at least, where there are as many draws: the shares are right at the end of each


class Address(NamedTuple):
    """A row of one of the run's sources."""

    source: int  # place in the list of sources
    shard: int  # physical shard
    row: int


def rng(seed: int, *keys: int) -> np.random.Generator:
    """A generator of its own for each purpose and place."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *keys])))


@dataclass(frozen=True)
class OrderSettings:
    """What the order depends on, besides the data."""

    seed: int
    num_logical_shards: int
    shuffle: bool
    weights: tuple[float, ...]
    mixture_stop: Literal["first", "all"]


class Order:
    """The order of one epoch over all sources."""

    def __init__(self, sources: Sequence[Source], settings: OrderSettings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        pooled = settings.mixture_stop == "all" and all(weight == 1.0 for weight in settings.weights)
        members = [list(range(len(sources)))] if pooled else [[i] for i in range(len(sources))]
        total = sum(source.num_rows for source in sources)
        self.chunk, self.window = _sizes(sources, total, settings)
        self._pools = [_Pool(sources, group, settings, epoch, self.window) for group in members]
        # A weight is of rows, and a slot holds fewer or more than one.
        pairs = zip(settings.weights, sources, strict=True)
        weights = np.array([1.0] if pooled else [weight / source.rows_each for weight, source in pairs])
        draws = total // (self.chunk * settings.num_logical_shards * BLOCKS)
        self._mix = _Mix(weights / weights.sum(), settings, epoch, min(max(draws, 1), DRAWS_PER_BLOCK))
        ends = [
            self._mix.find(i, math.ceil(pool.num_rows / self.chunk) - 1) for i, pool in enumerate(self._pools)
        ]
        last = max(ends) if settings.mixture_stop == "all" else min(ends)
        self._num_draws = last + 1
        ending = self._pools[ends.index(last)]
        # The draw that uses up the source holds only what is left of it.
        self._last_rows = ending.num_rows - (math.ceil(ending.num_rows / self.chunk) - 1) * self.chunk
        self.num_rows = last * self.chunk + self._last_rows

    def shard_rows(self, shard: int) -> int:
        """Rows of a logical shard in this epoch."""
        size = self.settings.num_logical_shards
        draws = len(range(shard, self._num_draws, size))
        cut = draws and (self._num_draws - 1) % size == shard
        return draws * self.chunk - (self.chunk - self._last_rows if cut else 0)

    def window_of(self, shard: int, position: int) -> tuple[list[Address], int]:
        """The window that holds a shard's row number `position`, and the place of that row in it."""
        chunks = self.window // self.chunk
        number, offset = divmod(position, self.window)
        addresses: list[Address] = []
        for i in range(number * chunks, (number + 1) * chunks):
            draw = shard + i * self.settings.num_logical_shards
            if draw >= self._num_draws:
                break
            pool, chunk = self._mix.draw(draw)
            count = self._last_rows if draw == self._num_draws - 1 else self.chunk
            addresses.extend(self._pools[pool].rows(chunk * self.chunk, count))
        if self.settings.shuffle:
            order = rng(self.settings.seed, 3, self.epoch, shard, number).permutation(len(addresses))
            addresses = [addresses[i] for i in order]
        return addresses, offset


def _sizes(sources: Sequence[Source], total: int, settings: OrderSettings) -> tuple[int, int]:
    """Rows of a chunk and of a window, a multiple of it."""
    row_bytes = max(source.row_bytes for source in sources)
    window = min(max(WINDOW_BYTES // row_bytes, 16), WINDOW_ROWS)
    if not settings.shuffle:
        return 1, window
    smallest = min(source.num_rows for source in sources)
    chunk = total // (settings.num_logical_shards * CHUNKS_PER_SHARD)
    chunk = max(min(chunk, CHUNK_ROWS, window, max(smallest // CHUNKS_PER_SHARD, 1)), 1)
    return chunk, window // chunk * chunk


class _Pool:
    """The endless row sequence of one source, or of several taken as one."""

    def __init__(
        self, sources: Sequence[Source], members: list[int], settings: OrderSettings, epoch: int, window: int
    ) -> None:
        self._settings = settings
        self._key = (epoch, members[0])
        self.num_rows = sum(sources[member].num_rows for member in members)
        row_bytes = max(sources[member].row_bytes for member in members)
        size = self.num_rows // (settings.num_logical_shards * CHUNKS_PER_SHARD)
        size = min(size, max(min(CHUNK_ROWS, window), RUN_BYTES // row_bytes))
        size = max(size, -(-self.num_rows // MAX_SLICES), 1)
        pieces = []
        for member in members:
            for shard in range(sources[member].num_shards):
                rows = sources[member].shard_rows(shard)
                starts = np.arange(0, rows, size if settings.shuffle else max(rows, 1), dtype=np.int64)
                lengths = np.diff(np.append(starts, rows))
                pieces.append(
                    np.stack([np.full_like(starts, member), np.full_like(starts, shard), starts, lengths])
                )
        self._slices = np.concatenate(pieces, axis=1).T  # source, shard, first row, number of rows
        self._pass: tuple[int, np.ndarray, np.ndarray] | None = None  # number, slices in order, their ends

    def rows(self, position: int, count: int) -> list[Address]:
        """`count` rows from `position` of the sequence on."""
        addresses: list[Address] = []
        while count:
            number, offset = divmod(position, self.num_rows)
            slices, ends = self._ordered(number)
            i = int(np.searchsorted(ends, offset, side="right"))
            source, shard, start, length = slices[i].tolist()
            first = offset - (int(ends[i]) - length)
            taken = min(length - first, count)
            addresses.extend(Address(source, shard, start + first + k) for k in range(taken))
            position, count = position + taken, count - taken
        return addresses

    def _ordered(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self._pass is None or self._pass[0] != number:
            slices = self._slices
            if self._settings.shuffle:
                slices = slices[rng(self._settings.seed, 1, *self._key, number).permutation(len(slices))]
            self._pass = (number, slices, np.cumsum(slices[:, 3]))
        return self._pass[1], self._pass[2]


class _Mix:
    """Which pool each draw takes its chunk from."""

    def __init__(self, shares: np.ndarray, settings: OrderSettings, epoch: int, draws: int) -> None:
        self._shares = shares
        self._settings = settings
        self._epoch = epoch
        self._size = draws * settings.num_logical_shards   # of a block
        self._before = [np.zeros(len(shares), dtype=np.int64)]  # block -> chunks of each pool drawn before it
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None  # number, pool of each draw, its chunk

    def draw(self, number: int) -> tuple[int, int]:
        """(pool, chunk of that pool's sequence) of a draw."""
        block, offset = divmod(number, self._size)
        pools, chunks = self._drawn(block)
        return int(pools[offset]), int(chunks[offset])

    def find(self, pool: int, chunk: int) -> int:
        """The draw that takes a given chunk of a pool."""
        block = 0
        while self._drawn_before(block + 1)[pool] <= chunk:
            block += 1
        pools, chunks = self._drawn(block)
        return block * self._size + int(np.flatnonzero((pools == pool) & (chunks == chunk))[0])

    def _drawn_before(self, block: int) -> np.ndarray:
        while len(self._before) <= block:
            before = self._before[-1]
            wanted = self._shares * (self._size * len(self._before)) - before
            self._before.append(before + _whole(wanted, self._size))
        return self._before[block]

    def _drawn(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        if self._block is None or self._block[0] != block:
            before = self._drawn_before(block)
            counts = self._drawn_before(block + 1) - before
            pools = np.repeat(np.arange(len(counts)), counts)
            pools = rng(self._settings.seed, 2, self._epoch, block).permutation(pools)
            chunks = np.empty_like(pools)
            for pool in range(len(counts)):
                chunks[pools == pool] = before[pool] + np.arange(counts[pool])
            self._block = (block, pools, chunks)
        return self._block[1], self._block[2]


def _whole(wanted: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers >= 0 nearest to `wanted` that sum up to `total`, as `wanted` does; largest remainders
    first."""
    counts = np.floor(np.maximum(wanted, 0)).astype(np.int64)
    while (left := total - int(counts.sum())) != 0:
        rest = wanted - counts
        i = int(np.argmax(rest)) if left > 0 else int(np.argmin(np.where(counts > 0, rest, np.inf)))
        counts[i] += 1 if left > 0 else -1
    return counts
