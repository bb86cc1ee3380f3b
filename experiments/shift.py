"""What the shift guard does to trained networks, with whole kinds of shift left out of its fit (docs/shift.md).

    python experiments/shift_sets.py RUN_FOLDER --root data   # logits and distances: seen/RUN.pt
    python experiments/shift.py measure seen/*.pt             # shift.csv, figure of a stream
    python experiments/shift.py simulate                      # shift_alarms.csv

`measure` fits every method to calibration data and measures it on test data, on a kind of shift that is not part of its
fit. Each cell is a family at a severity on 1,000 inputs. Runs on the same inputs form an ensemble. `simulate` counts
false alarms with few calibration samples: each set has a guard that sees windows of new and of weakly shifted samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from post_hoc import mean_of
from results import HERE, arguments, where_computed
from shift_sets import KINDS, Sets, read
from tables import Tables, percent, publish
from torch import Tensor

from doublehead import Predictions, metrics, plots
from doublehead.calibrators import Calibrator, make, mean_and_error
from doublehead.calibrators.optimise import fit_log_scale
from doublehead.guard import RATE, WINDOW, Guard, Observed, hotelling, mean_and_precision
from doublehead.outcomes import NORMAL

TABLE, ALARMS = HERE / "shift.csv", HERE / "shift_alarms.csv"
IMAGES = HERE.parent / "docs" / "images"
BATCH = 100
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
# Of the simulation: calibration sets of each size, their samples, channels of each part of the stages, shifts.
SETS, SAMPLES = 60, (200, 872, 5000)
CHANNELS = {"normal": [128] * 18, "heavy tails": [128] * 18, "sparse": [100, 100]}
SHIFTS = {"normal": 0.015, "heavy tails": 0.3, "sparse": 0.05}
NEW, WINDOWS = 10_000, 20_000  # samples, and windows drawn from them

Method = Callable[[str], Tensor]  # the name of a set, a stream of inputs -> logits (N, K)


class Given(torch.nn.Identity):
    """In place of a guard's distances: the stages are distances already."""

    widths = (128,)  # channels of the layers that they were measured on, at most
    set_usual = torch.nn.Identity.forward


def guard_of(clean: Observed, *perturbed: Observed, window: int = WINDOW, **how: Any) -> Guard:
    """A guard that learned from these sets, each of the perturbed ones a group."""
    guard = Guard([1] * clean.stages.shape[1], window)
    guard.distances = Given()
    guard.fit(clean, joined(*perturbed) if perturbed else None, **how)
    return guard


def fit_methods(sets: Sets, kind: str, members: Sequence[Sets] = ()) -> dict[str, Method]:
    """Every method, fitted without one kind of shift; an ensemble of `members` where there are two or more."""
    clean = sets["calib/clean"]
    head, temperature = fitted(clean, "head"), fitted(clean)
    by_head = {name: one._replace(logits=head(one.logits)) for name, one in sets.items()}
    density = density_aware(temperature(clean.logits), clean.labels, clean.stages)
    others = [cell for other in KINDS if other != kind for cell in cells_of("calib", other) if cell in sets]
    perturbed = fitted(joined(*(first(sets[cell]) for cell in others), *[clean] * 6))
    seen = [by_head["calib/clean"], *(first(by_head[cell]) for cell in others)]
    guards = {"single": guard_of(*seen, window=0)}
    guards |= {f"window-{window}": guard_of(*seen, window=window) for window in (64, 256)}
    guards |= {f"single-{prior:g}": guard_of(*seen, window=0, prior=prior) for prior in PRIORS}

    def guarded(guard: Guard, name: str) -> Tensor:
        guard.reset()
        parts = zip(by_head[name].stages.split(BATCH), by_head[name].logits.split(BATCH))
        return torch.cat([guard(far, z) for far, z in parts])

    methods: dict[str, Method] = {
        "head": lambda name: by_head[name].logits,
        "temperature": lambda name: temperature(sets[name].logits),
        "perturbed": lambda name: perturbed(sets[name].logits),
        "density": lambda name: temperature(sets[name].logits) * density(sets[name].stages),
        # Fitted to the labels that it is measured on: no temperature does better.
        "perfect": lambda name: fitted(by_head[name])(by_head[name].logits),
    }
    if len(members) > 1:
        mean = {name: mean_of([one[name].logits for one in members]).float() for name in sets}
        pooled = fitted(clean._replace(logits=mean["calib/clean"]))
        methods["ensemble"] = lambda name: pooled(mean[name])
    return methods | {name: partial(guarded, guard) for name, guard in guards.items()}


