"""Predictions: what goes in comes out, and bad input is named."""

import zipfile

import numpy as np
import pytest
import torch

from doublehead import score_arrays as module
from doublehead.predictions import Predictions
from samples import refused

LOGITS = [[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]]


def test_softmax_by_hand():
    p = Predictions([[np.log(3.0), 0.0], [0.0, np.log(9.0)]], [0, 0])
    torch.testing.assert_close(p.probs, torch.tensor([[0.75, 0.25], [0.1, 0.9]], dtype=torch.float64))
    torch.testing.assert_close(p.confidence, torch.tensor([0.75, 0.9], dtype=torch.float64))
    assert p.predicted.tolist() == [0, 1]
    assert p.correct.tolist() == [True, False]
    assert (len(p), p.n_classes, p.are_probs) == (2, 2, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_are_widened_to_float32_or_kept(dtype):
    logits, wide = torch.randn(50, 7).to(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    p = Predictions(logits, torch.zeros(50, dtype=torch.int16))
    assert p.confidence.dtype == p[:3].dtype == p.logits.dtype == p.dtype == wide
    assert p.device == torch.device("cpu")
    assert p.labels.dtype == torch.int64
    want = Predictions(logits.to(wide), [0] * 50)
    for name in ("logits", "probs", "confidence"):
        assert torch.equal(getattr(p, name), getattr(want, name))


def test_numpy_and_torch_in_any_layout_agree():
    array = np.array(LOGITS, dtype=np.float32)
    want = Predictions(torch.tensor(LOGITS, requires_grad=True), torch.tensor([0, 1]))
    assert not want.confidence.requires_grad
    fixed = array.copy()
    fixed.flags.writeable = False  # torch cannot share this one, nor one with negative strides
    for logits in (array, fixed, array[::-1].copy()[::-1], torch.tensor(LOGITS).t().contiguous().t()):
        found = Predictions(logits, np.array([1, 0], dtype=np.uint8)[::-1])
        assert torch.equal(found.probs, want.probs)
        assert torch.equal(found.confidence, want.confidence)
        assert torch.equal(found.labels, want.labels)


def test_probabilities_are_kept_as_they_came():
    probs = np.array([[0.2, 0.5, 0.3], [0.0, 1.0, 0.0]])
    p = Predictions.from_probs(probs, [1, 1])
    assert p.are_probs
    assert np.array_equal(p.probs.numpy(), probs)
    assert p.confidence.tolist() == [0.5, 1.0]
    assert bool(torch.isfinite(p.logits).all())
    rounded = Predictions.from_probs(np.array([[1 + 5e-7, 0.0]]), [0])
    assert rounded.confidence.tolist() == [1.0]


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("are_probs", [False, True])
def test_binary_models(shape, are_probs):
    chance = np.array([0.1, 0.5, 0.6, 0.9])
    scores = chance if are_probs else np.log(chance / (1 - chance))
    p = Predictions.from_binary(scores.reshape(shape), [0, 1, 1, 0], are_probs=are_probs)
    np.testing.assert_allclose(p.probs[:, 1], chance, rtol=1e-12)
    assert p.correct.tolist() == [True, False, True, False]  # a tie goes to the first class


@pytest.mark.parametrize("are_probs", [False, True])
def test_ties_go_to_the_first_of_the_largest(are_probs):
    """Rows with exact ties, in which the one-pass path must agree with argmax."""
    scores = torch.randint(0, 3, (5000, 6), generator=torch.Generator().manual_seed(1)).float()
    scores[:, 0] += 0.25  # no row of zeros
    scores = scores / scores.sum(1, keepdim=True) if are_probs else scores
    labels = torch.randint(0, 6, (5000,))
    p = Predictions.from_probs(scores, labels) if are_probs else Predictions(scores, labels)
    confidence, correct = p.top_label()
    assert torch.equal(correct, scores.argmax(1) == labels)
    assert torch.equal(correct, p.correct)
    assert torch.equal(confidence, p.probs.amax(1))
    ties = (scores == scores.amax(1, keepdim=True)).sum(1) > 1
    assert int(ties.sum()) > 1000


def test_near_ties_are_told_apart():
    """Differences that the probabilities hardly show, or not at all, in both directions."""
    for gap in (1e-2, 1e-4, 1e-6, 2e-7):
        logits = torch.tensor([[1.0, 1.0 + gap, 0.0], [1.0 + gap, 1.0, 0.0]], dtype=torch.float32)
        assert Predictions(logits, [0, 0]).top_label()[1].tolist() == [False, True]
        assert Predictions(logits, [1, 1]).top_label()[1].tolist() == [True, False]
    rough = Predictions.from_probs([[0.55, 0.55, 0.0], [0.55, 0.55, 0.0]], [0, 1], tolerance=0.2)
    assert rough.top_label()[1].tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("are_probs", [False, True])
@pytest.mark.usefixtures("one_thread")  # which restores their number
def test_chunks_and_threads_give_the_same_bits(monkeypatch, dtype, are_probs):
    scores = torch.randn(999, 10, generator=torch.Generator().manual_seed(0)) * 3
    scores = (scores.softmax(1) if are_probs else scores).to(dtype)
    labels = torch.randint(0, 10, (999,))
    make = Predictions.from_probs if are_probs else Predictions
    found = []
    for threads, chunk in ((1, module.BLOCK_ENTRIES), (1, 70), (3, 70)):
        monkeypatch.setattr(module, "CHUNK_ENTRIES", chunk)
        monkeypatch.setattr(module, "BLOCK_ENTRIES", chunk)
        torch.set_num_threads(threads)
        p = make(scores, labels)
        found.append((*p.top_label(), p.predicted, p.probs))
        assert torch.get_num_threads() == threads
    for whole, *others in zip(*found):
        assert all(torch.equal(whole, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_either_exp_gives_the_probabilities(monkeypatch, dtype):
    """torch's and numpy's, with logits near and far from 0 in one chunk."""
    logits = torch.randn(300, 12, generator=torch.Generator().manual_seed(0), dtype=dtype) * 3
    logits += torch.tensor([0.0, 60.0, -60.0, 800.0, -2000.0], dtype=dtype).repeat(60)[:, None]
    labels = torch.zeros(300, dtype=torch.int64)
    want = logits.double().softmax(1)
    ulp = torch.finfo(dtype).eps
    for of_numpy in (False, True):
        monkeypatch.setattr(module, "_numpy_has_the_faster_exp", lambda itemsize, of_numpy=of_numpy: of_numpy)
        p = Predictions(logits, labels)
        # exp of a logit l is off by |l| ulp where l - max was rounded, and by a few more
        torch.testing.assert_close(p.probs.double(), want, rtol=3000 * ulp, atol=1e-30)
        torch.testing.assert_close(p.probs.sum(1), torch.ones(300, dtype=dtype), rtol=0, atol=50 * ulp)
        assert torch.equal(p.confidence, p.probs.gather(1, p.predicted[:, None])[:, 0])
        assert bool((p.confidence <= 1).all())
        for rows in (slice(1, 2), slice(7, 20), slice(3, 4)):
            assert torch.equal(p[rows].confidence, p.confidence[rows])
            assert torch.equal(p[rows].probs, p.probs[rows])


@pytest.mark.parametrize("classes", [2, 17, 1001, module.EINSUM_BUFFER, 9001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_row_alone_has_the_bits_that_it_has_among_others(dtype, classes):
    logits = (torch.randn(12, classes, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    logits[::3] += 60
    labels = torch.zeros(12, dtype=torch.int64)
    p = Predictions(logits, labels)
    for row in range(12):
        alone = Predictions(logits[row : row + 1].clone(), labels[:1])
        assert torch.equal(alone.confidence, p.confidence[row : row + 1])
        assert torch.equal(alone.probs, p.probs[row : row + 1])


def test_extreme_logits_stay_finite():
    p = Predictions([[3e38, -3e38], [-1e4, 1e4]], [0, 1])
    assert p.confidence.tolist() == [1.0, 1.0]
    Predictions(np.full((4, 2), 3e38, dtype=np.float32), [0, 0, 1, 1])  # their sum overflows, they do not


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_may_sum_to_1_as_far_as_rounding_explains(dtype) -> None:
    probs = np.random.default_rng(0).dirichlet([0.5] * 10, 300).astype(dtype)
    for digits in (2, 3):
        rounded = probs.round(digits)
        assert np.abs(rounded.sum(1) - 1).max() > 1e-3
        assert len(Predictions.from_probs(rounded, np.zeros(300, dtype=int))) == 300
    with pytest.raises(ValueError, match="must sum to 1 within 0.001, got 0.98"):
        Predictions.from_probs(0.98 * probs, np.zeros(300, dtype=int))


def test_rows():
    p = Predictions(np.arange(12.0).reshape(4, 3), [0, 1, 2, 0])
    assert p[1:3].labels.tolist() == [1, 2]
    assert p[[3, 0]].logits[0].tolist() == [9.0, 10.0, 11.0]
    assert p[p.correct].labels.tolist() == [2]
    assert p[np.array([True, False, False, True])].labels.tolist() == [0, 0]
    rough = Predictions.from_probs([[0.7, 0.31], [0.2, 0.8]], [0, 1], tolerance=0.1)
    assert rough[:1].are_probs
    assert rough[:1].probs.tolist() == [[0.7, 0.31]]
    with pytest.raises(IndexError, match="rows must be a slice, an index array or a mask, got 2"):
        p[2]
    with pytest.raises(IndexError, match="rows must select at least one of 4 rows, got none"):
        p[4:]


@pytest.mark.parametrize("are_probs", [False, True])
def test_save_and_load(tmp_path, are_probs):
    scores = torch.rand(50, 4, dtype=torch.float64)
    scores = scores / scores.sum(1, keepdim=True)
    labels = torch.randint(0, 4, (50,))
    p = Predictions.from_probs(scores, labels) if are_probs else Predictions(scores, labels)
    path = p.save(tmp_path / "new" / "p.npz")
    q = Predictions.load(path)
    assert q.are_probs == are_probs
    assert torch.equal(p.probs, q.probs)
    assert torch.equal(p.labels, q.labels)
    assert [file.name for file in path.parent.iterdir()] == ["p.npz"]
    assert path.stat().st_mode & 0o777 == 0o644  # others can read it
    rough = Predictions.from_probs([[0.7, 0.33]], [0], tolerance=0.1).save(path)
    assert len(Predictions.load(rough, tolerance=0.1)) == 1
    refused(r"each row of probs must sum to 1 within 0.001, got 1.03 in row 0", Predictions.load, rough)


def test_files_that_cannot_be_read(tmp_path):
    refused(r"path must end in .npz, got 'p.csv'", Predictions(LOGITS, [0, 1]).save, tmp_path / "p.csv")
    with pytest.raises(FileNotFoundError):
        Predictions.load(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("a,b\n1,2\n")
    scores, labels = np.zeros((2, 2)), np.zeros(2, int)
    np.savez(tmp_path / "names.npz", scores=scores, labels=labels)
    np.savez(tmp_path / "pickle.npz", logits=np.array([[1.0, None]], dtype=object), labels=labels)
    np.savez(tmp_path / "both.npz", logits=scores, probs=scores, labels=labels)
    for name, message in (
        ("text", "text.npz must be an .npz file .* got something else or a truncated file"),
        ("names", r"the arrays 'labels' and either 'logits' or 'probs', got \['labels', 'scores'\]"),
        ("pickle", "must hold plain arrays in whole, got: .*allow_pickle=False"),
        ("both", r"either 'logits' or 'probs', got \['labels', 'logits', 'probs'\]"),
    ):
        refused(message, Predictions.load, tmp_path / f"{name}.npz")
    path = Predictions(np.random.default_rng(0).normal(size=(200, 5)), [0] * 200).save(tmp_path / "p.npz")
    with zipfile.ZipFile(path) as file:
        start = file.getinfo("logits.npy").header_offset + 60
    broken = bytearray(path.read_bytes())
    broken[start : start + 200] = bytes(200)
    path.write_bytes(broken)
    refused(r"p.npz must hold plain arrays in whole", Predictions.load, path)
    path.write_bytes(broken[: len(broken) // 2])
    refused("truncated file", Predictions.load, path)


BAD = [
    ([1.0, 2.0], [0, 1], ValueError, r"logits must have shape \(N, K\) with K >= 2, got \(2,\); .* from_binary"),
    ([[1.0], [2.0]], [0, 1], ValueError, r"got \(2, 1\); a binary model's single score enters through from_binary"),
    (np.zeros((2, 2, 2)), [0, 1], ValueError, r"with K >= 2, got \(2, 2, 2\)$"),
    (np.zeros((0, 3)), [], ValueError, r"logits must have at least one row, got shape \(0, 3\)"),
    ([[1, 2]], [0], TypeError, "logits must be of a floating type, got int64"),
    ([["a", "b"]], [0], TypeError, "logits must be an array of numbers, got list"),
    ([[1.0, 2.0], [1.0]], [0, 0], TypeError, "logits must be an array of numbers, got list"),
    ([[1.0, np.nan], [1.0, np.inf]], [0, 0], ValueError,
     r"logits must be finite, got 2 non-finite values, the first one \(nan\) in row 0, column 1"),
    ([[1.0, 2.0], [np.inf, -np.inf]], [0, 0], ValueError, r"the first one \(inf\) in row 1, column 0"),
    (LOGITS, [0.0, 1.0], TypeError, "labels must be whole numbers, .*got float64"),
    (LOGITS, ["a", "b"], TypeError, "labels must be an array of numbers, got list"),
    (LOGITS, [0], ValueError, r"labels must have shape \(2,\) for logits of shape \(2, 3\), got \(1,\)"),
    (LOGITS, [[0], [1]], ValueError, r"labels must have shape \(2,\) .* got \(2, 1\)"),
    (LOGITS, [0, 3], ValueError, r"labels must lie in 0..2 for logits of shape \(2, 3\), got a maximum of 3"),
    (LOGITS, [-1, 2], ValueError, r"labels must lie in 0..2 .* got a minimum of -1"),
]  # fmt: skip


@pytest.mark.parametrize(("logits", "labels", "error", "message"), BAD)
def test_bad_input_is_named(logits, labels, error, message):
    refused(message, Predictions, logits, labels, error=error)


BAD_PROBS = [
    ([[0.5, 0.5], [np.nan, 1.0]], r"probs must be finite, got 1 non-finite values, .* \(nan\) in row 1, column 0"),
    ([[np.inf, 0.5]], r"the first one \(inf\) in row 0, column 0"),
    ([[1.0, -np.inf]], r"the first one \(-inf\) in row 0, column 1"),
    ([[0.5, 0.5], [0.5, -np.nan]], r"the first one \(nan\) in row 1, column 1"),
    ([[0.5, 0.5, 0.0], [0.75, -0.25, 0.5]], r"got values from -0.25 to 0.75"),
    ([[1.4, 0.2]], r"probs must lie in 0..1, got values from 0.2 to 1.4"),
    ([[1.0, -1e-7]], r"probs must lie in 0..1, got values from -1e-07 to 1"),
    ([[1.5, -0.5]], r"probs must lie in 0..1, got values from -0.5 to 1.5; logits enter through Predictions"),
    ([[0.5, 0.5], [0.5, 0.4]], r"each row of probs must sum to 1 within 0.001, got 0.9 in row 1"),
    ([[0.0, 0.0]], r"must sum to 1 within 0.001, got 0 in row 0"),
]  # fmt: skip


@pytest.mark.parametrize(("probs", "message"), BAD_PROBS)
def test_bad_probabilities_are_named(probs, message):
    refused(message, Predictions.from_probs, probs, [0] * len(probs))


def test_bad_binary_scores_are_named():
    for scores, labels, are_probs, message in (
        ([[1.0, 2.0]], [0], False, r"binary logits must have shape \(N,\) or \(N, 1\), got \(1, 2\)"),
        ([1.5], [0], True, "probs must lie in 0..1"),
        ([1.5], [2], False, "labels must lie in 0..1"),
    ):
        refused(message, Predictions.from_binary, scores, labels, are_probs=are_probs)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_negative_zero_is_a_zero(dtype):
    p = Predictions.from_probs(np.array([[0.25, -0.0, 0.75], [-0.0, 1.0, 0.0]], dtype), [2, 2])
    assert p.predicted.tolist() == [2, 1]
    assert p.confidence.tolist() == [0.75, 1.0]
    assert p.zero_floor == pytest.approx(0.01 / 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_probs_do_not_depend_on_where_entries_lie_in_memory(dtype: torch.dtype) -> None:
    """A row's sum is rounded differently where its entries are added in another order."""
    logits = (3 * torch.randn(100, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    labels = torch.zeros(100, dtype=torch.int64)
    transposed = Predictions(logits.T.contiguous().T, labels)
    assert torch.equal(transposed.probs, Predictions(logits, labels).probs)
    assert torch.equal(transposed.probs.amax(1), transposed.confidence)
