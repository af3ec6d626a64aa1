"""Recomputation of blocks in the backward pass: of everything in them, or of all but the costly products.

Done with torch's hooks-based checkpoint (torch.distributed._composable, torch 2.11): unlike a wrapper module
it leaves module paths, parameter names and state dicts as they are. It is non-reentrant, so a block whose
inputs need no gradient (a frozen embedding before it) keeps its own gradients, and a frozen block saves and
recomputes nothing. Keyword arguments such as the segments are captured with the block's inputs.

`full` keeps a block's inputs alone. `selective` keeps the results of matrix products and of attention as
well, and recomputes what lies between them: norms, rotary embedding, activations. Those cost little time and
hold about a third of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lmms_engine.errors import UserError
from lmms_engine.parallel.paths import match_short, under

Kind = Literal["full", "selective"]

# Operators whose results `selective` keeps. Attention goes by the operator of each backend; flash-attn-4 has
# none and is run again.
KEPT = frozenset(
    {
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "lmms_engine::varlen_attention", "flash_attn::_flash_attn_varlen_forward", "flex_attention",
    }
)  # fmt: skip


def choose_blocks(
    model: nn.Module,
    setting: bool | str | tuple[str, ...] | list[str] | Mapping[str, Kind],
    blocks: dict[str, nn.Module],
    encoders: dict[str, nn.Module],
) -> dict[str, Kind]:
    """Names of the blocks that `fsdp_config.activation_checkpointing` asks to recompute, and how.

    setting: true (all blocks), false (none), "selective" (all blocks, but for their products), "encoders"
    (those of the towers), a list of patterns, or a mapping from patterns to how, where later ones win. Each
    pattern must match blocks of the layout.
    """
    if isinstance(setting, bool):
        return dict.fromkeys(blocks, "full") if setting else {}
    if setting == "encoders":
        return {name: "full" for name in blocks if under(name, encoders)}
    if setting == "selective":
        return dict.fromkeys(blocks, "selective")
    chosen: dict[str, Kind] = {}
    patterns = [setting] if isinstance(setting, str) else setting
    for pattern in patterns:
        matched = match_short(model, pattern)
        wanted = [name for name in blocks if under(name, matched)]
        if not wanted:
            raise UserError(
                f"trainer_args.fsdp_config.activation_checkpointing: '{pattern}' matches no block of this "
                f"model (its blocks are {', '.join(blocks)})"
            )
        chosen |= dict.fromkeys(wanted, patterns[pattern] if isinstance(patterns, Mapping) else "full")
    return chosen


def recompute(block: nn.Module, kind: Kind) -> None:
    """Makes a block recompute its forward in the backward pass. Call it before sharding."""
    if kind == "full":
        checkpoint(block)
    else:
        checkpoint(block, context_fn=partial(create_selective_checkpoint_contexts, _policy))


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
