"""The verb `calibrate`: from a trained network and calibration data, or from predictions, to calibrated ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import nn

from doublehead.calibrated import Calibrated, read
from doublehead.calibration_data import ToPair, as_batches, check_disjoint, first_of, unpack
from doublehead.calibrators import CALIBRATORS, make
from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.head import Head
from doublehead.calibrators.parametric import PerLabel
from doublehead.double_head import DoubleHead
from doublehead.network import POSITIONS, Reader, Readings, View
from doublehead.predictions import Predictions
from doublehead.system import did_you_mean
from doublehead.torch_tools import (
    device_of,
    from_every_process,
    meet,
    same_on_all_processes,
    seeded,
    unwrapped,
)


@overload
def calibrate(what: nn.Module, calib_data: Any, **options: Any) -> Calibrated: ...


@overload
def calibrate(what: Any, calib_data: Any = None, **options: Any) -> Calibrator: ...


@torch.inference_mode(False)  # fitting needs gradients
def calibrate(
    what: Any, calib_data: Any = None, *, method: str = "head", seed: int = 0, **options: Any
) -> Any:
    """Calibrate a trained network, or predictions.

    `calibrate(network, calib_data)` runs the network once over data that it was not trained on (a loader, a
    Dataset or a pair of arrays) and returns a `Calibrated`, whose calls give calibrated log-probabilities.
    `calibrate(predictions)` returns a fitted `Calibrator`; `calibrate(probs, labels)`, `calibrate(frame)` and
    `calibrate("val.csv")` read predictions as `evaluate` does. `method` names the calibrator, one of
    `doublehead.calibrators.CALIBRATORS`; the default is the staged head. Where samples have several labels, it is what
    `calibrators.PerLabel` fits to all labels together. `keep="best"` allows predictions to change where that does not
    cost accuracy.

    Further options for a network: `views=["flip"]` averages over the image and its mirror image, at twice the cost of
    inference; `beside` is the DoubleHead that was trained beside the network, or beside the one whose averaged weights
    (EMA, SWA) this one holds; `train_data` is checked for samples in common; `alone=True` calibrates in one of several
    processes; `positions` tokens or pixels are drawn from all that count; `to_pair`, `logits_of`, `outputs`, `task`,
    `ignore_index` and `layer` as for `DoubleHead`.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> model = calibrate(network, (torch.randn(300, 4), torch.randint(3, (300,))))
    >>> model(torch.randn(2, 4)).shape, model.head.choice.n
    (torch.Size([2, 3]), 300)
    """
    if isinstance(what, nn.Module):
        _check_options(options, _calibrate_network, Reader.of)
        return _calibrate_network(what, calib_data, method, seed, **options)
    if not isinstance(what, Predictions):
        from doublehead.audit import load_predictions

        what = load_predictions(what, calib_data)
    if kind := PerLabel if what.n_labels else CALIBRATORS.get(method):
        _check_options(options, kind)
    return _unfitted(what.n_labels, method, seed, **options).fit(what)


def _check_options(given: Iterable[str], *takers: Callable[..., Any]) -> None:
    """Refuse options that none of these functions or classes takes."""
    known = {"method", *(name for taker in takers for name in inspect.signature(taker).parameters)} - {"form"}
    for name in given:
        if name not in known:
            raise TypeError(f"calibrate has no option {name!r} here{did_you_mean(name, known)}")


def _calibrate_network(
    network: nn.Module,
    calib_data: Any,
    method: str,
    seed: int,
    *,
    keep: Literal["predictions", "best"] = "predictions",
    views: Sequence[View | str] = (),
    beside: DoubleHead | None = None,
    train_data: Any = None,
    alone: bool = False,
    to_pair: ToPair | None = None,
    positions: int = POSITIONS,
    **form: Any,  # of `Reader.of`
) -> Calibrated:
    if isinstance(network, Calibrated):
        network = network.network
    if not alone:
        meet("calibrate, or finish,")
    if train_data is not None:
        check_disjoint(calib_data, train_data)
    inner = unwrapped(network)
    with seeded(seed, device_of(inner), calib_data):
        if beside is not None:
            to_pair = to_pair or beside.to_pair
            stated = {name: value for name, value in form.items() if value is not None}
            reader = replace(beside.reader, network=inner, views=views, **stated)
        else:
            first = unpack(first_of(as_batches(calib_data)), device_of(inner), to_pair)
            reader = Reader.of(inner, first, views=views, **form)
        readings = read(reader, calib_data, to_pair, positions, alone, skip=beside is not None)
    return fit(inner, reader, readings, method=method, keep=keep, beside=beside, seed=seed, alone=alone)


def fit(
    network: nn.Module,
    reader: Reader,
    readings: Readings,
    *,
    method: str = "head",
    keep: Literal["predictions", "best"] = "predictions",
    beside: DoubleHead | None = None,
    seed: int = 0,
    alone: bool = False,
) -> Calibrated:
    """A `Calibrated` from what was read already. Where several processes train together, all get the first one's.

    `alone` says that this process is the only one to call it.
    """
    predictions = Predictions(readings.logits, readings.labels, readings.weights)
    predictions.n_labels = reader.n_labels
    known: dict[str, Any] = {}
    if method == "head" and beside is not None and beside.active:
        known["opinion"] = beside.opinion(readings)
    if method == "head" and not reader.n_labels:
        known["features"] = readings.features if readings.features.shape[1] else None
        known["numbers"] = readings.numbers if readings.numbers.shape[1] else None
        known["last_layer"] = reader.last_layer()
        # Positions of one image or sentence are alike, so they are held back together.
        known["folds"] = readings.folds if reader.task in ("tokens", "pixels") else None
    options = {"keep": keep} if method == "head" or reader.n_labels else {}
    head = _unfitted(reader.n_labels, method, seed, **options).fit(predictions, **known)
    if not alone:
        same_on_all_processes(head)
        for part in head.modules():  # and what the first one says of its choices
            if isinstance(part, (Head, PerLabel)):
                part.choice = from_every_process(part.choice)[0]
            if isinstance(part, Head):
                part.refresh()
    heads = None
    if beside is not None and "opinion" in known:
        heads = beside.bank.take(*range(len(beside.bank.specs))).eval()
    return Calibrated(network, head, reader, heads).eval()


def _unfitted(n_labels: int | None, method: str, seed: int, **options: Any) -> Calibrator:
    if n_labels:  # a map for each label, on top of the method, which they share
        share = "head" if method == "per_label" else method
        return PerLabel(share, seed=seed, **options)  # type: ignore[arg-type]
    return make(method, **({"seed": seed} if method == "head" else {}), **options)
