"""Bins: the edges are where the text says, and any split gives the same bits."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from doublehead import score_arrays
from doublehead.bins import Bins, bin_of, inner_edges, quantise
from doublehead.predictions import Predictions
from samples import overconfident, refused


def random_predictions(n: int, k: int, *, dtype=torch.float32, probs: bool = False) -> Predictions:
    p = overconfident(n, k, 1.0, spread=2.0, seed=n + k, dtype=dtype)
    return Predictions.from_probs(p.probs, p.labels) if probs else p


def slow_bins(confidence, correct, n_bins):
    """Plain Python: right-closed bins whose edges are rounded to the type of the confidences."""
    edges = [confidence.dtype.type(i / n_bins) for i in range(1, n_bins + 1)]
    counts, sums, right = [0] * n_bins, [Fraction(0)] * n_bins, [0] * n_bins
    for c, r in zip(confidence, correct):
        place = next((i for i, edge in enumerate(edges) if c <= edge), n_bins - 1)
        counts[place] += 1
        sums[place] += Fraction(float(c))
        right[place] += int(r)
    return counts, sums, right


def test_by_hand():
    bins = Bins.of([0.1, 0.25, 0.26, 0.9, 1.0], [True, False, True, True, False], n_bins=4)
    assert bins.counts.tolist() == [2, 1, 0, 2]
    assert bins.correct_sums.tolist() == [1, 1, 0, 1]
    np.testing.assert_allclose(bins.confidence, [0.175, 0.26, np.nan, 0.95], atol=1e-9)
    np.testing.assert_allclose(bins.accuracy, [0.5, 1.0, np.nan, 0.5])
    np.testing.assert_allclose(bins.gap, [-0.325, -0.74, np.nan, 0.45], atol=1e-9)
    assert float(bins.ece()) == pytest.approx((2 * 0.325 + 0.74 + 2 * 0.45) / 5, abs=1e-9)
    assert float(bins.mce()) == pytest.approx(0.74, abs=1e-9)
    assert float(bins.ece2()) == pytest.approx(((2 * 0.325**2 + 0.74**2 + 2 * 0.45**2) / 5) ** 0.5, abs=1e-9)
    assert (bins.n, bins.n_bins, bins.edges.tolist()) == (5, 4, [0, 0.25, 0.5, 0.75, 1])
    assert Bins.of([0.97, 1.0], [True, True]).counts.tolist() == [0] * 14 + [2]  # no bin for 1 alone


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n_bins", [1, 2, 7, 10, 15, 20, 100])
def test_an_edge_belongs_to_the_bin_it_ends(dtype, n_bins):
    edges = np.array([i / n_bins for i in range(1, n_bins + 1)], dtype=dtype)
    assert bin_of(torch.from_numpy(edges), n_bins).tolist() == list(range(n_bins))
    above = np.nextafter(edges[:-1], dtype(2))
    assert bin_of(torch.from_numpy(above), n_bins).tolist() == list(range(1, n_bins))
    ends = torch.tensor([0.0, 1.0], dtype=torch.from_numpy(edges).dtype)
    assert bin_of(ends, n_bins).tolist() == [0, n_bins - 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_plain_python(dtype):
    rng = np.random.default_rng(0)
    confidence = np.concatenate([rng.random(2000), rng.random(300) ** 0.01, np.arange(16) / 15]).astype(dtype)
    correct = rng.random(len(confidence)) < confidence
    bins = Bins.of(confidence, correct)
    counts, sums, right = slow_bins(confidence, correct, 15)
    assert bins.counts.tolist() == counts
    assert bins.correct_sums.tolist() == right
    for got, want, count in zip(bins.conf_sums.tolist(), sums, counts):
        assert abs(Fraction(got, 2**32) - want) <= Fraction(count, 2**33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize(("k", "n_bins"), [(2, 15), (10, 15), (10, 1), (40, 4), (120, 15)])
def test_components_against_one_class_at_a_time(dtype, probs, k, n_bins):
    p = random_predictions(800, k, dtype=dtype, probs=probs)
    bins = Bins.classwise(p, n_bins)
    columns = p.probs.t().contiguous()
    want = [Bins.of(column, p.labels == i, n_bins) for i, column in enumerate(columns)]
    assert bins == Bins.from_state(torch.stack([one.state() for one in want], 1))
    assert Bins.pooled(p, n_bins) == sum(want[1:], want[0])
    assert Bins.top(p, n_bins) == Bins.of(p.confidence, p.correct, n_bins)


@pytest.mark.parametrize("make", [Bins.top, Bins.classwise, Bins.pooled])
@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_split_and_order_gives_the_same_bits(make, probs, dtype):
    p = random_predictions(1500, 12, probs=probs, dtype=dtype)
    whole = make(p)
    for size in (1, 7, 64, 1500):
        n = min(1500, 40 * size)
        parts = [make(p[i : i + size]) for i in range(0, n, size)]
        assert sum(parts[1:], parts[0]) == make(p[:n])
    assert make(p[torch.randperm(1500)]) == whole


@pytest.mark.usefixtures("one_thread")  # which restores their number
def test_chunks_and_threads_give_the_same_bits(monkeypatch):
    p = random_predictions(500, 11)
    found = [(Bins.top(p), Bins.classwise(p), Bins.pooled(p))]
    monkeypatch.setattr(score_arrays, "CHUNK_ENTRIES", 88)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append((Bins.top(p), Bins.classwise(p), Bins.pooled(p)))
    assert found[0] == found[1] == found[2]


def test_confidences_are_kept_to_two_to_the_minus_33():
    values = torch.tensor([0.0, 1.0, 2.0**-32, 2.0**-34, 1 / 3], dtype=torch.float64)
    assert quantise(values).tolist() == [0, 2**32, 1, 0, round(2**32 / 3)]
    # 0.5, 1.5 and 2.5 units of 2^-32 round half to even, in class-wise sums as well
    small = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64) / 2**32
    p = Predictions.from_probs(torch.stack([small, 1 - small], 1), [1, 1, 1])
    assert int(Bins.classwise(p).conf_sums[0, 0]) == int(quantise(small).sum()) == 4


def test_a_stream_starts_from_zeros_and_coarser_bins_are_exact():
    p = random_predictions(5000, 8)
    assert Bins.zeros(15) + Bins.top(p) == Bins.top(p)
    assert Bins.zeros(8, 15) + Bins.classwise(p) == Bins.classwise(p)
    assert Bins.zeros(15).n == 0
    assert bool(torch.isnan(Bins.zeros(15).ece()))
    assert Bins.top(p, 960).coarsen(15) == Bins.top(p, 15)
    assert Bins.classwise(p, 30).coarsen(15) == Bins.classwise(p, 15)
    refused("n_bins must divide the present 15 bins, got 4", Bins.top(p).coarsen, 4)


def test_large_sums_stay_exact():
    """Float32 would lose these: 2^31 - 1 samples of confidence 1, then one of 2^-32."""
    many = Bins(torch.tensor([2**31 - 1]), torch.tensor([(2**31 - 1) * 2**32]), torch.tensor([2**31 - 1]))
    more = many + Bins.of(torch.tensor([2.0**-32]), [False], n_bins=1)
    assert int(more.conf_sums) == (2**31 - 1) * 2**32 + 1
    assert float(more.excess) == 2.0**-32


def test_state_and_back():
    bins = Bins.classwise(random_predictions(50, 4))
    state = bins.state()
    assert state.shape == (3, 4, 15)
    assert state.dtype == torch.int64
    assert Bins.from_state(state) == bins
    assert bins.to("cpu") == bins
    assert bins != Bins.top(random_predictions(50, 4))
    assert (bins == 3) is False


BAD = [
    (lambda: Bins.of([0.5], [True, False]), ValueError,
     r"correct must have the shape of confidence \(1,\), got \(2,\)"),
    (lambda: Bins.of([[0.5]], [[True]]), ValueError, r"confidence must have shape \(N,\), got \(1, 1\)"),
    (lambda: Bins.of([0.5, 1.5], [True, True]), ValueError,
     "confidence must lie in 0..1 .* got values from 0.5 to 1.5"),
    (lambda: Bins.of([0.5, -0.1], [True, True]), ValueError, "got values from -0.1 to 0.5"),
    (lambda: Bins.of([0.5, np.nan], [True, True]), ValueError, "confidence must lie in 0..1 and be finite"),
    (lambda: Bins.of([1], [True]), TypeError, "confidence must be of a floating type, got int64"),
    (lambda: Bins.of([0.5], [True], n_bins=0), ValueError, "n_bins must be a whole number >= 1, got 0"),
    (lambda: Bins.of([0.5], [True], n_bins=2.5), ValueError, "n_bins must be a whole number >= 1, got 2.5"),
    (lambda: Bins.of([0.5], [0.3]), TypeError, "correct must be bool or whole numbers 0 and 1, got float64"),
    (lambda: Bins.of([0.5], [2]), ValueError, "correct must be bool or whole numbers 0 and 1, got 2"),
    (lambda: Bins.zeros(15) + 1, TypeError, "unsupported operand"),
    (lambda: Bins.zeros(15) + Bins.zeros(10), ValueError,
     r"only bins of one shape can be added, got \(15,\) and \(10,\)"),
    (lambda: Bins.from_state(torch.zeros(2, 15).long()), ValueError,
     r"state must have shape \(3, ..., n_bins\), got \(2, 15\)"),
    (lambda: Bins.from_state(torch.zeros(3, 15)), TypeError, "counts must be an int64 tensor, got float32"),
    (lambda: Bins(torch.zeros(2).long(), torch.zeros(3).long(), torch.zeros(2).long()), ValueError,
     r"conf_sums must have shape \(..., n_bins\) like counts \(2,\), got \(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_input_is_named(make, error, message):
    refused(message, make, error=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_bins_have_the_edges_of_a_search(dtype: torch.dtype) -> None:
    n_bins = 960
    edges = (torch.arange(n_bins + 1, dtype=torch.float64) / n_bins).to(dtype)
    around = edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges, -edges - 1)
    confidence = torch.cat([*around, torch.rand(10_000, dtype=dtype)]).clamp(0, 1)
    want = torch.bucketize(confidence, inner_edges(n_bins, confidence))
    assert torch.equal(bin_of(confidence, n_bins), want)
