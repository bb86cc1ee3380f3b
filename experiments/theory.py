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
import pandas as pd
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
BETAS = (0.1, 0.3, 0.6, 0.9, 1.0, 1.2, 1.5, 2.0, 4.0)
N_VECTORS, N_RANDOM, N_SHOWN = 4000, 20_000, 1500
INK, BLUE, ORANGE, RED, GREY = "#1f2933", "#2563a8", "#d98324", "#c8372d", "#9aa5b1"
# 0.6 and 1.5 are those of the paper's gradient histograms, 1.2 its best beta_0.
NORM_BETAS = {0.6: "#8a5fbf", 1.2: "#6fbf8f", 1.5: "#2e7d4f"}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK,
         "axes.labelcolor": INK, "axes.titlesize": 9.5, "legend.frameon": False, "legend.fontsize": 8,
         "text.color": INK, "lines.linewidth": 1.8}  # fmt: skip


class Theorem1(NamedTuple):
    """Gradient factors gamma and their claimed bounds, (..., K), in logarithms to avoid overflow."""

    log_gamma: Tensor
    log_lower: Tensor  # log c0 at the label, log c2 elsewhere
    log_upper: Tensor  # log c1 at the label, log c3 elsewhere
    holds: Tensor  # bool, up to rounding


def theorem1(z: Tensor, beta: float) -> Theorem1:
    """How scaling logits (..., K) by beta changes the gradient of cross entropy, and the paper's bounds on it.

    With the largest logit as label, as the theorem assumes: d CE(beta z) / dz_j = gamma_j * beta * d CE(z) / dz_j. The
    bounds are those of the main text; the appendix states c2, c3 and the factor beta differently and wrongly.
    """
    z = z.double() - z.double().amax(-1, keepdim=True)  # nothing depends on a shift of all logits
    log_gamma, n = log_gradient(beta * z) - log_gradient(z), z.shape[-1]
    ordered = z.sort(-1).values
    smallest, second = ordered[..., [0]], ordered[..., [-2]]  # z_(1), z_(n-1); z_(n) is 0
    c0 = -math.log(n) + (1 - beta) * (z - smallest) - (second - smallest)
    c1 = math.log(n) + (1 - beta) * (z - second) + (second - smallest)
    c2 = (1 - beta) * -z + ((1 + (n - 1) * smallest.exp()) / n).log()
    c3 = (1 - beta) * -z + ((n - 1) * second.exp()).log1p()
    lower, upper = torch.where(is_label(z), c0, c2), torch.where(is_label(z), c1, c3)
    slack = 16 * torch.finfo(z.dtype).eps * (1 + (1 + beta) * z.abs().amax(-1, keepdim=True))
    return Theorem1(log_gamma, lower, upper, (lower <= log_gamma + slack) & (log_gamma <= upper + slack))


def is_label(z: Tensor) -> Tensor:
    """(..., K) bool: the class of the largest logit."""
    return torch.zeros_like(z, dtype=torch.bool).scatter(-1, z.argmax(-1, keepdim=True), True)


def log_gradient(z: Tensor) -> Tensor:
    """log |d CE(z) / dz|, (..., K): 1 - p at the label, summed over the other classes since it would cancel to 0."""
    others = z.masked_fill(is_label(z), -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(is_label(z), others, z) - z.logsumexp(-1, keepdim=True)


class Theorem2(NamedTuple):
    """The two sides of theorem 2, squared, under both readings of H, and a bound that holds."""

    ece2: Tensor
    shannon: Tensor  # H as named in the text: the Shannon entropy -E[log f(p)], in nats
    squared_shannon: Tensor  # C - 2 H with C = 3 - 2 E[log p] - E[f(p)]: may be negative
    squared_literal: Tensor  # the same with H as printed in the formula, E[log f(p)]: never below 2
    brier: Tensor  # E[(correct - p)^2], the top-label Brier score: a valid bound on ECE2^2

    def exceeds(self, bound: Tensor) -> Tensor:
        """Where the squared ECE2 is above this bound, by more than rounding."""
        return self.ece2.square() > bound + 1e-12


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
        t, others = theorem1(z, beta), ~is_label(z)
        log_gamma = t.log_gamma - (beta - 1) * z.amax(-1, keepdim=True)
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
        "violated_shannon": int(t.exceeds(t.squared_shannon).sum()),
        "negative_right_side": int((t.squared_shannon < 0).sum()),
        "violated_literal": int(t.exceeds(t.squared_literal).sum()),
        "violated_brier": int(t.exceeds(t.brier).sum()),
    }


