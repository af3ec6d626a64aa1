"""The doctor on a GPU machine: every check of driver, GPUs, NCCL, attention backends and Liger passes."""

from __future__ import annotations

import pytest

from lmms_engine.commands.checks import gpu

pytestmark = pytest.mark.gpu


def test_every_check_passes() -> None:
    checks = {check.name: check for check in gpu.gpu_checks()}
    assert not [check for check in checks.values() if check.status == "fail"]
    assert checks["nccl"].found.startswith("ok, ")
    for name in ("sdpa", "varlen", "flex"):
        assert checks[f"attention: {name}"].found.startswith("within ")
    assert checks["liger"].found.startswith("within ")
