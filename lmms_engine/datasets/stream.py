"""One logical shard: rows in order, through the processor, into packs; and the state to go on from.

The state after a pack is a position and the addresses of the samples that wait in the packer. On resume
those few rows are read again; nothing else is repeated and nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lmms_engine.datasets.cost import media_units
from lmms_engine.datasets.encoded import EncodedRow
from lmms_engine.datasets.limits import DEFAULT_SECONDS, media_time_limit
from lmms_engine.datasets.order import Address, Order, OrderSettings, rng
from lmms_engine.datasets.pack import Packer
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import parse_row
from lmms_engine.datasets.skips import TRUNCATED, SkipRecord, address, skip_or_stop
from lmms_engine.datasets.sources import Raw, Source
from lmms_engine.errors import BadRow, UserError, printable
from lmms_engine.segments import RowRef

if TYPE_CHECKING:
    from lmms_engine.datasets.processor import Processor

Rows = list[tuple[Address, Raw | None]]  # at one place of the order: a row, or those of a slot

STREAM_WINDOW_ROWS = 256
REPORT_ROWS = 64  # a shard that gives no pack for this many rows reports its skips all the same


@dataclass(frozen=True)
class RowPolicy:
    """What is done with rows that are bad or too long.

    A row that is too long after the processor is dropped and counted, or is an error. With `truncate` the
    processor shortens it, and what it cannot shorten is dropped.
    """

    on_bad_row: Literal["stop", "skip"]
    overlong: Literal["drop", "error", "truncate"]
    limit: int          # most tokens of a row
    limit_name: str     # the setting it comes from
    media_limit: int | None = None  # most media units of a row, `packing_kwargs.media_units`
    media_timeout: float = DEFAULT_SECONDS  # of each picture, clip and sound


@dataclass(frozen=True)
class Turn:
    """What a shard gives at its turn. Without samples: a report, or, if `state["ended"]`, the epoch's end."""

    shard: int
    samples: list[Sample] | None
    state: dict[str, Any]
    skipped: tuple[SkipRecord, ...] = ()


