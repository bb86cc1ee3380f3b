"""`doublehead train` and `doublehead compare`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from doublehead.commands.errors import UserError
from doublehead.commands.show import notes, results
from doublehead.training.comparison import compare as compare_methods
from doublehead.training.comparison import method_rows
from doublehead.training.config import RECIPES, Config
from doublehead.training.loop import train as train_run
from doublehead.training.methods import METHODS, method
from doublehead.training.run_folder import RunError, RunFolder

Data = Annotated[
    str, typer.Option(help="A data set (`doublehead data list`), or arrays:PATH, folder:PATH, table:PATH.")
]
Model = Annotated[
    str | None, typer.Option(help="A network: resnet50, ..., timm/NAME, or package.module:factory.")
]
Root = Annotated[Path | None, typer.Option(help="The folder that holds the data sets [default: data].")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change any setting: --set epochs=30 --set compile=true. See below."),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Run folders go here.")]
Devices = Annotated[int, typer.Option(help="Processes to train with on this machine.")]
Accelerator = Annotated[str, typer.Option(help="cpu, cuda, or auto for the best there is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the table as JSON.")]
TensorBoard = Annotated[bool, typer.Option(help="Also write TensorBoard files into the run folder.")]

SETTINGS = "\n\n\b\nSettings for --set (shown with the recipe of CIFAR-10):\n" + "\n".join(
    f"  {f.name}={getattr(Config(), f.name)}"
    for f in fields(Config)
    if f.name not in ("data", "model", "heads")
)


def train(
    data: Data = "cifar10",
    model: Model = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "annealing-double-head",
    root: Root = None,
    settings: Settings = None,
    output: Output = Path("runs"),
    devices: Devices = 1,
    accelerator: Accelerator = "auto",
    tensorboard: TensorBoard = False,
    as_json: AsJson = False,
) -> None:
    """Train one method into a run folder. The same command again resumes a run that was stopped.

    The settings are the paper's for the data set; --set changes them. The run folder holds the config, a line of
    metrics per epoch, predictions of every split and the weights.
    """
    with training_errors():
        asked = method_named(method)
        config = asked.apply(recipe(data, model, settings))
        folder = RunFolder(output / config.name)
        with watched(config, folder.path if tensorboard else None) as (report, tick):
            made = train_run(
                config,
                folder,
                root=_text(root),
                devices=devices,
                accelerator=accelerator,
                report=report,
                tick=tick,
            )
        show_rows(method_rows(method, made, folder.path), as_json)
        notes().print(f"run folder: {folder.path}", style="dim")


def compare(
    data: Data = "cifar10",
    model: Model = None,
    methods: Annotated[str, typer.Option(help=f"Names with commas between: {', '.join(METHODS)}.")] = (
        "cross-entropy,mmce,brier,focal,double-head,annealing-double-head,sample-temperature,auto"
    ),
    root: Root = None,
    settings: Settings = None,
    output: Output = Path("runs"),
    devices: Devices = 1,
    accelerator: Accelerator = "auto",
    as_json: AsJson = False,
) -> None:
    """Train several methods on the same data and print one table.

    Cross entropy and all heads come from one training run. Finished runs are not trained again.
    """
    with training_errors():
        config = recipe(data, model, settings)
        names = [name.strip() for name in methods.split(",") if name.strip()]
        for name in names:
            method_named(name)
        rows = compare_with_progress(
            config, names, output, root=_text(root), devices=devices, accelerator=accelerator
        )
        show_rows(rows, as_json)


for function in (train, compare):
    function.__doc__ = (function.__doc__ or "") + SETTINGS


def compare_with_progress(
    config: Config, names: list[str], output: Path, **options: Any
) -> list[dict[str, Any]]:
    """`training.comparison.compare` with a progress bar over all its runs."""
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        done = 0

        def started(asked: Config, group: list[str], number: int, n_runs: int) -> None:
            nonlocal done
            done = number * asked.epochs
            bar.update(
                task,
                description=f"{number + 1}/{n_runs} {', '.join(group)[:60]}",
                total=n_runs * asked.epochs,
            )
            bar.update(task, completed=done)

        def tick(epoch: int, step: int, n_steps: int) -> None:
            bar.update(task, completed=done + epoch + step / n_steps)

        return compare_methods(config, names, output, started=started, tick=tick, **options)


def recipe(data: str, model: str | None, settings: list[str] | None) -> Config:
    """The paper's config for a data set with some settings changed, each given as "name=value"."""
    config = RECIPES.get(data) or replace(Config(), data=data)
    changes: dict[str, Any] = {"model": model} if model else {}
    known = {f.name: getattr(config, f.name) for f in fields(Config) if f.name != "heads"}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            raise UserError(f"--set takes NAME=VALUE with a NAME of {', '.join(known)}, got {setting!r}")
        changes[name] = _parse(name, value, known[name])
    return replace(config, **changes)


