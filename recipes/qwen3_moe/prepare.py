"""Make the data that this recipe trains on. Run from the repository root:

    python recipes/<this folder>/prepare.py --if-missing

It generates the sample data set; to train on your own, write rows in the same form (docs/data.md) and name
them in config.yaml, or replace the body of `prepare`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_prep.cli import errors_in_one_line, run_sample
from data_prep.sample import DEFAULT_ROWS, DEFAULT_SEED


def prepare(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("data/shapes"),
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing if the data are there.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the data if they are there.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Training rows.")] = DEFAULT_ROWS,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = DEFAULT_SEED,
) -> None:
    """Make the data that this recipe trains on."""
    with errors_in_one_line():
        run_sample(out, rows=rows, seed=seed, if_missing=if_missing, overwrite=overwrite)


if __name__ == "__main__":
    typer.run(prepare)
