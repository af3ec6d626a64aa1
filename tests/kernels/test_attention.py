"""Backends against a dense reference, the choice of one, and the doors into library models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from lmms_engine.errors import UserError
from lmms_engine.kernels import attention
from lmms_engine.kernels.attention import ATTENTION, attend, install, resolve, use
from lmms_engine.kernels.varlen import varlen_attention
from lmms_engine.segments import Segments
from tests.tiny import CPU, FAMILIES, build

GPU = torch.device("cuda")
LENGTHS = [5, 9, 1, 9, 5, 12]


def tensors(heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(LENGTHS), h, dim, generator=rng) for h in (heads, kv_heads, kv_heads)]


def dense(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    """Softmax over the whole sequence with a [T, T] mask, written out."""
    lengths = torch.tensor(segments.lengths())
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    row, column = torch.arange(len(segment))[:, None], torch.arange(len(segment))[None]
    seen = torch.ones(len(segment), len(segment), dtype=torch.bool)
    if segments.causal:
        seen = (row >= column) & (row - column < (window or len(segment)))
    if segments.spans is not None:
        spans = segments.spans
        seen = seen | ((spans[:, None] == spans[None]) & (spans >= 0)[:, None])
    seen = seen & (segment[:, None] == segment[None])
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(repeat, 1)) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(repeat, 1))


def cases() -> list[tuple[str, Segments, int | None]]:
    causal = Segments.from_lengths(LENGTHS)
    spans = torch.full((sum(LENGTHS),), -1)
    spans[6:10], spans[33:38] = 0, 1
    spans[15:18] = 0   # the same id in another segment: still apart
    return [
        ("causal", causal, None),
        ("full", replace(causal, causal=False), None),
        ("window", causal, 3),
        ("spans", replace(causal, spans=spans), None),
        ("one segment", Segments.from_lengths([sum(LENGTHS)]), None),
    ]


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize(("name", "segments", "window"), cases(), ids=[case[0] for case in cases()])
def test_backend_equals_dense(backend: str, name: str, segments: Segments, window: int | None) -> None:
    q, k, v = tensors()
    expected = dense(q, k, v, segments, 0.3, window)
    ours = attend(q, k, v, segments, scale=0.3, backend=backend, window=window)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("name", "segments", "window"), cases(), ids=[case[0] for case in cases()])
def test_sdpa_gradients_equal_dense(name: str, segments: Segments, window: int | None) -> None:
    ours, reference = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    weight = torch.randn(sum(LENGTHS), 4, 8)
    (attend(*ours, segments, scale=0.3, backend="sdpa", window=window) * weight).sum().backward()
    (dense(*reference, segments, 0.3, window) * weight).sum().backward()
    for x, y in zip(ours, reference, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=5e-6, rtol=0)


def test_block_masks_are_kept_apart() -> None:
    """Two packs of one size, one after the other: the second must not get the first one's mask."""
    q, k, v = tensors()
    for lengths in (LENGTHS, LENGTHS[::-1], [20, 21]):
        segments = Segments.from_lengths(lengths)
        ours = attend(q, k, v, segments, scale=0.3, backend="flex")
        torch.testing.assert_close(ours, dense(q, k, v, segments, 0.3, None), atol=2e-6, rtol=0)


def test_flash_backends_hand_spans_to_flex() -> None:
    _, segments, _ = cases()[3]
    q, k, v = tensors()
    ours = attend(q, k, v, segments, scale=0.3, backend="varlen")
    torch.testing.assert_close(ours, dense(q, k, v, segments, 0.3, None), atol=2e-6, rtol=0)


def test_auto_takes_what_can_train_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert resolve("auto", CPU) == "sdpa"
    assert "attention: sdpa on cpu" in caplog.text
    assert resolve("auto", GPU, torch.float32) == "sdpa"
    assert resolve("auto", GPU) in ("flash_attn", "varlen")
    assert resolve("flex", GPU, torch.float32) == "flex"


@pytest.mark.parametrize("name", ["flash_attn", "flash_attention_2", "flash_attn_4", "varlen", "flex"])
def test_what_cannot_run_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"implementation={name}: it needs a GPU.*legal here: auto, sdpa"):
        resolve(name, CPU)


def test_flash_kernels_need_half_precision() -> None:
    with pytest.raises(UserError, match=r"needs bf16 or fp16, and this run computes in torch\.float32"):
        resolve("varlen", GPU, torch.float32)


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'varlen'"):
        resolve("varlem", CPU)


def test_names_steer_transformers() -> None:
    for backend in ATTENTION:
        names = install(backend)
        assert names == install(backend)
        assert "flash" not in names.decoder
        assert "flash" in names.encoder
        assert {names.decoder, names.encoder} <= set(AttentionInterface().valid_keys())


@pytest.mark.parametrize("family", FAMILIES)
def test_use_reaches_every_attention(family: str) -> None:
    model = build(family)[0].model
    names = {m.config._attn_implementation for m in model.modules() if type(m).__name__.endswith("Attention")}
    assert names == {"engine_decoder_sdpa", "engine_encoder_flash_sdpa"}


def test_decoder_without_segments_is_refused() -> None:
    model = build("qwen3_vl")[0].model
    with pytest.raises(RuntimeError, match="without `segments`"):
        model.model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)


def test_attention_dropout_is_refused() -> None:
    model = build("qwen3_vl")[0].model
    model.config.text_config.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"text_config.attention_dropout=0.1: not supported"):
        use(model, {"text_config": "decoder"}, install("sdpa"))
    use(model, {"text_config": "decoder"}, attention.LIBRARY)


def test_tower_without_boundaries_is_dense() -> None:
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))   # tiles: [B, H, T, D]
    out, _ = attention._encoder_attention(None, q, k, v, None, backend="sdpa", scaling=0.3)
    expected = ((q @ k.transpose(-1, -2)) * 0.3).softmax(-1) @ v
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-6, rtol=0)


def test_varlen_operator_has_shapes_for_the_compiler() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in tensors())
    out, lse = varlen_attention(q, k, v, torch.zeros(3, dtype=torch.int32, device="meta"), 12, True, 0.3, 0)
    assert out.shape == q.shape
    assert lse.shape == (4, sum(LENGTHS))
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]
