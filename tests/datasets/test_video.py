"""The video clock: which frames are used, when they happen, and that they are the frames asked for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from data_prep.clips import encoder, write_clip
from lmms_engine.datasets.schema import MediaPart
from lmms_engine.datasets.video import Clip, load_clip, num_frames, plan_clip, spread
from lmms_engine.errors import BadRow

SECOND = 24   # grey levels by which one second of a test clip brightens


def drawn(times: Sequence[Fraction], size: int = 32) -> list[np.ndarray]:
    """Frames whose brightness states their time."""
    return [np.full((size, size, 3), round(20 + float(t) * SECOND), np.uint8) for t in times]


def seen(clip: Clip) -> np.ndarray:
    """The time that each frame shows."""
    return (clip.frames[:, 8, 8].mean(-1) - 20) / SECOND


def steady(path: Path, count: int, rate: int) -> MediaPart:
    times = [Fraction(i, rate) for i in range(count)]
    write_clip(path, drawn(times), times)
    return MediaPart(kind="video", path=str(path))


def load(part: MediaPart, fps: float = 2.0, max_frames: int = 768) -> Clip:
    return load_clip(part, fps=fps, min_frames=4, max_frames=max_frames)


@pytest.fixture(scope="module")
def eight_seconds(tmp_path_factory: pytest.TempPathFactory) -> MediaPart:
    return steady(tmp_path_factory.mktemp("clips") / "a.mp4", 240, 30)


@pytest.mark.parametrize("fps", [0.1, 1, 2, 4, 7, 60])
@pytest.mark.parametrize(("count", "rate"), [(240, 30), (31, 30), (100, 24), (5, 8), (3, 8)])
def test_a_constant_rate_gives_the_librarys_frames(count: int, rate: int, fps: float) -> None:
    library = Qwen3VLVideoProcessor(max_frames=50)
    meta = VideoMetadata(total_num_frames=count, fps=rate, duration=count / rate)
    expected = library.sample_frames(metadata=meta, fps=fps)
    frames = num_frames(count, count / rate, fps, min_frames=4, max_frames=50)
    chosen = spread(np.array([i / rate for i in range(count)]), frames)
    np.testing.assert_array_equal(chosen, expected)


@pytest.mark.parametrize("rate", [24, 30])
def test_at_its_own_rate_a_clip_loses_no_frame(tmp_path: Path, rate: int) -> None:
    """Durations such as 7/30 s have no exact decimal form; a clip of 7 frames has 7 all the same."""
    for count in (5, 7, 8, 10):
        assert len(load(steady(tmp_path / f"{count}.mp4", count, rate), fps=rate).frames) == count


def test_times_and_frames_agree(eight_seconds: MediaPart) -> None:
    """16 frames of 8 s, and what each shows is its time."""
    clip = load(eight_seconds)
    assert clip.frames.shape == (16, 32, 32, 3)
    assert clip.frames.dtype == np.uint8
    assert clip.rate == 2.0
    np.testing.assert_allclose(seen(clip), clip.times, atol=0.06)
    groups = clip.times.reshape(8, 2).mean(1)
    assert [f"{t:.1f}" for t in groups] == ["0.3", "1.3", "2.4", "3.5", "4.5", "5.6", "6.6", "7.7"]


def test_a_variable_rate_keeps_true_time(tmp_path: Path) -> None:
    times = [Fraction(i, 10) for i in range(40)] + [4 + Fraction(i, 30) for i in range(120)]
    write_clip(tmp_path / "v.mp4", drawn(times), times)
    clip = load(MediaPart(kind="video", path=str(tmp_path / "v.mp4")))
    assert len(clip.times) == 16
    assert clip.rate == 2.0
    np.testing.assert_allclose(seen(clip), clip.times, atol=0.06)
    # Even in time to within a frame, although three quarters of the frames lie in the second half.
    np.testing.assert_allclose(np.diff(clip.times), 8 / 15, atol=0.1)


def test_the_parts_own_rate_goes_first(eight_seconds: MediaPart) -> None:
    clip = load(eight_seconds.model_copy(update={"fps": 4.0}))
    assert len(clip.times) == 32
    assert clip.rate == 4.0


def test_a_span_keeps_the_files_clock(eight_seconds: MediaPart) -> None:
    clip = load(eight_seconds.model_copy(update={"start": 2.0, "end": 6.0}))
    assert len(clip.times) == 8
    assert clip.rate == 2.0
    assert clip.times[0] == 2.0
    assert 5.9 < clip.times[-1] < 6.0
    np.testing.assert_allclose(seen(clip), clip.times, atol=0.06)
    with pytest.raises(BadRow, match=r"the clip lasts 8\.000 s") as caught:
        load(eight_seconds.model_copy(update={"start": 9.0}))
    assert caught.value.kind == "media_span"


def test_max_frames_bounds_the_clip(eight_seconds: MediaPart) -> None:
    clip = load(eight_seconds, fps=30, max_frames=10)
    assert len(clip.times) == 10
    assert clip.times[[0, -1]].tolist() == [0.0, pytest.approx(239 / 30)]
    assert clip.rate == 10 / 8


def test_seeking_finds_the_same_frames(eight_seconds: MediaPart) -> None:
    data = Path(eight_seconds.path).read_bytes()
    sparse = load(MediaPart(kind="video", bytes=data), fps=0.5)
    every = load(MediaPart(kind="video", bytes=data), fps=30)
    indices = [int(np.argmin(np.abs(every.times - t))) for t in sparse.times]
    np.testing.assert_array_equal(sparse.frames, every.frames[indices])


def test_a_lone_extracted_frame_needs_no_rate(tmp_path: Path) -> None:
    part = frame_folder(tmp_path / "frames", 1, 1)
    clip = load(part)
    assert clip.times.tolist() == [0.0]
    assert len(clip.frames) == 1


def test_spread_never_repeats_a_frame() -> None:
    seconds = np.array([0.0, 5.0, 5.1, 5.2, 5.3, 10.0])
    for count in range(1, 8):
        chosen = spread(seconds, count)
        assert len(set(chosen.tolist())) == len(chosen) == min(count, 6)
        assert (np.diff(chosen) > 0).all()
        assert chosen.min() >= 0
        assert chosen.max() <= 5


def frame_folder(folder: Path, count: int, rate: int) -> MediaPart:
    folder.mkdir()
    for i, frame in enumerate(drawn([Fraction(i, rate) for i in range(count)])):
        Image.fromarray(frame).save(folder / f"{i:03}.png")
    return MediaPart(kind="video", path=str(folder))


def test_extracted_frames_are_not_sampled_again(tmp_path: Path) -> None:
    """They keep the rate that is stated."""
    part = frame_folder(tmp_path / "frames", 16, 2)
    clip = load(part.model_copy(update={"fps": 2.0}), fps=1.0)
    assert clip.times.tolist() == [i / 2 for i in range(16)]
    assert clip.rate == 2.0
    np.testing.assert_allclose(seen(clip), clip.times, atol=0.03)


def test_extracted_frames_need_their_rate(tmp_path: Path) -> None:
    part = frame_folder(tmp_path / "frames", 3, 2)
    with pytest.raises(BadRow, match="fps") as caught:
        load(part)
    assert caught.value.kind == "video_rate"
    (tmp_path / "none").mkdir()
    with pytest.raises(BadRow, match="none") as caught:
        load(MediaPart(kind="video", path=str(tmp_path / "none"), fps=2.0))
    assert caught.value.kind == "media_missing"


def test_extracted_frames_of_unlike_size_are_refused(tmp_path: Path) -> None:
    part = frame_folder(tmp_path / "frames", 3, 2)
    Image.new("RGB", (40, 32)).save(tmp_path / "frames" / "001.png")
    with pytest.raises(BadRow, match="001"):
        load(part.model_copy(update={"fps": 2.0}))


def test_cut_files_are_corrupt(tmp_path: Path, eight_seconds: MediaPart) -> None:
    data = Path(eight_seconds.path).read_bytes()
    for cut in (data[:50], data[: len(data) // 2], data[: len(data) * 9 // 10], b"no clip at all" * 9):
        with pytest.raises(BadRow) as caught:
            load(MediaPart(kind="video", bytes=cut), fps=30)
        assert caught.value.kind == "media_corrupt"


def test_garbled_files_decode_or_are_bad_rows(tmp_path: Path) -> None:
    part = steady(tmp_path / "a.mp4", 8, 8)
    data = Path(part.path).read_bytes()
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(80):
        garbled = np.frombuffer(data, np.uint8).copy()
        garbled[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        try:
            outcomes.add(load(MediaPart(kind="video", bytes=garbled.tobytes())).frames.ndim)
        except BadRow as error:
            outcomes.add(error.kind)
    assert {4, "media_corrupt"} <= outcomes


def test_the_cameras_rotation_is_applied(tmp_path: Path) -> None:
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:16, :32] = 255   # bright in the upper left
    times = [Fraction(i, 4) for i in range(4)]
    write_clip(tmp_path / "r.mp4", [pixels] * 4, times)
    data = bytearray((tmp_path / "r.mp4").read_bytes())
    matrix = data.index(b"tkhd") + 4 + 4 + 20 + 16   # version and flags, times, reserved
    quarter_clockwise = (0, 65536, 0, -65536, 0, 0, 0, 0, 0x40000000)
    data[matrix : matrix + 36] = struct.pack(">9i", *quarter_clockwise)
    clip = load(MediaPart(kind="video", bytes=bytes(data)))
    assert clip.frames.shape[1:] == (64, 32, 3)
    assert clip.frames[0, 8, 24].min() > 200   # now in the upper right
    assert clip.frames[0, 8, 8].max() < 50


def test_sound_is_no_clip(tmp_path: Path) -> None:
    import wave

    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    with pytest.raises(BadRow, match="no video stream"):
        plan_clip(MediaPart(kind="video", path=str(tmp_path / "a.wav")), fps=1, min_frames=4, max_frames=8)


def test_a_file_of_one_frame(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "one.mp4"), "w") as container:
        stream = container.add_stream(encoder(), rate=30)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 99, np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode(None)])
    clip = load(MediaPart(kind="video", path=str(tmp_path / "one.mp4")))
    assert clip.times.tolist() == [0.0]
    assert clip.frames.shape == (1, 32, 32, 3)


def frame_list(folder: Path, count: int, rate: int) -> MediaPart:
    """The same frames as a list: paths, a file's bytes, an address."""
    frame_folder(folder, count, rate)
    paths = sorted(folder.iterdir())
    frames = [MediaPart(kind="image", path=str(path)) for path in paths]
    frames[1] = MediaPart(kind="image", bytes=paths[1].read_bytes())
    frames[2] = MediaPart(kind="image", url=paths[2].as_uri())
    return MediaPart(kind="video", frames=tuple(frames), fps=rate)


