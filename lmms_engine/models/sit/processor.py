"""Rows for SiT: a class and a picture, as patches.

A row is a chat of two turns: the user's text is the name of a class, or its number; the assistant's answer is
one picture. The folder of a processor holds one file, `preprocessor_config.json`:

    {"processor_class": "SiTProcessor", "classes": ["red circle", ...], "patch_size": 2, "image_size": null}

image_size: the shorter side is scaled to so many pixels and the middle square is cut out; null keeps every
picture in its own size and cuts its edges down to whole patches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.media import load_picture
from lmms_engine.datasets.processor import register_processor
from lmms_engine.datasets.processor.base import KeyRule, digest
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import MediaPart, Row
from lmms_engine.errors import BadRow, UserError
from lmms_engine.folders import missing_folder
from lmms_engine.registry import nearest
from lmms_engine.segments import RowRef

if TYPE_CHECKING:
    from lmms_engine.models.sit.modeling import SiTConfig

FILE = "preprocessor_config.json"
KEYS = ("processor_class", "classes", "patch_size", "image_size")
EXTRA_KEYS = ("image_size",)   # of processor_config.extra_kwargs
CHANNELS = 3


@dataclass(frozen=True)
class Settings:
    """The content of the file. classes: names by number."""

    classes: tuple[str, ...]
    patch_size: int
    image_size: int | None = None


@register_processor("sit")
class SiTProcessor:
    """See the module's docstring. Satisfies the PictureProcessor protocol.

    largest: the longest legal side of a picture in pixels, the model's; None: any.
    """

    keys: ClassVar[dict[str, KeyRule]] = {"pixel_values": KeyRule(0), "class_labels": KeyRule(0)}
    tokenizer = None

    def __init__(self, settings: Settings, largest: int | None = None) -> None:
        self.settings = settings
        self.largest = largest
        self._numbers = {name: number for number, name in enumerate(settings.classes)}

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        config: SiTConfig | None = None,
        extra_kwargs: Mapping[str, Any] | None = None,
        overlong: str = "drop",
        **settings: Any,   # of rows of text and clips
    ) -> SiTProcessor:
        """Opens a folder; UserError if there is none or it does not fit the model's config."""
        if (missing := missing_folder(folder_or_id, bare=False)) is not None:
            raise UserError(f"no processor can be opened from {folder_or_id}: {missing}")
        found = read_settings(Path(folder_or_id) / FILE)
        if overlong == "truncate":
            raise UserError("dataset_config.overlong=truncate: a picture cannot be cut (legal: drop, error)")
        for key in extra_kwargs or {}:
            if key not in EXTRA_KEYS:
                raise UserError(
                    f"dataset_config.processor_config.extra_kwargs.{key}: unknown key "
                    f"(legal: {', '.join(EXTRA_KEYS)}){nearest(key, list(EXTRA_KEYS))}"
                )
        found = replace(found, **(extra_kwargs or {}))
        _check(found, config, f"dataset_config.processor_config: {folder_or_id}")
        return cls(found, largest=config.input_size if config is not None else None)

    @property
    def identity(self) -> dict[str, Any]:
        """All settings, and the largest picture of the model."""
        return {**self._file(), "largest": self.largest}

    @cached_property
    def fingerprint(self) -> str:
        """A digest of them."""
        return digest(self.identity)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the file."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / FILE).write_text(json.dumps(self._file(), indent=2) + "\n", encoding="utf-8")

    def _file(self) -> dict[str, Any]:
        return {"processor_class": type(self).__name__, **vars(self.settings)}

    # Rows in -----------------------------------------------------------------------------------------

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        """The picture as a sequence of patches, all of them targets."""
        name, part = class_and_picture(row)
        return self._sample(ref, self._number(name), self._fit(load_picture(part), part.label))

    def _number(self, name: str) -> int:
        if name in self._numbers:
            return self._numbers[name]
        if name.isdecimal() and int(name) < len(self._numbers):
            return int(name)
        known = list(self._numbers)
        some = ", ".join(known[:5]) + (", …" if len(known) > 5 else "")
        raise BadRow(
            "class", f"unknown class '{name}' (legal: {some}; or 0 to {len(known) - 1}){nearest(name, known)}"
        )

    def _fit(self, image: Image.Image, label: str) -> Image.Image:
        patch, size = self.settings.patch_size, self.settings.image_size
        if size is not None:
            scale = size / min(image.size)
            image = image.resize([max(size, round(n * scale)) for n in image.size], Image.Resampling.BICUBIC)
            return middle(image, size, size)
        width, height = (n // patch * patch for n in image.size)
        if not width or not height:
            size_text = f"{image.width}×{image.height}"
            raise BadRow("media_too_small", f"picture {label} is {size_text} (legal: sides from {patch})")
        if self.largest is not None and max(width, height) > self.largest:
            raise BadRow(
                "media_too_large",
                f"picture {label} is {image.width}×{image.height} (legal: sides up to {self.largest}); "
                "set image_size to have pictures scaled",
            )
        return middle(image, width, height)

    def _sample(self, ref: RowRef, number: int, image: Image.Image) -> Sample:
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
        patches, positions = patchify(pixels, self.settings.patch_size)
        return Sample(
            row=ref,
            input_ids=None,
            labels=None,
            loss_weights=torch.ones(len(patches)),
            position_ids=positions,
            media={"pixel_values": patches, "class_labels": torch.tensor([number])},
        )

    def stand_in(self) -> Sample:
        """A picture of one patch, weight 0."""
        patch = self.settings.patch_size
        sample = self._sample(RowRef("stand-in", 0, 0, "stand-in"), 0, Image.new("RGB", (patch, patch)))
        return replace(sample, loss_weights=torch.zeros(1))

    def tower_inputs(self, media: Mapping[str, Tensor]) -> dict[str, Tensor | int]:
        """None: there is no tower."""
        return {}

    # Pictures out ------------------------------------------------------------------------------------

    def prompts(self, count: int) -> list[Sample]:
        """Blank samples of up to `count` classes, spread over all of them."""
        classes = self.settings.classes
        size = self.settings.image_size or self.largest
        blank = Image.new("RGB", (size, size))
        numbers = sorted({i * len(classes) // count for i in range(count)})
        return [self._sample(RowRef("prompt", 0, n, classes[n]), n, blank) for n in numbers]

    def pictures(self, batch: PackedBatch, patches: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(class, uint8 [height, width, 3]) of the batch's rows, from patches [T, P] in -1..1 on the CPU."""
        edges = batch.segments.cu_seqlens.tolist()
        for i in range(len(batch.rows)):
            own = slice(edges[i], edges[i + 1])
            pixels = unpatchify(patches[own], batch.position_ids[:, own].cpu(), self.settings.patch_size)
            small = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
            yield self._name(batch, i), small.permute(1, 2, 0)

    def describe(self, batch: PackedBatch, index: int) -> str:
        """Class and size of a row, for people."""
        begin, end = batch.segments.cu_seqlens[index : index + 2].tolist()
        height, width = ((batch.position_ids[:, begin:end].amax(1) + 1) * self.settings.patch_size).tolist()
        return f"{self._name(batch, index)}, {width}×{height} pixels"

    def _name(self, batch: PackedBatch, index: int) -> str:
        return self.settings.classes[int(batch.media["class_labels"][index])]


def class_and_picture(row: Row) -> tuple[str, MediaPart]:
    """What a row asks for and what answers; BadRow if it is not one text and one picture."""
    asked = "".join(message.text for message in row.messages if message.role == "user").strip()
    parts = [(message.role, part.kind) for message in row.messages for part in message.content]
    if parts != [("user", "text"), ("assistant", "image")] or not asked:
        found = ", ".join(f"{role}: {kind}" for role, kind in parts)
        raise BadRow(
            "form", f"a row is the user's class name and the assistant's picture, nothing else; here: {found}"
        )
    return asked, next(row.media())


def middle(image: Image.Image, width: int, height: int) -> Image.Image:
    """The middle of a picture, cut out."""
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def patchify(pixels: Tensor, patch: int) -> tuple[Tensor, Tensor]:
    """[C, H, W] to patches [T, C * patch * patch], row by row, and their rows and columns, int64 [2, T]."""
    grid = pixels.unflatten(1, (-1, patch)).unflatten(3, (-1, patch))   # [C, h, p, w, p]
    _, height, _, width, _ = grid.shape
    patches = grid.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1).contiguous()
    places = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return patches, torch.stack(places).flatten(1)


def unpatchify(patches: Tensor, positions: Tensor, patch: int) -> Tensor:
    """The inverse of `patchify`."""
    height, width = (positions.amax(1) + 1).tolist()
    grid = patches.reshape(height, width, -1, patch, patch)
    return grid.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)


def read_settings(path: Path) -> Settings:
    """The settings in a file; UserError with its name if it is missing or wrong."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"no processor can be opened from {path.parent}: {error}") from None
    if not isinstance(given, dict) or given.get("processor_class") != SiTProcessor.__name__:
        raise UserError(f"{path}: not the settings of a {SiTProcessor.__name__}")
    unknown = [key for key in given if key not in KEYS]
    if unknown or not {"classes", "patch_size"} <= given.keys():
        raise UserError(f"{path}: the keys are {', '.join(given)} (legal: {', '.join(KEYS)})")
    return Settings(tuple(given["classes"]), given["patch_size"], given.get("image_size"))


def _check(settings: Settings, config: SiTConfig | None, where: str) -> None:
    classes, patch, size = settings.classes, settings.patch_size, settings.image_size
    if not classes or len(set(classes)) < len(classes):
        raise UserError(f"{where}: classes must be unlike names, at least one")
    if not isinstance(patch, int) or patch < 1:
        raise UserError(f"{where}: patch_size={patch} (legal: a whole number > 0)")
    if size is not None and (not isinstance(size, int) or size < 1 or size % patch):
        raise UserError(f"{where}: image_size={size} (legal: a multiple of patch_size={patch}, or null)")
    if config is None:
        return
    pairs = (
        ("patch_size", patch, config.patch_size),
        ("number of classes", len(classes), config.num_classes),
        ("number of channels", CHANNELS, config.in_channels),
    )
    for name, ours, models in pairs:
        if ours != models:
            raise UserError(f"{where}: its {name} is {ours}, the model's {models}")
    if size is not None and size > config.input_size:
        raise UserError(f"{where}: image_size={size} is more than the model's input_size={config.input_size}")
