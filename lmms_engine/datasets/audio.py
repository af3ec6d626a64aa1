"""Sounds: any container, or the sound track of a clip, to mono samples at one rate.

    samples = load_sound(part, rate=16_000)                            # float32 [n], about -1 to 1
    for chunk in sound_chunks(part, rate=16_000, seconds=30.0): ...    # the same samples, a piece at a time

Channels are mixed by their mean. n samples of the file, or of its span `start` to `end`, become
ceil(n · rate / file's rate) samples; the span counts from the file's first sample, and its ends are rounded
to the nearest sample of the file. The chunks of a sound, joined, are the whole, bit for bit: they are cut
after everything else. Only a chunk and what the decoder holds lie in memory.

A file that ends before what it says it holds, or that cannot be decoded to its end, raises BadRow: a sound
is never half heard. Where a format does not say how long it is, only a piece that is cut in two is noticed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np

from lmms_engine.datasets.limits import DECODER_OPTIONS, Deadline, reason
from lmms_engine.datasets.media import read_media
from lmms_engine.datasets.parts import MediaPart
from lmms_engine.errors import BadRow

MAX_SAMPLES = 1 << 27            # of a sound as a whole: 512 MiB; 2.3 hours at 16 kHz
LEGAL_RATES = (1_000, 768_000)   # of a file; others are damage, and could ask for any amount of memory
FILTER_SAMPLES = 64              # of the resampler's filter, at the lower of the two rates
# Formats that state a sound's length, others estimate it from the size of the file; and by how many seconds
# encoders misstate it, for what they add at the ends.
STATED = {"flac": 0.01, "aiff": 0.01, "au": 0.01, "caf": 0.01, "mov": 0.25, "mp3": 0.05, "matroska": 0.25}
SOUGHT = ("wav", "flac", "mov")  # formats whose time stamps tell the very sample
SEEK_SECONDS = 5.0               # a span that begins later is sought
RUN_UP_SECONDS = 1.0             # decoded before it, for codecs whose frames overlap
FULL_SCALE = {"u1": 2.0**7, "i2": 2.0**15, "i4": 2.0**31, "i8": 2.0**63}


@dataclass(frozen=True)
class SoundFacts:
    """What a sound is: its length or that of its span, and the file's samples a second and channels."""

    seconds: float
    rate: int
    channels: int


def load_sound(part: MediaPart, *, rate: int) -> np.ndarray:
    """The whole sound, float32 [n]; raises as `sound_chunks`, and `media_too_large` for one that is too long
    to lie in memory."""
    blocks, size = [], 0
    for block in _blocks(part, rate):
        blocks.append(block)
        size += len(block)
        if size > MAX_SAMPLES:
            longest = f"{MAX_SAMPLES / rate:,.0f} s at {rate} Hz"
            raise BadRow(
                "media_too_large",
                f"sound {part.label} is longer than {longest}; give the part `start` and `end`",
            )
    return np.concatenate(blocks)


def sound_chunks(part: MediaPart, *, rate: int, seconds: float) -> Iterator[np.ndarray]:
    """Pieces of round(seconds · rate) samples, float32, the last one shorter; at least one.

    Raises BadRow: `media_missing`, `media_corrupt`, `media_span`, `timeout`.
    """
    size = max(round(seconds * rate), 1)
    waiting: list[np.ndarray] = []
    held = 0
    for block in _blocks(part, rate):
        waiting.append(block)
        held += len(block)
        while held >= size:
            joined = np.concatenate(waiting)
            yield joined[:size].copy()   # else it would keep the rest of the block alive
            waiting, held = [joined[size:]], held - size
    if held:
        yield np.concatenate(waiting)


def sound_facts(part: MediaPart) -> SoundFacts:
    """What the sound is, found by decoding it to its end; raises as `sound_chunks`."""
    file = _File(part)
    count = sum(map(len, file.blocks()))
    return SoundFacts(count / file.rate, file.rate, file.channels)


# Decoding --------------------------------------------------------------------------------------------


