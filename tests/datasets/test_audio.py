"""Sounds of any container: every sample, in tune and in time, or a bad row that says what is missing."""

from __future__ import annotations

import io
import wave
from fractions import Fraction
from math import ceil
from pathlib import Path

import av
import numpy as np
import pytest

from data_prep.clips import write_clip
from lmms_engine.datasets import audio
from lmms_engine.datasets.audio import load_sound, sound_chunks, sound_facts
from lmms_engine.datasets.limits import media_time_limit
from lmms_engine.datasets.schema import MediaPart
from lmms_engine.errors import BadRow

RATE = 16_000
# container, encoder, its rate
FORMS = {
    "wav": ("wav", "pcm_s16le", 44_100),
    "wav of bytes": ("wav", "pcm_u8", 44_100),
    "wav of 24 bits": ("wav", "pcm_s24le", 48_000),
    "wav of floats": ("wav", "pcm_f32le", 22_050),
    "aiff": ("aiff", "pcm_s16be", 44_100),
    "flac": ("flac", "flac", 44_100),
    "mp3": ("mp3", "libmp3lame", 44_100),
    "ogg": ("ogg", "libopus", 48_000),
    "mp4": ("mp4", "aac", 44_100),
    "webm": ("webm", "libopus", 48_000),
}


def tones(rate: int, seconds: float, *pitches: float) -> np.ndarray:
    """A sine of amplitude 0.5 for each channel, float32 [channels, n]."""
    t = np.arange(round(rate * seconds)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * pitch * t) for pitch in pitches]).astype(np.float32)


def encoded(samples: np.ndarray, form: str, codec: str, rate: int) -> bytes:
    """The samples in a container."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo"}[len(samples)]
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        for at in range(0, samples.shape[1], 4096):
            block = np.ascontiguousarray(samples[:, at : at + 4096])
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, at
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def wav(values: np.ndarray, rate: int) -> bytes:
    """16-bit samples [n, channels] in a WAV, written by Python itself."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((values.shape[1], 2, rate, 0, "NONE", ""))
        file.writeframes(values.astype("<i2").tobytes())
    return buffer.getvalue()


def part(data: bytes, **span: float) -> MediaPart:
    return MediaPart(kind="audio", bytes=data, **span)


@pytest.fixture(scope="module")
def sounds() -> dict[str, bytes]:
    """1.5 s of 440 Hz on the left and 1000 Hz on the right, in every form."""
    return {name: encoded(tones(f[2], 1.5, 440, 1000), *f) for name, f in FORMS.items()}


