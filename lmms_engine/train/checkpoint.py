"""Checkpoints: whole or absent, re-shardable, the newest complete one always there.

    runs/<name>/checkpoints/
        step-00000500/      one DCP folder (model, optimizer) and state.json (step, loader, rng, …)
        latest              the name of the newest; written last, replaced atomically

A checkpoint is written under a hidden name and renamed when it is complete, so a process killed at any moment
leaves the older ones as they were. The tensors' names are the model's own: `model.<name>`,
`optimizer.<name>.<moment>`. Everything else is JSON. All functions that take a mesh are called by all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lmms_engine.errors import UserError
from lmms_engine.parallel.fsdp import persistent_buffers
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.integrity import find_damage

LOG = logging.getLogger("lmms_engine")
STATE, LATEST, DCP_INDEX = "state.json", "latest", ".metadata"
OF_A_RUN = {"step": int, "epoch": (int, float), "dp_size": int, "loader": dict}   # what a run reads of STATE
ASIDE = "Move it aside to go on from the one before it"
READ_BYTES = 1 << 30   # how much of a model is read at once when it is read whole
# What torch's reader raises on files that are cut or garbled.
DAMAGED = (
    CheckpointException, OSError, EOFError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
    ImportError, pickle.UnpicklingError,
)  # fmt: skip


class TensorPart(Protocol):
    """A part of a checkpoint made of tensors."""

    def state_dict(self) -> dict[str, Tensor]:
        """Flat name -> tensor (DTensors where sharded). Loading writes into these very tensors."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Called once the tensors of `state_dict` have been filled."""
        ...


class ModelState:
    """The model's parameters, frozen ones included, and persistent buffers; a tied parameter once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Detached views of the live tensors."""
        tensors = {**dict(self.model.named_parameters()), **persistent_buffers(self.model)}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing is left to do: the tensors were filled in place."""


class OptimizerState:
    """AdamW's moments and step counts, under `<parameter name>.<moment>`.

    The moments of a fresh optimiser are made here, before they are loaded. Asking torch for the state of a
    fresh optimiser instead gives an empty one when any gradient is present, and then loads nothing, silently.
    """

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.params = params

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors; where the optimiser has none yet, zeros that become its own."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.params.items():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for moment in self.MOMENTS:
                    state[moment] = torch.zeros_like(parameter, requires_grad=False)
            for key in ("step", *self.MOMENTS):
                tensors[f"{name}.{key}"] = state[key]
        return tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Puts the loaded tensors in and asserts that every trainable parameter has its moments."""
        self.optimizer.zero_grad(set_to_none=True)
        for name, parameter in self.params.items():
            for key in ("step", *self.MOMENTS):
                self.optimizer.state[parameter][key] = state[f"{name}.{key}"]
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        assert trained == {id(p) for p in self.params.values()}, "a parameter of the optimiser has no name"


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def save(
    run_dir: Path,
    step: int,
    parts: dict[str, TensorPart],
    mesh: Mesh,
    extra: dict[str, Any],
    *,
    keep: int | None = None,
) -> Path:
    """Writes the checkpoint of `step` and then deletes all but the `keep` newest (None: keeps all).

    extra: JSON-able, written by rank 0 as state.json beside `step`. A step that `latest` names is not written
    again. Raises UserError on every rank, with the reason, if any rank could not write; the older checkpoints
    are untouched then and nothing half-written remains.
    """
    final = folder_of(run_dir, step)
    if mesh.broadcast(latest(run_dir) == final if mesh.is_main else None):
        return final
    partial = final.with_name(f".{final.name}.partial")
    reason = _on_main(lambda: _make_room(partial), mesh) or _write_tensors(partial, parts, mesh)
    reason = reason or _on_main(lambda: _publish(run_dir, partial, final, {**extra, "step": step}), mesh)
    if reason:
        if mesh.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        mesh.barrier()
        raise UserError(
            f"the checkpoint of step {step} could not be written to {final}: {reason}. "
            "Older checkpoints are unharmed; make room or choose another trainer_args.output_dir"
        )
    if keep is not None and (reason := _on_main(lambda: prune(run_dir, keep), mesh)) and mesh.is_main:
        LOG.warning("an old checkpoint could not be deleted: %s", reason)
    return final


