"""Losses: pure functions `(logits, labels, *, hyperparameters) -> (B,)`, one number per example.

Reduce once, with `.mean()`. MMCE, soft-binned ECE and AvUC add a term of the whole batch: the scalar, times its
weight, is added to the cross entropy of every example, so that `.mean()` is cross entropy + weight * term.

Labels are integers (B,); cross entropy, label smoothing, Brier and the entropy penalty also take soft targets (B, K).
Half precision is widened to float32, float64 is kept; the result has the widened type. No loss synchronises with the
device or has a shape that depends on the data, so all of them run inside a CUDA graph. For this reason label values
are not checked: one out of range, including -100, fails in the indexing.

`AdaFocal` is a module with the same call: it also keeps a state that follows the calibration data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from doublehead.predictions import Predictions

FLOOR = 1e-12  # under a root: keeps its gradient finite if the batch is perfectly calibrated
MMCE_PUBLISHED_FLOOR = 1e-10  # of the published code, whose term is small enough for it to matter
AVUC_FLOOR = 1e-10  # of the published code: the term is at most about 23
MIN_GAMMA, MAX_GAMMA, SWITCH = -2.0, 20.0, 0.2  # of AdaFocal


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The negative log-probability of the label, or its expectation for soft targets.

    >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.6931])
    """
    log_probs, labels = _prepare(logits, labels, soft=True)
    return _nll(log_probs, labels)


def label_smoothing(logits: Tensor, labels: Tensor, *, epsilon: float = 0.05) -> Tensor:
    """Cross entropy against (1 - epsilon) * target + epsilon / K (Szegedy et al. 2016; Mueller et al. 2019).

    The default is that of Mukhoti et al. 2020 (LS-0.05).

    >>> label_smoothing(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), epsilon=0.5)
    tensor([0.6931])
    """
    _check("epsilon", epsilon, 0 <= epsilon <= 1, "in 0..1")
    log_probs, labels = _prepare(logits, labels, soft=True)
    return (1 - epsilon) * _nll(log_probs, labels) - epsilon * log_probs.mean(1)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """The squared distance of the probabilities from the target, summed over classes (0 to 2; Brier 1950).

    >>> brier(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.5000])
    """
    log_probs, labels = _prepare(logits, labels, soft=True)
    targets = labels if labels.ndim == 2 else _one_hot(labels, log_probs)
    return (log_probs.exp() - targets).square().sum(1)


def focal(logits: Tensor, labels: Tensor, *, gamma: float = 3.0) -> Tensor:
    """Cross entropy times (1 - p_label)^gamma (Lin et al. 2017; for calibration Mukhoti et al. 2020, gamma 3).

    >>> focal(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), gamma=1.0)
    tensor([0.3466])
    """
    _check("gamma", gamma, gamma >= 0, ">= 0")
    log_probs, labels = _prepare(logits, labels)
    nll = _nll(log_probs, labels)
    return _complement(-nll).pow(gamma) * nll


def flsd53(logits: Tensor, labels: Tensor) -> Tensor:
    """Focal loss with a sample-dependent gamma: 5 where p_label < 0.2, else 3 (FLSD-53, Mukhoti et al. 2020).

    >>> flsd53(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.0866])
    """
    log_probs, labels = _prepare(logits, labels)
    nll = _nll(log_probs, labels)
    rest = _complement(-nll)
    return torch.where(nll > math.log(5), rest.pow(5), rest.pow(3)) * nll  # p < 0.2 is nll > log 5


def entropy_penalty(logits: Tensor, labels: Tensor, *, weight: float = 0.1) -> Tensor:
    """Cross entropy - weight * entropy of the probabilities (the confidence penalty of Pereyra et al. 2017).

    The default is theirs for CIFAR-10.

    >>> entropy_penalty(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), weight=1.0)
    tensor([0.])
    """
    log_probs, labels = _prepare(logits, labels, soft=True)
    return _nll(log_probs, labels) - weight * _entropy(log_probs)


def mse_logits(logits: Tensor, labels: Tensor, *, k: float = 1.0, m: float = 1.0) -> Tensor:
    """Squared error on the logits: (k * (z_label - m)^2 + sum of the other z^2) / K (Hui and Belkin 2021).

    k is the weight of the true class and m its target; the target of the others is 0. They use k = m = 1 for up to
    about forty classes and k = 15, m = 30 for ImageNet. At m = 1 the softmax of the logits is nearly flat: fit a
    temperature before using it as a confidence.

    >>> mse_logits(torch.tensor([[0.5, 3.0]]), torch.tensor([1]))
    tensor([2.1250])
    """
    _check("k", k, k > 0, "> 0")
    log_probs, labels = _prepare(logits, labels)
    true = _one_hot(labels, log_probs)  # (B, K)
    return ((logits.to(true.dtype) - m * true).square() * (1 + (k - 1) * true)).mean(1)


