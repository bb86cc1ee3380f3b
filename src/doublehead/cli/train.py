"""`doublehead train`: one method; `compare`: several in one table; `demo`: a table on real images."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from doublehead.cli.data import Root
from doublehead.cli.options import importable_here
from doublehead.cli.output import bar, is_first_process, note, notes, show
from doublehead.curves import reliability
from doublehead.data import fashion_subset
from doublehead.plots import draw_reliability, save
from doublehead.predictions import Predictions
from doublehead.summary import aligned
from doublehead.system import did_you_mean
from doublehead.training.config import IMAGENET, METHODS, RECIPES, TEXT, Config, Method
from doublehead.training.config import method as method_called
from doublehead.training.loop import compare as compare_methods
from doublehead.training.loop import method_rows
from doublehead.training.loop import train as train_run
from doublehead.training.run_folder import RunFolder

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
Nodes = Annotated[int, typer.Option(help="Machines to train with: start the command on each with torchrun.")]
Accelerator = Annotated[str, typer.Option(help="cpu, cuda, or auto for the best available.")]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print the table as JSON.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", metavar="", help="Also write TensorBoard files.")]

# Settings that a method decides.
OF_THE_METHOD = ("loss", "loss_options", "mixup", "auto", "guards", "heads", "augment_of", "every_of")
NOT_SET = ("data", "model", "loss", "auto", "heads")  # by --set: they have options of their own
# Methods of the demo, and titles of their rows.
DEMO = ("cross-entropy", "annealing-double-head", "auto")
COMPARED = "cross-entropy,mmce,brier,focal,double-head,annealing-double-head,auto"
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
    tensorboard: TensorBoard = False,
    as_json: AsJson = False,
) -> None:
    """Train one method into a run folder. The same command again resumes a run that was stopped.

    By default five heads are trained beside the network as a second opinion, and a staged head that uses them is fitted
    at the end. Settings come from a recipe for the data set (cifar10-paper has the paper's); --set changes them. The
    run folder holds the config, a line of metrics per epoch, predictions of every split and the weights.

    Examples:

        doublehead train --data cifar10 --root data
        doublehead train --data table:reviews.csv --model textcnn --method auto
    """
    asked = method_called(method)
    config = change(asked.apply(recipe(data, model)), settings, asked)
    folder = RunFolder(output / config.folder_name)
    where: dict[str, Any] = {"devices": devices, "nodes": nodes, "accelerator": accelerator}
    with watched(config.name, folder.path if tensorboard else None) as (started, tick, report):
        started(config, [method], 0, 1)
        made = train_run(config, folder, root=root, report=report, tick=tick, **where)
    if is_first_process():
        beside = ["cross-entropy"] if asked.heads or asked.auto else []  # the network of the heads
        rows = [row for name in [*beside, method] for row in method_rows(name, made, folder.path)]
        show_rows(rows, as_json)
        note(f"run folder: {folder.path}")


def compare(
    data: Data = "cifar10",
    model: Model = None,
    methods: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated names: {', '.join(METHODS)}. By default {COMPARED.replace(',', ', ')}.",
            show_default=False,
        ),
    ] = COMPARED,
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

    Examples:

        doublehead compare --data cifar10 --root data --set epochs=30
        doublehead compare --data folder:photos --methods cross-entropy,auto
    """
    config = change(recipe(data, model), settings)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--methods must name at least one of {', '.join(METHODS)}, got {methods!r}")
    where: dict[str, Any] = {"devices": devices, "nodes": nodes, "accelerator": accelerator}
    with watched("starting") as (started, tick, _):
        rows = compare_methods(config, names, output, root=root, started=started, tick=tick, **where)
    if is_first_process():
        show_rows(rows, as_json)
        note(f"run folders: {output}")


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
    note("Training a small network on 8,500 images of Fashion-MNIST, on the CPU ...", style=None)
    config = replace(
        RECIPES["fashion"], epochs=epochs, seed=seed, evaluate_every=epochs, shift=("gaussian_noise:5",)
    )
    with watched("starting") as (started, tick, _):
        where: dict[str, Any] = {"accelerator": "cpu", "started": started, "tick": tick}
        rows = compare_methods(config, DEMO, output, fashion_subset(), **where)
    rows = [{**row, "method": title} for row, title in zip(rows, ROWS, strict=True)]
    pictures = draw(rows, output)
    show_rows(rows, as_json)
    took = f"\n{time.perf_counter() - began:.0f} s."
    note(f"{took} An ECE within the brackets of its row is within chance.", style=None)
    note(f"reliability diagrams: {pictures}\npredictions and runs:  {output}/")


# --- settings


def list_settings(function: Callable[..., None], *left_out: str) -> None:
    """Add the settings to the text of --help."""
    usual = {f.name: getattr(Config(), f.name) for f in fields(Config) if f.name not in left_out}
    for name, value in usual.items():
        usual[name] = ",".join(f"{part:.4g}" for part in value) if isinstance(value, tuple) else value
    listed = ", ".join(f"`{name}={value}`" for name, value in usual.items())
    about = f"Settings for --set, here with the values for CIFAR-10: {listed}"
    function.__doc__ = f"{inspect.getdoc(function)}\n\n{about}"


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
    if asked is not None:
        fixed |= {*([] if asked.mixup else ["mixup"]), *(["guards"] if asked.guards else [])}
    known = {f.name: getattr(config, f.name) for f in fields(Config) if f.name not in fixed}
    changes: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            got = f"{setting!r}{did_you_mean(name, known)}"
            raise ValueError(f"--set takes NAME=VALUE with a NAME of {', '.join(known)}, got {got}")
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
def watched(name: str, tensorboard: Path | None = None) -> Iterator[tuple[Callable[..., None], ...]]:
    """What `train` and `compare` call: a bar with the time left, a line per epoch, and TensorBoard where asked."""
    writer = _tensorboard(tensorboard) if tensorboard and is_first_process() else None
    with bar(MofNCompleteColumn(), TimeRemainingColumn(), hidden=not is_first_process()) as drawn:
        task, done, epochs = drawn.add_task(escape(name), total=None), 0, 0
        untold = ""  # the title of a run that begins, for logs without a bar

        def started(config: Config, group: list[str], number: int, n_runs: int) -> None:
            nonlocal done, epochs, untold
            done, epochs = number * config.epochs, config.epochs
            what = f"{number + 1}/{n_runs} {', '.join(group)[:60]}" if n_runs > 1 else name
            untold = f"run {what}" if n_runs > 1 and not notes().is_terminal and is_first_process() else ""
            drawn.update(task, description=escape(what), total=n_runs * epochs, completed=done)

        def tick(epoch: int, step: int, n_steps: int) -> None:
            nonlocal untold
            if untold:
                note(untold, style=None)
                untold = ""
            drawn.update(task, completed=done + epoch + step / n_steps)

        def report(row: dict[str, Any]) -> None:
            drawn.console.print(_epoch_line(row, epochs))
            if writer:
                _to_tensorboard(writer, row)

        yield started, tick, report
    if writer:
        writer.close()


def _epoch_line(row: dict[str, Any], epochs: int) -> str:
    tests = [
        f"{name} ECE {100 * one['ece']:.2f} % acc {100 * one['accuracy']:.2f} %"
        for name, one in row.get("test", {}).items()
    ]
    tests[3:] = [f"{len(tests) - 3} more"] if len(tests) > 3 else []
    return f"epoch {row['epoch'] + 1}/{epochs}  loss {row['train_loss']:.4f}  {', '.join(tests)}"


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder / "tensorboard"))


