"""On a GPU: bins with the same bits as on the CPU where the probabilities are the same, and every metric runs."""

import pytest
import torch

from doublehead import abstain, metrics
from doublehead.bins import Bins
from doublehead.predictions import Predictions
from doublehead.summary import Summary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(n: int = 3000, k: int = 20) -> tuple[Predictions, Predictions]:
    """The same probabilities on the CPU and on the GPU."""
    probs = (torch.randn(n, k) * 3).softmax(1)
    labels = torch.where(torch.rand(n) < 0.7, probs.argmax(1), torch.randint(k, (n,)))
    return Predictions.from_probs(probs, labels), Predictions.from_probs(probs.cuda(), labels)


@pytest.mark.parametrize("make", [Bins.top, Bins.classwise, Bins.pooled])
def test_bins_have_the_same_bits(make):
    cpu, gpu = both()
    assert make(gpu).counts.is_cuda
    assert make(gpu).to("cpu") == make(cpu)


@pytest.mark.parametrize("make", [Bins.top, Bins.classwise])
def test_any_split_of_logits_gives_the_same_bits(make):
    p = Predictions(torch.randn(2000, 50, device="cuda") * 3, torch.randint(50, (2000,), device="cuda"))
    parts = [make(p[i : i + 37]) for i in range(0, 2000, 37)]
    assert sum(parts[1:], parts[0]) == make(p)


def test_every_number_agrees_with_the_cpu():
    cpu, gpu = both()
    assert Summary.of(gpu).values == pytest.approx(Summary.of(cpu).values, abs=1e-6)
    assert metrics.mmce(gpu) == pytest.approx(metrics.mmce(cpu), abs=1e-9)
    for most in (0.2, 0.6):  # no threshold reaches the first here, so that some numbers are nan
        assert str(abstain.choose_threshold(gpu, most)) == str(abstain.choose_threshold(cpu, most))
    assert metrics.calibration_test(gpu) == metrics.calibration_test(cpu)
    one, other = (metrics.auroc(p.confidence, p.confidence[:500]) for p in (gpu, cpu))
    assert one == pytest.approx(other, abs=1e-6)
    resampled = metrics.bootstrap(gpu)
    for name, interval in metrics.bootstrap(cpu).items():
        assert resampled[name] == pytest.approx(interval, abs=1e-9)
    for ours, theirs in zip(metrics.risk_coverage(gpu), metrics.risk_coverage(cpu)):
        torch.testing.assert_close(ours.cpu(), theirs)
