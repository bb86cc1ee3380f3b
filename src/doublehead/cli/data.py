"""`doublehead data list | get | check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from doublehead import data
from doublehead.cli.output import notes, results, told_to_user

Name = Annotated[str, typer.Argument(help="A data set of `doublehead data list`.")]
Root = Annotated[
    Path | None, typer.Option(help="The folder of data sets [default: data, or $DOUBLEHEAD_DATA].")
]


def list_() -> None:
    """List the data sets: sizes of train, calib and test, and where their files must be."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "kind", "classes", "train", "calib", "test", "files"):
        table.add_column(title, justify="right" if title in ("classes", "train", "calib", "test") else "left")
    for one in data.DATASETS.values():
        sizes = (f"{n:,}" for n in one.sizes)
        table.add_row(one.name, one.kind, str(one.n_classes), *sizes, escape(one.layout))
    results().print(table)


def get(name: Name, root: Root = None) -> None:
    """Download a data set and verify its checksums, or print where to put its files."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not notes().is_terminal
    with told_to_user(), Progress(*columns, console=notes(), transient=True, disable=hidden) as bar:
        place = data.get(name, root, _Bar(bar, bar.add_task(name, total=None)))
    results().print(f"{name} lies in {place}")


class _Bar:
    """Rich's bar as pooch uses it: it sets `total`, and calls `reset` and `update` with all of it at the end."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self.bar, self.task, self.total = bar, task, 0

    def update(self, n: int) -> None:
        self.bar.update(self.task, advance=n, total=self.total or None)

    def reset(self) -> None:
        self.bar.reset(self.task)

    def close(self) -> None:
        """Rich's bar closes itself."""


def check(name: Name, root: Root = None) -> None:
    """Read a data set, count its splits, and look for samples that are in two splits."""
    with told_to_user():
        splits, found = data.check(name, root)
    for note in found:
        notes().print(f"note: {escape(note)}")
    results().print(f"{name} is fine: {' / '.join(f'{n:,}' for n in splits.sizes)} for train / calib / test")
