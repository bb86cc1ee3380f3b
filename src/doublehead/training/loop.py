"""The training loop, and a table of several methods: losses, and heads that are trained beside the network."""

from __future__ import annotations

import glob
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doublehead.data.splits import Splits
from doublehead.losses import mixed, mixup
from doublehead.tasks import find_logits
from doublehead.torch_tools import average_over_processes
from doublehead.training.config import Config, learning_rate, method, runs_for
from doublehead.training.evaluation import epoch_numbers, finish, predict
from doublehead.training.run import Run, set_up
from doublehead.training.run_folder import (
    RunError,
    RunFolder,
    algorithms,
    leave_processes_at_exit,
    make_fabric,
    on_first_process,
)

__all__ = ["Run", "compare", "make_fabric", "method_rows", "run_epoch", "set_up", "train"]

# Calibration steps of an epoch whose gradient norms are kept, as in the paper's figure.
GRADIENT_STEPS = (0, 4, 9, -10, -5, -1)
# Numbers of a test set in a row of `compare`.
NUMBERS = ("accuracy", "ece", "ece_floor", "ece_floor_low", "ece_floor_high", "ece_all", "nll", "brier",
           "mean_entropy")  # fmt: skip

Report = Callable[[dict[str, Any]], None]
Tick = Callable[[int, int, int], None]


def train(
    config: Config,
    folder: RunFolder,
    splits: Splits | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    devices: int = 1,
    nodes: int = 1,
    accelerator: str = "auto",
    checkpoint_seconds: float = 0.0,
    report: Report | None = None,
    tick: Tick | None = None,
) -> dict[str, Any]:
    """Train a config into `folder`, or resume where it stopped; return the content of results.json.

    `report` gets each line of metrics, `tick` the epoch, step and steps per epoch. A finished run is not trained again.
    A checkpoint is written after each epoch, at most every `checkpoint_seconds`. With several `devices` each has a
    process of its own, which runs your script (or command) from its beginning; all must see the same folder.
    """
    if folder.finished:
        folder.check(config)
        folder.drop_checkpoint()  # of a process that was killed after it wrote results.json
        return folder.results
    fabric = make_fabric(config, accelerator=accelerator, devices=devices, num_nodes=nodes)
    fabric.launch()  # every process goes on from here
    if fabric.world_size > 1:
        leave_processes_at_exit()
    with ExitStack() as stack:
        if config.deterministic:
            stack.enter_context(algorithms(deterministic=True))
        on_first_process(fabric, stack.enter_context, folder.locked())
        on_first_process(fabric, folder.check, config)
        run = set_up(config, fabric, splits, root)
        _resume(run, folder)
        saved = time.perf_counter()
        while run.epoch < config.epochs:
            row = run_epoch(run, tick)
            run.rows.append(row)
            lines = "".join(json.dumps(one) + "\n" for one in run.rows)
            on_first_process(fabric, folder.write_text, "metrics.jsonl", lines)
            due = run.epoch == config.epochs or time.perf_counter() - saved >= checkpoint_seconds
            if fabric.broadcast(due):
                on_first_process(fabric, folder.save_checkpoint, run.state_dict())
                saved = time.perf_counter()
            if report and fabric.is_global_zero:
                report(row)
        return finish(run, folder)


def _resume(run: Run, folder: RunFolder) -> None:
    """Load the newest checkpoint, if there is one."""
    state = folder.load_checkpoint(run.fabric.device)
    if state is not None:
        try:
            run.load_state_dict(state)
        except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise RunError(
                f"the checkpoint in {folder.path} does not fit this version or this data ({error}): "
                "remove the folder to start again"
            ) from error
    on_first_process(run.fabric, folder.write_text, "config.json", run.config.to_json())


def run_epoch(run: Run, tick: Tick | None = None) -> dict[str, Any]:
    """One pass over the training data with its calibration steps; returns a line of metrics."""
    config, n_steps = run.config, len(run.inputs.train)
    loss_of = partial(mixed, run.loss) if config.mixup else run.loss  # per example
    run.net.train()
    started, total = time.perf_counter(), torch.zeros((), device=run.fabric.device)
    norms: dict[str, list[Tensor]] = {group: [] for group in config.head_groups()}
    stepped: set[str] = set()  # groups that made a calibration step in this epoch
    for step, batch in enumerate(run.inputs.train):
        at = step / n_steps
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(config, (run.epoch + at) / config.epochs)
        x, y = mixup(*batch, alpha=config.mixup) if config.mixup else batch
        if config.compile:
            torch.compiler.cudagraph_mark_step_begin()  # the last step's outputs may be overwritten
        with run.fabric.autocast():
            loss = loss_of(find_logits(run.forward(x)), y).mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        total += loss.detach()  # stays on the device: nothing here waits for it
        stepped |= _train_heads(run, at, norms)
        if tick:
            tick(run.epoch, step + 1, n_steps)
    train_loss = float(average_over_processes(total)) / n_steps  # waits for the device
    run.seconds += time.perf_counter() - started
    if not math.isfinite(train_loss):
        raise RunError(
            f"the training loss is {train_loss} in epoch {run.epoch}: lower lr (now {config.lr:g})"
        )
    if config.record_gradients:
        run.gradients.append(_chosen_steps(run, norms))
    update = getattr(run.loss, "update", None)
    if update is not None:  # an adaptive loss
        update(predict(run, run.inputs.make_eval(run.inputs.splits.calib), heads=False)["main"])
    run.epoch += 1
    return _line(run, train_loss, stepped)


