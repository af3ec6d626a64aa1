"""A model's processor outside of a run: what a row becomes, and how many tokens it has."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmms_engine.errors import UserError

if TYPE_CHECKING:
    from lmms_engine.datasets.processor import Processor
    from lmms_engine.datasets.sample import Sample
    from lmms_engine.datasets.schema import Row


def processor_type(folder: Path, names: list[str]) -> str:
    """The registered processor that opens a folder, told by `config.json` or the library's class name.

    names: the registered ones. Raises UserError where the folder does not say.
    """
    model_type = _read(folder / "config.json").get("model_type")
    if model_type in names:
        return model_type
    for file in ("processor_config.json", "preprocessor_config.json"):
        # Qwen2_5_VLProcessor -> qwen25vl, as the name qwen2_5_vl without its underscores.
        found = _read(folder / file).get("processor_class", "")
        short = found.lower().removesuffix("processor").replace("_", "")
        for name in names:
            if short == name.replace("_", ""):
                return name
    raise UserError(f"cannot tell the model of {folder}; give --processor-type (legal: {', '.join(names)})")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}") from None


@dataclass
class Tokens:
    """`processor(row)` for the processor in a folder; opened on first use in each process.

    kind: its registered name; None: told by the folder.
    """

    folder: Path
    kind: str | None = None
    _opened: Processor | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def processor(self) -> Processor:
        """The processor itself, with the settings that a run has by default."""
        if self._opened is None:
            from lmms_engine.datasets.processor import PROCESSORS

            if not self.folder.is_dir():
                raise UserError(f"--processor {self.folder}: there is no such folder")
            name = self.kind or processor_type(self.folder, PROCESSORS.names())
            self._opened = PROCESSORS.get(name).from_pretrained(
                self.folder, **_defaults(), config=_config(self.folder, name)
            )
        return self._opened

    def sample(self, row: Row) -> Sample:
        """The row as the model sees it; BadRow if it cannot be used."""
        from lmms_engine.segments import RowRef

        return self.processor(row, RowRef("data-prep", 0, 0, row.id or ""))


def _defaults() -> dict[str, Any]:
    from lmms_engine.config import DatasetSection

    fields = DatasetSection.model_fields
    settings = {name: fields[name].default for name in ("fps", "video_max_pixels", "video_max_frames")}
    return {**settings, "max_length": None, "extra_kwargs": {}, "overlong": "drop"}


def _config(folder: Path, name: str) -> Any:
    """The model's config; without one the library's default, which says how clips are timed."""
    from transformers import AutoConfig

    if (folder / "config.json").is_file():
        return AutoConfig.from_pretrained(folder)
    try:
        return AutoConfig.for_model(name)
    except ValueError:   # a model that the library does not have
        return None
