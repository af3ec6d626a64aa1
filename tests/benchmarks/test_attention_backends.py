"""The comparison of attention backends: a dry run on the CPU, and that it sees what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import attention_backends as script
from lmms_engine.kernels.attention import attend
from lmms_engine.segments import Segments

CPU = torch.device("cpu")
SHAPE = script.Shape(heads=4, kv_heads=2, dim=16, causal=True, lengths=(5, 20), tokens=40)


@pytest.fixture(autouse=True)
def _precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    return attend(q, k, v, segments, scale=scale, backend="sdpa")


def no_boundaries(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    return sdpa(q, k, v, Segments.from_lengths([q.shape[0]]), scale)


def looks_ahead(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    return sdpa(q, k, v, Segments.from_lengths(segments.lengths(), causal=False), scale)


def no_gradient_of_keys(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    return sdpa(q, k.detach() + 0 * k, v, segments, scale)


def refuses(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    raise ValueError("no such\nkernel")


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    words = ["--tiny", "--rounds", "1", "--backends", "varlen,flex,sdpa,flash_attn_4", "--out", str(out)]
    assert script.main(words) == 0
    figures = json.loads(out.read_text())
    if not torch.cuda.is_available():
        assert set(figures["not_run"]) == {"varlen", "flash_attn_4"}
        assert "needs a GPU" in figures["not_run"]["varlen"]
    rows = {(row["shape"], row["backend"]): row for row in figures["rows"]}
    assert {shape for shape, _ in rows} == set(script.TINY)
    for (_, backend), row in rows.items():
        assert row["within"]
        assert 0 < row["errors"]["out"] <= figures["bound"]
        if backend == "sdpa":
            assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
            assert set(row["ms"]) == {"forward", "both", "host"}
    table = capsys.readouterr().out.rpartition("\n\n")[2]
    assert table.count("sdpa") == len(script.TINY)
    assert ("not run: varlen: it needs a GPU" in table) is not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("way", "wrong"),
    [
        (no_boundaries, {"out", "dq", "dk", "dv"}),
        (looks_ahead, {"out", "dq", "dk", "dv"}),
        (no_gradient_of_keys, {"dk"}),
    ],
)
def test_a_wrong_backend_is_above_the_bound(way: script.Attention, wrong: set[str]) -> None:
    right, row = script.compare("x", SHAPE, {"sdpa": sdpa, "wrong": way}, CPU, rounds=1)
    assert right["within"]
    assert not row["within"]
    assert {part for part, error in row["errors"].items() if error > script.BOUND} == wrong
    marked = [line for line in script.table([right, row]).splitlines() if " ! " in line]
    assert len(marked) == 1
    assert "wrong" in marked[0]


def test_a_backend_that_refuses_loses_no_other_figure() -> None:
    refused, right = script.compare("x", SHAPE, {"refuses": refuses, "sdpa": sdpa}, CPU, rounds=1)
    assert refused["problem"] == "ValueError: no such"
    assert not refused["within"]
    assert right["within"]
    assert right["ratio"]["both"] == 1.0


def test_work_is_counted_by_visible_pairs() -> None:
    full = script.Shape(heads=2, kv_heads=1, dim=8, causal=False, lengths=(4, 4), tokens=8)
    causal = script.Shape(heads=2, kv_heads=1, dim=8, causal=True, lengths=(4, 4), tokens=8)
    assert full.flops(full.segments()) == 4 * (4 * 4 + 4 * 4) * 2 * 8
    assert causal.flops(causal.segments()) == full.flops(full.segments()) / 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tiny", "--backends", "sdpa,flash"], "--backends: no flash (legal: varlen, flash_attn"),
        (["--tiny", "--shapes", "tower_64"], "--shapes: no tower_64 (legal: decoder_pack, tower_72"),
    ],
)
def test_unknown_names(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(words)
    assert said in capsys.readouterr().err
