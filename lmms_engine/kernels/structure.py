"""Recognises a library's building blocks by what they are made of and what they compute, not by their names.

A module counts as a known block only if a small copy of its class gives the block's numbers: a norm that
scales by 1 + weight looks like any other from outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def is_rms_norm(module: nn.Module) -> bool:
    """x / rms(x) * weight with the mean square taken in float32, as the Llama and Qwen families have it."""
    weight = getattr(module, "weight", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or len(own) != 1 or list(module.children()):
        return False
    return isinstance(getattr(module, "variance_epsilon", None), float) and behaves(module, _rms_norm_probe)


def is_gated_silu_mlp(module: nn.Module) -> bool:
    """down(silu(gate(x)) * up(x)) out of three linears called gate_proj, up_proj and down_proj."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear for part in parts) or not hasattr(module, "act_fn"):
        return False
    weights = {id(p) for part in parts for p in part.parameters()}
    return weights == {id(p) for p in module.parameters()} and behaves(module, _gated_mlp_probe)


def behaves(module: nn.Module, probe: Callable[[nn.Module, nn.Module], bool]) -> bool:
    """Whether `probe` says so of the module and a blank of its class, to which it gives small parts."""
    blank = type(module).__new__(type(module))
    nn.Module.__init__(blank)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        try:
            return probe(module, blank)
        except (AttributeError, RuntimeError, TypeError):   # it wants parts that such a block does not have
            return False


def _rms_norm_probe(module: nn.Module, blank: nn.Module) -> bool:
    blank.weight = nn.Parameter(torch.rand(8) + 0.5)
    blank.variance_epsilon = 0.01
    x = torch.randn(3, 8)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01) * blank.weight
    return torch.allclose(blank(x), expected, atol=1e-6)


def _gated_mlp_probe(module: nn.Module, blank: nn.Module) -> bool:
    bias = module.gate_proj.bias is not None
    blank.gate_proj, blank.up_proj = nn.Linear(8, 16, bias=bias), nn.Linear(8, 16, bias=bias)
    blank.down_proj = nn.Linear(16, 8, bias=bias)
    blank.act_fn = module.act_fn
    x = torch.randn(3, 8)
    expected = blank.down_proj(F.silu(blank.gate_proj(x)) * blank.up_proj(x))
    return torch.allclose(blank(x), expected, atol=1e-6)
