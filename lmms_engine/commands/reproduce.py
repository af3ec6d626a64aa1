"""`lmms-engine reproduce RUN`: whether a run can be made again, step by step.

lmms-engine reproduce runs/qwen3_vl-smoke
lmms-engine reproduce runs/qwen3_vl-smoke --steps 20 --anyway
lmms-engine reproduce runs/big-full --against runs/big-full-again
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lmms_engine.commands.reproducing.again import folder_beside, run_again
from lmms_engine.commands.reproducing.curves import EXACT, FIRST_STEPS, Compared, Tolerance, compare
from lmms_engine.commands.reproducing.origin import differences, read_origin, why_not_exact
from lmms_engine.errors import UserError
from lmms_engine.train.metrics import METRICS_FILE, read_lines

REPORT_FILE = "reproduction.json"
REFUSED = 2
SHOWN = 12   # rows of the table


def reproduce(
    run: Annotated[Path, typer.Argument(help="run folder, e.g. runs/qwen3_vl-smoke")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, e.g. where the data lie now")
    ] = None,
    anyway: Annotated[bool, typer.Option(help="run it although something differs")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="only so many steps; default: all")] = None,
    against: Annotated[Path | None, typer.Option(help="compare with this run instead of making one")] = None,
    rtol_first: Annotated[float, typer.Option(help=f"where bits may differ: steps 1-{FIRST_STEPS}")] = 1e-4,
    rtol_last: Annotated[float, typer.Option(help="where bits may differ: later steps")] = 0.05,
) -> None:
    """Check what a run came from, run it again beside it, and compare the curves step by step."""
    if against is not None and against.resolve() == run.resolve():
        raise UserError(f"--against {against}: that is the run itself; name the one made after it")
    console = Console(highlight=False, soft_wrap=True)
    origin = read_origin(run.absolute(), overrides or [])
    found = differences(origin)
    for difference in found:
        console.print(f"differs: {difference}", markup=False)
    if found and not anyway and against is None:
        console.print("not run: --anyway goes on all the same")
        raise typer.Exit(REFUSED)
    last_step = min(steps or origin.last_step, origin.last_step)
    folder = folder_beside(origin.folder) if against is None else against.absolute()
    if against is None:
        run_again(origin, folder, last_step)
    other = read_origin(folder, [])
    reasons = why_not_exact(origin.manifest, other.manifest)
    tolerance = Tolerance(rtol_first, rtol_last) if reasons else EXACT
    rows = compare(
        origin.rows,
        read_lines(folder / METRICS_FILE),
        tolerance,
        last_step,
        cut_short=not origin.finished and last_step == origin.last_step,
    )
    if not rows:
        raise UserError(f"{folder} has no step up to {last_step}: there is nothing to compare")
    good = all(row.equal for row in rows)
    show(rows, console)
    console.print(conclusion(rows, reasons, tolerance), markup=False)
    body = {
        "run": str(origin.folder),
        "again": str(folder),
        "reproduced": good,
        "bit_equal": all(row.difference == 0 for row in rows),
        "tolerance": asdict(tolerance) if reasons else None,
        "not_exact_because": reasons,
        "differences": [asdict(difference) for difference in found],
        "steps": [_finite(asdict(row)) for row in rows],
    }
    (folder / REPORT_FILE).write_text(json.dumps(body, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    console.print(f"written: {folder / REPORT_FILE}", markup=False)
    if not good:
        raise typer.Exit(1)


def show(rows: list[Compared], console: Console) -> None:
    """A table of the first steps, the last one and those that differ."""
    header = ("step", "split", "loss then", "loss now", "furthest off", "by", "")
    table = Table(*header, box=None, pad_edge=False)
    wrong = [row for row in rows if not row.equal]
    shown = {id(row) for row in [*rows[:5], *rows[-2:], *wrong[:5]]}
    for row in [row for row in rows if id(row) in shown][:SHOWN]:
        losses = ("-" if loss is None else f"{loss:.9g}" for loss in (row.then, row.now))
        field = row.field if row.difference else "-"
        verdict = "equal" if row.equal and not row.difference else "close" if row.equal else "DIFFERS"
        table.add_row(str(row.step), row.split, *losses, field, f"{row.difference:.1e}", verdict)
    console.print(table)


def conclusion(rows: list[Compared], reasons: list[str], tolerance: Tolerance) -> str:
    """One line: reproduced or not, and by which measure."""
    wrong = [row for row in rows if not row.equal]
    measure = "to the last bit"
    if reasons:
        within = f"within {tolerance.first:g} up to step {FIRST_STEPS} and {tolerance.last:g} later"
        measure = f"{within}, not to the last bit ({'; '.join(reasons)})"
    if not wrong:
        return f"reproduced: {len(rows)} rows agree {measure}"
    first = wrong[0]
    return (
        f"NOT reproduced: {len(wrong)} of {len(rows)} rows differ; asked for: {measure}. First at step "
        f"{first.step} ({first.split}): {first.field}, by {first.difference:.1e}"
    )


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity and no NaN."""
    return {
        key: str(value) if isinstance(value, float) and not abs(value) < float("inf") else value
        for key, value in row.items()
    }


