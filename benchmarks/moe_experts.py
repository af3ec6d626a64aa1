"""Experts of a mixture on one GPU: one grouped matrix product against a plain loop, in one run.

    python benchmarks/moe_experts.py [--tokens 16384] [--json moe_experts.json]

One layer's experts with the published sizes of Qwen3-30B-A3B (128 experts, 8 for a token, 2048 wide, inner
size 768), random bf16 weights, forward and backward. The routing is drawn once for all ways: `even`, or
`skewed`, where the busiest expert gets several times the mean (printed). FLOP/s count the products of visited
experts.

library     transformers' own loop over the experts that are hit
loop        ours, what a CPU runs
grouped     ours, what a GPU runs
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lmms_engine.kernels import experts
from lmms_engine.parallel.paths import resolve
from lmms_engine.train.metrics import peak_flops

EXPERTS, TOP_K, DIM, INNER = 128, 8, 2048, 768
WAYS = ("library", "loop", "grouped")


def build(device: torch.device) -> tuple[Qwen3MoeForCausalLM, dict[str, torch.nn.Module]]:
    """A model of one layer with the real experts, and that layer's experts by path."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=DIM, moe_intermediate_size=INNER, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    with device:
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    return model, resolve(model, "model.layers.*.mlp.experts")


def routing(tokens: int, skew: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts of each token and their weights. skew: spread of the experts' popularity."""
    rng = torch.Generator(device).manual_seed(0)
    popularity = torch.randn(EXPERTS, generator=rng, device=device) * skew
    scores = popularity + torch.randn(tokens, EXPERTS, generator=rng, device=device)
    weights, chosen = scores.softmax(-1).topk(TOP_K, dim=-1)
    hidden = torch.randn(tokens, DIM, generator=rng, device=device).bfloat16()
    return hidden, chosen, (weights / weights.sum(-1, keepdim=True)).bfloat16()


def measure(
    module: torch.nn.Module, inputs: tuple[Tensor, Tensor, Tensor], repeats: int
) -> tuple[float, float]:
    """Median milliseconds of a forward and backward, and the peak of allocated memory in GB."""
    hidden, chosen, weights = inputs
    times = []
    torch.cuda.reset_peak_memory_stats()
    for i in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        leaf = hidden.detach().requires_grad_()
        module.zero_grad(set_to_none=True)
        begin.record()
        module(leaf, chosen, weights).sum().backward()
        end.record()
        end.synchronize()
        if i >= 3:   # the first ones warm up
            times.append(begin.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("moe_experts needs a GPU: the grouped product has no CPU kernel worth measuring")
    device = torch.device("cuda")
    model, modules = build(device)
    (module,) = modules.values()
    flops = 3 * 2 * given.tokens * TOP_K * 3 * DIM * INNER   # forward, two gradients; three matrices each
    peak = peak_flops(device)
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.tokens} tokens, bf16")
    print(f"{'routing':<8} {'way':<8} {'busiest':>8} {'ms':>8} {'TFLOP/s':>8} {'of peak':>8} {'GB':>6}")
    for name, skew in (("even", 0.0), ("skewed", 1.0)):
        inputs = routing(given.tokens, skew, device)
        visits = experts.count(inputs[1].flatten(), EXPERTS)
        busiest = float(visits.max() / visits.float().mean())
        for way in WAYS:
            experts.use(model, modules, experts.LIBRARY if way == "library" else experts.install(way))
            ms, gb = measure(module, inputs, given.repeats)
            rate = flops / ms * 1e3
            share = f"{rate / peak:.1%}" if peak else "?"
            print(f"{name:<8} {way:<8} {busiest:>7.1f}x {ms:>8.2f} {rate / 1e12:>8.1f} {share:>8} {gb:>6.2f}")
            rows.append({"routing": name, "way": way, "busiest": busiest, "ms": ms, "flops": rate, "gb": gb})
    if given.json is not None:
        meta = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": given.tokens}
        given.json.write_text(json.dumps({**meta, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
