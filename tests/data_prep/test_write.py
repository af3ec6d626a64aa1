"""Files that appear whole or not at all, and paths that go with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.write import portable, whole, whole_text
from lmms_engine.datasets.schema import parse_row


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with whole_text(path) as file:
        file.write("é")
        assert not path.exists()
    assert path.read_bytes() == "é".encode()
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail() -> None:
        with whole(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_paths_below_the_folder_are_relative_and_others_absolute(tmp_path: Path) -> None:
    here = tmp_path / "here"
    parts = [{"type": "image", "image": name} for name in ("a/b.png", "x/../c.png", "../d.png")]
    parts.append({"type": "image_url", "image_url": {"url": "https://host/e.png"}})
    row = parse_row({"messages": [{"role": "user", "content": parts}]}, here)
    found = [part["image_url"]["url"] for part in portable(row, here)["messages"][0]["content"]]
    assert found == ["a/b.png", "c.png", str(tmp_path / "d.png"), "https://host/e.png"]