def mmce(logits: Tensor, labels: Tensor, *, weight: float = 2.0, width: float = 0.4) -> Tensor:
    """Cross entropy + weight * MMCE, the maximum mean calibration error (Kumar et al. 2018).

    With confidence r, correctness c and the kernel k(a, b) = exp(-|a - b| / width), MMCE is the square root of
    sum_ij (c_i - r_i)(c_j - r_j) k(r_i, r_j) / B^2.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])  # confidence 0.5 twice, correct once
    >>> mmce(logits, torch.tensor([0, 1])).mean()
    tensor(0.6931)
    """
    _check("width", width, width > 0, "> 0")
    log_probs, labels = _prepare(logits, labels)
    confidence, rest, correct = _top(log_probs, labels)
    gap = torch.where(correct, rest, -confidence)  # c - r
    return _nll(log_probs, labels) + weight * _mmce_term(confidence, gap / len(gap), width, FLOOR)


def mmce_published(logits: Tensor, labels: Tensor, *, weight: float = 2.0, width: float = 0.4) -> Tensor:
    """Cross entropy + weight * MMCE_w as the published code computes it: divided by the pair counts twice.

    MMCE_w divides correct and wrong predictions by their own counts. The code of Kumar et al. and of Mukhoti et al.
    averages over pairs and then divides by their number again; published MMCE results were trained with it. The term
    is not a calibration error, and is 0 if a batch has only correct or only wrong predictions.
    """
    _check("width", width, width > 0, "> 0")
    log_probs, labels = _prepare(logits, labels)
    confidence, rest, correct = _top(log_probs, labels)
    n_correct = correct.sum()
    n_wrong = len(correct) - n_correct
    n_alike = torch.where(correct, n_correct, n_wrong).to(confidence.dtype)
    scaled = torch.where(correct, rest, -confidence) / n_alike.square()
    term = _mmce_term(confidence, scaled, width, MMCE_PUBLISHED_FLOOR) * ((n_correct > 0) & (n_wrong > 0))
    return _nll(log_probs, labels) + weight * term


def soft_ece(
    logits: Tensor, labels: Tensor, *, weight: float = 1.0, n_bins: int = 15, temperature: float = 0.01
) -> Tensor:
    """Cross entropy + weight * soft-binned ECE in the l2 norm (SB-ECE, Karandikar et al. 2021).

    A confidence r belongs to bin j with centre x_j by softmax_j(-(r - x_j)^2 / temperature); the term is the root of
    sum_j size_j / B * (accuracy_j - confidence_j)^2. At temperature 0 it is the binned ECE2. They tune weight and
    temperature per data set.
    """
    _check("n_bins", n_bins, n_bins >= 1, ">= 1")
    _check("temperature", temperature, temperature > 0, "> 0")
    log_probs, labels = _prepare(logits, labels)
    confidence, rest, correct = _top(log_probs, labels)
    gap = torch.where(correct, rest, -confidence)  # c - r
    centres = (torch.arange(n_bins, device=gap.device, dtype=gap.dtype) + 0.5) / n_bins
    share = (-(confidence[:, None] - centres).square() / temperature).softmax(1)  # (B, n_bins)
    size = share.sum(0).clamp(min=1e-12)  # (n_bins,); an empty bin has no weight
    gaps = (share * gap[:, None]).sum(0) / size  # (n_bins,) accuracy - confidence
    term = ((size * gaps.square()).sum() / len(gap) + FLOOR).sqrt()
    return _nll(log_probs, labels) + weight * term


def avuc(
    logits: Tensor, labels: Tensor, *, weight: float = 1.0, threshold: float | Tensor | None = None
) -> Tensor:
    """Cross entropy + weight * AvUC, accuracy versus uncertainty calibration (Krishnan and Tickoo 2020).

    AvUC = log(1 + (n_au + n_ic) / (n_ac + n_iu)) with soft counts of accurate/inaccurate and certain/uncertain
    predictions: each counts r if accurate, 1 - r if not, times tanh(u) if uncertain, 1 - tanh(u) if not. They sample
    several networks; here the uncertainty u is the entropy (in nats) of one softmax. An example is certain if u is at
    most `threshold`, by default halfway between the mean u of accurate and of inaccurate predictions in the batch.
    """
    log_probs, labels = _prepare(logits, labels)
    confidence, rest, correct = _top(log_probs, labels)
    uncertainty = _entropy(log_probs)
    if threshold is None:
        u, kinds = uncertainty.detach(), torch.stack([correct, ~correct]).to(uncertainty.dtype)  # (2, B)
        means = (kinds * u).sum(1) / kinds.sum(1).clamp(min=1)
        threshold = means.sum() / (kinds.sum(1) > 0).sum()  # the one mean if one kind is missing
    certain = uncertainty.detach() <= threshold
    weight_uncertain = uncertainty.tanh()
    counts = torch.where(correct, confidence, rest)  # (B,)
    counts = counts * torch.where(certain, 1 - weight_uncertain, weight_uncertain)
    good = (counts * (correct == certain)).sum()
    term = ((counts.sum() + AVUC_FLOOR) / (good + AVUC_FLOOR)).log()
    return _nll(log_probs, labels) + weight * term


