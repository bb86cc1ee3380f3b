"""The staged head: small corrections of different kinds, one after the other, each kept where it pays.

1. temperature: one number for all samples.
2. map: class by class, z + (D + M) z + b, pulled towards no change (Berta et al. 2025). For few classes.
3. head: a temperature for each sample, linear in statistics of its logits and, for a network, of its features.
4. pool: a weighted sum with other opinions about the same sample. For a network these are distances of its features
   to the class means (with few samples per class, its last layer's answer to features whose large values are damped),
   and the answers of heads that were trained beside it.
5. curve: a function of the log-probability, the same for all classes.

Every stage is fitted to outputs of the stages before it on samples that those were not fitted to, and stages are
chosen by their NLL on held-back samples. With too little data nothing but the temperature is left, and it falls below 1
only where that clearly pays.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from doublehead.calibration_head import MAX_LOG_SCALE, MIN_LOGIT, feature_numbers, scale_logits, statistics
from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.choose import Choice, Scores, choose, stratified_folds
from doublehead.calibrators.maps import keep_top
from doublehead.predictions import Predictions, Target
from doublehead.torch_tools import one_thread, seeded

if TYPE_CHECKING:
    from typing_extensions import Self

MARGIN = 2.0  # standard errors by which further stages must beat the temperature
MIN_SAMPLES = 200  # below, only a temperature is fitted
MIN_WRONG = 30  # so it is with fewer wrong predictions than this: they cannot teach when to doubt
WARN_SAMPLES = 100  # below, a warning says that this is little data
MAX_SAMPLES = 20_000  # more do not help a head of a few dozen weights
MAX_ENTRIES = 25_000_000  # of logits that are fitted to
PER_CLASS = 20  # samples per class from which maps of the classes and distances to their means are tried
# Ridges, in samples: a weight is pulled towards no change as if so many samples said so.
RIDGE_HEAD, RIDGE_POOL, RIDGE_CURVE = 30.0, 1.0, 30.0
# Few samples hold few errors, so a fit to them tends to sharpen: a temperature below 1 is pulled towards 1 and must
# gain this much log-likelihood in all. One above 1 is hardly pulled at all.
RIDGE_SOFTEN, RIDGE_SHARPEN, GAIN_SHARPEN = 0.01, 10.0, 2.0
MAP_FLOOR = -20.0  # log-probability: trees that say "never" must not outweigh all else
LIMIT = 3.0  # deviations to which the head's inputs are clipped
KNOTS = (-9.0, -6.5, -4.5, -3.0, -2.0, -1.2, -0.6, -0.2, -0.05)  # of the curve, in log-probability
RANK = 64  # directions of the features in which distances are measured
CHUNK = 250_000  # entries handled at once, so that they stay in the cache
MAX_BENT = 1_000_000  # entries that the curve is fitted to
TOLERANCE = 2e-8  # of the mean NLL: Newton's method stops where a step promises no more

STAGES = ("map", "head", "pool", "curve")  # after the temperature

Params = dict[str, Tensor]
Opinion = Tensor | Sequence[Tensor] | None  # one (N, K), or several


class Evidence(NamedTuple):
    """What stages may read of N samples besides their logits: numbers (N, S) and other opinions, (N, K) each."""

    numbers: Tensor
    opinions: tuple[Tensor, ...] = ()


class Head(Calibrator):
    """The staged head. The default for networks and files; never changes a prediction unless asked to.

    `fit(predictions)` learns from logits alone. `fit(predictions, features=...)` also reads the features (N, F)
    that went into the network's last layer, whose weight (K, F) is `last_layer`. `opinion` is what heads trained
    beside the network say of the same samples, each sample by a head that never saw it. What was chosen, and why, is
    in `choice`.

    `keep="predictions"` never overrules the network's class. `keep="best"` lets stages change it if that does not
    lower the accuracy on held-back samples.

    >>> logits = 3 * torch.randn(500, 4)
    >>> head = Head().fit(Predictions(logits, logits.softmax(1).multinomial(1)[:, 0]))
    >>> torch.equal(head(logits).argmax(1), logits.argmax(1))
    True
    """

    learned = (
        "stages_", "temperature_", "weight_", "bias_", "center_", "mean_", "deviation_", "slope_", "pool_", "curve_",
        "feature_mean_", "class_means_", "projection_", "projected_means_", "spreads_", "last_layer_", "usual_",
    )  # fmt: skip

    takes_weights = True

    stages_: Tensor  # (6,) bool: temperature, map, head, pool, curve, keep predictions
    temperature_: Tensor
    weight_: Tensor  # (K, K) or (K,): D + M, or D alone
    bias_: Tensor  # (K,)
    center_: Tensor  # (K,)
    mean_: Tensor  # (S,) of the head's inputs
    deviation_: Tensor  # (S,)
    slope_: Tensor  # (S + 1,) with the intercept last
    pool_: Tensor  # (1 + opinions,)
    curve_: Tensor  # (knots,)
    feature_mean_: Tensor  # (F,), empty without features, as are the next four
    class_means_: Tensor  # (K, F) of centred features of length 1
    projection_: Tensor  # (F, R) into directions in which classes have unit spread
    projected_means_: Tensor  # (K, R)
    spreads_: Tensor  # (2,) usual squared distances to the own class's mean
    last_layer_: Tensor  # (K, F), or empty
    usual_: Tensor  # twice the mean size of a feature

    choice: Choice | None = None
    allowed: Sequence[str] = STAGES  # others are not tried

    def __init__(
        self, keep: Literal["predictions", "best"] = "predictions", folds: int = 5, seed: int = 0
    ) -> None:
        super().__init__()
        self.keep, self.folds, self.seed = keep, folds, seed
        self._fitting: tuple[Tensor | None, Opinion, Tensor | None, Tensor | None, Tensor | None] = (
            None,
        ) * 5
        self._open: tuple[bool, ...] = ()

    def fit(
        self,
        predictions: Predictions,
        *,
        features: Tensor | None = None,
        opinion: Opinion = None,
        numbers: Tensor | None = None,
        last_layer: Tensor | None = None,
        folds: Tensor | None = None,
    ) -> Self:
        """Learn from predictions the network was not trained on, and what else is known of the same samples.

        Samples of one number in `folds` (N,) are held back together; by default folds are drawn at random.
        """
        self._fitting = features, opinion, numbers, last_layer, folds
        try:
            super().fit(predictions)
        finally:
            self._fitting = (None,) * 5
        self.refresh()
        return self

    def refresh(self) -> None:
        """Note on the host which stages are in use, after the buffers were set."""
        self._open = tuple(bool(flag) for flag in self.stages_) if self.is_fitted else ()

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        if self.keep not in ("predictions", "best"):
            raise ValueError(f"keep must be 'predictions' or 'best', got {self.keep!r}")
        if self.folds < 2:
            raise ValueError(f"folds must be at least 2, got {self.folds}")
        with one_thread(), torch.autocast(predictions.logits.device.type, enabled=False):
            return _Fit(self, predictions, *self._fitting).learned()

    def forward(
        self,
        logits: Tensor,
        features: Tensor | None = None,
        *,
        opinion: Opinion = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Calibrated logits (..., K); `features`, `opinion` and `numbers` are needed where it was fitted with
        them."""
        self._check_use(logits)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        wide = wide.clamp(min=MIN_LOGIT)
        evidence = self._evidence(wide, features, opinion, numbers)
        params = {name: getattr(self, name) for name in self.learned}
        z = wide
        for name, is_open in zip(("temperature", *STAGES), self._open):
            if is_open:
                z = _apply(name, params, _reads(name, z, evidence))
        return keep_top(z, wide) if self._open[-1] else z

    def _evidence(
        self, logits: Tensor, features: Tensor | None, opinion: Opinion, numbers: Tensor | None
    ) -> Evidence:
        n_numbers, n_opinions = _sizes(self)
        more = [] if numbers is None else [numbers.to(logits.dtype)]
        opinions: list[Tensor] = []
        if self.feature_mean_.numel():
            if features is None:
                raise ValueError("features must be given: this head was fitted with them")
            features = features.to(logits.dtype)
            more.insert(0, feature_numbers(features).to(logits.dtype))
            if self._open[3]:
                opinions += self._of_features(features)
        opinions += [part.to(logits.dtype) for part in _several(opinion)]
        if self._open[3] and len(opinions) != n_opinions:
            raise ValueError("opinion must be given exactly where this head was fitted with one")
        joined = torch.cat(more, -1) if more else logits.new_empty(*logits.shape[:-1], 0)
        if joined.shape[-1] != n_numbers:
            raise ValueError(f"numbers must be as many as fitted with, {n_numbers}, got {joined.shape[-1]}")
        return Evidence(joined, tuple(opinions))

    def _of_features(self, features: Tensor) -> list[Tensor]:
        opinions = []
        if self.class_means_.numel():
            opinions += class_distances(features, {name: getattr(self, name) for name in MEANS})
        if self.last_layer_.numel():
            opinions.append(damped_answer(features, self.last_layer_, self.usual_))
        return opinions

    @property
    def keeps_argmax(self) -> bool:
        """Whether predictions are kept; only known once fitted where `keep` is 'best'."""
        return bool(self.stages_[-1]) if self.is_fitted else self.keep == "predictions"

    def in_words(self) -> str:
        """The stages in use."""
        if not self.is_fitted:
            return ""
        names = [name for name, used in zip(("temperature", *STAGES), self._open) if used]
        return (
            " + ".join(names).replace("temperature", f"temperature {float(self.temperature_):.4g}") or "none"
        )

    def _n_classes(self) -> int | None:
        return self.bias_.shape[0]

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._open = () if self.stages_ is None else tuple(args[0][args[1] + "stages_"].bool().tolist())


