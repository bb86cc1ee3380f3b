"""`doublehead data list | get | check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

from doublehead import data
from doublehead.cli.output import bar, note, show
from doublehead.summary import aligned

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name in `doublehead data list`.")]
Root = Annotated[
    Path | None, typer.Option(help="The folder of data sets [default: $DOUBLEHEAD_DATA, or else data].")
]


def list_() -> None:
    """List the data sets: sizes of train, calib and test, and where their files must be."""
    rows = [["name", "kind", "classes", "train", "calib", "test", "files, in ROOT/NAME or ROOT"]]
    for one in data.DATASETS.values():
        rows.append([one.name, one.kind, str(one.n_classes), *(f"{n:,}" for n in one.sizes), one.layout])
    show(aligned(rows, left=("name", "kind", rows[0][-1])))


def get(name: Name, root: Root = None) -> None:
    """Download a data set and verify its checksums, or print where to put its files."""
    with bar(DownloadColumn(), TransferSpeedColumn()) as shown:
        place = data.get(name, root, _Bar(shown, shown.add_task(name, total=None)))
    show(f"{name} is in {place}")


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
    splits, found = data.check(name, root)
    for text in found:
        note(f"note: {text}", style=None)
    show(f"{name} is fine: {' / '.join(f'{n:,}' for n in splits.sizes)} for train / calib / test")
