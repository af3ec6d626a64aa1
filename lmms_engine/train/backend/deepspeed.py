"""DeepSpeed ZeRO around the same objective, AdamW, schedule and checkpoint format.

ZeRO averages gradients over the ranks, while our loss is a sum over all ranks that carries its global
denominator already: so it is multiplied by the number of ranks (data and sequence ranks alike), and the same
number comes out. Stages 2 and 3 reduce each micro-batch's gradients as they come, since they never hold whole
ones. There is no expert parallelism here; the configuration refuses it.

Checkpoints are those of FSDP2: either backend, on any number of ranks, loads what the other saved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lmms_engine.config_deepspeed import engine_settings
from lmms_engine.errors import UserError
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.fsdp import persistent_buffers
from lmms_engine.parallel.grad_norm import clip_divisor, global_norm
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.backend import BACKENDS
from lmms_engine.train.backend.adamw import AdamWBackend
from lmms_engine.train.checkpoint import OptimizerState
from lmms_engine.train.parallelize import computes_in_bf16

if TYPE_CHECKING:
    from types import ModuleType

    from lmms_engine.config import Job

MOMENTS = OptimizerState.MOMENTS


@BACKENDS.register("deepspeed_trainer")
class DeepSpeedBackend(AdamWBackend):
    """ZeRO stages 0 to 3 as `trainer_args.deepspeed` says; see `Backend` for the protocol.

    A non-finite gradient norm never reaches the weights; the run then stops with a UserError, as with FSDP2.
    ZeRO tells that there was one, not whether it was infinite or no number, so it is reported as inf.
    """

    def __init__(self, objective: Objective, job: Job, mesh: Mesh) -> None:
        super().__init__(objective, job, mesh)
        deepspeed = import_deepspeed(mesh)
        bf16 = computes_in_bf16(job.trainer, mesh.device)
        settings = engine_settings(job.trainer, bf16=bf16, world_size=mesh.world_size)
        self.stage: int = settings["zero_optimization"]["stage"]
        self._seen: set[str] = set()   # trainable parameters that got a gradient in the first step
        self._watchers = [
            parameter.register_hook(lambda grad, name=name: self._seen.add(name))
            for name, parameter in self._params.items()
        ]
        # ZeRO would make its float32 masters of weights that it has rounded to bfloat16.
        self._masters = MasterWeights(self, self._exact_weights() if bf16 else {})
        self.engine, *_ = deepspeed.initialize(
            model=objective, optimizer=self._optimizer, config=settings, dist_init_required=False
        )
        self._masters.restore()
        self._moments = Moments(self)

    @contextmanager
    def micro(self, *, last: bool) -> Iterator[None]:
        """Tells ZeRO whether this micro-batch ends the step."""
        self.engine.set_gradient_accumulation_boundary(last)
        if self.stage:
            self.engine.optimizer.clear_backward_seen_flag()
        yield

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this rank's share of the global loss."""
        # The step calls the objective itself; what the engine's own forward would have hooked to its output
        # is hooked to the loss.
        loss.register_hook(lambda grad: self.engine._backward_prologue())
        self.engine.backward(loss * self.mesh.world_size, scale_wrt_gas=False)

    def step(self) -> Tensor:
        """Clips, updates, clears; returns the gradient norm before clipping (float32, on the device)."""
        if not self._gradients_checked:
            self._require_gradients([name for name in self._params if name not in self._seen])
            for watcher in self._watchers:
                watcher.remove()
        self.check_finite()
        if self.stage:
            self.engine.step()
            norm = self.engine.get_global_grad_norm()
            norm = torch.as_tensor(norm, dtype=torch.float32, device=self.mesh.device)
        else:
            norm = global_norm(self._params.values(), self.mesh.device)
            self._optimizer.grad_scale = clip_divisor(norm, self._max_norm)
            self._optimizer.found_inf = (~norm.isfinite()).float()
            self.engine.step()
        self._watch(norm)
        return norm

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter's whole gradient, as ZeRO has reduced it. Collective."""
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self._params.items():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                yield name, gradient

    def state(self) -> dict[str, Any]:
        """`model` and `optimizer` under checkpoint names, each tensor cut over the ranks on the host.

        Building it is collective and takes the host memory of one rank's share.
        """
        self.check_finite()
        return {"model": self._masters, "optimizer": self._moments}

    def _exact_weights(self) -> dict[str, Tensor]:
        shards = Shards(self.mesh)
        return {name: shards.cut(p.detach()) for name, p in self.objective.model.named_parameters()}


