"""What the shift guard does to trained networks, with whole kinds of shift left out of its fit.

    python experiments/shift_sets.py RUN_FOLDER --root data --output seen   # logits and distances: seen/RUN.npz
    python experiments/shift.py measure seen/*.npz                          # shift.csv, the table and the figures
    python experiments/shift.py draw                                        # table and frontier from shift.csv
    python experiments/shift.py simulate                                    # shift_alarms.csv and its table

`measure` fits every method to calibration data and measures it on test data. The kind of shift that it is measured on
is never part of its fit. Each cell is a family at a severity on 1,000 inputs; streams are cells one by one. Runs on
the same inputs form an ensemble.

`simulate` counts false alarms with few calibration samples. Each of many calibration sets has a guard of its own, which
sees windows of new samples of the same kind, and of weakly shifted ones. An alarm that knows all clean data shows what
shift can be seen at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from post_hoc import density_aware
from results import HERE, arguments
from shift_sets import KINDS, UNKNOWN, Seen, read
from tables import fill, markdown
from torch import Tensor

from doublehead import Predictions, metrics, plots
from doublehead.calibrators import make
from doublehead.calibrators.choose import mean_and_error
from doublehead.guard import RATE, WINDOW, Guard, Observed, hotelling, mean_and_precision, scaled
from doublehead.training.run_folder import environment

TABLE, ALARMS = HERE / "shift.csv", HERE / "shift_alarms.csv"
DOCUMENT = HERE.parent / "docs" / "shift.md"
IMAGES = DOCUMENT.parent / "images"
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
# Of the simulation: calibration samples, channels of each part of the stages, and shifts by kind of stages.
SAMPLES = (200, 872, 5000)
CHANNELS = {"normal": [128] * 18, "heavy tails": [128] * 18, "sparse": [100, 100]}
SHIFTS = {"normal": 0.015, "heavy tails": 0.3, "sparse": 0.05}
NEW, WINDOWS = 10_000, 20_000  # samples, and windows drawn from them

Sets = dict[str, Seen]
Method = Callable[[str], Tensor]  # the name of a set, a stream of inputs -> logits (N, K)


# --- methods


class Given(torch.nn.Module):
    """In place of a guard's distances: the stages are distances already."""

    widths = (128,)  # channels of the layers that they were measured on, at most

    def forward(self, far: Tensor) -> Tensor:
        return far

    set_usual = forward


def guard_of(
    clean: Seen, perturbed: Sequence[Seen] = (), window: int = 64, prior: float | None = None
) -> Guard:
    """A guard that learned from these sets, each of the perturbed ones a group."""

    def together(sets: Sequence[Seen]) -> Observed:
        groups = torch.cat([torch.full_like(one.labels, i) for i, one in enumerate(sets)])
        z, far, labels, samples = (torch.cat(parts) for parts in zip(*sets))
        return Observed(far, z, labels, groups, samples)

    guard = Guard([1] * clean.far.shape[1], window)
    guard.distances = Given()
    guard.fit(together([clean]), together(perturbed) if perturbed else None, prior=prior)
    return guard


def fit_methods(sets: Sets, kind: str, members: Sequence[Sets] = ()) -> dict[str, Method]:
    """Every method, fitted without one kind of shift; an ensemble of `members` where there are two or more."""
    clean = sets["calib/clean"]
    families = [family for other in KINDS if other != kind for family in KINDS[other]]
    names = [f"calib/{family}/{level}" for family in families for level in range(1, 6)]
    taught = [Seen(*(part[:500] for part in sets[name])) for name in names if name in sets]
    calib = Predictions(clean.logits, clean.labels)
    temperature, head = (make(name).fit(calib) for name in ("temperature", "head"))
    pool = [torch.cat(parts) for parts in zip(*(one[:3] for one in [*taught, *[clean] * 6]))]
    perturbed = make("temperature").fit(Predictions(pool[0], pool[2]))
    density = density_aware(temperature(clean.logits), clean.labels, clean.far)
    by_head = [one._replace(logits=head(one.logits)) for one in taught]
    ours = clean._replace(logits=head(clean.logits))

    def perfect(name: str) -> Tensor:
        """Fitted to the labels that it is measured on: no temperature does better."""
        logits = head(sets[name].logits)
        return make("temperature").fit(Predictions(logits, sets[name].labels))(logits)

    def guarded(window: int, prior: float | None = None) -> Method:
        guard = guard_of(ours, by_head, window, prior)

        def through(name: str) -> Tensor:
            guard.reset()
            parts = zip(sets[name].far.split(BATCH), head(sets[name].logits).split(BATCH))
            return torch.cat([scaled(z, guard(far, z)) for far, z in parts])

        return through

    methods: dict[str, Method] = {
        "head": lambda name: head(sets[name].logits),
        "temperature": lambda name: temperature(sets[name].logits),
        "perturbed": lambda name: perturbed(sets[name].logits),
        "density": lambda name: scaled(temperature(sets[name].logits), density(sets[name].far)),
        "perfect": perfect,
    }
    if len(members) > 1:
        pooled = make("temperature").fit(Predictions(mean_of(members, "calib/clean"), clean.labels))
        methods["ensemble"] = lambda name: pooled(mean_of(members, name))
    methods |= {"single": guarded(0), "window-64": guarded(64), "window-256": guarded(256)}
    methods |= {f"single-{prior:g}": guarded(0, prior) for prior in PRIORS}
    return methods


