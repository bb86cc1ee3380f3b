"""Optimisers: L-BFGS for any loss; Newton for a few weights, for logistic regressions, for log scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from doublehead.score_arrays import Target

GRADIENT = 1e-6  # the largest gradient entry at which a fit counts as converged
TOLERANCE = 2e-8  # of a mean NLL: `newton` stops where a step promises no more
CHUNK = 250_000  # entries handled at once, so that they stay in the cache


class Minimum(NamedTuple):
    """Where a minimisation ended."""

    values: list[Tensor]
    loss: float
    gradient: float  # the largest entry of the gradient
    converged: bool

    def verdict(self) -> dict[str, Any]:
        """What a calibrator's `_learn` returns on convergence."""
        wanted = f"the largest gradient entry is {self.gradient:.2g} (wanted {GRADIENT:.0g})"
        return {"converged_": self.converged, "facts": f"{wanted}, the loss {self.loss:.6g}"}


def minimise(
    loss: Callable[..., Tensor], start: Sequence[Tensor], *, max_steps: int = 500, restarts: int = 3
) -> Minimum:
    """Minimise `loss(*values)` from `start` by L-BFGS with a strong-Wolfe line search.

    A restart discards the curvature collected so far, which helps a line search that is stuck.

    >>> found = minimise(lambda x: ((x - 3) ** 2).sum(), [torch.zeros(1)])
    >>> round(float(found.values[0]), 6), found.converged
    (3.0, True)
    """
    values = [value.detach().double().clone().requires_grad_() for value in start]
    with torch.enable_grad():
        for _ in range(1 + restarts):
            optimizer = torch.optim.LBFGS(
                values,
                max_iter=max_steps,
                history_size=20,
                tolerance_grad=GRADIENT / 2,
                tolerance_change=1e-15,
                line_search_fn="strong_wolfe",
            )

            def closure(optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
                optimizer.zero_grad()
                value = loss(*values)
                value.backward()
                return value

            optimizer.step(closure)
            last = float(closure().detach())
            gradient = max(float(value.grad.abs().max()) for value in values if value.grad is not None)
            if gradient <= GRADIENT:
                break
    return Minimum([value.detach() for value in values], last, gradient, gradient <= GRADIENT)


def newton(
    evaluate: Callable[[Tensor], tuple[float, Tensor, Tensor]],
    weights: Tensor,
    max_steps: int = 30,
    damping: float = 1e-4,
) -> Tensor:
    """Weights (P,) in float64 where a loss is lowest; `evaluate` gives it, its gradient (P,) and curvature (P, P)."""
    loss, gradient, curvature = evaluate(weights)
    for _ in range(max_steps):
        for _ in range(12):
            stiff = curvature + damping * (curvature.diagonal() + 1e-8).diag()
            step: Tensor = torch.linalg.solve(stiff, gradient)
            if 0 <= float(gradient @ step) < TOLERANCE:
                return weights - step
            now = evaluate(weights - step)
            if now[0] <= loss:
                break
            damping *= 6
        else:
            break
        weights, (loss, gradient, curvature), damping = weights - step, now, max(damping / 4, 1e-8)
    return weights


def fit_logistic(
    x: Tensor, y: Tensor, *, towards: Tensor, ridge: float | Tensor = 1e-6, weights: Tensor | None = None
) -> tuple[Tensor, float, bool]:
    """Coefficients (D,) of a logistic regression on features (N, D), targets (N,) in 0..1; its loss; if it converged.

    It minimises the mean cross entropy, with sample weights (N,), plus ridge / 2 * |coefficients - towards|^2. A
    number for `ridge` is in units in which each feature has mean square 1, so a separable problem has a finite answer
    and the scale of the features does not matter; a tensor (D,) is in the units of the features. It runs on the CPU:
    many small steps are slow on a GPU.
    """
    device = x.device
    x, y, towards = (values.cpu().double() for values in (x, y, towards))
    scale = x.square().mean(0).sqrt().clamp(min=1e-300)  # (D,)
    x, towards = x / scale, towards * scale
    pull = ridge.cpu() / scale.square() if isinstance(ridge, Tensor) else torch.full_like(scale, ridge)
    share = (torch.ones_like(y) if weights is None else weights.cpu().double()) / len(x)

    def evaluate(w: Tensor) -> tuple[float, Tensor, Tensor]:
        odds, off = x @ w, w - towards
        probs = odds.sigmoid()
        loss = (share * (softplus(odds) - y * odds)).sum() + (pull / 2 * off.square()).sum()
        curvature = x.mT @ (x * (share * probs * (1 - probs))[:, None]) + pull.diag()
        return float(loss), x.mT @ (share * (probs - y)) + pull * off, curvature

    # Damped steps promise little, and end, where the features hardly tell weights apart: end with undamped ones.
    found = newton(evaluate, newton(evaluate, towards, max_steps=100), damping=1e-9)
    loss, gradient, _ = evaluate(found)
    return (found / scale).to(device), loss, bool(gradient.abs().max() <= GRADIENT)


def fit_log_scale(
    logits: Tensor, labels: Tensor | Target, design: Tensor, ridge: Tensor, start: Tensor | None = None
) -> Tensor:
    """Weights w (P,) such that logits (N, K) times exp(design w), design (N, P), have the lowest NLL.

    `ridge` (P,) is the pull of each weight towards 0, in samples. The last column of the design is 1.
    """
    target = labels if isinstance(labels, Target) else Target(labels)
    below = logits - logits.amax(1, keepdim=True)
    at_label = target.of(below)
    n, rows = len(logits), max(1, CHUNK // logits.shape[1])
    design, ridge = design.double(), ridge.double() / n

    def evaluate(w: Tensor) -> tuple[float, Tensor, Tensor]:
        scale = (design @ w).clamp(-4, 4).exp()
        nlls, firsts, seconds = [], [], []  # and each sample's first and second derivative in its log scale
        for some, s, label in zip(below.split(rows), scale.to(below.dtype).split(rows), at_label.split(rows)):
            largest = (some * s[:, None]).exp_()  # each row's largest is 1
            sums = largest.sum(1)
            weighted = largest.mul_(some)
            mean = weighted.sum(1) / sums
            variance = weighted.mul_(some).sum(1) / sums - mean.square()
            nlls.append(sums.log() - s * label)
            firsts.append(s * (mean - label))
            seconds.append(s.square() * variance)
        nll, first, second = (target.weighted(torch.cat(parts).double()) for parts in (nlls, firsts, seconds))
        gradient = design.mT @ first / n + ridge * w
        # The first derivative belongs to the curvature where it helps: near the optimum it has mean 0.
        curvature = design.mT @ (design * second.clamp(min=1e-8)[:, None]) / n + ridge.diag()
        return float(nll.sum()) / n + 0.5 * float((ridge * w.square()).sum()), gradient, curvature

    begin = (logits.new_zeros(design.shape[1]) if start is None else start).double()
    if start is None:
        # Of logits that are many times too large or small, Newton's first steps are far too long: begin nearer.
        loss, step = evaluate(begin)[0], torch.zeros_like(begin)
        for sign in (-1.0, 1.0):
            step[-1] = sign
            while abs(float(begin[-1])) < 4 and (now := evaluate(begin + step)[0]) < loss:
                begin, loss = begin + step, now
    return newton(evaluate, begin).to(logits.dtype)
