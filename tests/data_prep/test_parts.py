"""Work in parts: what a killed call leaves is used, or gone, and never half of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_prep import parts, rows
from data_prep.parts import discard, joined, put, stamp, work_folder
from data_prep.rows import progress_bar


def test_parts_of_the_same_key_stay_and_those_of_another_go(tmp_path: Path) -> None:
    folder = work_folder(tmp_path / "out", {"a": 1, "path": Path("p")})
    with put(folder, "part-0") as path:
        path.write_text("x")
    assert work_folder(tmp_path / "out", {"path": Path("p"), "a": 1}) == folder
    assert (folder / "part-0").read_text() == "x"
    work_folder(tmp_path / "out", {"a": 2, "path": Path("p")})
    assert not (folder / "part-0").exists()


def test_a_part_appears_when_it_is_whole(tmp_path: Path) -> None:
    folder = work_folder(tmp_path / "out", {})

    def cut_off() -> None:
        with put(folder, "part-0") as path:
            path.write_text("half")
            assert not (folder / "part-0").exists()
            raise ValueError("cut")

    with pytest.raises(ValueError, match="cut"):
        cut_off()
    assert sorted(item.name for item in folder.rglob("*")) == [".key", ".tmp"]
    with put(folder, "p.png", tmp_path / "media" / "ab") as path:
        path.write_text("whole")
    assert (tmp_path / "media" / "ab" / "p.png").read_text() == "whole"


def test_a_removal_that_was_cut_off_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = work_folder(tmp_path / "out", {"a": 1})
    for name in ("part-0.json", "part-0.jsonl"):   # the note, and what it says is there
        with put(folder, name) as path:
            path.write_text("x")

    def cut_off(where: Path) -> None:
        (where / "part-0.jsonl").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts.shutil, "rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            discard(folder)
    assert (folder / "part-0.json").exists()
    work_folder(tmp_path / "out", {"a": 1})
    assert not (folder / "part-0.json").exists()


def test_joined_and_stamp(tmp_path: Path) -> None:
    folder = work_folder(tmp_path / "out", {})
    for name, text in (("a", "1\n"), ("b", "2\n")):
        (folder / name).write_text(text)
    joined(folder, ["b", "a"], tmp_path / "new" / "file")
    assert (tmp_path / "new" / "file").read_text() == "2\n1\n"
    before = stamp(tmp_path / "new")
    assert before == stamp(tmp_path / "new" / "file")
    shutil.copy(folder / "a", tmp_path / "new" / "other")
    assert stamp(tmp_path / "new") != before
    assert stamp(tmp_path / "nowhere") == []


def test_plain_lines_of_progress_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("checking", 9) as advance:
        advance(1)
    assert capsys.readouterr().err == ""   # short work says nothing
    monkeypatch.setattr(rows, "PLAIN_SECONDS", 0)
    with progress_bar("checking", 9) as advance:
        advance(2)
        advance(3)
    assert capsys.readouterr().err == "checking: 2 of 9, 0 s\nchecking: 5 of 9, 0 s\n"
