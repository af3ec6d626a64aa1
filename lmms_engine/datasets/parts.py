"""A part of a turn: text, or a picture, clip or sound; and all the ways in which a row may name a medium.

A medium is a path, a URL, a `data:` URI, base64, bytes, or an object that holds one of these; a clip may also
be a list of pictures. This module touches no file and imports no torch.
"""

from __future__ import annotations

import base64
import binascii
import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from pydantic import BaseModel, ConfigDict

from lmms_engine.errors import BadRow
from lmms_engine.registry import nearest

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
SPAN_KEYS: dict[Kind, dict[str, str]] = {
    "image": {},
    "video": {"start": "start", "end": "end", "video_start": "start", "video_end": "end", "fps": "fps"},
    "audio": {"start": "start", "end": "end", "audio_start": "start", "audio_end": "end"},
}
MAX_SECONDS = 10**9  # of `start` and `end`; also the largest `fps`

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# How base64 of JPEG, PNG, GIF, RIFF (WebP, WAV, AVI) and TIFF begins, for strings without a `data:` prefix.
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
BASE64_MAGIC = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUkqA", "TU0AK")


class Frozen(BaseModel):
    """Data without further keys, never changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TextPart(Frozen):
    """A piece of text, kept character for character."""

    kind: Literal["text"] = "text"
    text: str


class MediaPart(Frozen):
    """A picture, clip or sound: exactly one of `path` (absolute), `url`, `bytes` and `frames`.

    frames: pictures, each a part of the kind image, that are a clip's frames in order.
    start, end: seconds of the span to use; fps: frames per second to sample, or at which `frames` were
    taken. None: the run's setting.
    """

    kind: Kind
    path: str | None = None
    url: str | None = None
    bytes: builtins.bytes | None = None
    frames: tuple[MediaPart, ...] | None = None
    start: float | None = None
    end: float | None = None
    fps: float | None = None

    @property
    def label(self) -> str:
        """How messages name it: its path, its URL, its size, or how many frames it is a list of."""
        if self.frames is not None:
            return f"list of {len(self.frames)} frames (the first: {self.frames[0].label})"
        url = (self.url or "").partition("?")[0]   # the query may hold a signature
        return self.path or url or f"{len(self.bytes or b'')} bytes"

    def each_file(self, change: Callable[[MediaPart], MediaPart]) -> MediaPart:
        """The part after `change`, or, if it is a list of frames, with each of them changed."""
        if self.frames is None:
            return change(self)
        return self.model_copy(update={"frames": tuple(map(change, self.frames))})


Part = TextPart | MediaPart


def media_part(kind: Kind, value: Any, where: str, data_folder: Path, span: dict[str, float]) -> MediaPart:
    """The medium that `value` names; BadRow, naming the key `where`, if it names none or two.

    span: as `span_of` gives it.
    """
    if isinstance(value, dict):
        value = _source_of(kind, present(value), where)
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise BadRow("media_missing", f"`{where}` holds a {kind} of 0 bytes")
        return MediaPart(kind=kind, bytes=bytes(value), **span)
    if isinstance(value, list) and kind == "video":
        if not value:
            raise BadRow("media_missing", f"`{where}` is a clip of no frames")
        frames = [media_part("image", f, f"{where}[{i}]", data_folder, {}) for i, f in enumerate(value)]
        return MediaPart(kind=kind, frames=tuple(frames), **span)
    if isinstance(value, list):
        raise BadRow("media_source", f"`{where}` is a list; a {kind} is one file, URL or bytes")
    if not isinstance(value, str):
        raise BadRow("media_missing", f"`{where}` names no {kind}: {kind_of(value)}")
    value = value if value.strip() else ""
    if not value:
        raise BadRow("media_missing", f"`{where}` names no {kind}: it is empty")
    if value.startswith("data:"):
        head, comma, body = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BadRow("media_source", f"`{where}` is a data: URL that is not base64")
        return MediaPart(kind=kind, bytes=_base64(body, where), **span)
    if len(value) >= 64 and value.startswith(BASE64_MAGIC) and BASE64.fullmatch(value):
        return MediaPart(kind=kind, bytes=_base64(value, where), **span)
    if value.startswith("file://"):
        return MediaPart(kind=kind, path=text_of(_file_path(value, where), f"`{where}`"), **span)
    text_of(value, f"`{where}`")
    if URL.match(value):
        return MediaPart(kind=kind, url=value, **span)
    place = str(data_folder / value)   # an address, where the rows lie elsewhere
    return MediaPart(kind=kind, **{"url" if URL.match(place) else "path": place}, **span)


def _source_of(kind: Kind, value: dict[str, Any], where: str) -> Any:
    """The source in an object: {"url"}, a table's {"bytes", "path"}, `input_audio`'s {"data", "format"}."""
    check_keys(value, ("url", "path", "bytes", "detail", "data", "format"), where)
    if value.get("detail", "auto") != "auto":
        raise BadRow("unknown_key", f"`{where}.detail` is {value['detail']!r} (legal: 'auto'): remove it; "
                     "`processor_config.extra_kwargs.image_max_pixels` says how large pictures are shown")
    if value.get("bytes"):
        return value["bytes"]
    if "data" in value:
        return _base64(value["data"], where) if isinstance(value["data"], str) else value["data"]
    found = [key for key in ("url", "path") if value.get(key)]
    if len(found) != 1:
        raise BadRow("media_missing", f"`{where}` names no {kind}: it needs one of url, path, bytes")
    return value[found[0]]


def _file_path(url: str, where: str) -> str:
    try:
        return unquote(urlparse(url).path)
    except ValueError as error:   # brackets that hold no address
        raise BadRow("media_source", f"`{where}` is not a URL ({error}): {kind_of(url)}") from None


def _base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow("media_source", f"`{where}` is not valid base64: {error}") from None


def span_of(kind: Kind, item: dict[str, Any], where: str) -> dict[str, float]:
    """`start`, `end` and `fps` of a part, where given."""
    span: dict[str, float] = {}
    for key, field in SPAN_KEYS[kind].items():
        if key not in item:
            continue
        value = item[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
            legal = f"a number from 0 to {MAX_SECONDS}"
            raise BadRow("media_span", f"`{where}.{key}` must be {legal}, got {kind_of(value)}")
        span[field] = float(value)
    if span.get("fps") == 0 or span.get("end", float("inf")) <= span.get("start", 0.0):
        raise BadRow("media_span", f"`{where}` asks for an empty span: {span}")
    return span


def dump_part(part: Part) -> dict[str, Any]:
    """The part in OpenAI chat form, JSON-ready."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    span = {key: value for key in ("start", "end", "fps") if (value := getattr(part, key)) is not None}
    if part.frames is not None:
        return {"type": part.kind, part.kind: [_address(frame) for frame in part.frames], **span}
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": _address(part)}, **span}


