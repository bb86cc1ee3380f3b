"""Losses: cases by hand, slow references, the shared contract, extreme logits; AdaFocal, also in a training run."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from doublehead.losses import (
    LOSSES,
    AdaFocal,
    MixedLabels,
    avuc,
    brier,
    cross_entropy,
    entropy_penalty,
    flsd53,
    focal,
    label_smoothing,
    mixed,
    mixup,
    mmce,
    mmce_published,
    mse_logits,
    soft_ece,
)
from doublehead.predictions import Predictions
from doublehead.training import loop
from samples import binary, refused
from training_helpers import assert_same, run, small, stop_after

EITHER_SIGN = AdaFocal(n_bins=3)
EITHER_SIGN.gammas.copy_(torch.tensor([2.5, -1.5, 0.3]))
ALL: dict[str, Callable[..., Tensor]] = {**LOSSES, "adafocal": AdaFocal(gamma=2.5), "signs": EITHER_SIGN}
NAMES = list(ALL)
TAKES_SOFT = {"cross_entropy", "label_smoothing", "brier", "entropy_penalty"}
BATCH_TERM = {"mmce", "mmce_published", "soft_ece", "avuc"}


def batch(n: int = 24, k: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Random logits and labels, every other label the predicted class, the rest the least likely one."""
    logits = 2 * torch.randn(n, k, dtype=dtype)
    right = torch.arange(n) % 2 == 0
    return logits, torch.where(right, logits.argmax(1), logits.argmin(1))


def of_probs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def close(got: Tensor, want: Any, tolerance: float = 1e-9) -> None:
    want = torch.as_tensor(want, dtype=torch.float64).expand_as(got)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_losses_of_single_examples_by_hand() -> None:
    logits, labels = of_probs([0.5, 0.3, 0.2], [0.1, 0.8, 0.1]), torch.tensor([0, 2])
    close(cross_entropy(logits, labels), [math.log(2), math.log(10)])
    close(brier(logits, labels), [0.25 + 0.09 + 0.04, 0.01 + 0.64 + 0.81])
    close(focal(logits, labels, gamma=2.0), [0.25 * math.log(2), 0.81 * math.log(10)])
    close(flsd53(logits, labels), [0.125 * math.log(2), 0.9**5 * math.log(10)])
    fifth = flsd53(of_probs([0.19, 0.81], [0.21, 0.79]), torch.tensor([0, 0]))  # where gamma changes
    close(fifth, [-(0.81**5) * math.log(0.19), -(0.79**3) * math.log(0.21)])
    # epsilon 0.3 over three classes: the label gets 0.8, each other class 0.1
    first = -(0.8 * math.log(0.5) + 0.1 * math.log(0.3) + 0.1 * math.log(0.2))
    second = -(0.1 * math.log(0.1) + 0.1 * math.log(0.8) + 0.8 * math.log(0.1))
    close(label_smoothing(logits, labels, epsilon=0.3), [first, second])
    logits, labels = torch.tensor([[2.0, -1.0, 0.5]]).double(), torch.tensor([0])
    close(mse_logits(logits, labels), [(1 + 1 + 0.25) / 3])
    close(mse_logits(logits, labels, k=15.0, m=30.0), [(15 * 28**2 + 1 + 0.25) / 3])


def test_the_published_mmce_divides_by_the_pair_counts_twice() -> None:
    # Four equal confidences of 0.8, two right and two wrong: half of 0.2 - 0.8.
    logits, labels = of_probs(*[[0.8, 0.2]] * 4), torch.tensor([0, 0, 1, 1])
    nll = cross_entropy(logits, labels)
    close(mmce_published(logits, labels, weight=1.0) - nll, 0.3, 1e-8)
    close(mmce(logits, labels, weight=1.0) - nll, abs(0.5 - 0.8))
    logits = of_probs([0.9, 0.1], [0.6, 0.4])  # the weighted one needs both kinds of predictions
    for labels in (torch.tensor([0, 0]), torch.tensor([1, 1])):
        nll = cross_entropy(logits, labels)
        close(mmce_published(logits, labels) - nll, 0.0)
        assert (mmce(logits, labels) - nll > 0.1).all()


def test_soft_ece_of_a_cold_temperature_is_the_binned_one() -> None:
    # Bins of width 0.25: two in (0.75, 1] (mean 0.85, one right), one in (0.5, 0.75] (0.6, wrong).
    logits, labels = of_probs([0.9, 0.1], [0.8, 0.2], [0.4, 0.6]), torch.tensor([0, 1, 0])
    got = soft_ece(logits, labels, n_bins=4, temperature=1e-5) - cross_entropy(logits, labels)
    close(got, math.sqrt((2 * (0.5 - 0.85) ** 2 + 0.6**2) / 3), 1e-6)


