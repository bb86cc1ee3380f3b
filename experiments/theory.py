"""What numbers say of the paper's two theorems: the pictures and tables of docs/theory.md.

    python experiments/theory.py                               # draw docs/results/theorem{1,2}.png from theory.json
    python experiments/theory.py --compute FILE.npz            # make theory.json anew (half a minute on a CPU)

FILE.npz holds `test_logits` and `test_labels` of a trained classifier; the committed numbers are those of a ResNet-110
on CIFAR-10 whose logits are public.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import HERE, arguments
from torch import Tensor

from doublehead.predictions import Predictions
from doublehead.theory import COUNTEREXAMPLE, Theorem2, theorem1, theorem2, theorem2_of
from doublehead.training.run_folder import environment

RESULTS = HERE.parent / "docs" / "results"
SEED = 0
BETAS = (0.1, 0.3, 0.6, 0.9, 1.0, 1.2, 1.5, 2.0, 4.0)
NORM_BETAS = (0.6, 1.2, 1.5)  # 0.6 and 1.5 are those of the paper's gradient histograms, 1.2 its best beta_0
N_RANDOM = 20_000
INK, BLUE, ORANGE, RED, GREY = "#1f2933", "#2563a8", "#d98324", "#c8372d", "#9aa5b1"

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK,
         "axes.labelcolor": INK, "axes.titlesize": 9.5, "legend.frameon": False, "legend.fontsize": 8,
         "text.color": INK}  # fmt: skip


# Numbers ---------------------------------------------------------------------------------------------------------


def random_logits(n: int, generator: torch.Generator) -> list[Tensor]:
    """Logit vectors of 2 to 50 classes with scales from 0.001 to 300."""
    made = []
    for _ in range(n):
        k = int(torch.randint(2, 51, (), generator=generator))
        scale = 10 ** float(torch.empty(()).uniform_(-3, 2.5, generator=generator))
        made.append(scale * torch.randn(k, dtype=torch.float64, generator=generator))
    return made


def appendix_bounds(z: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Log of c2 and c3 as the paper's appendix states them: exp((beta - 1) z_i) for exp((1 - beta)(z_(n) - z_i))."""
    n, ordered = z.shape[-1], z.sort(-1).values
    first, second, last = ordered[..., :1], ordered[..., -2:-1], ordered[..., -1:]
    low = ((1 + (n - 1) * (first - last).exp()) / n).log() + (beta - 1) * z
    return low, ((n - 1) * (second - last).exp()).log1p() + (beta - 1) * z


def count_theorem1(vectors: list[Tensor]) -> dict[str, int]:
    """How many bounds were checked and broken over BETAS, in the main text's and in the appendix's form."""
    counts = torch.zeros(4, dtype=torch.int64)
    for z in vectors:
        for beta in BETAS:
            t = theorem1(z, beta)
            low, high = appendix_bounds(z, beta)
            others = torch.ones_like(t.holds).scatter(-1, t.label[..., None], False)
            fails = others & ((t.log_gamma < low - 1e-9) | (t.log_gamma > high + 1e-9))
            counts += torch.stack([torch.ones_like(fails), ~t.holds, others, fails]).flatten(1).sum(1)
    return dict(zip(("checked", "violated", "appendix_checked", "appendix_violated"), counts.tolist()))


def theorem1_curves(logits: Tensor) -> dict[str, Any]:
    """Gamma and its bounds in log10 against beta: label and runner-up of an unsure and of a typical image."""
    top = logits.softmax(-1).amax(-1)
    betas = torch.linspace(0.1, 4.0, 79).tolist()
    images = []
    for confidence in (0.7, float(top.median())):
        z = logits[int((top - confidence).abs().argmin())]
        image: dict[str, Any] = {"confidence": round(float(z.softmax(-1).amax()), 7)}
        for name, column in zip(("label", "runner_up"), z.argsort(descending=True)[:2].tolist()):
            rows = [[float(x[column]) / math.log(10) for x in theorem1(z, beta)[1:4]] for beta in betas]
            image[name] = dict(zip(("gamma", "lower", "upper"), (rounded(list(c)) for c in zip(*rows))))
        images.append(image)
    return {"betas": rounded(betas), "images": images}


def gradient_norms(logits: Tensor) -> dict[str, Any]:
    """The norm of d CE(beta z) / dz relative to beta = 1, binned by how far the confidence is from 1."""
    label = logits.argmax(-1, keepdim=True)

    def log_miss(z: Tensor) -> Tensor:  # log(1 - p_label), (N, 1)
        return z.scatter(-1, label, -torch.inf).logsumexp(-1, keepdim=True) - z.logsumexp(-1, keepdim=True)

    def log_norm(beta: float) -> Tensor:
        z = beta * logits
        return math.log(beta) + 0.5 * (2 * z.log_softmax(-1).scatter(-1, label, log_miss(z))).logsumexp(-1)

    edges = torch.linspace(-8, -0.2, 27).double()
    place = torch.bucketize(log_miss(logits)[:, 0] / math.log(10), edges)
    cells = [cell for cell in range(1, len(edges)) if (place == cell).sum() >= 20]
    middles = [round(float((edges[cell - 1] + edges[cell]) / 2), 3) for cell in cells]
    out: dict[str, Any] = {"log10_miss": middles}
    for beta in NORM_BETAS:
        ratio = (log_norm(beta) - log_norm(1.0)) / math.log(10)
        out[str(beta)] = {
            name: rounded([float(ratio[place == cell].quantile(q)) for cell in cells])
            for name, q in (("low", 0.05), ("mid", 0.5), ("high", 0.95))
        }
        out[str(beta)]["share_shrunk"] = round(float((ratio < 0).double().mean()), 4)
    return out


