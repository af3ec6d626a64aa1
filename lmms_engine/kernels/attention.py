"""Attention over flat sequences: one function, five backends, and the doors by which library models reach it.

`attend` works on flat tensors and `Segments`. `install` registers it with transformers under two names, one
for decoders (boundaries from our `segments` keyword) and one for encoders (boundaries the tower computes);
`use` points a model's sub-configs at them. No library function is replaced.

Refused: attention dropout, and a decoder that is called without segments.

Legend for this package: T tokens, H heads, D head dimension, B batch, L segment length, N segments,
V vocabulary. A suffix names a tensor's dimensions, e.g. `q_THD`. Keys and values may have fewer heads.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lmms_engine.errors import UserError
from lmms_engine.kernels.flex import flex_attend
from lmms_engine.kernels.varlen import varlen_attention
from lmms_engine.registry import Registry
from lmms_engine.segments import Segments

log = logging.getLogger(__name__)

ALIASES = {"flash_attention_2": "flash_attn"}

# Head dimensions that flash-attn-4 4.0.0b36 was measured right for on an H200; at 72 and 80 the gradient of
# the queries was not (benchmarks/README.md).
FLASH_ATTN_4_DIMS = (64, 128)


class Exchange(Protocol):
    """Between ranks that share a sequence: from a part of the tokens to a part of the heads, and back."""

    name: str   # unique in this process

    def to_heads(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All heads of this rank's tokens to this rank's heads of all tokens."""
        ...

    def to_tokens(self, out_THD: Tensor) -> Tensor:
        """This rank's heads of all tokens to all heads of this rank's tokens."""
        ...


class Backend(Protocol):
    """One way to compute attention. `window`: how many keys a causal query sees, itself included."""

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor: ...


ATTENTION: Registry[Backend] = Registry("attention backend")


def attend(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    segments: Segments,
    *,
    scale: float,
    backend: str,
    window: int | None = None,
) -> Tensor:
    """Attention inside each segment of a flat sequence: [T, H, D] to [T, H, D].

    The flash kernels know no spans: where `segments.spans` is set they hand over to `flex`.
    """
    if segments.spans is not None and backend in ("flash_attn", "flash_attn_4", "varlen"):
        backend = "flex"
    return ATTENTION.get(backend)(q_THD, k_THD, v_THD, segments, scale=scale, window=window)