@pytest.mark.parametrize("name", FORMS)
def test_tones_keep_pitch_and_loudness(sounds: dict[str, bytes], name: str) -> None:
    samples = load_sound(part(sounds[name]), rate=RATE)
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(1.5 * RATE, abs=0.02 * RATE)   # AAC is filled to a whole frame
    second = samples[RATE // 4 : RATE // 4 + RATE]
    spectrum = np.abs(np.fft.rfft(second * np.hanning(RATE))) * 4 / RATE
    assert sorted(np.argsort(spectrum)[-2:]) in ([440, 1000],)
    # Each is half as loud in the mean of both channels; MP3 loses the most.
    np.testing.assert_allclose(spectrum[[440, 1000]], 0.25, rtol=0.06 if name == "mp3" else 0.01)
    facts = sound_facts(part(sounds[name]))
    assert (facts.rate, facts.channels) == (FORMS[name][2], 2)
    assert ceil(facts.seconds * RATE - 1e-6) == len(samples)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("count", [1, 2, 63, 1000, 8001])
def test_the_length_is_exact(rate: int, count: int) -> None:
    values = np.full((count, 1), 1000)
    samples = load_sound(part(wav(values, rate)), rate=RATE)
    assert len(samples) == ceil(count * RATE / rate)


def test_at_its_own_rate_a_sound_is_its_samples() -> None:
    values = np.random.default_rng(0).integers(-32768, 32768, (5000, 2))
    samples = load_sound(part(wav(values, RATE)), rate=RATE)
    np.testing.assert_array_equal(samples, (values.sum(1) / 65536).astype(np.float32))   # the mean
    one = load_sound(part(wav(values[:, :1], RATE)), rate=RATE)
    np.testing.assert_array_equal(one, (values[:, 0] / 32768).astype(np.float32))


def test_mixing_and_resampling_may_change_places() -> None:
    values = (tones(44_100, 0.5, 300, 700) * 32767).astype(np.int16).T
    mixed = load_sound(part(wav(values, 44_100)), rate=RATE)
    left, right = (load_sound(part(wav(values[:, i : i + 1], 44_100)), rate=RATE) for i in (0, 1))
    np.testing.assert_allclose(mixed, (left + right) / 2, atol=1e-6)


def test_a_resampled_tone_is_the_tone(sounds: dict[str, bytes]) -> None:
    expected = tones(RATE, 1.5, 440, 1000).mean(0)
    samples = load_sound(part(sounds["wav of floats"]), rate=RATE)
    np.testing.assert_allclose(samples[200:-200], expected[200:-200], atol=2e-4)


@pytest.mark.parametrize("name", ["wav", "mp3", "wav of floats"])
@pytest.mark.parametrize("seconds", [0.01, 0.4, 0.75, 9.0])
def test_chunks_join_to_the_whole(sounds: dict[str, bytes], name: str, seconds: float) -> None:
    whole = load_sound(part(sounds[name]), rate=RATE)
    chunks = list(sound_chunks(part(sounds[name]), rate=RATE, seconds=seconds))
    assert {len(chunk) for chunk in chunks[:-1]} <= {round(seconds * RATE)}
    assert 0 < len(chunks[-1]) <= round(seconds * RATE)
    np.testing.assert_array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "ogg", "mp4"])
@pytest.mark.parametrize(("start", "end"), [(0.25, 0.75), (0.5, None), (None, 0.3), (6.5, 7.0), (7.0, None)])
def test_a_span_is_cut_to_the_sample(name: str, start: float | None, end: float | None) -> None:
    form = FORMS[name]
    t = np.arange(8 * form[2]) / form[2]
    rising = 0.4 * np.sin(2 * np.pi * (100 + 150 * t) * t)   # no two moments alike
    data = encoded(rising.astype(np.float32)[None], *form)
    whole = load_sound(part(data), rate=form[2])
    span = load_sound(part(data, start=start, end=end), rate=form[2])
    first, last = (None if at is None else round(at * form[2]) for at in (start, end))
    expected = whole[first:last]
    assert len(span) == len(expected)
    # Where it is sought, AAC's decoder fills in other noise of its own.
    np.testing.assert_allclose(span, expected, atol=2e-2 if name == "mp4" else 0)


def test_a_long_way_in_is_sought() -> None:
    """Not decoded from the beginning: what lies there may even be damaged."""
    data = bytearray(encoded(tones(44_100, 20, 440), "flac", "flac", 44_100))
    end = load_sound(part(bytes(data), start=19.0), rate=44_100)
    middle = len(data) // 3
    data[middle : middle + 40] = bytes(40)
    with pytest.raises(BadRow, match=r"cannot be decoded|is cut"):
        load_sound(part(bytes(data)), rate=44_100)
    np.testing.assert_array_equal(load_sound(part(bytes(data), start=19.0), rate=44_100), end)


@pytest.mark.parametrize("span", [{"start": 1.5}, {"start": 90.0}, {"start": 0.5, "end": 0.500001}])
def test_a_span_without_a_sample(sounds: dict[str, bytes], span: dict[str, float]) -> None:
    for name in ("wav", "mp3"):
        with pytest.raises(BadRow, match=r"the sound lasts \d\.\d+ s") as caught:
            load_sound(part(sounds[name], **span), rate=RATE)
        assert caught.value.kind == "media_span"


