"""The `lmms-engine` command: one verb a file in `commands/`. Training itself starts by `launch/cli.py`.

lmms-engine inspect --config recipes/qwen3_vl/config.yaml
lmms-engine export runs/qwen3_vl-smoke
lmms-engine report runs/qwen3_vl-smoke
"""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from lmms_engine.errors import BadRow, UserError


class _OneLineErrors(TyperGroup):
    """Shows what the user can mend as one line; `--debug` lets the traceback through."""

    def invoke(self, ctx: typer.Context) -> object:
        try:
            return super().invoke(ctx)
        except (UserError, BadRow, OSError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at what a recipe trains on, and at what a run left.",
)


@app.callback()
def _options(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    from lmms_engine.train.log import setup_logging

    setup_logging(debug=debug)


def _add_verbs() -> None:
    from lmms_engine.commands.export import export
    from lmms_engine.commands.inspect import inspect
    from lmms_engine.commands.report import report

    for verb in (inspect, export, report):
        app.command()(verb)


_add_verbs()
