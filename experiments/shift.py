"""The shift guard: tables and a figure of what was measured on trained networks, and false alarms in a simulation.

    python experiments/shift.py simulate   # shift_alarms.csv
    python experiments/shift.py draw       # tables and figure from what is committed

`shift.csv` has a row for each network, kind of shift left out of the fit, method and cell: a family of shifts at a
severity on 1,000 inputs. Networks, ensemble members and the commit of the code that measured them are in `shift.json`.
The networks' weights and outputs are not committed, so this code is not kept here.

`simulate` counts false alarms with few calibration samples. Each of many calibration sets has a guard of its own, which
sees windows of new samples of the same kind, and of weakly shifted ones. An alarm that knows all clean data shows what
shift can be seen at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib

matplotlib.use("Agg")

import pandas as pd
import torch
from matplotlib.figure import Figure
from results import HERE, Z, arguments
from tables import Tables, markdown, percent, publish
from torch import Tensor

from doublehead import plots
from doublehead.guard import RATE, WINDOW, Guard, Observed, hotelling, mean_and_precision

TABLE, ALARMS = HERE / "shift.csv", HERE / "shift_alarms.csv"
IMAGES = HERE.parent / "docs" / "images"
PRIORS, TICKS = (0.01, 0.05, 0.2, 0.5), (-10, -1, -0.1, 0.1, 1, 10)  # of the frontier
SHOWN = {
    "temperature": "temperature scaling",
    "head": "staged head",
    "perturbed": "temperature of perturbed data",
    "density": "density-aware",
    "ensemble": "ensemble",
    "single": "guard, single inputs",
    "window-64": "guard, windows of 64",
    "window-256": "guard, windows of 256",
    "perfect": "*perfect temperatures*",
}
# Of the simulation: calibration samples, channels of each part of the stages, and shifts by kind of stages.
SAMPLES = (200, 872, 5000)
CHANNELS = {"normal": [128] * 18, "heavy tails": [128] * 18, "sparse": [100, 100]}
SHIFTS = {"normal": 0.015, "heavy tails": 0.3, "sparse": 0.05}
NEW, WINDOWS = 10_000, 20_000  # samples, and windows drawn from them


# --- what was measured


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By run and method: mean ECE over kinds as a share of temperature scaling's, and the cost on clean data."""
    measured = table[table.ece.notna()]
    clean = measured[measured.cell == "clean"].groupby(["run", "method"], sort=False)
    kinds = measured[measured.cell != "clean"].groupby(["run", "method", "left_out"], sort=False).ece.mean()
    ece = kinds.groupby(["run", "method"], sort=False).mean()
    head = clean.nll.mean().xs("head", level="method")
    high = clean.cost.mean() + Z * clean.cost_error.mean()
    columns = {"ece": ece, "share": ece / ece.xs("temperature", level="method")}
    return pd.DataFrame(columns | {"cost": 100 * clean.cost.mean() / head, "cost_high": 100 * high / head})


def shift_table() -> str:
    """A row for each method, a column for each network."""
    table = pd.read_csv(TABLE)
    found = summary(table)
    runs = found.index.unique("run")
    cells = found.apply(lambda row: f"{row.share:.2f} ({row.cost_high:+.2f})", axis=1).unstack("run")
    shown = cells.reindex(index=SHOWN, columns=runs).fillna("").rename(SHOWN)
    clean = table[(table.method == "alarm-64") & (table.cell == "clean")].set_index("run").alarms
    for title, shares in (
        ("*ECE of temperature scaling*", found.ece.xs("temperature", level="method")),
        ("*clean windows of 64 with an alarm*", clean),
    ):
        shown.loc[title] = shares.map("{:.1%}".format).str.replace("%", " %")
    shown.columns = shown.columns.str.partition("-cross").get_level_values(0)
    return markdown(shown.rename_axis("method").reset_index())


