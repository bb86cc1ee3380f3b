"""Where our numbers and the paper's disagree: one sentence each, with what the evidence says of the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from committed import Row, Run, having, numbers, spread
from figures import GRADIENT_BETAS, gradient_sample, with_gradients
from paper import TABLE_1, TABLE_2, TABLE_3_OVERHEAD
from tables import DATA_TITLES, PAPER_SOURCES, SPEED, Rows, paper_order, reference, row_title, shown

from doublehead.training.methods import METHODS

Methods = Mapping[str, list[Run]]
N_CLASSES = {"cifar10": 10, "cifar100": 100, "svhn": 10, "imagenet": 1000, "sst-binary": 2, "sst-fine": 5,
             "20newsgroups": 20, "20newsgroups-bydate": 20}  # fmt: skip


def said(text: str, **values: Any) -> str:
    """A sentence with its numbers, on one line."""
    return " ".join(text.format(**values).split())


def disagreements(rows: Rows) -> list[str]:
    """All of them, those of each row first."""
    known = [row for row in sorted(rows, key=paper_order) if (row.data, row.model) in TABLE_1]
    made = [tell(row, rows[row], row_title(row, rows)) for tell in (temperature, paper_head) for row in known]
    made += [at_chance(row, rows[row], row_title(row, rows)) for row in sorted(rows, key=paper_order)]
    found = reference(rows)
    if found:
        made += [focal(*found), auroc(found[1]), gradients(found[1]), overhead()]
    return [text for text in made if text]


def mean(runs: Sequence[Run], output: str, key: str, when: str = "before", scale: float = 1.0) -> float:
    """A number's mean over seeds, nan where there is none."""
    found = numbers(runs, output, key, when)
    return float("nan") if found is None else scale * found.mean


def percent(runs: Sequence[Run], output: str, key: str = "ece", when: str = "before") -> str:
    """A number in percent, with its spread where there are several seeds."""
    return shown(numbers(runs, output, key, when))


def temperature(row: Row, methods: Methods, name: str) -> str:
    """Temperature scaling is a stronger rival here than in the paper, or a weaker one."""
    runs = methods.get("cross-entropy", [])
    if not runs:
        return ""
    cell = TABLE_1[row.data, row.model].cell("cross-entropy")
    after, grid = (mean(runs, "main", "ece", when, 100) for when in ("after", "after_grid"))
    share = (grid - after) / (cell.after - after) if cell.after != after else 0.0
    much = "nothing" if share <= 0 else "little" if share < 0.3 else "some" if share < 0.7 else "much"
    return said(
        """**Temperature scaling, {row}:** {after} here, {cell.after:.2f} in the paper. The paper's coarse grid, which
        gives {grid} here, {part}. The networks differ (ECE as trained {before} here and
        {cell.before:.2f} there, temperature {fitted} and {cell.temperature:.1f}); how the paper's temperature was
        fitted cannot be told from its text.""",
        row=name,
        cell=cell,
        before=percent(runs, "main"),
        after=percent(runs, "main", when="after"),
        grid=percent(runs, "main", when="after_grid"),
        part=f"explains {much} of it" if share < 1.5 else "is further off",
        fitted=shown(numbers(runs, "main", "temperature", ""), scale=1),
    )


def paper_head(row: Row, methods: Methods, name: str) -> str:
    """The paper's head on our network: its ECE, its band and what it does to accuracy."""
    runs = having(methods.get("cross-entropy", []), "annealing-double-head")
    if not runs:
        return ""
    annealed = mean(runs, "annealing-double-head", "ece", "before", 100)
    high = mean(runs, "annealing-double-head", "ece_floor_high", "before", 100)
    lost = mean(runs, "main", "accuracy", "before", 100) - mean(
        runs, "annealing-double-head", "accuracy", "before", 100
    )
    much = """It loses {lost:.1f} points of accuracy against the main head: {data}'s calibration samples are few for a
        head that answers by itself. The per-sample temperature heads lose none."""
    little = "Its accuracy is {size:.2f} points {side} the main head's."
    accuracy = said(
        much if lost > 1 else little,
        lost=lost,
        size=abs(lost),
        side="below" if lost > 0 else "above",
        data=DATA_TITLES[row.data],
    )
    return said(
        """**The paper's head, {row}:** {plain} without and {annealed} with annealing here ({place} the band of
        a perfect model), {paper.no_annealing:.2f} and {paper.annealing:.2f} in the paper. {accuracy}""",
        row=name,
        plain=percent(runs, "double-head"),
        annealed=percent(runs, "annealing-double-head"),
        place="not above" if annealed <= high else "above",
        paper=TABLE_1[row.data, row.model],
        accuracy=accuracy,
    )


