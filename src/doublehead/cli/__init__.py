"""The command line: `doublehead --help`. One file per family of commands; a function's signature is its options."""

from __future__ import annotations

import functools
import io
import signal
import sys
from typing import Annotated, Any

import typer

import doublehead
from doublehead.cli import calibrate, data, evaluate, export, report, shift, train
from doublehead.cli.output import told_to_user

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
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # what its encoding lacks is escaped, as standard error does it
        sys.stdout.reconfigure(errors="backslashreplace")
    # a terminated command cleans up like an interrupted one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def guarded(function: Any) -> Any:
    """The command, with its errors printed as one sentence."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        with told_to_user():
            function(*args, **kwargs)

    return call


COMMANDS: dict[Any, list[Any]] = {
    app: [
        *(evaluate.evaluate, calibrate.calibrate, report.report, shift.shift, train.train, train.compare),
        *(export.export, train.demo),
    ],
    data_app: [data.list_, data.get, data.check],
}
for group, functions in COMMANDS.items():
    for function in functions:
        group.command(function.__name__.strip("_"))(guarded(function))
