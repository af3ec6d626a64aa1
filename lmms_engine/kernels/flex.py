"""Attention by torch's flex kernels over a block mask: any segments, and spans that see each other both ways.

GPU: compiled at first use, which takes half a minute. CPU: eager, forward only, with [T, T] scores: tests.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmms_engine.segments import Segments

GRID = 128   # side of a mask block


def flex_attend(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention inside each segment, [T, H, D] to [T, H, D]; keys may have fewer heads."""
    tokens = q_THD.shape[0]
    padded = -(-tokens // GRID) * GRID   # whole blocks
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, padded - tokens)).transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD)
    )
    mask = _block_mask(segments, tokens, padded, window)
    flex_attention = _flex_functions(q.is_cuda)[0]
    with _many_variants():
        out_1HTD = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out_1HTD[0].transpose(0, 1)[:tokens]


@functools.cache
def _flex_functions(compiled: bool) -> tuple[Callable, Callable]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:   # eager flex builds [T, T] scores: for tests on the CPU
        return flex_attention, create_block_mask
    # fullgraph: beyond the limit of variants torch raises, instead of turning to [T, T] scores unasked
    return tuple(torch.compile(f, dynamic=True, fullgraph=True) for f in (flex_attention, create_block_mask))


def _many_variants() -> AbstractContextManager[None]:
    """Decoder and tower, with and without gradients: torch's limit of 8 compilations is not far from that."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(recompile_limit=64)


class _Recent:
    """The last few block masks: a layer needs the mask of the layer before, and building one is dear."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: list[tuple[tuple[Any, ...], Any]] = []

    def get(self, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        for known, value in self._entries:
            if all(a is b if isinstance(a, Tensor) else a == b for a, b in zip(known, key, strict=True)):
                return value
        value = build()
        self._entries = [*self._entries[1 - self._size:], (key, value)]
        return value


_MASKS = _Recent(size=4)   # holds its keys, so an identity is never reused while it counts


def _block_mask(segments: Segments, tokens: int, padded: int, window: int | None):
    def build():
        low, high, group = _visible_range(segments, tokens, padded, window)

        def in_range(batch, head, query, key):
            return (key >= low[query]) & (key <= high[query])

        def in_range_or_span(batch, head, query, key):
            return in_range(batch, head, query, key) | (group[query] == group[key])

        visible = in_range if segments.spans is None else in_range_or_span
        create_block_mask = _flex_functions(low.is_cuda)[1]
        with _many_variants():
            return create_block_mask(visible, None, None, padded, padded, device=low.device)

    return _MASKS.get((segments.cu_seqlens, segments.spans, segments.causal, padded, window), build)


def _visible_range(
    segments: Segments, tokens: int, padded: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """First and last key of every query, and a group that is equal exactly within one span of one segment.

    All in tensors: a mask function with other Python numbers in it would be compiled again. Padding sees
    itself alone.
    """
    edges = segments.cu_seqlens.long()
    position = torch.arange(padded, device=edges.device)
    ids = torch.arange(segments.num_segments, device=edges.device)
    segment = ids.repeat_interleave(edges.diff(), output_size=tokens)
    low, high = position.clone(), position.clone()
    low[:tokens] = edges[segment]
    if not segments.causal:
        high[:tokens] = edges[segment + 1] - 1
    elif window:
        low = low.maximum(position - (window - 1))
    group = -1 - position
    if segments.spans is not None:
        spans = segments.spans
        group[:tokens] = torch.where(spans >= 0, (segment << 32) + spans, group[:tokens])
    return low, high, group
