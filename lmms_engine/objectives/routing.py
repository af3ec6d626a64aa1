"""What routers are asked for besides the cross-entropy, and what is told about them.

    aux         load balance: E * sum_i f_i * P_i, f_i: visits of i per token, P_i: mean probability of i
    z           square of the logsumexp of the router's logits
    expert_load how often the most visited expert is visited, in multiples of the mean: a metric

All are taken row by row and layer by layer: f and P are means over the tokens of one row in one layer, the
row counts by its tokens, the layers by their mean. So they are sums over tokens like every loss here. They do
not know what a row was packed with, how the batch was cut into micro-batches, or how many ranks there are,
and padding and stand-ins, which are no rows, have no part in them. A balance over whole batches, in contrast,
is no sum: its f is known only when the last micro-batch has been routed, too late for the first one's
gradient. Even routing gives aux = K (experts a token visits); f has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lmms_engine.segments import Segments

TERMS = ("aux", "z", "expert_load")


def router_sums(
    logits: Sequence[Tensor],
    segments: Segments,
    num_rows: int,
    *,
    top_k: int,
    part: tuple[int, int] = (0, 1),
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The terms, summed over the tokens of the first `num_rows` segments: float32 scalars.

    logits: of each layer's router, before any softmax, [T, E]; or, where ranks share the sequence, this
    rank's part of them, with part (rank, ranks) and their group.
    """
    rank, size = part
    tokens = logits[0].shape[0]
    rows_T, length_N = _rows(segments, tokens * size)
    rows_T = rows_T[rank * tokens : (rank + 1) * tokens]
    real_N = (torch.arange(segments.num_segments, device=rows_T.device) < num_rows).float()
    sums = {term: torch.zeros((), device=rows_T.device) for term in TERMS}
    for layer in logits:
        layer = layer.float()
        probs_TE = layer.softmax(-1)
        visits_NE = _visits(probs_TE, rows_T, segments.num_segments, top_k)
        if group is not None:
            dist.all_reduce(visits_NE, group=group)
        mean_N = top_k * length_N / probs_TE.shape[1]
        share_NE = visits_NE / length_N[:, None] * real_N[:, None]
        load_N = visits_NE.amax(1) / mean_N * real_N
        sums["aux"] = sums["aux"] + probs_TE.shape[1] * (probs_TE * share_NE[rows_T]).sum()
        sums["z"] = sums["z"] + (layer.logsumexp(-1).square() * real_N[rows_T]).sum()
        sums["expert_load"] = sums["expert_load"] + load_N[rows_T].sum()
    return {term: total / len(logits) for term, total in sums.items()}


def _rows(segments: Segments, tokens: int) -> tuple[Tensor, Tensor]:
    """The segment of every position of the whole sequence, and the segments' lengths as floats."""
    lengths = segments.cu_seqlens.diff().long()
    numbers = torch.arange(segments.num_segments, device=lengths.device)
    return numbers.repeat_interleave(lengths, output_size=tokens), lengths.float()


def _visits(probs_TE: Tensor, rows_T: Tensor, num_rows: int, top_k: int) -> Tensor:
    """How often each row visits each expert, float32 [N, E], exact."""
    num_experts = probs_TE.shape[1]
    chosen_TK = probs_TE.detach().topk(top_k, dim=-1).indices
    cells = (rows_T[:, None] * num_experts + chosen_TK).flatten()
    visits = torch.zeros(num_rows * num_experts, device=probs_TE.device)
    return visits.scatter_add_(0, cells, torch.ones_like(cells, dtype=visits.dtype)).view(num_rows, -1)
