"""WAV files of plain tones, for sound questions: 16 kHz, mono, 16 bit."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16_000


def beeps(pitches: Sequence[float], seconds: float = 0.2, pause: float = 0.1) -> np.ndarray:
    """Sine beeps of the given pitches (Hz) one after another, with pauses between, as int16 [num_samples]."""
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    fade = np.minimum(1.0, np.minimum(t, seconds - t) / 0.01)  # 10 ms at either end, so that no beep clicks
    silence = np.zeros(round(pause * SAMPLE_RATE))
    parts = []
    for pitch in pitches:
        parts += [0.5 * fade * np.sin(2 * np.pi * pitch * t), silence]
    return np.round(32767 * np.concatenate(parts[:-1])).astype("<i2")


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write int16 samples [num_samples] as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.tobytes())


def read_wav(path: Path) -> np.ndarray:
    """The int16 samples [num_samples] of a file written by `write_wav`."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
