"""The stages of the head: what each reads, what it does, and how it is fitted. `head` puts them in order.

Every fit takes logits or log-probabilities (N, K) and a `Target`, and may start from the parameters of a fit to more
samples. A ridge is in samples: a weight is pulled towards no change with the weight of that many samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from doublehead.calibration_head import MAX_LOG_SCALE, scale_logits, statistics
from doublehead.calibrators.optimise import CHUNK, fit_log_scale, newton
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.score_arrays import Target
from doublehead.torch_tools import seeded

OWN = ("temperature", "map", "head")  # stages whose outputs are pooled
STAGES = (*OWN, "pool", "curve")

RIDGE_HEAD, RIDGE_POOL, RIDGE_CURVE = 30.0, 10.0, 30.0
RIDGE_TEMPERATURE = 0.01
# Added to a sample whose temperature is below 1: few samples hold few errors, or none (Jeffreys' prior).
ERRORS_ADDED = 0.5
MAP_FLOOR = -20.0  # log-probability: probabilities of 0, as trees give, must not dominate
LIMIT = 3.0  # deviations to which the head's inputs are clipped
KNOTS = (-9.0, -6.5, -4.5, -3.0, -2.0, -1.2, -0.6, -0.2, -0.05)  # of the curve, in log-probability
MAX_SUMMED = 4_000_000  # entries that pool and curve are fitted to
RANK = 64  # directions of the features in which distances are measured
MEANS = ("feature_mean_", "class_means_", "projection_", "projected_means_", "spreads_")
OF_FEATURES = (*MEANS, "last_layer_", "usual_")

Params = dict[str, Tensor]


class Evidence(NamedTuple):
    """What stages may read of N samples besides their logits: numbers (N, S) and other opinions, (N, K) each."""

    numbers: Tensor
    opinions: tuple[Tensor, ...] = ()


def reads(name: str, outputs: dict[str, Tensor], evidence: Evidence) -> list[Tensor]:
    """What one stage reads: the logits (..., K) after the stage before it, and more for the head and the pool.

    `outputs` are those of the stages in use so far, in order, before them the network's logits as "none".
    """
    z = next(reversed(outputs.values()))
    if name == "temperature":
        return [z]
    if name == "head":
        return [z, torch.cat([statistics(z), evidence.numbers.to(z.dtype)], -1)]
    if name != "pool":
        return [z.log_softmax(-1)]
    first = outputs.get("temperature", outputs["none"])
    none = z.new_zeros(()).expand_as(z)  # of a stage that is not in use
    own = [first, *(outputs.get(stage, none) for stage in OWN[1:])]
    return [part if part is none else part.log_softmax(-1) for part in (*own, *evidence.opinions)]


def apply(name: str, params: Mapping[str, Tensor], read: Sequence[Tensor]) -> Tensor:
    """One stage: logits (..., K)."""
    z = read[0]
    p = {key: value.to(z.dtype) if value.is_floating_point() else value for key, value in params.items()}
    if name == "temperature":
        return z / p["temperature_"]
    if name == "map":
        off = z.clamp(min=MAP_FLOOR) - p["center_"]
        return z + (off @ p["weight_"].mT if p["weight_"].ndim == 2 else off * p["weight_"]) + p["bias_"]
    if name == "head":
        inputs = _standard(read[1], p)
        return scale_logits(z, inputs @ p["slope_"][:-1, None] + p["slope_"][-1])
    if name == "pool":
        return torch.stack(list(read), -1) @ p["pool_"]
    return z + _hinges(z) @ p["curve_"]


def fit(
    name: str, read: Sequence[Tensor], target: Target, start: Mapping[str, Tensor] | None = None
) -> Params:
    """The parameters of one stage."""
    z, begin = read[0], start or {}
    if name == "temperature":
        return {"temperature_": _careful_temperature(z, target, begin.get("temperature_"))}
    if name == "map":
        return _fit_map(z, target, start)
    if name == "head":
        inputs = read[1]
        params = {"mean_": inputs.mean(0), "deviation_": inputs.std(0).clamp(min=1e-4)}
        design = torch.cat([_standard(inputs, params), torch.ones_like(inputs[:, :1])], 1)
        ridge = z.new_full((design.shape[1],), RIDGE_HEAD)
        ridge[-1] = 0
        return {**params, "slope_": fit_log_scale(z, target, design, ridge, begin.get("slope_"))}
    if name == "pool":
        return {"pool_": fit_pool(read, target, begin.get("pool_"))}
    return {"curve_": fit_curve(z, target, begin.get("curve_"))}


def unused(like: Tensor, evidence: Evidence) -> Params:
    """Parameters with which no stage changes anything, in the shapes of those fitted to logits like these (N, K)."""
    n, k = like.shape
    size, zeros = statistics(like[:1]).shape[1] + evidence.numbers.shape[1], like.new_zeros
    return {
        "temperature_": like.new_ones(()),
        "weight_": zeros(k, k) if k * k <= n else zeros(k),
        "bias_": zeros(k),
        "center_": zeros(k),
        "mean_": zeros(size),
        "deviation_": zeros(size) + 1,
        "slope_": zeros(size + 1),
        "pool_": torch.eye(len(OWN) + len(evidence.opinions), dtype=like.dtype, device=like.device)[0],
        "curve_": zeros(len(KNOTS)),
    }


def nlls(z: Tensor, target: Target) -> Tensor:
    """(N,) of logits (N, K), times the weights."""
    return target.weighted(z.logsumexp(1) - target.of(z))


# --- temperature, of all samples and of each


def _careful_temperature(z: Tensor, target: Target, start: Tensor | None) -> Tensor:
    """A temperature; one below 1 is fitted as if the samples had half an error more."""
    ones = z.new_ones(len(z), 1)
    begin = None if start is None else -start.log()[None]
    log_scale = fit_log_scale(z, target, ones, z.new_full((1,), RIDGE_TEMPERATURE), begin)[0]
    guessing = target.weighted(z.new_full((len(z),), math.log(z.shape[1]))).sum()
    if not log_scale > -MAX_LOG_SCALE or nlls(z * log_scale.exp(), target).sum() > guessing:
        # With logits of thousands the slope is 0 here.
        return z.new_tensor(1 / fit_inverse_temperature(z, target))
    if log_scale > 0:
        more = _with_errors(z, target)
        log_scale = fit_log_scale(z, more, ones, z.new_full((1,), RIDGE_TEMPERATURE))[0].clamp(min=0.0)
    return (-log_scale).exp()


def _with_errors(z: Tensor, target: Target) -> Target:
    """The labels, mixed with half an error that is shared equally by all samples.

    It goes to other classes than the likeliest, as the logits (N, K) weigh them.
    """
    share, top = ERRORS_ADDED / (len(z) + ERRORS_ADDED), z.argmax(1, keepdim=True)
    errors = z.scatter(1, top, -math.inf).softmax(1)
    truth = target.probs
    if truth is None:
        truth = torch.zeros_like(z).scatter_(1, target.labels[:, None], 1.0)
    return target._replace(probs=(1 - share) * truth + share * errors)


# --- map


def _fit_map(x: Tensor, target: Target, start: Mapping[str, Tensor] | None) -> Params:
    """D + M and b of z + (D + M) (z - mean) + b, with a ridge of K / n on D and b and of K (K - 1) / n on M.

    M, a weight between every two classes, is left out where there are fewer samples than weights.
    """
    n, k = x.shape
    known = x.clamp(min=MAP_FLOOR)
    center = known.mean(0)
    full = k * k <= n if start is None else start["weight_"].ndim == 2
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


# --- pool and curve: sums of terms, each with a weight


def fit_pool(parts: Sequence[Tensor], target: Target, start: Tensor | None = None) -> Tensor:
    """Weights (P,), none below 0, of the sum of log-probabilities (N, K) with the lowest NLL.

    They are pulled towards the first part alone. While weights fall below 0, the part of the lowest is left out.
    """
    rows = slice(max(1, MAX_SUMMED // parts[0].shape[1]))  # samples are in random order
    x = torch.stack([part[rows] for part in parts], 2)  # (n, K, P)
    towards = torch.eye(len(parts), dtype=torch.float64, device=x.device)[0]
    weights, used = towards if start is None else start.double(), list(range(len(parts)))
    while True:
        some = x[:, :, used]
        found = _fit_sum(
            torch.zeros_like(x[:, :, 0]), some, target.rows(rows), RIDGE_POOL, towards[used], weights[used]
        )
        weights = torch.zeros_like(towards)
        weights[used] = found
        if bool((weights >= 0).all()):
            return weights.to(x.dtype)
        used.remove(int(weights.argmin()))
        if not used:  # each part is worse than none
            return torch.zeros_like(weights).to(x.dtype)


def fit_curve(log_probs: Tensor, target: Target, start: Tensor | None = None) -> Tensor:
    """Weights (knots,) of the hinges of log-probabilities (N, K) with the lowest NLL, pulled towards 0."""
    rows = slice(max(1, MAX_SUMMED // log_probs.shape[1]))  # samples are in random order
    z, none = log_probs[rows], torch.zeros(len(KNOTS), dtype=torch.float64, device=log_probs.device)
    begin = none if start is None else start.double()
    return _fit_sum(z, _hinges(z), target.rows(rows), RIDGE_CURVE, none, begin).to(z.dtype)


def _fit_sum(z: Tensor, x: Tensor, target: Target, ridge: float, towards: Tensor, start: Tensor) -> Tensor:
    """Weights w (P,) in float64 such that z + x w, z (N, K) and x (N, K, P), has the lowest NLL.

    `ridge` is the pull of each weight towards that of `towards` (P,).
    """
    n, p = len(z), x.shape[2]
    size = max(1, CHUNK // (z.shape[1] * p))
    pull = ridge * torch.eye(p, dtype=torch.float64, device=z.device)

    def evaluate(w: Tensor) -> tuple[float, Tensor, Tensor]:
        off = w - towards
        loss, gradient, curvature = 0.5 * float(off @ pull @ off), pull @ off, pull
        for before, some, truth in zip(z.split(size), x.split(size), target.split(size)):
            out = before + some @ w.to(x.dtype)
            probs = out.softmax(1)
            mean = (probs[:, None] @ some)[:, 0]  # (n, P)
            loss += float(nlls(out, truth).sum(dtype=torch.float64))
            gradient = gradient + truth.weighted(mean - truth.of(some)).sum(0, dtype=torch.float64)
            flat = (some * truth.weighted(probs)[..., None].sqrt()).reshape(-1, p)
            curvature = curvature + (flat.mT @ flat - mean.mT @ truth.weighted(mean)).double()
        return loss / n, gradient / n, curvature / n

    return newton(evaluate, start)


def _hinges(log_probs: Tensor) -> Tensor:
    knots = torch.tensor(KNOTS, dtype=log_probs.dtype, device=log_probs.device)
    return (log_probs[..., None] - knots).clamp(min=0)  # (..., K, knots)


def _standard(inputs: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    return ((inputs - p["mean_"]) / p["deviation_"]).clamp(-LIMIT, LIMIT)


# --- opinions: what features say about the class, beside the network's own answer


def fit_opinions(
    features: Tensor, labels: Tensor, folds: Tensor, n_classes: int, last_layer: Tensor | None, seed: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What `opinions_of` needs, and opinions (N, K) about these samples.

    With `last_layer` (K, F) the opinion is its answer to damped features, else distances to the class means, of each
    sample to means of folds (N,) that it is no part of.
    """
    if last_layer is not None:
        layer = last_layer.detach().float()
        params = {"last_layer_": layer - layer.mean(0), "usual_": 2 * features.abs().mean()}
        return params, opinions_of(features, params)
    out = features.new_empty(2, len(features), n_classes)
    for fold in folds.unique():
        held = folds == fold
        means = fit_class_means(features[~held], labels[~held], n_classes, seed)
        out[:, held] = torch.stack(class_distances(features[held], means))
    return fit_class_means(features, labels, n_classes, seed), list(out)