def _parse(name: str, value: str, like: Any) -> Any:
    if isinstance(like, str):
        return value
    if isinstance(like, tuple):
        parts = [part for part in value.split(",") if part]
        return tuple(float(part) for part in parts) if name == "milestones" else tuple(parts)
    try:
        parsed = json.loads(value)
    except ValueError:
        raise UserError(f"--set {name} must be a number, true or false, got {value!r}") from None
    return float(parsed) if isinstance(like, float) else parsed


def method_named(name: str) -> Any:
    """The method, or a sentence that lists what there is."""
    try:
        return method(name)
    except ValueError as error:
        raise UserError(str(error)) from error


@contextmanager
def training_errors() -> Iterator[None]:
    """Bad settings, missing data and runs that cannot go on become one sentence."""
    try:
        yield
    except (RunError, ValueError, FileNotFoundError, ImportError) as error:
        raise UserError(str(error)) from error


def progress_bar() -> Progress:
    """Epochs done and the time that is left, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=notes(), transient=True, disable=not notes().is_terminal)


@contextmanager
def watched(
    config: Config, tensorboard: Path | None
) -> Iterator[tuple[Callable[[dict[str, Any]], None], Callable[[int, int, int], None]]]:
    """A bar with the time left, a line per epoch, and TensorBoard where asked."""
    writer = _tensorboard(tensorboard) if tensorboard else None
    with progress_bar() as bar:
        task = bar.add_task(config.name, total=config.epochs)

        def report(row: dict[str, Any]) -> None:
            shown = ", ".join(
                f"{name} ECE {100 * numbers['ece']:.2f} % acc {100 * numbers['accuracy']:.2f} %"
                for name, numbers in list(row.get("test", {}).items())[:3]
            )
            bar.console.print(
                f"epoch {row['epoch'] + 1}/{config.epochs}  loss {row['train_loss']:.4f}  {shown}"
            )
            if writer:
                for name, numbers in row.get("test", {}).items():
                    for key, value in numbers.items():
                        writer.add_scalar(f"{key}/{name}", value, row["epoch"])

        yield report, lambda epoch, step, n_steps: bar.update(task, completed=epoch + step / n_steps)
    if writer:
        writer.close()


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder / "tensorboard"))


def show_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """The table of methods: percent for accuracy, ECE and AUROC; the ECE of a perfect model beside each ECE."""
    if as_json:
        results().print_json(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    shifts = [key for key in rows[0] if key.startswith("auroc ")]
    table.add_column("method")
    titles = [
        "accuracy %",
        "ECE %",
        "perfect ECE %",
        "NLL",
        "Brier",
        *(f"AUROC % {key[6:]}" for key in shifts),
    ]
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            f"{100 * row['accuracy']:.2f}",
            f"{100 * row['ece']:.2f}",
            f"{100 * row['ece_floor']:.2f} ({100 * row['ece_floor_low']:.2f}..{100 * row['ece_floor_high']:.2f})",
            f"{row['nll']:.4f}",
            f"{row['brier']:.4f}",
            *(f"{100 * row[key]:.2f}" for key in shifts),
        )
    results().print(table)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
