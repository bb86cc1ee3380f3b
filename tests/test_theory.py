"""The paper's theorems: theorem 1 holds in 60-digit arithmetic, theorem 2 is refuted by hand and by chance."""

import math
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from doublehead import theory
from doublehead.theory import COUNTEREXAMPLE, theorem1, theorem2, theorem2_of

BETAS = [0.1, 0.5, 0.9, 1.0, 1.2, 2.0, 4.0]


def random_logits(n: int, seed: int = 0) -> list[Tensor]:
    """Logit vectors of 2 to 50 classes, nearly equal to hugely different, some with ties."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        k = int(torch.randint(2, 51, (), generator=g))
        scale = 10 ** float(torch.empty(()).uniform_(-3, 2.5, generator=g))
        z = scale * torch.randn(k, dtype=torch.float64, generator=g)
        made.append(z.round() if i % 7 == 0 else z)
    return made


# Theorem 1 -------------------------------------------------------------------------------------------------------


def test_theorem1_by_hand() -> None:
    # z = (log 3, 0), beta = 2: softmax (3/4, 1/4) becomes (9/10, 1/10), so both factors are 0.1 / 0.25.
    t = theorem1([math.log(3), 0.0], beta=2.0)
    assert t.label == 0
    torch.testing.assert_close(t.gamma, torch.tensor([0.4, 0.4]).double())
    # n = 2, z_(1) = z_(n-1) = 0: c0 = exp(-log 3) / 2, c1 = 2 exp(-log 3); c2 = (1/2 + 1/6) / 3, c3 = (1 + 1/3) / 3
    torch.testing.assert_close(t.lower, torch.tensor([1 / 6, 2 / 9]).double())
    torch.testing.assert_close(t.upper, torch.tensor([2 / 3, 4 / 9]).double())
    assert t.holds.all()


@pytest.mark.parametrize("beta", BETAS)
def test_theorem1_factors_against_autograd(beta: float) -> None:
    z = 2 * torch.randn(200, 6, dtype=torch.float64)
    t = theorem1(z, beta)
    scaled, plain = z.clone().requires_grad_(), z.clone().requires_grad_()
    F.cross_entropy(beta * scaled, t.label, reduction="sum").backward()
    F.cross_entropy(plain, t.label, reduction="sum").backward()
    torch.testing.assert_close(scaled.grad, t.gamma * beta * plain.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_theorem1_holds_for_thousands_of_random_logits(beta: float) -> None:
    for z in random_logits(600, seed=int(10 * beta)):
        t = theorem1(z, beta)
        assert t.holds.all(), (z, beta)
    rows = torch.cat([s * torch.randn(500, 10, dtype=torch.float64) for s in (0.1, 1.0, 10.0, 300.0)])
    assert theorem1(rows, beta).holds.all()


def exactly(z: list[float], beta: float) -> list[tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]]:
    """(log c_low, log gamma, log c_high) of each class in 60 digits, from the formulas as they are printed."""
    exp, log, n = mpmath.exp, mpmath.log, len(z)
    x, b, order = [mpmath.mpf(v) for v in z], mpmath.mpf(beta), sorted(mpmath.mpf(v) for v in z)
    first, second, last = order[0], order[-2], order[-1]
    y, out = z.index(max(z)), []
    total, total_b = mpmath.fsum(exp(v) for v in x), mpmath.fsum(exp(b * v) for v in x)
    for j, v in enumerate(x):
        if j == y:
            miss = mpmath.fsum(exp(w) for i, w in enumerate(x) if i != j)
            miss_b = mpmath.fsum(exp(b * w) for i, w in enumerate(x) if i != j)
            low = exp((1 - b) * (v - first) - (second - first)) / n
            gamma = miss_b * total / (total_b * miss)
            high = n * exp((1 - b) * (v - second) + (second - first))
        else:
            common = exp((1 - b) * (last - v))
            low = (1 / mpmath.mpf(n) + (n - 1) / mpmath.mpf(n) * exp(first - last)) * common
            gamma = exp((b - 1) * v) * total / total_b
            high = (1 + (n - 1) * exp(second - last)) * common
        out.append((log(low), log(gamma), log(high)))
    return out


def test_theorem1_against_sixty_digits() -> None:
    with mpmath.workdps(60):
        slack = mpmath.mpf(10) ** -40  # the logarithms reach a few thousand
        for i, z in enumerate(random_logits(70, seed=3)):
            beta = BETAS[i % len(BETAS)]
            t = theorem1(z, beta)
            for j, (low, gamma, high) in enumerate(exactly(z.tolist(), beta)):
                assert low - slack <= gamma <= high + slack
                got = [float(x[j]) for x in (t.log_lower, t.log_gamma, t.log_upper)]
                assert got == pytest.approx([float(low), float(gamma), float(high)], rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("side", [0, 1])
def test_a_broken_bound_would_be_noticed(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    true_bounds, z = theory._theorem1_bounds, torch.randn(6, 4, dtype=torch.float64)
    gamma = theorem1(z, 1.4).log_gamma + (1e-9 if side == 0 else -1e-9)

    def too_tight(*args: Any) -> tuple[Tensor, ...]:
        return tuple(gamma if i == side else bound for i, bound in enumerate(true_bounds(*args)))

    monkeypatch.setattr(theory, "_theorem1_bounds", too_tight)
    assert not theorem1(z, 1.4).holds.any()


def test_theorem1_names_bad_input() -> None:
    for logits, beta, message in (
        ([1.0], 1.0, r"logits must have shape \(K,\) or \(N, K\) with K >= 2, got \(1,\)"),
        ([1.0, math.nan], 1.0, "logits must be finite"),
        ([1.0, 2.0], -1.0, "beta must be .* got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            theorem1(logits, beta)


# Theorem 2 -------------------------------------------------------------------------------------------------------


def test_the_counterexample_by_hand() -> None:
    # Three confidences, one third each, all wrong: E[f] = 1/3, H = log 3.
    t = theorem2(*COUNTEREXAMPLE)
    assert float(t.ece2) ** 2 == pytest.approx((0.98**2 + 0.99**2 + 1) / 3)  # 0.980
    mean_log = (math.log(0.98) + math.log(0.99)) / 3
    assert float(t.squared_shannon) == pytest.approx(3 - 2 * mean_log - 1 / 3 - 2 * math.log(3))  # 0.490
    assert float(t.squared_literal) == pytest.approx(3 - 2 * mean_log - 1 / 3 + 2 * math.log(3))
    assert not t.holds_shannon
    assert t.holds_literal
    assert float(t.brier) == pytest.approx(float(t.ece2) ** 2)


def test_a_value_of_no_mass_counts_for_nothing() -> None:
    value, mass, accuracy = torch.tensor([0.5, 0.9]), torch.tensor([0.4, 0.6]), torch.tensor([0.2, 1.0])
    padded = [F.pad(x, (0, 2)) for x in (value, mass, accuracy)]
    for a, b in zip(theorem2_of(value, mass, accuracy), theorem2_of(*padded)):
        torch.testing.assert_close(a, b)


def slow_theorem2(confidence: list[float], correct: list[bool]) -> dict[str, float]:
    n, ece2, mean_log, mean_f, entropy, brier = len(confidence), 0.0, 0.0, 0.0, 0.0, 0.0
    for value in sorted(set(confidence)):
        hits = [c for p, c in zip(confidence, correct) if p == value]
        f = len(hits) / n
        ece2 += f * (sum(hits) / len(hits) - value) ** 2
        mean_log += f * math.log(value)
        mean_f += f * f
        entropy -= f * math.log(f)
    brier = sum((c - p) ** 2 for p, c in zip(confidence, correct)) / n
    constant = 3 - 2 * mean_log - mean_f
    sides = {"squared_shannon": constant - 2 * entropy, "squared_literal": constant + 2 * entropy}
    return {"ece2": ece2**0.5, "shannon": entropy, "brier": brier, **sides}


def test_theorem2_against_a_slow_reference() -> None:
    confidence = (torch.randint(1, 11, (200,)) / 10).double()
    correct = torch.rand(200) < confidence
    t = theorem2(confidence, correct)
    for name, want in slow_theorem2(confidence.tolist(), correct.tolist()).items():
        assert float(getattr(t, name)) == pytest.approx(want), name


def test_cells_merge_confidences_into_their_mean() -> None:
    # Cells (0, 0.5] and (0.5, 1]: 0.3 and 0.5 become 0.4, half right; 0.8 and 1.0 become 0.9, both right.
    t = theorem2([0.3, 0.5, 0.8, 1.0], [True, False, True, True], n_values=2)
    assert float(t.ece2) ** 2 == pytest.approx(0.5 * 0.1**2 + 0.5 * 0.1**2)
    assert float(t.shannon) == pytest.approx(math.log(2))
    four = theorem2([0.3, 0.5, 0.8, 1.0], [True, False, True, True])
    assert float(four.shannon) == pytest.approx(math.log(4))


def test_theorem2_names_bad_input() -> None:
    for confidence, correct, n_values, message in (
        (torch.zeros(0), torch.zeros(0, dtype=torch.bool), None, "confidence must .* got none"),
        ([0.5, 0.6], [True], None, r"correct must have the shape of confidence \(2,\), got \(1,\)"),
        ([0.5, 0.0], [True, False], None, "confidence must .* got 0.0"),
        ([0.5], [True], 0, "n_values must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            theorem2(confidence, correct, n_values)
