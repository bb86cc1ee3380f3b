"""What a trained run predicts, the numbers of its predictions, and the files it leaves at the end."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doublehead import metrics
from doublehead.calibrate import fit
from doublehead.calibration_data import unpack
from doublehead.calibrators.temperature import Temperature
from doublehead.data import corrupt
from doublehead.data.splits import Samples
from doublehead.predictions import Predictions
from doublehead.saving import describe
from doublehead.shift_guard import ShiftGuard
from doublehead.summary import Summary
from doublehead.system import require
from doublehead.torch_tools import (
    device_of,
    evaluating,
    from_every_process,
    n_processes,
    same_on_all_processes,
)
from doublehead.training.config import corruptions_of
from doublehead.training.run import Run
from doublehead.training.run_folder import RunFolder, algorithms, environment, on_first_process

EPOCH_NUMBERS = ("accuracy", "ece", "nll", "brier", "mean_entropy", "mean_confidence")
DIGITS = 6  # significant digits in results.json: float32 has 7

Outputs = dict[str, Predictions]


def finish(run: Run, folder: RunFolder) -> dict[str, Any]:
    """Fit `auto` and its guards, evaluate every output and write all files; returns the content of results.json."""
    same_on_all_processes(run.net)  # each has its own averages of BatchNorm
    if run.config.auto:
        _fit_auto(run)
    splits = run.inputs.splits
    predictions = {name: predict(run, run.inputs.make_eval(splits.parts[name])) for name in ("test", "calib")}
    if run.config.predict_train:
        predictions["train"] = predict(run, run.inputs.make_eval(splits.train), heads=False)
    outputs = final_numbers(predictions["test"], predictions["calib"])
    train = predictions.get("train")
    found = {
        "environment": environment(run.fabric.device),
        "processes": run.fabric.world_size,
        "sizes": splits.sizes,
        "train_seconds": run.seconds,
        # How `auto` is put together again, and why its stages were chosen.
        "auto": None if run.auto is None else describe(run.auto),
        "choice": None if run.auto is None else run.auto.head.choice,
        "outputs": outputs,
        "train_accuracy": None if train is None else float(metrics.accuracy(train["main"])),
        "shift": shift_numbers(run, predictions["test"], outputs),
    }
    results: dict[str, Any] = {"config": json.loads(run.config.to_json()), **as_plain(found)}
    on_first_process(run.fabric, _write, run, folder, predictions, results)
    return results


def _fit_auto(run: Run) -> None:
    """The staged head with the second opinion, on all calibration data, and the guards around it."""
    config, calib = run.config, run.inputs.whole(run.inputs.splits.calib)
    reader = replace(run.reader, views=config.views)
    with run.fabric.autocast():
        readings = reader.read(calib)
    with algorithms(deterministic=False):
        run.auto = fit(run.net, reader, readings, beside=run.companions["auto"], seed=config.seed)
    if config.guards:
        guard = ShiftGuard(run.auto)
        run.stages = guard.tap
        for output, name in config.guarded().items():
            with run.fabric.autocast():
                guard.fit(calib, run.inputs.perturbation(name, share=1.0), seed=config.seed)
            same_on_all_processes(guard.guard)  # devices may round differently
            run.guards[output] = copy.deepcopy(guard.guard)


# --- predictions


@torch.no_grad()
def predict(run: Run, batches: Iterable[Any], *, heads: bool = True, labelled: bool = True) -> Outputs:
    """The predictions of every output over all of `batches`, on the device; without `heads` of "main" alone.

    The outputs are "main", each named head, and "auto" with its guards once they are fitted. Before that "opinion" is
    the mean of the heads of the second opinion. Without `labelled`, for data of other classes, all labels are 0.
    """
    same_on_all_processes(run.net)  # each has its own averages of BatchNorm
    parts: dict[str, list[Tensor]] = {}
    banks = [companion.bank for companion in run.companions.values()]
    for guard in run.guards.values():
        guard.reset()  # these batches are a stream of their own
    with evaluating(run.net, *banks), run.fabric.autocast():
        for batch in batches:
            for name, values in _outputs(run, batch, heads):
                parts.setdefault(name, []).append(values)
    whole = {name: torch.cat(some) for name, some in parts.items()}
    if n_processes() > 1:  # each has one contiguous part, that of few samples may be empty
        shares = from_every_process({name: rows.cpu() for name, rows in whole.items()})
        shares = [share for share in shares if share]
        whole = {
            name: torch.cat([share[name] for share in shares]).to(run.fabric.device) for name in shares[0]
        }
    labels = whole.pop("labels")
    labels = labels if labelled else torch.zeros_like(labels)
    return {name: Predictions(logits.float(), labels) for name, logits in whole.items()}


def _outputs(run: Run, batch: Any, heads: bool) -> Iterator[tuple[str, Tensor]]:
    """The labels (B,) and the logits (B, K) of each output for one batch."""
    args, kwargs, labels, *_ = unpack(batch, device_of(run.net))
    with run.stages.recording() if run.stages and heads else nullcontext():
        _, features, main, _ = run.reader.run(args, kwargs)
    yield "labels", labels
    yield "main", main.float()
    if not heads:
        return
    for group, names in run.config.head_groups().items():
        yield from zip(names, run.companions[group].bank(main, features))
    if run.auto is None:
        if "auto" in run.companions:
            yield "opinion", run.companions["auto"].answer(main, features)
        return
    stages = run.stages.take(len(main)) if run.stages else None
    numbers = None
    if run.auto.reader.views:
        _, features, main, numbers = run.auto.reader.run(args, kwargs)
    auto = run.auto.calibrated(main, features, numbers)
    yield "auto", auto
    if stages is not None:
        yield from ((name, guard(stages, auto)) for name, guard in run.guards.items())


# --- numbers


def epoch_numbers(p: Predictions) -> dict[str, float]:
    """A few numbers of an output, cheap enough for every epoch."""
    return {key: float(getattr(metrics, key)(p)) for key in EPOCH_NUMBERS}


@algorithms(deterministic=False)  # running sums take memory quadratic in N where they must be deterministic
def final_numbers(test: Mapping[str, Predictions], calib: Mapping[str, Predictions]) -> dict[str, Any]:
    """Per output the numbers on test, as it is and after a temperature fitted to its calibration predictions."""
    made: dict[str, Any] = {}
    for name, p in test.items():
        temperature = Temperature().fit(calib[name])
        made[name] = {
            "before": Summary.of(p).values,
            "after": Summary.of(temperature.calibrate(p)).values,
            "temperature": float(temperature.temperature_),
        }
    return made


def shift_numbers(run: Run, test: Mapping[str, Predictions], final: Mapping[str, Any]) -> dict[str, Any]:
    """Per shifted test set and output: accuracy, ECE, NLL and how well confidence tells it from the clean one.

    "main+T" and so on are the outputs after temperature scaling. Other data sets ("ood:svhn") have no accuracy.
    """
    made: dict[str, Any] = {}
    for name, batches in _shifted_sets(run):
        labelled = not name.startswith("ood:")
        made[name] = {}
        for output, p in predict(run, batches, labelled=labelled).items():
            for suffix, scale in (("", 1.0), ("+T", 1 / final[output]["temperature"])):
                shifted, clean = (Predictions(q.logits * scale, q.labels) for q in (p, test[output]))
                numbers = epoch_numbers(shifted)
                if not labelled:
                    numbers = {"mean_confidence": numbers["mean_confidence"]}
                auroc = metrics.auroc(clean.confidence, shifted.confidence)
                made[name][output + suffix] = {**numbers, "auroc": auroc}
    return made


def _shifted_sets(run: Run) -> Iterator[tuple[str, Iterable[Any]]]:
    for asked in run.config.shift:
        for family, severity in corruptions_of(asked):
            if run.inputs.coloured or family != "saturate":
                yield f"{family}:{severity}", corrupted(run, run.inputs.splits.test, family, int(severity))
        if asked in run.others:
            yield f"ood:{asked}", run.others[asked]


def corrupted(run: Run, samples: Samples, family: str, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images after a corruption, batch by batch, in the form the network reads."""
    normalise = run.inputs.normalise
    assert normalise is not None
    generator = torch.Generator(device_of(run.net)).manual_seed(severity)
    for x, y in run.inputs.make_eval(samples):
        pixels = corrupt(normalise.undo(x).clamp(0, 1), family, severity, generator)
        yield normalise(pixels).contiguous(memory_format=torch.channels_last), y


