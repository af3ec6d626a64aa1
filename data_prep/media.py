"""Pictures, clips and sounds as the data verbs need them: opened to their end, measured, heard.

Everything goes through the readers that training uses, so that what is said here is true there.
"""

from __future__ import annotations

import io
import wave
from itertools import islice

from lmms_engine.datasets.parts import MediaPart

SECONDS_HEARD = 30.0     # of a sound in a preview
PREVIEW_RATE = 16_000    # what speech models listen at
EVERY_FRAME = 10**9


def open_medium(part: MediaPart) -> None:
    """Decodes a picture or a sound to its end, and of a clip the frames that a run looks at by default, or
    every picture if it is a list of them. Raises BadRow."""
    if part.kind == "image":
        from lmms_engine.datasets.media import load_picture

        load_picture(part)
    elif part.kind == "video":
        from lmms_engine.config import DatasetSection
        from lmms_engine.datasets.video import frame_parts, plan_clip

        run = DatasetSection()
        most = run.video_max_frames if frame_parts(part) is None else EVERY_FRAME
        for _ in plan_clip(part, fps=run.fps, min_frames=1, max_frames=most).frames():
            pass
    else:
        from lmms_engine.datasets.audio import sound_facts

        sound_facts(part)


def seconds_of(part: MediaPart) -> float:
    """How long a clip or a sound is, or its span; 0 for a picture. Raises BadRow."""
    if part.kind == "image":
        return 0.0
    if part.kind == "video":
        from lmms_engine.datasets.video import plan_clip

        plan = plan_clip(part, fps=1.0, min_frames=1, max_frames=1)
        return len(plan) / plan.rate
    from lmms_engine.datasets.audio import sound_facts

    return sound_facts(part).seconds


def heard(part: MediaPart) -> tuple[bytes, str]:
    """A WAV file of the beginning of a sound, or of its span, mixed and resampled as for a model; and a note.

    Raises BadRow.
    """
    import numpy as np

    from lmms_engine.datasets.audio import sound_chunks, sound_facts

    facts = sound_facts(part)
    (samples,) = islice(sound_chunks(part, rate=PREVIEW_RATE, seconds=SECONDS_HEARD), 1)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, PREVIEW_RATE, 0, "NONE", ""))
        file.writeframes(np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2").tobytes())
    note = f"{facts.seconds:.1f} s, {facts.rate} Hz, {facts.channels} channel{'s' * (facts.channels != 1)}"
    shown = f", the first {SECONDS_HEARD:.0f} s" if facts.seconds > SECONDS_HEARD else ""
    return buffer.getvalue(), note + shown