def mean_of(members: Sequence[Sets], name: str) -> Tensor:
    """Log of the mean probabilities of several networks."""
    return torch.stack([one[name].logits.log_softmax(1) for one in members]).logsumexp(0)


# --- measure


@torch.no_grad()
def measure(files: Sequence[Path], more: Sequence[Path] = ()) -> pd.DataFrame:
    """One row for each run, kind left out, method and cell; `more` runs are only members of ensembles."""
    runs = {file.stem: read(file) for file in [*files, *more]}
    rows: list[dict[str, Any]] = []
    for run, sets in list(runs.items())[: len(files)]:
        members = [other for other in runs.values() if same_inputs(sets, other)]
        for kind in (kind for kind, families in KINDS.items() if f"test/{families[0]}/1" in sets):
            known = [f"test/{family}/{level}" for family in KINDS[kind] for level in range(1, 6)]
            unknown = [name for name in sets if name.startswith("unknown/")]
            methods = fit_methods(sets, kind, members)
            by_head = nlls_of(methods["head"]("test/clean"), sets["test/clean"].labels)
            for name, method in methods.items():
                for cell in ["test/clean", *known, *(unknown if name != "perfect" else ())]:
                    row = {"run": run, "left_out": kind, "method": name, "cell": cell.partition("/")[2]}
                    base = by_head if cell == "test/clean" else None
                    rows.append(row | numbers(method(cell), sets[cell].labels, base))
            print(run, kind, flush=True)
        rows += alarms(sets, run)
    return pd.DataFrame(rows)


def nlls_of(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) the NLL of each input."""
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def numbers(logits: Tensor, labels: Tensor, base: Tensor | None = None) -> dict[str, float]:
    """What is measured on a cell; with the NLLs of the head also the cost against it. Unknown inputs have no class."""
    if labels[0] == UNKNOWN:
        return {"confidence": float(logits.softmax(1).amax(1).mean())}
    nlls, found = nlls_of(logits, labels), Predictions(logits, labels)
    row = {"ece": metrics.ece(found), "nll": float(nlls.mean()), "accuracy": metrics.accuracy(found)}
    if base is not None:
        row["cost"], row["cost_error"] = mean_and_error(nlls - base)
    return row


def same_inputs(one: Sets, other: Sets) -> bool:
    """Whether two runs saw the same inputs of the same classes."""
    return one.keys() == other.keys() and all(
        a.logits.shape == b.logits.shape and all(map(torch.equal, a[2:], b[2:]))
        for a, b in zip(one.values(), other.values())
    )


def alarms(sets: Sets, run: str) -> Iterator[dict[str, Any]]:
    """The share of random windows with an alarm, of clean ones and of each cell; nothing perturbed was seen."""
    for window in (64, 256):
        guard, generator = guard_of(sets["calib/clean"], window=window), torch.Generator().manual_seed(0)
        for name, one in sets.items():
            if name.startswith("calib/"):
                continue
            n, raised = 1000 if name == "test/clean" else 20, 0
            for _ in range(n):
                rows = torch.randperm(len(one.labels), generator=generator)[:window]
                guard.reset()
                guard(one.far[rows], one.logits[rows])
                raised += guard.shift.alarm
            row = {"run": run, "left_out": "all", "method": f"alarm-{window}", "cell": name.partition("/")[2]}
            yield {**row, "alarms": raised / n, "windows": n}


# --- figures


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By run and method: mean ECE over kinds as a share of temperature scaling's, and the cost on clean data."""
    measured = table[table.ece.notna()]
    clean = measured[measured.cell == "clean"].groupby(["run", "method"], sort=False)
    kinds = measured[measured.cell != "clean"].groupby(["run", "method", "left_out"], sort=False).ece.mean()
    ece = kinds.groupby(["run", "method"], sort=False).mean()
    found = pd.DataFrame({"ece": ece, "clean_ece": clean.ece.mean(), "clean_nll": clean.nll.mean()})
    head = found.clean_nll.xs("head", level="method")
    found["share"] = found.ece / found.ece.xs("temperature", level="method")
    found["cost"] = 100 * clean.cost.mean() / head
    found["cost_high"] = 100 * (clean.cost.mean() + 1.96 * clean.cost_error.mean()) / head
    return found


