"""`report.html`: a run on one page that needs nothing else: curves, settings, origin, a few samples."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lmms_engine.errors import UserError
from lmms_engine.train.drawings import read_drawings
from lmms_engine.train.manifest import MANIFEST_FILE, read_manifest
from lmms_engine.train.metrics import METRICS_FILE, STEP_KEYS, read_lines
from lmms_engine.train.packing import PACKING_FILE, PACKING_KEYS
from lmms_engine.train.packing import describe as packing_figures
from lmms_engine.train.rundir import flatten, read_config
from lmms_engine.train.samples import Shown, first_samples

REPORT_FILE = "report.html"
MAX_POINTS = 1500  # of a curve; longer ones are thinned to keep the page small
NUM_SAMPLES = 3
CURVES = (
    ("loss", "Loss"),
    ("lr", "Learning rate"),
    ("grad_norm", "Gradient norm before clipping"),
    ("tokens_per_s", "Tokens per second"),
    ("mfu", "MFU (strict)"),
    ("peak_gb", "Peak memory, GB"),
    ("supervised_tokens", "Supervised tokens per step"),
    ("data_s", "Waiting for data, s"),
)
PACKING_CURVES = (("fill", "Packing fill"), ("spread", "Predicted spread of ranks"))
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto }
table { border-collapse: collapse; font-size: 13px } td { padding: .1rem .8rem .1rem 0; vertical-align: top }
td + td { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .8rem; font-size: 13px }
.curves figure { margin: 0 }
.drawings { display: flex; flex-wrap: wrap } .drawings figure { margin: .5rem; text-align: center }
.drawing { width: 128px; image-rendering: pixelated }
mark { background: #bfe8c5 } img { max-height: 160px; margin-right: .5rem }
summary { cursor: pointer; font-weight: 600 }
"""


def write_report(run_dir: Path, samples: list[Shown] | None = None) -> Path:
    """Writes `report.html` from what lies in the run folder; raises UserError if no step was logged.

    samples: rows to show; None reads the first ones from the run's data, which may take a while.
    """
    rows = read_lines(run_dir / METRICS_FILE, STEP_KEYS)
    if not any(row["split"] == "train" for row in rows):
        raise UserError(f"{run_dir}: no {METRICS_FILE} with training steps; is this a run folder?")
    config = read_config(run_dir)
    origin = run_dir / MANIFEST_FILE
    manifest = read_manifest(origin) if origin.is_file() else {}
    missing = ""
    if samples is None:
        try:
            samples = first_samples(config, NUM_SAMPLES)
        except (UserError, OSError) as error:  # the data may be gone by now; the rest of the report stands
            samples, missing = [], f"not available: {error}"
    path = run_dir / REPORT_FILE
    temporary = path.with_name(path.name + ".tmp")
    drawings, packing = read_drawings(run_dir), read_lines(run_dir / PACKING_FILE, PACKING_KEYS)
    page = render(run_dir.name, rows, config, manifest, samples, missing, drawings, packing)
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def render(
    title: str,
    rows: list[dict[str, Any]],
    config: dict[str, Any],
    manifest: dict[str, Any],
    samples: list[Shown],
    samples_missing: str = "",
    drawings: Sequence[tuple[str, Path]] = (),
    packing: Sequence[dict[str, Any]] = (),
) -> str:
    """The page as text. No link, script, font or picture from elsewhere."""
    train = [row for row in rows if row["split"] == "train"]
    held_out = [row for row in rows if row["split"] == "eval"]
    drawn = [curve(key, name, train, held_out) for key, name in CURVES]
    drawn += [curve(key, name, list(packing), []) for key, name in PACKING_CURVES]
    curves = "\n".join(f"<figure>{each}</figure>" for each in drawn)
    origin = {key: value for key, value in manifest.items() if key not in ("history", "packages")}
    shown = "\n".join(_sample(sample) for sample in samples) or f"<p>{html.escape(samples_missing)}</p>"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
{_table({**summary(train, held_out), **packing_figures(packing)})}
<h2>Curves</h2><div class="curves">{curves}</div>
{_drawings(drawings)}
<h2>Samples</h2><p>Rows of the training data as the model sees them; supervised text is marked.</p>
{shown}
<h2>Origin</h2>{_table(flatten(origin))}
<details><summary>Packages</summary>{_table(manifest.get("packages", {}))}</details>
<details><summary>Configuration</summary>{_table(flatten(config))}</details>
</body></html>
"""


def summary(train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures one looks for first."""
    last = train[-1]
    seconds = sum(row["step_s"] for row in train)
    facts = {
        "steps": last["step"],
        "passes over the data": f"{last['epoch']:.2f}",
        "loss, first and last step": f"{_number(train[0]['loss'])}, {_number(last['loss'])}",
        "held-out loss": _number(held_out[-1]["loss"]) if held_out else "not measured",
        "tokens": f"{sum(row['tokens'] for row in train):,}",
        "supervised tokens": f"{sum(row['supervised_tokens'] for row in train):,}",
        "samples": f"{sum(row['samples'] for row in train):,}",
        "rows skipped": f"{sum(row['skipped'] for row in train):,}",
        "time in steps": f"{seconds:,.1f} s",
        "tokens per second": f"{sum(row['tokens'] for row in train) / seconds:,.0f}",
    }
    rated = [row for row in train if row["mfu"] is not None]
    time_rated = sum(row["step_s"] for row in rated)
    for key, name in (("mfu", "MFU (strict)"), ("mfu_conventional", "MFU (conventional)")):
        mean = sum(row[key] * row["step_s"] for row in rated) / time_rated if rated else None
        facts[name] = "unknown device" if mean is None else f"{mean:.1%}"
    facts["peak memory"] = f"{max(row['peak_gb'] for row in train):.2f} GB"
    return facts


