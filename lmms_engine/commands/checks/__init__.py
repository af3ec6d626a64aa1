"""What `lmms-engine doctor` looks at: one file for each part of a machine, one `Check` for each thing.

A check that is not ok says in `remedy` what to do. Nothing here needs a network or changes the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """What was found. warn: works, but may bite later; fail: something will not run."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def gb(number: float) -> str:
    """Bytes as 10^9 bytes."""
    return f"{number / 1e9:.2g} GB" if number < 1e10 else f"{number / 1e9:.0f} GB"
