"""Maps of probabilities that several calibrators share: log odds, steps, straight lines, a new top confidence.

Maps are functions of the log odds of a class, not of its probability: confidences that round to 1 stay apart.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_odds(logits: Tensor) -> Tensor:
    """(..., K) -> (..., K): log p - log(1 - p) of every class, exact where p rounds to 1.

    >>> log_odds(torch.tensor([[100.0, 0.0], [0.0, 0.0]])).tolist()
    [[100.0, -100.0], [0.0, 0.0]]
    """
    log_probs = logits.log_softmax(-1)
    # p > 1/2 only where the class is the largest; the others' log(1 - p) is safe.
    others = (-log_probs.clamp(max=-1e-3).expm1()).log()
    top = logits.argmax(-1, keepdim=True)
    return (log_probs - others).scatter(-1, top, top_log_odds(logits)[..., None])


def top_log_odds(logits: Tensor) -> Tensor:
    """(..., K) -> (...): the log odds of the predicted class, its logit less the log-sum-exp of all others."""
    top = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, top, -torch.inf).logsumexp(-1)
    return logits.gather(-1, top)[..., 0] - rest


def steps(x: Tensor, edges: Tensor, values: Tensor) -> Tensor:
    """A step function of each class: x (..., C), edges (C, M - 1) rising, values (C, M). Steps are right-closed.

    >>> steps(torch.tensor([[0.0], [1.0], [1.5]]), torch.tensor([[1.0]]), torch.tensor([[10.0, 20.0]]))[:, 0].tolist()
    [10.0, 10.0, 20.0]
    """
    columns = x.movedim(-1, 0).reshape(x.shape[-1], -1).contiguous()  # (C, n)
    at = torch.searchsorted(edges.to(x.dtype), columns)
    return _rows(values.to(x.dtype).gather(1, at), x)


def lines(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """A piecewise linear function of each class: x (..., C), knots (C, M) rising, values (C, M); constant outside.

    >>> lines(torch.tensor([[0.25], [9.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[10.0, 20.0]]))[:, 0].tolist()
    [12.5, 20.0]
    """
    columns = x.movedim(-1, 0).reshape(x.shape[-1], -1).contiguous()  # (C, n)
    knots, values = knots.to(x.dtype), values.to(x.dtype)
    right = torch.searchsorted(knots, columns).clamp(1, knots.shape[1] - 1)
    x0, x1 = knots.gather(1, right - 1), knots.gather(1, right)
    y0, y1 = values.gather(1, right - 1), values.gather(1, right)
    share = ((columns - x0) / (x1 - x0).clamp(min=torch.finfo(x.dtype).tiny)).clamp(0, 1)
    return _rows(torch.lerp(y0, y1, share), x)


def log_normalise(probs: Tensor, floor: float = 0.0) -> Tensor:
    """Log probabilities (..., K) from one-vs-rest probabilities that need not sum to 1, none below `floor`."""
    return probs.clamp(min=max(floor, torch.finfo(probs.dtype).tiny)).log().log_softmax(-1)


def with_top_odds(logits: Tensor, odds: Tensor) -> Tensor:
    """Log probabilities whose top class has the log odds (...) given, the others in their old proportions.

    The top class stays on top: its probability is never set below that of the runner-up.
    """
    top = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, top, -torch.inf).log_softmax(-1)  # (..., K) shares of what the top class leaves
    odds = torch.maximum(odds, rest.amax(-1))[..., None]
    both = torch.nn.functional.logsigmoid(-odds) + rest
    return keep_top(both.scatter(-1, top, torch.nn.functional.logsigmoid(odds)), logits)


def keep_top(changed: Tensor, logits: Tensor) -> Tensor:
    """Raise the class that `logits` predict by a rounding where `changed` no longer has it strictly on top."""
    top = logits.argmax(-1, keepdim=True)
    best = changed.scatter(-1, top, -torch.inf).amax(-1, keepdim=True)  # the best of the others
    above = best + 4 * torch.finfo(changed.dtype).eps * (1 + best.abs())
    return changed.scatter(-1, top, torch.maximum(changed.gather(-1, top), above))


def pad(rows: list[Tensor], fill: float | None = None) -> Tensor:
    """Stack (M_c,) tensors of different lengths to (C, M), the gaps filled with `fill` or each row's last entry."""
    longest = max(len(row) for row in rows)
    tails = [row[-1:] if fill is None else row.new_tensor([fill]) for row in rows]
    return torch.stack([torch.cat([row, tail.expand(longest - len(row))]) for row, tail in zip(rows, tails)])


def _rows(columns: Tensor, like: Tensor) -> Tensor:
    """(C, n) -> the shape (..., C) of `like`."""
    return columns.reshape(like.shape[-1], *like.shape[:-1]).movedim(0, -1)
