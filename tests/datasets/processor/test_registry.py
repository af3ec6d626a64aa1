"""Processors are found by name, the user's own among them."""

from __future__ import annotations

import pytest

from lmms_engine.datasets.processor import PROCESSORS, register_processor
from lmms_engine.errors import UserError


def test_built_in_families_are_imported_by_name() -> None:
    assert {"qwen2_5_vl", "qwen3_vl"} <= set(PROCESSORS.names())
    for name in ("qwen2_5_vl", "qwen3_vl"):
        assert PROCESSORS.get(name).__module__ == f"lmms_engine.models.{name}.processor"


def test_a_processor_of_ones_own() -> None:
    @register_processor("test_registry_own")
    class Own:
        """Registered by its name."""

    assert PROCESSORS.get("test_registry_own") is Own
    with pytest.raises(UserError, match="registered already"):
        register_processor("test_registry_own")(Own)
    with pytest.raises(UserError, match="did you mean 'qwen3_vl'"):
        PROCESSORS.get("qwen3_v")
