"""`doublehead compare`: several methods on the same data in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

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
    Root,
    Settings,
    change,
    is_first_process,
    list_settings,
    progress_bar,
    recipe,
    show_rows,
    text_of,
    training_errors,
)
from doublehead.training.config import Config
from doublehead.training.methods import METHODS
from doublehead.training.methods import compare as compare_methods


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
        where = {"root": text_of(root), "devices": devices, "nodes": nodes, "accelerator": accelerator}
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
