"""From a job to a trained model. Public: `TrainRunner`.

from lmms_engine.train import TrainRunner

TrainRunner(load_job([Path("config.yaml")], [])).build().run()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmms_engine.train.runner import TrainRunner

__all__ = ["TrainRunner"]


def __getattr__(name: str) -> Any:
    if name == "TrainRunner":
        from lmms_engine.train.runner import TrainRunner

        return TrainRunner
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
