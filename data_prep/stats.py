"""`data-prep stats`: how long rows are, what they hold, where they come from, and how well they pack."""

from __future__ import annotations

import json
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from data_prep.forecast import STRATEGIES, Forecast, Measured, forecast
from data_prep.lengths import Tokens
from data_prep.media import seconds_of
from data_prep.rows import Chunk, Data, chunks_of, in_order, open_data, progress_bar, rows_of
from data_prep.write import whole, whole_text
from lmms_engine.config import PackingKwargs
from lmms_engine.datasets.cost import media_units
from lmms_engine.datasets.pack import DEFAULT_OPEN_BINS
from lmms_engine.datasets.schema import KINDS, Row, parse_row
from lmms_engine.datasets.sources import Source, display_name
from lmms_engine.errors import BadRow, UserError

BARS = 12   # most bars of a histogram in the terminal
BAR_WIDTH = 40
PNG_BARS = 60
SOURCES_SHOWN = 20
TIMED = {"video": "clips", "audio": "sounds"}


class Facts(NamedTuple):
    """What is counted of a row. supervised: tokens, 0 without a processor. seconds: of its clips and of its
    sounds; 0 where they were not asked for."""

    length: int
    supervised: int
    turns: int
    media: tuple[int, ...]   # as KINDS
    source: str
    seconds: tuple[float, ...] = (0.0, 0.0)   # as TIMED
    units: int = 0   # media units, with a processor


@dataclass
class Counted:
    """Facts of a chunk's usable rows, and the kinds of the others."""

    facts: list[Facts] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)


@dataclass
class Counting:
    """Counts a chunk; goes to the worker processes."""

    source: Source
    tokens: Tokens | None = None
    durations: bool = False

    def __call__(self, chunk: Chunk) -> Counted:
        """The facts of the chunk."""
        counted = Counted()
        file = Path(self.source.place(chunk.shard, 0).partition(", ")[0]).name
        for _, raw in rows_of(self.source, chunk):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                row = parse_row(raw, self.source.folder(chunk.shard))
                counted.facts.append(self._facts(row, file))
            except BadRow as bad:
                counted.bad[bad.kind] += 1
        return counted

    def _facts(self, row: Row, file: str) -> Facts:
        kinds = Counter(part.kind for part in row.media())
        if self.tokens is None:
            length, supervised, units = sum(len(message.text.split()) for message in row.messages), 0, 0
        else:
            sample = self.tokens.sample(row)
            length, supervised, units = len(sample), sample.supervised, media_units(sample)
        media = tuple(kinds[kind] for kind in KINDS)
        facts = Facts(
            length, supervised, len(row.messages), media, str(row.meta.get("source", file)), units=units
        )
        if not self.durations:
            return facts
        parts = list(row.media())
        seconds = (sum(seconds_of(part) for part in parts if part.kind == kind) for kind in TIMED)
        return facts._replace(seconds=tuple(seconds))


