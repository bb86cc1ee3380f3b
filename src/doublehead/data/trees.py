"""Parsed sentences as arrays, and batches of them sorted by height for a TreeLSTM."""

from __future__ import annotations

import re
import zlib
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
    `children` (n, 2): node numbers of the left and the right child, which come before their parent; -1 for leaves.
    `labels` (n,): class of each node's phrase, -100 if it has none.
    `heights` (n,): 0 for leaves, else 1 + the larger height of the children.

    >>> tree = parse_tree("(3 (2 a) (4 (2 very) (3 good)))")
    >>> tree.tokens, tree.words.tolist(), tree.children.tolist()[3:], tree.labels.tolist()
    (('a', 'very', 'good'), [0, 1, 2, -1, -1], [[1, 2], [0, 3]], [2, 2, 3, 4, 3])
    """

    tokens: tuple[str, ...]
    words: Array
    children: Array
    labels: Array
    heights: Array

    def __len__(self) -> int:
        return len(self.words)

    @property
    def text(self) -> str:
        """The sentence: its tokens joined by spaces."""
        return " ".join(self.tokens)

    def index(self, lookup: Callable[[str], int]) -> Tree:
        """The same tree with `words` holding `lookup(token)`, a row in a vocabulary."""
        ids = np.array([lookup(token) for token in self.tokens], np.int64)
        return replace(self, words=np.where(self.words >= 0, ids[self.words], -1))

    def relabel(self, classes: Sequence[int]) -> Tree:
        """The same tree with label l replaced by `classes[l]`; (0, 0, -100, 1, 1) makes sentiment binary."""
        return replace(self, labels=np.array(classes, np.int64)[self.labels])

    def phrases(self) -> Iterator[Tree]:
        """The tree of each labelled phrase, the whole sentence last.

        >>> [phrase.text for phrase in parse_tree("(3 (2 a) (4 (2 very) (3 good)))").phrases()]
        ['a', 'very', 'good', 'very good', 'a very good']
        """
        start = np.arange(len(self))  # the first node of each phrase, whose nodes are consecutive
        for node in np.flatnonzero(self.words < 0):
            start[node] = start[self.children[node, 0]]
        for node in np.flatnonzero(self.labels != IGNORED):
            nodes = slice(start[node], node + 1)
            leaves = self.words[nodes][self.words[nodes] >= 0]
            words = np.maximum(self.words[nodes] - leaves[0], -1)
            children = np.maximum(self.children[nodes] - start[node], -1)
            tokens = self.tokens[leaves[0] : leaves[-1] + 1]
            yield Tree(tokens, words, children, self.labels[nodes], self.heights[nodes])


def parse_tree(line: str) -> Tree:
    """One tree in the Penn Treebank notation of SST: `(label child child)` or `(label word)`.

    Each node must hold one word or two nodes: SST's trees are binary.
    """
    tokens: list[str] = []
    nodes: list[tuple[int, int, int, int, int]] = []  # finished: word, left, right, label, height
    # Label, and what was read of it: words and finished nodes.
    open_nodes: list[tuple[int, list[int | str]]] = []
    # A word may contain a no-break space ("8 1/2").
    for piece in re.findall(r"\(\s*\d+|\)|[^ \t\r\n()]+", line):
        if nodes and not open_nodes:
            raise ValueError(f"a tree must end with its root's bracket, got {piece!r} after it")
        if piece.startswith("("):
            open_nodes.append((int(piece[1:]), []))
            continue
        if not open_nodes:
            raise ValueError(f"a tree must start with '(label', got {piece!r}")
        if piece != ")":
            open_nodes[-1][1].append(piece)
            continue
        match open_nodes.pop():
            case label, [str(word)]:
                nodes.append((len(tokens), -1, -1, label, 0))
                tokens.append(word)
            case label, [int(left), int(right)]:
                nodes.append((-1, left, right, label, 1 + max(nodes[left][4], nodes[right][4])))
            case _, entries:
                raise ValueError(f"each node must hold one word or two nodes, got {len(entries)} entries")
        if open_nodes:
            open_nodes[-1][1].append(len(nodes) - 1)
    if open_nodes or not nodes:
        raise ValueError(f"a tree must close all its brackets, {len(open_nodes)} are open at the end")
    columns = np.array(nodes, np.int64)
    return Tree(tuple(tokens), columns[:, 0], columns[:, 1:3], columns[:, 3], columns[:, 4])


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """Many trees as one forest whose nodes are sorted by height: leaves first, then height 1, 2, ...

    With M nodes in all:
    `words` (M,), `children` (M, 2): as in `Tree`, children numbered within the forest.
    `levels`: a list; the nodes of height h are `levels[h] : levels[h + 1]`. They depend on lower nodes only, so a
    TreeLSTM needs one matrix product per height.
    `targets` (T,), `target_labels` (T,): the nodes to classify, roots or all labelled nodes, and their classes. Logits
    come in this order.
    `sample_keys` (B,): whole numbers computed from each tree's words and structure: equal trees have equal keys.

    >>> batch = TreeBatch.of([parse_tree("(3 (2 a) (3 b))"), parse_tree("(1 c)")])
    >>> batch.levels, batch.words.tolist(), batch.children[3].tolist(), batch.targets.tolist()
    ([0, 3, 4], [0, 1, 0, -1], [0, 1], [3, 2])
    """

    words: Tensor
    children: Tensor
    levels: list[int]
    targets: Tensor
    target_labels: Tensor
    sample_keys: Tensor

    @classmethod
    def of(cls, trees: Sequence[Tree], nodes: Literal["root", "all"] = "root") -> TreeBatch:
        """Batch at least one tree; `nodes` selects the nodes to classify: roots, or all that have a label."""
        if nodes not in ("root", "all"):
            raise ValueError(f"nodes must be 'root' or 'all', got {nodes!r}")
        if not trees:
            raise ValueError("trees must hold at least one tree, got none")
        sizes = np.array([len(tree) for tree in trees])
        starts = np.cumsum(sizes) - sizes
        words, children, labels, heights = (
            np.concatenate([getattr(tree, name) for tree in trees])
            for name in ("words", "children", "labels", "heights")
        )
        order = np.argsort(heights, kind="stable")  # new position -> old node
        place = np.argsort(order)  # old node -> new position
        children = np.where(words[:, None] < 0, place[children + np.repeat(starts, sizes)[:, None]], -1)
        targets = place[starts + sizes - 1]
        if nodes == "all":
            targets = np.flatnonzero(labels[order] != IGNORED)
        keys = [zlib.crc32(tree.words.tobytes() + tree.children.tobytes()) for tree in trees]
        return cls(
            words=torch.from_numpy(words[order]),
            children=torch.from_numpy(children[order]),
            levels=[0, *np.cumsum(np.bincount(heights)).tolist()],
            targets=torch.from_numpy(targets),
            target_labels=torch.from_numpy(labels[order][targets]),
            sample_keys=torch.tensor(keys),
        )

    def to(self, device: torch.device | str) -> TreeBatch:
        """The same batch on a device."""
        names = ("words", "children", "targets", "target_labels", "sample_keys")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def __len__(self) -> int:
        return len(self.sample_keys)
