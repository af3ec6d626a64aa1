"""Files that lie elsewhere (s3, gs, hf, https), read in ranges through fsspec and a cache of blocks.

    files = find_remote("s3://bucket/rows/*.parquet", "auto", CacheSettings())
    with files[0].open() as stream: ...      # seekable; fetches what is read and not in the cache

Only the first and the last 64 KiB of each file are fetched at once, which is what fingerprints and Parquet's
footers need. What fails in passing is tried again, with growing pauses; what will not get better, a name that
does not exist or a right that is missing, is a UserError that says what to do.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from lmms_engine.datasets.sources.cache import BlockCache, CacheSettings
from lmms_engine.datasets.sources.files import HEAD_BYTES, mark_of
from lmms_engine.errors import UserError

BLOCK_BYTES = 1024 * 1024
MAX_REQUEST_BYTES = 8 * BLOCK_BYTES
ATTEMPTS = 6
PAUSE_SECONDS = 0.5   # before the second attempt; doubles from one to the next
SILENCE_SECONDS = 60  # of a connection on which nothing arrives
BUFFER_BYTES = 64 * 1024
PERMANENT = (
    FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError, TypeError
)  # fmt: skip
PASSING_STATUS = (408, 425, 429)
VERSION_KEYS = ("etag", "last-modified", "lastmodified", "versionid", "generation", "md5hash", "blob_id")

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFolder:
    """The address of a folder; with a relative path, that of a medium. Absolute paths stay themselves."""

    url: str

    def __truediv__(self, path: str) -> RemoteFolder | Path:
        if path.startswith("/"):
            return Path(path)
        return RemoteFolder(f"{self.url.rstrip('/')}/{path}" if path else self.url)

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:   # `Path(folder) / "/absolute"` is then the absolute path
        return self.url


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address. version: what its server says of its content, so that no block of an older one
    is taken from the cache."""

    url: str
    size: int
    version: str
    cache: CacheSettings

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def suffix(self) -> str:
        return PurePosixPath(shown(self.url)).suffix.lower()

    @property
    def folder(self) -> RemoteFolder:
        return RemoteFolder(shown(self.url).rpartition("/")[0])

    @property
    def where(self) -> str:
        return shown(self.url)

    def open(self) -> BinaryIO:
        return io.BufferedReader(_Ranges(self), BUFFER_BYTES)

    def mark(self) -> str:
        return mark_of(self)


def shown(url: str) -> str:
    """An address without its query, which may hold a signature."""
    return url.partition("?")[0] if url.startswith("http") else url


def version_of(info: dict[str, Any]) -> str:
    """What a server says of a file's content, from fsspec's description of it."""
    found = {key.lower(): str(value) for key, value in info.items() if key.lower() in VERSION_KEYS}
    return repr(sorted(found.items()))


class _Ranges(io.RawIOBase):
    """The bytes of a file, block by block."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._cache = _cache_of(file.cache, os.getpid())
        self._key = hashlib.sha256(f"{file.url}\n{file.size}\n{file.version}".encode()).hexdigest()[:40]
        self._at = 0
        self._held: tuple[int, bytes] = (-1, b"")
        self._remote: Any = None
        # The two ends are blocks of their own: they are all that is read of every file.
        middle = range(HEAD_BYTES, max(file.size - HEAD_BYTES, HEAD_BYTES), BLOCK_BYTES)
        self._starts = sorted({0, *middle, *([file.size - HEAD_BYTES] if file.size > 2 * HEAD_BYTES else ())})

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._file.size)
        begin = self._at
        while self._at < stop:
            number = bisect.bisect_right(self._starts, self._at) - 1
            data = self._block(number, stop)
            first = self._at - self._starts[number]
            part = data[first : first + stop - self._at]
            view[self._at - begin : self._at - begin + len(part)] = part
            self._at += len(part)
        return max(stop - begin, 0)

    def close(self) -> None:
        self._forget()
        super().close()

    def _block(self, number: int, stop: int) -> bytes:
        """A block; if it has to be fetched, together with those up to `stop` that are not here either."""
        if self._held[0] == number:
            return self._held[1]
        data = self._cache.get(self._key, number, self._length(number))
        if data is None:
            data = self._fetch_from(number, stop)
        self._held = (number, data)
        return data

    def _length(self, number: int) -> int:
        return self._end(number) - self._starts[number]

    def _end(self, number: int) -> int:
        return self._starts[number + 1] if number + 1 < len(self._starts) else self._file.size

    def _fetch_from(self, number: int, stop: int) -> bytes:
        start, last = self._starts[number], number
        while last + 1 < len(self._starts) and self._starts[last + 1] < stop:
            following = last + 1
            if self._end(following) - start > MAX_REQUEST_BYTES:
                break
            if self._cache.get(self._key, following, self._length(following)) is not None:
                break
            last = following
        data = patiently(self._file.url, lambda: self._fetch(start, self._end(last)))
        for each in range(number, last + 1):
            begin = self._starts[each] - start
            self._cache.put(self._key, each, data[begin : begin + self._length(each)])
        return data[: self._length(number)]

    def _fetch(self, start: int, stop: int) -> bytes:
        try:
            if self._remote is None:
                files, path = file_system(self._file.url)
                if version_of(files.info(path)) != self._file.version:
                    raise UserError(
                        f"{self._file} has changed since the run began: blocks of both versions would be"
                        " mixed; begin again, or put the old file back"
                    )
                self._remote = files.open(path, "rb", cache_type="none", block_size=BLOCK_BYTES)
            self._remote.seek(start)
            data = self._remote.read(stop - start)
        except BaseException:
            self._forget()   # the next attempt begins with a fresh connection
            raise
        if len(data) != stop - start:
            self._forget()
            raise OSError(f"{len(data)} of {stop - start} bytes arrived")
        return data

    def _forget(self) -> None:
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()


@lru_cache(maxsize=8)
def _cache_of(settings: CacheSettings, process: int) -> BlockCache:
    return BlockCache(settings)


# Servers ---------------------------------------------------------------------------------------------


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it) of an address; one system for each process and kind of address."""
    from fsspec.core import url_to_fs

    scheme = url.partition(":")[0]
    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        import aiohttp

        wait = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
        options = {"client_kwargs": {"timeout": wait}}
    return url_to_fs(url, **options)


