"""Clips: which frames of a file a model sees, and when they happen.

    plan = plan_clip(part, fps=2.0, min_frames=4, max_frames=768)
    for frame in plan.frames():       # uint8 [H, W, 3], upright, one at a time
        ...

The clock is the file's own presentation time stamps, counted from its first frame, so that variable frame
rates and cut-out spans keep the true time. Frames are spread evenly over the file or span, from its first
to its last frame; for a constant frame rate these are exactly the frames the Qwen processors choose.
A list or a folder of pictures is a clip that was sampled already: it needs the rate stated and is not sampled
again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from lmms_engine.datasets.limits import (
    DECODER_OPTIONS,
    MAX_CLIP_FRAMES,
    MAX_FRAME_PIXELS,
    Deadline,
    check_size,
    reason,
)
from lmms_engine.datasets.media import load_picture, read_media
from lmms_engine.datasets.parts import MediaPart
from lmms_engine.errors import BadRow

FRAME_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
CLOCK_DIGITS = 6   # microseconds: below it, differences between time stamps are rounding
CLOCK_SLACK = 1e-3   # seconds by which a file that counts milliseconds may misstate how long it is


@dataclass(frozen=True)
class ClipPlan:
    """The frames that were chosen, before any pixel is decoded.

    times: float64 [n], seconds from the first frame of the file.
    rate: frames per second of the sampled clip: n over the duration, or the stated rate of extracted frames.
    frames: opens the clip and yields n frames of one size, uint8 [H, W, 3].
    """

    times: np.ndarray
    rate: float
    frames: Callable[[], Iterator[np.ndarray]]

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True)
class Clip:
    """A decoded clip: frames uint8 [n, H, W, 3]; times float64 [n] in seconds; rate in frames per second."""

    frames: np.ndarray
    times: np.ndarray
    rate: float


def load_clip(part: MediaPart, *, fps: float, min_frames: int, max_frames: int) -> Clip:
    """The whole clip in memory, at its full size."""
    plan = plan_clip(part, fps=fps, min_frames=min_frames, max_frames=max_frames)
    return Clip(np.stack(list(plan.frames())), plan.times, plan.rate)


def plan_clip(part: MediaPart, *, fps: float, min_frames: int, max_frames: int) -> ClipPlan:
    """Chooses the frames of `part`; its own `fps`, `start` and `end` go before the run's settings.

    Raises BadRow: `media_missing`, `media_corrupt`, `media_span`, `media_too_large`,
    `video_rate`, `aspect_ratio`, `timeout`. The clip's time begins here and ends with its last frame.
    """
    deadline = Deadline(f"clip {part.label}")
    if (frames := frame_parts(part)) is not None:
        return _plan_frames(part, frames, max_frames, deadline)
    source = read_media(part, deadline)
    file = _File(source, part.label, deadline)
    pts = file.timestamps
    tick = file.time_base
    seconds = (np.array(pts) - pts[0]) * tick.numerator / tick.denominator
    end_of_file = seconds[-1] + float(file.last_duration * tick)
    keep = _span(part, seconds, end_of_file)
    start, end = seconds[keep[0]], seconds[keep[-1] + 1] if keep[-1] + 1 < len(seconds) else end_of_file
    duration = round(end - start, CLOCK_DIGITS)
    count = num_frames(len(keep), duration, part.fps or fps, min_frames=min_frames, max_frames=max_frames)
    chosen = keep[spread(seconds[keep], count)]
    targets = [pts[i] for i in chosen]
    rate = len(targets) / duration if duration > 0 else part.fps or fps
    return ClipPlan(seconds[chosen], rate, lambda: file.frames(targets))


def num_frames(total: int, duration: float, fps: float, *, min_frames: int, max_frames: int) -> int:
    """How many of `total` frames lasting `duration` seconds are used at `fps`, at least 1."""
    wanted = int((duration + CLOCK_SLACK) * fps)
    return max(1, min(max(wanted, min_frames), max_frames, total))


def spread(seconds: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` frames nearest to even steps of time from the first frame to the last.

    At a constant rate this is `round(linspace(0, n - 1, count))`. No frame is taken twice.
    """
    indices = np.arange(len(seconds))
    if count >= len(seconds):
        return indices
    targets = np.linspace(seconds[0], seconds[-1], count)
    # The rounding before the rounding keeps exact halves halves, as they are for frame numbers.
    chosen = np.rint(np.interp(targets, seconds, indices).round(CLOCK_DIGITS)).astype(int)
    # Where frames are sparse, two targets may share one: the later moves on, then all fit in from the end.
    chosen = np.maximum.accumulate(chosen - np.arange(count)) + np.arange(count)
    return np.minimum(chosen, len(seconds) - count + np.arange(count))


