"""Make results.csv, and the tables and figures in docs/results, from what is committed. No GPU; a few minutes.

python experiments/make.py         # everything: what `make results` runs
python experiments/make.py --keep  # tables and figures from results.csv as it is
"""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import rivals
import shift
import tables
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from post_hoc import METHODS, PEERS, Numbers, ensemble_numbers, ensembles, run_numbers
from results import COLUMNS, HERE, StoredRun, arguments, read_table, stored_runs, write_table
from tables import REFERENCE, Runs, means, row_of, title_of

from doublehead import curves, plots
from doublehead.metrics import fine_bins
from doublehead.training.config import BETAS

OUTPUT = HERE.parent / "docs" / "results"

# --- figures, from results.csv, certificates and committed logits

SHOWN = {
    "none": "network",
    "temperature": "temperature scaling",
    "annealing-double-head": "paper's head",
    "head": "staged head",
    "head+opinion": "with features and second opinion",
    "head+mirror": "with the mirror view too",
}
HEADS = {"main": "network", "double-head": "head, no annealing", "annealing-double-head": "head, beta0 1.2"}
DIAGRAMS = ("20newsgroups-bydate-gp_cnn", "cifar10-resnet50", "cifar100-resnet50", "svhn-resnet50")
STEPS = ("first", "5th", "10th", "last 10th", "last 5th", "last")
TICKS = {"ece": (0.003, 0.01, 0.03, 0.1), "nll": (0.2, 0.5, 1.0, 2.0)}  # of logarithmic axes
PANELS = {"ece": "ECE", "nll": "NLL", "accuracy": "accuracy", "mean_entropy": "mean entropy (nats)"}


def gains(table: pd.DataFrame, runs: Runs) -> Figure:
    """The change of the NLL against temperature scaling, with 95 % intervals, row by row."""
    shown, every = tables.networks(runs), means(table)
    titles = {name: title for name, title in SHOWN.items() if name not in ("none", "temperature")}
    figure = Figure(figsize=(11.4, 2.1 * -(-len(shown) // 3)), layout="constrained")
    axes = figure.subplots(-(-len(shown) // 3), 3, sharey=True, squeeze=False).flat
    for place, (row, first) in enumerate(shown.items()):
        ax, found = axes[place], every.loc[row].reindex(titles)
        scale = 100 / every.nll[row, "temperature"]
        errors = scale * (found.delta_high - found.delta_low) / 2
        ax.errorbar(scale * found.delta, range(len(titles)), xerr=errors, fmt="o", color=plots.INK, capsize=3)
        ax.axvline(0, color=plots.INK, linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(titles)), list(titles.values()))
        ax.set_title(title_of(first), fontsize=10)
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
        columns = {title: found[name][key] for name, title in HEADS.items()}
        lines = pd.DataFrame(columns, index=pd.Index(found["epoch"], name="epoch")).dropna(how="all")
        lines.plot(ax=ax, ylabel=label, style=["-", "--", "-."], color=[plots.BLUE, plots.ORANGE, "#009e73"])
        if key in ("ece", "accuracy"):
            ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        if key in TICKS:
            ticks = [f"{100 * tick:g} %" if key == "ece" else f"{tick:g}" for tick in TICKS[key]]
            ax.set_yscale("log")
            ax.set_yticks(TICKS[key], ticks)
            ax.minorticks_off()
    return figure


def beta(table: pd.DataFrame, runs: Runs) -> Figure:
    """ECE and entropy of the paper's head against beta0, all on one network."""
    run = StoredRun(REFERENCE)
    names = [f"mlp-{beta0:g}" for beta0 in BETAS]
    found = means(table[table.run == run.name]).loc[row_of(run.name)].loc[names]
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    entropy = [run.certificate["entropy"][name] for name in names]
    for ax, key, values in ((left, "ece", found.ece), (right, "mean_entropy", entropy)):
        ax.plot(BETAS, values, marker="o", color=plots.BLUE)
        ax.set(xlabel=r"$\beta_0$", ylabel=PANELS[key])
    left.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    return figure


def gradients(table: pd.DataFrame, runs: Runs) -> Figure:
    """Gradient norms of two heads at six calibration steps of an epoch, over the last 70 % of the epochs."""
    found = StoredRun(REFERENCE).certificate["gradients"]
    norms = {name: np.array(value) for name, value in found.items()}  # (epochs, 6)
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    for step, ax in enumerate(figure.subplots(2, 3).flat):
        shown = {}
        for name, values in norms.items():
            late = values[round(0.3 * len(values)) :, step]
            shown[name.replace("mlp-", "beta0 ")] = late[np.isfinite(late)]
        shares = [np.full(len(late), 1 / len(late)) for late in shown.values()]
        ax.hist(list(shown.values()), 16, weights=shares, histtype="step", label=list(shown))
        ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        ax.set(title=f"{STEPS[step]} calibration step", xlabel="gradient norm", ylabel="share")
        ax.legend(frameon=False)
    return figure


def reliability(table: pd.DataFrame, runs: Runs) -> Figure:
    """Network, temperature scaling, paper's head and staged head, for the first run of four data sets."""
    by_name = {run.name.partition("-cross_entropy")[0]: run for run in tables.networks(runs).values()}
    firsts = [by_name[name] for name in DIAGRAMS]
    chosen = ("none", "temperature", "annealing-double-head", "head+opinion")
    figure = Figure(figsize=(3.4 * len(chosen), 3.7 * len(firsts)), layout="constrained")
    axes = figure.subplots(len(firsts), len(chosen), squeeze=False)
    for line, run in zip(axes, firsts):
        for ax, name in zip(line, chosen):
            scores = METHODS[name](run) if name in METHODS else run.heads.get(name)
            if scores is not None:
                curve = curves.reliability(scores.bins(fine_bins(15)), 15)
                title = "staged head, second opinion" if name == "head+opinion" else SHOWN[name]
                plots.draw_reliability(curve, ax, title=f"{title_of(run)}\n{title}")
    legends = [ax.get_legend() for ax in axes.flat if ax.get_legend()]
    figure.legend(handles=legends[0].legend_handles, loc="outside lower center", ncols=3, frameon=False)
    for legend in legends:
        legend.remove()
    return figure


# --- everything


def measure(runs: Runs, before: pd.DataFrame) -> pd.DataFrame:
    """The long table. Kept are rows of packages that are not installed here."""
    found: Numbers = {}
    for run in runs:
        began = time.perf_counter()
        found |= run_numbers(run)
        print(f"{run.name}: {time.perf_counter() - began:.0f} s", flush=True)
    for name, members in ensembles(runs):
        found |= ensemble_numbers(name, members)
    of_peers = before.output.isin(PEERS) | before.metric.str.endswith(PEERS)
    kept = before[before.run.isin([run.name for run in runs]) & of_peers]
    new = pd.DataFrame.from_dict(found, orient="index").stack()
    both = pd.concat([new, kept.set_index(COLUMNS[:3]).value])
    return write_table(both[~both.index.duplicated()])


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, table = stored_runs(), read_table()
    if not options.keep:
        table = measure(runs, table)
    tables.publish(tables.TABLES | rivals.TABLES, table, runs)
    for figure in (gains, epochs, beta, gradients, reliability):
        plots.save(figure(table, runs), OUTPUT / "figures" / f"{figure.__name__}.png", dpi=90)
    shift.draw()