def at_chance(row: Row, methods: Methods, name: str) -> str:
    """Networks that learned nothing, not even their training data: their calibration says nothing of a method."""
    stuck: dict[str, list[Run]] = {}
    for method, runs in methods.items():
        guess = 1.1 / N_CLASSES[row.data]
        found = [run for run in runs if (run.results.get("train_accuracy") or 1.0) < guess]
        stuck |= {method: found} if found else {}
    if not stuck:
        return ""
    which = "; ".join(
        f"{METHODS[method].title} on seed{'s' * (len(runs) > 1)} {', '.join(str(run.config['seed']) for run in runs)}"
        for method, runs in stuck.items()
    )
    return said(
        """**Never left chance, {row}:** {which}, with {right} % of the training data right at the end. A network that
        guesses and says so is well calibrated: that method's mean ECE in this row means nothing.""",
        row=name,
        which=which,
        right=shown(
            spread([run.results["train_accuracy"] for runs in stuck.values() for run in runs]), digits=0
        ),
    )


def focal(row: Row, methods: Methods) -> str:
    """Focal loss as trained."""
    runs = methods.get("focal", [])
    if not runs:
        return ""
    fitted = mean(runs, "main", "temperature", "")
    return said(
        """**Focal loss:** {before} as trained here, {cell.before:.2f} in the paper. After {epochs} epochs the
        network is {way} (temperature {fitted:.2f}; the paper's {cell.temperature:.1f}). {reason}""",
        before=percent(runs, "main"),
        cell=TABLE_1[row.data, row.model].cell("focal"),
        epochs=row.epochs,
        way="underconfident" if fitted < 1 else "overconfident",
        fitted=fitted,
        reason="That fits gamma = 3 holding confidence down in short training; whether long training undoes it was "
        "not tested here." * (fitted < 1),
    )


def auroc(methods: Methods) -> str:
    """Telling noisy images by their confidence."""
    runs, pairs = methods.get("cross-entropy", []), []
    for run in runs:  # both on the same networks
        found = [run.shifted("gaussian_noise:5", PAPER_SOURCES[i].output, "auroc") for i in (0, 5)]
        pairs += [found] if None not in found else []
    if not pairs:
        return ""
    ours = [shown(spread(values), digits=1) for values in zip(*pairs)]
    theirs = TABLE_2["gaussian_noise:5", "resnet101"]
    return said(
        """**AUROC under Gaussian noise:** cross entropy {ours[0]} and the paper's head {ours[1]} here,
        {main.before:.1f} and {head.before:.1f} in the paper, on a ResNet-101. Our head saw no noise here; the paper
        says that it perturbs calibration batches under distribution shift, but not how. Table 2 has our heads with
        perturbed batches.""",
        ours=ours,
        main=theirs["cross-entropy"],
        head=theirs["annealing-double-head"],
    )


def gradients(methods: Methods) -> str:
    """How the norms of the head's gradient change within an epoch."""
    runs = with_gradients(methods.get("cross-entropy", []))
    if not runs:
        return ""
    small, large = ([float(np.median(gradient_sample(runs, b, i))) for i in range(6)] for b in GRADIENT_BETAS)
    gaps = [a - b for a, b in zip(small, large)]
    text = """**Gradient norms:** in the first step of an epoch the median is {small[0]:.2f} for beta0 = {low:g} and
        {large[0]:.2f} for beta0 = {high:g}, in the last {small[5]:.2f} and {large[5]:.2f}: {order}."""
    if abs(gaps[5]) > abs(gaps[3]):
        text += """ It also says that the difference fades towards the last step; here it grows, from {gaps[3]:+.2f} at
        the last 10th step to {gaps[5]:+.2f}. Since beta is 1 for both at the last step, that difference is not beta's
        rescaling; it lies in the weights that the two heads have reached."""
    turns = gaps[0] * gaps[5] < 0
    order = "the order turns round, as the paper says" if turns else "the order stays, unlike in the paper"
    low, high = GRADIENT_BETAS
    return said(text, small=small, large=large, gaps=gaps, low=low, high=high, order=order)


def overhead() -> str:
    """What the head costs in training."""
    timed = json.loads(SPEED.read_text())["head_adds_percent"] if SPEED.exists() else {}
    pairs = {k: timed.get(f"ours, head every {k}") for k in TABLE_3_OVERHEAD}
    costs = [
        f"{ours:.2f} % at k = {k} (paper {TABLE_3_OVERHEAD[k]:.2f} %)"
        for k, ours in pairs.items()
        if ours is not None
    ]
    if not costs:
        return ""
    return said(
        "**Overhead:** {costs}. A calibration step sends no gradient into the network, it takes one evaluation pass.",
        costs=", ".join(costs),
    )
