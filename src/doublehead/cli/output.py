"""How the commands write: results on standard output, notes, progress and errors on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from doublehead.files.reading import PredictionTable


class UserError(Exception):
    """What is wrong, in one sentence for the user; the command ends with exit code 2."""


@contextmanager
def told_to_user() -> Iterator[None]:
    """Turn errors about input, files and missing packages into a `UserError`; other errors are bugs and pass."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, ConnectionError) as error:
        raise UserError(str(error)) from error
    except ImportError as error:
        if "pip install 'doublehead[" not in str(error):
            raise
        raise UserError(str(error)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{place}{error.strerror or error}") from error


def notes() -> Console:
    """Standard error, for what is not the result."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def results() -> Console:
    """Standard output; lines are not wrapped where it is not a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=150)


def show(text: str, style: str | None = None) -> None:
    """Print plain text as a result; brackets in it are not markup."""
    results().print(escape(text), style=style)


def show_guesses(table: PredictionTable) -> None:
    """Say what was guessed about the columns."""
    if table.layout.guesses:
        kind = table.kind + (f" ({table.why})" if table.why else "")
        what = f"{table.name}: reading {', '.join(table.layout.guesses)} as {kind}"
        notes().print(escape(what), style="dim")


def show_counts(table: PredictionTable) -> None:
    """Say what was changed in the numbers as they were read."""
    if clipped := table.counts.get("clipped"):
        rows = f"{clipped:,} row{'s' if clipped > 1 else ''}"
        what = f"{table.name}: probabilities in {rows} lie a rounding error outside 0..1 and were clipped"
        notes().print(escape(what), style="dim")


@contextmanager
def progress(what: str, n_bytes: int, least: int = 1 << 24) -> Iterator[Callable[[int], None]]:
    """A bar of bytes read, on a terminal and for 16 MB or more."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = n_bytes < least or not notes().is_terminal
    with Progress(*columns, console=notes(), transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=n_bytes)
        yield lambda done: bar.update(task, advance=done)
