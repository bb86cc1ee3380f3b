"""What is said of the one run that was withdrawn: CIFAR-10, ResNet-50, seed 0, before gradients were clipped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from committed import HERE, Run
from disagreements import said
from tables import PAPER_SOURCES, Rows, reference

FILE = HERE / "withdrawn" / "cifar10-resnet50-first-run.json"
NAME = f"experiments/withdrawn/{FILE.name}"


def first_run(rows: Rows, where: str = f"`{NAME}`", file: Path = FILE) -> str:
    """Why the run was withdrawn, and what its heads scored then and now; nothing where there is no run of now."""
    first = Run(file.parent, json.loads(file.read_text()))
    found = reference(rows)
    runs = found[1].get("cross-entropy", []) if found else []
    second = next((run for run in runs if run.seed == first.seed and run.row == first.row), None)
    if second is None:
        return ""
    dead, n = dead_heads(first)
    heads = (PAPER_SOURCES[5].output, PAPER_SOURCES[4].output)
    eces = [[100 * (run.number(head, "ece") or math.nan) for head in heads] for run in (first, second)]
    high = 100 * (first.number(heads[0], "ece_floor_high") or 0.0)
    return said(
        """The first CIFAR-10 ResNet-50 run of seed {seed} was withdrawn. Its heads were trained without clipped
        gradients, and {dead} of {n} per-sample temperature heads died: they give every class the same probability.
        The paper's head came out {how} there: ECE {first[0]:.2f} with annealing ({place} the band of a perfect model)
        and {first[1]:.2f} without, against {second[0]:.2f} and {second[1]:.2f} in the run in the tables, which clips
        the gradients of all heads. {network} So much can one ECE move with the way a head is trained. The first run is
        kept and enters no table ({where}).""",
        seed=first.seed,
        dead=dead,
        n=n,
        how="better" if eces[0][0] < eces[1][0] else "no better",
        first=eces[0],
        place="not above" if eces[0][0] <= high else "above",
        second=eces[1],
        network=same_network(first, second),
        where=where,
    )


def dead_heads(run: Run) -> tuple[int, int]:
    """How many per-sample temperature heads answer with equal probabilities, and how many there are."""
    heads: dict[str, Any] = run.config["heads"]
    temperature = [name for name, spec in heads.items() if spec["kind"] == "temperature"]
    nlls = [run.number(name, "nll") or 0.0 for name in temperature]
    n_classes = {"cifar10": 10}[run.config["data"]]
    return sum(abs(nll - math.log(n_classes)) < 1e-3 for nll in nlls), len(nlls)


def same_network(first: Run, second: Run) -> str:
    """Whether the two networks have the same numbers, as they should; a later run records more of them."""
    one, other = (run.results["outputs"]["main"] for run in (first, second))
    same = all(one[key] == other[key] for key in one.keys() & other.keys())
    return "The network is the same in both, in every number that both recorded." * same
