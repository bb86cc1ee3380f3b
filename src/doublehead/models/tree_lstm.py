"""Tree-structured LSTMs of Tai, Socher and Manning (2015), all nodes of one height computed at once."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from doublehead.data.trees import TreeBatch
from doublehead.models.vectors import embedding


class TreeLSTM(nn.Module):
    """A tree LSTM over the words of parsed sentences; its features are the states of the nodes to classify.

    `cell="binary"` is the constituency Tree-LSTM that Tai et al. use for sentiment: it tells left from right and has a
    forget gate per child. `cell="child_sum"` adds the children's states up. `tune_vectors` trains the word vectors,
    too. Which nodes are classified, roots or all that have a label, is the batch's to say:
    `TreeBatch.of(trees, nodes=...)`. The last layer is `classifier`.

    >>> from doublehead.data.trees import parse_tree
    >>> network = TreeLSTM(n_classes=5, vectors=torch.randn(9, 8), hidden=6)
    >>> trees = [parse_tree("(3 (2 a) (4 (2 very) (3 good)))"), parse_tree("(1 bad)")]
    >>> network(TreeBatch.of(trees)).shape, network(TreeBatch.of(trees, nodes="all")).shape
    (torch.Size([2, 5]), torch.Size([6, 5]))
    """

    def __init__(
        self,
        n_classes: int,
        *,
        vectors: Any,
        cell: Literal["binary", "child_sum"] = "binary",
        hidden: int = 150,
        dropout: float = 0.5,
        tune_vectors: bool = True,
    ) -> None:
        super().__init__()
        cells: dict[str, type[BinaryCell | ChildSumCell]] = {"binary": BinaryCell, "child_sum": ChildSumCell}
        if cell not in cells:
            raise ValueError(f"cell must be one of {list(cells)}, got {cell!r}")
        self.embedding = embedding(vectors, tuned=tune_vectors)
        self.cell: BinaryCell | ChildSumCell = cells[cell](self.embedding.embedding_dim, hidden)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, n_classes)

    def features(self, batch: TreeBatch) -> Tensor:
        """The hidden states of the nodes to classify, (T, hidden), before dropout."""
        hidden, _memory = self.states(batch).chunk(2, 1)
        return hidden.index_select(0, batch.targets)

    def states(self, batch: TreeBatch) -> Tensor:
        """(M, 2 * hidden): hidden state and memory of all nodes of the forest, in its order."""
        plan = batch.schedule
        leaves = self.cell.leaf(self.embedding(batch.words[: len(plan.leaf_order)]))
        ends = tuple(accumulate(step.leaves for step in plan.steps))
        pieces = leaves.index_select(0, plan.leaf_order).tensor_split(ends)
        gathers = plan.gather.split([2 * step.parents + step.kept for step in plan.steps])
        done, waiting = [leaves], leaves[:0]
        for step, piece, gather in zip(plan.steps, pieces, gathers):
            pool = torch.cat([piece, waiting]).index_select(0, gather)
            left, right, kept = pool.split([step.parents, step.parents, step.kept])
            done.append(self.cell(left, right))
            waiting = torch.cat([kept, done[-1]])
        return torch.cat(done)

    def forward(self, batch: TreeBatch) -> Tensor:
        """Logits (T, K) of the nodes to classify."""
        logits: Tensor = self.classifier(self.dropout(self.features(batch)))
        return logits


class BinaryCell(nn.Module):
    """Binary Tree-LSTM with words at the leaves: Eqs. 9-14 of Tai et al. for two children and no input inside.

    A leaf's memory is linear in its word vector, gated on the way out, as in the authors' code.
    """

    def __init__(self, n_inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_word = nn.Linear(n_inputs, 2 * hidden)  # output gate, memory
        self.from_children = nn.Linear(2 * hidden, 5 * hidden)  # input, left, right, output gate; update

    def leaf(self, vectors: Tensor) -> Tensor:
        """Word vectors (L, D) -> states (L, 2 * hidden)."""
        out, memory = self.from_word(vectors).chunk(2, 1)
        return torch.cat([out.sigmoid() * memory.tanh(), memory], 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """States of the left and the right children, (P, 2 * hidden) each -> of their parents."""
        hidden = left.shape[1] // 2
        gates, update = self.from_children(torch.cat([left[:, :hidden], right[:, :hidden]], 1)).split(
            [4 * hidden, hidden], 1
        )
        enter, keep_left, keep_right, out = gates.sigmoid().chunk(4, 1)
        memory = enter * update.tanh() + keep_left * left[:, hidden:] + keep_right * right[:, hidden:]
        return torch.cat([out * memory.tanh(), memory], 1)


class ChildSumCell(nn.Module):
    """Child-Sum Tree-LSTM with words at the leaves: Eqs. 2-8 of Tai et al., no input inside.

    The forget gate's weights for the input would meet no word (leaves have no children), so they are left out.
    """

    def __init__(self, n_inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_word = nn.Linear(n_inputs, 3 * hidden, bias=False)  # input gate, output gate; update
        self.from_sum = nn.Linear(hidden, 3 * hidden)  # the same; its bias serves leaves, too
        self.forget = nn.Linear(hidden, hidden)

    def leaf(self, vectors: Tensor) -> Tensor:
        """Word vectors (L, D) -> states (L, 2 * hidden)."""
        enter, out, update = (self.from_word(vectors) + self.from_sum.bias).chunk(3, 1)
        memory = enter.sigmoid() * update.tanh()
        return torch.cat([out.sigmoid() * memory.tanh(), memory], 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """States of the left and the right children, (P, 2 * hidden) each -> of their parents."""
        hidden = left.shape[1] // 2
        enter, out, update = self.from_sum(left[:, :hidden] + right[:, :hidden]).chunk(3, 1)
        kept = sum(self.forget(child[:, :hidden]).sigmoid() * child[:, hidden:] for child in (left, right))
        memory = enter.sigmoid() * update.tanh() + kept
        return torch.cat([out.sigmoid() * memory.tanh(), memory], 1)
