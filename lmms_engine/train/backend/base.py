"""What the step and the runner need from a distributed backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Backend(Protocol):
    """One way of holding parameters, gradients and optimiser state over the ranks."""

    def micro(self, *, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of a micro-batch; gradients are reduced on the last one only."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a scalar that is this rank's share of the global loss."""
        ...

    def step(self) -> Tensor:
        """Clips, updates, clears gradients; returns the global gradient norm before clipping (a scalar)."""
        ...

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Whole gradients by parameter name, between the last backward and `step`. Collective."""
        ...

    def set_progress(self, progress: float, step: int) -> None:
        """Sets the learning rates for step number `step`, after which `progress` of the run is done."""
        ...

    def lrs(self) -> dict[str, float]:
        """The learning rate of each group in the current step."""
        ...

    def check_finite(self) -> None:
        """Raises UserError if the last step's gradient norm was not finite."""
        ...

    def state(self) -> dict[str, Any]:
        """Parts to be checkpointed: name -> object with `state_dict` and `load_state_dict`."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
