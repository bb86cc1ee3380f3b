"""How the commands write: results on standard output, notes, progress and errors on standard error."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from doublehead.calibrators import NotConverged
from doublehead.files.reading import PredictionTable
from doublehead.training.run_folder import RunError


@contextmanager
def told_to_user() -> Iterator[None]:
    """Errors about input, settings, files and missing packages end a command with one sentence and exit code 2.

    Other errors are bugs and are raised. The package's own warnings become one line each. Of several processes that
    train together only the first one prints.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", NotConverged)
        usual = warnings.showwarning

        def show_warning(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if issubclass(category, UserWarning) and "doublehead" in str(place[0]):
                note(f"Warning: {message}", style=None)
            else:
                usual(message, category, *place)

        warnings.showwarning = show_warning  # type: ignore[assignment]
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError as error:  # the reader of the output, such as `head`, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from error
        except (ValueError, ImportError, ConnectionError, RunError, FloatingPointError, OSError) as error:
            told = str(error)
            if isinstance(error, OSError) and error.strerror:
                told = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            if is_first_process():
                typer.echo(f"Error: {told}", err=True)
            raise typer.Exit(2) from error


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that train together."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in ranks)


class _Console(Console):
    """Rich's console, which leaves a closed pipe to `told_to_user`: by itself it ends with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def notes() -> Console:
    """Standard error, for what is not the result."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str, style: str | None = "dim") -> None:
    """Print plain text that is not the result."""
    notes().print(text, style=style, markup=False, emoji=False)


def show(text: str, style: str | None = None) -> None:
    """Print plain text as a result; brackets in it are not markup, and `:x:` is no emoji."""
    _Console(highlight=False, soft_wrap=True).print(text, style=style, markup=False, emoji=False)


def show_guesses(table: PredictionTable) -> None:
    """Say what was guessed about the columns."""
    if table.layout.guesses:
        kind = table.kind + (f" ({table.why})" if table.why else "")
        note(f"{table.name}: reading {', '.join(table.layout.guesses)} as {kind}")


def show_counts(table: PredictionTable) -> None:
    """Say what was changed in the numbers as they were read."""
    if clipped := table.counts.get("clipped"):
        rows = f"{clipped:,} row{'s' if clipped > 1 else ''}"
        note(f"{table.name}: probabilities in {rows} lie a rounding error outside 0..1 and were clipped")


def bar(*columns: ProgressColumn, hidden: bool = False) -> Progress:
    """A progress bar with these columns behind it, on a terminal."""
    hidden = hidden or not notes().is_terminal
    what = TextColumn("{task.description}"), BarColumn()
    return Progress(*what, *columns, console=notes(), transient=True, disable=hidden)


@contextmanager
def progress(what: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes read, for 16 MB or more."""
    with bar(DownloadColumn(), TimeRemainingColumn(), hidden=n_bytes < 1 << 24) as shown:
        task = shown.add_task(what, total=n_bytes)
        yield lambda done: shown.update(task, advance=done)
