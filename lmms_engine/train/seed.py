"""Stateless randomness: every random choice is a function of (seed, purpose, rank, epoch or step).

There is nothing to save for a resume beyond the seed and the step.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *keys: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. `derive(seed, "step", dp_rank, step)`; equal on every machine."""
    text = repr((int(seed), *keys)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, *keys: str | int) -> torch.Generator:
    """A fresh CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *keys))