def test_avuc_by_hand() -> None:
    # Entropies: h(0.9) = 0.325 right, h(0.8) = 0.500 wrong, h(0.6) = 0.673 right, h(0.55) = 0.688 wrong.
    logits = of_probs([0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.55, 0.45])
    labels = torch.tensor([0, 1, 0, 1])
    h = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (0.9, 0.8, 0.6, 0.55)]
    ac, ic = 0.9 * (1 - math.tanh(h[0])), 0.2 * (1 - math.tanh(h[1]))
    au, iu = 0.6 * math.tanh(h[2]), 0.45 * math.tanh(h[3])
    want = math.log(1 + (au + ic) / (ac + iu))
    nll = cross_entropy(logits, labels)
    close(avuc(logits, labels) - nll, want)  # halfway: ((h0 + h2) / 2 + (h1 + h3) / 2) / 2 = 0.547
    close(avuc(logits, labels, threshold=0.6, weight=3.0) - nll, 3 * want)
    everyone_certain = [p * (1 - math.tanh(u)) for p, u in zip((0.9, 0.2, 0.6, 0.45), h)]
    want = math.log(sum(everyone_certain) / (everyone_certain[0] + everyone_certain[2]))
    close(avuc(logits, labels, threshold=0.7) - nll, want)
    logits, labels, mean = logits[[0, 2]], labels[[0, 2]], (h[0] + h[2]) / 2  # of one kind: their mean
    close(avuc(logits, labels), avuc(logits, labels, threshold=mean))
    assert (avuc(logits, labels) != avuc(logits, labels, threshold=mean / 2)).all()


def rows(logits: Tensor, labels: Tensor) -> list[tuple[list[float], int]]:
    exps = [[math.exp(z) for z in row] for row in logits.tolist()]
    return [([e / sum(row) for e in row], label) for row, label in zip(exps, labels.tolist())]


def slow_mmce(data: list[tuple[list[float], int]], form: str) -> float:
    right = [max(p) for p, y in data if p.index(max(p)) == y]
    wrong = [max(p) for p, y in data if p.index(max(p)) != y]
    m, n = len(right), len(wrong)

    def pairs(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
        return sum(x * y * math.exp(-abs(r - q) / 0.4) for r, x in a for q, y in b)

    r, w = [(x, 1 - x) for x in right], [(x, x) for x in wrong]
    rr, ww, rw = pairs(r, r), pairs(w, w), pairs(r, w)
    if form == "plain":
        return math.sqrt((rr + ww - 2 * rw) / (m + n) ** 2)
    twice = rr / m**2 / (m**2 + 1e-5) + ww / n**2 / (n**2 + 1e-5) - 2 * rw / (m * n) / (m * n + 1e-5)
    return math.sqrt(twice + 1e-10)


def slow_soft_ece(data: list[tuple[list[float], int]], n_bins: int, temperature: float) -> float:
    size, conf, acc = [0.0] * n_bins, [0.0] * n_bins, [0.0] * n_bins
    for p, y in data:
        r = max(p)
        near = [math.exp(-((r - (j + 0.5) / n_bins) ** 2) / temperature) for j in range(n_bins)]
        for j in range(n_bins):
            share = near[j] / sum(near)
            size[j] += share
            conf[j] += share * r
            acc[j] += share * (p.index(r) == y)
    terms = [s / len(data) * ((a - c) / s) ** 2 for s, c, a in zip(size, conf, acc) if s > 0]
    return math.sqrt(sum(terms))


@pytest.mark.parametrize("n", [7, 40])
def test_batch_terms_against_slow_references(n: int) -> None:
    logits, labels = batch(n)
    data, nll = rows(logits, labels), cross_entropy(logits, labels)
    close(mmce(logits, labels, weight=1.0) - nll, slow_mmce(data, "plain"), 1e-8)
    close(mmce_published(logits, labels, weight=1.0) - nll, slow_mmce(data, "published"), 1e-5)
    close(soft_ece(logits, labels, n_bins=10, temperature=0.02) - nll, slow_soft_ece(data, 10, 0.02), 1e-8)


def test_agreement_with_torch() -> None:
    logits, labels = batch()
    soft = torch.rand_like(logits).softmax(1)
    close(cross_entropy(logits, labels), F.cross_entropy(logits, labels, reduction="none"))
    close(cross_entropy(logits, soft), F.cross_entropy(logits, soft, reduction="none"))
    close(brier(logits, soft), (logits.softmax(1) - soft).square().sum(1))
    for target in (labels, soft):
        want = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.2)
        close(label_smoothing(logits, target, epsilon=0.2), want)
    want = cross_entropy(logits, labels) - torch.distributions.Categorical(logits=logits).entropy()
    close(entropy_penalty(logits, labels, weight=1.0), want)
    one_hot = F.one_hot(labels, 5).double()
    close(mse_logits(logits, labels), F.mse_loss(logits, one_hot, reduction="none").mean(1))


