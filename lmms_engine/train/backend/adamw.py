"""What every backend with AdamW has: groups, learning rates, and the watch over gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmms_engine.errors import UserError
from lmms_engine.objectives.base import Objective
from lmms_engine.optim.groups import build_adamw, build_groups, format_groups
from lmms_engine.optim.schedule import build_schedule
from lmms_engine.parallel.mesh import Mesh

if TYPE_CHECKING:
    from lmms_engine.config import Job

LOG = logging.getLogger("lmms_engine")
MAX_NAMED = 10


class AdamWBackend:
    """The optimiser and its schedule over the trainable parameters; subclasses hold and reduce gradients."""

    def __init__(self, objective: Objective, job: Job, mesh: Mesh) -> None:
        trainer = job.trainer
        self.objective = objective
        self.mesh = mesh
        self.groups = build_groups(objective.model, trainer.weight_decay)
        self.schedule = build_schedule(trainer)
        self._optimizer = build_adamw(self.groups, trainer)
        self._base_lr = trainer.learning_rate
        self._max_norm = trainer.max_grad_norm
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

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter's whole gradient, summed over the ranks, if it has one. Collective.

        Call it between the last micro-batch's backward and `step`. One tensor at a time is gathered.
        """
        for name, parameter in self._params.items():
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to(self.mesh.device)   # where its ranks talk to one another
                yield name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

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

    def _watch(self, norm: Tensor) -> None:
        """Remembers the norm of this step; on a CPU looking at it costs nothing, so it is done at once."""
        self._unchecked = (self._step, norm)
        if norm.device.type == "cpu":
            self.check_finite()

    def _require_gradients(self, without: list[str]) -> None:
        """After the first backward every trainable parameter has a gradient, or the run stops."""
        if without:
            more = f" and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
            raise UserError(
                f"{len(without)} trainable parameters got no gradient in the first step: "
                f"{', '.join(without[:MAX_NAMED])}{more}. Freeze what the data never reach "
                "(trainer_args.freeze_modules), or mend the model"
            )
        self._gradients_checked = True
