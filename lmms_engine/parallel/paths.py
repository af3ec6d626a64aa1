"""Module paths and patterns: `model.language_model.layers.*`, where `*` is part of one path component."""

from __future__ import annotations

import re

from torch import nn

from lmms_engine.errors import UserError
from lmms_engine.registry import nearest


def match(root: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Every module of `root` whose whole path matches; empty when none does."""
    wanted = _compile(pattern)
    return {name: module for name, module in root.named_modules() if name and wanted.fullmatch(name)}


def match_short(root: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Like `match`, for patterns that users type: a leading `model.` may be left out."""
    return match(root, pattern) or match(root, f"model.{pattern}")


def resolve(root: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Like `match`, for patterns of a layout: no match is an error of the model's spec."""
    found = match(root, pattern)
    if not found:
        raise UserError(
            f"the model's layout names '{pattern}', which no module of {type(root).__name__} matches"
            f"{nearest(pattern, [name for name, _ in root.named_modules()])}"
        )
    return found


def under(name: str, parents: dict[str, nn.Module]) -> bool:
    """True when `name` lies inside one of `parents` (or is one)."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile("[^.]*".join(re.escape(piece) for piece in pattern.split("*")))
