"""The Triton kernel behind rotary.py: one program turns all heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr,
    x_token, x_head, out_token, out_head, cos_token, sin_token,   # strides
    heads, half,
    BACK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads) & (pair < half)
    cos = tl.load(cos_ptr + token * cos_token + pair, mask=pair < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_token + pair, mask=pair < half, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    x_ptr += token * x_token + head * x_head + pair
    first = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + half, mask=inside, other=0.0).to(tl.float32)
    out_ptr += token * out_token + head * out_head + pair
    tl.store(out_ptr, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + half, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


def launch(x_THD: Tensor, out_THD: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> None:
    """Writes `x` turned to `out`, both [T, H, D] with a last stride of 1; tables [T, D/2] likewise."""
    assert x_THD.stride(-1) == out_THD.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    tokens, heads, dim = x_THD.shape
    if not tokens:
        return
    _turn_kernel[(tokens,)](
        x_THD, out_THD, cos, sin,
        x_THD.stride(0), x_THD.stride(1), out_THD.stride(0), out_THD.stride(1), cos.stride(0), sin.stride(0),
        heads, dim // 2,
        BACK=back, BLOCK_H=triton.next_power_of_2(heads), BLOCK_D=triton.next_power_of_2(dim // 2),
    )  # fmt: skip
