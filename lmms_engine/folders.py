"""Names that may mean a folder here or a model on the hub: which of them can only be a folder."""

from __future__ import annotations

import difflib
from pathlib import Path


def missing_folder(name: str | Path, *, bare: bool = True) -> str | None:
    """What to say of a name that is no folder here and cannot be meant as a hub id; else None.

    A hub id is `owner/name`, or, with `bare`, a name alone. One whose owner is a folder here is taken for a
    mistyped path.
    """
    text, folder = str(name), Path(name).expanduser()
    if folder.is_dir():
        return None
    if folder.exists():
        return f"{folder.absolute()} is no folder"
    if not (folder.is_absolute() or text.startswith((".", "~"))):
        owner, slash, rest = text.partition("/")
        if ("/" not in rest and not Path(owner).is_dir()) if slash else bare:
            return None
    near = nearest_folder(folder)
    return f"there is no such folder: {folder.absolute()}" + (f"; did you mean '{near}'?" if near else "")


def nearest_folder(folder: Path) -> Path | None:
    """The folder here whose path differs by misspelt parts only; None if there is none."""
    here = Path(folder.anchor)
    for part in folder.relative_to(folder.anchor).parts:
        if not (here / part).is_dir():
            close = difflib.get_close_matches(part, _folders_in(here), n=1, cutoff=0.6)
            if not close:
                return None
            part = close[0]
        here /= part
    return here


def _folders_in(folder: Path) -> list[str]:
    try:
        return sorted(item.name for item in folder.iterdir() if item.is_dir())
    except OSError:   # not ours to list
        return []
