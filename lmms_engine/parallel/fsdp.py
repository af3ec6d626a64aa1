"""FSDP2: sharding into units, and filling the shards from one stream of full tensors.

Gradients are summed over the ranks, never averaged: the loss already carries the global denominator.
The same path serves one process, where every shard is the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Mesh


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together, from the call of the first until the last has run.

    mesh: over which they are sharded; None: all of `Mesh.fsdp`. dim: the dimension that is cut.
    """

    name: str
    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh | None = None
    dim: int = 0


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of parameter names that are one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def apply_fsdp(
    root: nn.Module,
    units: list[Unit],
    mesh: Mesh,
    *,
    bf16: bool,
    reshard_after_forward: bool,
    offload: bool = False,
) -> None:
    """Shards `root`: the units, inner ones first, then what is left as the root's own unit.

    bf16: compute in bfloat16 from float32 masters, gradients reduced in float32. Inputs are not cast: that
    would round rotary tables, interpolation and loss weights; the models cast their pixels themselves.
    offload: shards and their gradients rest in the host's memory; the device has a unit while it is gathered.
    Modules that share a parameter must be in one unit: in two, the tie would break without a word.
    """
    ties = tied_names(root)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,
    )
    # From pinned memory a GPU copies while it computes; without one there is no such memory, and no copy.
    pinned = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    for unit in [*units, Unit("root", (root,))]:
        target = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
        fully_shard(
            target,
            mesh=unit.mesh or mesh.fsdp,
            mp_policy=policy,
            offload_policy=pinned if offload else OffloadPolicy(),
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(_cut, dim=unit.dim) if unit.dim else None,
        )
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)   # gloo has no pre-multiplied sum
    _prefetch(units)
    for name in getattr(root, "forward_methods", ()):   # others than `forward` that need the parameters whole
        register_fsdp_forward_method(root, name)
    assert_ties(root, ties)


def _cut(parameter: nn.Parameter, *, dim: int) -> Shard:
    return Shard(dim)


def _prefetch(units: list[Unit]) -> None:
    """Each block of a row asks for the next one's parameters, and those of the units inside it, before it
    computes; backward does so unasked.
    """
    named = {unit.name: unit for unit in units}
    for unit in units:
        row, _, index = unit.name.rpartition(".")
        following = named.get(f"{row}.{int(index) + 1}") if index.isdigit() else None
        if following is not None:
            within = [each for each in units if each.name.startswith(f"{following.name}.")]
            wanted = [module for each in (following, *within) for module in each.modules]
            unit.modules[0].set_modules_to_forward_prefetch(wanted)


def assert_ties(model: nn.Module, ties: list[list[str]]) -> None:
    """Every group of names still is one parameter."""
    for group in ties:
        parameters = {id(model.get_parameter(name)) for name in group}
        assert len(parameters) == 1, f"the tie of {group} broke"


def materialise(
    root: nn.Module,
    model: nn.Module,
    mesh: Mesh,
    weights: Callable[[], Iterator[tuple[str, Tensor]]] | None,
    buffers: Callable[[], dict[str, Tensor]],
    *,
    offload: bool = False,
) -> None:
    """Gives the sharded meta tensors of `root` storage on the device, and `model` its values.

    weights: called on rank 0 alone; yields (name in `model`, full tensor), each parameter and persistent
    buffer once (further names of a tied parameter may follow and are skipped). One full tensor lives on a
    device at a time. None leaves the values undefined, for a checkpoint that is loaded next.
    buffers: called on rank 0 alone; float32 values of the non-persistent buffers, which no checkpoint holds.
    offload: as `apply_fsdp` was told; parameters then get host memory, buffers the device's.
    """
    ties = tied_names(root)
    _to_empty(root, torch.device("cpu") if offload else mesh.device)
    _buffers_to(root, mesh.device)
    assert_ties(root, ties)
    _fill_buffers(model, _from_main(buffers, mesh), mesh.device)
    if weights is not None:
        _fill(model, _broadcast_stream(weights, mesh), mesh.device)


def _to_empty(root: nn.Module, device: torch.device) -> None:
    """`root.to_empty`, with every parameter staying the same object: a plain one would lose its ties."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        root.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _buffers_to(root: nn.Module, device: torch.device) -> None:
    """Buffers stay on the device for good: nobody gathers them."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's weights."""
    keys = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in keys}


@torch.no_grad()
def _fill(model: nn.Module, stream: Iterator[tuple[str, Tensor]], device: torch.device) -> None:
    targets: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    targets.update(persistent_buffers(model))
    done: set[int] = set()
    for name, full in stream:
        if name not in targets:
            raise UserError(f"the weights hold '{name}', which {type(model).__name__} does not have")
        target = targets[name]
        if id(target) in done:
            continue
        if full.shape != target.shape:
            raise UserError(
                f"the weights' '{name}' has the shape {list(full.shape)}, "
                f"the model needs {list(target.shape)}"
            )
        if isinstance(target, DTensor):
            shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(shard.to_local())
        else:
            target.copy_(full)
        done.add(id(target))
    missing = [name for name, target in targets.items() if id(target) not in done]
    if missing:
        raise UserError(f"the weights lack {_some(missing)} of {type(model).__name__}")


def _fill_buffers(model: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    keys = model.state_dict().keys()
    names = [name for name, _ in model.named_buffers() if name not in keys]
    missing = [name for name in names if name not in values]
    assert not missing, f"nobody restores the buffers {missing}"
    for name in names:
        path, _, leaf = name.rpartition(".")
        # replaced, not copied into: the empty one may have been cast with the model
        model.get_submodule(path).register_buffer(leaf, values[name].to(device), persistent=False)


def _from_main(make: Callable[[], dict[str, Tensor]], mesh: Mesh) -> dict[str, Tensor]:
    """`make()` of rank 0, on every rank; its failure is every rank's."""
    box: tuple[dict[str, Tensor], str | None] = ({}, None)
    if mesh.is_main:
        try:
            box = (make(), None)
        except Exception as error:
            mesh.broadcast(({}, str(error)))
            raise
    values, problem = mesh.broadcast(box)
    if problem is not None:
        raise UserError(problem)
    return values


def _broadcast_stream(
    weights: Callable[[], Iterator[tuple[str, Tensor]]], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Rank 0's stream on every rank, tensor by tensor, on the device; its failure is every rank's."""
    if mesh.is_main:
        try:
            for name, tensor in weights():
                mesh.broadcast((name, tensor.shape, tensor.dtype))
                yield name, _broadcast_tensor(tensor.to(mesh.device).contiguous(), mesh)
        except GeneratorExit:
            raise
        except Exception as error:
            mesh.broadcast(str(error))
            raise
        mesh.broadcast(None)
        return
    while (header := mesh.broadcast(None)) is not None:
        if isinstance(header, str):
            raise UserError(header)
        name, shape, dtype = header
        yield name, _broadcast_tensor(torch.empty(shape, dtype=dtype, device=mesh.device), mesh)


def _broadcast_tensor(tensor: Tensor, mesh: Mesh) -> Tensor:
    if mesh.world_size > 1 and tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)   # as bytes: gloo does not know every dtype
    return tensor


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
