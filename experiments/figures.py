"""The paper's figures from our committed runs. Each function returns a figure, or None where nothing was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from committed import Run, having, mean_shift, numbers
from matplotlib.figure import Figure
from overview import SHORT, accuracy_bars, ece_and_floor, short
from seen import is_guard, seen
from shift import few_heads, rows_with_shift, sets_of
from tables import AUTO, PAPER_SOURCES, Rows, Source, paper_order, reference, row_title

from doublehead import plots
from doublehead.curves import confidence_histogram, reliability
from doublehead.data import FAMILIES
from doublehead.metrics import Floor

SWEEP = "mlp-"  # the sweep over beta0: heads of the paper's form, one network
PAPER_BETAS = (0.1, 1.0, 1.2, 2.0)  # of the paper's reliability diagrams
GRADIENT_BETAS = (0.6, 1.5)  # of its gradient histograms
STEPS = ("first", "5th", "10th", "last 10th", "last 5th", "last")  # calibration steps of an epoch
LOG_TICKS = {"ece": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), "nll": (0.25, 0.5, 1.0, 2.0, 4.0)}


def epochs_by_method(rows: Rows) -> Figure | None:
    """ECE and accuracy over the epochs, by method, on the reference row's first seed."""
    lines = {short(source): source for source in (*PAPER_SOURCES[:4], PAPER_SOURCES[5])}
    return _epoch_panels(rows, lines, {"ece": "ECE", "accuracy": "accuracy"})


def epochs_by_head(rows: Rows) -> Figure | None:
    """Main head against the paper's calibration head: ECE, entropy, accuracy and NLL over the epochs."""
    lines = {"main head": PAPER_SOURCES[0], "calibration head, beta0 1.2": PAPER_SOURCES[5]}
    panels = {"ece": "ECE", "mean_entropy": "mean entropy (nats)", "accuracy": "accuracy", "nll": "NLL"}
    return _epoch_panels(rows, lines, panels)


