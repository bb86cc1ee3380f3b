"""What calibration heads read besides features and logits as they are: statistics of the logits, in a tame range."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from doublehead.plumbing import average_over_processes

N_TOP = 10  # how many of the largest log-probabilities the statistics hold
LEAST_LOG_PROB = -1e4  # among them, so that those of a class masked out with -inf are a constant


def statistics(logits: Tensor) -> Tensor:
    """What logits say about themselves, (B, K) -> (B, min(K, 10) + 3).

    The largest log-probabilities in falling order, then log-sum-exp, entropy and the largest logit. Classes masked out
    with -inf do no harm.
    """
    logits = logits.float()
    log_probs = logits.log_softmax(-1).clamp(min=LEAST_LOG_PROB)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
    top = log_probs.topk(min(N_TOP, logits.shape[-1]), -1).values
    return torch.cat([top, logits.logsumexp(-1, keepdim=True), entropy, logits.amax(-1, keepdim=True)], -1)


class Standardise(nn.Module):
    """Subtract the mean and divide by the deviation of the calibration data that `follow` has seen.

    The moments go along with the network as it learns: a plain average over the first 50 batches, then an
    exponential one. They are part of the state.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("square", torch.ones(size))
        self.register_buffer("batches", torch.zeros(()))
        self.mean: Tensor
        self.square: Tensor
        self.batches: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """(B, size) -> (B, size)."""
        variance = (self.square - self.mean.square()).clamp(min=1e-6)
        return (values - self.mean) * variance.rsqrt()

    @torch.no_grad()
    def set_moments(self, values: Tensor) -> None:
        """Take the moments of all data (N, size) at once."""
        self.mean.copy_(values.mean(0))
        self.square.copy_(values.square().mean(0))
        self.batches.fill_(50)  # as if it had followed for a while

    @torch.no_grad()
    def follow(self, values: Tensor, fine: Tensor) -> None:
        """Take a batch (B, size) into the moments if it is `fine`, a bool tensor ()."""
        moments = average_over_processes(torch.stack([values.mean(0), values.square().mean(0)]))
        fine = fine & torch.isfinite(moments).all()
        self.batches += fine
        rate = fine * self.batches.clamp(min=1).reciprocal().clamp(min=0.02)
        moments = moments.nan_to_num(0.0, 0.0, 0.0)
        self.mean.lerp_(moments[0], rate)
        self.square.lerp_(moments[1], rate)
