"""FSDP2 with AdamW: the default backend, also for one process and on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.grad_norm import clip_divisor, global_norm
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.backend import BACKENDS
from lmms_engine.train.backend.adamw import AdamWBackend
from lmms_engine.train.checkpoint import ModelState, OptimizerState

if TYPE_CHECKING:
    from lmms_engine.config import Job


@BACKENDS.register("fsdp2_trainer")
class FSDP2Backend(AdamWBackend):
    """Holds the sharded objective's optimiser and schedule; see `Backend` for the protocol.

    A non-finite gradient norm never reaches the weights: the optimiser's kernel is told on the device to
    leave weights and moments as they are. The run then stops with a UserError that names the step: at once on
    CPU and under offload; on a GPU else at the next step, at the next `check_finite` (before logging) or
    `state` (before saving), whichever comes first, so that no step waits for the device.
    """

    def __init__(self, objective: Objective, job: Job, mesh: Mesh) -> None:
        super().__init__(objective, job, mesh)
        self._reshard = job.trainer.fsdp_config.reshard_after_forward
        self._offload = job.trainer.fsdp_config.cpu_offload

    @contextmanager
    def micro(self, *, last: bool) -> Iterator[None]:
        """Gradients stay whole and local, in float32, until the last micro-batch reduces their sum.

        Whole ones are what a device has no room for under offload: there each micro-batch is reduced, and the
        shards' gradients add up in the host's memory.
        """
        last = last or self._offload
        self.objective.set_requires_gradient_sync(last)
        self.objective.set_is_last_backward(last)
        # without resharding between forward and backward there is none between micro-batches either
        self.objective.set_reshard_after_backward(last or self._reshard)
        yield

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this rank's share of the global loss."""
        loss.backward()

    def step(self) -> Tensor:
        """Clips, updates, clears; returns the gradient norm before clipping (float32).

        It is where the optimiser works: on the device, under offload on the host.
        """
        if not self._gradients_checked:
            self._require_gradients([name for name, p in self._params.items() if p.grad is None])
        self.check_finite()
        norm = global_norm(self._params.values(), self.mesh.device)
        if self._offload:
            norm = norm.cpu()   # AdamW would not wait for its own copy of it
        self._optimizer.grad_scale = clip_divisor(norm, self._max_norm)
        self._optimizer.found_inf = (~norm.isfinite()).float()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._watch(norm)
        return norm

    def state(self) -> dict[str, Any]:
        """`model` and `optimizer`, sharded, under checkpoint names."""
        self.check_finite()
        return {
            "model": ModelState(self.objective.model),
            "optimizer": OptimizerState(self._optimizer, self._params),
        }