def draw_bounds(ax: Axes, logits: Tensor, rank: int, title: str, bounds: str) -> None:
    """Gamma and its bounds against beta, for the class of this rank of an unsure and of a typical image."""
    top, betas = logits.softmax(-1).amax(-1), np.linspace(0.1, 4.0, 79)
    for wanted, colour in ((0.7, ORANGE), (float(top.median()), BLUE)):
        image = int((top - wanted).abs().argmin())
        z, sure = logits[image], float(top[image])
        column = z.argsort(descending=True)[rank]
        rows = [[side[column] for side in theorem1(z, beta)[:3]] for beta in betas]
        gamma, lower, upper = np.transpose(rows) / math.log(10)
        ax.fill_between(betas, lower, upper, color=colour, alpha=0.18, lw=0)
        ax.plot(betas, np.transpose([lower, upper]), color=colour, lw=0.7, alpha=0.8)
        shown = f"{sure:.2f}" if sure < 0.99 else f"1 - {1 - sure:.1e}".replace("e-0", "e-")
        ax.plot(betas, gamma, color=colour, label=shown)
    ax.axvline(1, ymin=0.24, color=INK, lw=0.6, ls=":")
    ax.set(xlabel="scaling factor $\\beta$", ylabel="$\\log_{10}$ of the gradient factor $\\gamma$")
    ax.set(xlim=(0.1, 4), title=title)
    ax.legend(loc="lower left", title=f"confidence (shaded: {bounds})", title_fontsize=8)


def draw_norms(ax: Axes, logits: Tensor) -> None:
    """The norm of d CE(beta z) / dz relative to beta = 1, binned by how far the confidence is from 1."""
    edges, gradient = np.linspace(-8, -0.2, 27), log_gradient(logits)
    log_miss = gradient.gather(-1, logits.argmax(-1, keepdim=True))[:, 0] / math.log(10)  # log10(1 - p_label)
    cells = pd.cut(pd.Series(log_miss), edges, labels=10 ** ((edges[1:] + edges[:-1]) / 2))
    for beta, colour in NORM_BETAS.items():
        scaled = gradient + theorem1(logits, beta).log_gamma
        ratio = beta * (((2 * scaled).logsumexp(-1) - (2 * gradient).logsumexp(-1)) / 2).exp()
        groups = pd.Series(ratio).groupby(cells, observed=True)
        found = groups.quantile((0.05, 0.5, 0.95)).unstack()[groups.size() >= 20]
        ax.fill_between(found.index.astype(float), found[0.05], found[0.95], color=colour, alpha=0.2, lw=0)
        ax.plot(found.index.astype(float), found[0.5], color=colour, label=f"$\\beta = {beta}$")
    ax.axhline(1, color=INK, lw=0.6, ls=":")
    ax.set(xscale="log", yscale="log", title="sure  $\\longrightarrow$  unsure")
    ax.set(xlabel="1 - confidence", ylabel="gradient norm relative to $\\beta = 1$")
    ax.legend(loc="lower right")


