"""MP4 clips from frames and their times, written with PyAV: constant or variable frame rate.

    write_clip(Path("x.mp4"), frames, [Fraction(i, 8) for i in range(16)])

No sound, no B-frames, one thread: with one build of PyAV the same frames give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np

from lmms_engine.errors import UserError

# Best first; which are there depends on how PyAV's wheel was built. mpeg4 is FFmpeg's own and always there.
_ENCODERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("libx264", {"crf": "18", "preset": "veryfast", "bf": "0"}),
    ("libopenh264", {}),
    ("mpeg4", {"qscale": "2", "bf": "0"}),
)
# Ticks per second of the file: a multiple of 24, 25, 30, 48, 60 and of the powers of two up to 64.
_TICKS = 19200


def encoder() -> str:
    """Name of the first usable video encoder; UserError if PyAV has none of ours."""
    for name, _ in _ENCODERS:
        try:
            av.codec.Codec(name, "w")
        except ValueError:  # PyAV's UnknownCodecError
            continue
        return name
    raise UserError(f"PyAV has none of the video encoders {', '.join(n for n, _ in _ENCODERS)}; reinstall av")


def write_clip(
    path: Path, frames: Iterable[np.ndarray], times: Sequence[Fraction], end: Fraction | None = None
) -> None:
    """Write frames, each [height, width, 3] uint8 RGB with even sides, as an MP4 file.

    times: when each frame begins, in seconds, rising from 0; uneven steps give a variable frame rate.
    end: when the last frame ends; by default it lasts as long as the one before it.
    """
    if len(times) < 2 or times[0] != 0 or any(b <= a for a, b in pairwise(times)):
        raise ValueError("times: at least two are needed, rising from 0")
    end = times[-1] + (times[-1] - times[-2]) if end is None else end
    ticks = [round(t * _TICKS) for t in (*times, end)]
    lasts = {start: stop - start for start, stop in pairwise(ticks)}
    name = encoder()
    with av.open(str(path), "w", format="mp4") as container:
        stream = None
        for array, tick in zip(frames, ticks[:-1], strict=True):
            if stream is None:
                stream = container.add_stream(
                    name, rate=Fraction(len(times)) / end, options=dict(_ENCODERS)[name]
                )
                stream.height, stream.width = array.shape[:2]
                stream.pix_fmt = "yuv420p"
                stream.codec_context.thread_count = 1
                stream.codec_context.time_base = Fraction(1, _TICKS)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            frame.pts, frame.time_base = tick, Fraction(1, _TICKS)
            _mux(container, stream.encode(frame), lasts)
        _mux(container, stream.encode(None), lasts)


def read_clip(path: Path) -> tuple[list[np.ndarray], list[Fraction]]:
    """All frames [height, width, 3] uint8 RGB of a clip, and when each begins, in seconds."""
    frames, times = [], []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            frames.append(frame.to_ndarray(format="rgb24"))
            times.append(frame.pts * frame.time_base)
    return frames, times


def _mux(
    container: av.container.OutputContainer, packets: Iterable[av.Packet], lasts: dict[int, int]
) -> None:
    for packet in packets:
        # The muxer guesses the length of the last frame from the nominal rate: wrong with uneven times.
        packet.duration = lasts[round(packet.pts * packet.time_base * _TICKS)]
        container.mux(packet)
