"""Learning-rate schedules as pure functions of how much of the run is done: there is no state to resume.

The step that ends at progress p (0 < p <= 1) is taken with `schedule(p, step)` times the base rate. So the
first step has a rate above 0, and the last one, p = 1, has exactly the schedule's final value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmms_engine.errors import UserError
from lmms_engine.registry import nearest

if TYPE_CHECKING:
    from lmms_engine.config import TrainerSection

Shape = Callable[[float], float]   # share of the run after warm-up, in [0, 1] -> factor


@dataclass(frozen=True)
class Schedule:
    """Warm-up from 0 to 1, then a shape. Warm-up is a share of the run or, where given, a number of steps."""

    shape: Shape
    warmup_ratio: float = 0.0
    warmup_steps: int | None = None

    def __call__(self, progress: float, step: int) -> float:
        """Factor of the base rate for the step that ends at `progress`; `step` counts from 1."""
        warmup = self.warmup_ratio
        if self.warmup_steps is not None:
            # Steps so far over progress so far is the run's length, also where only epochs are given.
            warmup = self.warmup_steps * progress / step
        if progress < warmup:
            return progress / warmup
        if warmup >= 1.0:
            return 1.0
        return self.shape(min((progress - warmup) / (1.0 - warmup), 1.0))


def _constant() -> Shape:
    return lambda t: 1.0


def _linear(min_lr_ratio: float = 0.0) -> Shape:
    return lambda t: 1.0 + (min_lr_ratio - 1.0) * t


def _cosine(min_lr_ratio: float = 0.0) -> Shape:
    return lambda t: min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * t))


def _wsd(decay_ratio: float = 0.2, min_lr_ratio: float = 0.0) -> Shape:
    """Stable at 1, then a linear decay over the last `decay_ratio` of what follows the warm-up."""

    def factor(t: float) -> float:
        left = min((1.0 - t) / decay_ratio, 1.0)
        return min_lr_ratio + (1.0 - min_lr_ratio) * left

    return factor


SHAPES: dict[str, tuple[Callable[..., Shape], tuple[str, ...]]] = {
    "constant": (_constant, ()),
    "cosine": (_cosine, ("min_lr_ratio",)),
    "linear": (_linear, ("min_lr_ratio",)),
    "wsd": (_wsd, ("decay_ratio", "min_lr_ratio")),
}


def build_schedule(trainer: TrainerSection) -> Schedule:
    """The schedule of `lr_scheduler_type`, `lr_scheduler_kwargs`, `warmup_ratio` and `warmup_steps`."""
    name, options = trainer.lr_scheduler_type, dict(trainer.lr_scheduler_kwargs or {})
    if name not in SHAPES:
        legal = list(SHAPES)
        raise UserError(
            f"trainer_args.lr_scheduler_type={name!r} (legal: {', '.join(legal)}){nearest(name, legal)}"
        )
    make, legal_options = SHAPES[name]
    for key, value in options.items():
        if key not in legal_options:
            raise UserError(
                f"trainer_args.lr_scheduler_kwargs.{key}: the schedule '{name}' takes "
                f"{', '.join(legal_options) or 'no options'}{nearest(key, list(legal_options))}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise UserError(f"trainer_args.lr_scheduler_kwargs.{key}={value!r} (legal: a number in [0, 1])")
    if options.get("decay_ratio") == 0:
        raise UserError("trainer_args.lr_scheduler_kwargs.decay_ratio=0 (legal: above 0; or use 'constant')")
    return Schedule(make(**options), trainer.warmup_ratio or 0.0, trainer.warmup_steps or None)