def _address(part: MediaPart) -> str:
    if part.bytes is not None:
        return "data:application/octet-stream;base64," + base64.b64encode(part.bytes).decode("ascii")
    return part.path or part.url or ""


# Checks that rows and parts share ----------------------------------------------------------------------


def present(obj: dict[str, Any]) -> dict[str, Any]:
    """The keys whose value is not null."""
    return {key: value for key, value in obj.items() if value is not None}


def kind_of(value: object) -> str:
    """A value as messages show it: its type and its beginning."""
    try:
        text = repr(value)
    except RecursionError:
        text = "of many levels"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def check_keys(obj: dict[str, Any], legal: tuple[str, ...], where: str) -> None:
    """Raises BadRow for the first key that is not legal."""
    for key in obj:
        if key not in legal:
            hint = nearest(str(key), list(legal))
            if where == "row" and not hint:
                hint = "; `data-prep convert` reads rows of other forms, `meta` takes what only you need"
            raise BadRow("unknown_key", f"unknown key '{key}' in {where} (legal: {', '.join(legal)}){hint}")


def text_of(value: Any, where: str) -> str:
    """`value`, if it is a string that UTF-8 can hold; else BadRow."""
    if not isinstance(value, str):
        raise BadRow("content", f"{where} must be a string, got {kind_of(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{where} holds half of a surrogate pair at character {error.start}"
        raise BadRow("text_invalid", message) from None
    return value