class Shards:
    """Whole tensors to shards on the host and back: what a checkpoint holds, whatever ZeRO's layout is."""

    def __init__(self, mesh: Mesh) -> None:
        self.axis = DeviceMesh.from_group(mesh.host, "cpu", mesh_dim_names=("zero",))

    def cut(self, full: Tensor) -> DTensor:
        """This rank's rows of a tensor that every rank has, as float32."""
        size, rank = self.axis.size(), self.axis.get_local_rank()
        parts = full.chunk(size)
        rows = parts[rank] if rank < len(parts) else full[:0]
        rows = rows.to("cpu", torch.float32, copy=True).contiguous()
        return DTensor.from_local(
            rows, self.axis, [Shard(0)], run_check=False, shape=full.shape, stride=full.contiguous().stride()
        )


class MasterWeights:
    """The float32 weights as a part of a checkpoint; see `checkpoint.ModelState`.

    exact: shards of the weights before ZeRO rounded them. Those of frozen parameters, of which ZeRO keeps no
    masters, stay here for good.
    """

    def __init__(self, backend: DeepSpeedBackend, exact: dict[str, Tensor]) -> None:
        self.backend = backend
        self.model: nn.Module = backend.objective.model
        self.shards = Shards(backend.mesh)
        self._exact = exact
        self._frozen = {name: exact[name] for name in exact if name not in backend._params}

    def restore(self) -> None:
        """Puts the exact weights into the masters that ZeRO has made; call it once."""
        self._write(self._exact)
        self._exact = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters as shards, persistent buffers as they are; a tied parameter once. Collective."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            held = self._frozen.get(name)
            tensors[name] = self.shards.cut(self._read(parameter)) if held is None else held
        return tensors | {name: buffer.detach() for name, buffer in persistent_buffers(self.model).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Writes loaded shards into masters and compute weights; buffers were filled in place. Collective."""
        parameters = dict(self.model.named_parameters())
        self._write({name: tensor for name, tensor in state.items() if name in parameters})

    def _read(self, parameter: nn.Parameter) -> Tensor:
        """The whole float32 weight, on every rank."""
        from deepspeed import zero
        from deepspeed.utils import safe_get_full_fp32_param

        if self.backend.stage and parameter.requires_grad:
            return safe_get_full_fp32_param(parameter)
        with zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    @torch.no_grad()
    def _write(self, shards: dict[str, Tensor]) -> None:
        from deepspeed import zero

        for name, parameter in self.model.named_parameters():
            if name not in shards:
                continue
            full = shards[name].full_tensor().to(self.backend.mesh.device)
            with zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.copy_(full)
            if self.backend.stage and parameter.requires_grad:
                set_whole(parameter, full)
            if name in self._frozen:
                self._frozen[name] = shards[name]


class Moments:
    """AdamW's moments and step counts as a part of a checkpoint; see `checkpoint.OptimizerState`."""

    def __init__(self, backend: DeepSpeedBackend) -> None:
        self.backend = backend
        self.shards = Shards(backend.mesh)

    def state_dict(self) -> dict[str, Tensor]:
        """`<parameter name>.<moment>` as shards; zeros where the optimiser has none yet. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = self._steps()
        step = max(float(step) for step in steps)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.backend._params.items():
            tensors[f"{name}.step"] = torch.tensor(step)
            for key in MOMENTS:
                if self.backend.stage:
                    full = safe_get_full_optimizer_state(parameter, key)
                else:
                    full = self.backend.optimizer.state[parameter][key]
                tensors[f"{name}.{key}"] = self.shards.cut(full)
        return tensors

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Writes loaded shards into ZeRO's flat moments. Collective."""
        counts = {float(state[f"{name}.step"]) for name in self.backend._params}
        if len(counts) != 1:
            raise UserError(
                f"the checkpoint's parameters have seen {sorted(counts)} steps; ZeRO keeps one count. "
                "Resume with trainer_type: fsdp2_trainer"
            )
        for step in self._steps():
            step.fill_(counts.copy().pop())
        for name, parameter in self.backend._params.items():
            for key in MOMENTS:
                full = state[f"{name}.{key}"].full_tensor().to(self.backend.mesh.device)
                if self.backend.stage:
                    set_whole(parameter, full, key)
                else:
                    self.backend.optimizer.state[parameter][key].copy_(full)

    def _steps(self) -> list[Tensor]:
        """The step counts of the optimiser's flat states, which are made here where it has none yet."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        optimizer = self.backend.optimizer
        steps = []
        for flat in self._flats():
            state = optimizer.state[flat]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(flat, requires_grad=False)
            steps.append(state["step"])
        # Stages 1 and 2 link them to the parameters once, after the first group's first update, when the
        # other group has none yet; so all are linked here.
        zero = self.backend.engine.optimizer
        groups = getattr(zero, "bit16_groups", getattr(zero, "bf16_groups", ()))
        for flat, group in zip(self._flats(), groups, strict=False):
            lazy_init_hp_params_optimizer_state(group, flat, optimizer.state)
        return steps

    def _flats(self) -> list[Tensor]:
        """What AdamW really updates: flat float32 partitions, or the parameters themselves at stage 0."""
        zero = self.backend.engine.optimizer
        for name in (
            "fp32_partitioned_groups_flat",    # stage 3
            "single_partition_of_fp32_groups",   # stages 1 and 2
            "fp32_groups_flat_partition",   # stage 1 in bf16
        ):
            if hasattr(zero, name):
                return list(getattr(zero, name))
        return list(self.backend._params.values())


def set_whole(parameter: nn.Parameter, full: Tensor, moment: str | None = None) -> None:
    """Writes a parameter's float32 master, or one of its moments, into this rank's part of ZeRO's flat ones.

    DeepSpeed's own function does not pad at stage 3: it fails where a size is no multiple of the ranks.
    """
    from deepspeed import utils

    if not hasattr(parameter, "ds_tensor"):
        if moment is None:
            utils.safe_set_full_fp32_param(parameter, full)
        else:
            utils.safe_set_full_optimizer_state(parameter, full, moment)
        return
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    flat = F.pad(full.flatten(), (0, size * dist.get_world_size(group) - full.numel()))
    part = flat.narrow(0, size * dist.get_rank(group), size)
    if moment is None:
        utils.safe_set_local_fp32_param(parameter, part)
    else:
        utils.safe_set_local_optimizer_state(parameter, part, moment)


def import_deepspeed(mesh: Mesh) -> ModuleType:
    """The package, quiet and joined to our process group. Raises UserError where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", mesh.device.type)
    # what a launcher would have set; one process has none
    launched = {"RANK": mesh.rank, "WORLD_SIZE": mesh.world_size, "LOCAL_RANK": mesh.local_rank}
    for name, value in launched.items():
        os.environ.setdefault(name, str(value))
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            "trainer_type=deepspeed_trainer: the package deepspeed is not installed (pip install "
            "'lmms-engine[deepspeed]'; or use trainer_type: fsdp2_trainer)"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if mesh.device.type == "cpu":
        # A shared-memory reduction for CPUs, compiled at first use, by all ranks at once: gloo does without.
        # On a GPU there is none, and the mere question would try the compiler on every kernel.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=None, verbose=False)
    return deepspeed