def _epoch_panels(rows: Rows, lines: dict[str, Source], panels: dict[str, str]) -> Figure | None:
    found = reference(rows)
    if found is None:
        return None
    figure = Figure(figsize=(9.6, 3.5 * -(-len(panels) // 2)), layout="constrained")
    for ax, (key, label) in zip(figure.subplots(-(-len(panels) // 2), 2).flat, panels.items()):
        table = epoch_rows(found[1], lines, key)
        names = [name for name in lines if any(name in line for line in table)]
        plots.draw_epochs(table, names, ax, ylabel=label, percent=key in ("ece", "accuracy"))
        if key in LOG_TICKS:
            _logarithmic(
                ax, [t for t in LOG_TICKS[key] if ax.dataLim.y0 / 2 < t < ax.dataLim.y1 * 2], key == "ece"
            )
    return figure


def _logarithmic(ax: Any, ticks: Sequence[float], percent: bool) -> None:
    ax.set_yscale("log")
    ax.set_yticks(ticks, [f"{100 * tick:g} %" if percent else f"{tick:g}" for tick in ticks])
    ax.minorticks_off()


def epoch_rows(methods: Mapping[str, list[Run]], lines: dict[str, Source], key: str) -> list[dict[str, Any]]:
    """One dict per epoch with a number of every line, from the first seed that has it; epochs count from 1."""
    table: dict[int, dict[str, Any]] = {}
    for name, source in lines.items():
        runs = [run for run in having(methods.get(source.method, []), source.output) if run.epochs]
        for run in runs[:1]:
            for line in run.epochs:
                at = line["epoch"] + 1
                value = line.get("test", {}).get(source.output, {}).get(key)
                table.setdefault(at, {"epoch": at})[name] = value
    return [table[at] for at in sorted(table)]


def beta_sweep(rows: Rows) -> Figure | None:
    """ECE and entropy against beta0: heads of the paper's form that rode on one network."""
    found = {
        row_title(row, rows): sweep(rows[row].get("cross-entropy", []))
        for row in sorted(rows, key=paper_order)
    }
    found = {name: (betas, runs) for name, (betas, runs) in found.items() if len(betas) > 1}
    if not found:
        return None
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    betas = sorted({beta for some, _ in found.values() for beta in some})
    curves = {key: {name: [_sweep(runs, beta, key) for beta in betas] for name, (_, runs) in found.items()}
              for key in ("ece", "mean_entropy")}  # fmt: skip
    plots.draw_sweep(betas, curves["ece"], left, ylabel="ECE", ring=False)
    plots.draw_sweep(
        betas, curves["mean_entropy"], right, ylabel="mean entropy (nats)", percent=False, ring=False
    )
    left.axvline(1.2, color=plots.INK, linewidth=0.8, linestyle=":")
    left.text(1.23, left.get_ylim()[1], "the paper's 1.2", va="top", fontsize="small")
    _, first = next(iter(found.values()))
    low, high = (_sweep(first, 1.2, f"ece_floor_{side}") for side in ("low", "high"))
    if high > low:  # not where they are nan
        left.axhspan(low, high, color=plots.GREY, alpha=0.5, linewidth=0)
    return figure


def sweep(runs: Sequence[Run]) -> tuple[list[float], list[Run]]:
    """The longest sweep over beta0 that a run has, and the runs that have all of it: a curve on the same networks."""
    longest = max((sweep_of(run) for run in runs), key=len, default={})
    return sorted(longest), having(runs, *longest.values()) if longest else []


def sweep_of(run: Run) -> dict[float, str]:
    """beta0 -> name of the head, of the sweep in one run."""
    names = [name for name in run.results["outputs"] if name.startswith(SWEEP) and "@" not in name]
    return {float(name.removeprefix(SWEEP)): name for name in names}


def _sweep(runs: Sequence[Run], beta: float, key: str) -> float:
    found = numbers(runs, f"{SWEEP}{beta:g}", key)
    return float("nan") if found is None else found.mean


def reliability_by_method(rows: Rows) -> Figure | None:
    """Reliability diagrams and confidence histograms of the methods, with and without the last bin."""
    found = reference(rows)
    if found is None:
        return None
    sources = (*PAPER_SOURCES[:4], PAPER_SOURCES[5], AUTO)
    columns = [(short(s), run_with_bins(found[1].get(s.method, []), s.output), s.output) for s in sources]
    return _diagrams(columns)


def reliability_by_head(rows: Rows) -> Figure | None:
    """The same for the calibration head and the main head, and for temperature scaling."""
    found = reference(rows)
    if found is None:
        return None
    runs = found[1].get("cross-entropy", [])
    outputs = {"Calibration head": ("annealing-double-head", "before"), "Main head": ("main", "before"),
               "Main head + temperature": ("main", "after")}  # fmt: skip
    return _diagrams(
        [(title, run_with_bins(runs, output), output, when) for title, (output, when) in outputs.items()]
    )


def reliability_by_beta(rows: Rows) -> Figure | None:
    """The same by beta0; where the sweep's bins were not recorded, the two heads of Table 1 stand in for 1 and 1.2."""
    found = reference(rows)
    if found is None:
        return None
    runs, stand_in = found[1].get("cross-entropy", []), {1.0: "double-head", 1.2: "annealing-double-head"}
    columns = []
    for beta in PAPER_BETAS:
        output = f"{SWEEP}{beta:g}"
        if run_with_bins(runs, output) is None and beta in stand_in:
            columns.append(
                (f"beta0 {beta:g} (Table 1's head)", run_with_bins(runs, stand_in[beta]), stand_in[beta])
            )
        else:
            columns.append((f"beta0 {beta:g}", run_with_bins(runs, output), output))
    return _diagrams(columns) if any(column[1] for column in columns) else None


def reliability_of_auto(rows: Rows) -> Figure | None:
    """Temperature scaling and auto in the two rows in which a curve goes with the largest fall of the NLL."""

    def left(run: Run) -> float:
        return (run.number(AUTO.output, "nll") or 1.0) / (run.number("main+T", "nll") or 1.0)

    bent = [
        run
        for methods in rows.values()
        for run in having(methods.get("cross-entropy", []), AUTO.output)
        if (run.results.get("selection") or {}).get("bends") and run.bins(AUTO.output) is not None
    ]
    columns: list[tuple[Any, ...]] = []
    for run in sorted(bent, key=left)[:2]:
        title = row_title(run.row, rows).replace(", ", ",\n")
        columns += [(f"{title}\n+ temperature", run, "main", "after"), (f"{title}\nauto", run, AUTO.output)]
    return _diagrams(columns) if columns else None


def run_with_bins(runs: Sequence[Run], output: str) -> Run | None:
    """The first seed whose bins of that output are recorded."""
    return next((run for run in runs if run.bins(output) is not None), None)


def _diagrams(columns: Sequence[tuple[Any, ...]]) -> Figure:
    """One column each: reliability, confidences, confidences without the last bin."""
    figure = Figure(figsize=(3.1 * len(columns), 9.3), layout="constrained")
    axes = figure.subplots(3, len(columns), height_ratios=(2.1, 1, 1), squeeze=False)
    for i, (title, run, output, *rest) in enumerate(columns):
        when = rest[0] if rest else "before"
        bins = None if run is None else run.bins(output, when)
        if run is None or bins is None:
            _not_recorded(axes[:, i], title)
            continue
        floor = [run.number(output, f"ece_floor{part}", when) or 0.0 for part in ("", "_low", "_high")]
        curve = replace(reliability(bins), floor=Floor(*floor))
        plots.draw_reliability(curve, axes[0, i], title=title)
        for ax, drop_last in zip(axes[1:, i], (False, True)):
            plots.draw_confidence(confidence_histogram(bins, drop_last=drop_last), ax)
    for ax in axes[:, 1:].flat:
        ax.set_ylabel("")
    _one_legend(figure, [ax for ax in axes[0] if ax.get_legend()])
    return figure


def _one_legend(figure: Figure, axes: Sequence[Any]) -> None:
    """The legend that each of these axes has, once and below all, where it covers nothing."""
    if axes:
        legend = axes[0].get_legend()
        labels = [text.get_text() for text in legend.get_texts()]
        figure.legend(legend.legend_handles, labels, loc="outside lower center", ncols=3, frameon=False)
    for ax in axes:
        ax.get_legend().remove()


def _not_recorded(axes: Sequence[Any], title: str) -> None:
    for ax in axes:
        ax.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
        ax.text(0.5, 0.5, "not recorded", ha="center", va="center", color=plots.INK)
    axes[0].set(title=title, aspect="equal")


def gradient_norms(rows: Rows) -> Figure | None:
    """Norms of the calibration head's gradient at six steps of an epoch, for beta0 below and above 1."""
    found = reference(rows)
    runs = with_gradients(found[1].get("cross-entropy", [])) if found else []
    if not runs:
        return None
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    for step, ax in enumerate(figure.subplots(2, 3).flat):
        norms = {f"beta0 {beta:g}": gradient_sample(runs, beta, step) for beta in GRADIENT_BETAS}
        plots.draw_histograms(norms, ax, n_bins=16, log=False, title=f"{STEPS[step]} calibration step")
    return figure


def gradient_sample(runs: Sequence[Run], beta: float, step: int) -> np.ndarray:
    """The norms of one step over the last 70 % of the epochs (the paper: 60 to 200 of 200), of all seeds."""
    head = f"{SWEEP}{beta:g}"
    parts = [
        run.gradients[head][round(0.3 * run.row.epochs) :, step] for run in runs if head in run.gradients
    ]
    pooled = np.concatenate(parts)
    return pooled[np.isfinite(pooled)]


def with_gradients(runs: Sequence[Run]) -> list[Run]:
    """The runs that recorded the gradients of both heads that are compared."""
    heads = {f"{SWEEP}{beta:g}" for beta in GRADIENT_BETAS}
    return [run for run in runs if heads <= set(run.gradients)]


def shift_curves(rows: Rows) -> Figure | None:
    """Mean ECE against severity, and by family, for the heads of each row that was evaluated on all corruptions."""
    found = rows_with_shift(rows)
    if not found:
        return None
    figure = Figure(figsize=(11.5, 4.1 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 2, width_ratios=(1, 1.6), squeeze=False)
    sources = shift_sources([run for _, runs in found for run in runs])  # the same looks in all rows
    for (left, right), (row, runs) in zip(axes, found):
        lines = {_wrap(s): [_severity(runs, s.output, level) for level in range(6)] for s in sources}
        plots.draw_sweep(range(6), lines, left, xlabel="severity (0: clean)", ylabel="mean ECE", ring=False,
                         title=row_title(row, rows))  # fmt: skip
        left.get_legend().remove()
        _families(right, runs, sources)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        fontsize="small",
        frameon=False,
    )
    return figure


def shift_sources(runs: Sequence[Run]) -> list[Source]:
    """What the shift figure shows: as many lines as there are looks, so without some heads where there are guards."""
    sources = few_heads(runs)
    if not any(is_guard(source.output) for source in sources):
        return sources
    dropped = ("annealing-double-head", "mlp@", "temperature@")
    return [source for source in sources if not source.output.startswith(dropped)]


def _wrap(source: Source) -> str:
    return source.title.replace("Annealing double head, beta0 1.2", "Paper's head, beta0 1.2")


def _severity(runs: Sequence[Run], output: str, level: int) -> float:
    sets = [f"{family}:{level}" for family in FAMILIES]
    found = mean_shift(runs, output, sets) if level else numbers(runs, output, "ece")
    return float("nan") if found is None else found.mean


def _families(ax: Any, runs: Sequence[Run], sources: Sequence[Source]) -> None:
    places = np.arange(len(FAMILIES))
    for style, source in zip(plots._styles(), sources):
        found = [mean_shift(runs, source.output, sets_of([family])) for family in FAMILIES]
        means = np.array([one.mean if one else np.nan for one in found])
        known = np.array([family in seen(source.output) for family in FAMILIES])
        for some, fill in ((~known, "full"), (known, "none")):
            ax.plot(places[some], means[some], linestyle="none", marker=style["marker"], color=style["color"],
                    markersize=6, fillstyle=fill)  # fmt: skip
    ax.text(
        0.98, 0.97, "hollow: seen in training", fontsize="small", ha="right", va="top", transform=ax.transAxes
    )
    names = [family.replace("_", " ") for family in FAMILIES]
    ax.set_xticks(places, names, fontsize="small", rotation=35, ha="right", rotation_mode="anchor")
    ax.set(xlim=(-0.5, len(FAMILIES) - 0.5), ylim=(0, None), title="by family, mean over severities")
    plots._percent_axis(ax.yaxis)
    ax.spines[["top", "right"]].set_visible(False)


def period_sweep(rows: Rows) -> Figure | None:
    """ECE against the calibration period k, where a run has heads with several periods."""
    found = reference(rows)
    runs = found[1].get("cross-entropy", []) if found else []
    periods = sorted(
        {int(name.rpartition("-k")[2]) for run in runs for name in run.results["outputs"] if "-k" in name}
    )
    if not periods:
        return None
    lines: dict[str, list[float]] = {}
    for head in ("annealing-double-head", "temperature-1.2"):
        every = [numbers(runs, head, "ece"), *(numbers(runs, f"{head}-k{k}", "ece") for k in periods)]
        lines[SHORT.get(head, "Temperature head, beta0 1.2")] = [one.mean if one else np.nan for one in every]
    floors = [numbers(runs, "temperature-1.2", f"ece_floor_{side}") for side in ("low", "high")]
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    plots.draw_sweep([10, *periods], lines, figure.add_subplot(), xlabel="calibration period k", ring=False,
                     floor=(floors[0].mean, floors[1].mean) if floors[0] and floors[1] else None)  # fmt: skip
    return figure


FIGURES: dict[str, Callable[[Rows], Figure | None]] = {
    "ece-floor": ece_and_floor,
    "accuracy": accuracy_bars,
    "epochs-methods": epochs_by_method,
    "epochs-heads": epochs_by_head,
    "beta": beta_sweep,
    "reliability-methods": reliability_by_method,
    "reliability-heads": reliability_by_head,
    "reliability-beta": reliability_by_beta,
    "reliability-auto": reliability_of_auto,
    "gradients": gradient_norms,
    "shift": shift_curves,
    "period": period_sweep,
}
