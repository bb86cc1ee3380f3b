"""The command line: `doublehead --help`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from doublehead.commands import data
from doublehead.commands.calibrate import calibrate
from doublehead.commands.demo import demo
from doublehead.commands.errors import UserError
from doublehead.commands.evaluate import evaluate
from doublehead.commands.export import export
from doublehead.commands.report import report
from doublehead.commands.training import compare, train

app = typer.Typer(
    name="doublehead",
    help="Deep classifiers that tell the truth about their confidence.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


data_app = typer.Typer(help="List, fetch, check and convert data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def command(function: Callable[..., None], to: typer.Typer = app) -> None:
    """Register a command; its `UserError` becomes one sentence on standard error and exit code 2."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except UserError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error

    to.command(function.__name__.strip("_"))(guarded)


COMMANDS: tuple[Callable[..., None], ...] = (demo, train, compare, evaluate, calibrate, report, export)
DATA_COMMANDS: tuple[Callable[..., None], ...] = (data.list_, data.get, data.check, data.convert)
for function in COMMANDS:
    command(function)
for function in DATA_COMMANDS:
    command(function, data_app)
