"""Real servers on this machine: files over HTTP with ranges, an S3 and a GCS bucket, and a hub.

They serve one folder, and can be told to fail: `fail_every=n` answers each n-th request for bytes with 503,
`cut_every=n` ends the connection in the middle of each n-th.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "5" * 40


class Server:
    """Serves `folder`; see `serve`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fail_every = self.cut_every = 0
        self.ranges = True                       # answer range requests
        self.forbidden = False
        self.token: str | None = None            # hub: what the client must send
        self.requests: list[str] = []            # "GET /path bytes=…"
        self.sent = 0                            # bytes of file content
        self.asked = 0                           # requests for file content
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_of": self}))
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def files(self, prefix: str = "") -> list[str]:
        """Relative paths below a folder, sorted."""
        found = (p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())
        return sorted(name for name in found if name.startswith(prefix))


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """A server of the files in a folder: at `/files/…` as they are; as S3 bucket `bucket`; as GCS bucket
    `bucket`; and as the hub's data set `org/name`."""
    server = Server(folder)
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        server = self.server_of
        split = urlsplit(self.path)
        path, query = unquote(split.path), {key: value[0] for key, value in parse_qs(split.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode() if length else ""
        if server.forbidden:
            return self.text(403, "no")
        with server.lock:
            server.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if path.startswith("/files/"):
            self.web(path.removeprefix("/files/"))
        elif path.startswith("/bucket"):
            self.s3(path.removeprefix("/bucket").strip("/"), query)
        elif path.startswith("/storage/v1/"):
            self.gcs(path.removeprefix("/storage/v1/b/bucket/o"), query)
        elif path.startswith("/download/storage/v1/b/bucket/o/"):
            self.file(path.removeprefix("/download/storage/v1/b/bucket/o/"))
        else:
            self.hub(path, query, body)
        return None

    # Kinds of server ---------------------------------------------------------------------------------

    def web(self, name: str) -> None:
        folder = self.server_of.folder / name
        if folder.is_dir():
            links = "".join(f'<a href="{item.name}">x</a>' for item in sorted(folder.iterdir()))
            return self.text(200, f"<html>{links}</html>", "text/html")
        return self.file(name)

    def s3(self, key: str, query: dict[str, str]) -> None:
        if key:
            return self.file(key)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys, folders = [], set()
        for name in self.server_of.files(prefix):
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                keys.append(name)
        sizes = {name: (self.server_of.folder / name).stat().st_size for name in keys}
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{tag(self.server_of.folder / name)}&quot;</ETag><Size>{size}</Size></Contents>"
            for name, size in sizes.items()
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders)
        return self.text(
            200,
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys) + len(folders)}"
            f"</KeyCount><IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>",
            "application/xml",
        )

    def gcs(self, key: str, query: dict[str, str]) -> None:
        def described(name: str) -> dict[str, Any]:
            path = self.server_of.folder / name
            kept = {"name": name, "bucket": "bucket", "size": str(path.stat().st_size), "etag": tag(path)}
            return {**kept, "generation": "1", "updated": "2026-01-01T00:00:00Z", "kind": "storage#object"}

        key = key.strip("/")
        if key and query.get("alt") == "media":
            return self.file(key)
        if key:
            if not (self.server_of.folder / key).is_file():
                return self.text(404, json.dumps({"error": {"code": 404, "message": "no such object"}}))
            return self.text(200, json.dumps(described(key)))
        names = self.server_of.files(query.get("prefix", ""))
        return self.text(200, json.dumps({"kind": "storage#objects", "items": [described(n) for n in names]}))

    def hub(self, path: str, query: dict[str, str], body: str) -> None:
        token = self.server_of.token
        if token and self.headers.get("Authorization") != f"Bearer {token}":
            return self.text(401, json.dumps({"error": "no"}), headers={"X-Error-Code": "RepoNotFound"})
        api, resolve = "/api/datasets/org/name", "/datasets/org/name/resolve/"
        if path.startswith(resolve):
            name = path.removeprefix(resolve).partition("/")[2]
            return self.file(name, {"X-Repo-Commit": COMMIT}, hub=True)
        if not path.startswith(api):
            return self.text(404, json.dumps({"error": "no"}), headers={"X-Error-Code": "RepoNotFound"})
        rest = path.removeprefix(api).strip("/").split("/")
        if rest[0] in ("", "revision"):
            if rest[0] and rest[1] not in ("main", COMMIT):
                return self.text(404, "{}", headers={"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in self.server_of.files()]
            known = {"id": "org/name", "sha": COMMIT, "private": False, "tags": []}
            return self.text(200, json.dumps({**known, "siblings": siblings}))
        if rest[0] == "tree":
            base = "/".join(rest[2:])
            recursive = query.get("recursive") in ("1", "true", "True")
            return self.text(200, json.dumps(self.entries(base, recursive)))
        if rest[0] == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            found = [item for item in self.entries("", True) if item["path"] in wanted]
            return self.text(200, json.dumps(found))
        return self.text(404, json.dumps({"error": "no"}))

    def entries(self, base: str, recursive: bool) -> list[dict[str, Any]]:
        folder = self.server_of.folder / base
        found = []
        for path in sorted(folder.rglob("*") if recursive else folder.glob("*")):
            name = path.relative_to(self.server_of.folder).as_posix()
            if path.is_dir():
                found.append({"type": "directory", "path": name, "oid": "d" * 40, "size": 0})
            else:
                found.append({"type": "file", "path": name, "oid": tag(path), "size": path.stat().st_size})
        return found

    # Answers -----------------------------------------------------------------------------------------

    def text(
        self, status: int, text: str, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        data = text.encode()
        self.head(status, {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def file(self, name: str, headers: dict[str, str] | None = None, hub: bool = False) -> None:
        server, path = self.server_of, self.server_of.folder / name
        if not path.is_file():
            return self.text(404, "", headers={"X-Error-Code": "EntryNotFound"} if hub else {})
        data = path.read_bytes()
        headers = {"ETag": f'"{tag(path)}"', **(headers or {})}
        status = 200
        wanted = self.headers.get("Range")
        if wanted and server.ranges and self.command == "GET":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            status, data = 206, data[int(first) : stop]
        if not server.ranges:
            headers["Accept-Ranges"] = "none"
        with server.lock:
            server.asked += self.command == "GET"
            asked = server.asked
        if self.command == "GET" and server.fail_every and asked % server.fail_every == 0:
            return self.text(503, "busy")
        self.head(status, {**headers, "Content-Length": str(len(data))})
        if self.command != "GET":
            return None
        if server.cut_every and asked % server.cut_every == 0:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            self.connection.close()
            return None
        with server.lock:
            server.sent += len(data)
        self.wfile.write(data)
        return None

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


def tag(path: Path) -> str:
    """A digest that changes with the content."""
    return hashlib.sha1(path.read_bytes()).hexdigest()
