"""The paper's two theorems in numbers: the pictures and tables of docs/theory.md, which has the proofs.

Theorem 1 (how annealing rescales gradients) holds. Theorem 2 (entropy bounds the calibration error) does not: it is
false with the entropy it names, and trivial as printed.

    python experiments/theory.py FILE.npz      # writes docs/results/theory.json and theorem{1,2}.png, half a minute

FILE.npz holds `test_logits` and `test_labels` of a trained classifier; the committed numbers are those of a ResNet-110
on CIFAR-10 whose logits are public.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import HERE, arguments, where_computed
from torch import Tensor

from doublehead.predictions import Predictions

# Confidences and correctness: the smallest counterexample to theorem 2. With one or two distinct confidences its
# right side exceeds 1, which no ECE2 does.
COUNTEREXAMPLE = ((0.98, 0.99, 1.0), (False, False, False))
RESULTS = HERE.parent / "docs" / "results"
SEED = 0
BETAS = (0.1, 0.3, 0.6, 0.9, 1.0, 1.2, 1.5, 2.0, 4.0)
N_VECTORS, N_RANDOM, N_SHOWN = 4000, 20_000, 1500
INK, BLUE, ORANGE, RED, GREY = "#1f2933", "#2563a8", "#d98324", "#c8372d", "#9aa5b1"
# 0.6 and 1.5 are those of the paper's gradient histograms, 1.2 its best beta_0.
NORM_BETAS = {0.6: "#8a5fbf", 1.2: "#6fbf8f", 1.5: "#2e7d4f"}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK,
         "axes.labelcolor": INK, "axes.titlesize": 9.5, "legend.frameon": False, "legend.fontsize": 8,
         "text.color": INK}  # fmt: skip


# --- the theorems


class Theorem1(NamedTuple):
    """Gradient factors gamma and their claimed bounds, (..., K), in logarithms to avoid overflow."""

    label: Tensor  # (...,) the class of the largest logit
    log_gamma: Tensor
    log_lower: Tensor  # log c0 at the label, log c2 elsewhere
    log_upper: Tensor  # log c1 at the label, log c3 elsewhere
    holds: Tensor  # bool, up to rounding


def theorem1(z: Tensor, beta: float) -> Theorem1:
    """How scaling logits (..., K) by beta changes the gradient of cross entropy, and the paper's bounds on it.

    With the largest logit as label, as the theorem assumes: d CE(beta z) / dz_j = gamma_j * beta * d CE(z) / dz_j. The
    bounds are those of the main text; the appendix states c2, c3 and the factor beta differently and wrongly.
    """
    label, n = z.argmax(-1), z.shape[-1]
    z = z.double() - z.double().amax(-1, keepdim=True)  # nothing depends on a shift of all logits
    at_label = torch.zeros_like(z, dtype=torch.bool).scatter(-1, label[..., None], True)
    log_gamma = torch.where(
        at_label,
        _log_miss(beta * z, at_label) - _log_miss(z, at_label),
        (beta * z).log_softmax(-1) - z.log_softmax(-1),
    )
    ordered = z.sort(-1).values
    smallest, second, largest = (ordered[..., [place]] for place in (0, -2, -1))  # z_(1), z_(n-1), z_(n)
    c0 = -math.log(n) + (1 - beta) * (z - smallest) - (second - smallest)
    c1 = math.log(n) + (1 - beta) * (z - second) + (second - smallest)
    common = (1 - beta) * (largest - z)
    c2 = common + ((1 + (n - 1) * (smallest - largest).exp()) / n).log()
    c3 = common + ((n - 1) * (second - largest).exp()).log1p()
    lower, upper = torch.where(at_label, c0, c2), torch.where(at_label, c1, c3)
    slack = 16 * torch.finfo(z.dtype).eps * (1 + (1 + beta) * z.abs().amax(-1, keepdim=True))
    holds = (lower <= log_gamma + slack) & (log_gamma <= upper + slack)
    return Theorem1(label, log_gamma, lower, upper, holds)


def _log_miss(z: Tensor, at_label: Tensor) -> Tensor:
    """log(1 - p_label), (..., 1), summed over the other classes because 1 - p would cancel to 0."""
    others = z.masked_fill(at_label, -torch.inf)
    return others.logsumexp(-1, keepdim=True) - z.logsumexp(-1, keepdim=True)


class Theorem2(NamedTuple):
    """The two sides of theorem 2, squared, under both readings of H, and a bound that holds."""

    ece2: Tensor
    shannon: Tensor  # H as named in the text: the Shannon entropy -E[log f(p)], in nats
    squared_shannon: Tensor  # C - 2 H with C = 3 - 2 E[log p] - E[f(p)]: may be negative
    squared_literal: Tensor  # the same with H as printed in the formula, E[log f(p)]: never below 2
    brier: Tensor  # E[(correct - p)^2], the top-label Brier score: a valid bound on ECE2^2

    @property
    def holds_shannon(self) -> Tensor:
        return self.ece2.square() <= self.squared_shannon + 1e-12

    @property
    def holds_literal(self) -> Tensor:
        return self.ece2.square() <= self.squared_literal + 1e-12


def theorem2(confidence: Any, correct: Any, n_values: int | None = None) -> Theorem2:
    """Both sides of theorem 2 for predictions with these confidences and correctness.

    The theorem assumes a confidence with finitely many values. By default these are the distinct confidences; with
    `n_values`, the confidences in each of that many equal cells of 0..1 are replaced by their mean.
    """
    p, right = (torch.as_tensor(values).double() for values in (confidence, correct))
    keys = p if n_values is None else (p * n_values).ceil()  # cells are right-closed
    values, place, count = keys.unique(return_inverse=True, return_counts=True)
    mean, accuracy = (torch.zeros_like(values).scatter_add(0, place, part) / count for part in (p, right))
    return theorem2_of(mean, count / len(p), accuracy)


def theorem2_of(values: Tensor, mass: Tensor, accuracy: Tensor) -> Theorem2:
    """Both sides of theorem 2 for a distribution: confidences (..., V) in (0, 1], their mass f and accuracy.

    Values of mass 0 are ignored, so distributions of different sizes fit one tensor.
    """
    values, mass, accuracy = (x.double() for x in (values, mass, accuracy))
    shannon = -torch.xlogy(mass, mass).sum(-1)
    log_p = torch.where(mass > 0, values, 1).log()
    constant = 3 - 2 * (mass * log_p).sum(-1) - mass.square().sum(-1)
    squared = (mass * (accuracy - values).square()).sum(-1)
    brier = squared + (mass * accuracy * (1 - accuracy)).sum(-1)
    return Theorem2(squared.sqrt(), shannon, constant - 2 * shannon, constant + 2 * shannon, brier)


# --- numbers


def random_logits(n: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Logit vectors of 2 to 50 classes with scales from 0.001 to 300."""
    for _ in range(n):
        k = int(torch.randint(2, 51, (), generator=generator))
        scale = 10 ** float(torch.empty(()).uniform_(-3, 2.5, generator=generator))
        yield scale * torch.randn(k, dtype=torch.float64, generator=generator)


