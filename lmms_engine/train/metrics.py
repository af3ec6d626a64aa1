"""What a step did, as rows of `metrics.jsonl`: full precision, one row for every step.

Nothing here syncs the device in the step: numbers stay where they are until `Recorder.flush`, which every
rank calls at the same steps (logging, saving, validation, end). Global rank 0 writes.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.skips import TRUNCATED
from lmms_engine.errors import UserError
from lmms_engine.models.flops import Flops
from lmms_engine.objectives.base import SOURCE_TERM
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.packing import PACKING_FILE, Packing
from lmms_engine.train.step import StepStats

METRICS_FILE = "metrics.jsonl"
SKIPPED_FILE = "skipped.jsonl"
MEND = "put a copy of it back, or move it aside"

# The keys of every row, in order; null where one does not apply.
KEYS = (
    "step",
    "split",  # "train" | "eval"
    "loss",  # sum over supervised tokens / their number, over the whole global batch
    "loss_terms",  # {term: sum / its own weight}
    "grad_norm",  # before clipping
    "lr",  # {parameter group: rate used in this step}
    "supervised_tokens",
    "tokens",  # of real rows, all data ranks
    "samples",
    "skipped",  # rows refused since the previous row
    "step_s",  # wall time of the whole step: data wait, forward, backward, optimiser
    "data_s",  # of which waiting for data (the slowest rank)
    "tokens_per_s",  # tokens / step_s, all ranks together
    "mfu",  # needed FLOPs / (peak x devices x step_s); see models/flops.py
    "mfu_conventional",
    "peak_gb",  # device memory of the fullest rank in this step; on CPU peak resident memory so far
    "epoch",  # passes over the data done, with fraction
    "source_loss",  # {source: mean loss of its supervised tokens, null without any}; null: only one source
)

STEP_KEYS = ("step", "split", "loss")   # what every row has, of whatever version

# Dense bf16 FLOP/s by the exact device name, from the vendor's data sheets ("L40S" is not "L40").
PEAK_FLOPS = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H800": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L40S": 362.05e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak dense bf16 FLOP/s of the device, or None where it is unknown (then MFU is null, never 0)."""
    if device.type != "cuda":
        return None
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device))


