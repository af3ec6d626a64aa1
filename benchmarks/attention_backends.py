"""Attention backends side by side: error of output and gradients, and time, in one run.

    python benchmarks/attention_backends.py [--shapes decoder_pack,tower_72] [--out attention_backends.json]
    python benchmarks/attention_backends.py --tiny          # small shapes, also on a CPU: a dry run

Random bf16 queries, keys and values in published shapes, 16,384 tokens each:

decoder_pack   Qwen3-VL-4B, causal, 32 query heads on 8 key heads of 128, samples of 200 to 1200 tokens
decoder_one    the same heads, one sample of 16,384 tokens
tower_64       Qwen3-VL-4B's tower, 16 heads of 64, pictures of 200 to 1200 patches that see themselves
tower_72       the larger Qwen3-VL towers, 16 heads of 72, the same pictures
tower_80       Qwen2.5-VL's whole-picture layers, 16 heads of 80, the same pictures
windows_80     Qwen2.5-VL's other layers, windows of 64 patches

The error of a tensor is ||x - ref|| / ||ref||, where ref is plain attention in float32 on the same inputs.
More than 1e-2 in any of out, dq, dk and dv is marked, and the script then exits with 1. A time is the median
over rounds in which the backends take turns, by CUDA events behind long matrix products, so that the device
does not wait for the host; sdpa alone asks the device for the boundaries, so its times are also the host's.
flex builds its block mask once for a shape, as a model's layers share it. `host` is what a forward and
backward takes to enqueue. TFLOP/s count the visible pairs once (causal: half).

flash_attn_4 is the package called directly, so that shapes which the engine hands to varlen are seen too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lmms_engine.kernels.attention import attend, unusable
from lmms_engine.segments import Segments

BOUND = 1e-2
PARTS = ("out", "dq", "dk", "dv")
BACKENDS = ("varlen", "flash_attn", "flex", "sdpa")
DIRECT = "flash_attn_4"
Attention = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads and segments of one attention call. lengths: shortest and longest segment."""

    heads: int
    kv_heads: int
    dim: int
    causal: bool
    lengths: tuple[int, int]
    tokens: int = 16384

    def segments(self) -> Segments:
        rng, left, drawn = torch.Generator().manual_seed(0), self.tokens, []
        while left:
            low, high = self.lengths
            length = int(torch.randint(low, high + 1, (1,), generator=rng))
            drawn.append(min(length, left))
            left -= drawn[-1]
        return Segments.from_lengths(drawn, causal=self.causal)

    def flops(self, segments: Segments) -> float:
        """Of a forward: two products over the visible pairs."""
        pairs = sum(length**2 for length in segments.lengths()) / (2 if self.causal else 1)
        return 4 * pairs * self.heads * self.dim


SHAPES = {
    "decoder_pack": Shape(32, 8, 128, True, (200, 1200)),
    "decoder_one": Shape(32, 8, 128, True, (16384, 16384)),
    "tower_64": Shape(16, 16, 64, False, (200, 1200)),
    "tower_72": Shape(16, 16, 72, False, (200, 1200)),
    "tower_80": Shape(16, 16, 80, False, (200, 1200)),
    "windows_80": Shape(16, 16, 80, False, (64, 64)),
}
TINY = {
    "decoder_pack": Shape(4, 2, 128, True, (10, 40), 150),
    "tower_72": Shape(2, 2, 72, False, (10, 40), 150),
    "windows_80": Shape(2, 2, 80, False, (16, 16), 64),
}


# ---- what is compared --------------------------------------------------------------------------------