def count_theorem1(vectors: Iterable[Tensor]) -> dict[str, int]:
    """How many bounds were checked and broken over BETAS, in the main text's and in the appendix's form.

    The appendix has exp((beta - 1) z_i) in c2 and c3 for exp((1 - beta)(z_(n) - z_i)).
    """
    counts = torch.zeros(4, dtype=torch.int64)
    for z, beta in product(vectors, BETAS):
        t = theorem1(z, beta)
        log_gamma = t.log_gamma - (beta - 1) * z.amax(-1, keepdim=True)
        others = torch.ones_like(t.holds).scatter(-1, t.label[..., None], False)
        fails = others & ((log_gamma < t.log_lower - 1e-9) | (log_gamma > t.log_upper + 1e-9))
        counts += torch.stack([torch.ones_like(fails), ~t.holds, others, fails]).flatten(1).sum(1)
    return dict(zip(("checked", "violated", "appendix_checked", "appendix_violated"), counts.tolist()))


def random_distributions(n: int, least: float, generator: torch.Generator) -> Theorem2:
    """2 to 20 confidences uniform in least..1, masses uniform on the simplex, accuracies uniform in 0..1."""
    sizes = torch.randint(2, 21, (n, 1), generator=generator)
    mass = torch.empty(n, 20).exponential_(generator=generator).double() * (torch.arange(20) < sizes)
    values = (least + (1 - least) * torch.rand(n, 20, generator=generator)).clamp(min=1e-6)
    return theorem2_of(values, mass / mass.sum(-1, keepdim=True), torch.rand(n, 20, generator=generator))


def count_theorem2(t: Theorem2) -> dict[str, int]:
    return {
        "n": len(t.ece2),
        "violated_shannon": int((~t.holds_shannon).sum()),
        "negative_right_side": int((t.squared_shannon < 0).sum()),
        "violated_literal": int((~t.holds_literal).sum()),
        "violated_brier": int((t.ece2.square() > t.brier + 1e-12).sum()),
    }


