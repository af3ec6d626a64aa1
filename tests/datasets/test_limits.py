"""No file holds a worker: time is looked at while it is decoded, size before, and pipes are not opened."""

from __future__ import annotations

import io
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from lmms_engine.config import DatasetSection
from lmms_engine.datasets.audio import load_sound
from lmms_engine.datasets.limits import DEFAULT_SECONDS, MAX_FRAME_PIXELS, media_time_limit
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.media import decode_picture, load_picture
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import MediaPart, Row
from lmms_engine.datasets.video import load_clip, plan_clip
from lmms_engine.errors import BadRow
from lmms_engine.segments import RowRef
from tests.datasets.test_remote import Server, drip
from tests.datasets.toy_data import ByteProcessor, ids_of, make_job, steps_of_epoch

MEGABYTE = 1 << 20
SOME_FRAMES = partial(load_clip, fps=1.0, min_frames=1, max_frames=4)
LOOK = {"image": load_picture, "video": SOME_FRAMES, "audio": partial(load_sound, rate=16_000)}


@contextmanager
def no_more_memory_than(bytes_: int) -> Iterator[None]:
    """The process's peak inside, over what it had before."""
    Path("/proc/self/clear_refs").write_text("5")   # sets the peak to what is in use now
    before = peak()
    yield
    assert peak() - before < bytes_


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def long_png(edge: int = 8000) -> bytes:
    """A picture of few bytes that takes a while: black, and not compressed all too well."""
    buffer = io.BytesIO()
    Image.new("L", (edge, edge)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def long_clip(path: Path, count: int = 1500) -> MediaPart:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        for i in range(count):
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return MediaPart(kind="video", path=str(path))


@pytest.fixture(scope="module")
def png() -> bytes:
    return long_png()


def test_the_default_is_the_configs() -> None:
    assert DatasetSection().media_timeout_s == DEFAULT_SECONDS


@pytest.mark.parametrize("form", ["bytes", "file"])
def test_a_picture_that_takes_too_long(png: bytes, tmp_path: Path, form: str) -> None:
    part = MediaPart(kind="image", bytes=png)
    if form == "file":
        (tmp_path / "long.png").write_bytes(png)
        part = MediaPart(kind="image", path=str(tmp_path / "long.png"))
    start = time.monotonic()
    with media_time_limit(0.01), pytest.raises(BadRow, match=r"media_timeout_s=0\.01") as caught:
        load_picture(part)
    assert caught.value.kind == "timeout"
    stopped = time.monotonic() - start
    start = time.monotonic()
    assert load_picture(part).size == (8000, 8000)
    assert stopped < (time.monotonic() - start) / 2


def test_decoders_that_read_for_themselves() -> None:
    """What is raised in a read comes out of their C code as an error of another type."""
    buffer = io.BytesIO()
    Image.new("RGB", (2500, 2500)).save(buffer, "JPEG2000")
    with media_time_limit(0.02), pytest.raises(BadRow) as caught:
        decode_picture(buffer.getvalue(), "p")
    assert caught.value.kind == "timeout"


def test_a_clip_that_takes_too_long(tmp_path: Path) -> None:
    part = long_clip(tmp_path / "a.mp4")
    settings = {"fps": 1000.0, "min_frames": 4, "max_frames": 10**6}
    with media_time_limit(1e-6), pytest.raises(BadRow) as caught:
        plan_clip(part, **settings)
    assert caught.value.kind == "timeout"
    with media_time_limit(1.0):
        frames = plan_clip(part, **settings).frames()
        next(frames)
        time.sleep(1.0)   # what the processor does with a frame counts
        with pytest.raises(BadRow) as caught:
            next(frames)
    assert caught.value.kind == "timeout"
    assert len(list(plan_clip(part, **settings).frames())) == 1500


def test_a_list_of_frames_shares_one_time(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    frame = MediaPart(kind="image", bytes=picture.getvalue())
    part = MediaPart(kind="video", frames=(frame,) * 4, fps=2.0)
    with media_time_limit(1.0):
        frames = plan_clip(part, fps=1.0, min_frames=1, max_frames=8).frames()
        next(frames)
        time.sleep(1.0)
        with pytest.raises(BadRow, match="list of 4 frames") as caught:
            next(frames)
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_a_playlist_that_never_ends(tmp_path: Path, kind: str) -> None:
    """The library asks for its next piece again and again, inside of one call."""
    with av.open(str(tmp_path / "piece.ts"), "w") as container:
        if kind == "audio":
            stream = container.add_stream("aac", rate=16_000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), "fltp", "mono")
            frame.sample_rate = 16_000
        else:
            stream = container.add_stream("mpeg2video", rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), "rgb24")
        container.mux([*stream.encode(frame), *stream.encode(None)])
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:1", "#EXT-X-MEDIA-SEQUENCE:0", "#EXTINF:1.0,", "piece.ts"]
    (tmp_path / "live.m3u8").write_text("\n".join(lines) + "\n")
    part = MediaPart(kind=kind, path=str(tmp_path / "live.m3u8"))
    start = time.monotonic()
    with media_time_limit(0.5), pytest.raises(BadRow) as caught:
        LOOK[kind](part)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - start < 3


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    folder.mkdir()
    pipe = folder / "0.png"
    os.mkfifo(pipe)
    (tmp_path / "link.png").symlink_to(pipe)
    frame = MediaPart(kind="image", path=str(pipe))
    parts = [
        frame,
        MediaPart(kind="image", path=str(tmp_path / "link.png")),
        MediaPart(kind="image", url=pipe.as_uri()),
        MediaPart(kind="image", path="/dev/zero"),
        MediaPart(kind="video", path=str(pipe)),
        MediaPart(kind="audio", path=str(pipe)),
        MediaPart(kind="video", path=str(folder)),
        MediaPart(kind="video", frames=(frame,)),
    ]
    for part in parts:
        with pytest.raises(BadRow, match="a pipe, socket or device") as caught:
            LOOK[part.kind](part)
        assert caught.value.kind == "media_missing"