def random_distributions(n: int, least: float, generator: torch.Generator) -> Theorem2:
    """2 to 20 confidences uniform in least..1, masses uniform on the simplex, accuracies uniform in 0..1."""
    sizes = torch.randint(2, 21, (n, 1), generator=generator)
    mass = torch.empty(n, 20).exponential_(generator=generator).double() * (torch.arange(20) < sizes)
    values = (least + (1 - least) * torch.rand(n, 20, generator=generator)).clamp(min=1e-6)
    return theorem2_of(values, mass / mass.sum(-1, keepdim=True), torch.rand(n, 20, generator=generator))


def count_theorem2(t: Theorem2) -> dict[str, Any]:
    return {
        "n": len(t.ece2),
        "violated_shannon": int((~t.holds_shannon).sum()),
        "negative_right_side": int((t.squared_shannon < 0).sum()),
        "violated_literal": int((~t.holds_literal).sum()),
        "smallest_literal": round(float(t.squared_literal.min()), 4),
        "violated_brier": int((t.ece2.square() > t.brier + 1e-12).sum()),
    }


def theorem2_numbers(p: Predictions, generator: torch.Generator) -> dict[str, Any]:
    binary, wide = (random_distributions(N_RANDOM, least, generator) for least in (0.5, 0.0))
    real = []
    for cells in (15, 50, 100, 300, 1000, None):
        keys = p.confidence if cells is None else (p.confidence.double() * cells).ceil()
        sides = as_floats(theorem2(p.confidence, p.correct, n_values=cells))
        real.append({"n_values": cells, "distinct": len(keys.unique())} | sides)
    shown = {"ece2_squared": binary.ece2.square(), "squared_shannon": binary.squared_shannon}
    shown["squared_literal"] = binary.squared_literal
    return {
        "confidences_from_a_half": count_theorem2(binary),
        "confidences_from_zero": count_theorem2(wide),
        "shown": {name: rounded(values[:1500].tolist()) for name, values in shown.items()},
        "counterexample": {"confidence": COUNTEREXAMPLE[0], "correct": COUNTEREXAMPLE[1]}
        | as_floats(theorem2(*COUNTEREXAMPLE)),
        "real": real,
    }


def as_floats(t: Theorem2) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in zip(t._fields, t)}


def rounded(values: list[float]) -> list[float]:
    return [round(v, 4) for v in values]


