"""`doublehead demo`: the method on real images, on two CPU cores, in about two minutes."""

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

METHODS = ("cross-entropy", "annealing-double-head", "auto")
ROWS = ("network", "temperature scaling", "paper's head", "doublehead")


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where runs, predictions and pictures go.")
    ] = Path("doublehead-demo"),
    epochs: Annotated[int, typer.Option(help="Training epochs; fewer is faster.")] = 15,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the table as JSON.")] = False,
) -> None:
    """Train a small network on real images and show how calibrated its probabilities are.

    8,500 images of Fashion-MNIST train it, 2,500 calibrate, 6,000 test. All rows come from one training run: the
    network itself, temperature scaling, the paper's annealing double head, and doublehead's staged head with a second
    opinion. The shifted set is the test images with Gaussian noise of severity 5.
    """
    began = time.perf_counter()
    torch.set_num_threads(1)  # the network is small: two threads are slower than one
    notes().print("Training a small network on 8,500 images of Fashion-MNIST, on the CPU ...")
    with training_errors():
        config = replace(
            RECIPES["fashion"], epochs=epochs, seed=seed, evaluate_every=epochs, shift=("gaussian_noise:5",)
        )
        rows = compare_with_progress(
            config, list(METHODS), output, splits=fashion_subset(), accelerator="cpu"
        )
    rows = [{**row, "method": title} for row, title in zip(rows, ROWS, strict=True)]
    pictures = draw(rows, output)
    show_rows(rows, as_json)
    notes().print(
        f"\n{time.perf_counter() - began:.0f} s. An ECE within the brackets of its row is within chance."
    )
    notes().print(f"reliability diagrams: {pictures}\npredictions and runs:  {output}/", style="dim")


def draw(rows: list[dict[str, Any]], output: Path) -> Path:
    """Reliability diagrams of all rows side by side."""
    from matplotlib.figure import Figure

    from doublehead.curves import reliability

    figure = Figure(figsize=(4.2 * len(rows), 4.6), layout="constrained")
    for ax, row in zip(figure.subplots(1, len(rows)), rows):
        p = Predictions.load(row["predictions"])
        if "temperature" in row:
            p = Predictions(p.logits / torch.tensor(row["temperature"]), p.labels)
        draw_reliability(reliability(p), ax, title=row["method"])
    return save(figure, output / "reliability.png")
