"""`data-prep preview`: rows as one HTML page that needs no network and runs no script.

Each row is shown as a conversation with its media where they stand; given a model's processor, also as the
text that the model reads, with the supervised tokens coloured. What is wrong with a row or medium is shown in
its place.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_prep.lengths import Tokens
from data_prep.media import heard
from data_prep.rows import Data, chunks_of, open_data, progress_bar, rows_of
from data_prep.write import whole_text
from lmms_engine.datasets.schema import MediaPart, Message, Row, parse_row
from lmms_engine.datasets.sources import Raw, Source
from lmms_engine.errors import BadRow

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerFast

THUMBNAIL = (320, 240)
FRAMES = 4   # of a clip
REPEATS_SHOWN = 3   # more of one token, as for a picture's patches, are shown as "token × count"

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --good: #1a7f37; --bad: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { border: 1px solid var(--line); border-radius: 8px; padding: 0 1rem 1rem; margin: 1.5rem 0; }
article > header { font: 12px/2.5 ui-monospace, monospace; opacity: .75; overflow-wrap: anywhere; }
.turn { display: grid; grid-template-columns: 6rem 1fr; gap: 1rem; padding: .5rem 0; }
.turn + .turn { border-top: 1px solid var(--line); }
.role { font-weight: 600; }
.text, pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
pre { font: 12px/1.5 ui-monospace, monospace; background: var(--soft); padding: .75rem; border-radius: 6px; }
figure { display: inline-block; margin: 0 .5rem .5rem 0; vertical-align: top; }
figure img { max-width: 100%; border-radius: 4px; display: inline-block; margin-right: 2px; }
figcaption { font-size: 12px; opacity: .75; overflow-wrap: anywhere; }
mark { background: none; color: var(--good); font-weight: 600; }
.repeat { opacity: .6; }
.fault { color: var(--bad); font-weight: 600; }
"""
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"


def page(source: Source, start: int, count: int, tokens: Tokens | None = None) -> Iterator[str]:
    """The page, piece by piece: `count` rows from row number `start` on."""
    yield "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
    yield f"<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">"
    yield "<meta name=\"viewport\" content=\"width=device-width\">"
    yield f"<title>{_text(source.name)}</title><style>{STYLE}</style></head><body>\n"
    yield f"<h1>{_text(source.name)}</h1>\n"
    if tokens is not None:
        yield "<p>Below each conversation: what the model reads; <mark>coloured</mark> is learnt.</p>\n"
    rows = (
        (source.place(chunk.shard, row), raw, source.folder(chunk.shard))
        for chunk in chunks_of(source)
        for row, raw in rows_of(source, chunk)
    )
    with progress_bar("showing", count) as advance:
        for place, raw, folder in islice(rows, start, start + count):
            yield "".join(_article(place, raw, folder, tokens))
            advance(1)
    yield "</body></html>\n"


def _text(value: str) -> str:
    return html.escape(value)


def _article(place: str, raw: Raw, folder: Path, tokens: Tokens | None) -> Iterator[str]:
    yield "<article>"
    try:
        if isinstance(raw, BadRow):
            raise raw
        row = parse_row(raw, folder)
    except BadRow as bad:
        yield f"<header>{_text(place)}</header>{_fault(bad)}</article>\n"
        return
    name = "" if row.id is None else f"{row.id} · "
    yield f"<header>{_text(name + place)}</header>"
    for message in row.messages:
        yield from _turn(message)
    if row.tools:
        yield f"<details><summary>{len(row.tools)} tools</summary><pre>"
        yield f"{_text(json.dumps(row.tools, indent=2, ensure_ascii=False))}</pre></details>"
    if tokens is not None:
        yield from _tokens(row, tokens)
    yield "</article>\n"


def _fault(bad: BadRow) -> str:
    return f"<p class=\"fault\">{_text(bad.kind)}: {_text(str(bad))}</p>"


def _turn(message: Message) -> Iterator[str]:
    yield f"<div class=\"turn\"><div class=\"role\">{message.role}</div><div>"
    for part in message.content:
        if isinstance(part, MediaPart):
            yield _figure(part)
        else:
            yield f"<div class=\"text\">{_text(part.text)}</div>"
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        yield f"<pre>{_text(call.name)}({_text(arguments)})</pre>"
    yield "</div></div>"


