"""In which order a tree network meets the states of a forest, so that it touches each of them once or twice.

The plain way gathers the children of every height from the states of all nodes, and pays for the whole forest at
every height. But a state is used by one parent only: leaves can wait outside until their parent's height is
reached, and a state that has been used can be dropped. What remains is a small pool of waiting states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]


class Step(NamedTuple):
    """How many states meet at one height."""

    leaves: int  # leaves whose parents have this height: they join the pool
    parents: int  # nodes of this height, each computed from two states of the pool
    kept: int  # states of the pool that go on waiting for a higher parent


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a forest, one per height from 1 upwards.

    At each step the pool is the next `leaves` states of the leaves taken in `leaf_order`, followed by the states that
    wait. The next 2 * parents + kept entries of `gather` pick from it the left children, the right children and
    those that go on waiting; the newly computed states wait behind these.
    """

    leaf_order: Tensor  # (n_leaves,) leaves by the height of their parent; leaves that are roots come last
    gather: Tensor  # (sum of 2 * parents + kept,)
    steps: tuple[Step, ...]

    def to(self, device: torch.device | str) -> Schedule:
        """The same schedule on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("leaf_order", "gather")}
        return replace(self, **moved)


def schedule(left: Array, right: Array, levels: list[int]) -> Schedule:
    """Plan a forest whose nodes are sorted by height: those of height h are `levels[h] : levels[h + 1]`.

    >>> plan = schedule(np.array([-1, -1, -1, 0, 3]), np.array([-1, -1, -1, 1, 2]), [0, 3, 4, 5])  # ((0 1) 2)
    >>> plan.leaf_order.tolist(), plan.steps[1], plan.gather.tolist()
    ([0, 1, 2], Step(leaves=1, parents=1, kept=0), [0, 1, 1, 0])
    """
    top, n_leaves = len(levels) - 2, levels[1]
    heights = np.repeat(np.arange(top + 1), np.diff(levels))
    used_at = np.full(len(left), top + 1)  # the height of a node's parent; a root is never used
    used_at[left[n_leaves:]] = used_at[right[n_leaves:]] = heights[n_leaves:]
    leaf_order = np.argsort(used_at[:n_leaves], kind="stable")
    ends = np.searchsorted(used_at[leaf_order], np.arange(top + 1), side="right")

    slot = np.empty(len(left), np.int64)  # where a state stands in the pool
    waiting = np.empty(0, np.int64)
    steps, gathers = [], [waiting]
    for height in range(1, top + 1):
        pool = np.concatenate([leaf_order[ends[height - 1] : ends[height]], waiting])
        slot[pool] = np.arange(len(pool))
        kept = waiting[(used_at[waiting] > height) & (used_at[waiting] <= top)]
        parents = np.arange(levels[height], levels[height + 1])
        gathers.append(slot[np.concatenate([left[parents], right[parents], kept])])
        steps.append(Step(int(ends[height] - ends[height - 1]), len(parents), len(kept)))
        waiting = np.concatenate([kept, parents])
    return Schedule(torch.from_numpy(leaf_order), torch.from_numpy(np.concatenate(gathers)), tuple(steps))
