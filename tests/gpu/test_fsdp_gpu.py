"""Sharding, update and checkpoint on one GPU: bfloat16 compute, float32 masters, no wait for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lmms_engine.parallel.activation_checkpoint import recompute
from lmms_engine.parallel.fsdp import Unit, apply_fsdp, materialise
from lmms_engine.parallel.grad_norm import clip_divisor, global_norm
from lmms_engine.parallel.mesh import Mesh, build_mesh, leave_mesh
from lmms_engine.train import checkpoint

pytestmark = pytest.mark.gpu
DIM, VOCAB = 256, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seen: set[torch.dtype] = set()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen |= {x.dtype, self.linear.weight.dtype}
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float().logsumexp(-1).sum()


class Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


@pytest.fixture(scope="module")
def mesh():
    yield build_mesh()
    leave_mesh()


def build(mesh: Mesh, weights: Model | None) -> tuple[Root, torch.optim.AdamW]:
    with torch.device("meta"):
        model = Model()
    root = Root(model)
    for block in model.blocks:
        recompute(block, "full")
    units = [Unit(f"block {i}", (block,)) for i, block in enumerate(model.blocks)]
    units.append(Unit("tied", (model.embed, model.norm, model.head)))
    apply_fsdp(root, units, mesh, bf16=True, reshard_after_forward=True)
    stream = None if weights is None else lambda: ((n, p.detach()) for n, p in weights.named_parameters())
    materialise(root, model, mesh, stream, dict)
    return root, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(root: Root, optimizer: torch.optim.AdamW, mesh: Mesh, factor: float = 1.0) -> Tensor:
    for last in (False, True):
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        (root(torch.arange(50, device=mesh.device)) / 100 * factor).backward()
    norm = global_norm(root.model.parameters(), mesh.device)
    optimizer.grad_scale = clip_divisor(norm, 1.0)
    optimizer.found_inf = (~norm.isfinite()).float()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def state(root: Root, optimizer: torch.optim.AdamW) -> dict[str, checkpoint.TensorPart]:
    return {
        "model": checkpoint.ModelState(root.model),
        "optimizer": checkpoint.OptimizerState(optimizer, dict(root.model.named_parameters())),
    }


def snapshot(root: Root, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    tensors = [part.state_dict() for part in state(root, optimizer).values()]
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for part in tensors
        for name, tensor in part.items()
    }


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_compute_is_bf16_masters_and_moments_float32(mesh: Mesh) -> None:
    root, optimizer = build(mesh, Model())
    assert float(step(root, optimizer, mesh)) > 0
    assert root.model.blocks[0].seen == {torch.bfloat16}
    assert [block.calls for block in root.model.blocks] == [4, 4]   # two micro-batches, each recomputed
    assert {tensor.dtype for tensor in snapshot(root, optimizer).values()} == {torch.float32}
    assert root.model.head.weight is root.model.embed.weight


def test_a_non_finite_norm_moves_nothing(mesh: Mesh) -> None:
    root, optimizer = build(mesh, Model())
    step(root, optimizer, mesh)
    before = snapshot(root, optimizer)
    assert step(root, optimizer, mesh, factor=float("nan")).isnan()
    assert_equal(snapshot(root, optimizer), before)
    step(root, optimizer, mesh)
    assert not torch.equal(snapshot(root, optimizer)["embed.weight"], before["embed.weight"])


def test_a_step_does_not_wait_for_the_device(mesh: Mesh) -> None:
    root, optimizer = build(mesh, Model())
    step(root, optimizer, mesh)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(root, optimizer, mesh)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_checkpoint_comes_back(mesh: Mesh, tmp_path: Path) -> None:
    root, optimizer = build(mesh, Model())
    step(root, optimizer, mesh)
    saved = snapshot(root, optimizer)
    folder = checkpoint.save(tmp_path, 1, state(root, optimizer), mesh, {})
    again, fresh = build(mesh, None)
    checkpoint.load(folder, state(again, fresh), mesh)
    assert_equal(snapshot(again, fresh), saved)
    after, want = float(step(again, fresh, mesh)), float(step(root, optimizer, mesh))
    assert after == want
    assert len(dict(checkpoint.model_only_state(folder))) == len(list(root.model.parameters()))
