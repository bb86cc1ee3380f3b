"""The method as scikit-learn estimators: a classifier on arrays, a scorer, and calibrators around any estimator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead.calibrate import calibrate
from doublehead.calibrated import Calibrated
from doublehead.calibration_head import Standardise
from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.head import Head
from doublehead.data.splits import split_rows
from doublehead.double_head import DoubleHead
from doublehead.metrics import ece
from doublehead.predictions import Predictions
from doublehead.system import require
from doublehead.tasks import class_scores, recognise_task
from doublehead.torch_tools import evaluating, seeded

_base: Any = require("sklearn.base", extra="sklearn")
_checks: Any = require("sklearn.utils.validation", extra="sklearn")
_utils: Any = require("sklearn.utils", extra="sklearn")
_targets: Any = require("sklearn.utils.multiclass", extra="sklearn")
_weights: Any = require("sklearn.utils.class_weight", extra="sklearn")
ROWS = 256  # predicted together: always this many, so that a row's answer does not depend on its neighbours


class _Classifier(_base.ClassifierMixin, _base.BaseEstimator):  # type: ignore[misc]
    """What an estimator answers, from its `predict_log_proba` and `classes_`."""

    def predict_proba(self, X: Any) -> Any:
        """(N, K) calibrated probabilities, columns in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def decision_function(self, X: Any) -> Any:
        """(N, K) calibrated log-probabilities; for two classes (N,), the log odds of the second."""
        values = self.predict_log_proba(X)
        return values[:, 1] - values[:, 0] if len(self.classes_) == 2 else values

    def predict(self, X: Any) -> Any:
        """(N,) the most probable class."""
        best = self.predict_log_proba(X).argmax(1)  # first: it raises before `fit`
        return self.classes_[best]


class DoubleHeadClassifier(_Classifier):
    """A neural network on arrays whose `predict_proba` is calibrated.

    `calib_share` of the data is held back: it stops the training early (after `patience` epochs without a lower NLL)
    and calibrates. `calibrate="after"` calibrates the trained network; "beside" also trains heads on the held-back
    data in alternation with the network, once in `every` steps, as a second opinion. The network is an MLP with
    layers `hidden` on standardised columns, or `module`: a torch module, or a function (n_features, n_classes) ->
    module, which gets the arrays as they are, of any shape. `class_weight`, a dict or "balanced", and the
    `sample_weight` of `fit` weight the network's loss; calibration takes the held-back data as it is, without samples
    of weight 0.

    >>> x = np.random.default_rng(0).normal(size=(200, 3))
    >>> y = np.where(x[:, 0] > 0, "yes", "no")
    >>> DoubleHeadClassifier(epochs=20, random_state=0).fit(x, y).predict_proba(x).shape
    (200, 2)
    """

    def __init__(
        self,
        hidden: Sequence[int] = (100,),
        *,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        calibrate: Literal["after", "beside"] = "after",
        calib_share: float = 0.2,
        epochs: int = 200,
        patience: int = 10,
        batch_size: int = 64,
        lr: float = 1e-3,
        weight_decay: float = 1e-4,
        every: int = 10,
        class_weight: Any = None,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.hidden, self.module, self.calibrate = hidden, module, calibrate
        self.calib_share, self.epochs, self.patience = calib_share, epochs, patience
        self.batch_size, self.lr, self.weight_decay = batch_size, lr, weight_decay
        self.every, self.class_weight = every, class_weight
        self.device, self.random_state = device, random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DoubleHeadClassifier:
        """Train and calibrate the network on arrays or DataFrames; labels may be strings."""
        if self.calibrate not in ("after", "beside"):
            raise ValueError(f"calibrate must be 'after' or 'beside', got {self.calibrate!r}")
        X, y = _checks.validate_data(self, X, y, **self._wanted())
        _targets.check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least 2 classes, got one class: {self.classes_.tolist()}"
            )
        weights = _checks._check_sample_weight(sample_weight, X, dtype=np.float32, ensure_non_negative=True)
        used = np.flatnonzero(weights)  # a sample without weight is no part of the data
        weights = weights * _weights.compute_sample_weight(self.class_weight, y)
        seed = int(_utils.check_random_state(self.random_state).randint(2**31 - 1))
        learn, hold = (used[rows] for rows in hold_out(labels[used], self.calib_share, seed))
        inputs = self._tensor(X)
        targets = torch.from_numpy(labels.astype(np.int64)).to(self.device)
        counts = torch.from_numpy(weights.astype(np.float32)).to(self.device)
        data, calib = (TensorDataset(inputs[rows], targets[rows], counts[rows]) for rows in (learn, hold))
        with seeded(seed, torch.device(self.device)):
            self.model_, self.n_epochs_ = train(self._network(inputs[learn]), data, calib, self, seed)
        return self

    def predict_log_proba(self, X: Any) -> Any:
        """(N, K) calibrated log-probabilities, columns in the order of `classes_`."""
        _checks.check_is_fitted(self)
        X = _checks.validate_data(self, X, reset=False, **self._wanted())
        return _log_probs(self.model_, self._tensor(X)).numpy()

    def _wanted(self) -> dict[str, Any]:
        if self.module is None:
            return {"dtype": np.float32}
        return {"dtype": "numeric", "allow_nd": True, "ensure_2d": False}

    def _tensor(self, X: Any) -> Tensor:
        array = np.ascontiguousarray(X)
        kind = np.int64 if self.module is not None and array.dtype.kind in "iu" else np.float32
        return torch.from_numpy(array.astype(kind)).to(self.device)

    def _network(self, inputs: Tensor) -> nn.Module:
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module).to(self.device)  # the estimator's parameter stays unchanged
        if self.module is None:
            return mlp(self.hidden, inputs.cpu(), len(self.classes_)).to(self.device)
        return self.module(inputs.shape[1], len(self.classes_)).to(self.device)


