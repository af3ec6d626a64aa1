"""`lmms-engine verify`: whether every layout gives one number, on a recipe's own rows and model.

lmms-engine verify --config recipes/qwen3_vl/config.yaml --config recipes/qwen3_vl/smoke.yaml --out runs/v
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lmms_engine.config import load_job
from lmms_engine.errors import UserError
from lmms_engine.train.verify import Result
from lmms_engine.train.verify import verify as compare
from lmms_engine.train.verify.certificate import HEADER, table_rows, write


def verify(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value overrides, as for training")
    ] = None,
    config: Annotated[list[Path] | None, typer.Option(help="YAML file; repeat for overlays")] = None,
    steps: Annotated[int, typer.Option(min=1, help="global batches to compare")] = 2,
    out: Annotated[Path | None, typer.Option(help="folder for verify.json and verify.md")] = None,
    only: Annotated[list[str] | None, typer.Option(help="a case's name; repeat for several")] = None,
) -> None:
    """Compare every layout with one plain process, and write the certificate."""
    if not config:
        raise UserError("verify needs --config FILE (repeat it for overlays)")
    job = load_job(config, overrides or [])
    console = Console(highlight=False, soft_wrap=True)

    def told(result: Result) -> None:
        reason = f": {result.reason}" if result.reason else ""
        console.print(f"{result.case}: {result.status}{reason}", markup=False)

    certificate = compare(
        job,
        steps=steps,
        only=only or (),
        config=[str(path) for path in config],
        overrides=overrides or (),
        on_result=told,
    )
    table = Table(*HEADER, box=None)
    for row in table_rows(certificate.results):
        table.add_row(*row)
    console.print(table)
    if out is not None:
        console.print(f"certificate: {write(certificate, out)[1]}")
    if not certificate.passed:
        raise typer.Exit(1)