# Media -----------------------------------------------------------------------------------------------


def _figure(part: MediaPart) -> str:
    try:
        shown, note = {"image": _picture, "video": _clip, "audio": _sound}[part.kind](part)
    except BadRow as bad:
        return _fault(bad)
    label = part.label if part.bytes is None else f"{part.kind}, {part.label}"
    return f"<figure>{shown}<figcaption>{_text(f'{label} · {note}')}</figcaption></figure>"


def _picture(part: MediaPart) -> tuple[str, str]:
    from lmms_engine.datasets.media import load_picture

    image = load_picture(part)
    return _jpeg(image), f"{image.width} × {image.height}"


def _clip(part: MediaPart) -> tuple[str, str]:
    from PIL import Image

    from lmms_engine.datasets.video import load_clip

    clip = load_clip(part, fps=1.0, min_frames=FRAMES, max_frames=FRAMES)
    frames = [Image.fromarray(frame) for frame in clip.frames]
    times = ", ".join(f"{time:.1f}" for time in clip.times)
    return "".join(map(_jpeg, frames)), f"{frames[0].width} × {frames[0].height}, at {times} s"


def _jpeg(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail(THUMBNAIL)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f"<img alt=\"\" src=\"data:image/jpeg;base64,{data}\">"


def _sound(part: MediaPart) -> tuple[str, str]:
    sound, note = heard(part)
    data = base64.b64encode(sound).decode("ascii")
    return f"<audio controls src=\"data:audio/wav;base64,{data}\"></audio>", note


# Tokens ----------------------------------------------------------------------------------------------


def _tokens(row: Row, tokens: Tokens) -> Iterator[str]:
    try:
        sample = tokens.sample(row)
    except BadRow as bad:
        yield _fault(bad)
        return
    yield f"<p>{len(sample)} tokens, {sample.supervised} supervised</p>"
    if sample.input_ids is None:   # a row that is no text
        return
    # The weight of position t belongs to the token after it.
    supervised = [False, *(sample.loss_weights[:-1] > 0).tolist()]
    pairs = list(zip(sample.input_ids.tolist(), supervised, strict=True))
    yield "<pre>"
    for learnt, run in groupby(pairs, key=lambda pair: pair[1]):
        text = "".join(_decoded([token for token, _ in run], tokens.processor.tokenizer))
        yield f"<mark>{text}</mark>" if learnt else text
    yield "</pre>"


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Escaped text of ids; a long repeat of one token is written as a count."""
    waiting: list[int] = []
    for token, same in groupby(ids):
        count = len(list(same))
        if count <= REPEATS_SHOWN:
            waiting += [token] * count
            continue
        yield _text(tokenizer.decode(waiting))
        waiting = []
        yield f"<span class=\"repeat\">{_text(tokenizer.decode([token]))} × {count}</span>"
    yield _text(tokenizer.decode(waiting))


def preview(
    data: Data,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("preview.html"),
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 20,
    start: Annotated[int, typer.Option(min=0, help="The first row to show, counted from 0.")] = 0,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder of relative media paths; default: the data file's.")
    ] = None,
    processor: Annotated[
        Path | None, typer.Option(help="A model's or processor's folder: show its tokens too.")
    ] = None,
    processor_type: Annotated[
        str | None, typer.Option(help="Its registered name, where the folder does not say.")
    ] = None,
) -> None:
    """Write an HTML page of conversations with their media; one file that needs no network.

    With --processor the text that the model reads stands below each conversation, supervised tokens coloured.

    Examples:

        data-prep preview data/shapes/train.jsonl --out preview.html

        data-prep preview data/mine --processor data/shapes/processor/qwen3_vl --rows 50 --start 1000
    """
    source = open_data(data, data_folder)
    tokens = None if processor is None else Tokens(processor, processor_type)
    if tokens is not None:
        _ = tokens.processor   # what is wrong with it is said before anything is written
    with whole_text(out) as file:
        file.writelines(page(source, start, rows, tokens))
    print(f"wrote: {out} ({out.stat().st_size / 1e6:.1f} MB)")
