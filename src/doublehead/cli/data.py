"""`doublehead data list | get | check | convert`; `shift`: has a stream of features left the calibration data?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from torch import Tensor

from doublehead import data
from doublehead.cli.output import UserError, notes, results, show, told_to_user
from doublehead.guard import RATE, WINDOW
from doublehead.shift_guard import watch
from doublehead.system import require

FORMATS = ".npy, .npz, .csv or .parquet"

Name = Annotated[str, typer.Argument(help="A data set of `doublehead data list`.")]
Root = Annotated[
    Path | None, typer.Option(help="The folder of data sets [default: data, or $DOUBLEHEAD_DATA].")
]


def list_() -> None:
    """List the data sets: sizes of train, calib and test, and where their files must be."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "kind", "classes", "train", "calib", "test", "files"):
        table.add_column(title, justify="right" if title in ("classes", "train", "calib", "test") else "left")
    for row in data.list_datasets():
        sizes = [f"{row[key]:,}" for key in ("train", "calib", "test")]
        table.add_row(
            str(row["name"]), str(row["kind"]), str(row["n_classes"]), *sizes, escape(str(row["layout"]))
        )
    results().print(table)


def get(name: Name, root: Root = None) -> None:
    """Download a data set and verify its checksums, or print where to put its files."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not notes().is_terminal
    with told_to_user(), Progress(*columns, console=notes(), transient=True, disable=hidden) as bar:
        task = bar.add_task(name, total=None)

        def progress(file: str, done: int, total: int) -> None:
            bar.update(task, description=file, completed=done, total=total or None)

        place = data.get(name, root, progress)
    results().print(f"{name} lies in {place}")


def check(name: Name, root: Root = None) -> None:
    """Read a data set, count its splits, and look for samples that are in two splits."""
    with told_to_user():
        found = data.check(name, root)
    for note in found.notes:
        notes().print(f"note: {escape(note)}")
    if not found.ok:
        raise UserError("; ".join(found.problems))
    assert found.sizes is not None
    results().print(f"{name} is fine: {' / '.join(f'{n:,}' for n in found.sizes)} for train / calib / test")


def convert(
    name: Name, dest: Annotated[Path, typer.Argument(help="A folder for the plain files.")], root: Root = None
) -> None:
    """Write a data set as plain arrays or tables, which load faster."""
    with told_to_user():
        results().print(f"written to {data.convert(name, root, dest)}")


def shift(
    clean: Annotated[Path, typer.Argument(help=f"Features of calibration data, a row each: {FORMATS}.")],
    stream: Annotated[Path, typer.Argument(help="Features of new data, in order of arrival.")],
    window: Annotated[int, typer.Option(min=2, help="Rows that are tested together.")] = WINDOW,
    rate: Annotated[float, typer.Option(help="Share of clean windows that raise an alarm.")] = RATE,
) -> None:
    """Test new features against those of the calibration data; exit with code 1 if the last window raises an alarm.

    Features are any numbers that describe an input: what goes into a network's last layer, an embedding, or the
    columns of a table.
    """
    with told_to_user():
        found = list(watch(read_features(clean), read_features(stream), window, rate))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rows", "alarm", "p-value", "strength"):
        table.add_column(title, justify="right")
    for one in found:
        table.add_row(
            f"{one.seen:,}", "ALARM" if one.alarm else "", f"{one.p_value:.2g}", f"{one.strength:.1f}"
        )
    results().print(table)
    last, alarms = found[-1], sum(one.alarm for one in found)
    show(f"{alarms} of {len(found)} windows raise an alarm; {rate * len(found):.2g} are expected by chance.")
    show(last.sentence)
    if last.alarm:
        raise typer.Exit(1)


def read_features(path: Path) -> Tensor:
    """A table of numbers (N, F) from a file."""
    if path.suffix in (".npy", ".npz"):
        found = np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            if "features" not in found and len(found.files) != 1:
                raise UserError(f"{path} must hold an array `features`, got {', '.join(found.files)}")
            found = found["features" if "features" in found else found.files[0]]
    elif path.suffix in (".csv", ".parquet"):
        pandas = require("pandas", extra="tables")
        table = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
        found = table.select_dtypes("number").to_numpy()
    else:
        raise UserError(f"features must be in a {FORMATS} file, got {path.name}")
    if found.ndim != 2 or not len(found):
        raise UserError(f"{path} must hold a table of numbers, got shape {found.shape}")
    return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32))
