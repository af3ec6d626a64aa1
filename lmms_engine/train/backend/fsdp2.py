"""FSDP2 with AdamW: the default backend, also for one process and on CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmms_engine.errors import UserError
from lmms_engine.objectives.base import Objective
from lmms_engine.optim.groups import build_adamw, build_groups, format_groups
from lmms_engine.optim.schedule import build_schedule
from lmms_engine.parallel.grad_norm import clip_divisor, global_norm
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.checkpoint import ModelState, OptimizerState

if TYPE_CHECKING:
    from lmms_engine.config import Job

LOG = logging.getLogger("lmms_engine")
MAX_NAMED = 10


class FSDP2Backend:
    """Holds the sharded objective's optimiser and schedule; see `Backend` for the protocol.

    A non-finite gradient norm never reaches the weights: the optimiser's kernel is told on the device to
    leave weights and moments as they are. The run then stops with a UserError that names the step: at once on
    CPU; on a GPU at the next step, at the next `check_finite` (before logging) or `state` (before saving),
    whichever comes first, so that no step waits for the device.
    """

    def __init__(self, objective: Objective, job: Job, mesh: Mesh) -> None:
        trainer = job.trainer
        self.objective = objective
        self.mesh = mesh
        self.groups = build_groups(objective.model, trainer.weight_decay)
        self.schedule = build_schedule(trainer)
        self._optimizer = build_adamw(self.groups, trainer)
        self._base_lr = trainer.learning_rate
        self._max_norm = trainer.max_grad_norm
        self._reshard = trainer.fsdp_config.reshard_after_forward
        self._params = {name: p for group in self.groups for name, p in group.params.items()}
        self._step: int | None = None                     # the step in progress, counted from 1
        self._unchecked: tuple[int | None, Tensor] | None = None   # (step, norm) nobody has looked at yet
        self._gradients_checked = False
        if mesh.is_main:
            LOG.info("optimiser groups:\n%s", format_groups(self.groups))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def lrs(self) -> dict[str, float]:
        """The learning rate of each group, as the current step uses it."""
        return {group["name"]: group["lr"] for group in self._optimizer.param_groups}

    def set_progress(self, progress: float, step: int) -> None:
        """Sets the learning rates of step `step` (counted from 1), at whose end `progress` is done."""
        self._step = step
        for group in self._optimizer.param_groups:
            group["lr"] = self._base_lr * self.schedule(progress, step)

    @contextmanager
    def micro(self, *, last: bool) -> Iterator[None]:
        """Gradients stay whole and local, in float32, until the last micro-batch reduces their sum."""
        self.objective.set_requires_gradient_sync(last)
        self.objective.set_is_last_backward(last)
        # without resharding between forward and backward there is none between micro-batches either
        self.objective.set_reshard_after_backward(last or self._reshard)
        yield

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this rank's share of the global loss."""
        loss.backward()

    def step(self) -> Tensor:
        """Clips, updates, clears; returns the gradient norm before clipping (float32, on the device)."""
        if not self._gradients_checked:
            self._check_gradients()
        self.check_finite()
        norm = global_norm(self._params.values(), self.mesh.device)
        self._optimizer.grad_scale = clip_divisor(norm, self._max_norm)
        self._optimizer.found_inf = (~norm.isfinite()).float()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._unchecked = (self._step, norm)
        if self.mesh.device.type == "cpu":
            self.check_finite()
        return norm

    def check_finite(self) -> None:
        """Raises UserError if the last step's gradient norm was not finite. Reads the device."""
        if self._unchecked is None:
            return
        step, norm = self._unchecked
        self._unchecked = None
        value = norm.item()
        if value != value or value == float("inf"):
            raise UserError(
                f"the gradient norm of step {step if step is not None else '?'} is {value}; the weights were "
                "not changed by it. Resume from the last checkpoint with a lower trainer_args.learning_rate, "
                "or look at the rows of that step (trainer_args.log_rows: true)"
            )

    def state(self) -> dict[str, Any]:
        """`model` and `optimizer`, sharded, under checkpoint names."""
        self.check_finite()
        return {
            "model": ModelState(self.objective.model),
            "optimizer": OptimizerState(self._optimizer, self._params),
        }

    def _check_gradients(self) -> None:
        """After the first backward every trainable parameter has a gradient, or the run stops."""
        without = [name for name, parameter in self._params.items() if parameter.grad is None]
        if without:
            more = f" and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
            raise UserError(
                f"{len(without)} trainable parameters got no gradient in the first step: "
                f"{', '.join(without[:MAX_NAMED])}{more}. Freeze what the data never reach "
                "(trainer_args.freeze_modules), or mend the model"
            )
        self._gradients_checked = True