LOSSES: dict[str, Callable[..., Tensor]] = {  # first the columns of the paper's table
    "cross_entropy": cross_entropy,
    "mmce": mmce,
    "mmce_published": mmce_published,
    "brier": brier,
    "focal": focal,
    "flsd53": flsd53,
    "label_smoothing": label_smoothing,
    "avuc": avuc,
    "soft_ece": soft_ece,
    "entropy_penalty": entropy_penalty,
    "mse_logits": mse_logits,
}


class AdaFocal(nn.Module):
    """AdaFocal (Ghosh et al. 2022): focal loss whose gamma follows the calibration error of held-out data, per bin.

    (logits, labels) -> (B,): cross entropy times (1 - p)^gamma, or (1 + p)^|gamma| for gamma < 0, where p is the
    probability of the label and gamma that of the bin of p. Call `update` with predictions of the calibration data
    after each epoch. It makes `n_bins` bins of equal counts of their confidences and multiplies each gamma by
    exp(rate * (confidence - accuracy)) of its bin, so that gamma grows where the network is overconfident. A gamma
    closer to 0 than 0.2 changes its sign; negative gammas raise the confidence. All gammas lie in -2..20. These
    numbers and the defaults are the published ones.

    >>> loss = AdaFocal()
    >>> loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))  # gamma is 1 at first
    tensor([0.3466])
    >>> loss.update(Predictions([[5.0, 0.0]] * 30, [0] * 15 + [1] * 15))  # confidence 0.99, accuracy 0.5
    >>> bool((loss.gammas > 1.6).all())
    True
    """

    def __init__(self, n_bins: int = 15, rate: float = 1.0, gamma: float = 1.0) -> None:
        super().__init__()
        _check("n_bins", n_bins, n_bins >= 1 and n_bins == int(n_bins), "an integer >= 1")
        _check("rate", rate, rate > 0, "> 0")
        _check("gamma", gamma, MIN_GAMMA <= gamma <= MAX_GAMMA, f"in {MIN_GAMMA:g}..{MAX_GAMMA:g}")
        self.n_bins, self.rate = int(n_bins), rate
        self.register_buffer("edges", torch.linspace(0, 1, self.n_bins + 1)[1:-1])
        self.register_buffer("gammas", torch.full((self.n_bins,), float(gamma)))
        self.edges: Tensor  # (n_bins - 1,) inner edges of the bins
        self.gammas: Tensor  # (n_bins,)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """One number per example; no gradient flows through the gammas."""
        log_probs, labels = _prepare(logits, labels)
        nll = _nll(log_probs, labels)
        p = (-nll).exp()
        gamma = self.gammas[torch.bucketize(p.detach(), self.edges.to(p.dtype))].to(p.dtype)
        factor = _complement(-nll).pow(gamma.clamp(min=0))
        return torch.where(gamma < 0, (1 + p).pow(gamma.clamp(max=0).abs()), factor) * nll

    @torch.no_grad()
    def update(self, calib: Predictions) -> None:
        """Adapt the bins and their gammas to predictions of the calibration data."""
        if len(calib) < self.n_bins:
            raise ValueError(f"calib must have at least {self.n_bins} samples, one per bin, got {len(calib)}")
        confidence, correct = (column.double() for column in calib.top_label())
        confidence, order = confidence.sort()
        values, tied = confidence.unique_consecutive(return_inverse=True)
        sums = torch.zeros_like(values).index_add(0, tied, correct[order])
        # Ties have no order, so each gets the mean accuracy of its tie.
        correct = (sums / tied.bincount())[tied]
        excess = torch.stack([part.mean() for part in (confidence - correct).tensor_split(self.n_bins)])
        ends = torch.stack([part[[0, -1]] for part in confidence.tensor_split(self.n_bins)])
        self.edges.copy_((ends[:-1, 1] + ends[1:, 0]) / 2)
        growth = (self.rate * excess.to(self.gammas) * self.gammas.sign()).exp()
        gammas = (self.gammas * growth).clamp(MIN_GAMMA, MAX_GAMMA)
        self.gammas.copy_(torch.where(gammas.abs() < SWITCH, -SWITCH * gammas.sign(), gammas))


class MixedLabels(NamedTuple):
    """The labels of a mixed batch: weight `share` for `first`, 1 - share for `second`."""

    first: Tensor  # (B,)
    second: Tensor  # (B,)
    share: Tensor  # (), in 0..1


