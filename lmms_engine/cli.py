"""The `lmms-engine` command: one verb a file in `commands/`. Training itself starts by `launch/cli.py`.

lmms-engine inspect --config recipes/qwen3_vl/config.yaml
lmms-engine export runs/qwen3_vl-smoke
lmms-engine report runs/qwen3_vl-smoke
lmms-engine verify --config recipes/qwen3_vl/config.yaml --config recipes/qwen3_vl/smoke.yaml
lmms-engine doctor
lmms-engine reproduce runs/qwen3_vl-smoke
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lmms_engine.errors import BadRow, UserError


class _Verbs(TyperGroup):
    """Loads a verb when it is called. Shows what the user can mend as one line; `--debug` with traceback."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_verb(name), rest

    def invoke(self, ctx: typer.Context) -> object:
        try:
            return super().invoke(ctx)
        except (UserError, BadRow, OSError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


def load_verb(name: str) -> TyperCommand:
    """The command of `commands/<name>.py`: its function of that name."""
    alone = typer.Typer(add_completion=False)
    alone.command(name)(getattr(importlib.import_module(f"lmms_engine.commands.{name}"), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at what a recipe trains on, and at what a run left.",
)


@app.callback()
def _options(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    from lmms_engine.train.log import setup_logging

    setup_logging(debug=debug)


# A verb's file is imported when the verb is used; until then this says what `--help` shows of it.
VERBS = {
    "inspect": "Show the batches that a rank would train on (supervised text is coloured).",
    "export": "Write a checkpoint as a folder that transformers' from_pretrained and AutoProcessor open.",
    "verify": "Compare every layout with one plain process, and write the certificate.",
    "doctor": "Check the machine: packages, driver, GPUs, kernels, limits, disks; and say what to do.",
    "reproduce": "Check what a run came from, run it again beside it, and compare the curves step by step.",
    "report": "Write report.html: curves, settings, samples; one file that needs no network.",
}
for _name, _summary in VERBS.items():
    app.command(_name, help=_summary)(lambda: None)
