"""`data-prep convert`: data of the usual forms to rows in chat form; one file a form in this folder.

A form is a module with two functions: `records(path)` gives what stands in its files with places, in parts
that processes share, `row(record, options)` makes a row of one; both may give BadRow. What every form shares
happens here: the row is parsed as training parses it, media that lie inside the data become files, and the
rows are written.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from data_prep.convert.common import Options, Records
from data_prep.lock import alone
from data_prep.parts import discard, joined, put, run, work_folder
from data_prep.rows import placed
from data_prep.write import portable
from lmms_engine.datasets.schema import MediaPart, Row, parse_row
from lmms_engine.errors import BadRow, UserError
from lmms_engine.registry import nearest

FORMATS = {
    "alpaca": "instruction, input, output",
    "asr": "manifest of speech: audio_filepath, text, offset, duration",
    "captions": "Parquet (or another table) of pictures and captions",
    "imagenet": "folder of pictures, a sub-folder a class",
    "llava": "LLaVA and ShareGPT: conversations, image(s), keys of the set's own",
    "video_prompts": "CSV (or another table) of clips and prompts, for models that draw clips",
    "vqa": "CSV, TSV, JSON or Parquet of image, question, answer, perhaps choices",
    "webdataset": "tar files of pictures, clips or sounds with .txt or .json beside them",
}

# What `--columns` may name, where a form looks for columns.
COLUMNS = {
    "alpaca": ("id", "instruction", "input", "output"),
    "asr": ("id", "audio", "text", "offset", "duration"),
    "captions": ("id", "image", "caption"),
    "video_prompts": ("id", "video", "prompt", "start", "end", "fps"),
    "vqa": ("id", "image", "question", "answer", "choices"),
    "webdataset": ("caption",),
}

# How files begin -> their suffix. (offset, bytes)
MAGIC = {
    (0, b"\xff\xd8\xff"): ".jpg",
    (0, b"\x89PNG"): ".png",
    (0, b"GIF8"): ".gif",
    (8, b"WEBP"): ".webp",
    (8, b"WAVE"): ".wav",
    (8, b"AVI "): ".avi",
    (4, b"ftyp"): ".mp4",
    (0, b"\x1aE\xdf\xa3"): ".mkv",
    (0, b"fLaC"): ".flac",
    (0, b"ID3"): ".mp3",
    (0, b"OggS"): ".ogg",
    (0, b"BM"): ".bmp",
    (0, b"II*\x00"): ".tif",
    (0, b"MM\x00*"): ".tif",
}


class Converted(NamedTuple):
    """How many rows were written, and how many of each kind of bad ones were left out."""

    rows: int
    bad: Counter[str]


@dataclass
class Converting:
    """Converts part by part; satisfies Work and, as its only one, Stage.

    form: name of the form. base: what relative media paths resolve against. source: for every row's
    `meta.source`. skip: whether a bad row is left out, or ends the work. folder: where the parts lie until
    they are the JSONL file `out`; media inside the data go to `<out's stem>_media`.
    """

    form: str
    records: Records
    options: Options
    base: Path
    source: str | None
    skip: bool
    folder: Path
    out: Path
    title = "converting"

    @property
    def stages(self) -> list[Converting]:
        """Itself."""
        return [self]

    def count(self) -> int:
        """Number of parts."""
        return len(self.records.parts)

    def make(self, number: int) -> None:
        """The rows of a part, and, written last, how many there are."""
        note = _name(number, "json")
        if (self.folder / note).is_file():
            return
        rows, bad = 0, Counter()
        with put(self.folder, _name(number, "jsonl")) as path, open(path, "w", encoding="utf-8") as file:
            for place, record in self.records.read(self.records.parts[number]):
                try:
                    file.write(json.dumps(self._row(record), ensure_ascii=False) + "\n")
                    rows += 1
                except BadRow as error:
                    if not self.skip:
                        hint = "(--on-bad-row skip leaves such rows out)"
                        raise UserError(f"{placed(place, str(error))} {hint}") from None
                    bad[error.kind] += 1
        with put(self.folder, note) as path:
            path.write_text(json.dumps([rows, bad]), encoding="utf-8")

    def _row(self, record: dict[str, Any] | BadRow) -> dict[str, Any]:
        if isinstance(record, BadRow):
            raise record
        made = _form(self.form).row(record, self.options)
        row = parse_row(made if self.source is None else {**made, "source": self.source}, self.base)
        return portable(_unpacked(row, self.folder, self.out), self.out.parent)

    def finish(self) -> Converted:
        """The file, of all parts."""
        rows, bad = 0, Counter()
        for number in range(self.count()):
            more, kinds = json.loads((self.folder / _name(number, "json")).read_text(encoding="utf-8"))
            rows += more
            bad.update(kinds)
        if rows:
            joined(self.folder, [_name(number, "jsonl") for number in range(self.count())], self.out)
        discard(self.folder)
        return Converted(rows, bad)


def _name(number: int, ending: str) -> str:
    return f"part-{number:06d}.{ending}"


def _form(name: str) -> Any:
    if name not in FORMATS:
        raise UserError(f"unknown form '{name}' (legal: {', '.join(FORMATS)}){nearest(name, list(FORMATS))}")
    return importlib.import_module(f"data_prep.convert.{name}")


def _check_columns(form: str, options: Options) -> None:
    legal = COLUMNS.get(form, ())
    for name, column in options.columns.items():
        if name not in legal:
            can = f"legal: {', '.join(legal)}" if legal else f"form '{form}' has fixed names"
            raise UserError(f"--columns {name}={column}: no such name ({can}){nearest(name, list(legal))}")


def convert_rows(
    name: str,
    path: Path,
    out: Path,
    options: Options,
    *,
    media_folder: Path | None = None,
    source: str | None = None,
    skip: bool = False,
    workers: int = 1,
) -> Converted:
    """Writes the rows of `path` to the JSONL file `out`; media inside the data to `<out's stem>_media`.

    media_folder: what relative media paths resolve against; None: the folder of the data. source: goes to
    every row's `meta.source`. skip: go on after a bad row, which else is a UserError.
    """
    form = _form(name)
    if options.draw and not getattr(form, "DRAWS", False):
        raise UserError(f"--draw: form '{name}' has no text that could ask for its media")
    if options.draw and options.prompt is not None:
        raise UserError("--draw and --prompt exclude each other: the text itself asks, or is the answer")
    _check_columns(name, options)
    if media_folder is not None and not media_folder.is_dir():
        raise UserError(f"--media-folder {media_folder}: there is no such folder: {media_folder.absolute()}")
    out, base = out.resolve(), (media_folder or _folder_of(path)).resolve()
    with alone(out):
        records = form.records(path)
        key = {"form": name, "data": records.stamp, "options": asdict(options), "base": base}
        folder = work_folder(out, {**key, "source": source, "skip": skip, "parts": len(records.parts)})
        done = run(Converting(name, records, options, base, source, skip, folder, out), workers)
    if not done.rows:
        kinds = ", ".join(f"{kind} {count}" for kind, count in done.bad.most_common())
        raise UserError(f"{path} has no row that can be converted{f' ({kinds})' if kinds else ''}")
    return done


def _folder_of(path: Path) -> Path:
    """The folder of a file or glob; a folder itself."""
    if path.is_dir():
        return path
    folder = path.parent
    while any(mark in str(folder) for mark in "*?["):
        folder = folder.parent
    return folder


def _unpacked(row: Row, folder: Path, out: Path) -> Row:
    """The row with its bytes written to files, named by their content: the same bytes are one file."""
    media = out.parent / f"{out.stem}_media"
    messages = []
    for message in row.messages:
        content = tuple(
            part.each_file(partial(_to_file, folder, media)) if isinstance(part, MediaPart) else part
            for part in message.content
        )
        messages.append(message.model_copy(update={"content": content}))
    return row.model_copy(update={"messages": tuple(messages)})


def _to_file(folder: Path, media: Path, part: MediaPart) -> MediaPart:
    if part.bytes is None:
        return part
    name = hashlib.blake2b(part.bytes, digest_size=16).hexdigest()
    path = media / name[:2] / f"{name}{suffix_of(part.bytes)}"
    if not path.exists():
        with put(folder, path.name, path.parent) as temporary:
            temporary.write_bytes(part.bytes)
    return part.model_copy(update={"bytes": None, "path": str(path)})


def suffix_of(data: bytes) -> str:
    """The usual suffix of a medium's bytes; `.bin` for what is not recognised."""
    for (offset, magic), suffix in MAGIC.items():
        if data[offset : offset + len(magic)] == magic:
            return suffix
    return ".bin"