def draw_scatter(ax: Axes, t: Theorem2) -> None:
    """Both sides of the second theorem for random distributions, squared."""
    ax.axvspan(-10, 0, color=RED, alpha=0.06, lw=0)
    ax.plot([0, 1], [0, 1], color=INK, lw=1)
    y, violated = t.ece2[:N_SHOWN].square(), t.exceeds(t.squared_shannon)
    for kind, colour, what in ((violated, RED, "violated"), (~violated, BLUE, "holds")):
        label, rows = f"Shannon entropy, {what} ({kind.double().mean():.0%})", kind[:N_SHOWN]
        ax.scatter(t.squared_shannon[:N_SHOWN][rows], y[rows], 7, colour, lw=0, alpha=0.6, label=label)
    ax.scatter(t.squared_literal[:N_SHOWN], y, 7, GREY, lw=0, alpha=0.6, label="as printed: never below 2")
    example = theorem2(*COUNTEREXAMPLE)
    x, y = float(example.squared_shannon), float(example.ece2) ** 2
    ax.scatter(x, y, marker="*", s=150, color=INK, zorder=5)
    ax.text(x - 0.25, y, "three wrong\nanswers", ha="right", va="center", fontsize=8)
    ax.text(1.1, 1.0, "equality", va="top", fontsize=8)
    ax.text(-2.75, 1.22, "root of a\nnegative number", color=RED, va="top", fontsize=8)
    ax.set(xlim=(-2.9, 9.5), ylim=(0, 1.25))
    ax.set(xlabel="claimed bound, squared: $C - 2H$", ylabel="ECE$_2$ squared")
    for handle in ax.legend(loc="upper right", markerscale=2).legend_handles:
        handle.set_alpha(1)


def draw_against_entropy(ax: Axes, p: Predictions) -> None:
    """The right side of the second theorem against the number of distinct confidences."""
    v = np.geomspace(1, 4500, 200)
    ax.axhspan(0, 1, color=BLUE, alpha=0.12, lw=0)
    ax.text(3900, 1.3, "ECE$_2$ squared lies in 0..1", ha="right", va="bottom", fontsize=8, color=BLUE)
    ax.plot(v, 3 - 1 / v + 2 * np.log(v), color=GREY, label="as printed, $V$ equal shares")
    ax.plot(v, 3 - 1 / v - 2 * np.log(v), color=RED, label="Shannon, $V$ equal shares")
    cells = (15, 50, 100, 300, 1000)
    x = [*(len((p.confidence.double() * n).ceil().unique()) for n in cells), len(p.confidence.unique())]
    y = [float(theorem2(p.confidence, p.correct, n).squared_shannon) for n in (*cells, None)]
    ax.plot(x, y, "o-", color=INK, lw=0.8, ms=4, label="Shannon, ResNet-110 on CIFAR-10")
    ax.scatter(3, theorem2(*COUNTEREXAMPLE).squared_shannon, marker="*", s=150, color=INK, zorder=5)
    ax.axhline(0, color=INK, lw=0.6, ls=":")
    ax.set(xscale="log", xlim=(1, 4500), ylim=(-14, 15))
    ax.set(xlabel="distinct confidences $V$", ylabel="claimed bound, squared: $C - 2H$")
    ax.legend(loc="lower left")


@matplotlib.rc_context(STYLE)
def draw(p: Predictions, random: Theorem2, output: Path) -> None:
    """Both pictures."""
    first, logits = Figure(figsize=(10.5, 3.3), layout="constrained"), p.logits.double()
    left, middle, right = first.subplots(1, 3)
    draw_bounds(left, logits, 0, "$i = y$ (the label)", "$c_0$ to $c_1$")
    draw_bounds(middle, logits, 1, "$i \\neq y$ (the runner-up)", "$c_2$ to $c_3$")
    draw_norms(right, logits)
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
    generator = torch.Generator().manual_seed(0)
    with np.load(path) as arrays:
        p = Predictions(arrays["test_logits"], arrays["test_labels"].reshape(-1))
    vectors = [*random_logits(N_VECTORS, generator)]
    half, zero = (random_distributions(N_RANDOM, least, generator) for least in (0.5, 0.0))
    sides = {name: round(float(side), 6) for name, side in theorem2(*COUNTEREXAMPLE)._asdict().items()}
    first = {"random": {"vectors": N_VECTORS} | count_theorem1(vectors)}
    first["real"] = {"vectors": len(p)} | count_theorem1([p.logits.double()])
    second = {"confidences_from_a_half": count_theorem2(half), "confidences_from_zero": count_theorem2(zero)}
    second["counterexample"] = dict(zip(("confidence", "correct"), COUNTEREXAMPLE)) | sides
    about = {"seed": 0, "logits": path.name, **where_computed()}
    numbers = {"certificate": about, "theorem1": first, "theorem2": second}
    (output / "theory.json").write_text(json.dumps(numbers, indent=1) + "\n")
    draw(p, half, output)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.npz")
    torch.set_num_threads(1)
    write(parser.parse_args().file)
