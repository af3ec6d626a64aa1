"""From files to packed batches. Public: `register_dataset` and `BaseDataset`, for datasets of one's own.

    from lmms_engine.datasets import BaseDataset, register_dataset

    @register_dataset("my_custom_dataset")          # then dataset_config.dataset_type: my_custom_dataset
    class MyDataset(BaseDataset):
        def __init__(self, config):                 # config: the job's dataset_config
            super().__init__(config)
        def __len__(self): ...
        def __getitem__(self, idx): ...             # a row: {"messages": [...]}; or __iter__ for a stream

Nothing is imported until a name is used, so that `lmms_engine.datasets.schema` starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmms_engine.datasets.registry import DATASETS, BaseDataset, register_dataset

__all__ = ["DATASETS", "BaseDataset", "register_dataset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lmms_engine.datasets import registry

        return getattr(registry, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