# --- pictures


def draw_bounds(ax: Axes, logits: Tensor, rank: int, title: str, bounds: str) -> None:
    """Gamma and its bounds against beta, for the class of this rank of an unsure and of a typical image."""
    top, betas = logits.softmax(-1).amax(-1), np.linspace(0.1, 4.0, 79)
    for wanted, colour in ((0.7, ORANGE), (float(top.median()), BLUE)):
        z = logits[int((top - wanted).abs().argmin())]
        column = z.argsort(descending=True)[rank]
        rows = [[side[column] for side in theorem1(z, beta)[1:4]] for beta in betas]
        gamma, lower, upper = np.transpose(rows) / math.log(10)
        ax.fill_between(betas, lower, upper, color=colour, alpha=0.18, lw=0)
        for side in (lower, upper):
            ax.plot(betas, side, color=colour, lw=0.7, alpha=0.8)
        sure = float(z.softmax(-1).amax())
        shown = f"{sure:.2f}" if sure < 0.99 else f"1 - {1 - sure:.1e}".replace("e-0", "e-")
        ax.plot(betas, gamma, color=colour, lw=1.8, label=shown)
    ax.axvline(1, ymin=0.24, color=INK, lw=0.6, ls=":")
    ax.set(xlabel="scaling factor $\\beta$", ylabel="$\\log_{10}$ of the gradient factor $\\gamma$")
    ax.set(xlim=(0.1, 4), title=title)
    ax.legend(loc="lower left", title=f"confidence (shaded: {bounds})", title_fontsize=8)


def draw_norms(ax: Axes, logits: Tensor) -> None:
    """The norm of d CE(beta z) / dz relative to beta = 1, binned by how far the confidence is from 1."""
    label = logits.argmax(-1, keepdim=True)
    others = logits.scatter(-1, label, -torch.inf).logsumexp(-1, keepdim=True)
    log_miss = others - logits.logsumexp(-1, keepdim=True)  # log(1 - p_label), (N, 1)
    log_gradient = logits.log_softmax(-1).scatter(-1, label, log_miss)  # at beta = 1, (N, K)
    edges = torch.linspace(-8, -0.2, 27).double()
    place = torch.bucketize(log_miss[:, 0] / math.log(10), edges)
    cells = [cell for cell in range(1, len(edges)) if (place == cell).sum() >= 20]
    x = [10 ** float(edges[cell - 1 : cell + 1].mean()) for cell in cells]
    for beta, colour in NORM_BETAS.items():
        scaled = log_gradient + theorem1(logits, beta).log_gamma
        ratio = beta * (((2 * scaled).logsumexp(-1) - (2 * log_gradient).logsumexp(-1)) / 2).exp()
        low, mid, high = ([ratio[place == cell].quantile(q) for cell in cells] for q in (0.05, 0.5, 0.95))
        ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        ax.plot(x, mid, color=colour, lw=1.8, label=f"$\\beta = {beta}$")
    ax.axhline(1, color=INK, lw=0.6, ls=":")
    ax.set(xscale="log", yscale="log", title="sure  $\\longrightarrow$  unsure")
    ax.set(xlabel="1 - confidence", ylabel="gradient norm relative to $\\beta = 1$")
    ax.legend(loc="lower right")


def draw_scatter(ax: Axes, t: Theorem2) -> None:
    """Both sides of the second theorem for random distributions, squared."""
    ax.axvspan(-10, 0, color=RED, alpha=0.06, lw=0)
    ax.plot([0, 1], [0, 1], color=INK, lw=1)
    dots = {"s": 7, "lw": 0, "alpha": 0.6}
    y = t.ece2[:N_SHOWN].square()
    for kind, colour, what in ((~t.holds_shannon, RED, "violated"), (t.holds_shannon, BLUE, "holds")):
        label, rows = f"Shannon entropy, {what} ({kind.double().mean():.0%})", kind[:N_SHOWN]
        ax.scatter(t.squared_shannon[:N_SHOWN][rows], y[rows], color=colour, label=label, **dots)
    ax.scatter(t.squared_literal[:N_SHOWN], y, color=GREY, label="as printed: never below 2", **dots)
    example = theorem2(*COUNTEREXAMPLE)
    x, y = float(example.squared_shannon), float(example.ece2) ** 2
    ax.scatter(x, y, marker="*", s=150, color=INK, zorder=5)
    ax.text(x - 0.25, y, "three wrong\nanswers", ha="right", va="center", fontsize=8)
    ax.text(1.1, 1.0, "equality", va="top", fontsize=8)
    ax.text(-2.75, 1.22, "root of a\nnegative number", color=RED, va="top", fontsize=8)
    ax.set(xlim=(-2.9, 9.5), ylim=(0, 1.25))
    ax.set(xlabel="claimed bound, squared: $C - 2H$", ylabel="ECE$_2$ squared")
    legend = ax.legend(loc="upper right", markerscale=2)
    for handle in legend.legend_handles:
        handle.set_alpha(1)


