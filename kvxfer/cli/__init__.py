"""The `kvxfer` command: one module per subcommand, errors shown as one line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvxfer
from kvxfer.cli import (
    bench,
    demo,
    doctor,
    drain,
    instances,
    role,
    router,
    scale,
    serve,
    simulate,
    top,
    trace,
    transfers,
    weights,
    worker,
)
from kvxfer.cli.output import out, show_error
from kvxfer.errors import KvxferError

app = typer.Typer(
    name="kvxfer",
    help="KV cache transfer service for disaggregated LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (
    serve,
    router,
    worker,
    instances,
    transfers,
    top,
    trace,
    drain,
    role,
    scale,
    simulate,
    weights,
    demo,
    bench,
    doctor,
):
    module.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"kvxfer {kvxfer.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command. A KvxferError becomes one line on stderr and exit code 1, no traceback."""
    try:
        app()
    except KvxferError as error:
        show_error(error, as_json="--json" in sys.argv)
        sys.exit(1)
