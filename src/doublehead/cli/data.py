"""`doublehead data list | get | check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, TransferSpeedColumn

from doublehead import data
from doublehead.cli.output import bar, note, show
from doublehead.summary import aligned

Name = Annotated[str, typer.Argument(help="A data set of `doublehead data list`.")]
Root = Annotated[
    Path | None, typer.Option(help="The folder of data sets [default: data, or $DOUBLEHEAD_DATA].")
]


def list_() -> None:
    """List the data sets: sizes of train, calib and test, and where their files must be."""
    rows = [["name", "kind", "classes", "train", "calib", "test", "files"]]
    for row in data.list_datasets():
        sizes = [f"{row[key]:,}" for key in ("train", "calib", "test")]
        rows.append([str(row["name"]), str(row["kind"]), str(row["n_classes"]), *sizes, str(row["layout"])])
    show(aligned(rows, left=("name", "kind", "files")))


def get(name: Name, root: Root = None) -> None:
    """Download a data set and verify its checksums, or print where to put its files."""
    with bar(DownloadColumn(), TransferSpeedColumn()) as shown:
        task = shown.add_task(name, total=None)

        def progress(file: str, done: int, total: int) -> None:
            shown.update(task, description=file, completed=done, total=total or None)

        place = data.get(name, root, progress)
    show(f"{name} lies in {place}")


def check(name: Name, root: Root = None) -> None:
    """Read a data set, count its splits, and look for samples that are in two splits."""
    found = data.check(name, root)
    for text in found.notes:
        note(f"note: {text}", style=None)
    if found.problems:
        raise ValueError("; ".join(found.problems))
    assert found.sizes is not None
    show(f"{name} is fine: {' / '.join(f'{n:,}' for n in found.sizes)} for train / calib / test")
