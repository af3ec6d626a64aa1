"""Damaged pictures, clips and sounds: a medium or a bad row comes out, nothing hangs, no row is lost.

Suite: a few hundred cases, always the same. `FUZZ_CASES=2500 pytest tests/datasets/test_fuzz_media.py` runs
so many new ones of each test.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import av
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data_prep.clips import write_clip
from lmms_engine.datasets.audio import load_sound, sound_chunks, sound_facts
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.media import decode_picture, load_picture
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import MediaPart, Row
from lmms_engine.datasets.video import load_clip
from lmms_engine.errors import BadRow
from lmms_engine.segments import RowRef
from tests.datasets.fuzzing import cases, damaged, limited
from tests.datasets.toy_data import ByteProcessor, ids_of, make_job, steps_of_epoch

NOISE = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
KINDS = ("media_corrupt", "media_missing", "media_span", "media_too_large", "aspect_ratio")


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` gives, or its BadRow."""
    with limited():
        try:
            return call()
        except BadRow as bad:
            return bad


# Pictures ---------------------------------------------------------------------------------------------


def encoded(form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(NOISE).save(out, form, **options)
    return out.getvalue()


TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
PICTURES = {
    "jpeg": encoded("JPEG"),
    "progressive": encoded("JPEG", progressive=True, exif=TURNED),
    "png": encoded("PNG"),
    "palette": encoded("GIF"),
    "webp": encoded("WEBP"),
    "lossless": encoded("WEBP", lossless=True),
    "avif": encoded("AVIF"),
    "jpeg 2000": encoded("JPEG2000"),
    "tiff": encoded("TIFF", compression="tiff_lzw"),
    "bmp": encoded("BMP"),
}  # fmt: skip


@cases(150)
@given(st.sampled_from(list(PICTURES)).flatmap(lambda form: damaged(PICTURES[form])))
def test_a_damaged_picture_is_a_picture_or_a_bad_row(data: bytes) -> None:
    picture = outcome(lambda: decode_picture(data, "p"))
    if isinstance(picture, BadRow):
        assert picture.kind in KINDS
        return
    assert picture.mode == "RGB"
    assert np.asarray(picture).shape == (*picture.size[::-1], 3)


# Clips ------------------------------------------------------------------------------------------------


def clip(folder: Path) -> bytes:
    times = [Fraction(i, 8) for i in range(12)]
    write_clip(folder / "a.mp4", [np.roll(NOISE, i, 0) for i in range(12)], times)
    return (folder / "a.mp4").read_bytes()


def old_clip(form: str) -> bytes:
    """The same frames by an old codec, at a steady rate."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width, stream.pix_fmt = *NOISE.shape[:2], "yuv420p"
        for i in range(12):
            frame = av.VideoFrame.from_ndarray(np.roll(NOISE, i, 0), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


with tempfile.TemporaryDirectory() as made:
    MP4 = clip(Path(made))
CLIPS = {"mp4": MP4, "mkv": old_clip("matroska"), "avi": old_clip("avi")}


@cases(60)
@given(st.sampled_from(list(CLIPS)).flatmap(lambda form: damaged(CLIPS[form])))
def test_a_damaged_clip_is_a_clip_or_a_bad_row(data: bytes) -> None:
    part = MediaPart(kind="video", bytes=data or b"x")
    got = outcome(lambda: load_clip(part, fps=4.0, min_frames=2, max_frames=8))
    if isinstance(got, BadRow):
        assert got.kind in KINDS
        return
    assert 1 <= len(got.frames) == len(got.times) <= 8
    assert np.isfinite(got.times).all()
    assert np.isfinite(got.rate)
    assert (np.diff(got.times) > 0).all()


# Sounds -----------------------------------------------------------------------------------------------


def tone(form: str, codec: str, rate: int = 44_100) -> bytes:
    """A fifth of a second of noise, on two channels."""
    out = io.BytesIO()
    values = np.random.default_rng(0).normal(0, 0.1, (2, rate // 5)).astype(np.float32)
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(values, format="fltp", layout="stereo")
        frame.sample_rate = rate
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return out.getvalue()


SOUNDS = {
    "wav": tone("wav", "pcm_s16le"),
    "floats": tone("wav", "pcm_f32le"),
    "mp3": tone("mp3", "libmp3lame"),
    "flac": tone("flac", "flac"),
    "opus": tone("ogg", "libopus", 48_000),
    "aac": tone("mp4", "aac"),
}  # fmt: skip


@cases(80)
@given(st.sampled_from(list(SOUNDS)).flatmap(lambda form: damaged(SOUNDS[form])), st.booleans())
def test_a_damaged_sound_is_a_sound_or_a_bad_row(data: bytes, span: bool) -> None:
    part = MediaPart(kind="audio", bytes=data or b"x", **({"start": 0.05, "end": 0.15} if span else {}))
    got = outcome(lambda: load_sound(part, rate=16_000))
    if isinstance(got, BadRow):
        assert got.kind in KINDS
        return
    assert got.dtype == np.float32
    assert got.ndim == 1
    assert len(got) > 0
    assert np.isfinite(got).all()
    if span:   # its two ends are rounded to samples of the file, whose rate may be damaged too
        rate = sound_facts(part).rate
        assert len(got) <= ceil((0.1 * rate + 1) * 16_000 / rate)
    chunks = list(sound_chunks(part, rate=16_000, seconds=0.03))
    np.testing.assert_array_equal(np.concatenate(chunks), got)


# In a run ---------------------------------------------------------------------------------------------


class LookingProcessor(ByteProcessor):
    """As its base, but every medium is decoded."""

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        for part in row.media():
            if part.kind == "image":
                load_picture(part)
            elif part.kind == "video":
                load_clip(part, fps=4.0, min_frames=2, max_frames=8)
            else:
                load_sound(part, rate=16_000)
        return super().__call__(row, ref)


ALL = [("image", data) for data in PICTURES.values()]
ALL += [("video", data) for data in CLIPS.values()] + [("audio", data) for data in SOUNDS.values()]


@st.composite
def media_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows = []
    for i in range(draw(st.integers(1, 5))):
        kind, whole = draw(st.sampled_from(ALL))
        data = draw(st.just(whole) | damaged(whole))
        url = "data:;base64," + base64.b64encode(data).decode()
        parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}, {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "!"}]
        rows.append({"id": f"r{i}", "messages": messages})
    return rows


@cases(30)
@given(media_rows())
def test_of_damaged_media_every_row_is_given_or_named(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, limited(30):
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = make_job(path, on_bad_row="skip", max_skip_fraction=1.0, num_logical_shards=1)
        loader = Loader(job, partial(LookingProcessor), dp_rank=0, dp_size=1)
        given = ids_of(steps_of_epoch(loader))
        skipped = loader.take_skipped()
    assert sorted([*given, *(record.id for record in skipped)]) == sorted(row["id"] for row in rows)
    assert all(record.kind in KINDS for record in skipped)