def opinions_of(features: Tensor, params: Mapping[str, Tensor]) -> list[Tensor]:
    """Opinions (..., K) about samples with features (..., F); parameters that are empty count as absent."""
    known = {name: value for name, value in params.items() if value.numel()}
    if "last_layer_" in known:
        # A network that is sure because of a few very large features is less often right than one that is as sure
        # because of many.
        usual = known["usual_"].to(features.dtype)
        damped = features.sign() * (features.abs() / usual).log1p() * usual
        return [damped @ known["last_layer_"].mT.to(features.dtype)]
    return class_distances(features, known) if "class_means_" in known else []


def fit_class_means(features: Tensor, labels: Tensor, k: int, seed: int = 0) -> dict[str, Tensor]:
    """The class means of features (N, F) in two geometries: directions on the sphere, unit spread within classes."""
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
    m = {name: means[name].to(features.dtype) for name in MEANS}
    centred = features - m["feature_mean_"]
    parts = ((normalize(centred, dim=-1), "class_means_"), (centred @ m["projection_"], "projected_means_"))
    return [-_squared_distances(part, m[name]) / usual for (part, name), usual in zip(parts, m["spreads_"])]


def _means(values: Tensor, labels: Tensor, k: int, prior: float) -> Tensor:
    """(K, F) class means, all pulled by the same share towards the mean of all, as if `prior` samples lay there.

    By the same share, since the size of a pull must not reveal how many samples of its class are held back.
    """
    overall, usual = values.mean(0), len(values) / k
    sums = values.new_zeros(k, values.shape[1]).index_add_(0, labels, values - overall)
    counts = torch.bincount(labels, minlength=k).to(values.dtype)[:, None].clamp(min=1)
    return overall + sums / counts * (usual / (usual + prior))


def _squared_distances(values: Tensor, means: Tensor) -> Tensor:
    own, theirs = values.square().sum(-1, keepdim=True), means.square().sum(-1)
    return (own - 2 * values @ means.mT + theirs).clamp(min=0)