@dataclass
class Position:
    """Where a shard stands. JSON-able through `state` and `from_state`."""

    epoch: int = 0
    taken: int = 0  # rows of the epoch taken from the order; slots, where a source is slotted
    packs: int = 0  # packs given in the epoch
    seen: int = 0  # rows read in all epochs
    bad: int = 0  # of these, rows that could not be used
    overlong: int = 0  # of these, rows that were too long
    ended: bool = False  # the epoch's rows are all given
    bins: list[list[Address]] = field(default_factory=list)  # waiting in the packer
    ready: list[list[Address]] = field(default_factory=list)  # complete packs that were not given yet

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Position:
        """The position that `state()` described."""
        packs = {key: [[Address(*a) for a in pack] for pack in state[key]] for key in ("bins", "ready")}
        return cls(**{**state, **packs})

    def state(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        packs = {key: [[list(a) for a in pack] for pack in getattr(self, key)] for key in ("bins", "ready")}
        return {**vars(self), **packs}


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the stretches of consecutive numbers."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def waiting(state: dict[str, Any]) -> int:
    """Rows that were taken but have not been given in a pack yet."""
    return sum(len(pack) for key in ("bins", "ready") for pack in state[key])


class Orders:
    """The order of the current epoch, shared by the shards of a process."""

    def __init__(self, sources: Sequence[Source], settings: OrderSettings) -> None:
        self.sources = sources
        self.settings = settings
        self._last: Order | None = None

    @property
    def streamed(self) -> bool:
        """True for a dataset that can only be read from its start; it is then the only source."""
        return any(source.streamed for source in self.sources)

    def num_rows(self, epoch: int) -> int | None:
        """Rows of an epoch over all shards; None if nobody knows."""
        return self.sources[0].num_rows if self.streamed else self.of(epoch).num_rows

    def shard_rows(self, epoch: int, shard: int) -> int:
        """Rows of an epoch in one logical shard; 0 if nobody knows."""
        if self.streamed:
            return len(range(shard, self.num_rows(epoch) or 0, self.settings.num_logical_shards))
        return self.of(epoch).shard_rows(shard)

    def of(self, epoch: int) -> Order:
        """The order of an epoch."""
        if self._last is None or self._last.epoch != epoch:
            self._last = Order(self.sources, self.settings, epoch)
        return self._last


class ShardStream:
    """The packs of one logical shard, epoch after epoch."""

    def __init__(
        self,
        shard: int,
        orders: Orders,
        processor: Processor,
        packer: Callable[[], Packer],
        policy: RowPolicy,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.shard = shard
        self._sources = orders.sources
        self._orders = orders
        self._processor = processor
        self._policy = policy
        self._packer = packer()
        self._position = Position() if state is None else Position.from_state(state)
        self._numbers = {source.name: i for i, source in enumerate(self._sources)}
        self._skipped: list[SkipRecord] = []
        self._rows: Iterator[Rows] | None = None
        if state is not None:
            given = self._position.packs + len(self._position.ready)
            bins = [[self._reread(a) for a in pack] for pack in self._position.bins]
            self._packer.restore(bins, given)
        self._ready = [[self._reread(a) for a in pack] for pack in self._position.ready]

    @property
    def key(self) -> tuple[bool, int, int]:
        """Shards take turns in the order of this key."""
        return self._position.ended, self._position.packs, self.shard

    @property
    def ended(self) -> bool:
        """The epoch's rows have all been given."""
        return self._position.ended

    def next_epoch(self) -> None:
        """Starts over with the rows of the next epoch."""
        position = self._position
        position.epoch, position.taken, position.packs, position.ended = position.epoch + 1, 0, 0, False
        self._packer.restore([])   # after a resume it would go on counting the packs of the old epoch
        self._rows = None

    def next_turn(self) -> Turn:
        """The next pack with the state after it; or, without a pack, a report, or the end of the epoch."""
        position = self._position
        silent = 0
        while not self._ready and not position.ended and silent < REPORT_ROWS:
            if self._rows is None:
                self._rows = self._read_from(position.taken)
            item = next(self._rows, None)
            if item is None:
                self._ready = self._packer.flush()
                position.ended = not self._ready
                break
            position.taken += 1
            silent += 1
            for at, raw in item:
                position.seen += 1
                sample = self._sample(at, raw)
                if sample is not None:
                    self._ready += self._packer.add(sample)
        samples = self._ready.pop(0) if self._ready else None
        if samples is not None:
            position.packs += 1
        skipped, self._skipped = tuple(self._skipped), []
        return Turn(self.shard, samples, self._state(), skipped)

    def _state(self) -> dict[str, Any]:
        self._position.bins = [[self._at(sample.row) for sample in pack] for pack in self._packer.bins]
        self._position.ready = [[self._at(sample.row) for sample in pack] for pack in self._ready]
        return self._position.state()

    def _at(self, ref: RowRef) -> Address:
        return Address(self._numbers[ref.source], ref.shard, ref.row)

    # Reading -----------------------------------------------------------------------------------------

    def _read_from(self, position: int) -> Iterator[Rows]:
        """Rows of the epoch from `position` on, in order."""
        if self._orders.streamed:
            yield from ([row] for row in self._read_stream(position))
            return
        order = self._orders.of(self._position.epoch)
        total = order.shard_rows(self.shard)
        while position < total:
            addresses, offset = order.window_of(self.shard, position)
            addresses = addresses[offset:]
            yield from self._fetch(addresses)
            position += len(addresses)

    def _fetch(self, addresses: list[Address]) -> Iterator[Rows]:
        """Rows by address. Those that are dear to reach one by one are read in file order first."""
        held: dict[Address, Rows] = {}
        groups: dict[tuple[int, int], set[int]] = {}
        for a in addresses:
            if not self._sources[a.source].random_access:
                groups.setdefault((a.source, a.shard), set()).add(a.row)
        for (number, shard), wanted in sorted(groups.items()):
            source = self._sources[number]
            if source.slotted:
                for first, stop in _runs(sorted(wanted)):
                    for slot, rows in source.slots(shard, first, stop):
                        held[Address(number, shard, slot)] = [
                            (Address(number, shard, row), raw) for row, raw in rows
                        ]
                continue
            last = max(wanted)
            for row, raw in source.rows(shard, min(wanted)):
                if row in wanted:
                    at = Address(number, shard, row)
                    held[at] = [(at, raw)]
                if row >= last:
                    break
        for a in addresses:
            yield held.pop(a) if a in held else [(a, self._read(a))]

    def _read(self, at: Address) -> Raw | None:
        source = self._sources[at.source]
        try:
            return source.read(at.shard, at.row)
        except UserError:
            raise
        except Exception as error:  # a fault in the user's own dataset: say at which row
            ref = RowRef(source.name, at.shard, at.row, f"{source.name}:{at.shard}:{at.row}")
            raise UserError(f"{address(ref, source.place(at.shard, at.row))}: {one_line(error)}") from error

    def _read_stream(self, position: int) -> Iterator[tuple[Address, Raw | None]]:
        """Every S-th row of a dataset without random access; shuffled within windows only."""
        settings = self._orders.settings
        number, offset = divmod(position, STREAM_WINDOW_ROWS)
        wanted = self.shard + number * STREAM_WINDOW_ROWS * settings.num_logical_shards
        rows = self._sources[0].rows(0, wanted)
        while True:
            window = []
            for row, raw in rows:
                if row == wanted:
                    window.append((Address(0, 0, row), raw))
                    wanted += settings.num_logical_shards
                if len(window) == STREAM_WINDOW_ROWS:
                    break
            if not window:
                return
            if settings.shuffle:
                order = rng(settings.seed, 3, self._position.epoch, self.shard, number).permutation(
                    len(window)
                )
                window = [window[i] for i in order]
            yield from window[offset:]
            number, offset = number + 1, 0

    def _sample(self, at: Address, raw: Raw | None) -> Sample | None:
        """The row as a sample; None if it is left out (a blank line, a bad row, a row that is too long)."""
        source = self._sources[at.source]
        if raw is None:
            return None
        ref = RowRef(source.name, at.shard, at.row, f"{source.name}:{at.shard}:{at.row}")
        try:
            if isinstance(raw, BadRow):
                raise raw
            if isinstance(raw, dict) and isinstance(raw.get("id"), str):
                ref = ref._replace(id=printable(raw["id"]))  # what cannot be parsed has its name too
            if isinstance(raw, EncodedRow):
                sample = raw.sample(ref)
                ref = sample.row
            else:
                row = parse_row(raw, source.folder(at.shard))
                ref = ref if row.id is None else ref._replace(id=row.id)
                with media_time_limit(self._policy.media_timeout):
                    sample = self._processor(row, ref)
        except BadRow as bad:
            if bad.kind == "overlong":
                return self._too_long(ref, source.place(at.shard, at.row), str(bad))
            place = source.place(at.shard, at.row)
            self._skipped.append(skip_or_stop(ref, place, bad.kind, str(bad), self._policy.on_bad_row))
            self._position.bad += 1
            return None
        except UserError:
            raise
        except Exception as error:  # a fault in a processor or in the user's own dataset: say at which row
            place = source.place(at.shard, at.row)
            raise UserError(f"{address(ref, place)}: {one_line(error)}") from error
        if len(sample) > self._policy.limit:
            reason = f"{len(sample)} tokens, more than {self._policy.limit_name}={self._policy.limit}"
            return self._too_long(ref, source.place(at.shard, at.row), reason)
        most = self._policy.media_limit
        if most is not None and (units := media_units(sample)) > most:
            reason = f"{units} media units, more than dataset_config.packing_kwargs.media_units={most}"
            return self._too_long(ref, source.place(at.shard, at.row), reason)
        if sample.truncated:
            limit = f"{self._policy.limit_name}={self._policy.limit}"
            reason = f"cut at the end of a turn, to {len(sample)} tokens, for {limit}"
            self._skipped.append(SkipRecord(*ref, TRUNCATED, reason))
        return sample

    def _too_long(self, ref: RowRef, place: str, reason: str) -> None:
        if self._policy.overlong == "error":
            raise UserError(
                f"{address(ref, place)}: {reason}. Raise the limit, or set dataset_config.overlong=drop"
            )
        self._skipped.append(SkipRecord(*ref, "overlong", reason))
        self._position.overlong += 1

    def _reread(self, at: Address) -> Sample:
        source = self._sources[at.source]
        sample = self._sample(at, self._read(at))
        self._skipped.clear()  # what this row had to tell was told before the checkpoint
        if sample is None:
            raise UserError(
                f"cannot resume: {source.place(at.shard, at.row)} waited in an open pack at the checkpoint"
                " and cannot be used any more"
            )
        return sample
