"""Clips: every frame comes back at its own time, at even and uneven rates."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import pytest

from data_prep import clips
from data_prep.clips import read_clip, write_clip
from data_prep.shapes import number_frame, read_number

EVEN = [Fraction(n, 30) for n in range(30)]
# The first second at 10 frames per second, the second one at 30.
UNEVEN = [Fraction(n, 10) for n in range(10)] + [1 + Fraction(n, 30) for n in range(30)]


def usable_encoders() -> list[str]:
    names = []
    for name, _ in clips._ENCODERS:
        try:
            av.codec.Codec(name, "w")
        except ValueError:
            continue
        names.append(name)
    return names


@pytest.fixture(params=usable_encoders())
def with_encoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each encoder that this PyAV has, made the only one."""
    only = tuple(entry for entry in clips._ENCODERS if entry[0] == request.param)
    monkeypatch.setattr(clips, "_ENCODERS", only)
    return request.param


@pytest.mark.parametrize("times", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_frames_come_back_at_their_times(times: list[Fraction], with_encoder: str, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_clip(path, (number_frame(n) for n in range(len(times))), times)
    frames, found = read_clip(path)
    assert [read_number(frame) for frame in frames] == list(range(len(times)))
    assert found == times
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.frames == len(times)
        assert stream.duration * stream.time_base == times[-1] + (times[-1] - times[-2])


def test_the_last_frame_lasts_until_the_stated_end(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_clip(path, (number_frame(n) for n in range(4)), [Fraction(n, 4) for n in range(4)], end=Fraction(3))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.duration * stream.time_base == 3


def test_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        write_clip(tmp_path / name, (number_frame(n) for n in range(30)), EVEN)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize("times", [[], [0], [1, 2], [0, 1, 1], [0, 2, 1]])
def test_times_that_do_not_rise_from_zero_are_refused(times: list[int], tmp_path: Path) -> None:
    frames = (number_frame(n) for n in range(len(times)))
    with pytest.raises(ValueError, match="rising from 0"):
        write_clip(tmp_path / "clip.mp4", frames, [Fraction(t) for t in times])


def test_fewer_frames_than_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        write_clip(tmp_path / "clip.mp4", (number_frame(n) for n in range(3)), EVEN)
