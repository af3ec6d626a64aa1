"""What is swapped, shared and refused. The kernels themselves run on a GPU only: tests/gpu."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from lmms_engine.errors import UserError
from lmms_engine.kernels.liger import LIGER, FusedRMSNorm, apply_swaps, swap
from lmms_engine.kernels.widen import GatedMLP
from lmms_engine.models.spec import MODELS
from tests.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_swap_shares_parameters_and_names(family: str) -> None:
    spec = MODELS.get(family)
    model, _ = spec.tiny()
    before = dict(model.named_parameters())
    counts = swap(model, spec)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert counts["rms_norm"] == sum(isinstance(m, FusedRMSNorm) for m in model.modules()) > 0
    assert counts["swiglu"] == sum(isinstance(m, GatedMLP) for m in model.modules()) > 0


def test_awkward_widths_are_widened_on_the_way() -> None:
    spec = MODELS.get("qwen2_5_vl")
    model, _ = spec.tiny()
    swap(model, spec)
    assert {b.mlp.extra for b in model.model.visual.blocks} == {28}
    assert {layer.mlp.extra for layer in model.model.language_model.layers} == {0}


def test_a_promise_that_matches_nothing_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UserError, match="no 'rms_norm' in toy"):
        apply_swaps(model, ("rms_norm",), "toy")


def test_unknown_swap_is_an_error() -> None:
    with pytest.raises(UserError, match=r"unknown liger swap 'rmsnorm'.*did you mean 'rms_norm'"):
        apply_swaps(nn.Linear(1, 1), ("rmsnorm",), "toy")


class Config:
    model_type = "nobody_knows_it"


class Foreign(nn.Module):
    config = Config()


def test_a_users_function_comes_first() -> None:
    LIGER.register("test_users_own")(lambda model: {"mine": 3})

    class Users(Foreign):
        config = type("C", (), {"model_type": "test_users_own"})()

    assert swap(Users(), MODELS.get("qwen3_vl")) == {"mine": 3}


def test_unknown_everywhere_is_an_error() -> None:
    with pytest.raises(UserError, match="nothing to fuse in model type 'nobody_knows_it'"):
        swap(Foreign(), None)


LIGERS_OWN = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from lmms_engine.kernels.liger import swap
small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(**small))
forward = LlamaForCausalLM.forward
print(swap(model, None), type(model.model.layers[0].mlp).__name__, LlamaForCausalLM.forward is forward)
class Outer(nn.Module):
    config = type("C", (), {"model_type": "nobody_knows_it"})()
    def __init__(self):
        super().__init__()
        self.language_model = LlamaForCausalLM(LlamaConfig(**small))
print(swap(Outer(), None))
"""


def test_ligers_own_entries_come_last() -> None:
    """In a process of its own, as Liger changes transformers' classes. Its loss fusion stays off."""
    run = subprocess.run(
        [sys.executable, "-c", LIGERS_OWN], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines == ["{'llama': 1} LlamaMLP True", "{'llama': 1}"]


def test_meta_models_can_be_swapped() -> None:
    spec = MODELS.get("qwen2_5_vl")
    config = spec.tiny()[0].config
    with torch.device("meta"):
        model = spec.model_class(config)
    assert swap(model, spec) == {"rms_norm": 14, "swiglu": 6}
