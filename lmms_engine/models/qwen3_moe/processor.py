"""Rows for Qwen3-MoE: text alone."""

from __future__ import annotations

from lmms_engine.datasets.processor import register_processor
from lmms_engine.datasets.processor.text import TextProcessor


@register_processor("qwen3_moe")
class Qwen3MoeProcessor(TextProcessor):
    """Nothing beyond what every text model has."""
