"""What features say about the class, beside the network's own answer: opinions that the staged head may pool."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from doublehead.torch_tools import seeded

RANK = 64  # directions of the features in which distances are measured
MEANS = ("feature_mean_", "class_means_", "projection_", "projected_means_", "spreads_")
LEARNED = (*MEANS, "last_layer_", "usual_")


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
    out = [features.new_empty(len(features), n_classes) for _ in range(2)]
    for fold in folds.unique():
        held = folds == fold
        means = fit_class_means(features[~held], labels[~held], n_classes, seed)
        for made, part in zip(out, class_distances(features[held], means)):
            made[held] = part
    return fit_class_means(features, labels, n_classes, seed), out


def opinions_of(features: Tensor, params: Mapping[str, Tensor]) -> list[Tensor]:
    """Opinions (..., K) about samples with features (..., F); parameters that are empty count as absent."""
    known = {name: value for name, value in params.items() if value.numel()}
    if "last_layer_" in known:
        return [damped_answer(features, known["last_layer_"], known["usual_"])]
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
