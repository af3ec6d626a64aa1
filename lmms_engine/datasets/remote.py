"""One small object, a picture, clip or sound, from an address: whole, within a time, or a BadRow.

    data = fetch("https://host/a.png", Deadline("a.png"))

http and https are read by the standard library; s3, gs and hf by fsspec, with the packages of the extra
`cloud`. A server that fails or cuts the connection is asked again, with growing pauses; one that answers no
is not. The work runs in a thread of its own, so that nothing a server does, or does not do, can hold a worker
longer than the medium's time.
"""

from __future__ import annotations

import http.client
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar

from lmms_engine.datasets.limits import Deadline
from lmms_engine.errors import BadRow, UserError

WEB = ("http", "https")
STORES = ("s3", "gs", "hf")
MAX_BYTES = 1 << 30     # of an object, which lies in memory
BLOCK_BYTES = 1 << 20   # the time is looked at after each
SILENCE_SECONDS = 20.0  # of a connection on which nothing arrives
ATTEMPTS = 4
PAUSE_SECONDS = 0.5     # before the second attempt; doubles from one to the next

T = TypeVar("T")


class _Refused(Exception):
    """The server has answered, and asking again would change nothing."""


def fetch(url: str, deadline: Deadline) -> bytes:
    """The object at `url`. Raises BadRow: `media_missing`, `media_too_large`, `timeout`; UserError if the
    packages for this kind of address are not installed."""
    scheme, name = url.partition(":")[0].lower(), url.partition("?")[0]   # a query may hold a signature
    read = _read_web if scheme in WEB else _read_store
    reason: object = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(min(PAUSE_SECONDS * 2 ** (attempt - 1), deadline.left))
        deadline.check()
        try:
            return _in_time(lambda: read(url, deadline), deadline)
        except (BadRow, UserError):
            raise
        except _Refused as refusal:
            reason = refusal
            break
        except Exception as error:   # each kind of store has errors of its own
            reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    hint = "see that the address is right and its server answers, or keep a copy beside the rows"
    raise BadRow("media_missing", f"cannot fetch {name}: {reason}; {hint}")


def _in_time(call: Callable[[], T], deadline: Deadline) -> T:
    """What `call` gives. When the time is over the thread is left alone: it ends after its next block."""
    done: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((True, call()))
        except BaseException as error:   # raised again in the caller's thread
            done.put((False, error))

    threading.Thread(target=run, name="fetch", daemon=True).start()
    try:
        good, value = done.get(timeout=deadline.left)
    except queue.Empty:
        raise deadline.passed() from None
    if not good:
        raise value
    return value


def _read_web(url: str, deadline: Deadline) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "lmms-engine"})
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as response:
            expected = response.headers.get("Content-Length")
            data = _joined(lambda: response.read1(BLOCK_BYTES), deadline)
    except urllib.error.HTTPError as error:
        answer = f"HTTP {error.code} {error.reason}"
        if error.code < 500 and error.code not in (408, 425, 429):
            raise _Refused(answer) from None
        raise OSError(answer) from None
    except (ValueError, http.client.InvalidURL) as error:   # a malformed address or answer
        if isinstance(error, BadRow):
            raise
        raise _Refused(error) from None
    if not data or (expected is not None and len(data) < int(expected)):
        raise OSError(f"{len(data)} of {expected} bytes arrived")
    return data


def _read_store(url: str, deadline: Deadline) -> bytes:
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{deadline.name} cannot be read: {error}. Install the extra `cloud`") from None
    try:
        with files.open(path, "rb", block_size=BLOCK_BYTES) as stream:
            data = _joined(lambda: stream.read(BLOCK_BYTES), deadline)
    except (FileNotFoundError, PermissionError) as error:
        raise _Refused(f"{type(error).__name__}: {error}") from None
    except Exception as error:   # the clients' own types, of packages that may not be there
        if "Credentials" not in type(error).__name__:
            raise
        hint = "its client looks for them in the environment and in files of its own"
        raise UserError(f"{deadline.name} cannot be read: {error}; {hint}") from None
    if not data:
        raise _Refused("it is empty")
    return data


def _joined(read: Callable[[], bytes], deadline: Deadline) -> bytes:
    data = bytearray()
    while block := read():
        data += block
        if len(data) > MAX_BYTES:
            raise BadRow("media_too_large", f"{deadline.name} is larger than {MAX_BYTES:,} bytes")
        deadline.check()
    return bytes(data)