def test_the_sound_of_a_clip(tmp_path: Path) -> None:
    times = [Fraction(i, 8) for i in range(12)]
    write_clip(tmp_path / "a.mp4", [np.zeros((32, 32, 3), np.uint8)] * 12, times)
    silent = MediaPart(kind="audio", path=str(tmp_path / "a.mp4"))
    with pytest.raises(BadRow, match="holds no sound") as caught:
        load_sound(silent, rate=RATE)
    assert caught.value.kind == "media_corrupt"
    tone = tones(48_000, 1.5, 440)
    with av.open(str(tmp_path / "a.mp4")) as old, av.open(str(tmp_path / "b.mp4"), "w") as new:
        video = new.add_stream_from_template(old.streams.video[0])
        sound = new.add_stream("aac", rate=48_000, layout="mono")
        for packet in old.demux(video=0):
            if packet.dts is not None:
                packet.stream = video
                new.mux(packet)
        for at in range(0, tone.shape[1], 1024):
            block = np.ascontiguousarray(tone[:, at : at + 1024])
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48_000, at
            new.mux(sound.encode(frame))
        new.mux(sound.encode(None))
    heard = load_sound(MediaPart(kind="audio", path=str(tmp_path / "b.mp4")), rate=RATE)
    spectrum = np.abs(np.fft.rfft(heard[:RATE]))
    assert np.argmax(spectrum) == 440


# Damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", [name for name in FORMS if name != "webm"])
def test_cut_files_are_corrupt(sounds: dict[str, bytes], name: str, keep: float, tmp_path: Path) -> None:
    data = sounds[name][: int(len(sounds[name]) * keep)]
    (tmp_path / "cut").write_bytes(data)
    for cut in (part(data), MediaPart(kind="audio", path=str(tmp_path / "cut"))):
        with pytest.raises(BadRow) as caught:
            load_sound(cut, rate=RATE)
        assert caught.value.kind == "media_corrupt"


def test_a_wav_cut_between_two_blocks_is_corrupt() -> None:
    """Where what is there is whole, the header tells that more was meant."""
    data = wav(np.zeros((20_000, 1)), RATE)
    assert len(load_sound(part(data), rate=RATE)) == 20_000
    with pytest.raises(BadRow, match="8192 of 40000 bytes are there"):
        load_sound(part(data[: 44 + 8192]), rate=RATE)


def test_a_wav_of_unknown_length_is_whole() -> None:
    data = bytearray(wav(np.zeros((2_000, 1)), RATE))
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"   # as written to a pipe
    assert len(load_sound(part(bytes(data)), rate=RATE)) == 2_000


def test_a_damaged_frame_of_flac_is_found(sounds: dict[str, bytes]) -> None:
    data = bytearray(sounds["flac"])
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(BadRow, match=r"cannot be decoded|is cut"):
        load_sound(part(bytes(data)), rate=RATE)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no sound at all" * 20, "cannot be decoded"),
        (wav(np.zeros((0, 1)), RATE), "no sample"),
        (wav(np.zeros((100, 1)), 7), "7 samples a second"),
        (wav(np.zeros((100, 1)), 2_000_000), "samples a second"),
    ],
)
def test_what_is_no_sound(data: bytes, words: str) -> None:
    with pytest.raises(BadRow, match=words) as caught:
        load_sound(part(data), rate=RATE)
    assert caught.value.kind == "media_corrupt"


def test_samples_that_are_no_numbers() -> None:
    data = encoded(np.full((1, 500), np.nan, np.float32), "wav", "pcm_f32le", RATE)
    with pytest.raises(BadRow, match="no numbers"):
        load_sound(part(data), rate=RATE)


def test_time_and_memory_are_bounded(sounds: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with media_time_limit(1e-6), pytest.raises(BadRow) as caught:
        load_sound(part(sounds["wav"]), rate=RATE)
    assert caught.value.kind == "timeout"
    monkeypatch.setattr(audio, "MAX_SAMPLES", RATE)
    with pytest.raises(BadRow, match=r"longer than 1 s at 16000 Hz.*`start` and `end`") as caught:
        load_sound(part(sounds["wav"]), rate=RATE)
    assert caught.value.kind == "media_too_large"
    assert len(list(sound_chunks(part(sounds["wav"]), rate=RATE, seconds=1.0))) == 2
