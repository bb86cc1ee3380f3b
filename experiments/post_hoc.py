"""Calibrators fitted after training to committed logits. Each method maps a stored run to test scores.

The staged head comes in four forms, each with more to read: the logits; five numbers of the features and distances to
the class means; the second opinion of heads trained beside the network; the mirrored image. An ensemble is the mean
probability of several seeds, as it is and after a temperature.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from results import Scores, Split, StoredRun, paired, rows_of
from tables import row_of
from torch import Tensor

from doublehead import Predictions, calibrators
from doublehead.calibrators import Head, Temperature, make
from doublehead.calibrators.head_stages import STAGES
from doublehead.calibrators.optimise import fit_log_scale
from doublehead.system import require

CALIBRATORS = (
    "none", "temperature", "temperature_grid", "vector", "matrix", "dirichlet", "spline", "gaussian_process",
)  # fmt: skip
PEERS = ("svs", "sms")  # of probmetrics: structured vector and matrix scaling
RIVALS = {"temperature": "temperature", "svs": "SVS", "sms": "SMS"}
MIN_MEMBERS = 3  # of an ensemble


# A classifier: its `calib` and `test` are each a `Split`. A stored run, or any other.
Parts = Any
Method = Callable[[Parts], Scores | None]


def calibrated(name: str, run: Parts) -> Scores:
    """One of the package's calibrators."""
    fitted = make(name).fit(run.calib.predictions)
    return Scores.of(fitted.calibrate(run.test.predictions))


def peer(name: str, run: Parts) -> Scores | None:
    """One of probmetrics' calibrators; None where the package is not installed."""
    try:
        found = require("probmetrics.calibrators", extra="dev")
        distributions = require("probmetrics.distributions", extra="dev")
    except ImportError:
        return None
    calibrator = found.get_calibrator(name)
    calibrator.fit_torch(distributions.CategoricalLogits(run.calib.main), run.calib.labels)
    out = calibrator.predict_proba_torch(distributions.CategoricalLogits(run.test.main))
    return Scores.of(Predictions(out.get_logits().float(), run.test.labels))


def staged_head(
    run: Parts,
    *reads: str,
    stages: Sequence[str] = STAGES,
    keep: Literal["predictions", "best"] = "predictions",
) -> Scores | None:
    """The staged head with what it may read and the stages it may use; None where something was not stored."""
    calib, test = evidence(run.calib, reads), evidence(run.test, reads)
    if calib is None or test is None:
        return None
    head = Head(keep)
    head.allowed = stages
    head.fit(Predictions(calib[0], run.calib.labels), opinion=calib[1] or None, numbers=calib[2])
    with torch.no_grad():
        out = head(test[0], opinion=test[1] or None, numbers=test[2])
    return Scores.of(Predictions(out, run.test.labels))


def evidence(split: Split, reads: Sequence[str]) -> tuple[Tensor, Sequence[Tensor], Tensor | None] | None:
    """Logits, opinions and numbers of a split; None where something is missing. `reads` are fields of `Split`."""
    found = {name: getattr(split, name) for name in reads}
    if any(part is None for part in found.values()):
        return None
    opinions = [found[name] for name in ("sphere", "projected", "opinion") if name in found]
    numbers = [found["numbers"]] if "numbers" in found else []
    logits = split.main
    if "flip" in found:
        logits, disagreement = both_views(split.main, found["flip"])
        numbers.append(disagreement)
    return logits, opinions, torch.cat(numbers, 1) if numbers else None