def load(folder: Path, parts: dict[str, TensorPart], mesh: Mesh) -> dict[str, Any]:
    """Fills `parts` from a checkpoint written by any number of ranks; returns what `save` got as `extra`.

    Raises UserError if the folder is no complete checkpoint or holds other tensors than `parts`.
    """
    state = read_state(folder)
    tensors = {f"{part}.{k}": v for part, source in parts.items() for k, v in source.state_dict().items()}
    _compare(folder, tensors, set(parts))
    index = _read_index(folder)
    for damage in mesh.gather(find_damage(folder, index, mesh.rank, mesh.world_size)):
        _refuse_damage(folder, damage)
    with _readable(folder):
        dcp.load(tensors, checkpoint_id=folder, process_group=mesh.host)
    for part, target in parts.items():
        prefix = f"{part}."
        target.load_state_dict(
            {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        )
    return state


def latest(run_dir: Path) -> Path | None:
    """The checkpoint to resume from: the one `latest` names, else the complete one that was written last.

    The order is that of writing, never of step numbers, so a folder left over from elsewhere wins nothing by
    its name.
    """
    name = pointed(run_dir)
    if name is not None and name.startswith("step-") and is_complete(run_dir / "checkpoints" / name):
        return run_dir / "checkpoints" / name
    written = complete(run_dir)
    return written[-1] if written else None


def pointed(run_dir: Path) -> str | None:
    """What `latest` says, whether it is there or not; None without."""
    pointer = run_dir / "checkpoints" / LATEST
    if not pointer.is_file():
        return None
    return pointer.read_text(encoding="utf-8", errors="backslashreplace").strip() or None


def is_complete(folder: Path) -> bool:
    """True for a folder that `save` finished."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        written = isinstance(state, dict) and isinstance(state.get("written"), int)
        return written and (folder / DCP_INDEX).is_file()
    except (OSError, ValueError):
        return False


def complete(run_dir: Path) -> list[Path]:
    """All complete checkpoints, in the order in which they were written."""
    folders = [f for f in (run_dir / "checkpoints").glob("step-*") if is_complete(f)]
    return sorted(folders, key=lambda folder: read_state(folder)["written"])


def read_state(folder: Path) -> dict[str, Any]:
    """What `save` got as `extra`, with `step`."""
    if not is_complete(folder):
        raise UserError(f"{folder} is no complete checkpoint (it needs {STATE} and {DCP_INDEX})")
    return json.loads((folder / STATE).read_text())


def read_run_state(folder: Path) -> dict[str, Any]:
    """`read_state` of a run's checkpoint; UserError if it lacks what a run goes on from."""
    state = read_state(folder)
    wrong = [key for key, kind in OF_A_RUN.items() if not isinstance(state.get(key), kind)]
    _refuse_damage(folder, f"{STATE} has no usable {', '.join(wrong)}" if wrong else None)
    return state


def prune(run_dir: Path, keep: int) -> None:
    """Deletes the oldest complete checkpoints until `keep` are left; never the one to resume from.

    Called on one rank, after the newest was published. Folders that are no complete checkpoints are not ours
    to count or to delete.
    """
    newest = latest(run_dir)
    written = [folder for folder in complete(run_dir) if folder != newest]
    for folder in written[: max(0, len(written) + 1 - max(keep, 1))]:
        doomed = folder.with_name(f".{folder.name}.deleted")
        folder.rename(doomed)   # first out of sight: a half-deleted folder must not look complete
        shutil.rmtree(doomed)


def model_only_state(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor on the CPU) of the model in a checkpoint, without a process group.

    At most about 1 GiB, or one tensor, is read ahead.
    """
    read_state(folder)
    metadata = _read_index(folder)
    _refuse_damage(folder, find_damage(folder, metadata, wanted=lambda key: key.startswith("model.")))
    index = metadata.state_dict_metadata
    batch: dict[str, Tensor] = {}
    size = 0
    for key, entry in index.items():
        if not key.startswith("model.") or not isinstance(entry, TensorStorageMetadata):
            continue
        batch[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        size += batch[key].nbytes
        if size >= READ_BYTES:
            yield from _read_whole(folder, batch)
            batch, size = {}, 0
    yield from _read_whole(folder, batch)


def _read_index(folder: Path) -> Metadata:
    """What torch notes of the tensors in a checkpoint."""
    with _readable(folder):
        return dcp.FileSystemReader(folder).read_metadata()


def _refuse_damage(folder: Path, damage: str | None) -> None:
    if damage is not None:
        raise UserError(f"the checkpoint {folder} cannot be read: {damage}. {ASIDE}")


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turns what reading damaged files raises into one UserError."""
    try:
        yield
    except DAMAGED as error:
        raise UserError(
            f"the checkpoint {folder} cannot be read: {_reason(error)}. {ASIDE}"
        ) from error


def _read_whole(folder: Path, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if batch:
        with warnings.catch_warnings(), _readable(folder):
            warnings.filterwarnings("ignore", "torch.distributed is disabled")   # that is what is meant
            dcp.load(batch, checkpoint_id=folder, no_dist=True)
    for key, tensor in batch.items():
        yield key.removeprefix("model."), tensor


def _compare(folder: Path, tensors: dict[str, Tensor], parts: set[str]) -> None:
    """Raises unless the checkpoint's tensors are those wanted: a missing moment would be zeros, silently."""
    index = _read_index(folder).state_dict_metadata
    held = {key: entry for key, entry in index.items() if key.split(".", 1)[0] in parts}
    for problem, keys in (
        ("lacks", [key for key in tensors if key not in held]),
        ("holds, beyond what this run needs,", [key for key in held if key not in tensors]),
        (
            "holds in another shape",
            [key for key in tensors if key in held and held[key].size != tensors[key].shape],
        ),
    ):
        if keys:
            raise UserError(
                f"the checkpoint {folder} {problem} {len(keys)} tensors: {', '.join(sorted(keys)[:5])}. "
                "Resume with the model and trainer_args.freeze_modules it was written with"
            )


def _write_tensors(partial: Path, parts: dict[str, TensorPart], mesh: Mesh) -> str | None:
    """Writes every rank's shards; None, or why it failed, the same on all ranks."""
    tensors = {f"{part}.{k}": v for part, source in parts.items() for k, v in source.state_dict().items()}
    try:
        # torch gathers the ranks' failures, so that all of them raise
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), process_group=mesh.host)
    except (CheckpointException, OSError, RuntimeError) as error:
        return _reason(error)
    return None


