"""What a trained run says about its data: predictions of every output, numbers, shift."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from doublehead import metrics
from doublehead.calibrators.temperature import Temperature, TemperatureGrid
from doublehead.data import FAMILIES, Images, corrupt, load_test
from doublehead.data.splits import Samples
from doublehead.double_head import Readings
from doublehead.head_bank import HeadBank
from doublehead.last_layer import logits_of
from doublehead.plumbing import device_of, evaluating, n_processes, unpack
from doublehead.predictions import Predictions

if TYPE_CHECKING:
    from doublehead.training.loop import Run

EPOCH_NUMBERS = ("accuracy", "ece", "nll", "brier", "mean_entropy", "mean_confidence")


@torch.no_grad()
def predict(run: Run, batches: Any) -> dict[str, Predictions]:
    """The predictions of every output ("main", each head, "auto") over all of `batches`, on the device."""
    parts: dict[str, list[Tensor]] = {}
    with evaluating(run.net), run.fabric.autocast():
        for batch in batches:
            for name, logits in _outputs(run, batch):
                parts.setdefault(name, []).append(logits)
    whole = {name: _from_all_processes(torch.cat(some)) for name, some in parts.items()}
    labels = whole.pop("labels")
    return {name: Predictions(logits.float(), labels) for name, logits in whole.items()}


def _outputs(run: Run, batch: Any) -> Iterator[tuple[str, Tensor]]:
    args, kwargs, labels = unpack(batch, device_of(run.net))
    yield "labels", labels
    if not run.riders:
        yield "main", logits_of(run.net(*args, **kwargs)).float()
        return
    output, features = next(iter(run.riders.values()))._tap.run(run.net, args, kwargs)
    main = logits_of(output).float()
    yield "main", main
    groups = run.config.riders()
    for name, rider in run.riders.items():
        bank = rider.head.eval()
        assert isinstance(bank, HeadBank)
        if name == "auto":
            yield "auto", bank(features, main)
        else:
            yield from zip(groups[name], bank.all_heads(features, main))


def epoch_numbers(predictions: Mapping[str, Predictions], n_bins: int = 15) -> dict[str, dict[str, float]]:
    """A few numbers of every output, cheap enough for every epoch."""
    return {name: _few(p, n_bins) for name, p in predictions.items()}


def _few(p: Predictions, n_bins: int) -> dict[str, float]:
    return {key: float(getattr(metrics, key)(p)) for key in EPOCH_NUMBERS} | {
        "ece": float(metrics.ece(p, n_bins))
    }


def final_numbers(test: Mapping[str, Predictions], calib: Mapping[str, Predictions]) -> dict[str, Any]:
    """Per output the numbers on test, as it is and after a temperature fitted to its calibration predictions."""
    made: dict[str, Any] = {}
    for name, p in test.items():
        temperature = Temperature().fit(calib[name])
        grid = TemperatureGrid().fit(calib[name])
        made[name] = {
            "before": metrics.evaluate(p),
            "after": metrics.evaluate(Predictions(temperature(p.logits), p.labels)),
            "temperature": float(temperature.temperature_),
            "after_grid": metrics.evaluate(Predictions(grid(p.logits), p.labels)),
            "grid_temperature": float(grid.temperature_),
        }
    return made


def shift_numbers(
    run: Run, test: Mapping[str, Predictions], temperatures: Mapping[str, float], root: str | None
) -> dict[str, Any]:
    """Per shifted test set and output: accuracy, ECE, NLL and how well confidence tells it from the clean one."""
    made: dict[str, Any] = {}
    for name, batches in _shifted_sets(run, root):
        seen = predict(run, batches)
        labelled = not name.startswith("ood:")
        made[name] = {}
        for output, p in seen.items():
            for suffix, scale in (("", 1.0), ("+T", 1 / temperatures[output])):
                shifted = Predictions(p.logits * scale, p.labels)
                clean = Predictions(test[output].logits * scale, test[output].labels)
                numbers = (
                    _few(shifted, 15)
                    if labelled
                    else {"mean_confidence": float(metrics.mean_confidence(shifted))}
                )
                numbers["auroc"] = float(metrics.auroc(clean.confidence, shifted.confidence))
                made[name][output + suffix] = numbers
    return made


def _shifted_sets(run: Run, root: str | None) -> Iterator[tuple[str, Any]]:
    for asked in run.config.shift:
        family, _, severity = asked.partition(":")
        if asked == "cifar10c":
            for family in FAMILIES:
                for level in range(1, 6):
                    yield f"{family}:{level}", Corrupted(run, family, level)
        elif family in FAMILIES:
            yield asked, Corrupted(run, family, int(severity or 5))
        else:
            other: Samples = load_test(asked, root)
            yield f"ood:{asked}", run.inputs.make_eval(other)


class Corrupted:
    """The test images after a corruption, batch by batch, in the form the network reads."""

    def __init__(self, run: Run, family: str, severity: int) -> None:
        assert isinstance(run.inputs.splits.test, Images)
        assert run.inputs.normalise is not None
        self.run, self.family, self.severity = run, family, severity
        self.normalise = run.inputs.normalise

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = device_of(self.run.net)
        generator = torch.Generator(device).manual_seed(self.severity)
        for x, y in self.run.inputs.make_eval(self.run.inputs.splits.test):
            pixels = corrupt(self.normalise.undo(x).clamp(0, 1), self.family, self.severity, generator)
            yield self.normalise(pixels).contiguous(memory_format=torch.channels_last), y


def _from_all_processes(rows: Tensor) -> Tensor:
    """All processes' rows in the order of the data: evaluation deals out contiguous parts."""
    if n_processes() == 1:
        return rows
    sizes = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(n_processes())]
    dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(sizes))
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return torch.cat([part[: int(size)] for part, size in zip(gathered, sizes)])


def held_back_readings(run: Run) -> Readings:
    """What the candidates of `auto` are judged on, the same in every process."""
    with run.fabric.autocast():
        readings = run.riders["auto"].read(run.inputs.held_back)
    return Readings(*(_from_all_processes(part) for part in readings))