class Stats:
    """Everything that was counted; a row takes a few bytes."""

    def __init__(self, unit: str) -> None:
        self.unit = unit   # of lengths: tokens or words
        self.lengths = array("Q")
        self.units = array("Q")
        self.turns = array("I")
        self.media = {kind: array("I") for kind in KINDS}
        self.seconds = {kind: array("d") for kind in TIMED}
        self.sources: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()
        self.supervised = 0

    def add(self, counted: Counted) -> None:
        """Takes a chunk."""
        self.bad += counted.bad
        for facts in counted.facts:
            self.lengths.append(facts.length)
            self.units.append(facts.units)
            self.turns.append(facts.turns)
            self.supervised += facts.supervised
            self.sources[facts.source] += 1
            for kind, count in zip(KINDS, facts.media, strict=True):
                self.media[kind].append(count)
            for kind, seconds in zip(TIMED, facts.seconds, strict=True):
                self.seconds[kind].append(seconds)

    def histograms(self) -> Iterator[tuple[str, str, Sequence[int]]]:
        """(name, what is counted, its value for each row), without media that no row has."""
        yield "lengths", f"{self.unit} a row", self.lengths
        yield "turns", "turns a row", self.turns
        for kind, counts in self.media.items():
            if any(counts):
                yield f"{kind}s", f"{kind}s a row", counts
        for kind, seconds in self.seconds.items():
            if any(seconds):
                yield f"{kind}_seconds", f"seconds of {TIMED[kind]} a row", [round(s) for s in seconds]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for stats.json."""
        out: dict[str, Any] = {"rows": len(self.lengths), "unusable": dict(self.bad), "unit": self.unit}
        for name, _, values in self.histograms():
            out[name] = {"sum": sum(values), **percentiles(values)}
        for kind, seconds in self.seconds.items():
            if any(seconds):
                out[f"{kind}_seconds"]["sum"] = round(sum(seconds), 3)   # not that of rounded ones
        if self.unit == "tokens":
            out["supervised"] = self.supervised
        return {**out, "sources": dict(self.sources.most_common())}


def percentiles(values: Sequence[int]) -> dict[str, int]:
    """Least, median, 90th and 99th percentile and largest, by nearest rank."""
    ordered = sorted(values)
    ranks = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: ordered[max(math.ceil(len(ordered) * rank) - 1, 0)] for name, rank in ranks.items()}


def histogram(values: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """(first value, last value, rows) of at most `most` bars of equal width, from the least value on."""
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // most)
    counts = Counter((value - low) // width for value in values)
    bars = (high - low) // width + 1
    return [(low + i * width, low + (i + 1) * width - 1, counts[i]) for i in range(bars)]


def forecasts(stats: Stats, length: int, open_bins: int, ranks: int) -> list[Forecast]:
    """What each strategy makes of the rows, in a shuffled order."""
    rows = [Measured(*sizes) for sizes in zip(stats.lengths, stats.units, strict=True)]
    random.Random(0).shuffle(rows)
    settings = PackingKwargs(open_bins=open_bins)
    return [forecast(rows, length, ranks, strategy, settings) for strategy in STRATEGIES]


# Showing ---------------------------------------------------------------------------------------------


def print_stats(stats: Stats) -> None:
    """Summary lines and bars."""
    bad = ", ".join(f"{kind} {count}" for kind, count in stats.bad.most_common())
    print(f"{len(stats.lengths)} rows" + (f", {stats.bad.total()} unusable ({bad})" if bad else ""))
    if stats.unit == "tokens":
        total = sum(stats.lengths)
        print(f"{total} tokens, {stats.supervised} supervised ({stats.supervised / total:.1%})")
    for _, title, values in stats.histograms():
        found = percentiles(values)
        print(f"\n{title}: " + ", ".join(f"{name} {value}" for name, value in found.items()))
        bars = histogram(values, BARS)
        _bars([(str(a) if a == b else f"{a}-{b}", count) for a, b, count in bars])
    print(f"\nsources: {len(stats.sources)}")
    _bars(stats.sources.most_common(SOURCES_SHOWN))


def print_forecasts(predicted: Sequence[Forecast], length: int, ranks: int) -> None:
    """A table of the strategies."""
    on = f"{ranks} data rank{'s' * (ranks > 1)}"
    print(f"\npredicted for packs of {length} on {on}; cost in tokens of short text:")
    print(f"  {'':>10} {'packs':>8} {'fill':>7} {'steps':>8} {'cost of a step':>15} {'spread':>7}")
    for item in predicted:
        print(
            f"  {item.strategy:>10} {item.packs:>8} {item.fill:>7.1%} {item.steps:>8} {item.cost:>15,.0f}"
            f" {item.spread:>7.1%}"
        )
    if long := predicted[0].long:
        print(f"{long} rows are longer than a pack; a run drops them")


def _bars(bars: Sequence[tuple[str, int]]) -> None:
    most = max(count for _, count in bars)
    wide = max(len(label) for label, _ in bars)
    for label, count in bars:
        # A row that is there shows, however few there are of its kind.
        size = max(round(BAR_WIDTH * count / most), bool(count))
        print(f"  {label:>{wide}} {'█' * size:<{BAR_WIDTH}} {count}")


def write_stats(stats: Stats, folder: Path, packing: Mapping[str, Any] | None) -> None:
    """stats.json and a PNG for each histogram, and one for the sources."""
    with whole_text(folder / "stats.json") as file:
        json.dump({**stats.as_dict(), **({"packing": packing} if packing else {})}, file, indent=2)
        file.write("\n")
    for name, title, values in stats.histograms():
        bars = histogram(values, PNG_BARS)
        _png(folder / f"{name}.png", title, [a for a, _, _ in bars], bars)
    top = stats.sources.most_common(SOURCES_SHOWN)
    _png(folder / "sources.png", "rows a source", [name for name, _ in top], [(0, 0, n) for _, n in top])


def _png(
    path: Path, title: str, labels: Sequence[int | str], bars: Sequence[tuple[int, int, int]]
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    counts = [count for _, _, count in bars]
    if isinstance(labels[0], str):
        axes.barh(labels, counts)
        axes.invert_yaxis()
        axes.set_xlabel(title)
    else:
        width = bars[0][1] - bars[0][0] + 1
        axes.bar(labels, counts, width=width * 0.95, align="edge" if width > 1 else "center")
        axes.set_xlabel(title)
        axes.set_ylabel("rows")
    with whole(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


def stats(
    data: Data,
    out: Annotated[Path | None, typer.Option(help="Folder for PNG figures and stats.json.")] = None,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder of relative media paths; default: the data file's.")
    ] = None,
    processor: Annotated[
        Path | None, typer.Option(help="A model's or processor's folder: lengths in tokens, not words.")
    ] = None,
    processor_type: Annotated[
        str | None, typer.Option(help="Its registered name, where the folder does not say.")
    ] = None,
    packing_length: Annotated[
        int | None, typer.Option(min=1, help="Predict packs of it and steps; needs --processor.")
    ] = None,
    open_bins: Annotated[int, typer.Option(min=1, help="Packs filled at the same time.")] = DEFAULT_OPEN_BINS,
    ranks: Annotated[int, typer.Option(min=1, help="Data ranks to predict the cost of steps for.")] = 1,
    durations: Annotated[
        bool, typer.Option("--durations", help="Open clips and sounds too: how many seconds a row has.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="The first rows only.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that count.")] = 1,
) -> None:
    """Show histograms of length, turns, media and sources, how well the rows pack and what steps would cost.

    Without --processor lengths are words, and no medium is opened but for --durations. A row's source is its
    `meta.source`, else its file. Rows that training could not use are counted and left out.

    Examples:

        data-prep stats data/shapes/train.jsonl

        data-prep stats data/mine --processor data/shapes/processor/qwen3_vl --packing-length 4096 --ranks 8
    """
    if packing_length is None and ranks != 1:
        raise UserError(f"--ranks {ranks} needs --packing-length: steps are made of packs")
    if processor is None and (packing_length is not None or processor_type is not None):
        name = "--packing-length" if packing_length is not None else "--processor-type"
        raise UserError(f"{name} needs --processor FOLDER: only a model's processor counts tokens")
    source = open_data(data, data_folder, limit)
    tokens = None if processor is None else Tokens(processor, processor_type)
    found = Stats("words" if tokens is None else "tokens")
    with progress_bar("counting", source.num_rows) as advance:
        for chunk, counted in in_order(Counting(source, tokens, durations), chunks_of(source), workers):
            found.add(counted)
            advance(chunk.stop - chunk.start)
    if not found.lengths:
        kinds = ", ".join(f"{kind} {count}" for kind, count in found.bad.most_common())
        raise UserError(f"{display_name(data)} has no usable row ({kinds}); `data-prep validate` says where")
    print_stats(found)
    packing = None
    if packing_length is not None:
        predicted = forecasts(found, packing_length, open_bins, ranks)
        packing = {"length": packing_length, "open_bins": open_bins, "ranks": ranks}
        packing["strategies"] = {item.strategy: item._asdict() for item in predicted}
        print_forecasts(predicted, packing_length, ranks)
    if out is not None:
        write_stats(found, out, packing)
        print(f"\nwrote: {out}")
