"""TextCNN and the global-pooling CNN: by hand, against loops over words, and however far a batch is filled up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from doublehead.models import GlobalPoolingCNN, TextCNN

VECTORS = torch.randn(13, 6, generator=torch.Generator().manual_seed(5))


def make(kind: type, **options: object) -> TextCNN | GlobalPoolingCNN:
    torch.manual_seed(2)
    return kind(3, vectors=VECTORS, **options).double().eval()


def convolved(row: np.ndarray, weight: Tensor, bias: Tensor) -> np.ndarray:
    """(T, D) vectors -> (T - width + 1, channels) after ReLU, window by window."""
    width = weight.shape[2]
    w, b = weight.detach().numpy(), bias.detach().numpy()
    windows = [row[t : t + width] for t in range(len(row) - width + 1)]  # (width, D) each
    return np.maximum(np.array([np.einsum("cdk,kd->c", w, window) + b for window in windows]), 0)


def pooled(row: np.ndarray, width: int, stride: int) -> np.ndarray:
    return np.array([row[t : t + width].max(0) for t in range(0, len(row) - width + 1, stride)])


def looked_up(network: TextCNN | GlobalPoolingCNN, words: list[int], before: int, after: int) -> np.ndarray:
    return network.embedding.weight.detach().numpy()[[0] * before + words + [0] * after]


TEXTS = [[4, 8, 12, 1, 5, 6, 2], [3], [], [7, 7], list(range(1, 13)) * 3]


@pytest.mark.parametrize("words", TEXTS)
def test_textcnn_equals_loops(words):
    network = make(TextCNN, filters=(2, 3), channels=4)
    row = looked_up(network, words, before=3, after=9)
    maxima = [convolved(row, conv.weight, conv.bias).max(0) for conv in network.convolutions]
    features = network.features(torch.tensor([words], dtype=torch.int64))[0]
    np.testing.assert_allclose(features.detach().numpy(), np.concatenate(maxima), rtol=1e-12)


@pytest.mark.parametrize("words", TEXTS)
@pytest.mark.parametrize("stride", [1, 5])
def test_gp_cnn_equals_loops(words, stride):
    network = make(GlobalPoolingCNN, channels=4, hidden=7, stride=stride)
    row = looked_up(network, words, before=0, after=400)
    row = pooled(convolved(row, network.conv1.weight, network.conv1.bias), 5, stride)
    row = pooled(convolved(row, network.conv2.weight, network.conv2.bias), 5, stride)
    top = convolved(row, network.conv3.weight, network.conv3.bias).max(0)
    w, b = network.hidden.weight.detach().numpy(), network.hidden.bias.detach().numpy()
    features = network.features(torch.tensor([words], dtype=torch.int64))[0]
    np.testing.assert_allclose(features.detach().numpy(), np.maximum(w @ top + b, 0), rtol=1e-12)


def test_textcnn_by_hand():
    """Words worth 1, 2, 3, one filter that subtracts the next word: 0 1 2 3 0 0 -> -1 -1 -1 3 0, maximum 3."""
    network = TextCNN(2, vectors=torch.tensor([[0.0], [1.0], [2.0], [3.0]]), filters=(2,), channels=1).eval()
    network.convolutions[0].weight.data = torch.tensor([[[1.0, -1.0]]])
    network.convolutions[0].bias.data.zero_()
    network.classifier.weight.data = torch.tensor([[1.0], [-2.0]])
    network.classifier.bias.data = torch.tensor([0.5, 0.0])
    assert network(torch.tensor([[1, 2, 3]])).tolist() == [[3.5, -6.0]]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TextCNN, {}),
        (GlobalPoolingCNN, {}),
        (GlobalPoolingCNN, {"stride": 5}),
        (GlobalPoolingCNN, {"stride": 2}),
    ],
)
def test_logits_do_not_depend_on_the_batch(kind, options):
    network = make(kind, **options)
    longest = max(map(len, TEXTS))
    for filled_to in (longest, longest + 1, longest + 7, longest + 30, longest + 211):
        batch = torch.zeros(len(TEXTS), filled_to, dtype=torch.int64)
        for row, words in zip(batch, TEXTS):
            row[: len(words)] = torch.tensor(words, dtype=torch.int64)
        alone = torch.cat([network(torch.tensor([words], dtype=torch.int64)) for words in TEXTS])
        torch.testing.assert_close(network(batch), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [TextCNN, GlobalPoolingCNN])
def test_every_word_counts(kind):
    """Changing any one word can change the logits: none falls off the end of the windows."""
    network, words = make(kind), torch.arange(1, 9)[None]
    network.embedding.weight.requires_grad_(True)
    # The gradient of a maximum reaches the winning word alone, so look at the winners of many networks.
    reached = torch.zeros(13, dtype=torch.bool)
    for seed in range(20):
        torch.manual_seed(seed)
        for name, parameter in network.named_parameters():
            if "embedding" not in name:
                torch.nn.init.normal_(parameter)
        network.embedding.weight.grad = None
        network(words).sum().backward()
        reached |= network.embedding.weight.grad.abs().sum(1) > 0
    assert reached[1:9].all()


@pytest.mark.parametrize("kind", [TextCNN, GlobalPoolingCNN])
def test_vectors_stay_as_they_are(kind):
    network = make(kind).train()
    network(torch.tensor([[1, 2, 3]])).square().sum().backward()
    assert network.embedding.weight.grad is None
    trained = [p for p in network.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    assert len(trained) == len(list(network.parameters())) - 1
    assert torch.equal(network.embedding.weight.float(), VECTORS)


def test_arrays_of_numpy_are_taken_and_copied():
    array = np.ones((4, 2))
    network = TextCNN(2, vectors=array)
    array[:] = 0
    assert network.embedding.weight.dtype == torch.float32
    assert network.embedding.weight.min() == 1


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"filters must be widths of at least 1, got \[\]"):
        TextCNN(2, vectors=VECTORS, filters=())
    with pytest.raises(ValueError, match=r"stride must lie in 1\.\.5, the width of the pooling, got 6"):
        GlobalPoolingCNN(2, vectors=VECTORS, stride=6)