MEANS = ("feature_mean_", "class_means_", "projection_", "projected_means_", "spreads_")


def _several(opinion: Opinion) -> list[Tensor]:
    return [] if opinion is None else [opinion] if isinstance(opinion, Tensor) else list(opinion)


def _sizes(head: Head) -> tuple[int, int]:
    """How many numbers and opinions a fitted head reads."""
    k = head.bias_.shape[0]
    return len(head.mean_) - statistics(torch.zeros(1, k)).shape[-1], len(head.pool_) - 1


def _reads(name: str, z: Tensor, evidence: Evidence) -> tuple[Tensor, ...]:
    """What one stage reads of logits (..., K) and evidence."""
    if name == "temperature":
        return (z,)
    if name == "head":
        return z, torch.cat([statistics(z), evidence.numbers.to(z.dtype)], -1)
    opinions = evidence.opinions if name == "pool" else ()
    return tuple(part.log_softmax(-1) for part in (z, *opinions))


def _apply(name: str, params: Mapping[str, Tensor], reads: Sequence[Tensor]) -> Tensor:
    """One stage: logits (..., K)."""
    z = reads[0]
    p = {key: value.to(z.dtype) if value.is_floating_point() else value for key, value in params.items()}
    if name == "temperature":
        return z / p["temperature_"]
    if name == "map":
        off = z.clamp(min=MAP_FLOOR) - p["center_"]
        return z + (off @ p["weight_"].mT if p["weight_"].ndim == 2 else off * p["weight_"]) + p["bias_"]
    if name == "head":
        return scale_logits(z, _linear(reads[1], p))
    if name == "pool":
        return torch.stack(list(reads), -1) @ p["pool_"]
    return z + _hinges(z) @ p["curve_"]


