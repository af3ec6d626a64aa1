"""Attention modules of the Llama and Qwen shape with their rotary embedding in one kernel, by module swap.

A library's module is recognised by its parts and by its numbers: it is replaced only if a small copy of its
class and ours agree. Parameters, names and checkpoints stay. The attention itself remains what
transformers' registry holds (attention.py). Training only: no cache, one flat sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lmms_engine.kernels.attention import AttentionNames, install
from lmms_engine.kernels.rotary import split_and_turn, turn_heads
from lmms_engine.kernels.structure import behaves
from lmms_engine.segments import Segments

SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj")   # linears of a decoder's attention
JOINT = ("qkv", "proj")                               # and of a tower's
NORMS = ("q_norm", "k_norm")                          # over each head; a family has both or neither


class DecoderAttention(nn.Module):
    """Projections, norms of the heads if there are any, rotary embedding, attention: [1, T, dim] to same."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        for name in SEPARATE:
            setattr(self, name, getattr(attention, name))
        for name in NORMS:
            setattr(self, name, getattr(attention, name, None) or nn.Identity())
        self.config = attention.config
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.sliding_window = getattr(attention, "sliding_window", None)
        self.train(attention.training)

    def forward(
        self,
        hidden_states: Tensor,                        # [1, T, dim]
        position_embeddings: tuple[Tensor, Tensor],   # cos, sin: [1, T, D], both halves alike
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        batch, tokens, _ = hidden_states.shape
        if past_key_values is not None or batch != 1:
            raise ValueError(f"one flat sequence without a cache, got {batch} and {type(past_key_values)}")
        q, k, v = (
            getattr(self, name)(hidden_states).view(tokens, -1, self.head_dim) for name in SEPARATE[:3]
        )
        q_THD, k_THD = turn_heads(self.q_norm(q), self.k_norm(k), *_halves(position_embeddings, batch=1))
        out, _ = AttentionInterface()[self.config._attn_implementation](
            self,
            *(x_THD[None].transpose(1, 2) for x_THD in (q_THD, k_THD, v)),
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(out.reshape(1, tokens, -1)), None


class EncoderAttention(nn.Module):
    """The same with one joint projection and the tower's own boundaries: [T, dim] to same."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        for name in JOINT:
            setattr(self, name, getattr(attention, name))
        self.config = attention.config
        self.num_heads, self.scaling = attention.num_heads, attention.scaling
        self.train(attention.training)

    def forward(
        self,
        hidden_states: Tensor,                        # [T, dim]
        cu_seqlens: Tensor,                           # int32 [pictures + 1]
        position_embeddings: tuple[Tensor, Tensor],   # cos, sin: [T, D], both halves alike
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        tokens = hidden_states.shape[0]
        if max_seqlen is None:   # reads from the device; the families' towers are told
            max_seqlen = int(cu_seqlens.diff().max())
        qkv = self.qkv(hidden_states).view(tokens, 3, self.num_heads, -1)
        parts = split_and_turn(qkv, *_halves(position_embeddings))
        out, _ = AttentionInterface()[self.config._attn_implementation](
            self,
            *(x_THD[None].transpose(1, 2) for x_THD in parts),
            None,
            scaling=self.scaling,
            cu_seq_lens_q=cu_seqlens,
            max_length_q=max_seqlen,
            **kwargs,
        )
        return self.proj(out.reshape(tokens, -1))


def _halves(tables: Iterable[Tensor], *, batch: int | None = None) -> tuple[Tensor, ...]:
    flat = tables if batch is None else (table[0] for table in tables)
    return tuple(table[:, : table.shape[-1] // 2] for table in flat)


# ---- swap --------------------------------------------------------------------------------------------


def fuse_rotary(model: nn.Module) -> int:
    """Swaps every attention module that ours computes the same as; returns how many there were.

    Where no decoder's attention is left as it was, rotary tables are kept in float32 as well.
    """
    known: dict[type, type | None] = {}
    swapped = 0
    for path, module in list(model.named_modules()):
        kind = type(module)
        if kind not in known:
            known[kind] = _equal_of(module)
        if known[kind] is not None:
            model.set_submodule(path, known[kind](module))
            swapped += 1
    decoders = [module for module in model.modules() if hasattr(module, SEPARATE[0])]
    if swapped and all(isinstance(module, DecoderAttention) for module in decoders):
        _keep_tables_exact(model)
    return swapped


def _keep_tables_exact(model: nn.Module) -> None:
    """Makes the modules that compute rotary tables return float32: it is that of their first input."""
    for module in model.modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            module.register_forward_pre_hook(_ask_for_float32)


def _ask_for_float32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    like, *rest = args
    return like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32)), *rest


def _equal_of(module: nn.Module) -> type | None:
    """Our class for a library's attention module, or None."""
    for ours, names, probe in (
        (DecoderAttention, SEPARATE, _decoder_probe), (EncoderAttention, JOINT, _encoder_probe)
    ):
        parts = [getattr(module, name, None) for name in names]
        if all(type(part) is nn.Linear for part in parts) and not isinstance(module, ours):
            own = {*names, *(NORMS if ours is DecoderAttention else ())}
            children = {name for name, _ in module.named_children()}
            if children <= own and hasattr(module, "config") and behaves(module, probe):
                return ours
    return None


TOKENS, HEADS, KV_HEADS, WIDTH, DIM = 5, 4, 2, 8, 12   # of the probes; a head is WIDTH wide


def _blank_config(names: AttentionNames, role: str) -> Any:
    """What an attention module reads of its config while it runs."""
    return type("Config", (), {"_attn_implementation": getattr(names, role)})()


def _copy_settings(module: nn.Module, blank: nn.Module, role: str) -> None:
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    vars(blank).update(settings | {"training": False, "head_dim": WIDTH, "scaling": 0.3, "num_heads": HEADS})
    if "sliding_window" in settings:
        blank.sliding_window = 3
    blank.config = _blank_config(install("sdpa"), role)


def _tables() -> tuple[Tensor, Tensor]:
    angles = torch.randn(TOKENS, WIDTH // 2).repeat(1, 2)
    return angles.cos(), angles.sin()


def _decoder_probe(module: nn.Module, blank: nn.Module) -> bool:
    _copy_settings(module, blank, "decoder")
    for name, heads in zip(SEPARATE, (HEADS, KV_HEADS, KV_HEADS), strict=False):
        setattr(blank, name, nn.Linear(DIM, heads * WIDTH, bias=getattr(module, name).bias is not None))
    blank.o_proj = nn.Linear(HEADS * WIDTH, DIM, bias=module.o_proj.bias is not None)
    for name in NORMS:
        if hasattr(module, name):
            setattr(blank, name, nn.LayerNorm(WIDTH))   # any norm of a head, as long as it is applied
            nn.init.normal_(getattr(blank, name).weight)
    given = {
        "hidden_states": torch.randn(1, TOKENS, DIM),
        "position_embeddings": tuple(table[None] for table in _tables()),
        "attention_mask": None,
        "segments": Segments.from_lengths([3, 2]),
    }
    return torch.allclose(blank(**given)[0], DecoderAttention(blank)(**given)[0], atol=1e-5)


def _encoder_probe(module: nn.Module, blank: nn.Module) -> bool:
    _copy_settings(module, blank, "encoder")
    blank.qkv = nn.Linear(DIM, 3 * HEADS * WIDTH, bias=module.qkv.bias is not None)
    blank.proj = nn.Linear(HEADS * WIDTH, DIM, bias=module.proj.bias is not None)
    given = {
        "hidden_states": torch.randn(TOKENS, DIM),
        "position_embeddings": _tables(),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "max_seqlen": 3,
    }
    return torch.allclose(blank(**given), EncoderAttention(blank)(**given), atol=1e-5)
