"""`doublehead shift`: have new features left the distribution of the calibration data?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from doublehead.cli.output import show
from doublehead.files.columns import SEVERAL
from doublehead.files.formats import open_source
from doublehead.files.readers import Wanted
from doublehead.files.sources import Source, TableError, reading
from doublehead.guard import RATE, WINDOW
from doublehead.shift_guard import watch
from doublehead.summary import aligned

ROWS = 1 << 14  # read together


def shift(
    calib: Annotated[
        Path,
        typer.Argument(
            metavar="CALIB", help="Features of calibration data, a row each: .npy, .npz, .csv, ..."
        ),
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
    clean = read_features(calib)
    features = read_features(new, clean)
    if len(clean) < 2 * window:
        raise ValueError(f"{calib} must hold at least two windows of {window} rows, got {len(clean)} rows")
    found = list(watch(clean, features, window, rate))
    rows = [["rows", "alarm", "p-value", "strength"]]
    for one in found:
        alarm = "ALARM" if one.alarm else ""
        rows.append([f"{one.seen:,}", alarm, f"{one.p_value:.2g}", f"{one.strength:.1f}"])
    show(aligned(rows, left=()))
    last, alarms = found[-1], sum(one.alarm for one in found)
    expected = rate * len(found)
    chance = f"{expected:.2g}" if expected < 10 else f"{expected:,.0f}"
    show(f"{alarms} of {len(found)} windows raise an alarm; at most {chance} are expected by chance.")
    show(last.sentence)
    if last.alarm:
        raise typer.Exit(1)


def read_features(path: Path, like: Tensor | None = None) -> Tensor:
    """A table of finite numbers (N, F) from a file: an array, or all columns of numbers; F must be that of `like`."""
    source = Source(path)
    with reading(source):
        if path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        else:
            reader = open_source(source)
            tables = [name for name, holds in reader.columns.items() if holds in SEVERAL]
            numbers = [name for name, holds in reader.columns.items() if holds in ("number", "whole")]
            names = ["features"] if "features" in tables else tables or numbers
            if len(tables) > 1 and names != ["features"]:
                raise TableError(f"{path} must hold an array `features`, got {', '.join(tables)}")
            parts = [batch.scores for batch in reader.batches(Wanted(names, [], ROWS))] if names else []
            found = np.concatenate(parts) if parts else np.empty((0, 0))
        if found.ndim != 2 or not found.size:
            raise TableError(f"{path} must hold a table of numbers, got shape {found.shape}")
        if found.dtype.kind not in "fiub":
            raise TableError(f"{path} must hold a table of numbers, got {found.dtype}")
        features = torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32))
    if not features.isfinite().all():
        row = int((~features.isfinite()).any(1).int().argmax()) + 1
        raise ValueError(f"{path} must hold finite numbers, got nan or inf in row {row}")
    if like is not None and features.shape[1] != like.shape[1]:
        raise ValueError(
            f"{path} must have {like.shape[1]} features like the calibration data, got {features.shape[1]}"
        )
    return features
