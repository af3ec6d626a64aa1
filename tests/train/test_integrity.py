"""Bytes that change inside a checkpoint's weight file are seen, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train import checkpoint

POSITIONS = 40


class Part:
    """Two tensors with many values."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(3000, generator=made) for name in ("a", "b")}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = state


def test_changed_bytes_load_right_or_not_at_all(mesh: Mesh, tmp_path: Path) -> None:
    written = Part(1)
    folder = checkpoint.save(tmp_path, 1, {"model": written, "optimizer": Part(2)}, mesh, {})
    (file,) = folder.glob("*.distcp")
    good = file.read_bytes()
    refused = 0
    for at in range(0, len(good), len(good) // POSITIONS):
        file.write_bytes(good[:at] + bytes(byte ^ 0x10 for byte in good[at : at + 3]) + good[at + 3 :])
        found = Part(3)
        try:
            checkpoint.load(folder, {"model": found, "optimizer": Part(4)}, mesh)
        except UserError as error:
            assert "Move it aside" in str(error)   # noqa: PT017 - which of the places raise is not the point
            refused += 1
        else:
            assert all(torch.equal(found.tensors[name], written.tensors[name]) for name in "ab")
    assert refused > POSITIONS * 0.8


def test_the_damaged_tensor_is_named(mesh: Mesh, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, {"model": Part(1), "optimizer": Part(2)}, mesh, {})
    (file,) = folder.glob("*.distcp")
    good = file.read_bytes()
    value = Part(2).tensors["b"][1500:1510].numpy().tobytes()
    file.write_bytes(good.replace(value, bytes(len(value))))
    with pytest.raises(UserError, match=r"__0_0\.distcp: optimizer\.b is not as it was written \(its"):
        checkpoint.load(folder, {"model": Part(3), "optimizer": Part(4)}, mesh)
    names = [name for name, _ in checkpoint.model_only_state(folder)]   # an export does not read the moments
    assert sorted(names) == ["a", "b"]
    file.write_bytes(good.replace(Part(1).tensors["a"][:9].numpy().tobytes(), bytes(36)))
    with pytest.raises(UserError, match=r"model\.a is not as it was written"):
        list(checkpoint.model_only_state(folder))
