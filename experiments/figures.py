"""Figures of the results page, from results.csv, certificates and committed logits. Each returns a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from post_hoc import METHODS
from results import StoredRun
from tables import REFERENCE, means, row_of, rows, title_of

from doublehead import plots
from doublehead.curves import reliability
from doublehead.metrics import fine_bins
from doublehead.training.methods import BETAS

SHOWN = {
    "none": "network",
    "temperature": "temperature scaling",
    "annealing-double-head": "paper's head",
    "head": "staged head",
    "head+opinion": "with features and second opinion",
    "head+mirror": "with the mirror view too",
}
HEADS = {"main": "network", "double-head": "head, no annealing", "annealing-double-head": "head, beta0 1.2"}
STEPS = ("first", "5th", "10th", "last 10th", "last 5th", "last")
TICKS = {"ece": (0.003, 0.01, 0.03, 0.1), "nll": (0.2, 0.5, 1.0, 2.0)}  # of logarithmic axes
PANELS = {"ece": "ECE", "nll": "NLL", "accuracy": "accuracy", "mean_entropy": "mean entropy (nats)"}


def reference(runs: Sequence[StoredRun]) -> StoredRun:
    """The run of the paper's figures."""
    return next(run for run in runs if run.name == REFERENCE)


def gains(table: pd.DataFrame, runs: Sequence[StoredRun]) -> Figure:
    """The change of the NLL against temperature scaling, with 95 % intervals, row by row."""
    shown_rows = rows(runs)
    figure = Figure(figsize=(4.1 * len(shown_rows), 3.4), layout="constrained")
    names = [name for name in SHOWN if name not in ("none", "temperature")]
    for ax, (row, first) in zip(np.atleast_1d(figure.subplots(1, len(shown_rows))), shown_rows.items()):
        found = means(table, row)
        shown = [name for name in names if name in found.index]
        scale = 100 / found.loc["temperature"].nll
        places = range(len(shown))
        values = found.loc[shown]
        errors = scale * (values.delta_high - values.delta_low) / 2
        ax.errorbar(scale * values.delta, places, xerr=errors, fmt="o", color=plots.INK, capsize=3)
        ax.axvline(0, color=plots.INK, linewidth=0.8, linestyle=":")
        ax.set_yticks(places, [SHOWN[name] for name in shown])
        ax.invert_yaxis()
        ax.set(xlabel="change of the NLL, percent", title=title_of(first))
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def epochs(table: pd.DataFrame, runs: Sequence[StoredRun]) -> Figure:
    """Network and paper's heads over the epochs of the reference run."""
    found = reference(runs).certificate["epochs"]
    figure = Figure(figsize=(9.6, 6.6), layout="constrained")
    for ax, (key, label) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        lines = [
            {"epoch": epoch, **{title: found[name][key][i] for name, title in HEADS.items()}}
            for i, epoch in enumerate(found["epoch"])
        ]
        plots.draw_epochs(lines, list(HEADS.values()), ax, ylabel=label, percent=key in ("ece", "accuracy"))
        if key in TICKS:
            ax.set_yscale("log")
            ax.set_yticks(
                TICKS[key], [f"{100 * tick:g} %" if key == "ece" else f"{tick:g}" for tick in TICKS[key]]
            )
            ax.minorticks_off()
    return figure


def beta_sweep(table: pd.DataFrame, runs: Sequence[StoredRun]) -> Figure:
    """ECE and entropy of the paper's head against beta0, all on one network."""
    run = reference(runs)
    names = [f"mlp-{beta0:g}" for beta0 in BETAS]
    found = means(table[table.run == run.name], row_of(run.name)).loc[names]
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    plots.draw_sweep(BETAS, {"paper's head": found.ece.tolist()}, left, ylabel="ECE")
    entropy = [run.certificate["entropy"][name] for name in names]
    plots.draw_sweep(
        BETAS, {"paper's head": entropy}, right, ylabel="mean entropy (nats)", percent=False, ring=False
    )
    return figure


def gradient_norms(table: pd.DataFrame, runs: Sequence[StoredRun]) -> Figure:
    """Gradient norms of two heads at six calibration steps of an epoch, over the last 70 % of the epochs."""
    found = reference(runs).certificate["gradients"]
    norms = {name: np.array(value) for name, value in found.items()}  # (epochs, 6)
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    for step, ax in enumerate(figure.subplots(2, 3).flat):
        shown = {}
        for name, values in norms.items():
            late = values[round(0.3 * len(values)) :, step]
            shown[name.replace("mlp-", "beta0 ")] = late[np.isfinite(late)]
        plots.draw_histograms(shown, ax, n_bins=16, log=False, title=f"{STEPS[step]} calibration step")
    return figure


def reliability_diagrams(table: pd.DataFrame, runs: Sequence[StoredRun]) -> Figure:
    """Network, temperature scaling, paper's head and staged head, for the first run of each data set."""
    firsts = {run.config.data: run for run in reversed(runs) if run.config.loss == "cross_entropy"}
    chosen = ("none", "temperature", "annealing-double-head", "head+opinion")
    figure = Figure(figsize=(3.4 * len(chosen), 3.7 * len(firsts)), layout="constrained")
    axes = figure.subplots(len(firsts), len(chosen), squeeze=False)
    for line, (_, run) in zip(axes, sorted(firsts.items())):
        for ax, name in zip(line, chosen):
            scores = METHODS[name](run) if name in METHODS else run.heads.get(name)
            if scores is not None:
                curve = reliability(scores.bins(fine_bins(15)), 15)
                title = "staged head, second opinion" if name == "head+opinion" else SHOWN[name]
                plots.draw_reliability(curve, ax, title=f"{title_of(run, epochs=False)}\n{title}")
    legend = axes[0, 0].get_legend()
    labels = [text.get_text() for text in legend.get_texts()]
    figure.legend(legend.legend_handles, labels, loc="outside lower center", ncols=3, frameon=False)
    for ax in axes.flat:
        if ax.get_legend():
            ax.get_legend().remove()
    return figure


FIGURES: dict[str, Callable[[pd.DataFrame, Sequence[StoredRun]], Figure]] = {
    "gains": gains,
    "epochs": epochs,
    "beta": beta_sweep,
    "gradients": gradient_norms,
    "reliability": reliability_diagrams,
}