# Size -------------------------------------------------------------------------------------------------


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG with these sides in its header, and the data of hardly anything."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_a_picture_that_claims_too_much_is_not_begun() -> None:
    with no_more_memory_than(20 * MEGABYTE), pytest.raises(BadRow, match="2500000000 pixels") as caught:
        decode_picture(png_that_claims(50_000, 50_000), "bomb")
    assert caught.value.kind == "media_too_large"


def clip_that_claims(width: int, height: int, suffix: str) -> bytes:
    """A clip of one PNG frame whose header, and the container's, name these sides."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=suffix) as container:
        stream = container.add_stream("png", rate=2)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "rgb24"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 48, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode(None)])
    data = buffer.getvalue()
    claimed = png_that_claims(width, height)[12:33]   # the header's chunk with its checksum
    at = data.index(b"IHDR")
    data = data[:at] + claimed + data[at + len(claimed) :]
    return data.replace(struct.pack(">HH", 48, 32), struct.pack(">HH", width, height))


@pytest.mark.parametrize("suffix", ["mov", "avi"])
def test_a_clip_that_claims_too_much_is_not_begun(suffix: str) -> None:
    part = MediaPart(kind="video", bytes=clip_that_claims(16_000, 16_000, suffix))
    too_much = pytest.raises(BadRow, match=f"{MAX_FRAME_PIXELS:,} pixels")
    with no_more_memory_than(50 * MEGABYTE), too_much as caught:
        SOME_FRAMES(part)
    assert caught.value.kind == "media_too_large"


def test_a_large_clip_is_a_clip(tmp_path: Path) -> None:
    """One that is just legal is refused for what it holds, not for its size."""
    part = MediaPart(kind="video", bytes=clip_that_claims(8192, 8192, "mov"))
    with pytest.raises(BadRow) as caught:
        SOME_FRAMES(part)
    assert caught.value.kind == "media_corrupt"


# In a run ---------------------------------------------------------------------------------------------


class LookingProcessor(ByteProcessor):
    """As its base, but pictures are decoded."""

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        for part in row.media():
            load_picture(part)
        return super().__call__(row, ref)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_names_the_row_and_goes_on(tmp_path: Path, workers: int) -> None:
    server = Server()
    server.answers = [drip]   # for ten seconds
    Image.new("RGB", (8, 8)).save(tmp_path / "short.png")
    rows = [
        {
            "id": f"r{i}",
            "image": f"{server.url}/long.png" if i == 3 else "short.png",
            "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "!"}],
        }
        for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = make_job(
        tmp_path / "rows.jsonl",
        on_bad_row="skip",
        max_skip_fraction=1.0,
        media_timeout_s=2,
        dataloader_num_workers=workers,
    )
    loader = Loader(job, partial(LookingProcessor), dp_rank=0, dp_size=1)
    assert sorted(ids_of(steps_of_epoch(loader))) == ["r0", "r1", "r2", "r4", "r5"]
    (skipped,) = loader.take_skipped()
    assert (skipped.id, skipped.kind) == ("r3", "timeout")
    assert "dataset_config.media_timeout_s=2" in skipped.reason
    loader.close()
    server.http.shutdown()
    server.http.server_close()
