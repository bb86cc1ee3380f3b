"""The staged head: small corrections of different kinds, one after the other, each kept where it pays.

1. temperature: one number for all samples.
2. map: class by class, z + (D + M) z + b, pulled towards no change (Berta et al. 2025). For few classes.
3. head: a temperature for each sample, linear in statistics of its logits and, for a network, of its features.
4. pool: a weighted sum with other opinions about the same sample. For a network these are distances of its features
   to the class means, and the answers of heads that were trained beside it.
5. curve: a function of the log-probability, the same for all classes.

Every stage is fitted to outputs of the stages before it on samples that those were not fitted to, and stages are
chosen by their NLL on held-back samples. With too little data nothing but the temperature is left, pulled towards 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from doublehead.calibration_head import MIN_LOGIT, feature_numbers, scale_logits, statistics
from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.choose import Choice, choose, stratified_folds
from doublehead.calibrators.maps import keep_top
from doublehead.predictions import Predictions, Target
from doublehead.torch_tools import one_thread, seeded

if TYPE_CHECKING:
    from typing_extensions import Self

MARGIN = 2.0  # standard errors by which further stages must beat the temperature
MIN_SAMPLES = 200  # below, only a temperature is fitted
MIN_WRONG = 10  # so it is with fewer wrong predictions than this: they cannot teach when to doubt
WARN_SAMPLES = 100  # below, a warning says that this is little data
MAX_SAMPLES = 20_000  # more do not help a head of a few dozen weights
MAX_ENTRIES = 25_000_000  # of logits that are fitted to
PER_CLASS = 20  # samples per class from which maps of the classes and distances to their means are tried
# Ridges, in samples: a weight is pulled towards no change as if so many samples said so.
RIDGE_TEMPERATURE, RIDGE_HEAD, RIDGE_POOL, RIDGE_CURVE = 1.0, 30.0, 1.0, 30.0
LIMIT = 3.0  # deviations to which the head's inputs are clipped
KNOTS = (-9.0, -6.5, -4.5, -3.0, -2.0, -1.2, -0.6, -0.2, -0.05)  # of the curve, in log-probability
RANK = 64  # directions of the features in which distances are measured
CHUNK = 2_000_000  # entries handled at once

Params = dict[str, Tensor]
Opinion = Tensor | Sequence[Tensor] | None  # one (N, K), or several


class Evidence(NamedTuple):
    """What stages may read of N samples besides their logits: numbers (N, S) and other opinions, (N, K) each."""

    numbers: Tensor
    opinions: tuple[Tensor, ...] = ()

    def rows(self, at: Tensor) -> Evidence:
        """Of some of the samples."""
        return Evidence(self.numbers[at], tuple(part[at] for part in self.opinions))


class Head(Calibrator):
    """The staged head. The default for networks and files; never changes a prediction unless asked to.

    `fit(predictions)` learns from logits alone. `fit(predictions, features=...)` also reads the features (N, F)
    that went into the network's last layer, and `opinion` is what heads trained beside the network say of the same
    samples, each sample by a head that never saw it. What was chosen, and why, is in `choice`.

    `keep="predictions"` never overrules the network's class. `keep="best"` lets stages change it if that does not
    lower the accuracy on held-back samples.

    >>> logits = 3 * torch.randn(500, 4)
    >>> head = Head().fit(Predictions(logits, logits.softmax(1).multinomial(1)[:, 0]))
    >>> torch.equal(head(logits).argmax(1), logits.argmax(1))
    True
    """

    learned = (
        "stages_", "temperature_", "weight_", "bias_", "center_", "mean_", "deviation_", "slope_", "pool_", "curve_",
        "feature_mean_", "class_means_", "projection_", "projected_means_", "spreads_",
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

    choice: Choice | None = None

    def __init__(
        self, keep: Literal["predictions", "best"] = "predictions", folds: int = 5, seed: int = 0
    ) -> None:
        super().__init__()
        self.keep, self.folds, self.seed = keep, folds, seed
        self._fitting: tuple[Tensor | None, Opinion, Tensor | None, Tensor | None] = (None, None, None, None)
        self._open: tuple[bool, ...] = ()

    def fit(
        self,
        predictions: Predictions,
        *,
        features: Tensor | None = None,
        opinion: Opinion = None,
        numbers: Tensor | None = None,
        folds: Tensor | None = None,
    ) -> Self:
        """Learn from predictions the network was not trained on, and what else is known of the same samples.

        Samples of one number in `folds` (N,) are held back together; by default folds are drawn at random.
        """
        self._fitting = features, opinion, numbers, folds
        try:
            super().fit(predictions)
        finally:
            self._fitting = (None, None, None, None)
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
                z = _apply(name, params, z, evidence)
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
                opinions += class_distances(features, {name: getattr(self, name) for name in MEANS})
        opinions += [part.to(logits.dtype) for part in _several(opinion)]
        if self._open[3] and len(opinions) != n_opinions:
            raise ValueError("opinion must be given exactly where this head was fitted with one")
        joined = torch.cat(more, -1) if more else logits.new_empty(*logits.shape[:-1], 0)
        if joined.shape[-1] != n_numbers:
            raise ValueError(f"numbers must be as many as fitted with, {n_numbers}, got {joined.shape[-1]}")
        return Evidence(joined, tuple(opinions))

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


STAGES = ("map", "head", "pool", "curve")
MEANS = ("feature_mean_", "class_means_", "projection_", "projected_means_", "spreads_")


def _several(opinion: Opinion) -> list[Tensor]:
    return [] if opinion is None else [opinion] if isinstance(opinion, Tensor) else list(opinion)


def _sizes(head: Head) -> tuple[int, int]:
    """How many numbers and opinions a fitted head reads."""
    k = head.bias_.shape[0]
    return len(head.mean_) - statistics(torch.zeros(1, k)).shape[-1], len(head.pool_) - 1


def _apply(name: str, params: Mapping[str, Tensor], z: Tensor, evidence: Evidence) -> Tensor:
    """One stage of logits (..., K)."""
    p = {key: value.to(z.dtype) if value.is_floating_point() else value for key, value in params.items()}
    if name == "temperature":
        return z / p["temperature_"]
    if name == "map":
        off = z.log_softmax(-1) - p["center_"]
        change = off @ p["weight_"].mT if p["weight_"].ndim == 2 else off * p["weight_"]
        return z.log_softmax(-1) + change + p["bias_"]
    if name == "head":
        return scale_logits(z, _linear(_inputs(z, evidence), p))
    if name == "pool":
        parts = [z, *evidence.opinions]
        return torch.stack([part.log_softmax(-1) for part in parts], -1) @ p["pool_"]
    log_probs = z.log_softmax(-1)
    return log_probs + _hinges(log_probs) @ p["curve_"]


def _inputs(z: Tensor, evidence: Evidence) -> Tensor:
    return torch.cat([statistics(z), evidence.numbers.to(z.dtype)], -1)


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
                f"{self.n} calibration samples are little data: only a temperature is fitted, pulled towards 1",
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
        nlls = {self._name(sequence): self._nll(sequence) for sequence in ((), *sequences)}
        if tells:
            best = min(sequences, key=lambda sequence: float(nlls[self._name(sequence)].mean()))
            if self._try((*best, "curve")):
                sequences.append((*best, "curve"))
                nlls[self._name(sequences[-1])] = self._nll(sequences[-1])
        choice = choose(nlls, ["temperature"], MARGIN)
        chosen = next(sequence for sequence in ((), *sequences) if self._name(sequence) == choice.chosen)
        self.head.choice = choice
        return self._parameters(chosen)

    def _sequences(self) -> list[tuple[str, ...]]:
        pool = [("pool",)] if self.evidence.opinions else []
        heads = [("head",), *(("head", *more) for more in pool)]
        maps = [("map", *more) for more in ((), *heads)] if self.n >= PER_CLASS * self.k else []
        return [*heads, *maps]

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
        whole = _fit_stage(name, z, self.target, self.evidence)
        out = torch.empty_like(z)
        for fold in self.folds.unique() if self.n > 1 else ():
            held = self.folds == fold
            params = _fit_stage(name, z[~held], self.target.rows(~held), self.evidence.rows(~held), whole)
            out[held] = _apply(name, params, z[held], self.evidence.rows(held))
        self.found[sequence] = (out if self.n > 1 else z), whole
        return True

    def _nll(self, sequence: tuple[str, ...]) -> Tensor:
        """(N,) of cross-fitted outputs; with the network's predictions kept where they are."""
        z = self.found[sequence][0]
        z = keep_top(z, self.logits) if self.head.keep == "predictions" else z
        return _nlls(z, self.target)

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
    name: str, z: Tensor, target: Target, evidence: Evidence, start: Mapping[str, Tensor] | None = None
) -> Params:
    """The parameters of one stage; `start` are those of a fit to more samples."""
    if name == "temperature":
        ones = z.new_ones(len(z), 1)
        log_scale = fit_log_scale(z, target, ones, z.new_full((1,), RIDGE_TEMPERATURE))
        return {"temperature_": (-log_scale[0]).exp()}
    if name == "map":
        return _fit_map(z.log_softmax(1), target, start)
    if name == "head":
        inputs = _inputs(z, evidence)
        params = {"mean_": inputs.mean(0), "deviation_": inputs.std(0).clamp(min=1e-4)}
        standard = ((inputs - params["mean_"]) / params["deviation_"]).clamp(-LIMIT, LIMIT)
        design = torch.cat([standard, torch.ones_like(standard[:, :1])], 1)
        ridge = z.new_full((design.shape[1],), RIDGE_HEAD)
        ridge[-1] = 0
        return {**params, "slope_": fit_log_scale(z, target, design, ridge)}
    if name == "pool":
        parts = [part.log_softmax(1) for part in (z, *evidence.opinions)]
        towards = z.new_zeros(len(parts))
        towards[0] = 1
        found = fit_shared(
            lambda at: torch.stack([part[at] for part in parts], 2), None, target, towards, RIDGE_POOL
        )
        return {"pool_": found}
    log_probs = z.log_softmax(1)
    found = fit_shared(
        lambda at: _hinges(log_probs[at]), log_probs, target, z.new_zeros(len(KNOTS)), RIDGE_CURVE
    )
    return {"curve_": found}


