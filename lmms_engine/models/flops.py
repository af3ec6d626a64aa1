"""FLOPs of one forward and backward, counted on the host from a config and a packed batch.

Two figures (a multiply-add is two FLOPs):

strict        matrix products that training really needs: causal attention once (half the square), every
              picture by its own patches and windows, the head on supervised positions only, frozen parts
              forward only, nothing for recomputation, padding columns, stand-ins, norms or rotary tables.
conventional  what most papers report: 6 * weights * tokens with every part trained, the head on all tokens,
              attention as a full square. It flatters; it is there to compare with other people's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lmms_engine.datasets.batch import PackedBatch


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward and a backward."""

    strict: float = 0.0
    conventional: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.strict + other.strict, self.conventional + other.conventional)


class Tally:
    """Adds up a model from its inputs to its loss.

    frozen: names of the parameters that are not trained.
    differentiable: whether anything before the current point is trained, so that gradients must reach it.
    """

    def __init__(self, frozen: frozenset[str], *, differentiable: bool = False) -> None:
        self.frozen = frozen
        self.differentiable = differentiable
        self.strict = 0.0
        self.conventional = 0.0

    def trains(self, module: str) -> bool:
        """Whether the weight of `module`, or the parameter of that name itself, is trained."""
        return not {f"{module}.weight", module} & self.frozen

    def passes(self, *modules: str) -> None:
        """Modules without matrix products (norms, embeddings): only their being trained counts."""
        self.differentiable |= any(self.trains(module) for module in modules)

    def linear(
        self, rows: int, *products: tuple[str, int, int], conventional_rows: int | None = None
    ) -> None:
        """Products that read one input side by side: (module, inputs, outputs) on so many rows."""
        for module, inputs, outputs in products:
            forward = 2.0 * rows * inputs * outputs
            self.strict += forward * (1 + self.trains(module) + self.differentiable)
            all_rows = rows if conventional_rows is None else conventional_rows
            self.conventional += 6.0 * all_rows * inputs * outputs
        self.passes(*(module for module, _, _ in products))

    def attention(self, pairs: float, square: float, width: int) -> None:
        """Scores and what they pick of the values. pairs: really seen; square: all; width: heads * dim."""
        self.strict += 4.0 * pairs * width * (3 if self.differentiable else 1)
        self.conventional += 12.0 * square * width

    def join(self, other: Tally) -> None:
        """Adds a branch whose output flows into this one."""
        self.strict += other.strict
        self.conventional += other.conventional
        self.differentiable |= other.differentiable

    def flops(self) -> Flops:
        return Flops(self.strict, self.conventional)


# Adds the feed-forward part of a layer: (tally, config, layer's path, its index, tokens).
FeedForward = Callable[[Tally, Any, str, int, int], None]


def add_mlp(tally: Tally, config: Any, layer: str, index: int, tokens: int) -> None:
    """A gated MLP."""
    dim, inner = config.hidden_size, config.intermediate_size
    tally.linear(tokens, (f"{layer}.mlp.gate_proj", dim, inner), (f"{layer}.mlp.up_proj", dim, inner))
    tally.linear(tokens, (f"{layer}.mlp.down_proj", inner, dim))


def add_experts(tally: Tally, config: Any, layer: str, index: int, tokens: int) -> None:
    """A router and the experts that tokens visit; those they do not visit cost nothing."""
    dim, inner = config.hidden_size, config.moe_intermediate_size
    router = Tally(tally.frozen, differentiable=tally.differentiable)
    router.linear(tokens, (f"{layer}.mlp.gate", dim, config.num_experts))
    visits = tokens * config.num_experts_per_tok
    tally.linear(visits, (f"{layer}.mlp.experts.gate_up_proj", dim, 2 * inner))
    tally.linear(visits, (f"{layer}.mlp.experts.down_proj", inner, dim))
    tally.join(router)


def add_decoder(
    tally: Tally,
    config: Any,
    batch: PackedBatch,
    *,
    prefix: str,
    qk_norm: bool,
    feed_forward: FeedForward = add_mlp,
) -> None:
    """A decoder over the batch's real rows. config: the text config."""
    lengths = batch.row_lengths()
    tokens = sum(lengths)
    square = float(sum(n * n for n in lengths))
    pairs = float(sum(n * (n + 1) // 2 for n in lengths)) if batch.segments.causal else square
    dim, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or dim // heads
    q_width, kv_width = heads * head_dim, config.num_key_value_heads * head_dim
    for i in range(config.num_hidden_layers):
        layer = f"{prefix}.layers.{i}"
        tally.passes(f"{layer}.input_layernorm")
        attention = f"{layer}.self_attn"
        tally.linear(
            tokens,
            (f"{attention}.q_proj", dim, q_width),
            (f"{attention}.k_proj", dim, kv_width),
            (f"{attention}.v_proj", dim, kv_width),
        )
        if qk_norm:
            tally.passes(f"{attention}.q_norm", f"{attention}.k_norm")
        tally.attention(pairs, square, q_width)
        tally.linear(tokens, (f"{attention}.o_proj", q_width, dim))
        tally.passes(f"{layer}.post_attention_layernorm")
        feed_forward(tally, config, layer, i, tokens)
    tally.passes(f"{prefix}.norm")


def add_head(tally: Tally, config: Any, batch: PackedBatch, *, module: str) -> None:
    """The output projection. module: what its weight is called, i.e. the embedding where they are tied."""
    tally.linear(
        sum(batch.row_supervised()),
        (module, config.hidden_size, config.vocab_size),
        conventional_rows=batch.num_tokens,
    )


def real_grids(
    batch: PackedBatch, placeholders: Iterable[int], merge_size: int
) -> list[tuple[int, int, int]]:
    """Grids (t, h, w) of the pictures and clips of real rows. Host side only.

    Stand-ins come last, so the real ones are those that account for the real rows' placeholder tokens.
    """
    grids: Tensor | None = batch.media.get("image_grid_thw")
    if grids is None:
        return []
    ids = batch.input_ids[: batch.num_tokens]
    left = int(sum((ids == placeholder).sum() for placeholder in placeholders))
    real = []
    for t, h, w in grids.tolist():
        if left <= 0:
            break
        real.append((t, h, w))
        left -= t * h * w // merge_size**2
    return real
