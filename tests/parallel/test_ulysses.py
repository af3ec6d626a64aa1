"""Heads for tokens and back: equal to attention on one rank for every pair of heads and ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmms_engine.errors import UserError
from lmms_engine.kernels import attention
from lmms_engine.parallel.mesh import build_mesh
from lmms_engine.parallel.ulysses import Ulysses, check_heads, split_sequence
from lmms_engine.segments import Segments
from tests.distributed import run_ranks

DIM = 4
# (query heads, key/value heads, ranks of a sequence)
PAIRS = [(8, 2, 4), (8, 4, 2), (8, 8, 8), (8, 1, 8), (12, 6, 4), (16, 2, 8)]
# lengths of the segments; the last token of each list is what fills up to 8 ranks
PACKS = {1: [1], 7: [3, 4], 22: [5, 1, 9, 7]}


def trainer(sp):
    return SimpleNamespace(
        sp_ulysses_degree=sp, ep_degree=1, fsdp_config=SimpleNamespace(hsdp_shard_size=0), ddp_timeout=60
    )


def inputs(heads, kv_heads, lengths, size):
    """Queries, keys, values and the gradient of the output, filled up to a multiple of the ranks."""
    extra = -sum(lengths) % size
    segments = Segments.from_lengths([*lengths, extra] if extra else lengths)
    rng = torch.Generator().manual_seed(heads * 100 + kv_heads)
    tokens = sum(lengths) + extra
    shapes = [(tokens, heads, DIM), (tokens, kv_heads, DIM), (tokens, kv_heads, DIM), (tokens, heads, DIM)]
    return [torch.randn(shape, generator=rng) for shape in shapes], segments


def attend(q, k, v, segments, exchange=None):
    """The decoder's attention as transformers would call it."""
    names = attention.install("sdpa", exchange)
    function = attention.AttentionInterface()[names.decoder]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return function(None, q, k, v, None, scaling=0.5, segments=segments)[0][0]


def with_gradients(q, k, v, grad, segments, exchange=None):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, segments, exchange)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def exchanged(_):
    """(heads, kv heads, ranks, tokens) -> this rank's part of output and gradients."""
    found = {}
    meshes = {size: build_mesh(trainer(size)) for size in (2, 4, 8)}
    for heads, kv_heads, size in PAIRS:
        exchange = Ulysses(meshes[size].sp)
        for tokens, lengths in PACKS.items():
            tensors, segments = inputs(heads, kv_heads, lengths, size)
            own = [x.chunk(size)[exchange.rank] for x in tensors]
            found[heads, kv_heads, size, tokens] = with_gradients(*own, segments, exchange)
    return found


def test_every_pair_equals_one_rank():
    ranks = run_ranks(exchanged, 8, timeout=150)
    for heads, kv_heads, size in PAIRS:
        for tokens, lengths in PACKS.items():
            tensors, segments = inputs(heads, kv_heads, lengths, size)
            want = with_gradients(*tensors, segments)
            for first in range(0, 8, size):   # each group of ranks has the whole
                parts = [ranks[first + i][heads, kv_heads, size, tokens] for i in range(size)]
                for name, ours, whole in zip("oqkv", zip(*parts, strict=True), want, strict=True):
                    case = f"{name} of {heads}/{kv_heads} heads, {size} ranks, {tokens} tokens"
                    torch.testing.assert_close(torch.cat(ours), whole, rtol=1e-5, atol=1e-6, msg=case)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 4), (5, 5, 2)])
def test_heads_that_cannot_be_shared_are_refused_with_both_numbers(heads, kv_heads, size):
    with pytest.raises(UserError, match=rf"degree={size}: does not divide the {heads} attention heads"):
        check_heads(heads, kv_heads, size)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), PAIRS)
def test_heads_that_can_be_shared_are_not_refused(heads, kv_heads, size):
    check_heads(heads, kv_heads, size)


class Decoder(torch.nn.Module):
    def forward(self, *, inputs_embeds, position_ids):
        return inputs_embeds, position_ids


def test_the_hook_cuts_and_refuses_what_it_cannot_cut():
    def shard(kwargs, part):
        return {name: x[..., part] for name, x in kwargs.items()}

    decoder = Decoder()
    split_sequence(decoder, shard, rank=1, size=3)
    embeds, positions = decoder(inputs_embeds=torch.arange(6)[None], position_ids=torch.arange(6)[None])
    assert embeds.tolist() == positions.tolist() == [[2, 3]]
    with pytest.raises(RuntimeError, match="7 tokens cannot be shared by 3"):
        decoder(inputs_embeds=torch.arange(7)[None], position_ids=torch.arange(7)[None])
    with pytest.raises(RuntimeError, match="keyword"):
        decoder(torch.arange(6)[None])
