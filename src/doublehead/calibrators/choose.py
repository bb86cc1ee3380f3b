"""The one rule by which anything is chosen: negative log-likelihoods of samples held back from every candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from doublehead import metrics
from doublehead.predictions import Predictions
from doublehead.score_arrays import ArrayLike, as_tensor

MARGIN = 2.5  # standard errors by which a candidate must beat the best baseline; of a dozen some win by 2 by chance


class Scores(NamedTuple):
    """The numbers of some predictions that are shown side by side before and after calibration."""

    nll: float
    ece: float
    ece_floor: float  # mean ECE of a perfectly calibrated model with the same confidences
    accuracy: float

    @classmethod
    def of(cls, p: Predictions) -> Scores:
        """Of predictions in memory."""
        return cls(metrics.nll(p), float(metrics.ece(p)), metrics.ece_floor(p).mean, metrics.accuracy(p))


def score_table(rows: Mapping[str, Scores]) -> str:
    """One line for each of the named scores.

    >>> print(score_table({"none": Scores(0.5, 0.041, 0.008, 0.84)}))
             NLL     ECE   floor  accuracy
    none  0.5000   4.10%   0.80%    84.00%
    """
    width = max(map(len, rows))
    lines = [f"{'':{width}}  {'NLL':>6}  {'ECE':>6}  {'floor':>6}  accuracy"]
    for name, (nll, ece, floor, accuracy) in rows.items():
        lines.append(f"{name:{width}}  {nll:6.4f}  {ece:6.2%}  {floor:6.2%}  {accuracy:8.2%}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and the held-back NLL of every candidate.

    `print(choice)` also shows `scores` where they were computed: of no calibration, of a temperature and of what was
    chosen, on the same held-back samples.

    `gain` is how much lower the chosen NLL is than that of `baseline`, the best of the baselines, and `gain_error`
    the standard error of that difference, sample by sample.
    """

    chosen: str
    baseline: str
    nlls: dict[str, float]  # best first; nan for what could not be fitted
    gain: float
    gain_error: float
    n: int
    notes: dict[str, str]  # by candidate: what went wrong, or why it is not used
    scores: dict[str, Scores] = field(default_factory=dict)

    @property
    def nll(self) -> float:
        """The held-back NLL of what was chosen."""
        return self.nlls[self.chosen]

    def __str__(self) -> str:
        text = f"{self.chosen}: held-back NLL {self.nll:.4f} on {self.n:,} samples"
        if self.chosen != self.baseline:
            # With a negative margin a candidate may be a little worse.
            side = "above" if self.gain < 0 else "below"
            text += f", {abs(self.gain):.4f} {side} {self.baseline} (standard error {self.gain_error:.4f})"
        parts = [text, score_table(self.scores)] if self.scores else [text]
        return "\n".join(
            [*parts, *(f"{name}: {self.notes[name]}" for name in self.scores if name in self.notes)]
        )


def choose(
    nlls: Mapping[str, ArrayLike | None],
    baseline: Sequence[str] = ("none", "temperature"),
    margin: float = MARGIN,
    notes: Mapping[str, str] | None = None,
) -> Choice:
    """Choose by the per-sample NLLs (N,) of candidates on data held back from them.

    A candidate is accepted if it beats the best of the baselines by more than `margin` standard errors of the paired
    difference. Of the accepted the one with the lowest mean is chosen, of equal ones the first, so list the simplest
    first; where none is accepted, that baseline. Without baselines the lowest mean is chosen. None marks a candidate
    that could not be fitted.

    Each candidate is tested on its own: one that is better on average but too noisy to be accepted does not stand in
    the way of another that clearly wins.

    >>> nlls = {"none": torch.tensor([1.0, 1.1, 0.9]), "temperature": torch.tensor([0.8, 0.9, 0.6])}
    >>> choose(nlls, baseline=["none"]).chosen
    'temperature'
    """
    fitted = {name: as_tensor(values, "nlls").double() for name, values in nlls.items() if values is not None}
    shapes = {name: tuple(values.shape) for name, values in fitted.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 or not shape[0] for shape in shapes.values()):
        raise ValueError(f"nlls must hold one number for each of the same samples, got shapes {shapes}")
    if baseline and not set(baseline) & set(nlls):
        raise ValueError(f"nlls must have one of the baselines {list(baseline)}, got {list(nlls)}")
    able = {name: values for name, values in fitted.items() if bool(torch.isfinite(values).all())}
    known = [name for name in baseline if name in able]
    if not able or (baseline and not known):
        reasons = "; ".join(f"{name}: {note}" for name, note in (notes or {}).items())
        raise ValueError(f"none of the candidates could be fitted: {reasons or ', '.join(nlls)}")
    means = {name: float(values.mean()) for name, values in able.items()}
    base = min(known or able, key=means.__getitem__)
    gains = {name: mean_and_error(able[base] - values) for name, values in able.items()}
    others = [name for name in able if known and name not in known]
    accepted = [name for name in others if gains[name][0] > margin * gains[name][1]]
    chosen = min(accepted, key=means.__getitem__, default=base)
    ordered = sorted(nlls, key=lambda name: means.get(name, math.inf))
    every = {name: means.get(name, math.nan) for name in ordered}
    return Choice(chosen, base, every, *gains[chosen], len(able[base]), dict(notes or {}))


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean and its standard error, which is infinite for one value."""
    n = len(values)
    return float(values.mean()), float(values.std()) / math.sqrt(n) if n > 1 else math.inf


def stratified_folds(labels: Tensor, folds: int, seed: int) -> Tensor:
    """(N,) the fold of each sample, at random; folds differ by one sample at most, in all and in each class.

    If folds ignored the classes, holding back a sample would make its class rarer in the data that is fitted to,
    and that would reveal the held-back label.

    >>> stratified_folds(torch.tensor([0, 1, 0, 1]), 2, seed=0).reshape(2, 2).sum(0).tolist()
    [1, 1]
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    order = shuffled[labels[shuffled].argsort(stable=True)]
    places = torch.arange(len(labels), device=labels.device) % folds
    return torch.empty_like(places).scatter(0, order, places)
