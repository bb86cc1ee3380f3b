"""`doublehead shift`: have new features left the distribution of the calibration data?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from doublehead.cli.output import show
from doublehead.guard import RATE, WINDOW
from doublehead.shift_guard import watch
from doublehead.summary import aligned
from doublehead.system import require

FORMATS = ".npy, .npz, .csv or .parquet"


def shift(
    calib: Annotated[
        Path, typer.Argument(metavar="CALIB", help=f"Features of calibration data, a row each: {FORMATS}.")
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Features of new data, in order of arrival.")],
    window: Annotated[int, typer.Option(min=2, help="Rows that are tested together.")] = WINDOW,
    rate: Annotated[
        float, typer.Option(help="Largest share of clean windows that may raise an alarm.")
    ] = RATE,
) -> None:
    """Test new features against those of the calibration data; exit with code 1 if the last window raises an alarm.

    Features are any numbers that describe an input: what goes into a network's last layer, an embedding, or the
    columns of a table.

    Example:

        doublehead shift calib_features.npy new_features.npy
    """
    found = list(watch(read_features(calib), read_features(new), window, rate))
    rows = [["rows", "alarm", "p-value", "strength"]]
    for one in found:
        alarm = "ALARM" if one.alarm else ""
        rows.append([f"{one.seen:,}", alarm, f"{one.p_value:.2g}", f"{one.strength:.1f}"])
    show(aligned(rows, left=()))
    last, alarms = found[-1], sum(one.alarm for one in found)
    show(
        f"{alarms} of {len(found)} windows raise an alarm; at most {rate * len(found):.2g} are expected by chance."
    )
    show(last.sentence)
    if last.alarm:
        raise typer.Exit(1)


def read_features(path: Path) -> Tensor:
    """A table of numbers (N, F) from a file."""
    if path.suffix in (".npy", ".npz"):
        found = np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            if "features" not in found and len(found.files) != 1:
                raise ValueError(f"{path} must hold an array `features`, got {', '.join(found.files)}")
            found = found["features" if "features" in found else found.files[0]]
    elif path.suffix in (".csv", ".parquet"):
        pandas = require("pandas", extra="tables")
        table = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
        found = table.select_dtypes("number").to_numpy()
    else:
        raise ValueError(f"features must be in a {FORMATS} file, got {path.name}")
    if found.ndim != 2 or not len(found):
        raise ValueError(f"{path} must hold a table of numbers, got shape {found.shape}")
    return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32))
