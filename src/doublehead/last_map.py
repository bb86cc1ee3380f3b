"""What comes after a calibration head: one temperature, and with enough data a smooth curve.

One temperature changes all confidences by one law. Where calibration data show another law, the log probabilities are
then corrected by a smooth curve, the same for all classes: the posterior mean of `calibrators.GaussianProcess`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.calibrators.base import NotConverged
from doublehead.calibrators.choose import choose
from doublehead.calibrators.gaussian_process import LOWEST, GaussianProcess
from doublehead.calibrators.maps import Places, keep_top
from doublehead.calibrators.temperature import Temperature, fit_inverse_temperature
from doublehead.plumbing import one_thread
from doublehead.predictions import Predictions

ENOUGH = 1_000  # samples to try a curve with; with fewer it was no better than the temperature alone
PLENTY = 10_000  # samples that a curve of a dozen free numbers can make use of
LEAST = 0.5  # standard errors by which it must win: 0 let losses through, 1 missed gains
N_POINTS = 256


class LastMap(nn.Module):
    """Logits (..., K) -> logits (..., K) of the same predictions: times `scale`, then bent by `curve` if it has one.

    Fresh it changes nothing. `fit` sets the scale to the best scalar temperature's inverse. From 1,000 samples on it
    tries a curve too, a function of the log probabilities, given on the even `grid`: it is kept if on held-back folds
    its NLL is lower than the temperature's, by half a standard error at least.

    >>> logits = 3 * torch.randn(1_000, 5)
    >>> labels = torch.multinomial(0.8 * logits.softmax(1) + 0.2 / 5, 1)[:, 0]  # one in five at random
    >>> last = LastMap().fit(logits, labels)
    >>> last.bends, bool((last(logits).argmax(1) == logits.argmax(1)).all())
    (True, True)
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("grid", torch.linspace(LOWEST, 0, N_POINTS))
        self.register_buffer("curve", torch.zeros(N_POINTS))
        self.scale: Tensor
        self.grid: Tensor
        self.curve: Tensor
        self.bends = False  # whether there is a curve: known without a look at the device

    def forward(self, logits: Tensor) -> Tensor:
        """The same predictions with other confidences."""
        logits = logits * self.scale
        return bend(logits, self.grid, self.curve) if self.bends else logits

    @torch.no_grad()
    def fit(self, logits: Tensor, labels: Tensor) -> LastMap:
        """Learn from logits (N, K) and labels (N,) that the network was not trained on; nothing earlier stays."""
        logits = logits.float()
        self.load_state_dict(LastMap().state_dict())
        self.scale.copy_(fit_inverse_temperature(logits, labels))
        if len(labels) < ENOUGH:
            return self
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:PLENTY]
        # On the CPU: the fit needs float64, which not all devices have, and hundreds of short steps.
        some = Predictions(logits.cpu()[rows], labels.cpu()[rows])
        with one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConverged)  # how good it is, is measured
            found = choose(some, {"temperature": Temperature(), "curve": GaussianProcess(n_table=N_POINTS)})
        second = found.scores[-1]
        if isinstance(found.calibrator, GaussianProcess) and second.behind > LEAST * second.behind_error:
            self.scale.copy_(found.calibrator.temperature_.reciprocal())
            self.grid.copy_(found.calibrator.inputs_[0])
            self.curve.copy_(found.calibrator.values_[0])
            self.bends = True
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.bends = bool(self.curve.any())

    def extra_repr(self) -> str:
        """Its temperature, and whether it has a curve."""
        return f"temperature={1 / float(self.scale):.4g}, {'with a' if self.bends else 'no'} curve"


def bend(logits: Tensor, grid: Tensor, curve: Tensor) -> Tensor:
    """Log probabilities (..., K) plus a function of them that has the values `curve` on `grid`; predictions stay."""
    log_probs = logits.log_softmax(-1)
    return keep_top(log_probs + Places.of(log_probs, grid).values_of(curve), logits)