class CalibratedClassifier(_base.MetaEstimatorMixin, _Classifier):  # type: ignore[misc]
    """Any classifier with any of `doublehead.calibrators` behind it, fitted on a held-back share of the data.

    The staged head is the default. Use it as the last step of a Pipeline, or around one. The estimator's
    `predict_proba`, or else its `decision_function`, is what the calibrator reads. The `sample_weight` of `fit` goes to
    the estimator; calibration takes the held-back data as it is, without samples of weight 0.

    >>> from sklearn.naive_bayes import GaussianNB
    >>> x = np.random.default_rng(0).normal(size=(300, 2))
    >>> model = CalibratedClassifier(GaussianNB(), random_state=0).fit(x, x[:, 0] > 0.3)
    >>> model.predict_proba(x[:2]).shape
    (2, 2)
    """

    def __init__(
        self,
        estimator: Any,
        calibrator: Calibrator | None = None,
        *,
        calib_share: float = 0.2,
        random_state: Any = None,
    ) -> None:
        self.estimator, self.calibrator = estimator, calibrator
        self.calib_share, self.random_state = calib_share, random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> CalibratedClassifier:
        """Fit the estimator on one part and the calibrator on its scores for the other."""
        X, y = _utils.indexable(X, y)
        y = _utils.column_or_1d(y, warn=True)
        _targets.check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        seed = int(_utils.check_random_state(self.random_state).randint(2**31 - 1))
        weights = None if sample_weight is None else _checks._check_sample_weight(sample_weight, X)
        used = np.arange(len(y)) if weights is None else np.flatnonzero(weights)
        learn, hold = (used[rows] for rows in hold_out(labels[used], self.calib_share, seed))
        take = _utils._safe_indexing
        options = {} if weights is None else {"sample_weight": weights[learn]}
        self.estimator_ = _base.clone(self.estimator).fit(take(X, learn), take(y, learn), **options)
        self.classes_ = self.estimator_.classes_
        if hasattr(self.estimator_, "n_features_in_"):
            self.n_features_in_ = self.estimator_.n_features_in_
        if len(self.classes_) != len(classes):
            missing = sorted(set(classes.tolist()) - set(self.classes_.tolist()))
            raise ValueError(f"every class must have a sample left to train on, got none of {missing}")
        calibrator = Head() if self.calibrator is None else self.calibrator.fresh()
        logits = _logits(self.estimator_, take(X, hold))
        self.calibrator_ = calibrator.fit(Predictions(logits, labels[hold]))
        return self

    def predict_log_proba(self, X: Any) -> Any:
        """(N, K) calibrated log-probabilities, columns in the order of `classes_`."""
        _checks.check_is_fitted(self)
        with torch.no_grad():
            return self.calibrator_(torch.from_numpy(_logits(self.estimator_, X))).log_softmax(1).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags = _utils.get_tags(self.estimator).input_tags
        return tags


