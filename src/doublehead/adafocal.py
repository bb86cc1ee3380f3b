"""AdaFocal (Ghosh et al. 2022): a focal loss whose gamma follows the calibration error of held-out data, bin by bin.

The losses of `doublehead.losses` are functions of a batch; this one remembers something as well, so it is a module.
Call it like those, and give it predictions of the calibration data after each epoch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from doublehead.losses import _check, _complement, _nll, _prepare
from doublehead.predictions import Predictions


class AdaFocal(nn.Module):
    """(logits, labels) -> (B,): cross entropy times (1 - p)^gamma, or (1 + p)^|gamma| where gamma is below 0.

    p is the probability of the label, and gamma that of the bin in which p lies. `update` makes `n_bins` bins of equal
    counts of the confidences of calibration data, and changes each gamma by a factor of exp(rate * (confidence -
    accuracy)) of its bin: where the network is too sure, gamma grows and the loss asks less of samples that are nearly
    right. A gamma within `switch` of 0 changes its sign; the inverse focal loss of negative ones makes a network
    surer. All settings are the published ones.

    >>> loss = AdaFocal()
    >>> loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))  # gamma 1 to begin with
    tensor([0.3466])
    >>> loss.update(Predictions([[5.0, 0.0]] * 30, [0] * 15 + [1] * 15))  # half right, and sure of it
    >>> bool((loss.gammas > 1.6).all())
    True
    """

    def __init__(
        self,
        n_bins: int = 15,
        rate: float = 1.0,
        gamma: float = 1.0,
        least: float = -2.0,
        most: float = 20.0,
        switch: float = 0.2,
    ) -> None:
        super().__init__()
        _check("n_bins", n_bins, n_bins >= 1 and n_bins == int(n_bins), "a whole number of at least 1")
        _check("rate", rate, rate > 0, "above 0")
        _check("switch", switch, switch > 0, "above 0")
        _check("least", least, least <= -switch, f"at most -switch, {-switch:g}")
        _check("most", most, most >= switch, f"at least switch, {switch:g}")
        _check("gamma", gamma, least <= gamma <= most, f"between least and most, {least:g} and {most:g}")
        self.n_bins, self.rate, self.least, self.most, self.switch = int(n_bins), rate, least, most, switch
        self.register_buffer("edges", torch.linspace(0, 1, self.n_bins + 1)[1:-1])
        self.register_buffer("gammas", torch.full((self.n_bins,), float(gamma)))
        self.edges: Tensor  # (n_bins - 1,) between the bins
        self.gammas: Tensor  # (n_bins,)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """One number per example; the gammas are constants to the gradient."""
        log_probs, labels = _prepare(logits, labels)
        nll = _nll(log_probs, labels)
        p = (-nll).exp()
        gamma = self.gammas[torch.bucketize(p.detach(), self.edges.to(p.dtype))].to(p.dtype)
        focal = _complement(-nll).pow(gamma.clamp(min=0))
        return torch.where(gamma < 0, (1 + p).pow(gamma.clamp(max=0).abs()), focal) * nll

    @torch.no_grad()
    def update(self, calib: Predictions) -> None:
        """Let each gamma follow how much too sure the network is in its bin of the calibration data."""
        if len(calib) < self.n_bins:
            raise ValueError(f"calib must hold at least {self.n_bins} samples, one a bin, got {len(calib)}")
        confidence, order = calib.confidence.double().sort()
        values, tied = confidence.unique_consecutive(return_inverse=True)
        sums = torch.zeros_like(values).index_add(0, tied, calib.correct[order].double())
        # Equal confidences have no order: each is as right as all of them.
        correct = (sums / tied.bincount())[tied]
        excess = torch.stack([part.mean() for part in (confidence - correct).tensor_split(self.n_bins)])
        ends = torch.stack([part[[0, -1]] for part in confidence.tensor_split(self.n_bins)])
        self.edges.copy_((ends[:-1, 1] + ends[1:, 0]) / 2)
        growth = (self.rate * excess.to(self.gammas) * self.gammas.sign()).exp()
        gammas = (self.gammas * growth).clamp(self.least, self.most)
        self.gammas.copy_(torch.where(gammas.abs() < self.switch, -self.switch * gammas.sign(), gammas))

    def extra_repr(self) -> str:
        """The settings, for print(loss)."""
        names = ("n_bins", "rate", "least", "most", "switch")
        return ", ".join(f"{name}={getattr(self, name):g}" for name in names)