@pytest.mark.parametrize("name", NAMES)
def test_one_number_per_example_and_one_reduction(name: str) -> None:
    logits, labels = batch(dtype=torch.float32)
    loss = ALL[name](logits, labels)
    assert loss.shape == (24,)
    assert loss.dtype == torch.float32
    alone = torch.cat([ALL[name](logits[i : i + 1], labels[i : i + 1]) for i in range(24)])
    if name in BATCH_TERM:
        added = loss - cross_entropy(logits, labels)
        torch.testing.assert_close(added, added[:1].expand(24), rtol=0, atol=1e-5)
        assert added[0] > 1e-4
        assert not torch.allclose(loss, alone)
    else:
        torch.testing.assert_close(loss, alone)


@pytest.mark.parametrize("name", NAMES)
def test_labels_of_any_whole_type_and_soft_targets_where_they_mean_something(name: str) -> None:
    logits, labels = batch()
    torch.testing.assert_close(ALL[name](logits, labels.to(torch.uint8)), ALL[name](logits, labels))
    if name != "mse_logits":
        torch.testing.assert_close(ALL[name](logits + 100, labels), ALL[name](logits, labels))
    soft = F.one_hot(labels, 5).double()
    if name in TAKES_SOFT:
        torch.testing.assert_close(ALL[name](logits, soft), ALL[name](logits, labels))
    else:
        refused(r"labels must be integers of shape \(24,\)", ALL[name], logits, soft)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_against_finite_differences(name: str) -> None:
    logits, labels = batch(8)
    logits.requires_grad_()
    loss = lambda z: ALL[name](z, labels).mean()  # noqa: E731
    assert torch.autograd.gradcheck(loss, (logits,), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e4, 30.0, 0.0])
def test_finite_at_the_ends(name: str, dtype: torch.dtype, size: float) -> None:
    # Certain and right, certain and wrong, all equal, certain by a hair; then batches of one kind.
    signs = torch.tensor([[1, -1, -1], [1, -1, -1], [0, 0, 0], [1, 1, -1], [1, 0, 0]], dtype=torch.float32)
    for labels in ([0, 1, 2, 0, 0], [0, 0, 0, 0, 0], [2, 2, 2, 2, 1]):
        logits = (size * signs).to(dtype).requires_grad_()
        loss = ALL[name](logits, torch.tensor(labels))
        loss.mean().backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite().all(), (name, loss)
        assert logits.grad.isfinite().all(), (name, logits.grad)
        for i in (0, 1):  # a batch of one
            single = logits.detach()[i : i + 1].requires_grad_()
            ALL[name](single, torch.tensor(labels[i : i + 1])).mean().backward()
            assert single.grad.isfinite().all()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 5.0])