def curve(key: str, name: str, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> str:
    """One chart as an inline SVG element; a note where there is nothing to draw."""
    lines = {"train": _points(key, train)}
    if key == "loss" and held_out:
        lines["held out"] = _points(key, held_out)
    if key == "lr":
        groups = sorted({group for row in train for group in row["lr"]})
        lines = {group: [(r["step"], r["lr"][group]) for r in train if group in r["lr"]] for group in groups}
        lines = (
            {"": next(iter(lines.values()))} if len({tuple(line) for line in lines.values()}) == 1 else lines
        )
    if not any(lines.values()):
        return f"<figcaption>{html.escape(name)}: does not apply to this run</figcaption>"
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": key}):
        figure = Figure(figsize=(5, 2.8), layout="constrained")
        axes = figure.add_subplot(title=name, xlabel="step")
        axes.grid(alpha=0.3)
        for label, points in lines.items():
            few = points[:: len(points) // MAX_POINTS + 1]
            axes.plot(*zip(*few, strict=True), label=label, marker="o" if len(few) < 30 else "", markersize=3)
        if len(lines) > 1:
            axes.legend()
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    drawing = buffer.getvalue()
    return drawing[drawing.index("<svg") :]


def _points(key: str, rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if row[key] is not None]


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _table(values: dict[str, Any]) -> str:
    cells = (
        f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>" for k, v in values.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _drawings(drawings: Sequence[tuple[str, Path]]) -> str:
    """A section with what the trained model draws; nothing for models that do not."""
    figures = []
    for caption, path in drawings:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        picture = f'<img class="drawing" alt="" src="data:image/png;base64,{data}">'
        figures.append(f"<figure>{picture}<figcaption>{html.escape(caption)}</figcaption></figure>")
    if not figures:
        return ""
    words = "Pictures that the model drew at the end of the run, from fixed noise, without guidance."
    return f"""<h2>Drawings</h2><p>{words}</p>
<div class="drawings">{"".join(figures)}</div>"""


def _sample(sample: Shown) -> str:
    pictures = "".join(f'<img alt="" src="data:image/jpeg;base64,{data}">' for data in sample.thumbnails)
    text = "".join(
        f"<mark>{html.escape(run)}</mark>" if supervised else html.escape(run)
        for run, supervised in sample.text
    )
    where = f"{sample.row.source}, shard {sample.row.shard}, row {sample.row.row}, id {sample.row.id}"
    return f"<h3>{html.escape(where)}</h3>{pictures}<pre>{text}</pre>"
