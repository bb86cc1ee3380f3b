"""Several labels per sample: a calibration shared by all labels, and a map for each label where that is better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from doublehead.calibrators.base import Calibrator, keep_top
from doublehead.calibrators.choose import Choice, choose
from doublehead.calibrators.head import Head
from doublehead.calibrators.optimise import fit_logistic
from doublehead.calibrators.temperature import Identity, Temperature
from doublehead.predictions import Predictions
from doublehead.score_arrays import Target

if TYPE_CHECKING:
    from typing_extensions import Self

SHARED = {"head": Head, "temperature": Temperature, "none": Identity}
RIDGE = 10.0  # samples: each label's map is pulled towards no change with the weight of this many
MARGIN = 2.0  # standard errors by which maps of their own must be better than sharing
FOLDS = 5


class PerLabel(Calibrator):
    """One calibrator for the yes or no of all labels, then for each label a scale and a shift of its log-odds.

    `share` is fitted to all pairs of a sample and a label together ("head", "temperature" or "none"). The maps of the
    labels are pulled towards no change, so a label with few samples shares what the others learned; with "temperature"
    they have no shift, and are temperatures of their own. `own="auto"` uses them where that is better on held-back
    samples; `choice` says by how much. With predictions of one label, or of classes, it is the shared calibrator alone.

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
        own: bool | Literal["auto"] = "auto",
        keep: Literal["predictions", "best"] = "predictions",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if share not in SHARED:
            raise ValueError(f"share must be one of {sorted(SHARED)} for several labels, got {share!r}")
        self.share, self.own, self.keep, self.seed = share, own, keep, seed
        self.shared: Calibrator = SHARED[share](**({"keep": keep, "seed": seed} if share == "head" else {}))

    def fit(self, predictions: Predictions, *, opinion: Tensor | None = None) -> Self:
        """Learn from predictions the network was not trained on.

        `opinion` (N L, 2) is what heads trained beside the network say of them, as for `Head`.
        """
        return self._fit(predictions, opinion=opinion)

    def _learn(self, predictions: Predictions, opinion: Tensor | None = None) -> dict[str, Any]:
        known = {"opinion": opinion} if self.share == "head" else {}
        self.shared.fit(predictions, **known)
        n_labels = predictions.n_labels or 1
        like = predictions.logits.new_ones(n_labels).double()
        maps = like, torch.zeros_like(like)
        if predictions.n_labels and self.own:
            odds = _log_odds(self.shared(predictions.logits, **known)).double().reshape(-1, n_labels)
            truth, weights = _truth(predictions.target, n_labels)
            maps = _fit_maps(odds, truth, weights, self.share != "temperature")
            if self.own == "auto" and not self._pays(predictions, odds, truth, weights):
                maps = like, torch.zeros_like(like)
        return {"scale_": maps[0], "shift_": maps[1]}

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
            mapped = _log_odds(keep_top(_pair(mapped), p.logits.reshape(n, -1, 2)))
        nlls = {
            name: (torch.nn.functional.softplus(z) - truth * z).mul(weights).mean(1)  # (N,) of each sample
            for name, z in (("shared", odds), ("own", mapped))
        }
        self.choice = choose(nlls, ["shared"], MARGIN)
        return self.choice.chosen == "own"

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
        odds = _log_odds(rows) * self.scale_.to(rows.dtype) + self.shift_.to(rows.dtype)
        mapped = _pair(odds).reshape(logits.shape)
        return keep_top(mapped, logits) if self.keep == "predictions" else mapped

    @property
    def keeps_argmax(self) -> bool:
        """Whether no yes becomes a no."""
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


def _log_odds(logits: Tensor) -> Tensor:
    return logits[..., 1] - logits[..., 0]


def _pair(odds: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(odds), odds], -1)


def _truth(target: Target, n_labels: int) -> tuple[Tensor, Tensor]:
    """(N, L) each: the probability of a yes and the weight."""
    yes = target.labels.double() if target.probs is None else target.probs[:, 1].double()
    weights = torch.ones_like(yes) if target.weights is None else target.weights.double()
    return yes.reshape(-1, n_labels), weights.reshape(-1, n_labels)


def _fit_maps(odds: Tensor, truth: Tensor, weights: Tensor, shifts: bool) -> tuple[Tensor, Tensor]:
    """(L,) scale a and shift b of each label: a z + b of the lowest NLL, pulled towards z."""
    z = odds.double().T  # (L, N)
    features = torch.stack([z, torch.ones_like(z)][: 1 + shifts], -1)
    towards = z.new_tensor([[1.0, 0.0][: 1 + shifts]]).expand(len(z), -1)
    known = weights.T * z.sigmoid() * (1 - z.sigmoid())
    ridge = (RIDGE * (known[..., None] * features.square()).mean(1) + 1e-6) / z.shape[1]
    w, _, _ = fit_logistic(features, truth.T, towards=towards, ridge=ridge, weights=weights.T)
    return w[:, 0], w[:, 1] if shifts else torch.zeros_like(w[:, 0])