def _span(part: MediaPart, seconds: np.ndarray, end_of_file: float) -> np.ndarray:
    """Indices of the frames inside [start, end)."""
    start = 0.0 if part.start is None else part.start
    end = np.inf if part.end is None else part.end
    # The frame on screen at `start` began before it.
    first = max(int(np.searchsorted(seconds, start + 1e-6, side="right")) - 1, 0)
    keep = np.arange(len(seconds))[first:]
    keep = keep[seconds[keep] < end - 1e-6]
    if len(keep) == 0 or start >= end_of_file > 0:   # a lone frame may state no duration
        lasts = f"the clip lasts {end_of_file:.3f} s"
        raise BadRow("media_span", f"no frame of {part.label} lies in {start}–{end} s; {lasts}")
    return keep


class _File:
    """An encoded clip: time stamps from its packets, without decoding, and frames on demand."""

    def __init__(self, source: bytes | Path, name: str, deadline: Deadline) -> None:
        self._source, self._name, self._deadline = source, name, deadline
        self._sized = True   # that the file says how large its frames are, in a way that was believed
        with self._open() as container:
            stream = self._stream(container)
            context = stream.codec_context
            check_size(max(context.width, 1), max(context.height, 1), f"clip {name}", MAX_FRAME_PIXELS)
            self.time_base = stream.time_base or Fraction(1, 1)
            packets = self._guard(lambda: self._packets(container.demux(stream)))
            declared, step = stream.frames, stream.average_rate
        packets = [packet for packet in packets if packet.is_frame]
        if not packets or len(packets) < declared:
            found = f"{len(packets)} of {declared} frames are there"
            raise BadRow("media_corrupt", f"clip {name} is cut: {found}")
        if any(packet.stamp is None for packet in packets):
            raise BadRow("media_corrupt", f"clip {name} has frames without a time stamp")
        shown = sorted(packet for packet in packets if packet.is_shown)
        if not shown:
            raise BadRow("media_corrupt", f"clip {name} shows no frame")
        self.timestamps: list[int] = [packet.stamp for packet in shown]
        self._keyframes = [packet.stamp for packet in shown if packet.is_keyframe]
        gap = int(1 / (step * self.time_base)) if step else 0
        self.last_duration: int = shown[-1].duration or gap

    def _packets(self, packets: Iterator[av.Packet]) -> list[_Facts]:
        facts = []
        for packet in packets:
            self._deadline.check()
            facts.append(_facts(packet))
            if len(facts) > MAX_CLIP_FRAMES:
                raise BadRow("media_too_large", f"clip {self._name} has more than {MAX_CLIP_FRAMES:,} frames")
        return facts

    def frames(self, targets: list[int], *, seek: bool = True) -> Iterator[np.ndarray]:
        """The frames with the time stamps `targets` (ascending), skipping to key frames between them."""
        with self._open() as container:
            stream = self._stream(container)
            decoder, position = container.decode(stream), self.timestamps[0]
            reformatter = VideoReformatter()   # one for all: setting up a conversion takes a millisecond
            size: tuple[int, int] | None = None
            for done, target in enumerate(targets):
                jumped = seek and self._keyframe_before(target) > position
                if jumped:
                    decoder = self._decode_from(container, stream, target)
                while (frame := self._guard(lambda decoder=decoder: next(decoder, None))) is not None:
                    position = _stamp(frame)
                    if position is not None and position >= target:
                        break
                if frame is not None and position != target and jumped:   # this format cannot seek exactly
                    yield from self.frames(targets[done:], seek=False)
                    return
                if frame is None or position != target:
                    at = float((target - self.timestamps[0]) * self.time_base)
                    raise BadRow("media_corrupt", f"clip {self._name}: the frame at {at:.3f} s is missing")
                check_size(frame.width, frame.height, f"a frame of clip {self._name}", MAX_FRAME_PIXELS)
                size = size or (frame.width, frame.height)   # later ones may have another, in the stream
                pixels = reformatter.reformat(frame, *size, format="rgb24").to_ndarray()
                yield _upright(pixels, frame.rotation)

    def _keyframe_before(self, pts: int) -> int:
        at = int(np.searchsorted(self._keyframes, pts, side="right")) - 1
        return self._keyframes[at] if at >= 0 else self.timestamps[0]

    def _decode_from(self, container: av.container.InputContainer, stream: av.VideoStream, target: int):
        # Seeking backwards from the key frame itself lands on it, or on an earlier one: both are right.
        self._guard(lambda: container.seek(self._keyframe_before(target), stream=stream, backward=True))
        return container.decode(stream)

    def _open(self) -> av.container.InputContainer:
        source = io.BytesIO(self._source) if isinstance(self._source, bytes) else str(self._source)
        options = {"metadata_errors": "replace", "options": DECODER_OPTIONS}   # titles in any encoding
        options["timeout"] = self._deadline.calls
        return self._guard(lambda: av.open(source, **options))

    def _stream(self, container: av.container.InputContainer) -> av.VideoStream:
        if not container.streams.video:
            raise BadRow("media_corrupt", f"clip {self._name} has no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise BadRow("media_corrupt", f"clip {self._name} is of an unknown codec")
        self._sized = stream.codec_context.width > 0
        stream.codec_context.options = DECODER_OPTIONS
        stream.codec_context.thread_count = 1   # loader workers are the parallelism
        return stream

    def _guard(self, call: Callable):
        try:
            result = call()
        except (av.FFmpegError, EOFError, OSError, ValueError, MemoryError) as error:
            if isinstance(error, BadRow):
                raise
            self._deadline.check()   # the library may have stopped for it
            if isinstance(error, av.error.ArgumentError) and not self._sized:
                most = f"has frames of more than {MAX_FRAME_PIXELS:,} pixels, or of no size"
                raise BadRow("media_too_large", f"clip {self._name} {most}") from None
            raise BadRow("media_corrupt", f"clip {self._name} cannot be decoded: {reason(error)}") from None
        self._deadline.check()
        return result


class _Facts(NamedTuple):
    """What is kept of a packet; the packet itself would keep the encoded frame in memory."""

    stamp: int | None
    duration: int
    is_frame: bool      # False for the empty packet that ends the stream
    is_shown: bool      # False for frames before the start of an edit list, and for dropped ones
    is_keyframe: bool


def _facts(packet: av.Packet) -> _Facts:
    shown = packet.size > 0 and not packet.is_discard
    is_frame = packet.size > 0 or packet.dts is not None
    return _Facts(_stamp(packet), packet.duration or 0, is_frame, shown, packet.is_keyframe)


def _stamp(item: av.Packet | av.VideoFrame) -> int | None:
    return item.dts if item.pts is None else item.pts   # AVI files state no presentation time


def _upright(pixels: np.ndarray, rotation: int) -> np.ndarray:
    """The frame turned by the camera's rotation, degrees anticlockwise, as the display matrix states it."""
    turns = round(rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def frame_parts(part: MediaPart) -> Sequence[MediaPart] | None:
    """The pictures of a clip that is a list or a folder of them, in order; None for any other clip."""
    if part.frames is not None:
        return part.frames
    if part.path is None or not Path(part.path).is_dir():
        return None
    paths = sorted(p for p in Path(part.path).iterdir() if p.suffix.lower() in FRAME_SUFFIXES)
    if not paths:
        legal = ", ".join(FRAME_SUFFIXES)
        raise BadRow("media_missing", f"the frame folder {part.label} holds no pictures ({legal})")
    return [MediaPart(kind="image", path=str(path)) for path in paths]


def _plan_frames(
    part: MediaPart, pictures: Sequence[MediaPart], max_frames: int, deadline: Deadline
) -> ClipPlan:
    """A clip whose frames are pictures; they share its time."""
    if part.fps is None and len(pictures) > 1:
        raise BadRow(
            "video_rate",
            f"the frames in {part.label} need their rate: give the clip `fps`, as extracted",
        )
    rate = part.fps or 1.0
    seconds = np.arange(len(pictures)) / rate
    keep = _span(part, seconds, len(pictures) / rate)
    chosen = keep[spread(seconds[keep], min(len(keep), max_frames))]

    def frames() -> Iterator[np.ndarray]:
        size = None
        for i in chosen:
            deadline.check()
            try:
                picture = load_picture(pictures[i], deadline)
            except BadRow as bad:
                if bad.kind == "timeout":
                    raise
                raise BadRow(bad.kind, f"frame {i} of {part.label}: {bad}") from None
            size = size or picture.size
            if picture.size != size:
                unlike = f"is {picture.size}, those before it {size}"
                raise BadRow("media_corrupt", f"frame {i} of {part.label}, {pictures[i].label}, {unlike}")
            yield np.asarray(picture)

    rate *= len(chosen) / len(keep)   # every frame unless there were more than `max_frames`
    return ClipPlan(seconds[chosen], rate, frames)