def test_focal_gradient_where_the_label_is_certain(gamma: float) -> None:
    logits = torch.tensor([[1e4, 0.0], [40.0, 0.0], [0.0, 1e4]], requires_grad=True)
    focal(logits, torch.tensor([0, 0, 0]), gamma=gamma).sum().backward()
    assert logits.grad.isfinite().all()
    close(focal(logits, torch.tensor([0, 0, 0]), gamma=gamma)[2:], [1e4], 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_widened_inside(name: str) -> None:
    logits, labels = batch(16, dtype=torch.float32)
    rounded = logits.bfloat16()
    torch.testing.assert_close(ALL[name](rounded, labels), ALL[name](rounded.float(), labels))
    with torch.autocast("cpu", torch.bfloat16):
        inside = ALL[name](logits, labels)
    torch.testing.assert_close(inside, ALL[name](logits, labels), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_as_one_graph(name: str) -> None:
    logits, labels = batch(16, dtype=torch.float32)
    plain, traced = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    ALL[name](plain, labels).mean().backward()
    torch._dynamo.reset()
    torch.compile(ALL[name], fullgraph=True, backend="aot_eager")(traced, labels).mean().backward()
    torch.testing.assert_close(traced.grad, plain.grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_runs_inside_a_cuda_graph(name: str) -> None:
    logits, labels = (x.cuda() for x in batch(128, 10, dtype=torch.float32))
    static = logits.clone().requires_grad_()
    loss_of = ALL[name]
    if isinstance(loss_of, torch.nn.Module):
        loss_of = copy.deepcopy(loss_of).cuda()

    def step() -> Tensor:
        static.grad = None
        loss = loss_of(static, labels).mean()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = torch.randn_like(logits)
    with torch.no_grad():
        static.copy_(other)
    graph.replay()
    torch.testing.assert_close(captured, loss_of(other, labels).mean())


def test_bad_input_is_named() -> None:
    z, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    for loss, logits, labels, message in (
        (cross_entropy, z[:, 0], y, r"logits must have shape \(B, K\) with B >= 1 and K >= 2, got \(4,\)"),
        (brier, z[:, :1], y, r"K >= 2, got \(4, 1\)"),
        (mmce, z[:0], y[:0], r"B >= 1 and K >= 2, got \(0, 3\)"),
        (focal, z.long(), y, "logits must be floating-point, got int64"),
        (cross_entropy, z, y[:3], r"\(4,\), or soft targets .* \(4, 3\) for .*, got int64 of shape \(3,\)"),
        (avuc, z, y.float(), r"integers of shape \(4,\) .*, got float32 of shape \(4,\)"),
    ):
        refused(message, loss, logits, labels, error=(TypeError, ValueError))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", [3, -1, -100])
def test_a_label_out_of_range_never_passes(name: str, label: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|index"):
        ALL[name](torch.zeros(2, 3), torch.tensor([0, label]))


@pytest.mark.parametrize(
    ("loss", "hyper", "message"),
    [
        (label_smoothing, {"epsilon": 1.5}, r"epsilon must be in 0\.\.1, got 1.5"),
        (focal, {"gamma": -1.0}, "gamma must be >= 0, got -1"),
        (mmce, {"width": 0.0}, "width must be > 0, got 0"),
        (mmce_published, {"width": -0.4}, "width must be > 0, got -0.4"),
        (soft_ece, {"n_bins": 0}, "n_bins must be >= 1, got 0"),
        (soft_ece, {"temperature": 0.0}, "temperature must be > 0, got 0"),
        (mse_logits, {"k": 0.0}, "k must be > 0, got 0"),
        (AdaFocal, {"n_bins": 0}, "n_bins must be an integer >= 1, got 0"),
        (AdaFocal, {"n_bins": 2.5}, "n_bins must be an integer >= 1, got 2.5"),
        (AdaFocal, {"rate": 0}, "rate must be > 0, got 0"),
        (AdaFocal, {"gamma": 30}, r"gamma must be in -2\.\.20, got 30"),
    ],
)
def test_bad_hyperparameters_are_named(loss: Any, hyper: dict[str, float], message: str) -> None:
    given = () if loss is AdaFocal else (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    refused(message, loss, *given, **hyper)


def test_adafocal_by_hand() -> None:
    loss = AdaFocal(n_bins=2)
    loss.gammas.copy_(torch.tensor([2.0, -0.5]))
    logits = of_probs([0.2, 0.8], [0.2, 0.8])
    got = loss(logits, torch.tensor([0, 1]))  # p of the label: 0.2, in the first bin, and 0.8, in the second
    close(got, [0.8**2 * -math.log(0.2), 1.8**0.5 * -math.log(0.8)])


def test_an_update_of_adafocal_by_hand() -> None:
    loss = AdaFocal(n_bins=2)
    loss.gammas.copy_(torch.tensor([1.0, -1.0]))
    loss.update(binary([0.9, 0.6, 0.7, 0.8], [False, True, True, True]))
    # bins {0.6, 0.7}, all correct: 0.35 too low; {0.8, 0.9}, half correct: 0.35 too high
    torch.testing.assert_close(loss.edges, torch.tensor([0.75]))
    torch.testing.assert_close(loss.gammas, torch.tensor([math.exp(-0.35), -math.exp(-0.35)]))


def test_equal_confidences_share_their_accuracy() -> None:
    """Independent of the order of the samples, for example when many confidences round to 1."""
    loss = AdaFocal(n_bins=3)
    loss.update(binary([0.9] * 6, [True, True, True, False, False, False]))
    torch.testing.assert_close(loss.gammas, torch.full((3,), math.exp(0.4)))
    refused("calib must have at least 15 samples, .* got 4", AdaFocal().update, binary([0.9] * 4, [True] * 4))
    logits = torch.randn(40, 3)
    for p in (Predictions(logits, [0] * 40, [1.0] * 40), Predictions(logits, logits.softmax(1))):
        refused("class labels and no weights", AdaFocal().update, p, error=TypeError)


def test_updates_of_adafocal_against_a_slow_reference() -> None:
    draw = np.random.default_rng(0)
    loss, gammas = AdaFocal(n_bins=7, rate=2.0), [1.0] * 7
    for _ in range(30):
        logits = draw.normal(size=(61, 3)) * draw.uniform(0.2, 6)
        labels = np.where(draw.random(61) < 0.6, logits.argmax(1), draw.integers(0, 3, 61))
        loss.update(Predictions(torch.from_numpy(logits), torch.from_numpy(labels)))
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        order = probs.max(1).argsort()
        for b, rows in enumerate(np.array_split(order, 7)):
            excess = probs[rows].max(1).mean() - (logits[rows].argmax(1) == labels[rows]).mean()
            grown = gammas[b] * math.exp(2 * excess if gammas[b] > 0 else -2 * excess)
            grown = min(20.0, max(-2.0, grown))
            gammas[b] = math.copysign(0.2, -grown) if abs(grown) < 0.2 else grown
        np.testing.assert_allclose(loss.gammas, gammas, rtol=1e-4)
    assert min(gammas) < 0 < max(gammas)


def test_adafocal_in_a_run_that_is_stopped_and_resumed(tmp_path: Path, monkeypatch: Any) -> None:
    config = small(loss="adafocal", loss_options={"n_bins": 5}, epochs=4)
    seen: list[Predictions] = []
    update = AdaFocal.update
    monkeypatch.setattr(AdaFocal, "update", lambda self, calib: (seen.append(calib), update(self, calib))[1])
    run(config, tmp_path / "whole")
    assert [len(calib) for calib in seen] == [240] * 4  # the calibration images, once an epoch
    stop_after(config, tmp_path / "stopped", epochs=2)
    run(config, tmp_path / "stopped")
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_adafocal_changes_a_run_from_the_second_epoch_on(tmp_path: Path) -> None:
    lines = []
    for name, options in (("adafocal", {}), ("focal", {"gamma": 1.0})):
        run(small(loss=name, loss_options=options), tmp_path / name)
        lines.append([row["train_loss"] for row in loop.RunFolder(tmp_path / name).lines()])
    assert lines[0][0] == pytest.approx(lines[1][0], rel=1e-4)  # the same in the first epoch
    assert lines[0][1] != pytest.approx(lines[1][1], rel=1e-4)


def test_mixup_mixes_inputs_and_labels_alike() -> None:
    inputs, labels = torch.eye(6), torch.arange(6)
    for seed in range(20):
        made, (first, second, share) = mixup(inputs, labels, generator=torch.Generator().manual_seed(seed))
        assert 0 <= share <= 1
        assert torch.equal(first, labels)
        assert sorted(second.tolist()) == labels.tolist()
        torch.testing.assert_close(made, share * inputs + (1 - share) * inputs[second])
    again, _ = mixup(inputs, labels, generator=torch.Generator().manual_seed(19))
    assert torch.equal(again, made)


@pytest.mark.parametrize("alpha", [0.4, 0.01])  # the second hardly mixes
def test_mixup_proportions_follow_the_beta_distribution(alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    draws = torch.stack([mixup(*one, alpha=alpha, generator=generator)[1].share for _ in range(4000)])
    assert abs(draws.mean() - 0.5) < 0.03
    assert (
        abs(draws.var() - 1 / (4 * (2 * alpha + 1))) < 0.01
    )  # the variance of Beta(a, a) is 1 / (4 (2a + 1))


def test_mixed_loss_is_the_share_of_each() -> None:
    logits, labels = batch(6)
    pair = MixedLabels(labels, labels.flip(0), torch.tensor(0.3))
    want = 0.3 * focal(logits, labels, gamma=1.0) + 0.7 * focal(logits, labels.flip(0), gamma=1.0)
    close(mixed(focal, logits, pair, gamma=1.0), want, 1e-6)
    soft = 0.3 * F.one_hot(labels, 5) + 0.7 * F.one_hot(labels.flip(0), 5)
    close(mixed(cross_entropy, logits, pair), cross_entropy(logits, soft.double()), 1e-6)


def test_mixup_keeps_the_type_and_refuses_what_cannot_be_mixed() -> None:
    made, _ = mixup(torch.ones(3, 2, 2, dtype=torch.bfloat16), torch.arange(3))
    assert made.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="inputs must be floating-point, got uint8"):
        mixup(torch.ones(3, 2, dtype=torch.uint8), torch.arange(3))
    refused("alpha must be > 0, got 0", mixup, torch.ones(3, 2), torch.arange(3), alpha=0.0)
