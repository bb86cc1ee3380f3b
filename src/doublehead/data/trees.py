"""Parsed sentences as arrays, and batches of them sorted by height for a TreeLSTM."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]
IGNORED = -100  # the label that torch's cross entropy ignores


@dataclass(frozen=True, eq=False)
class Tree:
    """A binary tree over the words of one sentence, as arrays over its nodes in post-order, the root last.

    `tokens` are the words of the leaves from left to right. With n nodes:
    `words` (n,): position of a leaf in `tokens` or, after `index`, its vocabulary row; -1 for inner nodes.
    `left`, `right` (n,): node numbers of the children, -1 for leaves; children come before their parent.
    `labels` (n,): class of each node's phrase, -100 if it has none.

    >>> tree = parse_tree("(3 (2 a) (4 (2 very) (3 good)))")
    >>> tree.tokens, tree.words.tolist(), tree.left.tolist(), tree.right.tolist(), tree.labels.tolist()
    (('a', 'very', 'good'), [0, 1, 2, -1, -1], [-1, -1, -1, 1, 0], [-1, -1, -1, 2, 3], [2, 2, 3, 4, 3])
    """

    tokens: tuple[str, ...]
    words: Array
    left: Array
    right: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.words)

    @property
    def text(self) -> str:
        """The sentence: its tokens joined by spaces."""
        return " ".join(self.tokens)

    def index(self, lookup: Callable[[str], int]) -> Tree:
        """The same tree with `words` holding `lookup(token)`, a row in a vocabulary."""
        ids = np.array([lookup(token) for token in self.tokens], np.int64)
        words = np.where(self.words >= 0, ids[self.words], -1)
        return Tree(self.tokens, words, self.left, self.right, self.labels)

    def relabel(self, classes: Sequence[int]) -> Tree:
        """The same tree with label l replaced by `classes[l]`; (0, 0, -100, 1, 1) makes sentiment binary."""
        return Tree(self.tokens, self.words, self.left, self.right, np.array(classes, np.int64)[self.labels])

    def phrases(self) -> Iterator[Tree]:
        """The tree of each labelled phrase, the whole sentence last.

        >>> [phrase.text for phrase in parse_tree("(3 (2 a) (4 (2 very) (3 good)))").phrases()]
        ['a', 'very', 'good', 'very good', 'a very good']
        """
        is_leaf = self.left < 0
        n_leaves = np.concatenate([[0], np.cumsum(is_leaf)])  # among the nodes before one
        start = np.arange(len(self))  # a phrase's nodes are consecutive
        for node in np.flatnonzero(~is_leaf):
            start[node] = start[self.left[node]]
        for node in np.flatnonzero(self.labels != IGNORED):
            nodes, leaves = slice(start[node], node + 1), slice(n_leaves[start[node]], n_leaves[node + 1])
            left, right = (np.maximum(side[nodes] - start[node], -1) for side in (self.left, self.right))
            words = np.where(is_leaf[nodes], n_leaves[nodes] - leaves.start, -1)
            yield Tree(self.tokens[leaves], words, left, right, self.labels[nodes])


def parse_tree(line: str) -> Tree:
    """One tree in the Penn Treebank notation of SST: `(label child child)` or `(label word)`.

    Each node must hold one word or two nodes: SST's trees are binary.
    """
    tokens: list[str] = []
    words, left, right, labels = [], [], [], []
    open_nodes: list[tuple[int, list[int]]] = []  # (label, finished children)
    root = -1
    # A word may contain a no-break space ("8 1/2").
    for piece in re.findall(r"\(\s*\d+|\)|[^ \t\r\n()]+", line):
        if root >= 0:
            raise ValueError(f"a tree must end with its root's bracket, got {piece!r} after it")
        if piece.startswith("("):
            open_nodes.append((int(piece[1:]), []))
            continue
        if not open_nodes:
            raise ValueError(f"a tree must start with '(label', got {piece!r}")
        if piece != ")":
            open_nodes[-1][1].append(-1 - len(tokens))  # words are negative, child nodes are not
            tokens.append(piece)
            continue
        label, children = open_nodes.pop()
        is_leaf = len(children) == 1 and children[0] < 0
        if not is_leaf and (len(children) != 2 or min(children) < 0):
            raise ValueError(f"each node must hold one word or two nodes, got {len(children)} entries")
        words.append(-1 - children[0] if is_leaf else -1)
        left.append(-1 if is_leaf else children[0])
        right.append(-1 if is_leaf else children[1])
        labels.append(label)
        if open_nodes:
            open_nodes[-1][1].append(len(words) - 1)
        else:
            root = len(words) - 1
    if root < 0:
        raise ValueError(f"a tree must close all its brackets, {len(open_nodes)} are open at the end")
    return Tree(tuple(tokens), *(np.array(a, np.int64) for a in (words, left, right, labels)))


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """Many trees as one forest whose nodes are sorted by height: leaves first, then height 1, 2, ...

    With M nodes in all:
    `words`, `left`, `right`, `labels` (M,): as in `Tree`, children numbered within the forest.
    `roots` (B,): root of each tree.
    `levels`: a list; the nodes of height h are `levels[h] : levels[h + 1]`. They depend on lower nodes only, so a
    TreeLSTM needs one matrix product per height.
    `targets` (T,): the nodes to classify, roots or all labelled nodes. Logits come in this order.

    >>> batch = TreeBatch.of([parse_tree("(3 (2 a) (3 b))"), parse_tree("(1 c)")])
    >>> batch.levels, batch.words.tolist(), batch.left.tolist(), batch.roots.tolist()
    ([0, 3, 4], [0, 1, 0, -1], [-1, -1, -1, 0], [3, 2])
    """

    words: Tensor
    left: Tensor
    right: Tensor
    labels: Tensor
    roots: Tensor
    levels: list[int]
    targets: Tensor

    @classmethod
    def of(cls, trees: Sequence[Tree], nodes: Literal["root", "all"] = "root") -> TreeBatch:
        """Batch at least one tree; `nodes` selects the nodes to classify: roots, or all that have a label."""
        if nodes not in ("root", "all"):
            raise ValueError(f"nodes must be 'root' or 'all', got {nodes!r}")
        if not trees:
            raise ValueError("trees must hold at least one tree, got none")
        sizes = np.array([len(tree) for tree in trees])
        starts = np.cumsum(sizes) - sizes
        shift = np.repeat(starts, sizes)  # (M,)
        left, right = (np.concatenate([getattr(t, side) for t in trees]) for side in ("left", "right"))
        left, right = np.where(left >= 0, left + shift, -1), np.where(right >= 0, right + shift, -1)
        height = _heights(left, right)
        order = np.argsort(height, kind="stable")  # new position -> old node
        place = np.empty_like(order)  # old node -> new position
        place[order] = np.arange(len(order))
        levels = np.concatenate([[0], np.cumsum(np.bincount(height))]).tolist()
        left, right = (np.where(side >= 0, place[side], -1)[order] for side in (left, right))
        labels = np.concatenate([t.labels for t in trees])[order]
        roots = place[starts + sizes - 1]
        return cls(
            words=torch.from_numpy(np.concatenate([t.words for t in trees])[order]),
            left=torch.from_numpy(left),
            right=torch.from_numpy(right),
            labels=torch.from_numpy(labels),
            roots=torch.from_numpy(roots),
            levels=levels,
            targets=torch.from_numpy(roots if nodes == "root" else np.flatnonzero(labels != IGNORED)),
        )

    @property
    def target_labels(self) -> Tensor:
        """(T,) the classes of the nodes to classify."""
        return self.labels[self.targets]

    def to(self, device: torch.device | str) -> TreeBatch:
        """The same batch on a device."""
        names = ("words", "left", "right", "labels", "roots", "targets")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def sample_keys(self) -> Tensor:
        """(B,) a whole number for each tree, computed from its words and structure: equal trees have equal keys."""
        state = _mix(self.words + 1)  # (M,)
        # Children are computed before their parent.
        for start, stop in zip(self.levels[1:-1], self.levels[2:]):
            left, right = state[self.left[start:stop]], state[self.right[start:stop]]
            state[start:stop] = _mix(3 * left + 5 * right)
        return state[self.roots]

    def __len__(self) -> int:
        return len(self.roots)


def _mix(keys: Tensor) -> Tensor:
    """Scramble whole numbers; products wrap around, the same on any device."""
    keys = (keys + 1) * 0x2545F4914F6CDD1D
    return (keys ^ (keys >> 29)) * 2654435761


def _heights(left: Array, right: Array) -> Array:
    """(M,) 0 for leaves, else 1 + the larger height of the children; one pass per height."""
    height = np.zeros(len(left), np.int64)
    inner = np.flatnonzero(left >= 0)
    while len(inner):
        taller = 1 + np.maximum(height[left[inner]], height[right[inner]])
        changed = taller != height[inner]
        height[inner] = taller
        if not changed.any():
            break
    return height
