"""Rotary position embedding of whole heads in one pass, out of place, in float32 whatever the heads are in.

A head of dimension D is D/2 pairs (i, i + D/2), each turned by its token's angle i (RoFormer,
arXiv:2104.09864, in the halves' order of the Llama and Qwen families). Turning is orthogonal: its gradient
turns back. Written with tensor operations it takes some ten passes over queries and keys; here each is read
and written once.

On a GPU a Triton kernel does it, elsewhere torch. Tables are [T, D/2]; legend in attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn_heads(q_THD: Tensor, k_THD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, H, D] turned by the angles of their tokens; tables [T, D/2] without gradient."""
    return _TurnHeads.apply(q_THD, k_THD, cos, sin)


def split_and_turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A joint projection [T, 3, H, D] as turned queries, turned keys and values, each [T, H, D].

    Values are a view of `qkv`. The gradient of `qkv` is written in place, part by part.
    """
    return _SplitAndTurn.apply(qkv, cos, sin)


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_THD, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(_turned(x, cos, sin, back=False) for x in (q_THD, k_THD))

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors   # once: recomputation unpacks them no second time
        return *(_turned(grad, cos, sin, back=True) for grad in grads), None, None


class _SplitAndTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin):
        ctx.save_for_backward(cos, sin)
        q_THD, k_THD, v_THD = qkv.unbind(1)
        return _turned(q_THD, cos, sin, back=False), _turned(k_THD, cos, sin, back=False), v_THD

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        cos, sin = ctx.saved_tensors
        grad = grad_v.new_empty(grad_v.shape[0], 3, *grad_v.shape[1:])
        _turn(grad_q, grad[:, 0], cos, sin, back=True)
        _turn(grad_k, grad[:, 1], cos, sin, back=True)
        grad[:, 2] = grad_v
        return grad, None, None


def _turned(x_THD: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    out_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    _turn(x_THD, out_THD, cos, sin, back=back)
    return out_THD


def _turn(x_THD: Tensor, out_THD: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> None:
    """Writes x turned, or turned back, to `out`; any strides, as long as a head lies in one piece."""
    if x_THD.is_cuda:
        from lmms_engine.kernels.rotary_kernel import launch

        launch(x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous(), out_THD, cos, sin, back=back)
        return
    exact = torch.promote_types(x_THD.dtype, torch.float32)
    first, second = x_THD.to(exact).chunk(2, dim=-1)
    cos, sin = cos[:, None].to(exact), sin[:, None].to(exact) * (-1 if back else 1)
    half = first.shape[-1]
    out_THD[..., :half] = first * cos - second * sin
    out_THD[..., half:] = second * cos + first * sin