def _to_tensorboard(writer: Any, row: dict[str, Any]) -> None:
    numbers = {
        "train_loss": row["train_loss"],
        **{f"beta/{name}": beta for name, beta in row["beta"].items()},
    }
    for name, test in row.get("test", {}).items():
        numbers |= {f"{key}/{name}": value for key, value in test.items()}
    for name, value in numbers.items():
        writer.add_scalar(name, value, row["epoch"])


def show_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """The table of methods: percent for accuracy, ECE and AUROC; the ECE of a perfect model beside each ECE."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    shifts = _shift_columns(rows[0])
    table = [["method", "accuracy %", "ECE %", "perfect ECE %", "NLL", "Brier", *shifts]]
    for row in rows:
        floor = [f"{100 * row[key]:.2f}" for key in ("ece_floor", "ece_floor_low", "ece_floor_high")]
        means = [sum(row[key] for key in keys) / len(keys) for keys in shifts.values()]
        accuracy, ece, *shifted = (f"{100 * value:.2f}" for value in (row["accuracy"], row["ece"], *means))
        scores = [f"{row['nll']:.4f}", f"{row['brier']:.4f}"]
        table.append(
            [row["method"], accuracy, ece, f"{floor[0]} ({floor[1]}..{floor[2]})", *scores, *shifted]
        )
    show(aligned(table))


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