def frontier(table: pd.DataFrame) -> Figure:
    """Clean cost against shifted ECE, for each network; costs beyond 0.1 % are on a logarithmic axis."""
    found = summary(table)
    runs = found.index.unique("run")
    n_lines = -(-(len(runs) + 1) // 4)  # the last cell is for the legend
    figure = Figure(figsize=(12, 3 * n_lines), layout="constrained")
    axes = list(figure.subplots(n_lines, 4, sharex=True, sharey=True, squeeze=False).flat)
    for ax, run in zip(axes, runs):
        own = found.loc[run]
        sweep = own.loc[[f"single-{prior:g}" for prior in PRIORS]]
        ax.plot(sweep.cost, sweep.share, "-", color=plots.INK, linewidth=0.8, label="guard, larger priors")
        for i, (name, label) in enumerate(SHOWN.items()):
            place = own.reindex([name])  # a network without an ensemble has no such point
            ax.plot(place.cost, place.share, "o^sDpvP*_"[i], label=label.strip("*"), markersize=8)
        ax.axvline(0, color=plots.INK, linewidth=0.8, linestyle=":")
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set(title=run.partition("-cross")[0], ylim=(0, 1.15), xlim=(-40, 40))
        ax.set(xticks=TICKS, xticklabels=TICKS)
        ax.tick_params(labelbottom=True, labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[len(runs) :]:
        ax.axis("off")
    figure.supxlabel("change of the clean NLL against the staged head, percent", fontsize=9)
    figure.supylabel("mean ECE under shift, share of temperature scaling's", fontsize=9)
    axes[-1].legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="center", frameon=False)
    return figure


# --- false alarms in a simulation


def simulated_stages(kind: str, n: int, generator: torch.Generator, shift: float = 0.0) -> Tensor:
    """(n, S) of one kind; a shift of 0.1 makes them vary by a tenth more."""
    widths = CHANNELS[kind]
    values = torch.randn(n, len(widths), widths[0], generator=generator)
    if kind == "heavy tails":
        values *= (0.4 * torch.randn(n, 1, 1, generator=generator)).exp()
        values *= (0.2 * torch.randn(n, len(widths), 1, generator=generator)).exp()
    values *= 1 + shift
    if kind == "sparse":  # some channels are 0 in all but a few samples
        values = (values - torch.linspace(0, 3.2, widths[0])).clamp(min=0)
    return values.flatten(1)


@torch.no_grad()
def simulate(kind: str, samples: int, sets: int) -> Iterator[dict[str, Any]]:
    """A row for each calibration set: shares of clean and of shifted windows with an alarm."""
    generator = torch.Generator().manual_seed(samples)
    new = [simulated_stages(kind, NEW, generator, by) for by in (0.0, SHIFTS[kind])]
    for number in range(sets):
        guard, none, places = Guard(CHANNELS[kind]), torch.zeros(samples).long(), torch.arange(samples)
        calib = simulated_stages(kind, samples, generator)
        guard.fit(Observed(calib, torch.zeros(samples, 2), none, none, places), seed=number)
        means = []
        for values in new:
            far = guard.bounded(guard.numbers(values, torch.zeros(NEW, 2)))
            rows = torch.randint(NEW, (WINDOWS, WINDOW), generator=generator)
            means.append(torch.cat([far[some].mean(1) for some in rows.split(1000)]))
        # The mean and covariance of the means of clean windows are known here, so this test is exact.
        centre, precision = mean_and_precision(means[0])
        clean, shifted = (hotelling(values - centre, precision) for values in means)
        raised = [*(guard.p_values(values) <= RATE for values in means), shifted > clean.quantile(1 - RATE)]
        shares = zip(("false", "seen", "known"), (float(share.float().mean()) for share in raised))
        yield {"stages": kind, "samples": samples, "set": number, **dict(shares)}
    print(kind, samples, flush=True)


def alarms_table() -> str:
    """False alarms of simulated guards, in percent."""
    groups = pd.read_csv(ALARMS).groupby(["stages", "samples"], sort=False)
    made = pd.DataFrame({"false alarms": groups.false.mean().map(percent)})
    made["in 95 % of sets at most"] = groups.false.quantile(0.95).map(percent)
    made["alarms"] = groups.seen.mean().map("{:.0%}".format).str.rstrip("%")
    made["of a perfect test"] = groups.known.mean().map("{:.0%}".format).str.rstrip("%")
    return markdown(made.reset_index().assign(samples=lambda found: found.samples.map("{:,}".format)))


# --- everything

TABLES: Tables = {"shift": ("docs/shift.md", shift_table), "shift-alarms": ("docs/shift.md", alarms_table)}


def draw() -> None:
    """The tables of docs/shift.md and the frontier."""
    publish(TABLES)
    plots.save(frontier(pd.read_csv(TABLE)), IMAGES / "frontier.png", dpi=90)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["draw", "simulate"])
    parser.add_argument("--sets", type=int, default=60, help="simulated calibration sets of each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "simulate":
        rows = [row for kind in CHANNELS for n in SAMPLES for row in simulate(kind, n, options.sets)]
        pd.DataFrame(rows).round(6).to_csv(ALARMS, index=False)
    draw()
