"""`lmms-engine report RUN`: writes `report.html` of a run folder anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmms_engine.errors import UserError
from lmms_engine.train.report import write_report


def report(run: Annotated[Path, typer.Argument(help="run folder, e.g. runs/qwen3_vl-smoke")]) -> None:
    """Write report.html: curves, settings, samples; one file that needs no network."""
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder")
    typer.echo(write_report(run.absolute()))