def _train_heads(run: Run, at: float, norms: dict[str, list[Tensor]]) -> set[str]:
    """One call of each companion; the groups of heads that made a step. Gradient norms are noted where asked."""
    with run.fabric.autocast():
        stepped = {group for group, one in run.companions.items() if one.step(at)}
    for group in stepped & norms.keys() if run.config.record_gradients else ():
        norm = run.companions[group].training.grad_norms
        assert norm is not None
        norms[group].append(norm)
    return stepped


def _chosen_steps(run: Run, norms: dict[str, list[Tensor]]) -> Tensor:
    """(6, H) the gradient norms at GRADIENT_STEPS of each group's own steps; nan where it made fewer."""
    parts = [torch.empty(len(GRADIENT_STEPS), 0, device=run.fabric.device)]
    for group, names in run.config.head_groups().items():
        made = norms[group]
        missing = torch.full((len(names),), math.nan, device=run.fabric.device)
        chosen = [made[i] if -len(made) <= i < len(made) else missing for i in GRADIENT_STEPS]
        parts.append(torch.stack(chosen))
    return torch.cat(parts, 1)


def _line(run: Run, train_loss: float, stepped: set[str]) -> dict[str, Any]:
    """The metrics of the epoch that has just ended."""
    row: dict[str, Any] = {"epoch": run.epoch - 1, "train_loss": train_loss}
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row["beta"] = {}  # of each named head at its last step
    for group, names in run.config.head_groups().items():
        beta = run.companions[group].training.beta
        if group in stepped and beta is not None:
            row["beta"] |= dict(zip(names, beta.tolist()))
    row["skipped"] = {name: one.skipped for name, one in run.companions.items()}
    if run.epoch == run.config.epochs or run.epoch % run.config.evaluate_every == 0:
        found = predict(run, run.inputs.make_eval(run.inputs.splits.test))
        row["test"] = {name: epoch_numbers(p) for name, p in found.items()}
    row["seconds"] = round(run.seconds, 3)
    return row


# --- several methods


def compare(
    config: Config,
    methods: Sequence[str],
    folder: str | Path,
    splits: Splits | None = None,
    *,
    started: Callable[[Config, list[str], int, int], None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train all `methods` under `folder` and return the rows of their table.

    Methods with one loss share one training run: cross entropy and all heads come from the same network. A finished
    run that has all heads asked for, and perhaps more, is not trained again. `started` gets each run's config,
    methods, number and the number of runs; further `options` go to `train`.
    """
    runs = runs_for(config, methods)
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, (asked, names) in enumerate(runs):
        if started:
            started(asked, names, number, len(runs))
        run = find_finished(asked, Path(folder)) or RunFolder(Path(folder) / asked.folder_name)
        results = train(run.config if run.finished else asked, run, splits, **options)
        for name in names:
            rows[name] = method_rows(name, results, run.path)
    return [row for name in dict.fromkeys(methods) for row in rows[name]]


def find_finished(asked: Config, folder: Path) -> RunFolder | None:
    """A finished run in `folder` with the settings of `asked` and all of its heads and guards, perhaps more."""
    for path in sorted(folder.glob(f"{glob.escape(asked.name)}-*")):
        run = RunFolder(path)
        try:
            config = run.config if run.finished else None
        except (ValueError, TypeError, OSError):  # written by another version, or no run at all
            continue
        if config is not None and _contains(config, asked):
            return run
    return None


def _contains(config: Config, asked: Config) -> bool:
    same = {*config.differing(asked)} <= {"heads", "auto", "guards"}
    more = asked.heads.items() <= config.heads.items() and set(asked.guards) <= set(config.guards)
    return same and more and config.auto >= asked.auto


def method_rows(name: str, results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """One method's rows from its run's results: as trained and, unless it is a head, after temperature scaling."""
    asked = method(name)
    outputs = [asked.output] if asked.output != "main" or not asked.heads else list(asked.heads)

    def row(output: str, title: str, when: str, suffix: str) -> dict[str, Any]:
        numbers = results["outputs"][output][when]
        made: dict[str, Any] = {"method": title, **{key: numbers[key] for key in NUMBERS}}
        for shifted, by_output in results["shift"].items():
            found = by_output[output + suffix]
            made |= {f"{key} {shifted}": found[key] for key in ("auroc", "ece") if key in found}
        return {**made, "predictions": str(folder / "predictions" / f"test-{output}.npz")}

    rows = []
    for output in outputs:
        title = asked.title if output == asked.output else output
        rows.append(row(output, title, "before", ""))
        if output == "main":
            temperature = results["outputs"]["main"]["temperature"]
            tempered = row(output, f"{title} + temperature", "after", "+T")
            rows.append({**tempered, "temperature": temperature})
    return rows
