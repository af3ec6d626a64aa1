"""How long one medium may take, and how large it may be: what keeps a single file from stopping a worker.

    with media_time_limit(60.0):          # for all media that are opened inside
        deadline = Deadline("a.png")      # one for each medium; its time begins here
        ...
        deadline.check()                  # BadRow `timeout` once the time is over

Time is looked at between the reads of a picture's file, the packets and frames of a clip or sound, and the
blocks of a download, and by FFmpeg between its own reads. A decoder at work is not interrupted; it ends by
itself, because sizes are held against the limits below before anything of that size is allocated. Files that
can block a reader for ever, such as pipes and devices, are not opened at all.
"""

from __future__ import annotations

import io
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from lmms_engine.errors import BadRow

DEFAULT_SECONDS = 180.0            # of dataset_config.media_timeout_s, and outside of a run
MAX_PICTURE_PIXELS = 178_956_970   # 512 MiB of RGB: beyond it a file is a decompression bomb, not a picture
MAX_FRAME_PIXELS = 8192 * 8192     # of a clip, whose decoder holds up to 17 frames at once
# Given to the library's decoders too: merely to open a file, it decodes the first frames of every stream.
DECODER_OPTIONS = {"max_pixels": str(MAX_FRAME_PIXELS), "max_samples": str(1 << 22)}
MAX_CLIP_FRAMES = 1 << 21          # 24 hours at 24 a second; their time stamps lie in memory
MAX_ASPECT_RATIO = 200             # the resize rule of the Qwen vision processors refuses more

_seconds: ContextVar[float] = ContextVar("media_timeout_s", default=DEFAULT_SECONDS)


def reason(error: BaseException) -> str:
    """What an error says, without the number that FFmpeg puts before it."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def media_time_limit(seconds: float) -> Iterator[None]:
    """Media opened inside may take so long, each."""
    token = _seconds.set(seconds)
    try:
        yield
    finally:
        _seconds.reset(token)


class Deadline:
    """When one medium must be ready. name: what messages call it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = _seconds.get()
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def calls(self) -> tuple[float, float]:
        """For PyAV's `timeout`: what FFmpeg itself holds opening and reading to. A playlist that is never
        finished would keep one call busy for ever. A call that is ended so may look like the file's end:
        `check` after it."""
        return (max(self.left, 0.001),) * 2

    def check(self) -> None:
        """Raises BadRow `timeout` if the time is over."""
        if time.monotonic() > self._end:
            raise self.passed()

    def passed(self) -> BadRow:
        """What is raised when the time is over."""
        limit = f"dataset_config.media_timeout_s={self.seconds:g}"
        return BadRow("timeout", f"{self.name} was not decoded in time: longer than {limit} seconds")

    def open(self, source: bytes | Path) -> BinaryIO:
        """A file whose every read looks at the time."""
        if isinstance(source, bytes):
            return _WatchedBytes(source, self)
        return _WatchedFile(source, self)


class _WatchedBytes(io.BytesIO):
    def __init__(self, data: bytes, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        self._deadline.check()
        return super().read(size)


class _WatchedFile(io.BufferedReader):
    def __init__(self, path: Path, deadline: Deadline) -> None:
        super().__init__(io.FileIO(path))
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        self._deadline.check()
        return super().read(size)


def check_file(path: Path, kind: str) -> None:
    """Raises BadRow `media_missing` unless `path` is a regular file with something in it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise BadRow("media_missing", f"{kind} file does not exist: {path}") from None
    except (OSError, ValueError) as error:   # no permission, a name too long, a NUL in the name
        raise BadRow("media_missing", f"{kind} file cannot be read: {path} ({error})") from None
    if not stat.S_ISREG(found.st_mode):   # opening a pipe would wait for its writer for ever
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise BadRow("media_missing", f"{kind} file is no file but {what}: {path}")
    if found.st_size == 0:
        raise BadRow("media_missing", f"{kind} file is empty (0 bytes): {path}")


def check_size(width: int, height: int, name: str, most: int = MAX_PICTURE_PIXELS) -> None:
    """Raises BadRow if a picture or frame of this size cannot be used: too long and thin, or too large."""
    if width * height > most:
        limit = f"{most:,} pixels"
        raise BadRow("media_too_large", f"{name} has {width}×{height} pixels (legal: up to {limit})")
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise BadRow(
            "aspect_ratio",
            f"{name} is {width}×{height}: aspect ratio {ratio:.1f} (legal: up to {MAX_ASPECT_RATIO})",
        )
