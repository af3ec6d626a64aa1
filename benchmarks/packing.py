"""Packing strategies on log-normal length mixes: fill, predicted spread between ranks, speed.

    python benchmarks/packing.py [--samples 200000] [--ranks 8] [--length 32768]

Draws lengths, deals them to logical shards as the loader does (every shard its own packer, a rank's shards in
turn) and reads off what each rank would compute in each step of one pack. No model is run: cost is the model
of docs/packing.md (`SampleCost`), so the spread is a prediction.

fill       tokens in packs / (packs * length), of packs given before the end of the epoch
spread     mean over steps of (dearest rank / mean of ranks - 1): the part of a step that the mean rank waits
worst      the same at the 99th percentile of the steps
samples/s  through the packer alone, one process, CPU time
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from lmms_engine.config import PackingKwargs
from lmms_engine.datasets.pack import PACKERS, Packer

MIXES = {  # name -> (median tokens, sigma)
    "chats and pictures": (1000, 1.0),
    "wide": (600, 1.3),
    "long": (3000, 0.8),
}
SHARDS = 32  # the default of dataset_config.num_logical_shards
DEFAULTS = PackingKwargs()


@dataclass(frozen=True)
class Length:
    """A sample of which only the length is known."""

    tokens: int

    def __len__(self) -> int:
        return self.tokens


def cost(sample: Length) -> float:
    """As SampleCost, for samples without media."""
    return sample.tokens + sample.tokens**2 / DEFAULTS.attention_length


def make_packer(strategy: str, length: int, open_bins: int) -> Packer[Length]:
    """The packer that the loader would make."""
    measures = {"cost": cost, "budget": DEFAULTS.cost_budget * length} if strategy == "balanced" else {}
    return PACKERS.get(strategy)(length, open_bins, **measures)


def measure(strategy: str, samples: list[Length], length: int, ranks: int) -> dict[str, float]:
    """One row of the table."""
    make = partial(make_packer, strategy, length, max(DEFAULTS.open_bins * ranks // SHARDS, 2))
    shards, seconds = [], 0.0
    for shard in range(SHARDS):
        packer, own = make(), samples[shard::SHARDS]
        began = time.process_time()
        shards.append([pack for sample in own for pack in packer.add(sample)])
        seconds += time.process_time() - began
    turns = min(map(len, shards))
    packs = [pack for shard in shards for pack in shard[:turns]]
    # Rank r owns the shards r, r + ranks, …: step (turn, i) is the turn of its i-th shard.
    costs = np.array([[sum(map(cost, pack)) for pack in shard[:turns]] for shard in shards])
    steps = costs.T.reshape(turns * SHARDS // ranks, ranks)
    waits = steps.max(1) / steps.mean(1) - 1
    return {
        "fill": sum(len(sample) for pack in packs for sample in pack) / (len(packs) * length),
        "spread": float(waits.mean()),
        "worst": float(np.quantile(waits, 0.99)),
        "rate": len(samples) / seconds,
    }


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--length", type=int, default=32_768)
    given = parser.parse_args()
    if SHARDS % given.ranks:
        parser.error(f"--ranks must divide {SHARDS}, the number of logical shards")
    print("| lengths | strategy | fill | spread | worst | samples/s |\n| --- | --- | --- | --- | --- | --- |")
    for name, (median, sigma) in MIXES.items():
        drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, given.samples)
        tokens = np.clip(drawn, 16, given.length).astype(int)
        samples = [Length(int(size)) for size in tokens]
        for strategy in ("first_fit", "best_fit", "balanced"):
            row = measure(strategy, samples, given.length, given.ranks)
            print(
                f"| {name}: median {median:,}, sigma {sigma}, mean {tokens.mean():,.0f} | {strategy} |"
                f" {row['fill']:.1%} | {row['spread']:.1%} | {row['worst']:.0%} | {row['rate']:,.0f} |"
            )


if __name__ == "__main__":
    main()