def ece_scorer(estimator: Any, X: Any, y: Any, n_bins: int = 15) -> float:
    """A scorer for `cross_val_score`, `GridSearchCV` and the like: minus ECE, so that greater is better."""
    classes = np.asarray(estimator.classes_)
    labels = np.searchsorted(classes, np.asarray(y))
    if (classes[labels.clip(max=len(classes) - 1)] != np.asarray(y)).any():
        raise ValueError("y must hold no class that the estimator was not fitted on")
    return -float(ece(Predictions.from_probs(estimator.predict_proba(X), labels), n_bins))


def hold_out(labels: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Rows to learn from and rows to hold back, in each class's proportion."""
    n = len(labels)
    if n < 2 or not 0 < share < 1:
        raise ValueError(
            f"calib_share must leave samples on both sides: it is {share} of n_samples = {n}; at least 2 are needed"
        )
    return split_rows(labels, min(max(1, round(share * n)), n - 1), seed)


def _logits(estimator: Any, X: Any) -> Any:
    """(N, K) float64 scores whose softmax are the estimator's own probabilities, or its decision values."""
    if hasattr(estimator, "predict_proba"):
        probs = np.asarray(estimator.predict_proba(X), dtype=np.float64)
        return np.log(np.clip(probs, np.finfo(np.float64).tiny, None))
    if not hasattr(estimator, "decision_function"):
        raise TypeError(
            f"estimator must have predict_proba or decision_function, {type(estimator).__name__} has neither"
        )
    values = np.asarray(estimator.decision_function(X), dtype=np.float64)
    return np.stack([np.zeros_like(values), values], 1) if values.ndim == 1 else values


# --- a network on arrays


def mlp(hidden: Sequence[int], inputs: Tensor, n_classes: int) -> nn.Module:
    """Layers with ReLU between, on features brought to mean 0 and deviation 1 by the moments of `inputs` (N, F)."""
    standardise, sizes = Standardise(inputs.shape[1]), [inputs.shape[1], *hidden]
    standardise.set_moments(inputs)
    layers = [part for pair in zip(sizes, hidden) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(standardise, *layers, nn.Linear(sizes[-1], n_classes))


def train(
    net: nn.Module, data: TensorDataset, calib: TensorDataset, how: DoubleHeadClassifier, seed: int
) -> tuple[Calibrated, int]:
    """The trained and calibrated network, and how many epochs it took. Call it with the random seed set.

    Both parts hold inputs, labels and weights. The weights count in the network's loss, on which training stops early,
    and not in the calibration. The network is kept as it was after the epoch with the lowest loss on `calib`.
    """
    batch_size, calib_data = min(how.batch_size, len(data)), calib.tensors[:2]
    last_alone = len(data) % batch_size == 1  # which BatchNorm refuses
    batches = DataLoader(data, batch_size, shuffle=True, drop_last=last_alone)
    optimizer = torch.optim.Adam(net.parameters(), how.lr, weight_decay=how.weight_decay)
    double = None
    if how.calibrate == "beside":
        double = DoubleHead(net, calib_data, follow=optimizer, every=how.every, steps=len(batches), seed=seed)

    def whole() -> nn.Module:  # the network and the heads, which `bank` brings up to date
        return nn.ModuleList([net] if double is None else [net, double.bank])

    best, kept, best_epoch, epoch = float("inf"), whole().state_dict(), 0, 0
    while epoch < how.epochs and epoch - best_epoch < how.patience:
        net.train()
        for x, y, weights in batches:
            optimizer.zero_grad()
            _loss(net(x), y, weights).backward()
            optimizer.step()
            if double is not None:
                double.step()
        epoch += 1
        x, y, weights = calib.tensors
        with evaluating(net), torch.no_grad():
            now = float(_loss(net(x), y, weights))
        if now < best:
            best, kept, best_epoch = now, copy.deepcopy(whole().state_dict()), epoch
    whole().load_state_dict(kept)
    if double is None:
        return calibrate(net, calib_data, seed=seed), epoch
    return double.finish(seed=seed), epoch


def _loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the cross entropy; 0 for a batch without any weight."""
    scores = class_scores(logits, recognise_task(logits, labels))  # one logit is read as two classes
    losses = F.cross_entropy(scores, labels, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


@torch.no_grad()
def _log_probs(model: Calibrated, inputs: Tensor) -> Tensor:
    """(N, K) calibrated log-probabilities in float64."""
    parts = []
    for rows in inputs.split(ROWS):
        padded = torch.cat([rows, rows[:1].expand(ROWS - len(rows), *rows.shape[1:])])
        parts.append(model.heads(padded).calib[: len(rows)].double().log_softmax(1).cpu())
    return torch.cat(parts)