def draw_against_entropy(ax: Axes, p: Predictions) -> None:
    """The right side of the second theorem against the number of distinct confidences."""
    v = np.geomspace(1, 4500, 200)
    ax.axhspan(0, 1, color=BLUE, alpha=0.12, lw=0)
    ax.text(3900, 1.3, "ECE$_2$ squared lies in 0..1", ha="right", va="bottom", fontsize=8, color=BLUE)
    ax.plot(v, 3 - 1 / v + 2 * np.log(v), color=GREY, lw=1.8, label="as printed, $V$ equal shares")
    ax.plot(v, 3 - 1 / v - 2 * np.log(v), color=RED, lw=1.8, label="Shannon, $V$ equal shares")
    x, y = [], []
    for cells in (15, 50, 100, 300, 1000, None):
        keys = p.confidence if cells is None else (p.confidence.double() * cells).ceil()
        x.append(len(keys.unique()))
        y.append(float(theorem2(p.confidence, p.correct, n_values=cells).squared_shannon))
    ax.plot(x, y, "o-", color=INK, lw=0.8, ms=4, label="Shannon, ResNet-110 on CIFAR-10")
    ax.scatter(3, theorem2(*COUNTEREXAMPLE).squared_shannon, marker="*", s=150, color=INK, zorder=5)
    ax.axhline(0, color=INK, lw=0.6, ls=":")
    ax.set(xscale="log", xlim=(1, 4500), ylim=(-14, 15))
    ax.set(xlabel="distinct confidences $V$", ylabel="claimed bound, squared: $C - 2H$")
    ax.legend(loc="lower left")


@matplotlib.rc_context(STYLE)
def draw(p: Predictions, random: Theorem2, output: Path) -> None:
    """Both pictures."""
    first = Figure(figsize=(10.5, 3.3), layout="constrained")
    left, middle, right = first.subplots(1, 3)
    draw_bounds(left, p.logits.double(), 0, "$i = y$ (the label)", "$c_0$ to $c_1$")
    draw_bounds(middle, p.logits.double(), 1, "$i \\neq y$ (the runner-up)", "$c_2$ to $c_3$")
    draw_norms(right, p.logits.double())
    second = Figure(figsize=(9.5, 3.9), layout="constrained")
    left, right = second.subplots(1, 2, width_ratios=(1.15, 1))
    draw_scatter(left, random)
    draw_against_entropy(right, p)
    for number, figure in enumerate((first, second), 1):
        for ax, letter in zip(figure.axes, "abc"):
            ax.set_title(letter, loc="left", fontweight="bold")
        figure.savefig(output / f"theorem{number}.png", dpi=170)


def write(path: Path, output: Path = RESULTS) -> None:
    """theory.json and the pictures."""
    generator = torch.Generator().manual_seed(SEED)
    with np.load(path, allow_pickle=False) as arrays:
        p = Predictions(arrays["test_logits"], arrays["test_labels"].reshape(-1))
    first = {
        "random": {"vectors": N_VECTORS} | count_theorem1(random_logits(N_VECTORS, generator)),
        "real": {"vectors": len(p)} | count_theorem1([p.logits.double()]),
    }
    half, zero = (random_distributions(N_RANDOM, least, generator) for least in (0.5, 0.0))
    sides = theorem2(*COUNTEREXAMPLE)._asdict()
    example = dict(zip(("confidence", "correct"), COUNTEREXAMPLE))
    second = {
        "confidences_from_a_half": count_theorem2(half),
        "confidences_from_zero": count_theorem2(zero),
        "counterexample": example | {name: round(float(value), 6) for name, value in sides.items()},
    }
    numbers: dict[str, Any] = {"certificate": {"seed": SEED, "logits": path.name, **where_computed()}}
    numbers |= {"theorem1": first, "theorem2": second}
    (output / "theory.json").write_text(json.dumps(numbers, indent=1) + "\n")
    draw(p, half, output)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.npz")
    torch.set_num_threads(1)
    write(parser.parse_args().file)
