"""The sample data set: generated on the spot, the same bytes for the same seed, without network.

    data-prep sample --out data/shapes

A folder holds

    train.jsonl, train.parquet          the same rows twice, to try both formats
    heldout.jsonl, heldout.parquet      a tenth as many; their pictures and clips never occur in training
    audio.jsonl, audio.parquet, audio_heldout.jsonl, audio_heldout.parquet      questions about WAV files
    classes.jsonl, classes.parquet, classes_heldout.jsonl, classes_heldout.parquet
                                        a class and a small picture of it, to learn to draw
    text.jsonl, text.parquet, text_heldout.jsonl, text_heldout.parquet      conversations without media
    images/ videos/ audio/              the media, named after their rows
    processor/qwen3_vl, processor/qwen2_5_vl      what `transformers.AutoProcessor.from_pretrained` opens
    processor/qwen3_moe                 a tokenizer, for `transformers.AutoTokenizer`
    processor/sit                       the classes by name, and how pictures are cut
    sample.json                         how it was made; its presence says that the folder is whole

The folder is written under a temporary name beside it and renamed when whole, under a file lock: a killed run
leaves nothing that counts as present, and two at once do the work once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.lock import alone
from lmms_engine.errors import UserError

FORMAT = 2  # raise it when the same arguments give other bytes
DEFAULT_ROWS = 2000
DEFAULT_SEED = 0
MIN_ROWS = 8  # one of each kind
MAX_DRAWN = 2000  # pictures to draw are small: more of them would not all be unlike
MARKER = "sample.json"

# Called with how many rows are done and how many there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Summary:
    """What `make_sample` found or wrote: `counts` maps a file's stem to its number of rows."""

    folder: Path
    made: bool
    counts: dict[str, int]
    num_bytes: int
    notes: tuple[str, ...] = ()


def make_sample(
    out: Path,
    *,
    rows: int = DEFAULT_ROWS,
    seed: int = DEFAULT_SEED,
    if_missing: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write the sample data set to the folder `out`, or leave a present one alone if `if_missing`.

    rows: number of training rows. Raises UserError if `out` is there and neither option says what to
    do, or if it holds something that is no sample data set.
    """
    if rows < MIN_ROWS:
        raise UserError(f"rows={rows}: at least {MIN_ROWS} are needed, one of each kind")
    if if_missing and overwrite:
        raise UserError(
            "if_missing and overwrite exclude each other: one keeps the folder, the other replaces it"
        )
    if if_missing and _present(out):  # also where the parent is read-only and no lock can be taken
        return _describe(out, rows, seed)
    with alone(out):
        if _present(out):  # perhaps made by another process while this one waited
            if if_missing:
                return _describe(out, rows, seed)
            if not overwrite:
                raise UserError(f"{out.resolve()} is there: --if-missing keeps it, --overwrite replaces it")
        elif out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(f"{out.resolve()} holds something else than sample data; choose another folder")
        partial = out.parent / f".{out.name}.partial"
        if partial.exists():  # left by a killed run; nobody else writes while the lock is held
            shutil.rmtree(partial)
        try:
            _write(partial, rows, seed, progress)
            if _present(out):
                shutil.rmtree(out)
            os.rename(partial, out)
        except OSError as error:
            # A full disk often names no file.
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"could not write {out.resolve()}: {error}") from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return _summary(out, made=True)


def _present(out: Path) -> bool:
    """Whether the folder is whole: ours by its marker, or the user's own data by its training rows."""
    return (out / MARKER).is_file() or (out / "train.jsonl").is_file()


def _describe(out: Path, rows: int, seed: int) -> Summary:
    """Summary of a folder that was there, with a note for each thing that was asked otherwise."""
    if not (out / MARKER).is_file():
        note = f"{out} holds data of your own (no {MARKER}); kept as they are"
        return Summary(out, made=False, counts={}, num_bytes=_size(out), notes=(note,))
    asked = {"format": FORMAT, "rows": rows, "seed": seed}
    made = _marker(out)
    notes = tuple(
        f"{out} was made with {key}={made.get(key)}, now {value} is asked for; --overwrite makes it anew"
        for key, value in asked.items()
        if made.get(key) != value
    )
    return _summary(out, made=False, notes=notes)


def _marker(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / MARKER).read_text())
    except ValueError as error:
        raise UserError(f"{folder / MARKER} is damaged ({error}); remove {folder} to make it anew") from None


def _summary(folder: Path, made: bool, notes: tuple[str, ...] = ()) -> Summary:
    return Summary(folder, made, _marker(folder)["counts"], _size(folder), notes)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write(folder: Path, rows: int, seed: int, progress: Progress | None) -> None:
    # Imported here: they bring torch and transformers, and a data set that is present should answer at once.
    from data_prep.chats import Media, kinds_for, make_row
    from data_prep.processors import write_processors

    num_heldout = max(MIN_ROWS, rows // 10)
    num_tones = max(4, rows // 50)
    num_heldout_tones = max(4, rows // 200)
    num_drawn = max(MIN_ROWS, min(rows // 2, MAX_DRAWN))
    num_talks = max(MIN_ROWS, rows // 2)
    plan = {
        "train": kinds_for(rows, random.Random(f"{seed}/train/kinds")),
        "heldout": kinds_for(num_heldout, random.Random(f"{seed}/heldout/kinds")),
        "audio": ["tone"] * num_tones,
        "audio_heldout": ["tone"] * num_heldout_tones,
        "classes": ["drawing"] * num_drawn,
        "classes_heldout": ["drawing"] * max(MIN_ROWS, num_drawn // 5),
    }
    plan |= {"text": ["talk"] * num_talks, "text_heldout": ["talk"] * max(MIN_ROWS, num_talks // 10)}
    total = sum(map(len, plan.values()))
    done = 0
    media = Media(folder)
    for stem, kinds in plan.items():
        made = []
        for n, kind in enumerate(kinds):
            # A generator for each row: a row does not depend on how many come before it.
            rng = random.Random(f"{seed}/{stem}/{n}")
            made.append(make_row(kind, f"{stem}-{n:05d}", rng, media))
            done += 1
            if progress is not None:
                progress(done, total)
        write_rows(folder / stem, made)
    write_processors(folder / "processor")
    counts = {stem: len(kinds) for stem, kinds in plan.items()}
    marker = {"format": FORMAT, "rows": rows, "seed": seed, "counts": counts}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def write_rows(stem: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows in OpenAI chat form as `<stem>.jsonl` and `<stem>.parquet`.

    The Parquet file has one column a key; a part's keys that do not apply are null there, which readers count
    as absent.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(stem.with_suffix(".jsonl"), "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    url = pa.struct([("url", pa.string())])
    part = pa.struct(
        [
            ("type", pa.string()),
            ("text", pa.string()),
            ("image_url", url),
            ("video_url", url),
            ("audio_url", url),
        ]
    )
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    meta = pa.struct([("kind", pa.string()), ("answer", pa.string())])
    schema = pa.schema([("id", pa.string()), ("messages", pa.list_(message)), ("meta", meta)])
    # Several row groups, so that reading in the middle has something to find.
    pq.write_table(pa.Table.from_pylist(rows, schema), stem.with_suffix(".parquet"), row_group_size=256)
