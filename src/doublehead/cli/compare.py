"""`doublehead compare`: several methods on the same data in one table; `doublehead demo`: three on real images."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from doublehead.cli.data import Root
from doublehead.cli.output import UserError, notes
from doublehead.cli.train import (
    NOT_SET,
    OF_THE_METHOD,
    Accelerator,
    AsJson,
    Data,
    Devices,
    Model,
    Nodes,
    Output,
    Settings,
    change,
    is_first_process,
    list_settings,
    progress_bar,
    recipe,
    show_rows,
    training_errors,
)
from doublehead.data import fashion_subset
from doublehead.plots import draw_reliability, save
from doublehead.predictions import Predictions
from doublehead.training.config import RECIPES, Config
from doublehead.training.methods import METHODS
from doublehead.training.methods import compare as compare_methods

# Methods of the demo, and titles of their rows.
DEMO = ("cross-entropy", "annealing-double-head", "auto")
ROWS = ("network", "temperature scaling", "paper's head", "doublehead")


def compare(
    data: Data = "cifar10",
    model: Model = None,
    methods: Annotated[str, typer.Option(help=f"Names with commas between: {', '.join(METHODS)}.")] = (
        "cross-entropy,mmce,brier,focal,double-head,annealing-double-head,auto"
    ),
    root: Root = None,
    settings: Settings = None,
    output: Output = Path("runs"),
    devices: Devices = 1,
    nodes: Nodes = 1,
    accelerator: Accelerator = "auto",
    as_json: AsJson = False,
) -> None:
    """Train several methods on the same data and print one table.

    Cross entropy and all heads come from one training run. Finished runs are not trained again, and the same command
    resumes one that was stopped.
    """
    with training_errors():
        config = change(recipe(data, model), settings)
        names = [name.strip() for name in methods.split(",") if name.strip()]
        if not names:
            raise UserError(f"--methods must name at least one of {', '.join(METHODS)}, got {methods!r}")
        where = {"root": root, "devices": devices, "nodes": nodes, "accelerator": accelerator}
        rows = compare_with_progress(config, names, output, **where)
        if is_first_process():
            show_rows(rows, as_json)
            notes().print(f"run folders: {escape(str(output))}", style="dim")


list_settings(compare, *NOT_SET, *OF_THE_METHOD)


def compare_with_progress(
    config: Config, names: list[str], output: Path, **options: Any
) -> list[dict[str, Any]]:
    """`training.methods.compare` with a progress bar over all its runs."""
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        done = 0

        def started(asked: Config, group: list[str], number: int, n_runs: int) -> None:
            nonlocal done
            done = number * asked.epochs
            what = f"{number + 1}/{n_runs} {', '.join(group)[:60]}"
            bar.update(task, description=what, total=n_runs * asked.epochs, completed=done)

        def tick(epoch: int, step: int, n_steps: int) -> None:
            bar.update(task, completed=done + epoch + step / n_steps)

        return compare_methods(config, names, output, started=started, tick=tick, **options)


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where runs, predictions and pictures go.")
    ] = Path("doublehead-demo"),
    epochs: Annotated[int, typer.Option(help="Training epochs; fewer is faster.")] = 15,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: AsJson = False,
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
        rows = compare_with_progress(config, list(DEMO), output, splits=fashion_subset(), accelerator="cpu")
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
