"""Media behind addresses: whole, in time, asked for again where that helps, or a bad row that says why."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import _registry as registered

from lmms_engine.datasets import remote
from lmms_engine.datasets.limits import Deadline, media_time_limit
from lmms_engine.datasets.media import load_picture
from lmms_engine.datasets.remote import ATTEMPTS, fetch
from lmms_engine.datasets.schema import MediaPart
from lmms_engine.errors import BadRow, UserError

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A server on this machine; `answers` holds what each request gets, the last one for all that follow."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(f"{self.command} {self.path}")
                waiting = outer.answers
                (waiting.pop(0) if len(waiting) > 1 else waiting[0])(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def say(status: int, body: bytes = b"", length: int | None = None) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    return answer


def hang_up(request: BaseHTTPRequestHandler) -> None:
    request.connection.shutdown(socket.SHUT_RDWR)


def drip(request: BaseHTTPRequestHandler) -> None:
    """A byte now and then, so that no single read takes long."""
    request.send_response(200)
    request.end_headers()
    for _ in range(200):
        try:
            request.wfile.write(b"x")
            request.wfile.flush()
        except OSError:
            return
        time.sleep(0.05)


def drip_headers(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for i in range(60):
        try:
            request.wfile.write(b"X-%d: y\r\n" % i)
            request.wfile.flush()
        except OSError:
            return
        time.sleep(0.05)


def get(url: str, seconds: float = 20.0) -> bytes:
    with media_time_limit(seconds):
        return fetch(url, Deadline(url))


def test_a_server_that_recovers_is_asked_again(server: Server) -> None:
    data = bytes(range(256)) * 10_000   # more than one block
    server.answers = [say(503), hang_up, say(200, data[:100], len(data)), say(200, data)]
    assert get(server.url + "/a.png") == data
    assert len(server.asked) == ATTEMPTS == 4


@pytest.mark.parametrize(("status", "attempts"), [(404, 1), (403, 1), (429, ATTEMPTS), (500, ATTEMPTS)])
def test_a_server_that_says_no(server: Server, status: int, attempts: int) -> None:
    server.answers = [say(status)]
    with pytest.raises(BadRow, match=f"{server.url}.*HTTP {status}.*; see that the") as caught:
        get(server.url + "/a.png")
    assert caught.value.kind == "media_missing"
    assert len(server.asked) == attempts


@pytest.mark.parametrize("answer", [hang_up, say(200, b"half", 8), say(200)])
def test_a_connection_that_is_cut_every_time(server: Server, answer: Answer) -> None:
    server.answers = [answer]
    with pytest.raises(BadRow, match="cannot fetch"):
        get(server.url)
    assert len(server.asked) == ATTEMPTS


@pytest.mark.parametrize("answer", [drip, drip_headers])
def test_a_slow_server_is_left_when_the_time_is_over(server: Server, answer: Answer) -> None:
    server.answers = [answer]
    start = time.monotonic()
    with pytest.raises(BadRow, match=r"media_timeout_s=0\.3") as caught:
        get(server.url, seconds=0.3)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - start < 2


def test_a_signature_stays_out_of_messages(server: Server) -> None:
    server.answers = [say(403)]
    part = MediaPart(kind="image", url=server.url + "/a.png?signature=secret")
    with pytest.raises(BadRow, match=r"/a\.png: HTTP 403") as caught:
        load_picture(part)
    assert server.asked == ["GET /a.png?signature=secret"]
    assert "secret" not in str(caught.value) + part.label


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(BadRow, match="refused"):
        get(f"http://127.0.0.1:{port}/a.png")
    with pytest.raises(BadRow, match="cannot fetch"):
        get("http://[half/a.png")


def test_a_large_object_is_refused_while_it_arrives(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_BYTES", 1000)
    server.answers = [say(200, bytes(3000))]
    with pytest.raises(BadRow, match="larger than 1,000 bytes") as caught:
        get(server.url)
    assert caught.value.kind == "media_too_large"
    assert len(server.asked) == 1


def test_objects_of_a_store(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs itself, against a server that knows one object."""
    pytest.importorskip("s3fs", reason="the extra `cloud` is not installed")
    data = bytes(range(256)) * 5000

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.path.partition("?")[0] != "/bucket/a/b.png":
            say(404)(request)
            return
        first, _, last = request.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1 if last else len(data)]
        request.send_response(206 if "Range" in request.headers else 200)
        request.send_header("Content-Length", str(len(piece)))
        request.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
        request.send_header("ETag", '"1"')
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(piece)

    server.answers = [answer]
    settings = {"anon": True, "endpoint_url": server.url, "skip_instance_cache": True}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    assert get("s3://bucket/a/b.png") == data
    with pytest.raises(BadRow, match="FileNotFoundError") as caught:
        get("s3://bucket/a/other.png")
    assert caught.value.kind == "media_missing"


def test_a_store_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)   # what an import finds where it is not installed
    monkeypatch.delitem(registered, "gs", raising=False)   # if it was imported before
    with pytest.raises(UserError, match=r"gs://bucket/a\.png cannot be read.*extra `cloud`"):
        get("gs://bucket/a.png")


def test_a_store_without_keys(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ends the run: every row would end so."""
    pytest.importorskip("s3fs", reason="the extra `cloud` is not installed")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    server.answers = [say(500)]
    settings = {"endpoint_url": server.url, "skip_instance_cache": True}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    with pytest.raises(UserError, match=r"s3://bucket/a\.png cannot be read: Unable to locate credentials"):
        get("s3://bucket/a.png")
    assert server.asked == []
