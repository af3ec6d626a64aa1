"""Bytes to pictures: fetching a medium from path, URL or memory, and decoding a still picture to RGB.

    image = load_picture(part)        # PIL image, mode RGB, upright

What a model sees is decided here, once, for every source: the camera's orientation tag is applied,
transparent pixels are composited on white, 16-bit greys are scaled (not clipped) to 8 bits, and a file of
several frames or pages gives its first. Anything that cannot be decoded whole raises BadRow; a picture is
never half shown.
"""

from __future__ import annotations

import base64
import binascii
import struct
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from lmms_engine.datasets.limits import Deadline, check_file, check_size
from lmms_engine.datasets.remote import STORES, WEB, fetch
from lmms_engine.errors import BadRow

if TYPE_CHECKING:
    from lmms_engine.datasets.schema import MediaPart

BACKGROUND = (255, 255, 255)

# What Pillow's plugins raise on files that are cut or garbled; RuntimeError is AVIF's.
CORRUPT = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, RuntimeError,
    ArithmeticError, SystemError, struct.error, zlib.error,
)  # fmt: skip


def read_media(part: MediaPart, deadline: Deadline | None = None) -> bytes | Path:
    """The part's bytes, or the path of an existing, non-empty local file. Missing raises BadRow.

    deadline: of the medium, if its time runs already.
    """
    if part.bytes is not None:
        return part.bytes
    if part.url is not None:
        return _read_url(part.url, part.kind, deadline or Deadline(part.label))
    path = Path(part.path or "")
    check_file(path, part.kind)
    return path


def load_picture(part: MediaPart, deadline: Deadline | None = None) -> Image.Image:
    """The still picture in `part` as an upright RGB image."""
    deadline = deadline or Deadline(part.label)
    return decode_picture(read_media(part, deadline), part.label, deadline)


def decode_picture(source: bytes | Path, name: str, deadline: Deadline | None = None) -> Image.Image:
    """Decodes an encoded picture to upright RGB.

    name: what messages call it. Raises BadRow: `media_corrupt`, `media_too_large`, `aspect_ratio`,
    `timeout`.
    """
    deadline = deadline or Deadline(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")   # on size: our own limit stands below; on tags: they are unused
            with deadline.open(source) as file, Image.open(file) as image:
                check_size(*image.size, name)
                image.seek(0)
                image.load()
                ImageOps.exif_transpose(image, in_place=True)   # else it copies, also where nothing turns
                return to_rgb(image)
    except (Image.DecompressionBombError, MemoryError) as error:
        raise BadRow("media_too_large", f"picture {name} is too large to decode: {error}") from None
    except CORRUPT as error:
        if isinstance(error, BadRow):
            raise
        deadline.check()   # raised while a decoder was reading, it comes out as something else
        if isinstance(error, UnidentifiedImageError):   # its text names the object that was read
            error = ValueError("no picture format that is known")
        raise BadRow("media_corrupt", f"picture {name} cannot be decoded: {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as RGB.

    Transparency is composited on white. Integer greys of 16 bits are divided by 257; 32-bit ones too if they
    fit 16 bits and exceed 8. Floats in 0..1 are multiplied by 255. Wider values are scaled so that the
    picture's own minimum and maximum become 0 and 255.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_8_bit(np.asarray(image), image.mode)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (*BACKGROUND, 255)), rgba).convert("RGB")
    return image.convert("RGB")


def _to_8_bit(values: np.ndarray, mode: str) -> np.ndarray:
    floats = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(floats.min()), float(floats.max())
    if mode.startswith("I;16"):
        floats /= 257.0
    elif mode == "F" and low >= 0 and high <= 1:
        floats *= 255.0
    elif low < 0 or high > 65535 or (mode == "F" and high > 255):
        floats = (floats - low) * (255.0 / (high - low))
    elif high > 255:
        floats /= 257.0
    return np.clip(np.rint(floats), 0, 255).astype(np.uint8)


# Fetching --------------------------------------------------------------------------------------------


def _read_url(url: str, kind: str, deadline: Deadline) -> bytes | Path:
    if url.startswith("data:"):
        return _read_data_url(url)
    scheme = url.partition(":")[0].lower()
    if scheme == "file":
        path = Path(unquote(urlparse(url).path))
        check_file(path, kind)
        return path
    if scheme not in (*WEB, *STORES):
        legal = ", ".join((*WEB, *STORES, "file", "data"))
        raise BadRow("media_missing", f"cannot read {url}: scheme '{scheme}' (legal: {legal})")
    return fetch(url, deadline)


def _read_data_url(url: str) -> bytes:
    head, _, body = url.partition(",")
    if not head.endswith(";base64"):
        raise BadRow("media_corrupt", f"the data: URL beginning {head[:40]} is not base64")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow("media_corrupt", f"the data: URL beginning {head[:40]} is not base64: {error}") from None
