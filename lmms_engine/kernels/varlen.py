"""Variable-length attention on torch's own flash kernel, with grouped heads.

torch 2.11's `torch.nn.attention.varlen` takes no grouped heads, but the operator under it does. It is wrapped
in a custom operator so that torch.compile sees one opaque call. CUDA only; bf16 or fp16; the head dimension
must be a multiple of 8. No dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("lmms_engine::varlen_attention", mutates_args=())
def varlen_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attention inside each segment; returns the output [T, H, D] and the log-sum-exp [H, T].

    window: how many keys a query sees, itself included (causal only); 0 is no limit.
    """
    out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
        q_THD, k_THD, v_THD, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, causal, False,
        scale=scale, **_window(window),
    )
    return out, lse


@varlen_attention.register_fake
def _(q_THD, k_THD, v_THD, cu_seqlens, max_len, causal, scale, window):
    lse = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0]), dtype=torch.float32)
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format), lse


@torch.library.custom_op("lmms_engine::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `varlen_attention` for queries, keys and values."""
    # Without dropout the kernel reads neither of these two, but its signature wants them.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
    unused = torch.empty(0, device=q_THD.device)
    return torch.ops.aten._flash_attention_backward(
        grad_THD.contiguous(), q_THD, k_THD, v_THD, out_THD, lse_HT, cu_seqlens, cu_seqlens, max_len, max_len,
        0.0, causal, rng_state, unused, scale=scale, **_window(window),
    )


@varlen_attention_backward.register_fake
def _(grad_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, cu_seqlens, max_len, causal, scale, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_THD, v_THD))


def _window(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _setup_context(ctx, inputs, output) -> None:
    q_THD, k_THD, v_THD, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(q_THD, k_THD, v_THD, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, _grad_lse):
    if grad_out is None:
        return (None,) * 8
    grads = varlen_attention_backward(grad_out, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None, None, None, None


varlen_attention.register_autograd(_backward, setup_context=_setup_context)