def page(table: pd.DataFrame) -> str:
    """The table of docs/shift.md: a row for each method, a column for each network."""
    found = summary(table)
    runs = found.index.unique("run")
    cells = found.apply(lambda row: f"{row.share:.2f} ({row.cost_high:+.2f})", axis=1)
    lines = [[label, *(cells.get((run, name), "") for run in runs)] for name, label in SHOWN.items()]
    ece = [f"{100 * found.ece[run, 'temperature']:.1f} %" for run in runs]
    clean = table[(table.method == "alarm-64") & (table.cell == "clean")].set_index("run").alarms
    lines.append(["*ECE of temperature scaling*", *ece])
    lines.append(["*clean windows of 64 with an alarm*", *(f"{100 * clean[run]:.1f} %" for run in runs)])
    return markdown(["method", *(run.partition("-cross")[0] for run in runs)], lines)


def frontier(table: pd.DataFrame) -> Figure:
    """Clean cost against shifted ECE, for each network; costs beyond 0.1 % are on a logarithmic axis."""
    found = summary(table)
    runs = found.index.unique("run")
    n_lines = -(-len(runs) // 3)
    figure = Figure(figsize=(11, 3.4 * n_lines), layout="constrained")
    axes = list(figure.subplots(n_lines, 3, sharex=True, sharey=True, squeeze=False).flat)
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
        ax.tick_params(labelbottom=True)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[len(runs) :]:
        ax.axis("off")
    figure.supxlabel("change of the clean NLL against the staged head, percent", fontsize=9)
    figure.supylabel("mean ECE under shift, share of temperature scaling's", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


@torch.no_grad()
def stream(sets: Sets) -> Figure:
    """Confidence, accuracy and alarm over a stream that drifts from clean to corrupted images and back."""
    cells = ["test/clean", *(f"test/gaussian_blur/{level}" for level in range(1, 6)), "test/clean"]
    parts = [Seen(*(p[600 * (i > 5) :][:400] for p in sets[cell])) for i, cell in enumerate(cells)]
    whole = Seen(*(torch.cat(columns) for columns in zip(*parts)))
    methods = fit_methods({**sets, "stream": whole}, "blurs")
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    ax = figure.subplots()
    correct = (whole.logits.argmax(1) == whole.labels).double()
    ax.plot(pd.Series(correct).rolling(64).mean(), color=plots.INK, label="accuracy")
    for name, label in (("temperature", "temperature scaling"), ("window-64", "guard")):
        confidence = methods[name]("stream").softmax(1).amax(1).double()
        ax.plot(pd.Series(confidence).rolling(64).mean(), label=f"confidence, {label}")
    guard, alarm = guard_of(sets["calib/clean"]), []
    for some, z in zip(whole.far.split(1), whole.logits.split(1)):
        guard(some, z)
        alarm.append(guard.shift.alarm)
    ax.fill_between(np.arange(len(alarm)), 0, 1, where=np.array(alarm), alpha=0.15, label="alarm")
    for edge in range(400, len(alarm), 400):
        ax.axvline(edge, color=plots.INK, linewidth=0.5, linestyle=":")
    ax.set(xlabel="image", ylim=(0.2, 1.02), xlim=(0, len(alarm)))
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


def simulation_page(table: pd.DataFrame) -> str:
    """The table of false alarms in docs/shift.md, in percent."""
    lines = []
    for (kind, samples), own in table.groupby(["stages", "samples"], sort=False):
        false = [f"{100 * share:.2f}" for share in (own.false.mean(), own.false.quantile(0.95))]
        seen = [f"{100 * share:.0f}" for share in (own.seen.mean(), own.known.mean())]
        lines.append([kind, f"{samples:,}", *false, *seen])
    titles = ["stages", "samples", "false alarms", "in 95 % of sets at most", "alarms", "of a perfect test"]
    return markdown(titles, lines)


# --- everything


def write_measured(files: Sequence[Path], members: Sequence[Path]) -> None:
    """shift.csv, its certificate, and the figure of a stream."""
    about: dict[str, Any] = {
        "runs": [path.stem for path in files],
        "members": [path.stem for path in members],
    }
    about["environment"] = environment(torch.device("cpu"))
    about["environment"].pop("command")
    measure(files, members).round(6).to_csv(TABLE, index=False)
    TABLE.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    plots.save(stream(read(files[0])), IMAGES / "shift.png", dpi=90)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["measure", "draw", "simulate"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--members", nargs="*", type=Path, default=[], help="further members of ensembles")
    parser.add_argument("--sets", type=int, default=60, help="simulated calibration sets of each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "simulate":
        rows = [row for kind in CHANNELS for n in SAMPLES for row in simulate(kind, n, options.sets)]
        pd.DataFrame(rows).round(6).to_csv(ALARMS, index=False)
        name, text = "shift-alarms", simulation_page(pd.read_csv(ALARMS))
    else:
        if options.what == "measure":
            write_measured(options.paths, options.members)
        table = pd.read_csv(TABLE)
        print(summary(table).round(4).to_string())
        plots.save(frontier(table), IMAGES / "frontier.png", dpi=90)
        name, text = "shift", page(table)
    DOCUMENT.write_text(fill(DOCUMENT.read_text(), name, text))


if __name__ == "__main__":
    main()