def test_a_list_of_frames_is_the_folders_clip(tmp_path: Path) -> None:
    part = frame_list(tmp_path / "frames", 7, 2)
    folder = load(MediaPart(kind="video", path=str(tmp_path / "frames"), fps=2.0))
    clip = load(part, fps=1.0)
    assert clip.times.tolist() == folder.times.tolist() == [i / 2 for i in range(7)]
    assert clip.rate == folder.rate == 2.0
    np.testing.assert_array_equal(clip.frames, folder.frames)
    span = load(part.model_copy(update={"start": 1.0, "end": 2.0}))
    assert span.times.tolist() == [1.0, 1.5]
    np.testing.assert_array_equal(span.frames, clip.frames[2:4])
    few = load(part, max_frames=3)
    assert few.times.tolist() == [0.0, 1.5, 3.0]
    assert few.rate == pytest.approx(2 * 3 / 7)


def test_frames_in_another_order_are_another_clip(tmp_path: Path) -> None:
    part = frame_list(tmp_path / "frames", 4, 2)
    backwards = load(part.model_copy(update={"frames": part.frames[::-1]}))
    np.testing.assert_array_equal(backwards.frames, load(part).frames[::-1])


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"path": "/nowhere.png"}, "media_missing", r"frame 2 of list of 4 frames.*/nowhere\.png"),
        ({"path": None, "bytes": b"no picture"}, "media_corrupt", "frame 2 of list of 4 frames"),
    ],
)
def test_a_list_is_no_better_than_its_frames(
    tmp_path: Path, change: dict[str, object], kind: str, words: str
) -> None:
    part = frame_list(tmp_path / "frames", 4, 2)
    frames = list(part.frames)
    frames[2] = MediaPart(**{"kind": "image", **change})
    with pytest.raises(BadRow, match=words) as caught:
        load(part.model_copy(update={"frames": tuple(frames)}))
    assert caught.value.kind == kind
    with pytest.raises(BadRow, match="need their rate") as caught:
        load(part.model_copy(update={"fps": None}))
    assert caught.value.kind == "video_rate"


def test_a_span_of_a_variable_rate(tmp_path: Path) -> None:
    times = [Fraction(i, 10) for i in range(40)] + [4 + Fraction(i, 30) for i in range(120)]
    write_clip(tmp_path / "v.mp4", drawn(times), times)
    clip = load(MediaPart(kind="video", path=str(tmp_path / "v.mp4"), start=3.0, end=5.0, fps=5.0))
    assert len(clip.times) == 10
    assert clip.times[0] == pytest.approx(3.0)
    assert 4.9 < clip.times[-1] < 5.0
    np.testing.assert_allclose(np.diff(clip.times), 2 / 10, atol=0.11)
    np.testing.assert_allclose(seen(clip), clip.times, atol=0.06)


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_odd_counts_keep_every_frame(tmp_path: Path, count: int) -> None:
    clip = load(steady(tmp_path / "a.mp4", count, 8), fps=8)
    assert clip.times.tolist() == [i / 8 for i in range(count)]
    np.testing.assert_allclose(seen(clip), clip.times, atol=0.06)
