"""WebDataset: tar files in which neighbours of one name and several endings are one sample."""

from __future__ import annotations

import glob
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.convert import llava
from data_prep.convert.common import Options, Record, Records, answer, as_text, ask, medium, need, part
from data_prep.parts import stamp
from lmms_engine.errors import BadRow, UserError

KINDS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"), "image"),
    **dict.fromkeys(("mp4", "webm", "mkv", "mov", "avi"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a"), "audio"),
}
CAPTION = ("caption", "text")
PROMPTS = {
    "image": "Describe the picture.",
    "video": "Describe the clip.",
    "audio": "Write down what is said.",
}


def records(path: Path) -> Records:
    """Samples of a tar file, of a folder of them or of a glob: ending -> bytes, and `__key__`."""
    text = str(path)
    found = sorted(map(str, path.glob("**/*.tar*"))) if path.is_dir() else sorted(glob.glob(text))
    if not found:
        raise UserError(f"{path}: no tar file")
    return Records(found, _samples, stamp(*map(Path, found)))


def _samples(file: str) -> Iterator[Record]:
    sample: dict[str, Any] = {}
    try:
        with tarfile.open(file, "r|*") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, slash, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                key = folder + slash + stem
                if sample and sample["__key__"] != key:
                    yield f"{file}, sample {sample['__key__']}", sample
                    sample = {}
                data = archive.extractfile(member)
                assert data is not None, "a regular file has contents"
                sample |= {"__key__": key, ending.lower(): data.read()}
    except (tarfile.TarError, EOFError, OSError) as error:
        # What was being read may lack its end.
        where = f"in or after sample {sample['__key__']}" if sample else "at its beginning"
        yield file, BadRow("tar", f"is damaged {where}: {error}")
        return
    if sample:
        yield f"{file}, sample {sample['__key__']}", sample


def row(record: dict[str, Any], options: Options) -> dict[str, Any]:
    """The conversation in the sample's JSON about the sample's media; without one, media and a caption."""
    media = [(KINDS[ending.rpartition(".")[2]], record[ending]) for ending in record if _is_medium(ending)]
    facts = _facts(record)
    if "messages" in facts or "conversations" in facts:
        return _conversation(record["__key__"], facts, media)
    if "txt" in record:
        facts = {"text": _decoded(record["txt"], "txt").strip(), **facts}
    if not media:
        raise BadRow("media_missing", f"the sample holds no medium, only {', '.join(_endings(record))}")
    caption = as_text(need(facts, "caption", CAPTION, options), "caption")
    prompt = options.prompt or PROMPTS[media[0][0]]
    turns = [ask(*(medium(kind, data) for kind, data in media), part(prompt)), answer(caption)]
    return {"id": record["__key__"], "messages": turns}


def _conversation(key: str, facts: dict[str, Any], media: list[tuple[str, bytes]]) -> dict[str, Any]:
    out = llava.row({"id": key, **facts}, Options())
    for kind in dict.fromkeys(kind for kind, _ in media):
        for name in (kind, f"{kind}s"):
            out.pop(name, None)   # the name of the file that lies in the archive
        out[f"{kind}s"] = [data for of, data in media if of == kind]
    return out


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    if "json" not in record:
        return {}
    try:
        facts = json.loads(record["json"])
    except ValueError as error:
        raise BadRow("json", f"its .json is not JSON: {error}") from None
    if not isinstance(facts, dict):
        raise BadRow("json", "its .json is no object")
    return facts


def _decoded(data: bytes, ending: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("text_invalid", f"its .{ending} is not UTF-8: {error}") from None


def _is_medium(ending: str) -> bool:
    return ending.rpartition(".")[2] in KINDS


def _endings(record: dict[str, Any]) -> list[str]:
    return [ending for ending in record if ending != "__key__"]
