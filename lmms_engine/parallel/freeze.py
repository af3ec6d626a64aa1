"""Frozen parts: no gradient, no optimiser entry, no graph, evaluation mode."""

from __future__ import annotations

from torch import nn

from lmms_engine.errors import UserError
from lmms_engine.parallel.paths import match_short
from lmms_engine.registry import nearest


def apply_freeze(model: nn.Module, patterns: tuple[str, ...] | list[str]) -> list[str]:
    """Freezes what the patterns of `trainer_args.freeze_modules` match; returns the frozen modules' paths.

    A pattern is a module path with or without the leading `model.`, `*` standing for part of one component:
    `visual`, `language_model`, `visual.blocks.*`. A pattern behind `!` thaws again what an earlier one froze,
    so that `[visual, "!visual.merger"]` trains the connector of a frozen tower. Later beats earlier.
    Raises UserError for a pattern that matches no module with parameters and for a list that leaves nothing
    to train.
    """
    for pattern in patterns:
        thaw = pattern.startswith("!")
        for module in _find(model, pattern.removeprefix("!")).values():
            module.requires_grad_(thaw)
    if patterns and not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"trainer_args.freeze_modules={list(patterns)} leaves nothing to train")
    return _topmost_frozen(model)


def keep_in_eval(root: nn.Module, parts: list[nn.Module]) -> None:
    """Dropout stays off in `parts`, also after somebody calls `train()` on all of `root`."""

    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        for part in parts:
            if part.training:
                part.eval()

    if parts:
        root.register_forward_pre_hook(hook)


def _find(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    found = match_short(model, pattern)
    if any(True for module in found.values() for _ in module.parameters()):
        return found
    legal = _candidates(model)
    raise UserError(
        f"trainer_args.freeze_modules: '{pattern}' matches no part of {type(model).__name__} with parameters "
        f"(candidates: {', '.join(legal)}){nearest(pattern, legal)}"
    )


def _candidates(model: nn.Module) -> list[str]:
    """Parts worth naming: paths of up to two components below an optional `model`, without list indices."""
    names = []
    for name, module in model.named_modules():
        short = name.removeprefix("model.")
        if name in ("", "model") or short.count(".") > 1 or short.split(".")[-1].isdigit():
            continue
        if any(True for _ in module.parameters()):
            names.append(short)
    return names


def _topmost_frozen(model: nn.Module) -> list[str]:
    """The largest modules whose parameters are all frozen."""
    frozen: list[str] = []
    for name, module in model.named_modules():   # parents come before children
        if any(name.startswith(parent + ".") for parent in frozen):
            continue
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            frozen.append(name)
    return frozen