class StepClock:
    """Wall time of one step. On a GPU by events, since the host runs ahead of the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begin = self._mark()
        self._end: Any = None

    def stop(self) -> None:
        """Marks the end of the step; does not wait for the device."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Time between start and stop. Waits for the device."""
        if not self._cuda:
            return self._end - self._begin
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory_gb(device: torch.device) -> float:
    """GB (1e9 bytes): most that was allocated on the GPU since the last call; on CPU most ever resident."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@dataclass
class StepRecord:
    """One step of this rank, with numbers that may still be on the device."""

    step: int
    epoch: float
    stats: StepStats
    lr: dict[str, float]
    clock: StepClock
    data_s: float
    micros: list[PackedBatch]  # this rank's real micro-batches, on the host
    flops: Flops
    skipped: list[dict[str, Any]]
    peak_gb: float


def count_refused(skipped: list[dict[str, Any]]) -> int:
    """How many of these lines of skipped.jsonl are rows left out; others were shortened and trained on."""
    return sum(line["kind"] != TRUNCATED for line in skipped)


@dataclass
class Recorder:
    """Holds the records of steps not yet written and turns them into rows.

    coefficients: of the objective's terms, to combine term means into the loss. packing: what is noted of
    packs in `packing.jsonl`.
    """

    run_dir: Path
    mesh: Mesh
    coefficients: dict[str, float]
    log_rows: bool = False
    packing: Packing | None = None
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _device: list[tuple[torch.Tensor, StepClock]] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        """Whether there are steps not yet written."""
        return bool(self._pending)

    def add(self, record: StepRecord) -> None:
        """Takes a step; keeps its host-side numbers only, so that no batch outlives its step."""
        stats = record.stats
        on_device = [*stats.sums.values(), stats.grad_norm]
        packed = torch.stack([value.detach().to(self.mesh.device, torch.float64) for value in on_device])
        self._device.append((packed, record.clock))
        self._pending.append(
            {
                "step": record.step,
                "epoch": record.epoch,
                "terms": list(stats.sums),
                "totals": stats.totals,
                "lr": record.lr,
                "data_s": record.data_s,
                "tokens": sum(micro.num_tokens for micro in record.micros),
                "supervised": sum(sum(micro.row_supervised()) for micro in record.micros),
                "samples": sum(len(micro.rows) for micro in record.micros),
                "flops": (record.flops.strict, record.flops.conventional),
                "skipped": record.skipped,
                "peak_gb": record.peak_gb,
                "rows": batch_records(record.step, record.micros) if self.log_rows else [],
                "packs": self.packing.measure(record.micros) if self.packing else None,
            }
        )

    def flush(self) -> list[dict[str, Any]]:
        """Writes the rows of all steps since the last flush and returns them on every rank. Collective."""
        for entry, (packed, clock) in zip(self._pending, self._device, strict=True):
            *sums, entry["grad_norm"] = packed.tolist()
            entry["sums"] = dict(zip(entry["terms"], sums, strict=True))
            entry["step_s"] = clock.seconds()
        if self.log_rows:
            rows = [row for entry in self._pending for row in entry.pop("rows")]
            append_lines(self.run_dir / rows_file(self.mesh.rank), rows)
        per_rank = self.mesh.gather((self.mesh.sp_rank, self._pending))
        self._pending, self._device = [], []
        steps = list(zip(*(entries for _, entries in per_rank), strict=True))
        data_ranks = [i for i, (sp_rank, _) in enumerate(per_rank) if sp_rank == 0]
        rows = [self._row(step, [step[i] for i in data_ranks]) for step in steps]
        if self.mesh.is_main:
            append_lines(self.run_dir / METRICS_FILE, rows)
            append_lines(self.run_dir / PACKING_FILE, self._packs(rows, steps, data_ranks))
            append_lines(
                self.run_dir / SKIPPED_FILE, [s for step in steps for e in step for s in e["skipped"]]
            )
        return rows

    def _packs(
        self, rows: list[dict[str, Any]], steps: list[tuple[dict[str, Any], ...]], data_ranks: list[int]
    ) -> list[dict[str, Any]]:
        """A row of packing.jsonl for each of metrics.jsonl."""
        if self.packing is None:
            return []
        return [
            self.packing.row(row["step"], row["tokens"], [step[i]["packs"] for i in data_ranks])
            for row, step in zip(rows, steps, strict=True)
        ]

    def _row(self, ranks: tuple[dict[str, Any], ...], data_ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """One row from the entries of all ranks; counts come from the data ranks, loss sums from all."""
        first = ranks[0]
        terms = term_means([entry["sums"] for entry in ranks], first["totals"])
        seconds = max(entry["step_s"] for entry in ranks)
        tokens = sum(entry["tokens"] for entry in data_ranks)
        peak = peak_flops(self.mesh.device)
        available = peak and peak * self.mesh.world_size * seconds
        return make_row(
            step=first["step"],
            split="train",
            loss=sum(self.coefficients[term] * mean for term, mean in terms.items()),
            loss_terms=loss_terms(terms),
            grad_norm=first["grad_norm"],
            lr=first["lr"],
            supervised_tokens=sum(entry["supervised"] for entry in data_ranks),
            tokens=tokens,
            samples=sum(entry["samples"] for entry in data_ranks),
            skipped=sum(count_refused(entry["skipped"]) for entry in data_ranks),
            step_s=seconds,
            data_s=max(entry["data_s"] for entry in ranks),
            tokens_per_s=tokens / seconds,
            mfu=sum(e["flops"][0] for e in data_ranks) / available if available else None,
            mfu_conventional=sum(e["flops"][1] for e in data_ranks) / available if available else None,
            peak_gb=max(entry["peak_gb"] for entry in ranks),
            epoch=sum(entry["epoch"] for entry in data_ranks) / len(data_ranks),
            source_loss=source_losses(terms, first["totals"]),
        )


def term_means(sums: list[dict[str, float]], totals: dict[str, float]) -> dict[str, float]:
    """Mean of each loss term over the global batch from every rank's sums; 0 where nothing was supervised."""
    return {term: sum(s[term] for s in sums) / (total or 1.0) for term, total in totals.items()}