def compute(path: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(SEED)
    with np.load(path, allow_pickle=False) as arrays:
        p = Predictions(arrays["test_logits"], arrays["test_labels"].reshape(-1))
    logits = p.logits.double()
    about = environment(torch.device("cpu"))
    about.pop("command")
    return {
        "certificate": {"seed": SEED, "logits": path.name, **about},
        "theorem1": {
            "random": {"vectors": 4000} | count_theorem1(random_logits(4000, generator)),
            "real": {"vectors": len(p)} | count_theorem1([logits]),
            "betas_checked": BETAS,
            "curves": theorem1_curves(logits),
            "gradient_norms": gradient_norms(logits),
        },
        "theorem2": theorem2_numbers(p, generator),
    }


# Pictures --------------------------------------------------------------------------------------------------------


def draw(output: Path) -> None:
    """Draw both pictures from the committed numbers."""
    numbers = json.loads((RESULTS / "theory.json").read_text())
    first, second = numbers["theorem1"], numbers["theorem2"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.3), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        draw_bounds(left, first["curves"], "label", "$i = y$ (the label)", "$c_0$ to $c_1$")
        draw_bounds(middle, first["curves"], "runner_up", "$i \\neq y$ (the runner-up)", "$c_2$ to $c_3$")
        draw_norms(right, first["gradient_norms"])
        save(figure, output / "theorem1.png")
        figure = Figure(figsize=(9.5, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        draw_scatter(left, second)
        draw_against_entropy(right, second)
        save(figure, output / "theorem2.png")


def save(figure: Figure, path: Path) -> None:
    for ax, letter in zip(figure.axes, "abc"):
        ax.set_title(letter, loc="left", fontweight="bold")
    figure.savefig(path, dpi=170)


def draw_bounds(ax: Axes, curves: dict[str, Any], name: str, title: str, bounds: str) -> None:
    betas = curves["betas"]
    for image, colour in zip(curves["images"], (ORANGE, BLUE)):
        curve, confidence = image[name], image["confidence"]
        ax.fill_between(betas, curve["lower"], curve["upper"], color=colour, alpha=0.18, lw=0)
        for side in ("lower", "upper"):
            ax.plot(betas, curve[side], color=colour, lw=0.7, alpha=0.8)
        shown = f"{confidence:.2f}" if confidence < 0.99 else f"1 - {1 - confidence:.1e}".replace("e-0", "e-")
        ax.plot(betas, curve["gamma"], color=colour, lw=1.8, label=shown)
    ax.axvline(1, ymin=0.24, color=INK, lw=0.6, ls=":")
    ax.set(xlabel="scaling factor $\\beta$", ylabel="$\\log_{10}$ of the gradient factor $\\gamma$")
    ax.set(xlim=(0.1, 4), title=title)
    ax.legend(loc="lower left", title=f"confidence (shaded: {bounds})", title_fontsize=8)


def draw_norms(ax: Axes, norms: dict[str, Any]) -> None:
    colours = {"0.6": "#8a5fbf", "1.2": "#6fbf8f", "1.5": "#2e7d4f"}
    for beta, colour in colours.items():
        x = [10**v for v in norms["log10_miss"]]
        low, mid, high = ([10**v for v in norms[beta][k]] for k in ("low", "mid", "high"))
        ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        ax.plot(x, mid, color=colour, lw=1.8, label=f"$\\beta = {beta}$")
    ax.axhline(1, color=INK, lw=0.6, ls=":")
    ax.set(xscale="log", yscale="log", title="sure  $\\longrightarrow$  unsure")
    ax.set(xlabel="1 - confidence", ylabel="gradient norm relative to $\\beta = 1$")
    ax.legend(loc="lower right")


def draw_scatter(ax: Axes, numbers: dict[str, Any]) -> None:
    shown, random, example = numbers["shown"], numbers["confidences_from_a_half"], numbers["counterexample"]
    left, y = np.array(shown["squared_shannon"]), np.array(shown["ece2_squared"])
    broken = y > left
    share = random["violated_shannon"] / random["n"]
    ax.axvspan(-10, 0, color=RED, alpha=0.06, lw=0)
    ax.plot([0, 1], [0, 1], color=INK, lw=1)
    dots = {"s": 7, "lw": 0, "alpha": 0.6}
    kinds = ((broken, RED, "violated", share), (~broken, BLUE, "holds", 1 - share))
    for rows, colour, what, part in kinds:
        label = f"Shannon entropy, {what} ({part:.0%})"
        ax.scatter(left[rows], y[rows], color=colour, label=label, **dots)
    ax.scatter(shown["squared_literal"], y, color=GREY, label="as printed: never below 2", **dots)
    point = (example["squared_shannon"], example["ece2"] ** 2)
    ax.scatter(*point, marker="*", s=150, color=INK, zorder=5)
    ax.text(point[0] - 0.25, point[1], "three wrong\nanswers", ha="right", va="center", fontsize=8)
    ax.text(1.1, 1.0, "equality", va="top", fontsize=8)
    ax.text(-2.75, 1.22, "root of a\nnegative number", color=RED, va="top", fontsize=8)
    ax.set(xlim=(-2.9, 9.5), ylim=(0, 1.25))
    ax.set(xlabel="claimed bound, squared: $C - 2H$", ylabel="ECE$_2$ squared")
    legend = ax.legend(loc="upper right", markerscale=2)
    for handle in legend.legend_handles:
        handle.set_alpha(1)


def draw_against_entropy(ax: Axes, numbers: dict[str, Any]) -> None:
    v = np.geomspace(1, 4500, 200)
    ax.axhspan(0, 1, color=BLUE, alpha=0.12, lw=0)
    ax.text(3900, 1.3, "ECE$_2$ squared lies in 0..1", ha="right", va="bottom", fontsize=8, color=BLUE)
    ax.plot(v, 3 - 1 / v + 2 * np.log(v), color=GREY, lw=1.8, label="as printed, $V$ equal shares")
    ax.plot(v, 3 - 1 / v - 2 * np.log(v), color=RED, lw=1.8, label="Shannon, $V$ equal shares")
    x, y = ([row[key] for row in numbers["real"]] for key in ("distinct", "squared_shannon"))
    ax.plot(x, y, "o-", color=INK, lw=0.8, ms=4, label="Shannon, ResNet-110 on CIFAR-10")
    ax.scatter(3, numbers["counterexample"]["squared_shannon"], marker="*", s=150, color=INK, zorder=5)
    ax.axhline(0, color=INK, lw=0.6, ls=":")
    ax.set(xscale="log", xlim=(1, 4500), ylim=(-14, 15))
    ax.set(xlabel="distinct confidences $V$", ylabel="claimed bound, squared: $C - 2H$")
    ax.legend(loc="lower left")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--compute", type=Path, metavar="FILE.npz", help="make theory.json anew")
    options = parser.parse_args()
    if options.compute:
        (RESULTS / "theory.json").write_text(json.dumps(compute(options.compute), indent=1) + "\n")
    draw(RESULTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