def _make_room(partial: Path) -> None:
    """Clears what a killed process left behind."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    for rest in [*partial.parent.glob(".step-*.partial"), *partial.parent.glob(".step-*.deleted")]:
        shutil.rmtree(rest)


def _publish(run_dir: Path, partial: Path, final: Path, state: dict[str, Any]) -> None:
    """state.json, then the name, then the pointer: at every moment something complete is there."""
    written = complete(run_dir)
    order = read_state(written[-1])["written"] + 1 if written else 1
    _write_text(partial / STATE, json.dumps({**state, "written": order}))
    _sync_folder(partial)
    if final.exists():
        # Not what `latest` names: left by another run, or by one that was killed before it moved the pointer.
        doomed = final.with_name(f".{final.name}.deleted")
        final.rename(doomed)
        shutil.rmtree(doomed)
    partial.rename(final)
    pointer = final.parent / LATEST
    replacement = pointer.with_name(f".{LATEST}.partial")
    _write_text(replacement, final.name + "\n")
    replacement.replace(pointer)
    _sync_folder(final.parent)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _on_main(action: Callable[[], None], mesh: Mesh) -> str | None:
    """Runs `action` on rank 0; None, or why it failed, the same on all ranks."""
    reason = None
    if mesh.is_main:
        try:
            action()
        except OSError as error:
            reason = _reason(error)
    return mesh.broadcast(reason)


def _reason(error: BaseException) -> str:
    """The system's own words where there are any ("No space left on device"), else the error's."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [pair[0] for pair in error.failures.values()]
    for cause in causes:
        seen: BaseException | None = cause
        while seen is not None:
            if isinstance(seen, OSError) and seen.strerror:
                return f"{seen.strerror} ({seen.filename})" if seen.filename else seen.strerror
            seen = seen.__cause__ or seen.__context__
    cause = causes[0] if causes else error
    if "inline_container" in str(cause):   # torch's file writer, whose own words say nothing of the disk
        return "a file could not be written to its end (is the disk full?)"
    return next((line for line in str(cause).splitlines() if line), type(cause).__name__)
