"""Sounds and clips in the data verbs: opened to their end, measured, heard."""

from __future__ import annotations

import base64
import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from data_prep.cli import app
from data_prep.media import PREVIEW_RATE, heard, open_medium, seconds_of
from data_prep.tones import beeps, write_wav
from lmms_engine.datasets.limits import media_time_limit
from lmms_engine.datasets.schema import MediaPart
from lmms_engine.errors import BadRow

runner = CliRunner()


def sound(path: Path, seconds: float, rate: int = 16_000, channels: int = 1) -> Path:
    """A WAV of noise."""
    values = np.random.default_rng(0).integers(-9000, 9000, (round(seconds * rate), channels))
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(values.astype("<i2").tobytes())
    return path


def rows(path: Path, *parts: dict[str, Any]) -> Path:
    """A row for each part."""
    answer = {"role": "assistant", "content": "a tone"}
    with path.open("w") as file:
        for part in parts:
            text = {"type": "text", "text": "What is it?"}
            messages = [{"role": "user", "content": [part, text]}, answer]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def test_validate_finds_sounds_that_are_damaged(tmp_path: Path) -> None:
    whole = sound(tmp_path / "whole.wav", 1.0).read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[: 44 + 8192])   # what is left of it plays
    (tmp_path / "empty.wav").write_bytes(whole[:44])
    write_wav(tmp_path / "silent.wav", np.zeros(100, "<i2"))   # which is a sound as any other
    parts = [
        {"type": "audio", "audio": "whole.wav"},
        {"type": "audio", "audio": "cut.wav"},
        {"type": "audio", "audio": "empty.wav"},
        {"type": "audio", "audio": "whole.wav", "start": 2.0},
        {"type": "audio", "audio": "whole.wav", "fps": 2},
        {"type": "audio", "audio": "silent.wav"},
    ]
    data = rows(tmp_path / "rows.jsonl", *parts)
    result = runner.invoke(app, ["validate", str(data), "--report", str(tmp_path / "faults.jsonl")])
    assert result.exit_code == 1
    faults = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    found = {fault["row"]: fault["kind"] for fault in faults}
    assert found == {1: "media_corrupt", 2: "media_corrupt", 3: "media_span", 4: "unknown_key"}


def test_validate_opens_every_picture_of_a_list(tmp_path: Path) -> None:
    frame = MediaPart(kind="image", bytes=b"no picture")
    with pytest.raises(BadRow, match="frame 0"):
        open_medium(MediaPart(kind="video", frames=(frame,) * 900, fps=1.0))


def test_what_takes_too_long_is_a_fault(tmp_path: Path) -> None:
    part = MediaPart(kind="audio", path=str(sound(tmp_path / "a.wav", 1.0)))
    with media_time_limit(1e-6), pytest.raises(BadRow) as caught:
        open_medium(part)
    assert caught.value.kind == "timeout"


def test_seconds_of_clips_and_sounds(tmp_path: Path, sample: Path) -> None:
    path = sound(tmp_path / "a.wav", 1.25, rate=44_100, channels=2)
    assert seconds_of(MediaPart(kind="audio", path=str(path))) == 1.25
    assert seconds_of(MediaPart(kind="audio", path=str(path), start=0.5, end=1.0)) == 0.5
    frame = MediaPart(kind="image", path="/nowhere.png")
    assert seconds_of(MediaPart(kind="video", frames=(frame,) * 5, fps=2.0)) == 2.5
    clip = MediaPart(kind="video", path=str(sorted((sample / "videos").glob("*.mp4"))[0]))
    assert seconds_of(clip) > 0.5
    spans = [clip.model_copy(update=span) for span in ({"end": 0.5}, {"start": 0.5})]
    assert sum(map(seconds_of, spans)) == pytest.approx(seconds_of(clip))


def test_stats_counts_seconds(tmp_path: Path) -> None:
    for i, seconds in enumerate((0.25, 1.0, 3.0)):
        sound(tmp_path / f"{i}.wav", seconds)
    data = rows(tmp_path / "rows.jsonl", *({"type": "audio", "audio": f"{i}.wav"} for i in range(3)))
    out = tmp_path / "stats"
    plain = runner.invoke(app, ["stats", str(data)])
    assert "seconds" not in plain.output
    result = runner.invoke(app, ["stats", str(data), "--durations", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "seconds of sounds a row: min 0, p50 1, p90 3, p99 3, max 3" in result.output
    assert json.loads((out / "stats.json").read_text())["audio_seconds"]["sum"] == 4.25
    assert (out / "audio_seconds.png").is_file()
    (tmp_path / "1.wav").unlink()
    result = runner.invoke(app, ["stats", str(data), "--durations"])
    assert "2 rows, 1 unusable (media_missing 1)" in result.output


def test_a_preview_plays_what_a_model_hears(tmp_path: Path) -> None:
    write_wav(tmp_path / "tones.wav", beeps([440.0, 660.0]))
    sound(tmp_path / "long.wav", 31.0, rate=8_000, channels=2)
    parts = [
        {"type": "audio", "audio": "tones.wav"},
        {"type": "audio", "audio": "long.wav"},
        {"type": "audio", "audio": "long.wav", "start": 1.0, "end": 3.0},
    ]
    data, page = rows(tmp_path / "rows.jsonl", *parts), tmp_path / "page.html"
    assert runner.invoke(app, ["preview", str(data), "--out", str(page)]).exit_code == 0
    sounds = re.findall(r"<audio controls src=\"data:audio/wav;base64,([^\"]+)\"", page.read_text())
    first, second, third = map(base64.b64decode, sounds)
    assert first == (tmp_path / "tones.wav").read_bytes()   # at 16 kHz and alone it is what it was
    for played, seconds in ((second, 30), (third, 2)):
        with wave.open(io.BytesIO(played)) as file:
            assert (file.getframerate(), file.getnchannels()) == (PREVIEW_RATE, 1)
            assert file.getnframes() == seconds * PREVIEW_RATE
    assert "31.0 s, 8000 Hz, 2 channels, the first 30 s" in page.read_text()
    assert "2.0 s, 8000 Hz, 2 channels<" in page.read_text()


def test_loud_floats_are_clipped_not_wrapped(tmp_path: Path) -> None:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="wav") as container:
        stream = container.add_stream("pcm_f32le", rate=PREVIEW_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.full((1, 64), 1.5, np.float32), format="flt", layout="mono")
        frame.sample_rate = PREVIEW_RATE
        container.mux([*stream.encode(frame), *stream.encode(None)])
    played, note = heard(MediaPart(kind="audio", bytes=buffer.getvalue()))
    with wave.open(io.BytesIO(played)) as file:
        assert set(np.frombuffer(file.readframes(64), "<i2")) == {32767}
    assert note.startswith("0.0 s, 16000 Hz, 1 channel")