def patiently(url: str, call: Callable[[], T]) -> T:
    """What `call` gives, tried again where it fails in passing; UserError says why there is nothing."""
    failure: BaseException | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.8, 1.2))
        try:
            return call()
        except UserError:
            raise
        except Exception as error:   # each kind of store has errors of its own
            failure = _cause(error)
            if not _passing(failure):
                raise refusal(url, failure) from error
    raise UserError(
        f"{shown(url)} could not be read in {ATTEMPTS} attempts ({_named(failure)}): check the network and"
        " the server; a run that ended goes on from its last checkpoint"
    ) from failure


def _cause(error: BaseException) -> BaseException:
    """fsspec and the hub's client call many failures "not found"; the true one is the cause."""
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    """The HTTP status of a failure, if it is one."""
    response = getattr(error, "response", None)
    for value in (getattr(error, "status", None), getattr(response, "status_code", None)):
        if isinstance(value, int):
            return value
    return None


def _passing(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in PASSING_STATUS
    return not (isinstance(error, PERMANENT) or "Credential" in type(error).__name__)


RIGHTS = {
    "hf": "log in (`hf auth login`, or HF_TOKEN) with an account that may read it",
    "s3": "give keys by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role; for a public bucket"
    " FSSPEC_S3_ANON=true",
    "gs": "give GOOGLE_APPLICATION_CREDENTIALS, or for a public bucket FSSPEC_GS_TOKEN=anon",
    "https": "give an address that is signed, or download it",
}


def refusal(url: str, error: BaseException) -> UserError:
    """Why an address cannot be read, and what to do."""
    scheme = url.partition(":")[0] if "://" in url else "hf"
    address, status, name = shown(url), _status(error), type(error).__name__
    if isinstance(error, ImportError):
        return UserError(f"{address}: {error}; install the extra `cloud`: pip install 'lmms-engine[cloud]'")
    if "Offline" in name:
        return offline(address)
    if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in name:
        rights = RIGHTS.get({"http": "https", "gcs": "gs"}.get(scheme, scheme), "")
        return UserError(f"{address}: no permission to read it ({_named(error)}): {rights}")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        private = "; if it is private, " + RIGHTS["hf"] if scheme == "hf" else ""
        return UserError(f"{address} does not exist ({_named(error)}): check its spelling{private}")
    if scheme in ("http", "https") and isinstance(error, ValueError):
        return UserError(
            f"{address}: the server does not give parts of files (HTTP ranges; {_named(error)}): download the"
            " file and give its path"
        )
    return UserError(f"{address} cannot be read: {_named(error)}")


def offline(address: str) -> UserError:
    """What to say of an address of the hub where the hub is switched off."""
    return UserError(
        f"{address}: the hub is switched off by HF_HUB_OFFLINE; unset it, or download the set elsewhere"
        " (`hf download --repo-type dataset … --local-dir data/mine`) and give the folder"
    )


def _named(error: BaseException | None) -> str:
    text = re.sub(r"(https?://[^\s?]+)\?[^\s'\")]*", r"\1", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:200]}"