class _File:
    """An encoded sound. rate, channels: the file's, known after the first block."""

    def __init__(self, part: MediaPart) -> None:
        self._part = part
        self._name = f"sound {part.label}"
        self._deadline = Deadline(self._name)
        self._source = read_media(part, self._deadline)
        found = _wav_bytes(self._source)
        self._endless = found is not None and found[0] is None
        self._sought = False
        self.rate = self.channels = 0

    def blocks(self, *, seek: bool = True) -> Iterator[np.ndarray]:
        """Mono samples of the part's span at the file's rate, float32, in blocks as they are decoded."""
        part, position, first, stop = self._part, -1, 0, None
        for at, block in self._guarded(self._decoded(seek)):
            if position < 0:
                position, first = at, round((part.start or 0.0) * self.rate)
                stop = None if part.end is None else round(part.end * self.rate)
                if at > first:   # this file cannot be entered there
                    yield from self.blocks(seek=False)
                    return
            kept = block[max(first - position, 0) : None if stop is None else max(stop - position, 0)]
            position += len(block)
            if len(kept):
                yield kept
            if stop is not None and position >= stop:
                break
        if position < 0 and seek and self._sought:   # the span begins behind the end
            yield from self.blocks(seek=False)
            return
        if position <= 0:
            raise BadRow("media_corrupt", f"{self._name} holds no sample")
        if first >= position or first == stop:
            span = f"{part.start}–{part.end} s; the sound lasts {position / self.rate:.3f} s"
            raise BadRow("media_span", f"no sample of {part.label} lies in {span}")
        if stop is None or position < stop:
            self._check_end(position)

    def _decoded(self, seek: bool) -> Iterator[tuple[int, np.ndarray]]:
        """(number of its first sample, samples) of each frame; the numbers after the first are not right."""
        source = io.BytesIO(self._source) if isinstance(self._source, bytes) else str(self._source)
        options = {"options": DECODER_OPTIONS, "timeout": self._deadline.calls}
        with av.open(source, metadata_errors="replace", **options) as container:
            self._deadline.check()
            stream = self._stream(container)
            self._stated, self._slack = _stated_seconds(container, stream)
            self._sought = seek and self._seek(container, stream)
            for packet in container.demux(stream):
                self._deadline.check()
                if packet.is_corrupt and not self._endless:
                    raise BadRow("media_corrupt", f"{self._name} is cut: its last piece is not whole")
                for frame in packet.decode():
                    block = self._mono(frame)
                    yield _number(frame, stream) if self._sought else 0, block
            self._deadline.check()

    def _seek(self, container: av.container.InputContainer, stream: av.AudioStream) -> bool:
        start = self._part.start or 0.0
        if start < SEEK_SECONDS or container.format.name.split(",")[0] not in SOUGHT:
            return False
        stamp = int((start - RUN_UP_SECONDS) / stream.time_base) + (stream.start_time or 0)
        try:
            container.seek(stamp, stream=stream, backward=True)
        except av.FFmpegError:   # beyond the end, or without an index: read it from the beginning
            container.seek(0)
            return False
        return True

    def _stream(self, container: av.container.InputContainer) -> av.AudioStream:
        if not container.streams.audio:
            raise BadRow("media_corrupt", f"{self._name}: the file holds no sound")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise BadRow("media_corrupt", f"{self._name} is of an unknown codec")
        # FLAC alone carries a checksum of every frame that can be relied on.
        checked = {"err_detect": "crccheck+explode"} if stream.codec_context.name == "flac" else {}
        stream.codec_context.options = {**DECODER_OPTIONS, **checked}
        stream.codec_context.thread_count = 1   # loader workers are the parallelism
        return stream

    def _mono(self, frame: av.AudioFrame) -> np.ndarray:
        low, high = LEGAL_RATES
        if not low <= frame.sample_rate <= high:
            rates = f"{frame.sample_rate} samples a second (legal: {low:,} to {high:,})"
            raise BadRow("media_corrupt", f"{self._name} has {rates}")
        if self.rate and frame.sample_rate != self.rate:
            rates = f"{self.rate} to {frame.sample_rate}"
            raise BadRow("media_corrupt", f"{self._name} changes its rate, {rates}")
        channels = frame.layout.nb_channels
        self.rate, self.channels = frame.sample_rate, max(channels, self.channels)
        values = frame.to_ndarray()
        values = values if frame.format.is_planar else values.reshape(-1, channels).T
        kind = values.dtype.str[1:]
        with np.errstate(invalid="ignore", over="ignore"):   # looked for below
            mono = values.mean(0, dtype=np.float64)
        if kind in FULL_SCALE:
            middle = FULL_SCALE[kind] if kind.startswith("u") else 0.0
            mono = (mono - middle) / FULL_SCALE[kind]
        if not np.isfinite(mono).all():
            raise BadRow("media_corrupt", f"{self._name} holds samples that are no numbers")
        return mono.astype(np.float32)

    def _check_end(self, count: int) -> None:
        """BadRow if the file said that there is more than the `count` samples that came."""
        found = count / self.rate
        if self._stated is not None and self._stated > found + self._slack:
            lengths = f"{found:.2f} of {self._stated:.2f} s are there"
            raise BadRow("media_corrupt", f"{self._name} is cut: {lengths}")
        if (reason := _cut(self._source)) is not None:
            raise BadRow("media_corrupt", f"{self._name} is cut: {reason}")

    def _guarded(self, blocks: Iterator[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
        try:
            yield from blocks
        except (av.FFmpegError, EOFError, OSError, ValueError, MemoryError) as error:
            if isinstance(error, BadRow):
                raise
            self._deadline.check()   # the library may have stopped for it
            raise BadRow("media_corrupt", f"{self._name} cannot be decoded: {reason(error)}") from None


def _number(frame: av.AudioFrame, stream: av.AudioStream) -> int:
    """Number of the frame's first sample, by its time stamp."""
    if frame.pts is None:
        raise ValueError("a frame has no time stamp")
    return round((frame.pts - (stream.start_time or 0)) * stream.time_base * frame.sample_rate)


def _stated_seconds(
    container: av.container.InputContainer, stream: av.AudioStream
) -> tuple[float | None, float]:
    """How long the file says the sound is, None where it does not say or only guesses; and the slack."""
    name = container.format.name.split(",")[0]
    slack = STATED.get(name, 0.0)
    if name == "matroska":   # which states the length of all its streams together
        alone = len(container.streams) == 1 and container.duration
        return (container.duration / av.time_base if alone else None), slack
    # An MP3 that states where its first sample lies also states how many there are.
    if name not in STATED or not stream.duration or (name == "mp3" and not stream.start_time):
        return None, slack
    return float(stream.duration * stream.time_base), slack


# What the library passes over in silence -------------------------------------------------------------


def _cut(source: bytes | Path) -> str | None:
    """What is missing at the end of a WAV or Ogg file; None if nothing is, or for another format."""
    if (found := _wav_bytes(source)) is not None:
        stated, there = found
        return f"{there} of {stated} bytes are there" if stated is not None and there < stated else None
    with _opened(source) as file:
        if file.read(4) != b"OggS":
            return None
        size = file.seek(0, io.SEEK_END)
        file.seek(max(size - (1 << 17), 0))   # two pages at least
        return _cut_ogg(file.read())


def _wav_bytes(source: bytes | Path) -> tuple[int | None, int] | None:
    """How many bytes of samples a WAV file states, None if it was written to a pipe and does not know, and
    how many it has; None for another format."""
    with _opened(source) as file:
        head = file.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return None
        size, at = file.seek(0, io.SEEK_END), 12
        while at + 8 <= size:
            file.seek(at)
            name, length = file.read(4), int.from_bytes(file.read(4), "little")
            if name == b"data":
                return (None if length in (0, 0xFFFFFFFF) else length), size - at - 8
            at += 8 + length + length % 2
    return None


def _opened(source: bytes | Path) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")


def _cut_ogg(end: bytes) -> str | None:
    at = end.rfind(b"OggS")
    page = end[at:]
    if at < 0 or len(page) < 27 or len(page) < 27 + page[26]:
        return "its last page is not whole"
    length = 27 + page[26] + sum(page[27 : 27 + page[26]])
    return "its last page is not whole" if length > len(page) else None


# Resampling ------------------------------------------------------------------------------------------


def _blocks(part: MediaPart, rate: int) -> Iterator[np.ndarray]:
    """Mono samples of the part's span at `rate`, float32, in blocks of any size."""
    file = _File(part)
    resampler: av.AudioResampler | None = None
    given = taken = 0
    for block in file.blocks():
        given += len(block)
        if file.rate == rate:
            yield block
            continue
        resampler = resampler or av.AudioResampler(format="flt", layout="mono", rate=rate)
        for out in _resampled(resampler, block, file.rate):
            taken += len(out)
            yield out
    if resampler is None:
        return
    # Silence behind the end draws out what is still in the filter; what is too much is cut off.
    left = ceil(given * rate / file.rate) - taken
    silence = np.zeros(FILTER_SAMPLES * ceil(max(file.rate / rate, 1)) + ceil(left * file.rate / rate))
    for out in (*_resampled(resampler, silence, file.rate), *_resampled(resampler, None, file.rate)):
        if left > 0:
            yield out[:left]
            left -= len(out)


def _resampled(resampler: av.AudioResampler, block: np.ndarray | None, rate: int) -> Iterator[np.ndarray]:
    frame = None
    if block is not None:
        frame = av.AudioFrame.from_ndarray(block.astype(np.float32)[None], format="flt", layout="mono")
        frame.sample_rate = rate
    for out in resampler.resample(frame):
        yield out.to_ndarray()[0].copy()
