"""Liger's fused modules, put in by module swap: the one call into Liger besides the loss.

The swap is generic: blocks are recognised by structure and behaviour (structure.py), share the parameters of
what they replace, and leave names and checkpoints alone. Liger's own per-model entry points assign to
transformers' classes, for the whole process; they are used only for types that we have no word on:

1. the swaps that our ModelSpec lists, or a user's function registered for the model type in LIGER;
2. else Liger's own entry for that type, its loss fusion off (LossHead is ours);
3. else the same on a `language_model` inside; else an error.

GPU only: no Liger kernel runs on a CPU.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from lmms_engine.errors import UserError
from lmms_engine.kernels.structure import is_gated_silu_mlp, is_rms_norm
from lmms_engine.kernels.widen import GatedMLP, missing_columns
from lmms_engine.registry import Registry

log = logging.getLogger(__name__)

# model type -> a user's own way in: changes the model, returns how many modules of each kind it swapped
LIGER: Registry[Callable[[nn.Module], dict[str, int]]] = Registry("liger function for model type")


class SwapSpec(Protocol):
    """The part of a ModelSpec that matters here."""

    @property
    def name(self) -> str: ...

    @property
    def swaps(self) -> tuple[str, ...] | None: ...


def swap(model: nn.Module, spec: SwapSpec | None) -> dict[str, int]:
    """Fuses what can be fused; returns kind -> number of modules. A kind that matches none raises UserError.

    spec: None for a model that has no spec of ours, which leaves levels 2 and 3, as `swaps: None` does.
    """
    model_type = model.config.model_type
    if model_type in LIGER:
        return LIGER.get(model_type)(model)
    if spec is not None and spec.swaps is not None:
        return apply_swaps(model, spec.swaps, spec.name)
    return _apply_ligers_own(model, model_type)


def apply_swaps(model: nn.Module, kinds: tuple[str, ...], name: str) -> dict[str, int]:
    """Swaps the named kinds of module all over the model; a kind that matches nothing raises UserError."""
    counts = {}
    for kind in kinds:
        recognise, build = SWAPS.get(kind)
        found = [(path, module) for path, module in model.named_modules() if recognise(module)]
        if not found:
            raise UserError(
                f"use_liger_kernel: no '{kind}' in {name}; its modules are not what the spec says "
                "(set trainer_args.use_liger_kernel=false to train with the plain modules)"
            )
        for path, module in found:
            model.set_submodule(path, build(module))
        counts[kind] = len(found)
    return counts


class FusedRMSNorm(nn.Module):
    """RMSNorm by Liger's kernel, on the weight of the module that it replaces."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        from liger_kernel.ops import LigerRMSNormFunction

        # offset 0, Llama's rounding; not in place: the incoming gradient may belong to somebody else too
        return LigerRMSNormFunction.apply(
            hidden_states, self.weight, self.variance_epsilon, 0.0, "llama", False, None
        )


def fused_silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up by Liger's kernel."""
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)


def _fused_mlp(mlp: nn.Module) -> nn.Module:
    return GatedMLP(mlp, extra=missing_columns(mlp), product=fused_silu_times)


Recognise = Callable[[nn.Module], bool]
Build = Callable[[nn.Module], nn.Module]

# No LayerNorm: on an H200, [22968, 1024] in bf16, forward and backward took Liger 0.59 ms and torch 0.25 ms.
# RMSNorm gains: 0.77 against 1.80 ms on [16384, 2560], 0.62 against 3.07 ms on 32 heads of 128.
SWAPS: Registry[tuple[Recognise, Build]] = Registry("liger swap")
SWAPS.register("rms_norm")((is_rms_norm, FusedRMSNorm))
SWAPS.register("swiglu")((is_gated_silu_mlp, _fused_mlp))


def _apply_ligers_own(model: nn.Module, model_type: str) -> dict[str, int]:
    """Levels 2 and 3. Liger changes transformers' classes for the whole process, which is logged."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    inside = [module for path, module in model.named_modules() if path.rpartition(".")[2] == "language_model"]
    for part in (model, *inside):
        part_type = getattr(getattr(part, "config", None), "model_type", None)
        if part_type in MODEL_TYPE_TO_APPLY_LIGER_FN:
            apply = MODEL_TYPE_TO_APPLY_LIGER_FN[part_type]
            known = inspect.signature(apply).parameters
            off = {"cross_entropy": False, "fused_linear_cross_entropy": False}
            apply(model=part, **{key: value for key, value in off.items() if key in known})
            log.warning("liger: its own entry for '%s' changed transformers process-wide", part_type)
            return {part_type: 1}
    raise UserError(
        f"use_liger_kernel: nothing to fuse in model type '{model_type}': no swaps in its spec, no function "
        "in kernels.liger.LIGER, no entry in Liger, no language_model inside that has one; "
        "set trainer_args.use_liger_kernel=false"
    )
