"""Calibrators with a formula: vector, matrix and Dirichlet scaling of logits, Platt and beta scaling of odds, and for
samples with several labels a scale and a shift of each label's odds.

The first three are fitted in temperature-scaled logits, so the scale of the logits does not matter, and are pulled
towards temperature scaling. The pull is that of a Gaussian prior: it fades as samples come in, and rises with the
classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, one_hot

from doublehead.calibration_head import keep_top
from doublehead.calibrators.base import Calibrator, log_odds
from doublehead.calibrators.choose import Choice, Scores, choose
from doublehead.calibrators.head import Head
from doublehead.calibrators.optimise import fit_logistic, minimise
from doublehead.calibrators.temperature import Identity, Temperature, fit_inverse_temperature
from doublehead.predictions import Predictions
from doublehead.score_arrays import Target

if TYPE_CHECKING:
    from typing_extensions import Self

SHARED = {"head": Head, "temperature": Temperature, "none": Identity}
RIDGE = 10.0  # samples: each label's map is pulled towards no change with the weight of this many
MARGIN = 2.0  # standard errors by which maps of their own must be better than sharing
FOLDS = 5
PULL = 1e-6  # of beta scaling, in units of features of mean square 1
TINY = 1e-100  # a mean square


class Vector(Calibrator):
    """A scale and a shift for every class. Use it when classes err differently and each has a hundred samples or more.

    `prior` is the standard deviation of the scales about the temperature's and of the shifts about 0; infinity gives
    the plain form of Guo et al. (2017).

    >>> p = Predictions([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]], [0, 0, 0, 1])
    >>> Vector().fit(p).weight_.shape
    torch.Size([2])
    """

    learned = ("weight_", "bias_")

    weight_: Tensor  # (K,)
    bias_: Tensor  # (K,)

    def __init__(self, prior: float = 0.2) -> None:
        super().__init__()
        self.prior = prior

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        if not self.prior > 0:
            raise ValueError(f"prior must be above 0, got {self.prior}")
        scale = fit_inverse_temperature(predictions.logits, predictions.labels)
        x = self._inputs(predictions.logits.double()) * scale
        pull, pull_bias, center = self._pulls(x)
        top, moved = x - x.amax(1, keepdim=True), x - center  # rows of large logits keep their digits
        # In units in which the curvature is about 1: weights that are not pulled are found for tiny inputs too, such as
        # those of a network worse than chance, whose temperature is infinite.
        unit = (moved.square().mean(0) + 2 * pull).clamp(min=TINY).rsqrt()
        unit_bias = (1 + 2 * pull_bias) ** -0.5

        def loss(change: Tensor, bias: Tensor) -> Tensor:
            change, bias = change * unit, bias * unit_bias
            drift = (pull * change.square()).sum() + pull_bias * bias.square().sum()
            return cross_entropy(top + self._times(moved, change) + bias, predictions.labels) + drift

        found = minimise(loss, [torch.zeros_like(pull), torch.zeros_like(x[0])])
        change, bias = (value * u for value, u in zip(found.values, (unit, unit_bias)))
        same = torch.ones_like(bias).diag() if change.ndim == 2 else 1
        bias = bias - self._times(center, change)
        return {"weight_": (same + change) * scale, "bias_": bias, **found.verdict()}

    def _pulls(self, x: Tensor) -> tuple[Tensor, float, Tensor]:
        """The ridges of the weights' changes and of the shifts, and the point that changed weights leave in place."""
        pull = 0.5 / (self.prior**2 * len(x))
        return torch.full_like(x[0], pull), pull, torch.zeros_like(x[0])

    def _transform(self, logits: Tensor) -> Tensor:
        return self._times(self._inputs(logits), self.weight_.to(logits.dtype)) + self.bias_.to(logits.dtype)

    def _times(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    def _inputs(self, logits: Tensor) -> Tensor:
        return logits

    def _n_classes(self) -> int:
        return self.bias_.shape[0]


class Matrix(Vector):
    """A full linear map of the logits. Use it with few classes and thousands of samples: K * K numbers are learned.

    `prior` is the standard deviation of the diagonal about the temperature's scale and of the shifts about 0; that of
    the K - 1 other weights of a row is prior / sqrt(K). `odir=(l, m)` asks for the penalty of Kull et al. (2019)
    instead, on the weights of tempered logits: l times the mean square of those off the diagonal plus m times that of
    the shifts, the diagonal free.
    """

    weight_: Tensor  # (K, K)

    def __init__(self, prior: float = 0.2, odir: tuple[float, float] | None = None) -> None:
        super().__init__(prior)
        self.odir = odir

    def _pulls(self, x: Tensor) -> tuple[Tensor, float, Tensor]:
        n, k = x.shape
        eye = torch.ones_like(x[0]).diag()
        if self.odir is not None:
            off_diagonal, intercept = self.odir
            return (1 - eye) * off_diagonal / (k * (k - 1)), intercept / k, torch.zeros_like(x[0])
        pull = 0.5 / (self.prior**2 * n)
        return pull * (eye + k * (1 - eye)), pull, x.mean(0)

    def _times(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def _inputs(self, logits: Tensor) -> Tensor:
        return _least_for_excluded(logits)


class Dirichlet(Matrix):
    """Matrix scaling of log probabilities (Kull et al. 2019). Use it like Matrix, when only probabilities are known."""

    def _inputs(self, logits: Tensor) -> Tensor:
        return _least_for_excluded(logits.log_softmax(-1))


def _least_for_excluded(logits: Tensor) -> Tensor:
    """Logits (..., K) where classes at -inf count, in the sums of the others, as the least likely one that is left."""
    excluded = logits == -torch.inf
    return torch.where(excluded, logits.masked_fill(excluded, torch.inf).amin(-1, keepdim=True), logits)


class Platt(Calibrator):
    """A line through the log odds of class 1. Use it for binary models, above all scores that are not probabilities.

    The labels count as (n1 + 1) / (n1 + 2) and 1 / (n0 + 2), as in Platt (1999), so that few or separable data give
    finite answers.

    >>> p = Predictions.from_binary([-2.0, -1.0, 1.0, 2.0], [0, 1, 0, 1])
    >>> Platt().fit(p).slope_.shape
    torch.Size([])
    """

    learned = ("slope_", "shift_")
    binary_only = True

    slope_: Tensor
    shift_: Tensor

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        odds, is_one = _binary_odds(predictions.logits).double(), predictions.labels > 0
        ones = is_one.sum().double()
        targets = torch.where(is_one, (ones + 1) / (ones + 2), 1 / (len(odds) - ones + 2))
        features = torch.stack([odds, torch.ones_like(odds)], 1)
        weights, _, converged = fit_logistic(features, targets, towards=odds.new_tensor([1, 0]), ridge=1e-9)
        return {"slope_": weights[0], "shift_": weights[1], "converged_": converged}

    def _transform(self, logits: Tensor) -> Tensor:
        return _pair(_binary_odds(logits) * self.slope_.to(logits.dtype) + self.shift_.to(logits.dtype))


def _binary_odds(logits: Tensor) -> Tensor:
    """(..., 2) -> (...): the log odds of class 1."""
    return logits[..., 1] - logits[..., 0]


def _pair(odds: Tensor) -> Tensor:
    """(...) -> (..., 2): logits with these log odds of class 1."""
    return torch.stack([torch.zeros_like(odds), odds], -1)


class Beta(Calibrator):
    """A curved map of each probability (Kull et al. 2017). Use it where Platt's straight line fits badly.

    log odds = a log p - b log(1 - p) + c with a, b >= 0, a tiny pull towards a = b = 1, c = 0 keeping them finite.
    Two classes share one map of class 1; more classes get one each, normalised to sum to 1.

    >>> p = Predictions.from_binary([0.1, 0.2, 0.7, 0.9], [0, 1, 0, 1], are_probs=True)
    >>> Beta().fit(p).weights_.shape
    torch.Size([1, 3])
    """

    learned = ("weights_",)

    weights_: Tensor  # (1 or K, 3): a, b, c

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        odds = log_odds(predictions.logits.double()).T  # (K, N)
        targets = one_hot(predictions.labels, predictions.n_classes).T
        if predictions.n_classes == 2:
            odds, targets = odds[1:], targets[1:]
        weights, converged = zip(*map(_fit_beta, odds, targets))
        facts = f"{converged.count(False)} of {len(converged)} class maps did not reach their optimum"
        return {"weights_": torch.stack(weights), "converged_": all(converged), "facts": facts}

    def _transform(self, logits: Tensor) -> Tensor:
        weights = self.weights_.to(logits.dtype)
        if len(weights) == 1:
            return _pair(_features(_binary_odds(logits)) @ weights[0])
        moved = (_features(log_odds(logits)) * weights).sum(-1)
        return logsigmoid(moved).log_softmax(-1)

    def _n_classes(self) -> int:
        return max(2, len(self.weights_))


def _features(odds: Tensor) -> Tensor:
    """(...) -> (..., 3): log p, -log(1 - p), 1."""
    odds = odds.clamp(min=torch.finfo(odds.dtype).min)  # times a weight of 0, -inf would be nan
    return torch.stack([logsigmoid(odds), -logsigmoid(-odds), torch.ones_like(odds)], -1)


def _fit_beta(odds: Tensor, targets: Tensor) -> tuple[Tensor, bool]:
    """a, b, c (3,) for odds and targets (N,), and whether the fit converged.

    The problem is convex: its optimum is the free fit where that has no negative weight, else the best of the fits
    with a, b or both held at 0.
    """
    features, towards = _features(odds), odds.new_tensor([1.0, 1.0, 0.0])
    fits = []
    for free in ([1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0]):
        mask = features.new_tensor(free)
        weights, loss, converged = fit_logistic(features * mask, targets, towards=towards, ridge=PULL)
        weights = weights * mask
        # what the pull towards 1 costs where a weight is held at 0
        loss += PULL / 2 * float(((1 - mask) * towards.square() * features.square().mean(0)).sum())
        if bool((weights[:2] >= 0).all()):
            fits.append((loss, weights, converged))
            if min(free) > 0:
                break
    return min(fits, key=lambda fit: fit[0])[1:]


class PerLabel(Calibrator):
    """One calibrator for the yes or no of all labels, then for each label a scale and a shift of its log-odds.

    `share` is fitted to all pairs of a sample and a label together ("head", "temperature" or "none"). The maps of the
    labels are pulled towards no change, so a label with few samples shares what the others learned; with "temperature"
    they have no shift, and are temperatures of their own. They are used where that is better on held-back samples;
    `choice` says by how much. With predictions of one label, or of classes, it is the shared calibrator alone.

    >>> z = torch.randn(500, 3)
    >>> p = Predictions.multilabel(4 * z, (torch.rand(500, 3) < z.sigmoid()).long())
    >>> PerLabel("temperature").fit(p).calibrate(p).n_labels
    3
    """

    learned = ("scale_", "shift_")
    takes_weights = True

    scale_: Tensor  # (L,)
    shift_: Tensor  # (L,)

    choice: Choice | None = None

    def __init__(
        self,
        share: Literal["head", "temperature", "none"] = "head",
        keep: Literal["predictions", "best"] = "predictions",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if share not in SHARED:
            raise ValueError(f"share must be one of {sorted(SHARED)} for several labels, got {share!r}")
        self.share, self.keep, self.seed = share, keep, seed
        self.shared: Calibrator = SHARED[share](**({"keep": keep, "seed": seed} if share == "head" else {}))

    def fit(self, predictions: Predictions, *, opinion: Tensor | None = None) -> Self:
        """Learn from predictions the network was not trained on.

        `opinion` (N L, 2) is what heads trained beside the network say of them, as for `Head`.
        """
        return self._fit(predictions, opinion=opinion)

    def _learn(self, predictions: Predictions, opinion: Tensor | None = None) -> dict[str, Any]:
        known = {"opinion": opinion} if self.share == "head" else {}
        self.choice = getattr(self.shared.fit(predictions, **known), "choice", None)
        n_labels = predictions.n_labels or 1
        scale, shift = predictions.logits.new_tensor([[1.0], [0.0]]).double().expand(2, n_labels)
        if predictions.n_labels:
            odds = _binary_odds(self.shared(predictions.logits, **known)).double().reshape(-1, n_labels)
            truth, weights = _truth(predictions.target, n_labels)
            if self._pays(predictions, odds, truth, weights):
                scale, shift = _fit_maps(odds, truth, weights, self.share != "temperature")
        return {"scale_": scale, "shift_": shift}

    def _pays(self, p: Predictions, odds: Tensor, truth: Tensor, weights: Tensor) -> bool:
        """Whether maps of their own lower the NLL of samples held back from them."""
        n = len(odds)
        if n < 2 * FOLDS:
            return False
        fold = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed)).to(odds.device) % FOLDS
        mapped = torch.empty_like(odds)
        for i in range(FOLDS):
            held = fold == i
            scale, shift = _fit_maps(odds[~held], truth[~held], weights[~held], self.share != "temperature")
            mapped[held] = odds[held] * scale + shift
        if self.keep == "predictions":
            mapped = _binary_odds(keep_top(_pair(mapped), p.logits.reshape(n, -1, 2)))
        nlls = {
            name: (torch.nn.functional.softplus(z) - truth * z).mul(weights).mean(1)  # (N,) of each sample
            for name, z in (("shared", odds), ("own", mapped))
        }
        choice = choose(nlls, ["shared"], MARGIN)
        # Those of a shared head are held back; a temperature of all pairs is nearly so.
        scores = dict(self.choice.scores) if self.choice is not None else {"none": Scores.of(p)}
        outputs = {"temperature": odds} if self.share == "temperature" else {}
        outputs |= {"own": mapped} if choice.chosen == "own" else {}
        scores |= {name: Scores.of(p.with_logits(_pair(z).flatten(0, 1))) for name, z in outputs.items()}
        self.choice = replace(choice, scores=scores)
        return choice.chosen == "own"

    def forward(
        self,
        logits: Tensor,
        features: Tensor | None = None,
        *,
        opinion: Tensor | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Calibrated logits (N L, 2); `opinion` is needed where it was fitted with one."""
        self._check_use(logits)
        shared: Tensor = self.shared(logits, opinion=opinion)
        if len(self.scale_) == 1:
            return shared
        rows = shared.reshape(-1, len(self.scale_), 2)
        odds = _binary_odds(rows) * self.scale_.to(rows.dtype) + self.shift_.to(rows.dtype)
        mapped = _pair(odds).reshape(logits.shape)
        return keep_top(mapped, logits) if self.keep == "predictions" else mapped

    @property
    def keeps_argmax(self) -> bool:
        """Whether the predicted labels never change."""
        return self.keep == "predictions"

    def _n_classes(self) -> int | None:
        return self.shared._n_classes() if len(self.scale_) == 1 else 2

    def in_words(self) -> str:
        """The shared calibration, and the range of the labels' own scales."""
        if not self.is_fitted:
            return ""
        low, high = float(self.scale_.min()), float(self.scale_.max())
        own = f", scales of the labels {low:.3g} to {high:.3g}" if low != high else ""
        return f"shared {self.shared.in_words() or self.share}{own}"


def _truth(target: Target, n_labels: int) -> tuple[Tensor, Tensor]:
    """(N, L) each: the probability of a yes and the weight."""
    yes = target.labels.double() if target.probs is None else target.probs[:, 1].double()
    weights = torch.ones_like(yes) if target.weights is None else target.weights.double()
    return yes.reshape(-1, n_labels), weights.reshape(-1, n_labels)


def _fit_maps(odds: Tensor, truth: Tensor, weights: Tensor, shifts: bool) -> tuple[Tensor, Tensor]:
    """(L,) scale a and shift b of each label: a z + b of the lowest NLL, pulled towards z.

    A label on which the network is worse than chance keeps its z: a scale below 0 would reverse its predictions.
    """
    found = odds.new_tensor([[1.0, 0.0]] * odds.shape[1]).double()  # (L, 2)
    for label, (z, y, weight) in enumerate(zip(odds.double().T, truth.T, weights.T)):
        x = torch.stack([z, torch.ones_like(z)][: 1 + shifts], -1)  # (N, 1 or 2)
        known = weight * z.sigmoid() * (1 - z.sigmoid())
        ridge = (RIDGE * (known[:, None] * x.square()).mean(0) + 1e-6) / len(z)
        towards = found[label, : 1 + shifts].clone()
        own = fit_logistic(x, y, towards=towards, ridge=ridge, weights=weight)[0]
        if own[0] > 0:
            found[label, : 1 + shifts] = own
    return found[:, 0], found[:, 1]