def resolve(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """The backend for `attn_implementation`, logged with the reason; what cannot run here raises UserError.

    dtype: what attention computes in; the flash kernels take bf16 and fp16 only.
    """
    asked = ALIASES.get(name, name)
    backend, reason = _choose(device, dtype) if asked == "auto" else (asked, "as asked")
    ATTENTION.get(backend)   # an unknown name raises with the legal ones
    problem = unusable(backend, device, dtype)
    if problem:
        raise UserError(
            f"model_config.attn_implementation={name}: {problem} "
            f"(legal here: auto, {', '.join(b for b in ATTENTION if not unusable(b, device, dtype))})"
        )
    log.info("attention: %s on %s (%s)", backend, device.type, reason)
    return backend


def _choose(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    if device.type != "cuda":
        return "sdpa", "the one backend with a backward on this device"
    if dtype not in (torch.bfloat16, torch.float16):
        return "sdpa", f"flash kernels take no {dtype}"
    if not unusable("flash_attn", device, dtype):
        return "flash_attn", "the package is installed"
    return "varlen", "torch's own kernel; the flash_attn package is not installed"


def unusable(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why a backend cannot train on this device, or an empty string."""
    if backend == "sdpa":
        return ""
    if device.type != "cuda":
        return f"it needs a GPU, and this run is on {device.type}"
    if backend == "flex":
        return ""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, and this run computes in {dtype}"
    if backend == "flash_attn" and importlib.util.find_spec("flash_attn_2_cuda") is None:
        return "the flash_attn package is not installed"
    return _unusable_flash_attn_4(device) if backend == "flash_attn_4" else ""


def _unusable_flash_attn_4(device: torch.device) -> str:
    try:
        if importlib.util.find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
    except ImportError as error:   # there is no flash_attn at all, or what lies beside it does not load
        return f"the package flash-attn-4 is not installed ({error})"
    if torch.cuda.get_device_capability(device)[0] < 9:
        return f"it needs a Hopper GPU or a later one, and this is a {torch.cuda.get_device_name(device)}"
    return ""


# ---- backends ----------------------------------------------------------------------------------------


@ATTENTION.register("flash_attn")
def _flash_attn(q_THD, k_THD, v_THD, segments, *, scale, window):
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q_THD, k_THD, v_THD,
        segments.cu_seqlens, segments.cu_seqlens, segments.max_len, segments.max_len,
        softmax_scale=scale,
        causal=segments.causal,
        window_size=(window - 1, 0) if window else (-1, -1),
    )


@ATTENTION.register("flash_attn_4")
def _flash_attn_4(q_THD, k_THD, v_THD, segments, *, scale, window):
    """Compiles a kernel for each kind of shape at first use. Other dimensions and windows go to `varlen`."""
    if window or q_THD.shape[-1] not in FLASH_ATTN_4_DIMS:
        return _varlen(q_THD, k_THD, v_THD, segments, scale=scale, window=window)
    from flash_attn.cute import flash_attn_varlen_func

    out_THD, _ = flash_attn_varlen_func(
        q_THD, k_THD, v_THD,
        cu_seqlens_q=segments.cu_seqlens, cu_seqlens_k=segments.cu_seqlens,
        max_seqlen_q=segments.max_len, max_seqlen_k=segments.max_len,
        softmax_scale=scale,
        causal=segments.causal,
    )  # fmt: skip
    return out_THD


@ATTENTION.register("varlen")
def _varlen(q_THD, k_THD, v_THD, segments, *, scale, window):
    if q_THD.shape[-1] % 8:
        raise UserError(
            f"attention backend varlen: head dimension {q_THD.shape[-1]} is not a multiple of 8; "
            "set model_config.attn_implementation to flex or sdpa"
        )
    out_THD, _ = varlen_attention(
        q_THD, k_THD, v_THD, segments.cu_seqlens, segments.max_len, segments.causal, scale, window or 0
    )
    return out_THD


@ATTENTION.register("sdpa")
def _sdpa(q_THD, k_THD, v_THD, segments, *, scale, window):
    """Dense attention per segment, segments of one length in one call. Reads the boundaries on the host."""
    groups = _by_length(segments.cu_seqlens.tolist())
    outs, order = [], []
    for length, starts in groups.items():
        index_NL = torch.tensor(starts)[:, None] + torch.arange(length)
        index = index_NL.flatten().to(q_THD.device)
        q, k, v = (
            x[index].view(len(starts), length, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_THD, v_THD)
        )
        mask = _dense_mask(segments, index.view(-1, length), window)
        out_NHLD = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=mask,
            is_causal=segments.causal and mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
        order.append(index)
    back = torch.cat(order).argsort()
    return torch.cat(outs)[back]


def _by_length(edges: list[int]) -> dict[int, list[int]]:
    """Segment length -> where segments of that length start."""
    groups: dict[int, list[int]] = {}
    for start, end in itertools.pairwise(edges):
        if end > start:
            groups.setdefault(end - start, []).append(start)
    return groups


def _dense_mask(segments: Segments, index_NL: Tensor, window: int | None) -> Tensor | None:
    """Who sees whom inside segments of one length, [N, 1, L, L]; None where plain causal or full will do."""
    if segments.spans is None and not (window and segments.causal):
        return None
    length = index_NL.shape[1]
    rows = torch.arange(length, device=index_NL.device)
    spans_NL = None if segments.spans is None else segments.spans[index_NL]
    seen = torch.ones(length, length, dtype=torch.bool, device=index_NL.device)
    if segments.causal:
        ahead = rows[:, None] - rows[None, :]
        seen = (ahead >= 0) & (ahead < window) if window else ahead >= 0
    if spans_NL is None:
        return seen[None, None]
    same_span = (spans_NL[:, :, None] == spans_NL[:, None, :]) & (spans_NL >= 0)[:, :, None]
    return (seen | same_span)[:, None]


ATTENTION.register("flex")(flex_attend)


# ---- doors for transformers models -------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionNames:
    """Names in transformers' attention registry, by role."""

    decoder: str
    encoder: str


LIBRARY = AttentionNames(decoder="sdpa", encoder="sdpa")   # transformers' own code: the padded reference path


def install(backend: str, exchange: Exchange | None = None) -> AttentionNames:
    """Registers our attention with transformers under names of its own for `backend`; safe to repeat.

    exchange: decoders get a part of the tokens, while `segments` speak of the whole sequence; encoders never.

    A decoder's name must not contain "flash" (transformers would look for a kernel package), an encoder's
    must (else the tower loops over pictures in Python and hides its boundaries).
    """
    ATTENTION.get(backend)
    suffix = backend.replace("flash_attn", "fa")
    shared = "" if exchange is None else f"_{exchange.name}"
    names = AttentionNames(
        decoder=f"engine_decoder_{suffix}{shared}", encoder=f"engine_encoder_flash_{suffix}"
    )
    decoder = functools.partial(_decoder_attention, backend=backend, exchange=exchange)
    AttentionInterface.register(names.decoder, decoder)
    AttentionInterface.register(names.encoder, functools.partial(_encoder_attention, backend=backend))
    return names


def use(model: nn.Module, roles: dict[str, str], names: AttentionNames) -> None:
    """Points the model's sub-configs at registered attention. roles: sub-config -> decoder | encoder."""
    for sub_config in roles:
        config = getattr(model.config, sub_config) if sub_config else model.config
        dropout = getattr(config, "attention_dropout", 0.0) or 0.0
        if dropout and names is not LIBRARY:
            name = sub_config or "config"
            raise UserError(f"{name}.attention_dropout={dropout}: not supported (legal: 0.0)")
    model.set_attn_implementation({sub_config: getattr(names, role) for sub_config, role in roles.items()})
    for sub_config, role in roles.items():
        config = getattr(model.config, sub_config) if sub_config else model.config
        assert config._attn_implementation == getattr(names, role), f"{sub_config} kept its attention"


def _decoder_attention(
    module: nn.Module,
    query: Tensor,   # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    backend: str,
    exchange: Exchange | None,
    scaling: float,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if segments is None:
        raise RuntimeError(f"{type(module).__name__}: called without `segments`; who sees whom is unknown")
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    if exchange is not None:
        q_THD, k_THD, v_THD = exchange.to_heads(q_THD, k_THD, v_THD)
    out_THD = attend(
        q_THD, k_THD, v_THD, segments, scale=scaling, backend=backend, window=sliding_window
    )
    if exchange is not None:
        out_THD = exchange.to_tokens(out_THD)
    return out_THD[None], None


def _encoder_attention(
    module: nn.Module,
    query: Tensor,   # [B, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    backend: str,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    segments: Segments | None = None,   # the text's: they come along and mean nothing here
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if cu_seq_lens_q is None:   # fixed-size tiles: dense batches, every token sees its tile
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
        return out.transpose(1, 2), None
    boundaries = Segments(cu_seqlens=cu_seq_lens_q, max_len=max_length_q, causal=False)
    out_THD = attend(
        *(x[0].transpose(0, 1) for x in (query, key, value)), boundaries, scale=scaling, backend=backend
    )
    return out_THD[None], None
