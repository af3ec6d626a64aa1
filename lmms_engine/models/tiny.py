"""Samples for tiny random models, written as pieces. For tests; no processor, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmms_engine.datasets.sample import Sample
from lmms_engine.segments import RowRef


@dataclass(frozen=True)
class Text:
    """`length` random tokens; `answer` makes them targets."""

    length: int
    answer: bool = False


@dataclass(frozen=True)
class Token:
    """One special token."""

    id: int


@dataclass(frozen=True)
class Media:
    """Placeholders of one picture, or of a clip or a part of one.

    grid: frames, height, width in patches. interval: how far apart the time positions of two frames are.
    """

    token: int
    grid: tuple[int, int, int]
    interval: float = 1.0


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a tiny model: text below `text`, special tokens from there on."""

    text: int = 300
    vision_start: int = 300
    vision_end: int = 301
    image: int = 302
    video: int = 303
    size: int = 320


def build_sample(
    name: str,
    pieces: Sequence[Text | Token | Media],
    *,
    seed: int,
    vocabulary: Vocabulary,
    merge_size: int,
    patch_dim: int,
    grids: Sequence[tuple[int, int, int]] | None = None,
) -> Sample:
    """A sample with random text and pixels, and M-RoPE positions by the published rule.

    grids: what the tower is told, where that differs from the pieces' own grids (a clip in several pieces).
    """
    rng = torch.Generator().manual_seed(seed)
    ids, targets, positions, start = [], [], [], 0
    for piece in pieces:
        if isinstance(piece, Media):
            block = _grid_positions(piece, merge_size)
            tokens, answer = torch.full((block.shape[1],), piece.token), False
        else:
            tokens, answer = _text(piece, vocabulary, rng)
            block = torch.arange(len(tokens)).expand(3, -1)
        ids.append(tokens)
        targets.append(torch.full((len(tokens),), answer))
        positions.append(block + start)
        start = int(positions[-1].max()) + 1
    input_ids, is_target = torch.cat(ids), torch.cat(targets)
    labels = torch.full_like(input_ids, -100)
    labels[:-1] = torch.where(is_target[1:], input_ids[1:], -100)
    if grids is None:
        grids = [piece.grid for piece in pieces if isinstance(piece, Media)]
    media = {}
    if grids:
        patches = sum(t * h * w for t, h, w in grids)
        media = {
            "pixel_values": torch.randn(patches, patch_dim, generator=rng),
            "image_grid_thw": torch.tensor(grids),
        }
    return Sample(
        row=RowRef(source="tiny", shard=0, row=seed, id=name),
        input_ids=input_ids,
        labels=labels,
        loss_weights=(labels != -100).float(),
        position_ids=torch.cat(positions, dim=1),
        media=media,
    )


def build_text_sample(name: str, pieces: Sequence[Text], *, seed: int, vocabulary: Vocabulary) -> Sample:
    """A sample of random text with positions [T]."""
    sample = build_sample(name, pieces, seed=seed, vocabulary=vocabulary, merge_size=1, patch_dim=0)
    return replace(sample, position_ids=sample.position_ids[0])


def _text(piece: Text | Token, vocabulary: Vocabulary, rng: torch.Generator) -> tuple[Tensor, bool]:
    if isinstance(piece, Token):
        return torch.tensor([piece.id]), False
    return torch.randint(vocabulary.text, (piece.length,), generator=rng), piece.answer


def _grid_positions(piece: Media, merge_size: int) -> Tensor:
    """Time, height, width of every placeholder, [3, tokens], from 0."""
    t, h, w = piece.grid[0], piece.grid[1] // merge_size, piece.grid[2] // merge_size
    time = (torch.arange(t) * piece.interval).long()
    return torch.stack(torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)
