"""Make results.csv, and the tables and figures in docs/results, from what is committed. No GPU; a few minutes.

python experiments/make.py         # everything: what `make results` runs
python experiments/make.py --keep  # tables and figures from results.csv as it is
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import rivals
import shift
import tables
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from post_hoc import METHODS, PEERS, Numbers, ensemble_numbers, ensembles, run_numbers
from results import COLUMNS, HERE, TABLE, StoredRun, arguments, stored_runs
from tables import REFERENCE, Runs, means, row_of, title_of

from doublehead import curves, plots
from doublehead.metrics import fine_bins
from doublehead.training.config import BETAS

OUTPUT = HERE.parent / "docs" / "results"

GAINS = ("annealing-double-head", "head", "head+opinion", "head+mirror")
HEADS = ("main", "double-head", "annealing-double-head")
DIAGRAMS = ("20newsgroups-bydate-gp_cnn-cross_entropy-e20-s0", "cifar10-resnet50-cross_entropy-e80-s0",
            "cifar100-resnet50-cross_entropy-e80-s0", "svhn-resnet50-cross_entropy-e40-s0")  # fmt: skip
DRAWN = ("none", "temperature", "annealing-double-head", "head+opinion")
TITLES = {"main": tables.METHODS["none"], **tables.METHODS}
STEPS = ("first", "5th", "10th", "last 10th", "last 5th", "last")
TICKS = {"ece": (0.003, 0.01, 0.03, 0.1), "nll": (0.2, 0.5, 1.0, 2.0)}  # of logarithmic axes
PANELS = {"ece": "ECE", "nll": "NLL", "accuracy": "accuracy", "mean_entropy": "mean entropy (nats)"}


def in_percent(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))


def gains(table: pd.DataFrame, runs: Runs) -> Figure:
    """The change of the NLL against temperature scaling, with 95 % intervals, row by row."""
    shown, every = tables.networks(runs), means(table)
    n_lines = -(-len(shown) // 3)
    figure = Figure(figsize=(12.4, 2.1 * n_lines), layout="constrained")
    axes = figure.subplots(n_lines, 3, sharey=True, squeeze=False).flat
    for ax, (row, first) in zip(axes, shown.items()):
        found = every.loc[row].reindex(GAINS) * (100 / every.nll[row, "temperature"])
        errors = (found.delta_high - found.delta_low) / 2
        ax.errorbar(found.delta, range(len(GAINS)), xerr=errors, fmt="o", color=plots.INK, capsize=3)
        ax.axvline(0, color=plots.INK, linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(GAINS)), [TITLES[name] for name in GAINS])
        ax.set_title(title_of(first), fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    figure.supxlabel("change of the NLL against temperature scaling, percent", fontsize=10)
    return figure


def epochs(table: pd.DataFrame, runs: Runs) -> Figure:
    """Network and paper's heads over the epochs of the reference run."""
    found = StoredRun(REFERENCE).certificate["epochs"]
    figure = Figure(figsize=(9.6, 6.6), layout="constrained")
    for ax, (key, label) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        columns = {TITLES[name]: found[name][key] for name in HEADS}
        lines = pd.DataFrame(columns, index=pd.Index(found["epoch"], name="epoch"))
        lines.plot(ax=ax, ylabel=label, style=["-", "--", "-."], color=[plots.BLUE, plots.ORANGE, "#009e73"])
        if key in TICKS:
            ax.set_yscale("log")
            ax.set_yticks(TICKS[key], [f"{tick:g}" for tick in TICKS[key]])
            ax.minorticks_off()
        if key in ("ece", "accuracy"):
            in_percent(ax)
    return figure


def beta(table: pd.DataFrame, runs: Runs) -> Figure:
    """ECE and entropy of the paper's head against beta0, all on one network."""
    names = [f"mlp-{beta0:g}" for beta0 in BETAS]
    found = means(table[table.run == REFERENCE]).loc[row_of(REFERENCE)].loc[names]
    entropy = pd.Series(StoredRun(REFERENCE).certificate["entropy"])[names]
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for ax, key, values in zip(axes, ("ece", "mean_entropy"), (found.ece, entropy)):
        ax.plot(BETAS, values, marker="o", color=plots.BLUE)
        ax.set(xlabel=r"$\beta_0$", ylabel=PANELS[key])
    in_percent(axes[0])
    return figure


def gradients(table: pd.DataFrame, runs: Runs) -> Figure:
    """Gradient norms of two heads at six calibration steps of an epoch, over the last 70 % of the epochs."""
    found = StoredRun(REFERENCE).certificate["gradients"]
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    for step, ax in enumerate(figure.subplots(2, 3).flat):
        norms = pd.DataFrame({name: np.array(rows)[:, step] for name, rows in found.items()})
        late, labels = norms[round(0.3 * len(norms)) :], norms.columns.str.replace("mlp-", "beta0 ")
        ax.hist(late, 16, weights=np.full(late.shape, 1 / len(late)), histtype="step", label=labels)
        ax.set(title=f"{STEPS[step]} calibration step", xlabel="gradient norm", ylabel="share")
        ax.legend(frameon=False)
        in_percent(ax)
    return figure


def reliability(table: pd.DataFrame, runs: Runs) -> Figure:
    """Network, temperature scaling, paper's head and staged head, for the first run of four data sets."""
    figure = Figure(figsize=(3.4 * len(DRAWN), 3.7 * len(DIAGRAMS)), layout="constrained")
    axes = figure.subplots(len(DIAGRAMS), len(DRAWN))
    for line, run in zip(axes, map(StoredRun, DIAGRAMS)):
        for ax, name in zip(line, DRAWN):
            scores = METHODS[name](run) if name in METHODS else run.heads[name]
            curve = curves.reliability(scores.bins(fine_bins(15)), 15)
            plots.draw_reliability(curve, ax, title=f"{title_of(run)}\n{TITLES[name]}")
    legends = [ax.get_legend() for ax in axes.flat]
    figure.legend(handles=legends[0].legend_handles, loc="outside lower center", ncols=3, frameon=False)
    for legend in legends:
        legend.remove()
    return figure


def measure(runs: Runs) -> None:
    """Write the long table. Kept are rows of packages that are not installed here."""
    found: Numbers = {}
    before = pd.read_csv(TABLE)
    for run in runs:
        found |= run_numbers(run)
        print(run.name, flush=True)
    for name, members in ensembles(runs):
        found |= ensemble_numbers(name, members)
    of_peers = before.output.isin(PEERS) | before.metric.str.endswith(PEERS)
    kept = before[before.run.isin([run.name for run in runs]) & of_peers].set_index(COLUMNS[:3]).value
    both = pd.concat([pd.DataFrame.from_dict(found, orient="index").stack(), kept])
    both = both[~both.index.duplicated()].dropna().rename_axis(COLUMNS[:3]).rename("value")
    both.sort_index().to_csv(TABLE, float_format="%.6g")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = stored_runs()
    if not options.keep:
        measure(runs)
    table = pd.read_csv(TABLE)
    tables.publish(tables.TABLES | rivals.TABLES, table, runs)
    for figure in (gains, epochs, beta, gradients, reliability):
        plots.save(figure(table, runs), OUTPUT / "figures" / f"{figure.__name__}.png", dpi=90)
    shift.draw()