def both_views(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The mean log-probabilities (N, K) of two views and two numbers of their disagreement, as `Reader` makes them."""
    log_probs = torch.stack([one.log_softmax(-1), other.log_softmax(-1)])
    mean = log_probs.mean(0)
    spread = (log_probs.exp() * (log_probs - mean)).sum(-1).mean(0)
    agree = (log_probs.argmax(-1) == mean.argmax(-1)).float().mean(0)
    return mean, torch.stack([spread.clamp(min=1e-6).log(), agree], -1)


def density_aware(logits: Tensor, labels: Tensor, far: Tensor) -> Callable[[Tensor], Tensor]:
    """Distances (N, D) -> a factor (N, 1) that was fitted to clean data and never grows with a distance.

    Distances whose weights would are left out, one after the other.
    """
    mean, deviation = far.mean(0), far.std(0).clamp(min=1e-3)

    def inputs(far: Tensor) -> Tensor:
        return torch.cat([((far - mean) / deviation).clamp(-3, 6), torch.ones(len(far), 1)], 1)

    design = inputs(far)
    kept = torch.ones(design.shape[1], dtype=torch.bool)
    while True:
        weights = torch.zeros(design.shape[1])
        ridge = torch.full((int(kept.sum()),), 30.0)
        weights[kept] = fit_log_scale(logits, labels, design[:, kept], ridge)
        if (weights[:-1] <= 0).all():
            return lambda far: (inputs(far) @ weights).exp()[:, None]
        kept[weights[:-1].argmax()] = False


FEATURES = ("numbers", "sphere", "projected")
METHODS: dict[str, Method] = {
    **{name: partial(calibrated, name) for name in CALIBRATORS},
    **{name: partial(peer, name) for name in PEERS},
    "head": staged_head,
    "head+features": lambda run: staged_head(run, *FEATURES),
    "head+opinion": lambda run: staged_head(run, *FEATURES, "opinion"),
    "head+mirror": lambda run: staged_head(run, *FEATURES, "opinion", "flip"),
    "head+opinion, best": lambda run: staged_head(run, *FEATURES, "opinion", keep="best"),
    # One stage after the other; "head" has the curve too, and "head+opinion" is the last of them with the curve.
    "stage: map": partial(staged_head, stages=("map", "pool")),
    "stage: head": partial(staged_head, stages=("map", "head", "pool")),
    "stage: numbers": lambda run: staged_head(run, "numbers", stages=("map", "head", "pool")),
    "stage: distances": lambda run: staged_head(run, *FEATURES, stages=("map", "head", "pool")),
    "stage: opinion": lambda run: staged_head(run, *FEATURES, "opinion", stages=("map", "head", "pool")),
}


def all_scores(run: StoredRun, methods: Sequence[str] = tuple(METHODS)) -> Iterator[tuple[str, Scores]]:
    """The scores of every method that can be computed here, and of the heads that were trained beside the network."""
    for name in methods:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", calibrators.NotConverged)
            found = METHODS[name](run)
        if found is not None:
            yield name, found
    yield from run.heads.items()


def against(run: Parts, scores: Mapping[str, Scores]) -> dict[str, float]:
    """How the staged head's NLL, by logits alone, differs from that of its rivals: difference and half interval."""
    found: dict[str, float] = {"classes": run.calib.main.shape[1]}
    for name in RIVALS:
        if name in scores:
            found[f"to_{name}"], found[f"reach_{name}"] = paired(scores["head"].nll, scores[name].nll)
    return found


# --- ensembles


def ensembles(runs: Sequence[StoredRun]) -> Iterator[tuple[str, list[StoredRun]]]:
    """Runs that differ in their seed alone, three or more, with a name for them."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(row_of(run.name), []).append(run)
    for row, members in groups.items():
        if len(members) >= MIN_MEMBERS:
            yield f"{row}-ensemble{len(members)}", members


def mean_of(members: Sequence[Predictions]) -> Predictions:
    """Predictions whose probabilities are the mean of the members'.

    >>> one, two = Predictions([[0.0, 0.0]], [0]), Predictions.from_probs([[0.9, 0.1]], [0])
    >>> [round(p, 3) for p in mean_of([one, two]).probs[0].tolist()]
    [0.7, 0.3]
    """
    for member in members[1:]:
        if not torch.equal(member.labels, members[0].labels):
            raise ValueError("members must have predicted the same samples in the same order")
    probs = torch.stack([member.probs.double() for member in members]).mean(0)
    return Predictions.from_probs(probs, members[0].labels)


def ensemble_rows(name: str, members: Sequence[StoredRun]) -> Iterator[tuple[object, ...]]:
    """Lines of the long table; phi and delta compare with the average member, raw and after temperature scaling."""

    def average(scores: Sequence[Scores]) -> Scores:
        return scores[0]._replace(nll=torch.stack([one.nll for one in scores]).mean(0))

    none = average([Scores.of(run.test.predictions) for run in members])
    temperature = average([calibrated("temperature", run) for run in members])
    calib, test = (mean_of([getattr(r, split).predictions for r in members]) for split in ("calib", "test"))
    after = Temperature().fit(calib).calibrate(test)
    for output, p in (("none", test), ("temperature", after)):
        yield from rows_of(name, output, Scores.of(p).numbers(none, temperature))
