"""`doublehead demo`: every method of the paper on real images, on two CPU cores, in under two minutes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from doublehead.cli.compare import compare_with_progress
from doublehead.cli.output import notes
from doublehead.cli.train import show_rows, training_errors
from doublehead.data import fashion_subset
from doublehead.plots import draw_reliability, save
from doublehead.predictions import Predictions
from doublehead.training.config import RECIPES

METHODS = (
    "cross-entropy",
    "brier",
    "focal",
    "mmce",
    "double-head",
    "annealing-double-head",
    "sample-temperature",
    "auto",
)
PICTURES = (
    "Cross entropy",
    "Cross entropy + temperature",
    "Annealing double head",
    "Sample temperature head",
)


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where runs, predictions and pictures go.")
    ] = Path("doublehead-demo"),
    epochs: Annotated[int, typer.Option(help="Training epochs; fewer is faster.")] = 15,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Train a small network on real images and compare the calibration of several methods.

    8,500 images of Fashion-MNIST train it, 2,500 calibrate, 6,000 test. Cross entropy and all calibration heads come
    from one training run; Brier, focal loss and MMCE are trained beside it. The shifted set is the test images with
    Gaussian noise of severity 5.
    """
    began = time.perf_counter()
    torch.set_num_threads(1)  # the network is small: two threads are slower than one
    notes().print("Training on 8,500 images of Fashion-MNIST, four runs of a small network on the CPU ...")
    with training_errors():
        config = replace(
            RECIPES["fashion"], epochs=epochs, seed=seed, evaluate_every=epochs, shift=("gaussian_noise:5",)
        )
        rows = compare_with_progress(
            config, list(METHODS), output, splits=fashion_subset(), accelerator="cpu"
        )
    pictures = draw(rows, output)
    show_rows(rows, as_json)
    notes().print(
        f"\n{time.perf_counter() - began:.0f} s. An ECE within the brackets of its row is within chance."
    )
    notes().print(f"reliability diagrams: {pictures}\npredictions and runs:  {output}/", style="dim")


def draw(rows: list[dict[str, Any]], output: Path) -> Path:
    """Reliability diagrams of a few methods side by side."""
    from matplotlib.figure import Figure

    from doublehead.curves import reliability

    chosen = [row for row in rows if row["method"] in PICTURES]
    figure = Figure(figsize=(4.2 * len(chosen), 4.6), layout="constrained")
    for ax, row in zip(figure.subplots(1, len(chosen)), chosen):
        p = Predictions.load(row["predictions"])
        if "temperature" in row:
            p = Predictions(p.logits / torch.tensor(row["temperature"]), p.labels)
        draw_reliability(reliability(p), ax, title=row["method"])
    return save(figure, output / "reliability.png")
