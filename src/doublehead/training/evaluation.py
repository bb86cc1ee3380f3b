"""What a trained run says about its data: predictions of every output, numbers, shift."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from doublehead import metrics
from doublehead.bins import UNIT, Bins
from doublehead.calibrators.temperature import Temperature, TemperatureGrid
from doublehead.data import FAMILIES, corrupt
from doublehead.double_head import Readings
from doublehead.head_bank import HeadBank
from doublehead.last_layer import logits_of
from doublehead.plumbing import device_of, evaluating, n_processes, unpack
from doublehead.predictions import Predictions
from doublehead.shift_guard import scaled
from doublehead.training.run import Run, algorithms

EPOCH_NUMBERS = ("accuracy", "ece", "nll", "brier", "mean_entropy", "mean_confidence")


@torch.no_grad()
def predict(
    run: Run, batches: Iterable[Any], *, heads: bool = True, labelled: bool = True
) -> dict[str, Predictions]:
    """The predictions of every output ("main", each head, "auto") over all of `batches`, on the device.

    Without `heads` of "main" alone. Data of other classes is not `labelled`: its labels are then all 0.
    """
    share_buffers(run)
    parts: dict[str, list[Tensor]] = {}
    with evaluating(run.net), run.fabric.autocast():
        for batch in batches:
            for name, values in _outputs(run, batch, heads):
                parts.setdefault(name, []).append(values)
    whole = {name: _from_all_processes(torch.cat(some)) for name, some in parts.items()}
    labels = whole.pop("labels")
    labels = labels if labelled else torch.zeros_like(labels)
    return {name: Predictions(logits.float(), labels) for name, logits in whole.items()}


def _outputs(run: Run, batch: Any, heads: bool) -> Iterator[tuple[str, Tensor]]:
    """The labels (B,) and the logits (B, K) of each output for one batch."""
    if not (run.riders and heads):
        args, kwargs, labels = unpack(batch, device_of(run.net))
        yield "labels", labels
        yield "main", logits_of(run.net(*args, **kwargs)).float()
        return
    # All riders sit on one network: what one of them reads is what all of them read.
    with run.stages.recording() if run.stages else nullcontext():
        features, main, labels = next(iter(run.riders.values())).read([batch])
    stages = run.stages.take(len(main)) if run.stages else None
    yield "labels", labels
    yield "main", main
    for group, names in run.config.riders().items():
        bank = run.riders[group].head
        assert isinstance(bank, HeadBank)
        with evaluating(bank):
            made = [bank(features, main)] if group == "auto" else bank.all_heads(features, main)
        yield from zip(names, made)
        if group == "auto" and stages is not None:
            yield from (
                (name, scaled(made[0], guard.scale * guard(stages))) for name, guard in run.guards.items()
            )


def epoch_numbers(predictions: Mapping[str, Predictions], n_bins: int = 15) -> dict[str, dict[str, float]]:
    """A few numbers of every output, cheap enough for every epoch."""
    return {name: _few(p, n_bins) for name, p in predictions.items()}


def _few(p: Predictions, n_bins: int) -> dict[str, float]:
    return {key: float(getattr(metrics, key)(p)) for key in EPOCH_NUMBERS} | {
        "ece": float(metrics.ece(p, n_bins))
    }


@algorithms(deterministic=False)  # running sums take memory quadratic in N where they must be deterministic
def final_numbers(test: Mapping[str, Predictions], calib: Mapping[str, Predictions]) -> dict[str, Any]:
    """Per output the numbers on test, as it is and after a temperature fitted to its calibration predictions."""
    made: dict[str, Any] = {}
    for name, p in test.items():
        temperature = Temperature().fit(calib[name])
        grid = TemperatureGrid().fit(calib[name])
        scaled = Predictions(temperature(p.logits), p.labels)
        made[name] = {
            "before": metrics.evaluate(p),
            "after": metrics.evaluate(scaled),
            "temperature": float(temperature.temperature_),
            "after_grid": metrics.evaluate(Predictions(grid(p.logits), p.labels)),
            "grid_temperature": float(grid.temperature_),
            "bins": {"before": binned(p), "after": binned(scaled)},
        }
    return made


def binned(p: Predictions, n_bins: int = 15) -> dict[str, list[float]]:
    """What a reliability diagram needs, as lists: counts, sums of confidences and of right answers, bin by bin."""
    bins = Bins.top(p, n_bins)
    return {
        "counts": bins.counts.tolist(),
        "conf_sums": (bins.conf_sums.double() / UNIT).tolist(),
        "correct_sums": bins.correct_sums.tolist(),
    }


def shift_numbers(
    run: Run, test: Mapping[str, Predictions], temperatures: Mapping[str, float]
) -> dict[str, Any]:
    """Per shifted test set and output: accuracy, ECE, NLL and how well confidence tells it from the clean one.

    "main+T" and so on are the outputs after temperature scaling. Of other data sets ("ood:svhn") there is no accuracy.
    """
    made: dict[str, Any] = {}
    for name, batches in _shifted_sets(run):
        labelled = not name.startswith("ood:")
        made[name] = {}
        for output, p in predict(run, batches, labelled=labelled).items():
            for suffix, scale in (("", 1.0), ("+T", 1 / temperatures[output])):
                shifted, clean = (Predictions(q.logits * scale, q.labels) for q in (p, test[output]))
                few = _few(shifted, 15)
                numbers = few if labelled else {"mean_confidence": few["mean_confidence"]}
                with algorithms(deterministic=False):  # as in `final_numbers`
                    auroc = float(metrics.auroc(clean.confidence, shifted.confidence))
                made[name][output + suffix] = {**numbers, "auroc": auroc}
    return made


def _shifted_sets(run: Run) -> Iterator[tuple[str, Iterable[Any]]]:
    for asked in run.config.shift:
        family, _, severity = asked.partition(":")
        if asked == "cifar10c":
            for family in (one for one in FAMILIES if run.inputs.coloured or one != "saturate"):
                for level in range(1, 6):
                    yield f"{family}:{level}", corrupted(run, family, level)
        elif family in FAMILIES:
            yield f"{family}:{severity or 5}", corrupted(run, family, int(severity or 5))
        else:
            yield f"ood:{asked}", run.others[asked]


def corrupted(run: Run, family: str, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The test images after a corruption, batch by batch, in the form the network reads."""
    normalise = run.inputs.normalise
    assert normalise is not None
    generator = torch.Generator(device_of(run.net)).manual_seed(severity)
    for x, y in run.inputs.make_eval(run.inputs.splits.test):
        pixels = corrupt(normalise.undo(x).clamp(0, 1), family, severity, generator)
        yield normalise(pixels).contiguous(memory_format=torch.channels_last), y


def share_buffers(run: Run) -> None:
    """Give every process the first one's buffers: BatchNorm's averages are each process's own until then."""
    if n_processes() > 1:
        for buffer in run.net.buffers():
            dist.broadcast(buffer, 0)


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
        readings = run.riders["auto"].read(run.inputs.held_back or ())
    return Readings(*(_from_all_processes(part) for part in readings))
