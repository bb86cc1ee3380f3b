"""The torchmetrics.Metric: the same bits over batches and over processes."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from doublehead import metrics
from doublehead.bins import Bins
from doublehead.integrations.torchmetrics import CalibrationError
from doublehead.predictions import Predictions
from processes import in_two_processes
from samples import random_predictions, refused

CASES = {"top": None, "classwise": 6}  # components -> n_classes


def data() -> tuple[torch.Tensor, torch.Tensor]:
    p = random_predictions(700, k=6)
    return p.logits, p.labels


@pytest.mark.parametrize("components", CASES)
@pytest.mark.parametrize("size", [1, 64, 700])
def test_batches_give_the_value_of_the_whole(components, size):
    logits, labels = data()
    metric = CalibrationError(n_classes=CASES[components])
    for batch in zip(logits.split(size)[:200], labels.split(size)[:200]):
        metric.update(*batch)
    assert float(metric.compute()) == metrics.ece(Predictions(logits, labels)[: 200 * size], 15, components)


def test_probabilities_are_stated():
    logits, labels = data()
    metric, p = CalibrationError(are_probs=True), Predictions(logits, labels)
    first = metric(p.probs[:100], labels[:100])  # of the batch
    assert float(first) == metrics.ece(p[:100])
    metric(p.probs[100:], labels[100:])
    assert float(metric.compute()) == metrics.ece(p)
    refused("probs must lie in 0..1", metric.update, logits, labels)
    metric.reset()
    assert int(metric.bins.sum()) == 0


def test_state_does_not_grow_and_survives_copies():
    logits, labels = data()
    metric = CalibrationError()
    sizes = set()
    for batch in zip(logits.split(100), labels.split(100)):
        metric.update(*batch)
        sizes.add(metric.bins.numel() * metric.bins.element_size())
    assert sizes == {3 * 15 * 8}
    for again in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric)):
        assert float(again.compute()) == float(metric.compute())


def test_bad_input_is_named():
    refused("n_bins must be a whole number >= 1, got 0", CalibrationError, n_bins=0)
    refused("logits must have 5 columns, got 6", CalibrationError(n_classes=5).update, *data())


def _work(rank: int, folder: Path) -> None:
    """One of two processes with unequal shares; saves what it computes."""
    logits, labels = data()
    share = slice(0, 137) if rank == 0 else slice(137, None)
    logits, labels = logits[share], labels[share]
    values = []
    for n_classes in CASES.values():
        metric = CalibrationError(n_classes=n_classes)
        for batch in zip(logits.split(50), labels.split(50)):
            metric.update(*batch)
        values.append(metric.compute())
    state = Bins.top(Predictions(logits, labels)).state()
    dist.all_reduce(state)
    torch.save({"values": torch.stack(values), "state": state}, folder / f"{rank}.pt")


def test_two_processes_give_the_same_bits(tmp_path):
    in_two_processes(_work, tmp_path)
    p = Predictions(*data())
    want = [metrics.ece(p, components=components) for components in CASES]
    for rank in (0, 1):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert saved["values"].tolist() == want
        assert Bins.from_state(saved["state"]) == Bins.top(p)
