"""Calibrators fitted after training to committed logits. Each method maps a stored run to test scores.

The staged head comes in four forms, each with more to read: the logits; five numbers of the features and distances to
the class means; the second opinion of heads trained beside the network; the mirrored image. An ensemble is the mean
probability of several seeds, as it is and after a temperature.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from results import Scores, Split, Splits, StoredRun
from tables import row_of
from torch import Tensor

from doublehead import Predictions, calibrators
from doublehead.calibrators import Head, make
from doublehead.calibrators.head_stages import STAGES
from doublehead.network import Answer, merge_views

CALIBRATORS = (
    "none", "temperature", "temperature_grid", "vector", "matrix", "dirichlet", "spline", "gaussian_process",
)  # fmt: skip
PEERS = ("svs", "sms")  # of probmetrics: structured vector and matrix scaling
RIVALS = {"temperature": "temperature", "svs": "SVS", "sms": "SMS"}
Classifier = StoredRun | Splits
Numbers = dict[tuple[str, str], dict[str, float]]  # by run and output


def calibrated(name: str, run: Classifier) -> Scores:
    """One of the package's calibrators."""
    fitted = make(name).fit(run.calib.predictions)
    return Scores.of(fitted.calibrate(run.test.predictions))


def peer(name: str, run: Classifier) -> Scores:
    """One of probmetrics' calibrators."""
    calibrator = import_module("probmetrics.calibrators").get_calibrator(name)
    as_logits = import_module("probmetrics.distributions").CategoricalLogits
    calibrator.fit_torch(as_logits(run.calib.main), run.calib.labels)
    out = calibrator.predict_proba_torch(as_logits(run.test.main))
    return Scores.of(Predictions(out.get_logits().float(), run.test.labels))


def staged_head(
    run: Classifier, reads: Collection[str] = (), stages: Sequence[str] = STAGES, keep: str = "predictions"
) -> Scores | None:
    """The staged head that reads these fields of a `Split`; None where one was not stored."""
    if any(getattr(run.test, field) is None for field in reads):
        return None
    head = Head(keep)
    head.allowed = stages
    (calib, known), (test, evidence) = (evidence_of(split, reads) for split in (run.calib, run.test))
    head.fit(Predictions(calib, run.calib.labels), **known)
    with torch.no_grad():
        return Scores.of(Predictions(head(test, **evidence), run.test.labels))


def evidence_of(split: Split, reads: Collection[str]) -> tuple[Tensor, dict[str, Any]]:
    """Logits of a split, and the opinions and numbers that the head is given with them."""
    opinions = [getattr(split, field) for field in ("sphere", "projected", "opinion") if field in reads]
    logits, numbers = split.main, [split.numbers] if "numbers" in reads else []
    if "flip" in reads:
        views = (Answer(None, logits[:, :0], view, logits[:, :0]) for view in (logits, split.flip))
        _, _, logits, disagreement = merge_views([*views])
        numbers.append(disagreement)
    return logits, {"opinion": opinions or None, "numbers": torch.cat(numbers, 1) if numbers else None}


FEATURES = ("numbers", "sphere", "projected")
OPINION = (*FEATURES, "opinion")
FEW = ("map", "head", "pool")  # all stages but the curve
METHODS: dict[str, Callable[[Classifier], Scores | None]] = {
    **{name: partial(calibrated, name) for name in CALIBRATORS},
    **{name: partial(peer, name) for name in PEERS},
    "head": staged_head,
    "head+features": partial(staged_head, reads=FEATURES),
    "head+opinion": partial(staged_head, reads=OPINION),
    "head+mirror": partial(staged_head, reads=(*OPINION, "flip")),
    "head+opinion, best": partial(staged_head, reads=OPINION, keep="best"),
    # One stage after the other; "head" has the curve too, and "head+opinion" is the last of them with the curve.
    "stage: map": partial(staged_head, stages=("map", "pool")),
    "stage: head": partial(staged_head, stages=FEW),
    "stage: numbers": partial(staged_head, reads=("numbers",), stages=FEW),
    "stage: distances": partial(staged_head, reads=FEATURES, stages=FEW),
    "stage: opinion": partial(staged_head, reads=OPINION, stages=FEW),
}


def all_scores(run: StoredRun, methods: Collection[str] = tuple(METHODS)) -> dict[str, Scores]:
    """The scores of every method that can be computed here, and of the heads that were trained beside the network."""
    absent = () if find_spec("probmetrics") else PEERS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", calibrators.NotConverged)
        found = {name: METHODS[name](run) for name in methods if name not in absent}
    return {name: scores for name, scores in found.items() if scores is not None} | run.heads


def against(run: Classifier, scores: Mapping[str, Scores]) -> dict[str, float]:
    """How the staged head's NLL, by logits alone, differs from that of other methods: difference and half interval."""
    found: dict[str, float] = {"classes": run.calib.main.shape[1]}
    for name in [name for name in RIVALS if name in scores]:
        found[f"to_{name}"], found[f"reach_{name}"] = scores["head"].gap(scores[name])
    return found


def run_numbers(run: StoredRun) -> Numbers:
    scores = all_scores(run)
    usual = scores["none"], scores["temperature"]
    found = {(run.name, name): one.numbers(*usual) for name, one in scores.items()}
    found[run.name, "head"] |= against(run, scores)
    return found


def ensembles(runs: Sequence[StoredRun]) -> Iterator[tuple[str, list[StoredRun]]]:
    """Runs that differ in their seed alone, three or more, with a name for them."""
    for row, found in groupby(runs, lambda run: row_of(run.name)):
        if len(members := list(found)) >= 3:
            yield f"{row}-ensemble{len(members)}", members


def mean_of(members: Sequence[Tensor]) -> Tensor:
    """Log of the mean probabilities (N, K) of several networks, whose logits are given.

    >>> mean_of([torch.tensor([[0.0, 0.0]]), torch.tensor([[0.9, 0.1]]).log()]).exp()
    tensor([[0.7000, 0.3000]], dtype=torch.float64)
    """
    log_probs = torch.stack([logits.double().log_softmax(1) for logits in members])
    return log_probs.logsumexp(0) - math.log(len(members))


def ensemble_numbers(name: str, members: Sequence[Classifier]) -> Numbers:
    """`phi` and `delta` compare with the average member, raw and after temperature scaling."""
    means, usual = [], {}
    for own in ([run.calib for run in members], [run.test for run in members]):
        if any(not torch.equal(one.labels, own[0].labels) for one in own):
            raise ValueError(f"members of {name} must have predicted the same samples in the same order")
        means.append(Split(own[0].labels, mean_of([one.main for one in own])))
    for method in ("none", "temperature"):
        scores = [calibrated(method, run) for run in members]
        usual[method] = scores[0]._replace(nll=torch.stack([one.nll for one in scores]).mean(0))
    return {(name, method): calibrated(method, Splits(*means)).numbers(*usual.values()) for method in usual}
