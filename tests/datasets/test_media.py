"""Pictures from every source and of every kind come out upright, RGB and whole, or not at all."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmms_engine.datasets import remote
from lmms_engine.datasets.media import decode_picture, load_picture
from lmms_engine.datasets.schema import MediaPart
from lmms_engine.errors import BadRow


def encode(image: Image.Image, format_: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format_, **options)
    return buffer.getvalue()


def sideways_jpeg() -> bytes:
    """200 x 100 on disk, red in its upper left corner, to be shown turned by 90 degrees clockwise."""
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[:40, :40] = [255, 0, 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(Image.fromarray(pixels), "JPEG", quality=95, exif=exif)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """serve(body, status, length) -> URL of a server on this machine that answers so."""
    answers: dict[str, tuple[bytes, int, int]] = {}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body, status, length = answers[self.path]
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def add(body: bytes, status: int = 200, length: int | None = None) -> str:
        path = f"/{len(answers)}"
        answers[path] = (body, status, len(body) if length is None else length)
        return f"http://127.0.0.1:{server.server_port}{path}"

    add.asked = asked
    yield add
    server.shutdown()
    server.server_close()


def test_orientation_tag_is_applied_for_every_source(tmp_path: Path, serve: Callable[..., str]) -> None:
    """The corner, from files, bytes and addresses."""
    data = sideways_jpeg()
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    parts = [
        MediaPart(kind="image", path=str(path)),
        MediaPart(kind="image", bytes=data),
        MediaPart(kind="image", url="data:image/jpeg;base64," + base64.b64encode(data).decode()),
        MediaPart(kind="image", url=path.as_uri()),
        MediaPart(kind="image", url=serve(data)),
    ]
    images = [np.asarray(load_picture(part)) for part in parts]
    assert images[0].shape == (200, 100, 3)
    red = images[0][5, -5].astype(int)   # the corner has moved to the upper right
    assert red[0] > 200
    assert red[1:].max() < 60
    assert images[0][5, 5].max() < 60
    for other in images[1:]:
        np.testing.assert_array_equal(other, images[0])


def _ramp16() -> Image.Image:
    return Image.fromarray((np.arange(4096).reshape(64, 64) * 16).astype(np.uint16))


MODES = {
    "1": (Image.new("1", (64, 64), 1), "PNG", (255, 255, 255)),
    "L": (Image.new("L", (64, 64), 90), "PNG", (90, 90, 90)),
    "LA": (Image.new("LA", (64, 64), (90, 0)), "PNG", (255, 255, 255)),
    "P": (Image.new("RGB", (64, 64), (10, 200, 30)).convert("P"), "PNG", None),
    "RGBA transparent": (Image.new("RGBA", (64, 64), (255, 0, 0, 0)), "PNG", (255, 255, 255)),
    "RGBA half": (Image.new("RGBA", (64, 64), (255, 0, 0, 128)), "PNG", (255, 127, 127)),
    "CMYK": (Image.new("CMYK", (64, 64), (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
    "I;16": (_ramp16(), "PNG", None),
    "I": (Image.fromarray(np.full((64, 64), 51400, np.int32)), "TIFF", (200, 200, 200)),
    "F unit": (Image.fromarray(np.full((64, 64), 0.5, np.float32)), "TIFF", (128, 128, 128)),
    "F bytes": (Image.fromarray(np.full((64, 64), 200.0, np.float32)), "TIFF", (200, 200, 200)),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb(name: str) -> None:
    """Mode by mode."""
    image, format_, colour = MODES[name]
    out = decode_picture(encode(image, format_), name)
    assert out.mode == "RGB"
    assert out.size == (64, 64)
    if colour is not None:
        assert np.abs(np.asarray(out).astype(int) - colour).max() <= 1


def test_palette_transparency_is_white() -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0] + [0] * 765)
    out = decode_picture(encode(image, "PNG", transparency=0), "p")
    assert set(map(tuple, np.asarray(out).reshape(-1, 3).tolist())) == {(255, 255, 255)}


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    """A bare conversion keeps 17 of the levels."""
    levels = np.unique(np.asarray(decode_picture(encode(_ramp16(), "PNG"), "ramp")))
    assert len(levels) > 200
    assert levels[0] == 0
    assert levels[-1] == 255


@pytest.mark.parametrize("format_", ["GIF", "TIFF"])
def test_first_frame_of_several(format_: str) -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    out = decode_picture(encode(frames[0], format_, save_all=True, append_images=frames[1:]), "several")
    assert np.asarray(out)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.97])
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_cut_files_are_corrupt(format_: str, keep: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), format_)
    with pytest.raises(BadRow, match=r"kitten\.x") as caught:
        decode_picture(data[: int(len(data) * keep)], "kitten.x")
    assert caught.value.kind == "media_corrupt"


@pytest.mark.parametrize("data", [b"<html>not found</html>", b"\x89PNG\r\n\x1a\n", bytes(64)])
def test_other_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(BadRow) as caught:
        decode_picture(data, "x")
    assert caught.value.kind == "media_corrupt"


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
def test_garbled_files_decode_or_are_bad_rows(format_: str) -> None:
    data = encode(Image.fromarray(np.arange(4096, dtype=np.uint8).reshape(64, 64)), format_)
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(40):
        garbled = np.frombuffer(data, np.uint8).copy()
        garbled[rng.integers(0, min(len(data), 400), 4)] = rng.integers(0, 256, 4)
        try:
            outcomes.add(decode_picture(garbled.tobytes(), "x").mode)
        except BadRow as error:
            outcomes.add(error.kind)
    assert "media_corrupt" in outcomes


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    for name in ("nothing.jpg", "empty.jpg", "", "x" * 5000, "nul\0.jpg"):
        path = str(tmp_path / name)
        with pytest.raises(BadRow) as caught:
            load_picture(MediaPart(kind="image", path=path))
        assert caught.value.kind == "media_missing"
        assert path[:200] in str(caught.value)


def test_decompression_bomb_is_refused_from_its_header() -> None:
    data = bytearray(encode(Image.new("1", (8, 8)), "BMP"))
    data[18:26] = (60_000).to_bytes(4, "little") + (60_000).to_bytes(4, "little")
    with pytest.raises(BadRow) as caught:
        decode_picture(bytes(data), "bomb")
    assert caught.value.kind == "media_too_large"


@pytest.mark.parametrize(("width", "height", "legal"), [(1, 200, True), (1, 201, False), (1024, 5, False)])
def test_aspect_ratio(width: int, height: int, legal: bool) -> None:
    """Refused from the header, by name."""
    data = encode(Image.new("RGB", (width, height)), "PNG")
    if legal:
        assert decode_picture(data, "x").size == (width, height)
        return
    with pytest.raises(BadRow, match=f"{width}×{height}") as caught:
        decode_picture(data, "x")
    assert caught.value.kind == "aspect_ratio"


def test_urls_that_fail(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    gone, flaky = serve(b"", 404), serve(b"", 503)
    cut = serve(b"half", 200, length=8)
    for url, attempts in ((gone, 1), (flaky, remote.ATTEMPTS), (cut, remote.ATTEMPTS)):
        serve.asked.clear()
        with pytest.raises(BadRow, match=url) as caught:
            load_picture(MediaPart(kind="image", url=url))
        assert caught.value.kind == "media_missing"
        assert len(serve.asked) == attempts
    with pytest.raises(BadRow, match="legal: http, https, s3, gs, hf, file, data"):
        load_picture(MediaPart(kind="image", url="ftp://host/a.png"))
