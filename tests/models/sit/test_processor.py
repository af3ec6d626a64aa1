"""Rows to patches and back, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lmms_engine.datasets.collate import collate
from lmms_engine.datasets.processor import PROCESSORS
from lmms_engine.datasets.schema import parse_row
from lmms_engine.errors import BadRow, UserError
from lmms_engine.models.sit.modeling import SiTConfig
from lmms_engine.models.sit.processor import Settings, SiTProcessor, patchify, unpatchify
from lmms_engine.segments import RowRef

REF = RowRef("here", 0, 0, "r")
CLASSES = ("cat", "dog", "7")
CONFIG = SiTConfig(input_size=16, num_classes=3, hidden_size=32, depth=1, num_heads=2)


def row(name: str, path: str, folder: Path, **changes: Any):
    messages = [
        {"role": "user", "content": name},
        {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": path}}]},
    ]
    return parse_row({"messages": messages, **changes}, folder)


def save(folder: Path, width: int, height: int, name: str = "a.png") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(folder / name)
    return image


def processor(**settings: Any) -> SiTProcessor:
    return SiTProcessor(Settings(CLASSES, 2, **settings), largest=16)


def test_a_row_becomes_patches_and_back(tmp_path: Path) -> None:
    image = save(tmp_path, 12, 8)
    made = processor()
    sample = made(row("dog", "a.png", tmp_path), REF)
    assert (len(sample), sample.supervised, sample.input_ids, sample.labels) == (24, 24, None, None)
    assert sample.media["class_labels"].tolist() == [1]
    pixels = np.asarray(image)
    third_row_fifth_column = sample.media["pixel_values"][2 * 6 + 4].reshape(3, 2, 2)
    assert sample.position_ids[:, 2 * 6 + 4].tolist() == [2, 4]
    want = torch.from_numpy(pixels[4:6, 8:10] / 127.5 - 1).permute(2, 0, 1).float()
    torch.testing.assert_close(third_row_fifth_column, want)
    batch = collate([sample], made)
    ((name, again),) = made.pictures(batch, batch.media["pixel_values"])
    assert name == "dog"
    assert np.array_equal(again.numpy(), pixels)
    assert made.describe(batch, 0) == "dog, 12×8 pixels"


def test_patches_are_those_of_a_convolution() -> None:
    pixels = torch.randn(3, 8, 12)
    conv = torch.nn.Conv2d(3, 5, 4, stride=4, bias=False)
    patches, positions = patchify(pixels, 4)
    torch.testing.assert_close(patches @ conv.weight.flatten(1).T, conv(pixels[None])[0].flatten(1).T)
    assert torch.equal(unpatchify(patches, positions, 4), pixels)


def test_uneven_edges_are_cut_in_the_middle(tmp_path: Path) -> None:
    image = save(tmp_path, 11, 5)
    sample = processor()(row("cat", "a.png", tmp_path), REF)
    picture = unpatchify(sample.media["pixel_values"], sample.position_ids, 2)
    want = torch.from_numpy(np.asarray(image)[0:4, 0:10] / 127.5 - 1).permute(2, 0, 1).float()
    torch.testing.assert_close(picture, want)


def test_image_size_scales_the_shorter_side_and_cuts_a_square(tmp_path: Path) -> None:
    Image.new("RGB", (300, 100), "red").save(tmp_path / "a.png")
    sample = processor(image_size=8)(row("cat", "a.png", tmp_path), REF)
    assert len(sample) == 16
    assert sample.position_ids.amax(1).tolist() == [3, 3]


def test_a_class_by_number_unless_it_is_a_name(tmp_path: Path) -> None:
    save(tmp_path, 4, 4)
    made = processor()
    numbers = {name: made(row(name, "a.png", tmp_path), REF).media["class_labels"].item() for name in "017"}
    assert numbers == {"0": 0, "1": 1, "7": 2}


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("cow", {}, "class"),
        ("3", {}, "class"),
        ("cat", {"system": "draw"}, "form"),
        ("cat", {"messages": [{"role": "user", "content": "cat"}]}, "form"),
        ("", {}, "form"),
    ],
)
def test_rows_that_are_no_class_and_picture(name: str, changes: dict, kind: str, tmp_path: Path) -> None:
    save(tmp_path, 4, 4)
    with pytest.raises(BadRow) as caught:
        processor()(row(name, "a.png", tmp_path, **changes), REF)
    assert caught.value.kind == kind


@pytest.mark.parametrize(("size", "kind"), [((18, 4), "media_too_large"), ((1, 4), "media_too_small")])
def test_pictures_that_do_not_fit(size: tuple[int, int], kind: str, tmp_path: Path) -> None:
    save(tmp_path, *size)
    with pytest.raises(BadRow) as caught:
        processor()(row("cat", "a.png", tmp_path), REF)
    assert caught.value.kind == kind


def test_pack_without_rows_is_one_patch_of_weight_0() -> None:
    batch = collate([], processor())
    assert (batch.num_tokens, batch.segments.lengths(), batch.rows) == (0, [1], ())
    assert batch.loss_weights.tolist() == [0.0]


def test_folder_opens_and_is_written_back(tmp_path: Path) -> None:
    processor().save_pretrained(tmp_path / "a")
    made = PROCESSORS.get("sit").from_pretrained(
        tmp_path / "a", config=CONFIG, max_length=9, fps=1.0, video_max_pixels=1, video_max_frames=1,
        extra_kwargs={"image_size": 8}, overlong="drop",
    )  # fmt: skip
    assert made.settings == Settings(CLASSES, 2, 8)
    made.save_pretrained(tmp_path / "b")
    again = SiTProcessor.from_pretrained(tmp_path / "b", config=CONFIG)
    assert again.fingerprint == made.fingerprint != processor().fingerprint


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (None, {}, "no processor can be opened from"),
        ({"processor_class": "Other"}, {}, "not the settings of a SiTProcessor"),
        ({"size": 3}, {}, r"the keys are .* \(legal: "),
        ({"patch_size": 4}, {}, "its patch_size is 4, the model's 2"),
        ({"classes": ["cat"]}, {}, "its number of classes is 1, the model's 3"),
        ({"classes": ["cat", "cat", "dog"]}, {}, "classes must be unlike"),
        ({"image_size": 3}, {}, "image_size=3"),
        ({"image_size": 32}, {}, "image_size=32 is more than the model's input_size=16"),
        ({}, {"extra_kwargs": {"image_siz": 8}}, "image_siz: unknown key .* did you mean 'image_size'"),
        ({}, {"overlong": "truncate"}, "overlong=truncate: a picture cannot be cut"),
    ],
)
def test_refusals(content: dict | None, options: dict, said: str, tmp_path: Path) -> None:
    if content is not None:
        base = {"processor_class": "SiTProcessor", "classes": list(CLASSES), "patch_size": 2}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(base | content))
    with pytest.raises(UserError, match=said):
        SiTProcessor.from_pretrained(tmp_path, config=CONFIG, **options)
