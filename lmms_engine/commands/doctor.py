"""`lmms-engine doctor`: whether this machine can train, and what to do where it cannot.

lmms-engine doctor
lmms-engine doctor --json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmms_engine.commands.checks import Check
from lmms_engine.commands.checks.environment import environment_checks
from lmms_engine.commands.checks.gpu import gpu_checks
from lmms_engine.commands.checks.machine import machine_checks
from lmms_engine.commands.checks.storage import storage_checks
from lmms_engine.train.manifest import ROOT

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list instead of the table")] = False,
) -> None:
    """Check the machine: packages, driver, GPUs, kernels, limits, disks; and say what to do."""
    checks = examine(Path.cwd())
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        wide = None if sys.stdout.isatty() else 200   # a file or a pipe gets one line for each check
        show(checks, Console(highlight=False, soft_wrap=True, width=wide))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def examine(folder: Path) -> list[Check]:
    """Every check. folder: where runs/ and data/ lie."""
    return [
        *environment_checks(ROOT),
        *machine_checks(torch.get_num_threads(), torch.cuda.device_count()),
        *storage_checks(folder),
        *gpu_checks(),
    ]


def show(checks: list[Check], console: Console) -> None:
    """A table of what was found, then one line for each problem that says what to do."""
    table = Table("check", "", "found", box=None, pad_edge=False)
    for check in checks:
        table.add_row(check.name, Text(check.status, COLOURS[check.status]), Text(check.found))
    console.print(table)
    for check in checks:
        if check.status != "ok":
            line = Text.assemble((check.status, COLOURS[check.status]), f"  {check.name}: {check.found}. ")
            console.print(line + Text(f"What to do: {check.remedy}"))
    counts = {status: sum(check.status == status for check in checks) for status in COLOURS}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
