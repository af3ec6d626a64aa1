"""The batches of one data-parallel rank: logical shards, worker processes, and the state to go on from.

    loader = Loader(job, processor_fn, dp_rank=0, dp_size=2)
    while micros := loader.next_step(): ...      # micro-batches of one step; [] at the end of the epoch
    loader.next_epoch()

Logical shard s belongs to rank s mod dp_size. Within a rank the shards take turns: next is always the one
that has given the fewest packs in this epoch, the lowest number first. Shards are spread over worker
processes, each of which follows the same rule for its own; so the order is the same for any number of
workers. Every pack comes with the state of its shard after it, and the saved state is that of the packs
taken: what workers have prepared ahead is not in it. The state is kept by shard and can be loaded by another
number of ranks.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.collate import collate, finish, join_samples
from lmms_engine.datasets.cost import SampleCost, media_units
from lmms_engine.datasets.encoded import check_encoded
from lmms_engine.datasets.order import OrderSettings
from lmms_engine.datasets.pack import PACKERS, Packer, Single
from lmms_engine.datasets.saved import differences, lacking
from lmms_engine.datasets.skips import TRUNCATED, SkipRecord, check_budget
from lmms_engine.datasets.sources import Source, open_sources
from lmms_engine.datasets.stream import Orders, Position, RowPolicy, ShardStream, one_line, waiting
from lmms_engine.errors import UserError

if TYPE_CHECKING:
    from lmms_engine.config import DatasetSection, Job
    from lmms_engine.datasets.processor import Processor

STATE_VERSION = 2   # 1: before weights were of rows
GRACE_SECONDS = 30             # that a worker lives on after SIGTERM
PREFETCH_PACKS = 2  # per worker
EVAL_ROWS_PER_SHARD = 64  # evaluation uses few shards, so that its packs are full
EVAL_SHARDS_PER_RANK = 8


class Loader:
    """See the module. `next_step` and `next_epoch` are called by one thread; `close` ends the workers.

    processor_fn: builds the processor, in each worker anew; picklable.
    init_worker: called first in each worker (loads plugins in spawned ones); picklable.
    split: "eval" gives every row once, in file order, and has no epochs of its own: `next_epoch` starts
    it over.
    """

    def __init__(
        self,
        job: Job,
        processor_fn: Callable[[], Processor],
        *,
        dp_rank: int,
        dp_size: int,
        split: Literal["train", "eval"] = "train",
        pin_memory: bool = False,
        init_worker: Callable[[], object] | None = None,
        start_method: Literal["fork", "spawn", "forkserver"] = "fork",
    ) -> None:
        dataset, trainer = job.dataset, job.trainer
        self._sources = open_sources(dataset, split)
        self._settings = _order_settings(job, self._sources, split, dp_size)
        self._orders = Orders(self._sources, self._settings)
        self._max_skip_fraction = dataset.max_skip_fraction
        self._packs_per_micro = trainer.per_device_train_batch_size
        self._micros_per_step = trainer.gradient_accumulation_steps
        self._split = split
        self._pin_memory = pin_memory
        self._start_method = start_method
        self._processor_fn = processor_fn
        self._shards = list(range(dp_rank, self._settings.num_logical_shards, dp_size))
        self._num_workers = min(trainer.dataloader_num_workers, len(self._shards))
        self._plan = _Plan(
            sources=self._sources,
            settings=self._settings,
            packer=_packer(dataset, len(self._shards)),
            policy=_row_policy(dataset),
            processor_fn=processor_fn,
            init_worker=init_worker,
            whole_micros=self._packs_per_micro == 1,
        )
        check_encoded(self._sources, lambda: self.processor)
        self._identity = _identity(job, self._sources, self._settings)
        self.epoch = 0
        self._states = {shard: Position().state() for shard in self._shards}
        self._skipped: list[SkipRecord] = []
        self._feeds: dict[int, Iterator[_Item]] = {}  # shard -> where its packs come from
        if self._num_workers:
            # Workers do not obey SIGTERM at once, so a process that ends without `close` must end them:
            # `atexit` runs in a plain process, `Finalize` in one made by multiprocessing.
            atexit.register(self._feeds.clear)
            Finalize(None, self._feeds.clear, exitpriority=100)
        if self.rows_per_epoch is None and trainer.max_steps is None:
            raise UserError(
                f"dataset '{dataset.dataset_type}' has no `__len__`: set trainer_args.max_steps"
            )

    # Batches -----------------------------------------------------------------------------------------

    def next_step(self) -> list[PackedBatch]:
        """Micro-batches of one step: `gradient_accumulation_steps`, fewer at the end of the epoch, then
        none."""
        micros: list[PackedBatch] = []
        while len(micros) < self._micros_per_step and (micro := self._next_micro()) is not None:
            micros.append(micro)
        return micros

    def next_epoch(self) -> None:
        """Goes on to the next epoch, once `next_step` has given everything of this one."""
        left = [shard for shard, state in self._states.items() if not state["ended"]]
        if left:
            raise RuntimeError(f"epoch {self.epoch} is not over: logical shards {left} have rows left")
        if self._split == "eval":
            self.close()    # else workers would hold the first packs of a pass that may come hours later
        self.epoch += 1
        fresh = {"epoch": self.epoch, "taken": 0, "packs": 0, "ended": False}
        self._states = {shard: {**state, **fresh} for shard, state in self._states.items()}

    def empty(self) -> PackedBatch:
        """A batch without rows and with weight 0, for ranks that have run out while others go on."""
        return finish([], self.processor)

    @cached_property
    def processor(self) -> Processor:
        """This process's own processor."""
        return self._processor_fn()

    @property
    def sources(self) -> Sequence[Source]:
        """The open sources, to look a row up by its address."""
        return self._sources

    def _next_micro(self) -> PackedBatch | None:
        packs: list[PackedBatch] = []
        while len(packs) < self._packs_per_micro and (pack := self._next_pack()) is not None:
            packs.append(pack)
        if not packs:
            return None
        if self._plan.whole_micros:
            return packs[0]
        micro = finish(packs, self.processor)
        return micro.pin_memory() if self._pin_memory else micro

    def _next_pack(self) -> PackedBatch | None:
        while True:
            _, _, shard = min((state["ended"], state["packs"], s) for s, state in self._states.items())
            if self._states[shard]["ended"]:
                return None
            item = self._pull(shard)
            self._states[shard] = item.state
            self._skipped.extend(item.skipped)
            if item.skipped:
                seen, bad = (sum(state[key] for state in self._states.values()) for key in ("seen", "bad"))
                named = [record for record in self._skipped if record.kind not in ("overlong", TRUNCATED)]
                check_budget(bad, seen, self._max_skip_fraction, named[-1] if named else None)
            if item.batch is not None:
                return item.batch

    def _pull(self, shard: int) -> _Item:
        if not self._feeds:
            self._feeds.update(self._start())
        try:
            item = next(self._feeds[shard])
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self.close()
            raise UserError(_dead_worker(error)) from None
        if isinstance(item, _Failure):
            self.close()
            raise UserError(item.message) from (_WorkerTraceback(item.trace) if item.trace else None)
        if item.shard != shard:
            raise AssertionError(f"expected a pack of logical shard {shard}, got one of {item.shard}")
        return item

    def _start(self) -> dict[int, Iterator[_Item]]:
        if not self._num_workers:
            feed = iter(_Feed(replace(self._plan, processor_fn=lambda: self.processor), self._states))
            return dict.fromkeys(self._shards, feed)
        feeds: dict[int, Iterator[_Item]] = {}
        with _objects_frozen():
            for worker in range(self._num_workers):
                own = {shard: self._states[shard] for shard in self._shards[worker :: self._num_workers]}
                # One loader for each worker: the next pack can then be asked of the worker that owns its
                # shard. A generator of its own keeps the process's random state as it is.
                workers = DataLoader(
                    _Feed(self._plan, own),
                    batch_size=None,
                    num_workers=1,
                    prefetch_factor=PREFETCH_PACKS,
                    pin_memory=self._pin_memory and self._plan.whole_micros,
                    multiprocessing_context=self._start_method,
                    generator=torch.Generator(),
                )
                feeds.update(dict.fromkeys(own, iter(workers)))
        return feeds

    def close(self) -> None:
        """Ends the worker processes; the next batch would start them anew from the present state."""
        self._feeds.clear()  # torch's iterators end their workers when nothing refers to them

    # Figures -----------------------------------------------------------------------------------------

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows of the present epoch over all ranks; None for a stream of unknown length."""
        return self._orders.num_rows(self.epoch)

    def progress(self) -> float:
        """Epochs done by this rank, with the fraction of the present one; rows in open packs do not count.

        For a stream of unknown length whole epochs only.
        """
        if all(state["ended"] for state in self._states.values()):
            return self.epoch + 1.0
        rows = sum(self._orders.shard_rows(self.epoch, shard) for shard in self._shards)
        done = sum(state["taken"] - waiting(state) for state in self._states.values())
        return self.epoch + (done / rows if rows else 0.0)

    def take_skipped(self) -> list[SkipRecord]:
        """The rows left out or shortened since the last call."""
        skipped, self._skipped = self._skipped, []
        return skipped

    @property
    def skipped_total(self) -> int:
        """All rows of this rank's shards left out so far, also before a resume."""
        return sum(state["bad"] + state["overlong"] for state in self._states.values())

    def fingerprint(self) -> str:
        """Equal for equal data: row counts, sizes, first and last bytes, weights; not names of folders,
        not times."""
        text = json.dumps(self._identity["datasets"], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    # State -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the state, JSON-able; `merge_states` makes one of all ranks'."""
        identity = {**self._identity, "processor": self.processor.fingerprint}
        shards = {str(shard): state for shard, state in self._states.items()}
        return {"version": STATE_VERSION, "epoch": self.epoch, "identity": identity, "shards": shards}

    def load_state_dict(self, merged: dict[str, Any]) -> None:
        """Goes on from the state of all ranks; UserError names every setting and dataset that differs."""
        if merged.get("version", STATE_VERSION) != STATE_VERSION:
            raise UserError(
                f"the saved data state has version {merged['version']} (legal: {STATE_VERSION}): the"
                " engine that wrote it deals rows in another order; go on with it, or begin anew (FRESH=1)"
            )
        now = {**self._identity, "processor": self.processor.fingerprint}
        missing = lacking(merged)
        if missing:
            raise UserError(
                f"the saved data state is damaged: it lacks {missing}. Move its checkpoint aside "
                "to go on from the one before it"
            )
        changes = differences(merged["identity"], now)
        if changes:
            raise UserError(
                f"the saved data state does not fit this run: {'; '.join(changes)}. Put back what has "
                "changed, or start anew with FRESH=1 (moves the old folder aside)"
            )
        missing = [shard for shard in self._shards if str(shard) not in merged["shards"]]
        if missing:
            raise UserError(
                f"the saved data state lacks the logical shards {missing}: it is not of all ranks"
            )
        self.close()
        self.epoch = merged["epoch"]
        self._states = {shard: merged["shards"][str(shard)] for shard in self._shards}
        self._skipped = []


def merge_states(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One state from those of all ranks."""
    first, *others = states
    merged = {**first, "shards": dict(first["shards"])}
    for other in others:
        if other["epoch"] != first["epoch"] or other["identity"] != first["identity"]:
            raise AssertionError("the ranks are in different epochs or read different data")
        merged["shards"].update(other["shards"])
    return merged


# In the worker ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What a worker needs; can be pickled."""

    sources: Sequence[Source]
    settings: OrderSettings
    packer: Callable[[], Packer]
    policy: RowPolicy
    processor_fn: Callable[[], Processor]
    init_worker: Callable[[], object] | None
    whole_micros: bool  # a pack is a micro-batch: complete it here


@dataclass(frozen=True)
class _Item:
    """What travels from a worker: a Turn with its samples collated."""

    shard: int
    batch: PackedBatch | None
    state: dict[str, Any]
    skipped: tuple[SkipRecord, ...]

    def pin_memory(self) -> _Item:
        """Called by torch's DataLoader."""
        return self if self.batch is None else replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class _Failure:
    """What ended a worker, as text: exceptions themselves do not travel well."""

    message: str
    trace: str | None = None


class _WorkerTraceback(Exception):
    """Where a worker failed, shown with --debug."""


class _Feed(IterableDataset):
    """The packs of some shards, in turn, epoch after epoch without end."""

    def __init__(self, plan: _Plan, states: dict[int, dict[str, Any]]) -> None:
        self._plan = plan
        self._states = states

    def __iter__(self) -> Iterator[_Item | _Failure]:
        if get_worker_info() is not None:
            # Ctrl-C and SLURM signal the whole group. The main process then wants to save in peace, which a
            # dead worker would disturb: workers stay a while, until `close` or the process's end stops them.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # forked after use: would deadlock or warn
            torch.set_num_threads(1)
        try:
            if get_worker_info() is not None and self._plan.init_worker is not None:
                self._plan.init_worker()
            yield from self._items()
        except UserError as error:
            cause = error.__cause__
            trace = "".join(traceback.format_exception(cause)) if cause is not None else None
            yield _Failure(str(error), trace)
        except Exception as error:
            yield _Failure(f"reading data failed: {one_line(error)}", traceback.format_exc())

    def _items(self) -> Iterator[_Item]:
        plan = self._plan
        processor = plan.processor_fn()
        orders = Orders(plan.sources, plan.settings)
        streams = [
            ShardStream(shard, orders, processor, plan.packer, plan.policy, state)
            for shard, state in self._states.items()
        ]
        build = collate if plan.whole_micros else join_samples
        while True:
            stream = min(streams, key=lambda stream: stream.key)
            if stream.ended:
                for each in streams:
                    each.next_epoch()
                continue
            turn = stream.next_turn()
            batch = None if turn.samples is None else build(turn.samples, processor)
            yield _Item(turn.shard, batch, turn.state, turn.skipped)


@contextmanager
def _objects_frozen() -> Iterator[None]:
    """Keeps what this process holds out of the garbage collection of workers forked inside.

    To free a process group or a video decoder there, whose threads are not forked, would hang or kill it.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _dead_worker(error: RuntimeError) -> str:
    said = " ".join(f"{error} {error.__cause__ or ''}".split())  # the signal is named in the cause, if at all
    return (
        f"a data worker died ({said}); most often it ran out of memory. Lower"
        " trainer_args.dataloader_num_workers, dataset_config.packing_kwargs.open_bins or packing_length, or"
        " give the container more shared memory; dataloader_num_workers=0 shows the fault in this process"
    )


# From the job ----------------------------------------------------------------------------------------


def _order_settings(job: Job, sources: Sequence[Source], split: str, dp_size: int) -> OrderSettings:
    dataset, seed = job.dataset, job.trainer.seed
    if split == "eval":
        rows = sum(source.num_rows or 0 for source in sources)
        per_rank = min(max(rows // (dp_size * EVAL_ROWS_PER_SHARD), 1), EVAL_SHARDS_PER_RANK)
        return OrderSettings(seed, per_rank * dp_size, False, (1.0,) * len(sources), "all")
    shards = dataset.num_logical_shards
    if shards < dp_size:
        raise UserError(
            f"dataset_config.num_logical_shards={shards} leaves some of the {dp_size} data-parallel ranks"
            f" without data (legal: {dp_size} or more, best a multiple of it)"
        )
    weights = tuple(source.weight for source in sources)
    return OrderSettings(seed, shards, dataset.shuffle, weights, dataset.mixture_stop)


def _packer(dataset: DatasetSection, num_shards: int) -> Callable[[], Packer]:
    """`open_bins` is for the rank, shared by its shards, at least two each: what waits in bins lies in
    memory."""
    if not dataset.packing:
        return Single
    settings = dataset.packing_kwargs
    open_bins = max(settings.open_bins // num_shards, min(settings.open_bins, 2))
    measures: dict[str, Any] = {}
    if settings.media_units is not None:
        measures |= {"media_units": settings.media_units, "units": media_units}
    if dataset.packing_strategy == "balanced":
        cost = SampleCost(settings.attention_length, settings.media_cost)
        measures |= {"cost": cost, "budget": settings.cost_budget * dataset.packing_length}
    return partial(PACKERS.get(dataset.packing_strategy), dataset.packing_length, open_bins, **measures)


def _row_policy(dataset: DatasetSection) -> RowPolicy:
    limit, name = dataset.max_length, "dataset_config.max_length"
    if limit is None or (dataset.packing and limit > dataset.packing_length):
        limit, name = dataset.packing_length, "dataset_config.packing_length"
    most_media = dataset.packing_kwargs.media_units if dataset.packing else None
    return RowPolicy(
        dataset.on_bad_row, dataset.overlong, limit, name, most_media, dataset.media_timeout_s
    )


def _identity(job: Job, sources: Sequence[Source], settings: OrderSettings) -> dict[str, Any]:
    """What the order of the packs depends on, except the number of ranks; JSON-able."""
    dataset = job.dataset
    packing = {
        "dataset_config.packing_strategy": dataset.packing_strategy,
        "dataset_config.packing_length": dataset.packing_length,
        **{f"dataset_config.packing_kwargs.{key}": value for key, value in _packing_kwargs(dataset).items()},
    }
    return {
        "trainer_args.seed": settings.seed,
        "dataset_config.num_logical_shards": settings.num_logical_shards,
        "dataset_config.shuffle": settings.shuffle,
        "dataset_config.mixture_stop": settings.mixture_stop,
        "dataset_config.max_length": dataset.max_length,
        "dataset_config.overlong": dataset.overlong,
        "dataset_config.packing": dataset.packing,
        **(packing if dataset.packing else {}),
        "datasets": [
            _dataset_identity(source, weight)
            for source, weight in zip(sources, settings.weights, strict=True)
        ],
    }


def _packing_kwargs(dataset: DatasetSection) -> dict[str, Any]:
    """Those that the packs depend on."""
    given = dataset.packing_kwargs.model_dump()
    if dataset.packing_strategy != "balanced":
        given = {key: given[key] for key in ("open_bins", "media_units")}
    return {key: value for key, value in given.items() if value is not None}


def _dataset_identity(source: Source, weight: float) -> dict[str, Any]:
    name = source.name.rsplit("/", 1)[-1]  # folders may move
    return {"name": name, "rows": source.num_rows, "weight": weight, "content": source.fingerprint}
