"""The command line: `doublehead --help`. One file per family of commands; a function's signature is its options."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import doublehead
from doublehead.cli import calibrate, data, evaluate, export, report, shift, train
from doublehead.cli.output import UserError

app = typer.Typer(
    name="doublehead",
    help="Calibrated probabilities for PyTorch classifiers.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="List, fetch and check data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"doublehead {doublehead.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    # a terminated command cleans up like an interrupted one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def command(function: Callable[..., None], to: typer.Typer = app) -> None:
    """Register a command; its `UserError` becomes one sentence on standard error and exit code 2."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except UserError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error
        except BrokenPipeError as error:  # the reader of the output, such as `head`, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from error

    to.command(function.__name__.strip("_"))(guarded)


COMMANDS: tuple[Callable[..., None], ...] = (
    evaluate.evaluate,
    calibrate.calibrate,
    report.report,
    shift.shift,
    train.train,
    train.compare,
    export.export,
    train.demo,
)
DATA_COMMANDS: tuple[Callable[..., None], ...] = (data.list_, data.get, data.check)
for function in COMMANDS:
    command(function)
for function in DATA_COMMANDS:
    command(function, data_app)
