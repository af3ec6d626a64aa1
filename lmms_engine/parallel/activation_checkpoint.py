"""Recomputation of whole blocks in the backward pass.

Done with torch's hooks-based checkpoint (torch.distributed._composable, torch 2.11): unlike a wrapper module
it leaves module paths, parameter names and state dicts as they are. It is non-reentrant, so a block whose
inputs need no gradient (a frozen embedding before it) keeps its own gradients, and a frozen block saves and
recomputes nothing. Keyword arguments such as the segments are captured with the block's inputs.
"""

from __future__ import annotations

from torch import nn
from torch.distributed._composable import checkpoint

from lmms_engine.errors import UserError
from lmms_engine.parallel.paths import match_short, under


def choose_blocks(
    model: nn.Module,
    setting: bool | str | list[str] | tuple[str, ...],
    blocks: dict[str, nn.Module],
    encoders: dict[str, nn.Module],
) -> dict[str, nn.Module]:
    """The blocks that `fsdp_config.activation_checkpointing` asks to recompute.

    setting: true (all blocks), false (none), "encoders" (those of the towers), or a list of patterns, each of
    which must match blocks of the layout.
    """
    if isinstance(setting, bool):
        return dict(blocks) if setting else {}
    if setting == "encoders":
        return {name: block for name, block in blocks.items() if under(name, encoders)}
    chosen: dict[str, nn.Module] = {}
    for pattern in [setting] if isinstance(setting, str) else setting:
        matched = match_short(model, pattern)
        wanted = {name: block for name, block in blocks.items() if under(name, matched)}
        if not wanted:
            raise UserError(
                f"trainer_args.fsdp_config.activation_checkpointing: '{pattern}' matches no block of this "
                f"model (its blocks are {', '.join(blocks)})"
            )
        chosen.update(wanted)
    return chosen


def apply_activation_checkpointing(blocks: dict[str, nn.Module]) -> None:
    """Makes each block recompute its forward in the backward pass. Call it before sharding."""
    for block in blocks.values():
        checkpoint(block)