def density_aware(logits: Tensor, labels: Tensor, far: Tensor) -> Callable[[Tensor], Tensor]:
    """Distances (N, D) -> a factor (N, 1) that was fitted to clean data and never grows with a distance.

    Distances whose weights would are left out, one after the other.
    """
    mean, deviation = far.mean(0), far.std(0).clamp(min=1e-3)

    def inputs(far: Tensor) -> Tensor:
        return torch.cat([((far - mean) / deviation).clamp(-3, 6), torch.ones(len(far), 1)], 1)

    design = inputs(far)
    kept = torch.ones(design.shape[1], dtype=torch.bool)
    weights = kept.float()
    while (weights[:-1] > 0).any():
        found = fit_log_scale(logits, labels, design[:, kept], torch.full((int(kept.sum()),), 30.0))
        weights = torch.zeros(len(kept)).masked_scatter(kept, found)
        kept[weights[:-1].argmax()] = False
    return lambda far: (inputs(far) @ weights).exp()[:, None]


def cells_of(split: str, kind: str) -> list[str]:
    """The names of the sets with one kind of shift."""
    return [f"{split}/{family}/{level}" for family in KINDS[kind] for level in range(1, 6)]


def joined(*sets: Observed) -> Observed:
    """Several sets, each a group."""
    whole = Observed(*(torch.cat(parts) for parts in zip(*sets)))
    return whole._replace(groups=torch.cat([torch.full_like(one.labels, i) for i, one in enumerate(sets)]))


def first(seen: Observed) -> Observed:
    """The inputs of a set that methods learn from."""
    return Observed(*(part[:500] for part in seen))


def fitted(seen: Observed, name: str = "temperature") -> Calibrator:
    return make(name).fit(Predictions(seen.logits, seen.labels))


# --- measure


@torch.no_grad()
def measure(files: Sequence[Path], more: Sequence[Path] = ()) -> pd.DataFrame:
    """One row for each run, kind left out, method and cell; `more` runs are only members of ensembles."""
    runs = {file.stem: read(file) for file in [*files, *more]}
    rows: list[dict[str, Any]] = []
    for run in (file.stem for file in files):
        sets = runs[run]
        members = [other for other in runs.values() if same_inputs(sets, other)]
        for kind in (kind for kind in KINDS if cells_of("test", kind)[0] in sets):
            methods = fit_methods(sets, kind, members)
            clean = Predictions(methods["head"]("test/clean"), sets["test/clean"].labels)
            by_head = metrics.per_sample(clean)["nll"]
            for (name, method), cell in product(methods.items(), ("test/clean", *cells_of("test", kind))):
                found = Predictions(method(cell), sets[cell].labels)
                nll = metrics.per_sample(found)["nll"]
                row = {"run": run, "left_out": kind, "method": name, "cell": cell.partition("/")[2]}
                row |= {"ece": metrics.ece(found), "nll": float(nll.mean())}
                if cell == "test/clean":
                    row["cost"], row["cost_error"] = mean_and_error(nll - by_head)
                rows.append(row)
            print(run, kind, flush=True)
        rows += alarms(sets, run)
    return pd.DataFrame(rows)


def same_inputs(one: Sets, other: Sets) -> bool:
    """Whether two runs saw the same inputs of the same classes."""
    pairs = zip(one.values(), other.values())
    alike = (a.logits.shape == b.logits.shape and all(map(torch.equal, a[2:], b[2:])) for a, b in pairs)
    return one.keys() == other.keys() and all(alike)


def alarms(sets: Sets, run: str) -> Iterator[dict[str, Any]]:
    """The share of random windows with an alarm, of clean ones and of each cell; nothing perturbed was seen."""
    guard, generator = guard_of(sets["calib/clean"]), torch.Generator().manual_seed(0)
    for name in [name for name in sets if not name.startswith("calib/")]:
        n, raised, one = 1000 if name == "test/clean" else 20, 0, sets[name]
        for _ in range(n):
            rows = torch.randperm(len(one.labels), generator=generator)[:WINDOW]
            guard.reset()
            guard(one.stages[rows], one.logits[rows])
            raised += guard.shift.alarm
        cell = name.partition("/")[2]
        yield {"run": run, "left_out": "all", "method": "alarm-64", "cell": cell, "alarms": raised / n}


# --- table and figures


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By run and method: mean ECE over kinds as a share of temperature scaling's, and the cost on clean data."""
    measured = table[table.ece.notna()]
    clean = measured[measured.cell == "clean"].groupby(["run", "method"], sort=False)
    kinds = measured[measured.cell != "clean"].groupby(["run", "method", "left_out"], sort=False).ece.mean()
    ece = kinds.groupby(["run", "method"], sort=False).mean()
    head, cost = clean.nll.mean().xs("head", level="method"), clean.cost.mean()
    high = cost + NORMAL * clean.cost_error.mean()
    made = {"ece": ece, "share": ece / ece.xs("temperature", level="method")}
    return pd.DataFrame(made | {"cost": 100 * cost / head, "cost_high": 100 * high / head})


