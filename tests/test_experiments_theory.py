"""The paper's theorems: the first holds in 60-digit arithmetic, the second is refuted; what is published agrees."""

import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")
import theory

ROOT = Path(__file__).resolve().parents[1]
BETAS = [0.1, 0.5, 0.9, 1.0, 1.2, 2.0, 4.0]


def test_theorem1_by_hand() -> None:
    # z = (log 3, 0), beta = 2: softmax (3/4, 1/4) becomes (9/10, 1/10), so both factors are 0.1 / 0.25.
    t = theory.theorem1(torch.tensor([math.log(3), 0.0]), beta=2.0)
    torch.testing.assert_close(t.log_gamma.exp(), torch.tensor([0.4, 0.4]).double())
    # n = 2, z_(1) = z_(n-1) = 0: c0 = exp(-log 3) / 2, c1 = 2 exp(-log 3); c2 = (1/2 + 1/6) / 3, c3 = (1 + 1/3) / 3
    torch.testing.assert_close(t.log_lower.exp(), torch.tensor([1 / 6, 2 / 9]).double())
    torch.testing.assert_close(t.log_upper.exp(), torch.tensor([2 / 3, 4 / 9]).double())
    assert t.holds.all()


@pytest.mark.parametrize("beta", BETAS)
def test_theorem1_factors_against_autograd(beta: float) -> None:
    z = 2 * torch.randn(200, 6, dtype=torch.float64)
    t = theory.theorem1(z, beta)
    scaled, plain = z.clone().requires_grad_(), z.clone().requires_grad_()
    F.cross_entropy(beta * scaled, z.argmax(1), reduction="sum").backward()
    F.cross_entropy(plain, z.argmax(1), reduction="sum").backward()
    torch.testing.assert_close(scaled.grad, t.log_gamma.exp() * beta * plain.grad, rtol=1e-8, atol=1e-12)
    assert t.holds.all()


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
        for i, z in enumerate(theory.random_logits(70, torch.Generator().manual_seed(3))):
            values, beta = z.round() if i % 7 == 0 else z, BETAS[i % len(BETAS)]  # some with ties
            t = theory.theorem1(values, beta)
            assert t.holds.all()
            for j, (low, gamma, high) in enumerate(exactly(values.tolist(), beta)):
                assert low - slack <= gamma <= high + slack
                got = [float(x[j]) for x in (t.log_lower, t.log_gamma, t.log_upper)]
                assert got == pytest.approx([float(low), float(gamma), float(high)], rel=1e-11, abs=1e-11)


def test_the_counterexample_by_hand() -> None:
    # Three confidences, one third each, all wrong: E[f] = 1/3, H = log 3.
    t = theory.theorem2(*theory.COUNTEREXAMPLE)
    assert float(t.ece2) ** 2 == pytest.approx((0.98**2 + 0.99**2 + 1) / 3)  # 0.980
    mean_log = (math.log(0.98) + math.log(0.99)) / 3
    assert float(t.squared_shannon) == pytest.approx(3 - 2 * mean_log - 1 / 3 - 2 * math.log(3))  # 0.490
    assert float(t.squared_literal) == pytest.approx(3 - 2 * mean_log - 1 / 3 + 2 * math.log(3))
    assert not t.exceeds(t.squared_literal)
    assert t.exceeds(t.squared_shannon)
    assert float(t.brier) == pytest.approx(float(t.ece2) ** 2)


def test_theorem2_against_a_slow_reference() -> None:
    confidence = (torch.randint(1, 11, (200,)) / 10).double()
    correct = torch.rand(200) < confidence
    found = theory.theorem2(confidence, correct)
    ece2 = mean_log = mean_f = entropy = 0.0
    for value in confidence.unique().tolist():
        hits = correct[confidence == value].double()
        f = len(hits) / 200
        ece2 += f * (float(hits.mean()) - value) ** 2
        mean_log += f * math.log(value)
        mean_f += f * f
        entropy -= f * math.log(f)
    constant = 3 - 2 * mean_log - mean_f
    brier = float((correct.double() - confidence).square().mean())
    wanted = [ece2**0.5, entropy, constant - 2 * entropy, constant + 2 * entropy, brier]
    assert [float(side) for side in found] == pytest.approx(wanted)


def test_cells_merge_confidences_into_their_mean() -> None:
    # Cells (0, 0.5] and (0.5, 1]: 0.3 and 0.5 become 0.4, half right; 0.8 and 1.0 become 0.9, both right.
    t = theory.theorem2([0.3, 0.5, 0.8, 1.0], [True, False, True, True], n_values=2)
    assert float(t.ece2) ** 2 == pytest.approx(0.5 * 0.1**2 + 0.5 * 0.1**2)
    assert float(t.shannon) == pytest.approx(math.log(2))


def test_a_value_of_no_mass_counts_for_nothing() -> None:
    value, mass, accuracy = torch.tensor([0.5, 0.9]), torch.tensor([0.4, 0.6]), torch.tensor([0.2, 1.0])
    padded = [F.pad(x, (0, 2)) for x in (value, mass, accuracy)]
    torch.testing.assert_close(theory.theorem2_of(value, mass, accuracy), theory.theorem2_of(*padded))


def test_the_results_file_holds_what_the_page_says_and_agrees_with_the_functions() -> None:
    published = json.loads((ROOT / "docs/results/theory.json").read_text())
    first, second = published["theorem1"], published["theorem2"]
    for kind in ("random", "real"):
        assert first[kind]["violated"] == 0
        assert first[kind]["appendix_violated"] > 0
    for kind in ("confidences_from_a_half", "confidences_from_zero"):
        assert second[kind]["violated_shannon"] > 0.1 * second[kind]["n"]
        assert second[kind]["violated_literal"] == second[kind]["violated_brier"] == 0
    example = second["counterexample"]
    sides = theory.theorem2(example["confidence"], example["correct"])
    for name, value in sides._asdict().items():
        assert example[name] == pytest.approx(float(value), abs=1e-6)
    assert {"seed", "commit", "torch", "device", "time"} <= set(published["certificate"])


def test_numbers_and_pictures_are_made_from_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "N_VECTORS", 20)
    logits = 4 * torch.randn(2000, 10)
    labels = torch.multinomial(logits.softmax(1), 1)
    np.savez(tmp_path / "some.npz", test_logits=logits.numpy(), test_labels=labels.numpy())
    theory.write(tmp_path / "some.npz", tmp_path)
    assert min((tmp_path / f"theorem{number}.png").stat().st_size for number in (1, 2)) > 20_000
    found = json.loads((tmp_path / "theory.json").read_text())
    assert found["theorem1"]["random"]["violated"] == found["theorem1"]["real"]["violated"] == 0
    assert found["theorem1"]["real"]["appendix_violated"] > 0
    random = found["theorem2"]["confidences_from_a_half"]
    assert 0.5 < random["violated_shannon"] / theory.N_RANDOM < 0.9
    assert random["negative_right_side"] > random["violated_literal"] == random["violated_brier"] == 0
