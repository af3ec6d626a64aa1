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
import io
import struct
import time
import urllib.error
import urllib.request
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import numpy as np
from PIL import Image, ImageOps

from lmms_engine.errors import BadRow

if TYPE_CHECKING:
    from lmms_engine.datasets.schema import MediaPart

MAX_ASPECT_RATIO = 200             # the resize rule of the Qwen vision processors refuses more
MAX_PICTURE_PIXELS = 178_956_970   # 512 MiB of RGB: beyond it a file is a decompression bomb, not a picture
MAX_DOWNLOAD_BYTES = 1 << 30
URL_TIMEOUT_SECONDS = 20.0
URL_ATTEMPTS = 3
BACKGROUND = (255, 255, 255)

# What Pillow's plugins raise on files that are cut or garbled.
CORRUPT = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error
)  # fmt: skip


def read_media(part: MediaPart) -> bytes | Path:
    """The part's bytes, or the path of an existing, non-empty local file. Missing raises BadRow."""
    if part.bytes is not None:
        return part.bytes
    if part.url is not None:
        return _read_url(part.url)
    path = Path(part.path or "")
    try:
        if not path.is_file():
            raise BadRow("media_missing", f"{part.kind} file does not exist: {path}")
        if path.stat().st_size == 0:
            raise BadRow("media_missing", f"{part.kind} file is empty (0 bytes): {path}")
    except (OSError, ValueError) as error:   # no permission, a name too long, a NUL in the name
        if isinstance(error, BadRow):
            raise
        raise BadRow("media_missing", f"{part.kind} file cannot be read: {path} ({error})") from None
    return path


def load_picture(part: MediaPart) -> Image.Image:
    """The still picture in `part` as an upright RGB image."""
    source = read_media(part)
    return decode_picture(source, part.label)


def decode_picture(source: bytes | Path, name: str) -> Image.Image:
    """Decodes an encoded picture to upright RGB.

    name: what messages call it. Raises BadRow: `media_corrupt`, `media_too_large`, `aspect_ratio`.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")   # on size: our own limit stands below; on tags: they are unused
            with Image.open(file) as image:
                check_size(*image.size, name)
                image.seek(0)
                image.load()
                return to_rgb(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombError, MemoryError) as error:
        raise BadRow("media_too_large", f"picture {name} is too large to decode: {error}") from None
    except CORRUPT as error:
        if isinstance(error, BadRow):
            raise
        message = f"picture {name} cannot be decoded ({type(error).__name__}: {error})"
        raise BadRow("media_corrupt", message) from None


def check_size(width: int, height: int, name: str) -> None:
    """Raises BadRow if a picture or frame of this size cannot be used: too long and thin, or too large."""
    if width * height > MAX_PICTURE_PIXELS:
        limit = f"{MAX_PICTURE_PIXELS:,} pixels"
        raise BadRow("media_too_large", f"{name} has {width}×{height} pixels (legal: up to {limit})")
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise BadRow(
            "aspect_ratio",
            f"{name} is {width}×{height}: aspect ratio {ratio:.1f} (legal: up to {MAX_ASPECT_RATIO})",
        )


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


def _read_url(url: str) -> bytes:
    if url.startswith("data:"):
        return _read_data_url(url)
    scheme = url.partition(":")[0].lower()
    if scheme == "file":
        path = Path(unquote(urlparse(url).path))
        if not path.is_file():
            raise BadRow("media_missing", f"file does not exist: {path}")
        return path.read_bytes()
    if scheme not in ("http", "https"):
        legal = "http, https, file, data"
        raise BadRow("media_missing", f"cannot read {url}: scheme '{scheme}' (legal: {legal})")
    reason: object = None
    for attempt in range(URL_ATTEMPTS):
        try:
            return _download(url)
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code not in (408, 429):
                break   # the server has answered: asking again changes nothing
        except (OSError, ValueError) as error:   # no route, time-out, connection cut, malformed URL
            if isinstance(error, BadRow):
                raise
            reason = error
        if attempt + 1 < URL_ATTEMPTS:
            time.sleep(0.5 * 2**attempt)
    raise BadRow("media_missing", f"cannot fetch {url}: {reason}")


def _download(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "lmms-engine"})
    with urllib.request.urlopen(request, timeout=URL_TIMEOUT_SECONDS) as response:
        expected = response.headers.get("Content-Length")
        data = response.read(MAX_DOWNLOAD_BYTES + 1)
    if len(data) > MAX_DOWNLOAD_BYTES:
        raise BadRow("media_too_large", f"{url} is larger than {MAX_DOWNLOAD_BYTES:,} bytes")
    if not data or (expected is not None and len(data) < int(expected)):
        raise OSError(f"{len(data)} of {expected} bytes arrived")
    return data


def _read_data_url(url: str) -> bytes:
    head, _, body = url.partition(",")
    if not head.endswith(";base64"):
        raise BadRow("media_corrupt", f"the data: URL beginning {head[:40]} is not base64")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow("media_corrupt", f"the data: URL beginning {head[:40]} is not base64: {error}") from None
