"""The family as data: its layout, its numbers against the library's, what it costs, what it exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lmms_engine.config import ModelSection
from lmms_engine.errors import UserError
from lmms_engine.kernels.liger import swap
from lmms_engine.models import hf
from lmms_engine.models.spec import MODELS, for_type
from tests.tiny import CPU, assert_same_gradients, build, logits, loss_and_gradients, pack

FAMILY = "qwen3_moe"
SPEC = MODELS.get(FAMILY)


def test_layout_and_special_parts() -> None:
    model, samples = SPEC.tiny()
    names = {name for name, _ in model.named_modules()}
    layout, config = SPEC.layout, model.config
    assert {layout.body, layout.decoder, layout.head, layout.norm, layout.embed} <= names
    assert model.get_submodule(layout.head) is model.get_output_embeddings()
    assert model.get_submodule(layout.embed) is model.get_input_embeddings()
    assert for_type("qwen3_moe") is SPEC
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.head_dim * config.num_attention_heads != config.hidden_size   # as in the real model
    assert 1 < config.num_experts_per_tok < config.num_experts
    assert {sample.position_ids.ndim for sample in samples} == {1}
    counts = swap(model, SPEC)
    assert counts == {"rms_norm": 3 * 4 + 1}


def test_packed_equals_separate_equals_padded() -> None:
    """The padded path runs the library's attention, mask and experts."""
    objective, samples = build(FAMILY)
    packed, gradients = loss_and_gradients(objective, [pack(samples)])
    separate, apart = loss_and_gradients(objective, [pack([sample]) for sample in samples])
    padded, unfolded = loss_and_gradients(build(FAMILY, rmpad=False)[0], [pack(samples)])
    assert packed == pytest.approx(separate, rel=1e-6)
    assert packed == pytest.approx(padded, rel=1e-6)
    assert_same_gradients(gradients, apart)
    assert_same_gradients(gradients, unfolded)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_logits_equal_the_librarys() -> None:
    plain, samples = SPEC.tiny()
    plain.eval()
    ours = logits(build(FAMILY)[0], pack(samples)).split([len(sample) for sample in samples])
    for sample, packed in zip(samples, ours, strict=True):
        with torch.no_grad():
            theirs = plain(input_ids=sample.input_ids[None]).logits[0]
        torch.testing.assert_close(packed, theirs, atol=1e-5, rtol=0)


def test_no_row_sees_another() -> None:
    objective, (first, *rest) = build(FAMILY)
    changed = replace(first, input_ids=first.input_ids.flip(0))
    before, after = (logits(objective, pack([row, *rest])) for row in (first, changed))
    assert (before[: len(first)] - after[: len(first)]).abs().max() > 0.01
    torch.testing.assert_close(before[len(first) :], after[len(first) :], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "frozen",
    [(), ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts"), ("model.embed", "model.layers.0")],
    ids=["nothing", "experts", "first layer"],
)
def test_flops_equal_torchs_counter(frozen: tuple[str, ...]) -> None:
    objective, samples = build(FAMILY)
    for name, parameter in objective.model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or ("-",)))
    batch, config = pack(samples), objective.model.config
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(batch.to(CPU))["ce"].backward()
    tokens = batch.num_tokens
    # Left out: rotary tables, and the weighted sum over a token's experts with its two gradients.
    rotary = 2 * (config.head_dim // 2) * tokens
    each = 2 * config.num_experts_per_tok * config.hidden_size * tokens
    sums = 0
    differentiable = not frozen or "model.embed" not in frozen
    for i in range(config.num_hidden_layers):
        whole = f"model.layers.{i}" not in frozen
        differentiable = differentiable or whole
        sums += each * (3 if differentiable else 1)
    square = replace(batch, segments=replace(batch.segments, causal=False))
    names = frozenset(n for n, p in objective.model.named_parameters() if not p.requires_grad)
    assert SPEC.flops(config, square, names).strict == counter.get_total_flops() - rotary - sums


def test_experts_that_are_not_visited_cost_nothing() -> None:
    model, samples = SPEC.tiny()
    batch = pack(samples)
    few = SPEC.flops(model.config, batch, frozenset())
    model.config.num_experts = 16
    router = 8 * model.config.hidden_size * batch.num_tokens * model.config.num_hidden_layers
    assert SPEC.flops(model.config, batch, frozenset()).strict == few.strict + 6 * router
    model.config.mlp_only_layers = [1]
    dense = SPEC.flops(model.config, batch, frozenset()).strict
    assert dense != SPEC.flops(model.config, batch, frozenset({"model.layers.1.mlp.up_proj.weight"})).strict


def test_a_config_written_out_by_hand_may_say_head_dim() -> None:
    config = {"vocab_size": 64, "hidden_size": 32, "head_dim": 16, "num_attention_heads": 4}
    made = hf.read_config(ModelSection(load_from_config={"model_type": FAMILY, "config": config}))
    assert made.head_dim == 16
    with pytest.raises(UserError, match=r"config.head_dims: Qwen3MoeConfig has no such key; did you mean"):
        hf.read_config(ModelSection(load_from_config={"model_type": FAMILY, "config": {"head_dims": 16}}))


def test_export_is_the_librarys_layout_and_comes_back(tmp_path: Path) -> None:
    """One matrix for each expert on disk, as the published checkpoints have it."""
    model, samples = SPEC.tiny()
    weights = list(hf.weight_stream(SPEC, model.config, None, 3))
    hf.export(SPEC, model.config, iter(weights), tmp_path / "out", dtype=torch.float32)
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        keys = set(file.keys())
    assert "model.layers.1.mlp.experts.5.down_proj.weight" in keys
    assert not any(key.endswith(("experts.gate_up_proj", "experts.down_proj")) for key in keys)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = dict(hf.weight_stream(SPEC, model.config, tmp_path / "out", 0))
    assert all(torch.equal(again[name], tensor) for name, tensor in weights)
    model.load_state_dict(dict(weights))
    ids = samples[0].input_ids[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, model(input_ids=ids).logits)
