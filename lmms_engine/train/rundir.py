"""The run folder: where it is, whether a run in it may go on, and from where."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from lmms_engine.config import Job
from lmms_engine.config_load import parse_yaml, read_yaml, show
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train import checkpoint
from lmms_engine.train.claim import CLAIM_FILE

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
SECTIONS = ("model_config", "dataset_config", "trainer_args")
T = TypeVar("T")

# What may differ when a run goes on: where and how often something is written, what is watched, and the
# layout (which changes no number). Everything else makes it another run.
FREE = (
    "trainer_args.output_dir",
    "trainer_args.run_name",
    "trainer_args.logging_steps",
    "trainer_args.save_steps",
    "trainer_args.save_total_limit",
    "trainer_args.eval_steps",
    "trainer_args.report_to",
    "trainer_args.log_rows",
    "trainer_args.dataloader_num_workers",
    "trainer_args.ddp_timeout",
    "trainer_type",
    "trainer_args.fsdp2",
    "trainer_args.deepspeed",
    "trainer_args.fsdp_config",
    "trainer_args.sp_ulysses_degree",
    "trainer_args.ep_degree",
    "dataset_config.eval_datasets",
    "dataset_config.eval_dataset_path",
)
MAY_GROW = ("trainer_args.max_steps", "trainer_args.num_train_epochs")
# Together with the number of data ranks these make the global batch, which must stay.
BATCH = ("trainer_args.gradient_accumulation_steps", "trainer_args.per_device_train_batch_size")


@dataclass(frozen=True)
class Start:
    """Where a run begins. checkpoint None: at the beginning. finished: there is nothing left to do."""

    step: int = 0
    checkpoint: Path | None = None
    finished: bool = False
    notes: tuple[str, ...] = field(default=())


def prepare(job: Job, run_dir: Path, dp_size: int, *, fresh: bool = False) -> Start:
    """Makes the run folder and decides whether to start, to go on or to do nothing. Rank 0 only.

    fresh: start, whatever the folder holds. Raises UserError if the folder cannot be written or holds another
    run.
    """
    require_writable(run_dir)
    pointer = run_dir / "checkpoints" / checkpoint.LATEST
    if not fresh and pointer.exists() and not pointer.is_file():
        raise UserError(
            f"{pointer} is {'a folder' if pointer.is_dir() else 'no file'}, and should be a file with the "
            "name of the newest checkpoint; move it aside, and the checkpoint that was written last is taken"
        )
    latest = None if fresh else checkpoint.latest(run_dir)
    pointed = None if fresh else checkpoint.pointed(run_dir)
    if latest is None and pointed is not None:
        raise UserError(
            f"{run_dir}/checkpoints/latest names {pointed}, which is not complete, and no other "
            "checkpoint is; put its files back, or start anew with FRESH=1 (moves the folder aside)"
        )
    if latest is None:
        return Start()
    saved_file = run_dir / CONFIG_FILE
    if not saved_file.exists():
        raise UserError(
            f"{run_dir} has checkpoints but no {CONFIG_FILE}: cannot tell whose they are; "
            "move it aside (FRESH=1) or choose another trainer_args.output_dir"
        )
    state = checkpoint.read_run_state(latest)
    saved = flatten(read_config(run_dir))
    now = flatten(parse_yaml(job.to_yaml(), CONFIG_FILE))
    finished = is_finished(job, state)
    found = differences(saved, now, state["dp_size"], dp_size, finished=finished)
    if found:
        raise UserError(
            f"{run_dir} holds another run: {'; '.join(found)}. Start anew with FRESH=1 (moves the old "
            "folder aside) or another trainer_args.output_dir"
        )
    notes: tuple[str, ...] = ()
    if pointed not in (None, latest.name):
        notes = (f"checkpoints/latest names {pointed}, which is not complete; {latest.name} is the newest",)
    if state["dp_size"] != dp_size and all(saved.get(key) == now.get(key) for key in BATCH):
        notes += (
            f"{dp_size} data ranks now, {state['dp_size']} before: the global batch changes in proportion",
        )
    return Start(step=state["step"], checkpoint=latest, finished=finished, notes=notes)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration that a run folder holds; UserError if it is damaged."""
    path = run_dir / CONFIG_FILE
    config = read_yaml(path)
    sections = config if isinstance(config, dict) else {}
    lacking = [key for key in SECTIONS if not isinstance(sections.get(key), dict)]
    if lacking:
        raise UserError(
            f"{path} is damaged (it has no {', '.join(lacking)}): put a copy of it back; "
            "manifest.json has its hash as config_sha256"
        )
    return config


def move_aside(run_dir: Path) -> None:
    """Renames a run folder that holds anything to `<name>.<time>`, and makes an empty one. Rank 0 only."""
    if all(path.name == CLAIM_FILE for path in run_dir.iterdir()):
        return
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    aside = next(path for name in names if not (path := Path(f"{run_dir}.{name}")).exists())
    try:
        run_dir.rename(aside)
        run_dir.mkdir()
    except OSError as error:
        raise UserError(
            f"{run_dir}: cannot be moved aside ({error.strerror}); "
            "move it yourself or choose another trainer_args.output_dir"
        ) from error
    log.info("the old run is now in %s", aside)


def is_finished(job: Job, state: dict[str, Any]) -> bool:
    """Whether a saved state has all the steps or epochs that the job asks for."""
    if job.trainer.num_train_epochs is not None:
        return state["epoch"] >= job.trainer.num_train_epochs - 1e-9
    return state["step"] >= job.trainer.max_steps


def differences(
    saved: dict[str, Any], now: dict[str, Any], saved_ranks: int, ranks: int, *, finished: bool
) -> list[str]:
    """The settings that make `now` another run than `saved`, each as "key: old there, new now"."""
    found = []
    for key in sorted({*saved, *now}):
        old, new = saved.get(key), now.get(key)
        if old == new or any(key == free or key.startswith(free + ".") for free in FREE):
            continue
        if key in MAY_GROW and old is not None and new is not None and (new > old or finished):
            continue
        if key in BATCH and _global_batch(saved, saved_ranks) == _global_batch(now, ranks):
            continue
        found.append(f"{key}: {show(old)} there, {show(new)} now")
    return found


def _global_batch(flat: dict[str, Any], ranks: int) -> int | None:
    counts = [flat.get(key) for key in BATCH]
    return math.prod(counts) * ranks if all(isinstance(count, int) for count in counts) else None


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists and scalars are leaves."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def require_writable(run_dir: Path) -> None:
    """Makes the folder and writes a byte into it, or raises UserError."""
    probe = run_dir / f".probe-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\n")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"trainer_args.output_dir={run_dir}: cannot be written ({error.strerror}); "
            "choose a folder this user may write to, on a disk with space"
        ) from error


def on_main(mesh: Mesh, work: Callable[[], T]) -> T:
    """Runs `work` on rank 0; its result, or its UserError, on every rank. Collective."""
    outcome: tuple[bool, Any] = (True, None)
    if mesh.is_main:
        try:
            outcome = (True, work())
        except UserError as error:
            outcome = (False, str(error))
    ok, value = mesh.broadcast(outcome)
    if not ok:
        raise UserError(value)
    return value