def _linear(inputs: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    standard = ((inputs - p["mean_"]) / p["deviation_"]).clamp(-LIMIT, LIMIT)
    return standard @ p["slope_"][:-1, None] + p["slope_"][-1]  # (..., 1)


def _hinges(log_probs: Tensor) -> Tensor:
    knots = torch.tensor(KNOTS, dtype=log_probs.dtype, device=log_probs.device)
    return (log_probs[..., None] - knots).clamp(min=0)  # (..., K, knots)


class _Fit:
    """One fit: cross-fitted outputs of every sequence of stages that is tried, the choice, and its parameters."""

    def __init__(
        self,
        head: Head,
        predictions: Predictions,
        features: Tensor | None,
        opinion: Opinion,
        numbers: Tensor | None,
        last_layer: Tensor | None,
        folds: Tensor | None,
    ) -> None:
        n, k = predictions.logits.shape
        order = torch.randperm(n, generator=torch.Generator().manual_seed(head.seed))
        order = order[: min(MAX_SAMPLES, max(1, MAX_ENTRIES // k))].to(predictions.logits.device)
        self.head, self.target = head, predictions.target.rows(order)
        self.labels = self.target.labels
        self.logits = predictions.logits[order].float().clamp(min=MIN_LOGIT)
        self.n, self.k = self.logits.shape
        self.folds = stratified_folds(self.labels, min(head.folds, self.n), head.seed)
        if folds is not None and len(folds[order].unique()) > 1:
            self.folds = folds[order]
        parts = [] if features is None else [feature_numbers(features[order].float())]
        parts += [] if numbers is None else [numbers[order].float()]
        given = torch.cat(parts, 1) if parts else self.logits.new_empty(self.n, 0)
        self.means, opinions = self._class_means(features, order)
        self.means |= dict.fromkeys(("last_layer_", "usual_"), self.logits.new_empty(0))
        if features is not None and last_layer is not None and not opinions and self.n >= MIN_SAMPLES:
            layer, usual = last_layer.detach().float(), 2 * features[order].float().abs().mean()
            self.means |= {"last_layer_": layer - layer.mean(0), "usual_": usual}
            opinions.append(damped_answer(features[order].float(), self.means["last_layer_"], usual))
        opinions += [part[order].float() for part in _several(opinion)]
        self.evidence = Evidence(given, tuple(opinions))
        self.found: dict[
            tuple[str, ...], tuple[Tensor, Params]
        ] = {}  # by sequence: cross-fitted outputs, parameters

    def _class_means(self, features: Tensor | None, order: Tensor) -> tuple[Params, list[Tensor]]:
        """The class means of all samples, and the distances of each sample to means that it is no part of."""
        none = self.logits.new_empty(0)
        if features is None or self.n < max(MIN_SAMPLES, PER_CLASS * self.k):
            shaped = none if features is None else self.logits.new_zeros(features.shape[1])
            return dict.fromkeys(MEANS, none) | {"feature_mean_": shaped}, []
        features = features[order].float()
        out: list[Tensor] = [torch.empty_like(self.logits) for _ in range(2)]
        for fold in self.folds.unique():
            held = self.folds == fold
            means = fit_class_means(features[~held], self.labels[~held], self.k, self.head.seed)
            for made, part in zip(out, class_distances(features[held], means)):
                made[held] = part
        return fit_class_means(features, self.labels, self.k, self.head.seed), out

    def learned(self) -> dict[str, Any]:
        """What the head learns."""
        wrong = int((self.logits.argmax(1) != self.labels).sum())  # by the likeliest class of soft labels
        if self.n < WARN_SAMPLES:
            warnings.warn(
                f"{self.n} calibration samples are little data: only a temperature is fitted, rarely below 1",
                UserWarning,
                stacklevel=5,
            )
        self.found[()] = self.logits, {}
        base = ("temperature",)
        self._try(base)
        tells = self.n >= MIN_SAMPLES and wrong >= MIN_WRONG
        sequences: list[tuple[str, ...]] = [base]
        sequences += [(*base, *more) for more in self._sequences()] if tells else []
        for sequence in sequences:
            self._try(sequence)
        nlls = {self._name(sequence): self._nll(sequence) for sequence in sequences}
        if tells and "curve" in self.head.allowed:
            best = min(sequences, key=lambda sequence: float(nlls[self._name(sequence)].mean()))
            if self._try((*best, "curve")):
                sequences.append((*best, "curve"))
                nlls[self._name(sequences[-1])] = self._nll(sequences[-1])
        choice = choose(nlls, ["temperature"], MARGIN)
        chosen = next(sequence for sequence in sequences if self._name(sequence) == choice.chosen)
        # Not a candidate: the folds of a small sample favour it, and the temperature falls back to 1 by itself.
        every = {"none": float(self._nll(()).mean()), **choice.nlls}
        nlls_in_order = dict(sorted(every.items(), key=lambda item: item[1]))
        shown = dict.fromkeys(((), base, chosen))
        truth = self.labels if self.target.probs is None else self.target.probs
        scores = {
            self._name(some): Scores.of(Predictions(self._kept(some), truth, self.target.weights))
            for some in shown
        }
        self.head.choice = replace(choice, nlls=nlls_in_order, scores=scores)
        return self._parameters(chosen)

    def _sequences(self) -> list[tuple[str, ...]]:
        pool = [("pool",)] if self.evidence.opinions else []
        heads = [("head",), *(("head", *more) for more in pool)]
        maps = [("map", *more) for more in ((), *heads)] if self.n >= PER_CLASS * self.k else []
        return [stages for stages in (*heads, *maps) if set(stages) <= set(self.head.allowed)]

    @staticmethod
    def _name(sequence: tuple[str, ...]) -> str:
        return " + ".join(sequence) or "none"

    def _try(self, sequence: tuple[str, ...]) -> bool:
        """Fit the last stage of a sequence to cross-fitted outputs of those before it; False where it fails."""
        if sequence in self.found:
            return True
        for end in range(1, len(sequence)):
            self._try(sequence[:end])
        z, _ = self.found[sequence[:-1]]
        name = sequence[-1]
        reads = _reads(name, z, self.evidence)
        whole = _fit_stage(name, reads, self.target)
        out = torch.empty_like(z)
        for fold in self.folds.unique() if self.n > 1 else ():
            held = self.folds == fold
            params = _fit_stage(name, [part[~held] for part in reads], self.target.rows(~held), whole)
            out[held] = _apply(name, params, [part[held] for part in reads])
        self.found[sequence] = (out if self.n > 1 else z), whole
        return True

    def _nll(self, sequence: tuple[str, ...]) -> Tensor:
        """(N,) of cross-fitted outputs."""
        return _nlls(self._kept(sequence), self.target)

    def _kept(self, sequence: tuple[str, ...]) -> Tensor:
        """Cross-fitted outputs (N, K), with the network's predictions kept where they are."""
        z = self.found[sequence][0]
        return keep_top(z, self.logits) if self.head.keep == "predictions" else z

    def _parameters(self, chosen: tuple[str, ...]) -> Params:
        one, k = self.logits.new_ones(()), self.k
        size = statistics(self.logits[:1]).shape[1] + self.evidence.numbers.shape[1]
        zeros = self.logits.new_zeros
        full = _takes_matrix(self.n, k)
        params: Params = {
            "temperature_": one,
            "weight_": zeros(k, k) if full else zeros(k),
            "bias_": zeros(k),
            "center_": zeros(k),
            "mean_": zeros(size),
            "deviation_": zeros(size) + 1,
            "slope_": zeros(size + 1),
            "pool_": torch.cat([one[None], zeros(len(self.evidence.opinions))]),
            "curve_": zeros(len(KNOTS)),
            **self.means,
        }
        for end in range(1, len(chosen) + 1):
            params |= self.found[chosen[:end]][1]
        keep = self.head.keep == "predictions" or not self._as_accurate(chosen)
        used = [name in chosen for name in ("temperature", *STAGES)]
        params["stages_"] = torch.tensor([*used, keep], device=one.device)
        return params

    def _as_accurate(self, chosen: tuple[str, ...]) -> bool:
        before, after = (
            self.target.weighted((z.argmax(1) == self.labels).double()).sum()
            for z in (self.logits, self.found[chosen][0])
        )
        return bool(after >= before)


def _fit_stage(
    name: str, reads: Sequence[Tensor], target: Target, start: Mapping[str, Tensor] | None = None
) -> Params:
    """The parameters of one stage; `start` are those of a fit to more samples."""
    z, begin = reads[0], start or {}
    if name == "temperature":
        return {"temperature_": _careful_temperature(z, target, begin.get("temperature_"))}
    if name == "map":
        return _fit_map(z, target, start)
    if name == "head":
        inputs = reads[1]
        params = {"mean_": inputs.mean(0), "deviation_": inputs.std(0).clamp(min=1e-4)}
        standard = ((inputs - params["mean_"]) / params["deviation_"]).clamp(-LIMIT, LIMIT)
        design = torch.cat([standard, torch.ones_like(standard[:, :1])], 1)
        ridge = z.new_full((design.shape[1],), RIDGE_HEAD)
        ridge[-1] = 0
        return {**params, "slope_": fit_log_scale(z, target, design, ridge, begin.get("slope_"))}
    if name == "pool":
        return {"pool_": fit_pool(reads, target, begin.get("pool_"))}
    return {"curve_": fit_curve(z, target, begin.get("curve_"))}


def _careful_temperature(z: Tensor, target: Target, start: Tensor | None) -> Tensor:
    """One that sharpens only where this clearly pays."""
    ones = z.new_ones(len(z), 1)
    begin = None if start is None else -start.log()[None]
    log_scale = fit_log_scale(z, target, ones, z.new_full((1,), RIDGE_SOFTEN), begin)[0]
    guessing = target.weighted(z.new_full((len(z),), math.log(z.shape[1])).double()).sum()
    if not log_scale >= -MAX_LOG_SCALE or _nlls(z * log_scale.exp(), target).sum() > guessing:
        # Logits of thousands: the fit sees no slope there, so it begins at the best of some powers.
        coarse = min(range(-16, 1), key=lambda power: float(_nlls(z * math.exp(power), target).sum()))
        near = z * math.exp(coarse)
        log_scale = coarse + fit_log_scale(near, target, ones, z.new_full((1,), RIDGE_SOFTEN))[0]
    if log_scale > 0:
        log_scale = fit_log_scale(z, target, ones, z.new_full((1,), RIDGE_SHARPEN))[0]
        gain = (_nlls(z, target) - _nlls(z * log_scale.exp(), target)).sum()
        log_scale = log_scale * (gain > GAIN_SHARPEN)
    return (-log_scale).exp()


# --- the class map


def _takes_matrix(n: int, k: int) -> bool:
    """Whether there is enough data for a weight between every two classes."""
    return k * k <= n


def _fit_map(x: Tensor, target: Target, start: Mapping[str, Tensor] | None) -> Params:
    """D + M and b of z + (D + M) (z - mean) + b, with a ridge of K / n on D and b and of K (K - 1) / n on M."""
    n, k = x.shape
    known = x.clamp(min=MAP_FLOOR)
    center = known.mean(0)
    full = _takes_matrix(n, k) if start is None else start["weight_"].ndim == 2
    off, eye = known - center, torch.eye(k, dtype=x.dtype, device=x.device)
    ridge = (eye + (k - 1) * (1 - eye)) * (k / n) if full else x.new_full((k,), k / n)
    weight = (x.new_zeros(k, k) if full else x.new_zeros(k)) if start is None else start["weight_"]
    bias = x.new_zeros(k) if start is None else start["bias_"]
    # L-BFGS in units in which every weight has about the same curvature.
    probs = x.exp()
    spread = probs - probs.square()
    curvature = spread.mT @ off.square() if full else (spread * off.square()).sum(0)
    units = [(curvature / n + ridge).rsqrt(), (spread.mean(0) + k / n).rsqrt()]
    values = [weight / units[0], bias / units[1]]
    optimizer = torch.optim.LBFGS(
        values, max_iter=60 if start is None else 20, history_size=10, line_search_fn="strong_wolfe",
        tolerance_grad=1e-5, tolerance_change=1e-7,
    )  # fmt: skip

    size = max(1, CHUNK // k)

    def closure() -> Tensor:
        weight, bias = (value * unit for value, unit in zip(values, units))
        loss = 0.5 * (n * ridge * weight.square()).sum() + 0.5 * k * bias.square().sum()
        slopes = [n * ridge * weight, k * bias]
        for before, moved, truth in zip(x.split(size), off.split(size), target.split(size)):
            z = (moved @ weight.mT if full else moved * weight).add_(before).add_(bias)
            z -= z.amax(1, keepdim=True)
            at_label = truth.of(z)
            z.exp_()
            sums = z.sum(1, keepdim=True)
            loss += truth.weighted(sums[:, 0].log() - at_label).sum()
            error = truth.error(z.div_(sums))
            slopes[0] += error.mT @ moved if full else (error * moved).sum(0)
            slopes[1] += error.sum(0)
        for value, slope, unit in zip(values, slopes, units):
            value.grad = slope * unit / n
        return loss / n

    optimizer.step(closure)
    weight, bias = (value * unit for value, unit in zip(values, units))
    return {"weight_": weight, "bias_": bias, "center_": center}


# --- distances to class means


def fit_class_means(features: Tensor, labels: Tensor, k: int, seed: int = 0) -> Params:
    """The class means of features (N, F) in two geometries: directions on the sphere, and unit spread within
    classes."""
    mean = features.mean(0)
    centred = features - mean
    sphere = normalize(centred, dim=1)
    on_sphere = _means(sphere, labels, k, 3.0)
    rank = min(RANK, *centred.shape)
    with seeded(seed, features.device):
        _, _, directions = torch.svd_lowrank(centred, rank, niter=2)  # (F, R)
    low = centred @ directions
    spread = low - _means(low, labels, k, 0.5)[labels]
    covariance = spread.mT @ spread / len(low)
    size = covariance.diagonal().mean().clamp(min=1e-12)
    shrunk = 0.5 * covariance + 0.5 * size * torch.eye(rank, dtype=low.dtype, device=low.device)
    projection = directions @ torch.linalg.cholesky(torch.linalg.inv(shrunk))
    projected = centred @ projection
    means = _means(projected, labels, k, 3.0)
    usual = [
        _squared_distances(part, at)[torch.arange(len(labels)), labels].median().clamp(min=1e-12)
        for part, at in ((sphere, on_sphere), (projected, means))
    ]
    return {
        "feature_mean_": mean,
        "class_means_": on_sphere,
        "projection_": projection,
        "projected_means_": means,
        "spreads_": torch.stack(usual),
    }


def class_distances(features: Tensor, means: Mapping[str, Tensor]) -> list[Tensor]:
    """Minus the squared distances (N, K) to each class mean, in both geometries, in units of the usual one."""
    m = {name: value.to(features.dtype) for name, value in means.items()}
    centred = features - m["feature_mean_"]
    parts = ((normalize(centred, dim=-1), "class_means_"), (centred @ m["projection_"], "projected_means_"))
    return [-_squared_distances(part, m[name]) / usual for (part, name), usual in zip(parts, m["spreads_"])]


def damped_answer(features: Tensor, last_layer: Tensor, usual: Tensor) -> Tensor:
    """The answer (N, K) of a last layer (K, F) to features (N, F) whose large values are damped.

    A network that is sure because of a few very large features is less often right than one that is as sure because
    of many.
    """
    damped = features.sign() * (features.abs() / usual.to(features.dtype)).log1p() * usual.to(features.dtype)
    return damped @ last_layer.mT.to(features.dtype)


def _means(values: Tensor, labels: Tensor, k: int, prior: float) -> Tensor:
    """(K, F) class means, all pulled by the same share towards the mean of all, as if `prior` samples lay there.

    By the same share, since how far a mean is pulled must not tell how many samples of its class are held back.
    """
    overall, usual = values.mean(0), len(values) / k
    sums = values.new_zeros(k, values.shape[1]).index_add_(0, labels, values - overall)
    counts = torch.bincount(labels, minlength=k).to(values.dtype)[:, None].clamp(min=1)
    return overall + sums / counts * (usual / (usual + prior))


def _squared_distances(values: Tensor, means: Tensor) -> Tensor:
    own, theirs = values.square().sum(-1, keepdim=True), means.square().sum(-1)
    return (own - 2 * values @ means.mT + theirs).clamp(min=0)


# --- solvers


def newton(
    evaluate: Callable[[Tensor], tuple[float, Tensor, Tensor]], weights: Tensor, max_steps: int = 30
) -> Tensor:
    """Weights (P,) in float64 where a loss is lowest; `evaluate` gives it, its gradient (P,) and curvature (P, P)."""
    damping = 1e-4
    loss, gradient, curvature = evaluate(weights)
    for _ in range(max_steps):
        for _ in range(12):
            stiff = curvature + damping * (curvature.diagonal() + 1e-8).diag()
            step: Tensor = torch.linalg.solve(stiff, gradient)
            if 0 <= float(gradient @ step) < TOLERANCE:
                return weights - step
            now = evaluate(weights - step)
            if now[0] <= loss:
                break
            damping *= 6
        else:
            break
        weights, (loss, gradient, curvature), damping = weights - step, now, max(damping / 4, 1e-8)
    return weights


def fit_log_scale(
    logits: Tensor,
    labels: Tensor | Target,
    design: Tensor,
    ridge: Tensor,
    start: Tensor | None = None,
) -> Tensor:
    """Weights w (P,) such that logits (N, K) times exp(design w), design (N, P), have the lowest NLL.

    `ridge` (P,) is the pull of each weight towards 0, in samples.
    """
    target = _target(labels)
    below = logits - logits.amax(1, keepdim=True)
    at_label = target.of(below)
    n, rows = len(logits), max(1, CHUNK // logits.shape[1])
    design, ridge = design.double(), ridge.double() / n

    def evaluate(w: Tensor) -> tuple[float, Tensor, Tensor]:
        scale = (design @ w).clamp(-4, 4).exp()
        nlls, firsts, seconds = [], [], []  # and each sample's first and second derivative in its log scale
        for some, s, label in zip(below.split(rows), scale.to(below.dtype).split(rows), at_label.split(rows)):
            largest = (some * s[:, None]).exp_()  # each row's largest is 1
            sums = largest.sum(1)
            weighted = largest.mul_(some)
            mean = weighted.sum(1) / sums
            variance = weighted.mul_(some).sum(1) / sums - mean.square()
            nlls.append(sums.log() - s * label)
            firsts.append(s * (mean - label))
            seconds.append(s.square() * variance)
        nll, first, second = (target.weighted(torch.cat(parts).double()) for parts in (nlls, firsts, seconds))
        gradient = design.mT @ first / n + ridge * w
        # The first derivative belongs to the curvature where it helps: near the optimum it has mean 0.
        curvature = design.mT @ (design * second.clamp(min=1e-8)[:, None]) / n + ridge.diag()
        return float(nll.sum()) / n + 0.5 * float((ridge * w.square()).sum()), gradient, curvature

    begin = logits.new_zeros(design.shape[1]) if start is None else start
    return newton(evaluate, begin.double()).to(logits.dtype)


def fit_pool(parts: Sequence[Tensor], labels: Tensor | Target, start: Tensor | None = None) -> Tensor:
    """Weights (P,) of the sum of log-probabilities (N, K) with the lowest NLL, pulled towards the first part alone."""
    target = _target(labels)
    n, p = len(target.labels), len(parts)
    size = max(1, CHUNK // (parts[0].shape[1] * p))
    towards = torch.eye(p, dtype=torch.float64, device=target.labels.device)[0]

    def evaluate(w: Tensor) -> tuple[float, Tensor, Tensor]:
        loss = 0.5 * RIDGE_POOL * float((w - towards).square().sum())
        gradient = RIDGE_POOL * (w - towards)
        curvature = RIDGE_POOL * torch.eye(p, dtype=torch.float64, device=w.device)
        for some, truth in zip(zip(*(part.split(size) for part in parts)), target.split(size)):
            x = torch.stack(some, 2)  # (n, K, P)
            z = x @ w.to(x.dtype)
            probs = z.softmax(1)
            mean = (probs[:, None] @ x)[:, 0]  # (n, P)
            loss += float(_nlls(z, truth).sum(dtype=torch.float64))
            gradient = gradient + truth.weighted(mean - truth.of(x)).sum(0, dtype=torch.float64)
            flat = (x * truth.weighted(probs)[..., None].sqrt()).reshape(-1, p)
            curvature = curvature + (flat.mT @ flat - mean.mT @ truth.weighted(mean)).double()
        return loss / n, gradient / n, curvature / n

    return newton(evaluate, towards if start is None else start.double()).to(parts[0].dtype)


def fit_curve(log_probs: Tensor, labels: Tensor | Target, start: Tensor | None = None) -> Tensor:
    """Weights (knots,) of the hinges of log-probabilities (N, K) with the lowest NLL, pulled towards 0.

    Log-probabilities below the lowest knot stay as they are, and only their sum matters.
    """
    target, bent = _target(labels), log_probs > KNOTS[0]
    counts = bent.sum(1)
    fits = int((counts.cumsum(0) <= MAX_BENT).sum())  # samples are in random order
    log_probs, target, bent, counts = log_probs[:fits], target.rows(slice(fits)), bent[:fits], counts[:fits]
    # All relative to each row's largest, so that sums over confident rows lose no digits.
    top = log_probs.amax(1)
    x = (log_probs - top[:, None])[bent]  # (E,), row by row
    at_top = _hinges(top)
    basis = _hinges(log_probs[bent]) - at_top.repeat_interleave(counts, 0)  # (E, knots)
    rest = (log_probs - top[:, None]).exp().masked_fill(bent, 0).sum(1)
    at_label = target.of(log_probs)
    bend = _hinges(at_label) if target.probs is None else target.of(_hinges(log_probs))
    wanted = bend - at_top  # (N, knots)
    each = target.weighted(torch.ones_like(top))  # (N,)
    pull = RIDGE_CURVE * torch.eye(len(KNOTS), dtype=torch.float64, device=x.device)

    def sums(values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)

    def evaluate(w: Tensor) -> tuple[float, Tensor, Tensor]:
        low = w.to(x.dtype)
        odds = (x + basis @ low).exp_()
        left = rest * (-at_top @ low).exp()
        total = sums(odds) + left
        weighted = basis * (odds / total.repeat_interleave(counts))[:, None]
        lost = at_top * (left / total)[:, None]
        mean = sums(weighted) - lost
        loss = (each * (total.log() - at_label + top - wanted @ low)).sum(dtype=torch.float64)
        gradient = (each[:, None] * (mean - wanted)).sum(0, dtype=torch.float64) + pull @ w
        outer = (weighted * each.repeat_interleave(counts)[:, None]).mT @ basis
        outer = outer + (each[:, None] * lost).mT @ at_top - (each[:, None] * mean).mT @ mean
        curvature = outer.double() + pull
        return float(loss + 0.5 * w @ pull @ w) / fits, gradient / fits, curvature / fits

    begin = x.new_zeros(len(KNOTS)) if start is None else start
    return newton(evaluate, begin.double()).to(x.dtype)


def _target(labels: Tensor | Target) -> Target:
    return labels if isinstance(labels, Target) else Target(labels)


def _nlls(z: Tensor, target: Target) -> Tensor:
    """(N,), times the weights."""
    return target.weighted(z.logsumexp(1) - target.of(z))


__all__: Sequence[str] = [
    "Evidence",
    "Head",
    "class_distances",
    "damped_answer",
    "fit_class_means",
    "fit_curve",
    "fit_log_scale",
    "fit_pool",
]