def loss_terms(means: dict[str, float]) -> dict[str, float]:
    """The means of the loss's own terms, without those that are one source's part of it."""
    return {term: mean for term, mean in means.items() if not term.startswith(SOURCE_TERM)}


def source_losses(means: dict[str, float], totals: dict[str, float]) -> dict[str, float | None] | None:
    """{source: mean loss, None where it has no supervised token}; None if sources are not told apart."""
    terms = [term for term in means if term.startswith(SOURCE_TERM)]
    return {t.removeprefix(SOURCE_TERM): means[t] if totals[t] else None for t in terms} or None


def make_row(**values: Any) -> dict[str, Any]:
    """A row with every key of KEYS in order; a key not given is null."""
    unknown = set(values) - set(KEYS)
    assert not unknown, unknown
    return {key: values.get(key) for key in KEYS}


def batch_records(step: int, micros: list[PackedBatch]) -> list[dict[str, Any]]:
    """Who was in each micro-batch of a step: the form of `rows-<rank>.jsonl` and of `inspect --json`."""
    return [
        {
            "step": step,
            "micro": index,
            "rows": [
                {**ref._asdict(), "length": length, "supervised": supervised}
                for ref, length, supervised in zip(
                    micro.rows, micro.row_lengths(), micro.row_supervised(), strict=True
                )
            ],
            "cu_seqlens": micro.segments.cu_seqlens.tolist(),
            "tokens": micro.num_tokens,
        }
        for index, micro in enumerate(micros)
    ]


def rows_file(rank: int) -> str:
    """Name of the file with the row ids of one rank."""
    return f"rows-{rank}.jsonl"


def append_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Appends rows as JSON lines; NaN and infinity become null, as JSON has no such numbers."""
    if not rows:
        return
    text = "".join(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    # What no file can hold, in a file name for example, becomes `\\udXXX`, as JSON itself would have it.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def read_lines(path: Path, keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """All complete rows of a JSON-lines file; a last line cut short by a crash is left out.

    keys: what every row must have. Other damage raises UserError.
    """
    if not path.exists():
        return []
    rows = []
    # Cut at newlines and nowhere else: row ids may hold other separators.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except json.JSONDecodeError:
            continue
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is damaged ({error}, line {number}): {MEND}") from error
        if not isinstance(row, dict) or not row.keys() >= set(keys):
            words = f"an object with {', '.join(keys)}" if keys else "an object"
            raise UserError(f"{path} is damaged (line {number} is not {words}): {MEND}")
        rows.append(row)
    return rows


def cut_back(run_dir: Path, step: int) -> int:
    """Moves every logged row after `step` to `<file>.discarded`; returns how many steps' metrics went.

    A line that a crash cut short belongs to no finished write and goes as well, as does one that is damaged.
    """
    discarded = 0
    for path in sorted(run_dir.glob("*.jsonl")):
        if path.name not in (METRICS_FILE, SKIPPED_FILE, PACKING_FILE) and not path.name.startswith("rows-"):
            continue
        kept, gone = [], []
        for line in filter(None, path.read_bytes().split(b"\n")):
            try:
                later = json.loads(line)["step"] > step
            except (ValueError, LookupError, TypeError):
                later = True
            (gone if later else kept).append(line + b"\n")
        if not gone:
            continue
        with path.with_name(path.name + ".discarded").open("ab") as file:
            file.writelines(gone)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(path)  # a crash here repeats the cut; it never loses the kept rows
        discarded += len(gone) if path.name == METRICS_FILE else 0
    return discarded


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