# --- the class map


def _takes_matrix(n: int, k: int) -> bool:
    """Whether there is enough data for a weight between every two classes."""
    return k * k <= n


def _fit_map(x: Tensor, target: Target, start: Mapping[str, Tensor] | None) -> Params:
    """D + M and b of z + (D + M) (z - mean) + b, with a ridge of K / n on D and b and of K (K - 1) / n on M."""
    n, k = x.shape
    center = x.mean(0)
    full = _takes_matrix(n, k) if start is None else start["weight_"].ndim == 2
    off, eye = x - center, torch.eye(k, dtype=x.dtype, device=x.device)
    ridge = (eye + (k - 1) * (1 - eye)) * (k / n) if full else x.new_full((k,), k / n)
    weight = (x.new_zeros(k, k) if full else x.new_zeros(k)) if start is None else start["weight_"].clone()
    bias = x.new_zeros(k) if start is None else start["bias_"].clone()
    values = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.LBFGS(
        values, max_iter=60 if start is None else 20, history_size=10, line_search_fn="strong_wolfe",
        tolerance_grad=1e-5, tolerance_change=1e-7,
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        change = off @ weight.mT if full else off * weight
        loss = _nlls(x + change + bias, target).mean()
        loss = loss + 0.5 * (ridge * weight.square()).sum() + 0.5 * k / n * bias.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return {"weight_": weight.detach(), "bias_": bias.detach(), "center_": center}


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


def fit_log_scale(
    logits: Tensor, labels: Tensor | Target, design: Tensor, ridge: Tensor, max_steps: int = 30
) -> Tensor:
    """Weights w (P,) such that logits (N, K) times exp(design w), design (N, P), have the lowest NLL, by Newton
    steps.

    `ridge` (P,) is the pull of each weight towards 0, in samples.
    """
    target = labels if isinstance(labels, Target) else Target(labels)
    below = logits - logits.amax(1, keepdim=True)
    at_label = target.of(below)
    n, weights, damping = len(logits), logits.new_zeros(design.shape[1]).double(), 1e-4
    design, ridge = design.double(), ridge.double() / n

    def evaluate(w: Tensor) -> tuple[float, Tensor, Tensor]:
        """The loss, and each sample's first and second derivative in its log scale."""
        log_scale = (design @ w).clamp(-4, 4)
        scale = log_scale.exp()
        firsts, seconds, nlls = [], [], []
        rows = max(1, CHUNK // below.shape[1])
        for some, s, label in zip(below.split(rows), scale.to(below.dtype).split(rows), at_label.split(rows)):
            scaled = some * s[:, None]
            largest = scaled.exp_()  # each row's largest is 1
            sums = largest.sum(1)
            mean = (largest * some).sum(1) / sums
            variance = (largest * some.square()).sum(1) / sums - mean.square()
            nlls.append(sums.log() - s * label)
            firsts.append(s * (mean - label))
            seconds.append(s.square() * variance)
        nll, first, second = (target.weighted(torch.cat(parts)) for parts in (nlls, firsts, seconds))
        loss = float(nll.sum(dtype=torch.float64)) / n + 0.5 * float((ridge * w.square()).sum())
        return loss, first.double(), second.double()

    loss, first, second = evaluate(weights)
    for _ in range(max_steps):
        gradient = design.mT @ first / n + ridge * weights
        # The first derivative belongs to the curvature where it helps: near the optimum it has mean 0.
        curvature = design.mT @ (design * second.clamp(min=1e-8)[:, None]) / n + ridge.diag()
        for _ in range(12):
            stiff = curvature + damping * (curvature.diagonal() + 1e-8).diag()
            proposed = weights - torch.linalg.solve(stiff, gradient)
            now = evaluate(proposed)
            if now[0] <= loss:
                break
            damping *= 6
        else:
            break
        fell = loss - now[0]
        weights, (loss, first, second), damping = proposed, now, max(damping / 4, 1e-8)
        if fell < 1e-7:
            break
    return weights.to(logits.dtype)


def fit_shared(
    basis: Callable[[slice], Tensor],
    offset: Tensor | None,
    labels: Tensor | Target,
    towards: Tensor,
    ridge: float,
    max_steps: int = 30,
) -> Tensor:
    """Weights w (P,) of logits offset + basis w with the lowest NLL, by Newton steps; the problem is convex.

    `basis(rows)` gives (n, K, P). `ridge` is the pull towards `towards`, in samples.
    """
    target = labels if isinstance(labels, Target) else Target(labels)
    n, p = len(target.labels), len(towards)
    k = basis(slice(0, 1)).shape[1]
    size = max(1, CHUNK // (k * p))
    starts = [slice(begin, min(begin + size, n)) for begin in range(0, n, size)]

    def logits_at(at: slice, w: Tensor) -> tuple[Tensor, Tensor]:
        parts = basis(at)
        z = parts @ w.to(parts.dtype)
        return parts, z if offset is None else z + offset[at]

    def loss_at(w: Tensor) -> float:
        total = sum(
            float(_nlls(logits_at(at, w)[1], target.rows(at)).sum(dtype=torch.float64)) for at in starts
        )
        return total / n + 0.5 * ridge / n * float((w - towards).square().sum())

    w, towards = towards.double(), towards.double()
    loss = loss_at(w)
    for _ in range(max_steps):
        gradient = ridge / n * (w - towards)
        curvature = (ridge / n + 1e-9) * torch.eye(p, dtype=torch.float64, device=w.device)
        for at in starts:
            parts, z = logits_at(at, w)
            probs = z.softmax(1)
            mean = (probs[..., None] * parts).sum(1)  # (n, P)
            some = target.rows(at)
            truth = (
                one_hot(some.labels, k).to(parts.dtype) if some.probs is None else some.probs.to(parts.dtype)
            )
            gap = mean - (truth[..., None] * parts).sum(1)
            weights = gap.new_ones(len(gap)) if some.weights is None else some.weights.to(gap.dtype)
            gradient = gradient + (weights[:, None] * gap).sum(0, dtype=torch.float64) / n
            off = (parts - mean[:, None]) * (weights[:, None] * probs)[..., None].sqrt()
            flat = off.reshape(-1, p)
            curvature = curvature + (flat.mT @ flat).double() / n
        step, scale = torch.linalg.solve(curvature, gradient), 1.0
        proposed = loss_at(w - step)
        while proposed > loss and scale > 1e-3:
            scale /= 2
            proposed = loss_at(w - scale * step)
        if proposed > loss:
            break
        fell, w, loss = loss - proposed, w - scale * step, proposed
        if fell < 1e-7:
            break
    return w.to(target.labels.device, basis(slice(0, 1)).dtype)


def _nlls(z: Tensor, target: Target) -> Tensor:
    """(N,), times the weights."""
    return target.weighted(z.logsumexp(1) - target.of(z))


__all__: Sequence[str] = [
    "Evidence",
    "Head",
    "class_distances",
    "fit_class_means",
    "fit_log_scale",
    "fit_shared",
]
