"""The data set as a whole: the same bytes again, whole or absent, one content in two formats."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.clips import read_clip
from data_prep.sample import MIN_ROWS, make_sample
from data_prep.tones import read_wav
from lmms_engine.datasets.schema import parse_row
from lmms_engine.errors import UserError


def contents(folder: Path) -> dict[str, str]:
    """Relative path -> hash of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def test_same_seed_same_bytes_and_another_seed_other_rows(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_sample(tmp_path / name, rows=MIN_ROWS, seed=seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a["train.jsonl"] != c["train.jsonl"]
    tokenizer = (
        "processor/qwen3_vl/tokenizer.json"  # the ids in a recipe's config must hold for every data set
    )
    assert a[tokenizer] == c[tokenizer]


def test_no_network_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was opened")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert make_sample(tmp_path / "a", rows=MIN_ROWS).made


def test_row_counts_and_size(sample: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    assert len(rows["train"]) == 240
    assert len(rows["heldout"]) == 24
    assert len(rows["classes"]) == 120
    assert rows.keys() == {
        *(f"{kind}{part}" for kind in ("audio", "classes", "text") for part in ("", "_heldout")),
        "train",
        "heldout",
    }
    ids = [row["id"] for chats in rows.values() for row in chats]
    assert len(ids) == len(set(ids))
    assert json.loads((sample / "sample.json").read_text())["counts"] == {k: len(v) for k, v in rows.items()}
    assert sum(path.stat().st_size for path in sample.rglob("*")) < 15e6 * 240 / 2000 + 1e6


def test_parquet_holds_the_same_rows(sample: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    for stem, expected in rows.items():
        assert without_nulls(pq.read_table(sample / f"{stem}.parquet").to_pylist()) == expected


def test_every_row_parses_and_its_media_exist(sample: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    used = set()
    for stem, expected in rows.items():
        for raw, table_row in zip(
            expected, pq.read_table(sample / f"{stem}.parquet").to_pylist(), strict=True
        ):
            row = parse_row(raw, sample)
            assert row.id == raw["id"]
            assert row.meta == raw["meta"]
            asked, *_, answered = row.messages
            words = asked if raw["meta"]["kind"] == "drawing" else answered
            assert words.text == raw["meta"]["answer"]
            assert parse_row(table_row, sample) == row
            used |= {Path(part.path) for part in row.media()}
    # No file without a row, no row without its file.
    assert used == {path for name in ("images", "videos", "audio") for path in (sample / name).iterdir()}


def test_every_media_file_opens(sample: Path) -> None:
    formats = set()
    sizes = set()
    for path in (sample / "images").iterdir():
        with Image.open(path) as image:
            image.load()
            formats.add(image.format)
            sizes.add(image.size)
    assert formats == {"PNG", "JPEG"}
    assert len(sizes) >= 4
    for path in (sample / "videos").iterdir():
        assert 8 <= len(read_clip(path)[0]) <= 16
    for path in (sample / "audio").iterdir():
        assert len(read_wav(path)) > 1000


def test_heldout_media_never_occur_in_training(sample: Path) -> None:
    def pixels(path: Path) -> bytes:
        if path.suffix == ".mp4":
            return np.stack(read_clip(path)[0]).tobytes()
        return path.read_bytes() if path.suffix == ".wav" else np.asarray(Image.open(path)).tobytes()

    for folder in ("images", "videos", "audio"):
        train, heldout = set(), set()
        for path in (sample / folder).iterdir():
            (heldout if "heldout" in path.name else train).add(pixels(path))
        assert train
        assert heldout
        assert not train & heldout


def test_a_present_folder_is_left_alone_with_if_missing(tmp_path: Path) -> None:
    out = tmp_path / "a"
    make_sample(out, rows=MIN_ROWS)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = make_sample(out, rows=MIN_ROWS, if_missing=True)
    assert not again.made
    assert again.counts["train"] == MIN_ROWS
    assert not again.notes
    other = make_sample(out, rows=MIN_ROWS + 1, seed=3, if_missing=True)
    assert [note.split(" with ")[1].split(",")[0] for note in other.notes] == [f"rows={MIN_ROWS}", "seed=0"]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_present_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "a"
    make_sample(out, rows=MIN_ROWS)
    with pytest.raises(UserError, match=r"is there: --if-missing keeps it, --overwrite replaces it"):
        make_sample(out, rows=MIN_ROWS)
    (out / "images" / "stray.png").write_bytes(b"")
    assert make_sample(out, rows=MIN_ROWS + 1, overwrite=True).counts["train"] == MIN_ROWS + 1
    assert not (out / "images" / "stray.png").exists()


def test_the_users_own_data_are_kept(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.jsonl").write_text("{}\n")
    summary = make_sample(own, if_missing=True)
    assert not summary.made
    assert "data of your own" in summary.notes[0]
    assert contents(own).keys() == {"train.jsonl"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    for options in ({}, {"if_missing": True}, {"overwrite": True}):
        with pytest.raises(UserError, match="holds something else than sample data"):
            make_sample(other, rows=MIN_ROWS, **options)
    assert (other / "thesis.txt").read_text() == "precious"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert make_sample(tmp_path / "a", rows=MIN_ROWS, if_missing=True).made


@pytest.mark.parametrize("when", [1, 10, 56])
def test_a_killed_run_leaves_nothing_that_counts_as_present(when: int, tmp_path: Path) -> None:
    out = tmp_path / "a"

    def die(done: int, total: int) -> None:
        assert total == 56  # 4 tones of each split, 8 rows of each split of the other three kinds of file
        if done == when:
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(
        target=make_sample, args=(out,), kwargs={"rows": MIN_ROWS, "progress": die}
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert any(tmp_path.iterdir())  # it had begun
    assert make_sample(out, rows=MIN_ROWS, if_missing=True).made
    make_sample(tmp_path / "b", rows=MIN_ROWS)
    assert contents(out) == contents(tmp_path / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_an_error_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise OSError("disk full")

    make_sample(tmp_path / "a", rows=MIN_ROWS)
    before = contents(tmp_path / "a")
    with pytest.raises(UserError, match=r"could not write .*/a: disk full"):
        make_sample(tmp_path / "a", rows=MIN_ROWS + 5, overwrite=True, progress=fail)
    assert contents(tmp_path / "a") == before  # the old one stays until the new one is whole
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_two_at_once_do_the_work_once(tmp_path: Path) -> None:
    out = tmp_path / "a"
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()

    def work() -> None:
        results.put(make_sample(out, rows=MIN_ROWS, if_missing=True).made)

    children = [fork.Process(target=work) for _ in range(2)]
    for child in children:
        child.start()
    made = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(60)
    assert sorted(made) == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": MIN_ROWS - 1}, "rows=7: at least 8 are needed"),
        ({"if_missing": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        make_sample(tmp_path / "a", **options)
    assert not list(tmp_path.iterdir())
