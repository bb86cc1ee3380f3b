"""The end of a run: choose, predict, measure, and write; results.json comes last."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from doublehead import metrics
from doublehead.double_head import DoubleHead
from doublehead.head_bank import HeadBank, Selection
from doublehead.optional import require
from doublehead.plumbing import device_of, same_on_all_processes, seeded
from doublehead.predictions import Predictions
from doublehead.shift_guard import ShiftGuard
from doublehead.training.evaluation import (
    final_numbers,
    held_back_readings,
    predict,
    share_buffers,
    shift_numbers,
)
from doublehead.training.run import Run, on_first_process
from doublehead.training.run_folder import RunFolder, environment

DIGITS = 6  # significant ones of a number in a results file: floats hold 7


def finish(run: Run, folder: RunFolder) -> dict[str, Any]:
    """Evaluate a trained run and write all of its files; return what results.json holds."""
    share_buffers(run)
    selection = _select(run)
    _fit_guards(run)
    predictions = {"test": _predict(run, "test"), "calib": _predict(run, "calib")}
    if run.config.predict_train:
        predictions["train"] = _predict(run, "train", heads=False)
    numbers = as_plain({**_about(run), "selection": selection, **_measure(run, predictions)})
    results: dict[str, Any] = {"config": json.loads(run.config.to_json()), **numbers}
    on_first_process(run.fabric, lambda: _write(run, folder, predictions, results))
    return results


def _select(run: Run) -> Selection | None:
    """Let the bank of `auto` choose on held-back data, where there is one."""
    if "auto" not in run.riders:
        return None
    bank = run.riders["auto"].head
    assert isinstance(bank, HeadBank)
    with run.fabric.autocast():
        calib = run.riders["auto"].read(run.inputs.whole(run.inputs.splits.calib))
    return bank.select(held_back_readings(run), calib)


def _fit_guards(run: Run) -> None:
    """Teach each guard what is usual on the calibration data: in every process, which then have the first one's."""
    if not run.config.guards:
        return
    bank = run.riders["auto"].head
    guard = ShiftGuard(DoubleHead(run.net, run.inputs.n_classes, head=bank), seed=run.config.seed)
    calib = run.inputs.whole(run.inputs.splits.calib)
    with run.fabric.autocast():
        clean = guard.look(calib)  # once for all guards; but for that each is fitted as ShiftGuard.fit does
    for output, name in run.config.guarded().items():
        perturb = run.inputs.perturbation(name, share=1.0)
        assert perturb is not None
        with run.fabric.autocast(), seeded(run.config.seed, device_of(run.net)):
            guard.guard.fit(clean, guard.look_at_views(calib, perturb), seed=run.config.seed)
        guard.guard.settle(clean)
        same_on_all_processes(guard.guard)  # devices may round otherwise than their neighbours
        run.guards[output] = copy.deepcopy(guard.guard)
    run.stages = guard.tap


def _predict(run: Run, split: str, heads: bool = True) -> dict[str, Predictions]:
    return predict(run, run.inputs.make_eval(getattr(run.inputs.splits, split)), heads=heads)


def _about(run: Run) -> dict[str, Any]:
    epochs, seconds = run.steady
    samples = epochs * len(run.inputs.train) * run.config.batch_size
    return {
        "environment": environment(run.fabric.device),
        "processes": run.fabric.world_size,
        "sizes": run.inputs.splits.sizes,
        "train_seconds": run.seconds,
        "samples_per_second": samples / seconds if epochs else None,  # after the first epoch, which warms up
    }


def _measure(run: Run, predictions: dict[str, dict[str, Predictions]]) -> dict[str, Any]:
    numbers = final_numbers(predictions["test"], predictions["calib"])
    temperatures = {name: one["temperature"] for name, one in numbers.items()}
    train = predictions.get("train")
    return {
        "outputs": numbers,
        "train_accuracy": None if train is None else float(metrics.accuracy(train["main"])),
        "shift": shift_numbers(run, predictions["test"], temperatures),
    }


def _write(
    run: Run, folder: RunFolder, predictions: dict[str, dict[str, Predictions]], results: dict[str, Any]
) -> None:
    for split, outputs in predictions.items():
        for name, p in outputs.items():
            folder.save_predictions(f"{split}-{name}", p)
    if run.gradients:
        _write_gradients(run, folder)
    _write_weights(run, folder)
    folder.write_json("results.json", results)
    folder.drop_checkpoints()


def _write_weights(run: Run, folder: RunFolder) -> None:
    tensors = {f"model.{key}": value for key, value in run.net.state_dict().items()}
    for name, rider in run.riders.items():
        tensors |= {f"{name}.{key}": value for key, value in rider.head.state_dict().items()}
    for name, guard in run.guards.items():
        tensors |= {f"{name}.{key}": value for key, value in guard.state_dict().items()}
    save = require("safetensors.torch", extra="train").save
    packed = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    folder.write("model.safetensors", lambda file: file.write(packed))


def _write_gradients(run: Run, folder: RunFolder) -> None:
    norms = torch.stack(run.gradients).cpu().numpy()  # (epochs, steps, H)
    heads = [name for names in run.config.head_groups().values() for name in names]
    arrays = {"norms": norms, "heads": np.array(heads)}
    folder.write("gradients.npz", lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def as_plain(value: Any) -> Any:
    """For JSON: dataclasses as dicts, numbers to six significant digits, None for what is no finite number.

    >>> as_plain({"ece": 0.0123456789, "sizes": (3, 4)})
    {'ece': 0.0123457, 'sizes': [3, 4]}
    """
    if hasattr(value, "__dataclass_fields__"):
        return as_plain(asdict(value))
    if isinstance(value, dict):
        return {key: as_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