def shift_table() -> pd.DataFrame:
    """A row for each method, a column for each network."""
    table = pd.read_csv(TABLE)
    found = summary(table)
    cells = found.apply(lambda row: f"{row.share:.2f} ({row.cost_high:+.2f})", axis=1)
    shown = cells.unstack("run").reindex(SHOWN, columns=found.index.unique("run")).fillna("").rename(SHOWN)
    clean = table[(table.method == "alarm-64") & (table.cell == "clean")].set_index("run").alarms
    ece = found.ece.xs("temperature", level="method")
    for title, shares in (("ECE of temperature scaling", ece), ("clean windows of 64 with an alarm", clean)):
        shown.loc[f"*{title}*"] = shares.map("{:.1%}".format).str.replace("%", " %")
    shown.columns = shown.columns.str.partition("-cross").get_level_values(0)
    return shown.rename_axis("method").reset_index()


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
        for marker, (name, label) in zip("o^sDpvP*_", SHOWN.items()):
            place = own.reindex([name])  # a network without an ensemble has no such point
            ax.plot(place.cost, place.share, marker, label=label.strip("*"), markersize=8)
        ax.axvline(0, color=plots.INK, linewidth=0.8, linestyle=":")
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set(title=run.partition("-cross")[0], ylim=(0, 1.15), xlim=(-40, 40))
        ax.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        ax.tick_params(labelbottom=True, labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[len(runs) :]:
        ax.axis("off")
    figure.supxlabel("change of the clean NLL against the staged head, percent", fontsize=9)
    figure.supylabel("mean ECE under shift, share of temperature scaling's", fontsize=9)
    axes[-1].legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="center", frameon=False)
    return figure


def stream(sets: Sets) -> Figure:
    """Confidence, accuracy and alarm over a stream that drifts from clean to corrupted images and back."""
    cells = ["test/clean", *(f"test/gaussian_blur/{level}" for level in range(1, 6)), "test/clean"]
    parts = (Observed(*(p[600 * (i > 5) :][:400] for p in sets[cell])) for i, cell in enumerate(cells))
    whole = joined(*parts)
    methods = fit_methods({**sets, "stream": whole}, "blurs")
    correct = (whole.logits.argmax(1) == whole.labels).double()
    lines = pd.DataFrame({"accuracy": correct})
    for name, label in (("temperature", "temperature scaling"), ("window-64", "guard")):
        lines[f"confidence, {label}"] = methods[name]("stream").softmax(1).amax(1).double()
    guard, alarm = guard_of(sets["calib/clean"]), []
    for far, z in zip(whole.stages.split(1), whole.logits.split(1)):
        guard(far, z)
        alarm.append(guard.shift.alarm)
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    ax = figure.subplots()
    lines.rolling(64).mean().plot(ax=ax, color=[plots.INK, "C0", "C1"])
    ax.fill_between(lines.index, 0, 1, where=alarm, alpha=0.15, label="alarm")
    for edge in range(400, len(alarm), 400):
        ax.axvline(edge, color=plots.INK, linewidth=0.5, linestyle=":")
    ax.set(xlabel="image", ylim=(0, 1.02), xlim=(0, len(alarm)))
    ax.legend(loc="lower left", fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
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


def alarms_table() -> pd.DataFrame:
    """False alarms of simulated guards, in percent."""
    groups = pd.read_csv(ALARMS).groupby(["stages", "samples"], sort=False)
    mean, whole = groups[["false", "seen", "known"]].mean(), partial(percent, digits=0)
    made = {
        "false alarms": mean.false.map(percent),
        "in 95 % of sets at most": groups.false.quantile(0.95).map(percent),
        "alarms": mean.seen.map(whole),
        "of a perfect test": mean.known.map(whole),
    }
    return pd.DataFrame(made).rename("{:,}".format, level="samples").reset_index()


TABLES: Tables = {"shift": ("docs/shift.md", shift_table), "shift-alarms": ("docs/shift.md", alarms_table)}


def draw() -> None:
    """The tables of docs/shift.md and the frontier."""
    publish(TABLES)
    plots.save(frontier(pd.read_csv(TABLE)), IMAGES / "frontier.png", dpi=90)


@torch.no_grad()
def write_measured(files: Sequence[Path], members: Sequence[Path]) -> None:
    """shift.csv, its certificate and the figure of a stream."""
    names = {"runs": [path.stem for path in files], "members": [path.stem for path in members]}
    about = names | {"environment": where_computed()}
    measure(files, members).round(6).to_csv(TABLE, index=False)
    TABLE.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    plots.save(stream(read(files[0])), IMAGES / "shift.png", dpi=90)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["measure", "simulate"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--members", nargs="*", type=Path, default=[], help="further members of ensembles")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "measure":
        write_measured(options.paths, options.members)
    else:
        rows = [row for kind in CHANNELS for n in SAMPLES for row in simulate(kind, n, SETS)]
        pd.DataFrame(rows).round(6).to_csv(ALARMS, index=False)
    draw()