def reference(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, scale: float) -> Tensor:
    """Plain attention on one key head, a segment at a time: a few matrices of scores are all that fits."""
    outs = []
    for start, end in itertools.pairwise(segments.cu_seqlens.tolist()):
        q_HLD, k_LD, v_LD = q_THD[start:end].transpose(0, 1), k_THD[start:end, 0], v_THD[start:end, 0]
        scores = q_HLD @ k_LD.T * scale
        if segments.causal:
            ahead = torch.ones(end - start, end - start, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(ahead, float("-inf"))
        outs.append((scores.softmax(-1) @ v_LD).transpose(0, 1))
    return torch.cat(outs)


def _engine(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, scale: float, *, name: str
) -> Tensor:
    return attend(q_THD, k_THD, v_THD, segments, scale=scale, backend=name)


def _flash_attn_4(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, scale: float) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    out_THD, _ = flash_attn_varlen_func(
        q_THD, k_THD, v_THD,
        cu_seqlens_q=segments.cu_seqlens, cu_seqlens_k=segments.cu_seqlens,
        max_seqlen_q=segments.max_len, max_seqlen_k=segments.max_len,
        softmax_scale=scale, causal=segments.causal,
    )  # fmt: skip
    return out_THD


def candidates(
    device: torch.device, asked: list[str] | None = None
) -> tuple[dict[str, Attention], dict[str, str]]:
    """What can be run on this device, and why the rest cannot."""
    ways: dict[str, Attention] = {}
    left_out: dict[str, str] = {}
    for name in asked or [*BACKENDS, DIRECT]:
        runs = name == "flex" and device.type == "cpu"   # its forward does
        if problem := "" if runs else unusable(name, device, torch.bfloat16):
            left_out[name] = problem
        else:
            ways[name] = _flash_attn_4 if name == DIRECT else partial(_engine, name=name)
    return ways, left_out


# ---- error and time ----------------------------------------------------------------------------------


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as leaves, and the gradient of the output."""
    rng = torch.Generator(device).manual_seed(1)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    drawn = [
        torch.randn(shape.tokens, count, shape.dim, generator=rng, device=device).bfloat16()
        for count in heads
    ]
    return (*(x.requires_grad_() for x in drawn[:3]), drawn[3])


def outputs(way: Attention, given: tuple[Tensor, ...], segments: Segments, scale: float) -> list[Tensor]:
    """Output and gradients of queries, keys and values; the output alone where there is no backward."""
    *leaves, grad = given
    if not _has_backward(way, grad.device):
        with torch.no_grad():
            return [way(*leaves, segments, scale)]
    out = way(*leaves, segments, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def expected(given: tuple[Tensor, ...], segments: Segments, scale: float) -> list[Tensor]:
    """What `reference` gives in float32, a key head at a time so that little is kept for the backward."""
    key_heads = given[1].shape[1]
    split = (x.detach().float().tensor_split(key_heads, dim=1) for x in given)
    parts = []
    for *leaves, grad in zip(*split, strict=True):
        leaves = [x.detach().requires_grad_() for x in leaves]
        parts.append(outputs(reference, (*leaves, grad), segments, scale))
    return [torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)]


def errors(found: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    """||found - wanted|| / ||wanted|| of the output and, where there are any, of the gradients."""
    return {
        part: float((x.float() - ref).norm() / ref.norm())
        for part, x, ref in zip(PARTS, found, wanted, strict=False)
    }


def _has_backward(way: Attention, device: torch.device) -> bool:
    return device.type != "cpu" or getattr(way, "keywords", {}).get("name") != "flex"


class Clock:
    """Milliseconds of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        side = 8192 if self.cuda else 1
        self._filler = torch.randn(side, side, device=device, dtype=torch.bfloat16)

    @contextmanager
    def timed(self, into: list[float]) -> Iterator[None]:
        if not self.cuda:
            begin = time.perf_counter()
            yield
            into.append((time.perf_counter() - begin) * 1e3)
            return
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(4):   # some 6 ms of work ahead of what is timed: the host gets there first
            self._filler @ self._filler
        events[0].record()
        yield
        events[1].record()
        events[1].synchronize()
        into.append(events[0].elapsed_time(events[1]))

    @contextmanager
    def host(self, into: list[float]) -> Iterator[None]:
        self.wait()
        begin = time.perf_counter()
        yield
        into.append((time.perf_counter() - begin) * 1e3)
        self.wait()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def times(
    ways: dict[str, Attention], given: tuple[Tensor, ...], segments: Segments, scale: float, rounds: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds of each way: forward, forward and backward, and the host's part of the latter."""
    clock = Clock(given[0].device)
    taken: dict[str, dict[str, list[float]]] = {
        name: {"forward": [], "both": [], "host": []} for name in ways
    }
    for _ in range(rounds):
        for name, way in ways.items():
            with torch.no_grad(), clock.timed(taken[name]["forward"]):
                way(*given[:3], segments, scale)
            if _has_backward(way, given[0].device):
                with clock.timed(taken[name]["both"]):
                    outputs(way, given, segments, scale)
                with clock.host(taken[name]["host"]):
                    outputs(way, given, segments, scale)
    return {
        name: {kind: statistics.median(values) for kind, values in kinds.items() if values}
        for name, kinds in taken.items()
    }


# ---- one shape after the other -----------------------------------------------------------------------


def compare(
    name: str, shape: Shape, ways: dict[str, Attention], device: torch.device, rounds: int
) -> list[dict]:
    """A row for each way: errors, times, and the ratio of its times to the first way's."""
    segments = shape.segments()
    flops = shape.flops(segments)
    segments, scale = segments.to(device), shape.dim**-0.5
    given = inputs(shape, device)
    wanted = expected(given, segments, scale)
    rows, works = [], {}
    for way_name, way in ways.items():
        row: dict = {"shape": name, "backend": way_name, "errors": {}, "problem": ""}
        try:
            for _ in range(3):   # compiles and warms up
                row["errors"] = errors(outputs(way, given, segments, scale), wanted)
            with torch.no_grad():
                way(*given[:3], segments, scale)
            works[way_name] = way
        except Exception as error:   # a kernel that refuses one shape must not lose the other figures
            row["problem"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        rows.append(row)
    measured = times(works, given, segments, scale, rounds)
    first = next(iter(measured.values()), {})
    for row in rows:
        taken = measured.get(row["backend"], {})
        row["ms"] = taken
        row["ratio"] = {kind: taken[kind] / first[kind] for kind in taken if kind in first}
        if "both" in taken:
            row["tflops"] = 3.5 * flops / taken["both"] / 1e9   # the backward has five products to two
        row["within"] = not row["problem"] and all(error <= BOUND for error in row["errors"].values())
    return rows


def table(rows: list[dict]) -> str:
    """Errors in units of 1e-3; a ratio is to the first backend of the shape."""
    head = "".join(f"{part:>7}" for part in PARTS)
    text = [
        f"{'shape':<13} {'backend':<13}{head}   {'fwd ms':>8} {'ratio':>6} {'f+b ms':>8} {'ratio':>6} "
        f"{'TFLOP/s':>8} {'host ms':>8}"
    ]
    for row in rows:
        line = f"{row['shape']:<13} {row['backend']:<13}"
        if row["problem"]:
            text.append(f"{line} {row['problem']}")
            continue
        line += "".join(_cell(row["errors"].get(part), 7, 2, 1e3) for part in PARTS)
        line += "   " if row["within"] else " ! "
        for kind in ("forward", "both"):
            line += _cell(row["ms"].get(kind), 8, 3) + _cell(row["ratio"].get(kind), 7, 2) + " "
        text.append(line + _cell(row.get("tflops"), 8, 1) + _cell(row["ms"].get("host"), 9, 2))
    return "\n".join(text)


def _cell(value: float | None, width: int, digits: int, unit: float = 1.0) -> str:
    return f"{'–':>{width}}" if value is None else f"{value * unit:>{width}.{digits}f}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run on any machine")
    parser.add_argument("--shapes", default=None, help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--backends", default=None, help=f"some of {','.join([*BACKENDS, DIRECT])}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None, help="write the figures here too")
    given = parser.parse_args(words)
    if not (given.tiny or torch.cuda.is_available()):
        parser.error("real shapes need a GPU; --tiny runs anywhere")
    torch.set_float32_matmul_precision("highest")   # the reference
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = TINY if given.tiny else SHAPES
    for option, names, legal in (
        ("--shapes", given.shapes, shapes),
        ("--backends", given.backends, [*BACKENDS, DIRECT]),
    ):
        unknown = [name for name in (names or "").split(",") if name and name not in legal]
        if unknown:
            parser.error(f"{option}: no {', '.join(unknown)} (legal: {', '.join(legal)})")
    ways, left_out = candidates(device, given.backends and given.backends.split(","))
    rows = []
    for name in given.shapes.split(",") if given.shapes else shapes:
        rows += compare(name, shapes[name], ways, device, given.rounds)
        print(table(rows[-len(ways) :]), flush=True)   # so that a run that is cut short has told something
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"\n{machine}, torch {torch.__version__}, bf16; errors in 1e-3; ! is above {BOUND / 1e-3:.0f}")
    print(table(rows))
    for name, why in left_out.items():
        print(f"not run: {name}: {why}")
    if given.out is not None:
        meta = {"machine": machine, "torch": torch.__version__, "bound": BOUND, "not_run": left_out}
        given.out.write_text(json.dumps({**meta, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
