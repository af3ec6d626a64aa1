"""Processors by name.

    @register_processor("my_model")
    class MyProcessor:                      # the Processor protocol of base.py
        @classmethod
        def from_pretrained(cls, folder_or_id: str, **settings) -> "MyProcessor": ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lmms_engine.datasets.processor.base import KeyRule, PictureProcessor, Processor, ProcessorClass
from lmms_engine.registry import Registry

T = TypeVar("T", bound=ProcessorClass)

PROCESSORS: Registry[ProcessorClass] = Registry(
    "processor",
    {name: f"lmms_engine.models.{name}.processor" for name in ("qwen2_5_vl", "qwen3_moe", "qwen3_vl", "sit")},
)

__all__ = ["PROCESSORS", "KeyRule", "PictureProcessor", "Processor", "ProcessorClass", "register_processor"]


def register_processor(name: str) -> Callable[[T], T]:
    """Class decorator that makes a processor available as `processor_config.processor_type: <name>`."""
    return PROCESSORS.register(name)