def mixup(
    inputs: Tensor, labels: Tensor, *, alpha: float = 0.2, generator: torch.Generator | None = None
) -> tuple[Tensor, MixedLabels]:
    """Mix each example with another one of the batch, in one proportion drawn from Beta(alpha, alpha).

    Zhang et al. 2018; Thulasidasan et al. 2019 find that it improves calibration for alpha between 0.1 and 0.4. Draws
    are made on the device of the generator, or of the inputs. Train with `mixed(loss, logits, labels)`.

    >>> x, y = mixup(torch.eye(4), torch.arange(4), generator=torch.Generator().manual_seed(0))
    >>> bool(torch.allclose(x.sum(1), torch.ones(4))), mixed(brier, x, y).shape
    (True, torch.Size([4]))
    """
    _check("alpha", alpha, alpha > 0, "> 0")
    if not inputs.is_floating_point():
        raise TypeError(f"inputs must be floating-point, got {_name(inputs.dtype)}")
    device = inputs.device if generator is None else generator.device
    # Beta by two Gamma draws: torch.distributions.Beta takes no generator. One of a small alpha would be 0; one of
    # alpha + 1, times U^(1 / alpha) with U uniform, has the same distribution and a finite logarithm.
    more = torch._standard_gamma(torch.full((2,), alpha + 1, device=device), generator)
    uniform = 1 - torch.rand(2, generator=generator, device=device)
    one, other = (more.log() + uniform.log() / alpha).unbind()
    share = (one - other).sigmoid().to(inputs.device)
    order = torch.randperm(len(inputs), device=device, generator=generator).to(inputs.device)
    mixture = share.to(inputs.dtype) * inputs + (1 - share).to(inputs.dtype) * inputs[order]
    return mixture, MixedLabels(labels, labels[order], share)


def mixed(loss: Callable[..., Tensor], logits: Tensor, labels: MixedLabels, **hyper: float) -> Tensor:
    """The loss of a mixed batch: `loss` for both sets of labels, weighted by their shares."""
    first, second, share = labels
    return share * loss(logits, first, **hyper) + (1 - share) * loss(logits, second, **hyper)


def _prepare(logits: Tensor, labels: Tensor, soft: bool = False) -> tuple[Tensor, Tensor]:
    """Check shapes and types; return log-probabilities (B, K) and int64 labels (B,) or soft targets (B, K)."""
    if logits.ndim != 2 or logits.shape[0] < 1 or logits.shape[1] < 2:
        raise ValueError(f"logits must have shape (B, K) with B >= 1 and K >= 2, got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating-point, got {_name(logits.dtype)}")
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs = logits.log_softmax(1, dtype=wide)
    if labels.is_floating_point() and soft and labels.shape == logits.shape:
        return log_probs, labels.to(wide)
    shape = f"({len(logits)},)" + (f", or soft targets of shape {tuple(logits.shape)}" if soft else "")
    if labels.is_floating_point() or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels must be integers of shape {shape} for logits of shape {tuple(logits.shape)}, "
            f"got {_name(labels.dtype)} of shape {tuple(labels.shape)}"
        )
    return log_probs, labels.long()


def _check(name: str, value: float, fits: bool, want: str) -> None:
    if not fits:
        raise ValueError(f"{name} must be {want}, got {value:g}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nll(log_probs: Tensor, labels: Tensor) -> Tensor:
    """(B,) cross entropy, by gather because F.cross_entropy returns 0 for a label of -100."""
    if labels.ndim == 2:
        return -(labels * log_probs).sum(1)
    return -log_probs.gather(1, labels[:, None])[:, 0]


def _one_hot(labels: Tensor, log_probs: Tensor) -> Tensor:
    return torch.zeros_like(log_probs).scatter(1, labels[:, None], 1.0)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(1)


def _complement(log_p: Tensor) -> Tensor:
    """1 - p without cancellation; never 0, where powers below 1 have no derivative."""
    return (-log_p.expm1()).clamp(min=torch.finfo(log_p.dtype).tiny)


def _top(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) each: the confidence r, 1 - r without cancellation, and whether the prediction is correct."""
    log_confidence, predicted = log_probs.max(1)
    return log_confidence.exp(), -log_confidence.expm1(), predicted == labels


def _mmce_term(confidence: Tensor, scaled: Tensor, width: float, floor: float) -> Tensor:
    """The root of sum_ij s_i s_j k(r_i, r_j) for confidences r and scaled gaps s, (B,) each."""
    kernel = (-(confidence[:, None] - confidence).abs() / width).exp()  # (B, B)
    # Not a matrix product: autocast would use half precision.
    return ((scaled[:, None] * scaled * kernel).sum().clamp(min=0) + floor).sqrt()