# --- files


def _write(run: Run, folder: RunFolder, predictions: Mapping[str, Outputs], results: dict[str, Any]) -> None:
    for split, outputs in predictions.items():
        for name, p in outputs.items():
            folder.save_predictions(f"{split}-{name}", p)
    if run.gradients:
        norms = torch.stack(run.gradients).cpu().numpy()  # (epochs, steps, H)
        heads = [name for names in run.config.head_groups().values() for name in names]
        arrays = {"norms": norms, "heads": np.array(heads)}
        folder.write("gradients.npz", lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]
    modules: dict[str, Any] = {"model": run.net}
    modules |= {group: run.companions[group].bank for group in run.config.head_groups()}
    if run.auto is not None:
        modules |= {"auto.head": run.auto.head}
        modules |= {"auto.opinion": run.auto.opinion} if run.auto.opinion is not None else {}
    modules |= run.guards
    tensors = {
        f"{name}.{key}": value.detach().cpu().clone().contiguous()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }
    packed = require("safetensors.torch", extra="train").save(tensors)
    folder.write("model.safetensors", lambda file: file.write(packed))
    folder.write_text("results.json", json.dumps(results, indent=1) + "\n")
    folder.drop_checkpoint()


def as_plain(value: Any) -> Any:
    """For JSON: dataclasses as dicts, numbers to six significant digits, None for what is not finite.

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