def read_columns(pairs: list[str]) -> dict[str, str]:
    """`["image=path", …]` as a dict."""
    out = {}
    for pair in pairs:
        name, equals, column = pair.partition("=")
        if not (name and equals and column):
            raise UserError(f"--columns {pair}: write NAME=COLUMN, as in --columns question=prompt")
        out[name] = column
    return out


_LIST = "; ".join(f"{name} ({what})" for name, what in FORMATS.items())


def convert(
    form: Annotated[str, typer.Argument(metavar="FORM", help=f"One of: {_LIST}.")],
    data: Annotated[Path, typer.Argument(help="File, folder or glob.")],
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")],
    media_folder: Annotated[
        Path | None, typer.Option(help="Folder of relative media paths; default: the data's.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The question, for data that has none.")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="NAME=COLUMN where a column has an unusual name; repeat it.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="A name for every row's meta.source.")] = None,
    on_bad_row: Annotated[
        Literal["stop", "skip"], typer.Option(help="Stop at a row that is of no use, or leave it out.")
    ] = "stop",
    draw: Annotated[
        bool, typer.Option("--draw", help="The text asks and the picture answers: for models that draw.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that convert.")] = 1,
) -> None:
    """Turn data of a usual form into rows in chat form.

    Media that lie inside the data become files in `<name>_media` beside the output. Paths are kept, and
    `validate` says whether they exist. The output appears when it is whole; the same call gives the same
    bytes, and one that was cut off is repeated and goes on.

    Examples:

        data-prep convert llava llava_150k.json --media-folder coco/train2017 --out data/llava.jsonl

        data-prep convert vqa test.csv --columns question=prompt --columns answer=label --out data/vqa.jsonl

        data-prep convert webdataset "shards/*.tar" --prompt "What is this?" --out data/web.jsonl --workers 8

        data-prep convert imagenet imagenet/train --draw --out data/classes.jsonl
    """
    options = Options(prompt, read_columns(columns or []), draw)
    skip = on_bad_row == "skip"
    done = convert_rows(
        form, data, out, options, media_folder=media_folder, source=source, skip=skip, workers=workers
    )
    if done.bad:
        print("left out: " + ", ".join(f"{kind} {count}" for kind, count in done.bad.most_common()))
    print(f"wrote: {out} ({done.rows} rows)")
