"""Tones: as long, as high and as many as asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.tones import SAMPLE_RATE, beeps, read_wav, write_wav


def test_pitch_and_length() -> None:
    tone = beeps([440.0], seconds=0.5)
    assert len(tone) == SAMPLE_RATE // 2
    spectrum = np.abs(np.fft.rfft(tone))
    assert abs(np.argmax(spectrum) * 2 - 440) <= 2  # bins of 2 Hz
    assert 0.4 * 32767 < tone.max() <= 0.5 * 32767 + 1


def test_pauses_lie_between_beeps_only() -> None:
    tone = beeps([400.0, 800.0, 600.0], seconds=0.2, pause=0.1)
    assert len(tone) == round(0.8 * SAMPLE_RATE)
    blocks = np.abs(tone.reshape(8, -1).astype(int)).max(axis=1) > 0  # tenths of a second
    assert blocks.tolist() == [True, True, False, True, True, False, True, True]


def test_file_gives_the_samples_back(tmp_path: Path) -> None:
    tone = beeps([440.0])
    write_wav(tmp_path / "tone.wav", tone)
    assert np.array_equal(read_wav(tmp_path / "tone.wav"), tone)
