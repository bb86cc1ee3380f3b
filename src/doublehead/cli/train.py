"""`doublehead train`: one method; `compare`: several in one table; `demo`: a table on real images."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from doublehead.cli.data import Root
from doublehead.cli.options import importable_here
from doublehead.cli.output import UserError, notes, results, told_to_user
from doublehead.curves import reliability
from doublehead.data import fashion_subset
from doublehead.plots import draw_reliability, save
from doublehead.predictions import Predictions
from doublehead.system import did_you_mean
from doublehead.training.config import IMAGENET, METHODS, RECIPES, TEXT, Config, Method
from doublehead.training.config import method as method_called
from doublehead.training.loop import compare as compare_methods
from doublehead.training.loop import method_rows
from doublehead.training.loop import train as train_run
from doublehead.training.run_folder import RunError, RunFolder

Data = Annotated[
    str,
    typer.Option(
        help="A data set (`doublehead data list`), a recipe such as cifar10-paper, or arrays:PATH, folder:PATH, "
        "table:PATH."
    ),
]
Model = Annotated[
    str | None, typer.Option(help="A network: resnet50, ..., timm/NAME, or package.module:factory.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting: --set epochs=30 --set compile=true. See above for all."),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Run folders go here.")]
Devices = Annotated[int, typer.Option(help="Devices to train with on this machine, a process each.")]
Nodes = Annotated[int, typer.Option(help="Machines to train with: start the command on each by torchrun.")]
Accelerator = Annotated[str, typer.Option(help="cpu, cuda, or auto for the best available.")]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print the table as JSON.")]

# Settings that a method decides.
OF_THE_METHOD = ("loss", "loss_options", "mixup", "auto", "guards", "heads", "augment_of", "every_of")
NOT_SET = ("data", "model", "loss", "auto", "heads")  # by --set: they have options of their own
# Methods of the demo, and titles of their rows.
DEMO = ("cross-entropy", "annealing-double-head", "auto")
ROWS = ("network", "temperature scaling", "paper's head", "doublehead")


def train(
    data: Data = "cifar10",
    model: Model = None,
    method: Annotated[
        str, typer.Option(help=f"One of {', '.join(METHODS)}. The paper's is annealing-double-head.")
    ] = "auto",
    root: Root = None,
    settings: Settings = None,
    output: Output = Path("runs"),
    devices: Devices = 1,
    nodes: Nodes = 1,
    accelerator: Accelerator = "auto",
    as_json: AsJson = False,
) -> None:
    """Train one method into a run folder. The same command again resumes a run that was stopped.

    By default five heads are trained beside the network as a second opinion, and a staged head that uses them is fitted
    at the end. Settings come from a recipe for the data set (cifar10-paper has the paper's); --set changes them. The
    run folder holds the config, a line of metrics per epoch, predictions of every split and the weights.
    """
    with training_errors():
        asked = method_called(method)
        config = change(asked.apply(recipe(data, model)), settings, asked)
        folder = RunFolder(output / config.folder_name)
        where: dict[str, Any] = {"devices": devices, "nodes": nodes, "accelerator": accelerator}
        with watched(config.name) as (started, tick, report):
            started(config, [method], 0, 1)
            made = train_run(config, folder, root=root, report=report, tick=tick, **where)
        if is_first_process():
            beside = ["cross-entropy"] if asked.heads or asked.auto else []  # the network of the heads
            rows = [row for name in [*beside, method] for row in method_rows(name, made, folder.path)]
            show_rows(rows, as_json)
            notes().print(f"run folder: {escape(str(folder.path))}", style="dim")


def compare(
    data: Data = "cifar10",
    model: Model = None,
    methods: Annotated[str, typer.Option(help=f"Comma-separated names: {', '.join(METHODS)}.")] = (
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
        where: dict[str, Any] = {"devices": devices, "nodes": nodes, "accelerator": accelerator}
        with watched("starting") as (started, tick, _):
            rows = compare_methods(config, names, output, root=root, started=started, tick=tick, **where)
        if is_first_process():
            show_rows(rows, as_json)
            notes().print(f"run folders: {escape(str(output))}", style="dim")


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
        with watched("starting") as (started, tick, _):
            where: dict[str, Any] = {"accelerator": "cpu", "started": started, "tick": tick}
            rows = compare_methods(config, DEMO, output, fashion_subset(), **where)
    rows = [{**row, "method": title} for row, title in zip(rows, ROWS, strict=True)]
    pictures = draw(rows, output)
    show_rows(rows, as_json)
    notes().print(
        f"\n{time.perf_counter() - began:.0f} s. An ECE within the brackets of its row is within chance."
    )
    notes().print(f"reliability diagrams: {pictures}\npredictions and runs:  {output}/", style="dim")


# --- settings


def list_settings(function: Callable[..., None], *left_out: str) -> None:
    """Add the settings to the text of --help."""
    usual = {f.name: getattr(Config(), f.name) for f in fields(Config) if f.name not in left_out}
    for name, value in usual.items():
        usual[name] = ",".join(f"{part:.4g}" for part in value) if isinstance(value, tuple) else value
    listed = ", ".join(f"`{name}={value}`" for name, value in usual.items())
    about = f"Settings for --set, here with the values for CIFAR-10: {listed}"
    function.__doc__ = f"{function.__doc__}\n\n{about}"


list_settings(train, *NOT_SET)
list_settings(compare, *NOT_SET, *OF_THE_METHOD)


def recipe(data: str, model: str | None = None) -> Config:
    """The recipe of this name; for other data the config of similar data."""
    kind = data.partition(":")[0]
    like = {"table": TEXT, "folder": IMAGENET}.get(kind, Config())
    config = RECIPES.get(data) or replace(like, data=data)
    importable_here(model)
    return replace(config, model=model) if model else config


def change(config: Config, settings: list[str] | None, asked: Method | None = None) -> Config:
    """The config with settings changed, each given as "name=value"; settings of a method only where `asked` is one."""
    fixed = {*NOT_SET, *(OF_THE_METHOD if asked is None else ())}
    if asked is not None and not asked.mixup:
        fixed.add("mixup")
    if asked is not None and asked.guards:
        fixed.add("guards")
    known = {f.name: getattr(config, f.name) for f in fields(Config) if f.name not in fixed}
    changes: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            hint = did_you_mean(name, known)
            raise UserError(
                f"--set takes NAME=VALUE with a NAME of {', '.join(known)}, got {setting!r}{hint}"
            )
        changes[name] = _parse(value, known[name])
    return replace(config, **changes)


def _parse(value: str, like: Any) -> Any:
    """The value as a setting of the kind of `like`; what cannot be read stays text, and `Config` refuses it."""
    if isinstance(like, str):
        return value
    if isinstance(like, tuple):
        return tuple(_parse(part, 0.0) for part in value.split(",") if part)
    for read in (json.loads, float):
        try:
            return read({"None": "null", "True": "true", "False": "false"}.get(value, value))
        except ValueError:
            continue
    return value


@contextmanager
def training_errors() -> Iterator[None]:
    """Bad settings, missing data and runs that cannot continue become one sentence, printed by the first process.

    The package's own warnings are shown in one line each, without their place in the code.
    """
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, UserWarning) and "doublehead" in str(place[0]):
            notes().print(f"Warning: {escape(str(message))}")
        else:
            usual(message, category, *place)

    try:
        with told_to_user(), warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]
            yield
    except (UserError, RunError, ImportError, FloatingPointError) as error:
        if not is_first_process():
            raise typer.Exit(2) from error
        raise UserError(str(error)) from error


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that train together."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in ranks)


@contextmanager
def watched(name: str) -> Iterator[tuple[Callable[..., None], ...]]:
    """What `train` and `compare` call: a bar with the time left, and a line per epoch."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not (notes().is_terminal and is_first_process())
    with Progress(*columns, console=notes(), transient=True, disable=hidden) as bar:
        task, done, epochs = bar.add_task(escape(name), total=None), 0, 0
        untold = ""  # the title of a run that begins, for logs without a bar

        def started(config: Config, group: list[str], number: int, n_runs: int) -> None:
            nonlocal done, epochs, untold
            done, epochs = number * config.epochs, config.epochs
            what = f"{number + 1}/{n_runs} {', '.join(group)[:60]}" if n_runs > 1 else name
            untold = f"run {what}" if n_runs > 1 and not notes().is_terminal and is_first_process() else ""
            bar.update(task, description=escape(what), total=n_runs * epochs, completed=done)

        def tick(epoch: int, step: int, n_steps: int) -> None:
            nonlocal untold
            if untold:
                notes().print(escape(untold))
                untold = ""
            bar.update(task, completed=done + epoch + step / n_steps)

        def report(row: dict[str, Any]) -> None:
            test = row.get("test", {})
            shown = [
                f"{name} ECE {100 * one['ece']:.2f} % acc {100 * one['accuracy']:.2f} %"
                for name, one in list(test.items())[:3]
            ]
            more = [f"{len(test) - 3} more"] if len(test) > 3 else []
            numbers = f"loss {row['train_loss']:.4f}  {', '.join(shown + more)}"
            bar.console.print(f"epoch {row['epoch'] + 1}/{epochs}  {numbers}")

        yield started, tick, report


def show_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """The table of methods: percent for accuracy, ECE and AUROC; the ECE of a perfect model beside each ECE."""
    if as_json:
        results().print_json(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    shifts = _shift_columns(rows[0])
    table.add_column("method")
    for title in ("accuracy %", "ECE %", "perfect ECE %", "NLL", "Brier", *shifts):
        table.add_column(title, justify="right")
    for row in rows:
        floor = [f"{100 * row[key]:.2f}" for key in ("ece_floor", "ece_floor_low", "ece_floor_high")]
        table.add_row(
            row["method"],
            f"{100 * row['accuracy']:.2f}",
            f"{100 * row['ece']:.2f}",
            f"{floor[0]} ({floor[1]}..{floor[2]})",
            f"{row['nll']:.4f}",
            f"{row['brier']:.4f}",
            *(f"{100 * sum(row[key] for key in keys) / len(keys):.2f}" for keys in shifts.values()),
        )
    results().print(table)


def _shift_columns(row: dict[str, Any]) -> dict[str, list[str]]:
    """Title -> the numbers of a row that it shows: those of each shifted set, or their mean where they are many."""
    columns: dict[str, list[str]] = {}
    for start, what in (("auroc ", "AUROC %"), ("ece ", "ECE %")):
        keys = [key for key in row if key.startswith(start)]
        if len(keys) > 2:
            columns[f"{what} mean of {len(keys)} shifts"] = keys
        else:
            columns |= {f"{what} {key.removeprefix(start)}": [key] for key in keys}
    return columns


def draw(rows: list[dict[str, Any]], output: Path) -> Path:
    """Reliability diagrams of all rows side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(rows), 4.6), layout="constrained")
    for ax, row in zip(figure.subplots(1, len(rows)), rows):
        p = Predictions.load(row["predictions"])
        if "temperature" in row:
            p = Predictions(p.logits / torch.tensor(row["temperature"]), p.labels)
        draw_reliability(reliability(p), ax, title=row["method"])
    return save(figure, output / "reliability.png")
