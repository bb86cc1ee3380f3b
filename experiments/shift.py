"""What the shift guard does to trained networks, with whole kinds of corruption left out of its fit.

    python experiments/shift.py observe RUN_FOLDER --root data --output seen   # on a GPU: seen/RUN.npz
    python experiments/shift.py measure seen/*.npz                             # on a CPU: shift.csv and the figures

`observe` runs a network once over clean, corrupted and unknown images and keeps logits and stage distances. `measure`
fits every method to calibration images and measures it on test images. The kind of corruption that it is measured on
is never part of its fit. Each cell is a family at a severity on 1,000 test images; streams are cells one by one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from results import HERE
from tables import fill, markdown
from torch import Tensor

from doublehead import Predictions, metrics, plots
from doublehead.calibrators import make
from doublehead.calibrators.head_stages import fit_log_scale
from doublehead.data import FAMILIES, corrupt, load
from doublehead.shift_guard import Guard, Observed, ShiftGuard, scaled
from doublehead.training.config import LEFT_OUT
from doublehead.training.run_folder import RunFolder, environment

TABLE = HERE / "shift.csv"
IMAGES = HERE.parent / "docs" / "images"
KINDS = {kind: LEFT_OUT[kind] for kind in ("noises", "blurs", "colours", "digital")}
N_EACH, BATCH = 1000, 100
PRIORS = (0.01, 0.05, 0.2, 0.5)  # of the frontier
SHOWN = {
    "temperature": "temperature scaling",
    "head": "staged head",
    "perturbed": "temperature of perturbed data",
    "density": "density-aware",
    "single": "guard, single images",
    "window-64": "guard, windows of 64",
    "window-256": "guard, windows of 256",
}


class Seen(NamedTuple):
    """Logits (N, K), stage distances (N, D), labels (N,) and sample numbers (N,) of one set of images."""

    logits: Tensor
    far: Tensor
    labels: Tensor
    samples: Tensor


# --- observe


@torch.no_grad()
def observe(folder: RunFolder, root: str, output: Path) -> Path:
    """Run the network of a finished run over all sets of images."""
    from run import reopened

    run = reopened(folder, root)
    guard, device = ShiftGuard(run.net.eval()), run.fabric.device
    normalise, splits = run.inputs.normalise, run.inputs.splits
    parts: dict[str, list[Any]] = {"logits": [], "far": [], "labels": [], "rows": []}
    names = []

    def add(name: str, batches: Iterator[Tensor], labels: Any, rows: Any) -> None:
        seen, _ = guard.observe(
            (normalise(x.to(device) / 255 if x.dtype == torch.uint8 else x), torch.zeros(len(x)).long())
            for x in batches
        )
        stages = seen.stages.cpu()
        if not names:
            own = stages.split(guard.tap.widths, 1)
            far = torch.cat([d.set_usual(part) for d, part in zip(guard.guard.distances.cpu(), own)], 1)  # type: ignore[operator]
        else:
            far = guard.guard.far(stages)
        values = ((seen.logits.float() * 64).round().clamp(-32000, 32000).short().cpu(), far.half())
        for key, value in zip(parts, (*values, torch.as_tensor(labels), torch.as_tensor(rows))):
            parts[key].append(value.numpy())
        names.append(name)

    def pixels(samples: Any, rows: Any = slice(None)) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(samples.images[rows])).permute(0, 3, 1, 2)

    for split in ("calib", "test"):
        part = getattr(splits, split)
        add(f"{split}/clean", iter(pixels(part).split(500)), part.labels, np.arange(len(part.labels)))
    for split in ("calib", "test"):
        part = getattr(splits, split)
        rows = np.sort(np.random.default_rng(split == "test").permutation(len(part.labels))[:N_EACH])
        images = pixels(part, rows)
        for family in FAMILIES:
            for level in range(1, 6):
                generator = torch.Generator(device).manual_seed(level)
                batches = (corrupt(x.to(device) / 255, family, level, generator) for x in images.split(500))
                add(f"{split}/{family}/{level}", batches, part.labels[rows], rows)
    for other in {"svhn", "cifar10", "cifar100"} - {run.config.data}:
        part = load(other, root).test
        rows = np.arange(2 * N_EACH)
        add(f"unknown/{other}", iter(pixels(part, rows).split(500)), np.full(len(rows), 255), rows)
    arrays = {key: np.concatenate(values) for key, values in parts.items()}
    sizes = np.array([len(values) for values in parts["labels"]])
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"{folder.config.name}.npz"
    np.savez_compressed(file, **arrays, **{"set/name": np.array(names), "set/size": sizes})
    return file


def read(file: Path) -> dict[str, Seen]:
    """The sets of images by name: calib/clean, test/contrast/5, unknown/svhn, ..."""
    with np.load(file) as found:
        ends = np.cumsum(found["set/size"])
        z, far = found["logits"].astype(np.float32) / 64, found["far"].astype(np.float32)
        if "far_loo" in found:  # clean calibration images, each measured from all others
            far[: len(found["far_loo"])] = found["far_loo"]
        columns = [
            torch.from_numpy(a) for a in (z, far, *(found[k].astype(np.int64) for k in ("labels", "rows")))
        ]
        sets = zip(found["set/name"], found["set/size"], ends)
        return {str(name): Seen(*(c[end - size : end] for c in columns)) for name, size, end in sets}


# --- measure

Method = Callable[[Seen], Tensor]  # a stream of images -> log-probabilities (N, K)


def together(sets: list[Seen]) -> tuple[Observed, Tensor]:
    """Sets as groups for a guard, and their distances."""
    groups = torch.cat([torch.full_like(one.labels, i) for i, one in enumerate(sets)])
    z, far, labels, samples = (torch.cat(parts) for parts in zip(*sets))
    return Observed(z.new_empty(len(z), 0), z, labels, groups, samples), far


def fit_methods(sets: dict[str, Seen], kind: str) -> dict[str, Method]:
    """Every method, fitted without one kind of corruption."""
    clean, left_out = sets["calib/clean"], KINDS[kind]
    taught = [
        Seen(*(part[:500] for part in one))
        for name, one in sets.items()
        if name.startswith("calib/") and name.count("/") == 2 and name.split("/")[1] not in left_out
    ]
    calib = Predictions(clean.logits, clean.labels)
    temperature, head = (make(name).fit(calib) for name in ("temperature", "head"))
    pool = [torch.cat(parts) for parts in zip(*(one[:3] for one in [*taught, *[clean] * 6]))]
    perturbed = make("temperature").fit(Predictions(pool[0], pool[2]))
    mean, deviation = clean.far.mean(0), clean.far.std(0)

    def density(far: Tensor) -> Tensor:
        return torch.cat([((far - mean) / deviation).clamp(-3, 6), torch.ones(len(far), 1)], 1)

    weights = _falling(temperature(clean.logits), clean.labels, density(clean.far))
    methods: dict[str, Method] = {
        "temperature": lambda one: temperature(one.logits),
        "head": lambda one: head(one.logits),
        "perturbed": lambda one: perturbed(one.logits),
        "density": lambda one: scaled(temperature(one.logits), (density(one.far) @ weights).exp()[:, None]),
    }
    with torch.no_grad():
        by_head = [one._replace(logits=head(one.logits)) for one in taught]
        ours = clean._replace(logits=head(clean.logits))
        settings = [("single", 0, None), ("window-64", 64, None), ("window-256", 256, None)]
        settings += [(f"single-{prior:g}", 0, prior) for prior in PRIORS]
        for name, window, prior in settings:
            guard = Guard([1] * clean.far.shape[1], window)
            (own, own_far), (others, others_far) = together([ours]), together(by_head)
            guard.fit_far(own, own_far, others, others_far, prior=prior)
            guard.far = lambda stages: stages  # type: ignore[method-assign]
            methods[name] = lambda one, guard=guard: _stream(guard, one.far, head(one.logits))  # type: ignore[misc]
    return methods


def _falling(logits: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
    """Weights of a log scale that never grows with a distance: those that would are left out, one after the other."""
    kept = torch.ones(inputs.shape[1], dtype=torch.bool)
    while True:
        weights = torch.zeros(inputs.shape[1])
        ridge = torch.full((int(kept.sum()),), 30.0)
        weights[kept] = fit_log_scale(logits, labels, inputs[:, kept], ridge)
        if (weights[:-1] <= 0).all():
            return weights
        kept[weights[:-1].argmax()] = False


def _stream(guard: Guard, far: Tensor, logits: Tensor) -> Tensor:
    guard.reset()
    parts = zip(far.split(BATCH), logits.split(BATCH))
    return torch.cat([scaled(z, guard(some, z)) for some, z in parts])


@torch.no_grad()
def measure(files: list[Path]) -> pd.DataFrame:
    """One row for each run, kind left out, method and cell."""
    rows = []
    for file in files:
        sets = read(file)
        for kind, families in KINDS.items():
            cells = [f"test/{family}/{level}" for family in families for level in range(1, 6)]
            unknown = [name for name in sets if name.startswith("unknown/")]
            for name, method in fit_methods(sets, kind).items():
                for cell in ["test/clean", *cells, *unknown]:
                    one = sets[cell]
                    logits = method(one)
                    row = {"run": file.stem, "left_out": kind, "method": name, "cell": cell.partition("/")[2]}
                    if cell in unknown:
                        row |= {"confidence": float(logits.softmax(1).amax(1).mean())}
                    else:
                        found = Predictions(logits, one.labels)
                        nlls = torch.nn.functional.cross_entropy(logits, one.labels, reduction="none")
                        row |= {"ece": metrics.ece(found), "nll": float(nlls.mean())}
                        row |= {"accuracy": metrics.accuracy(found), **_cost(nlls, sets, cell, name)}
                    rows.append(row)
                print(file.stem, kind, name, flush=True)
        rows += list(_alarms(sets, file.stem))
    return pd.DataFrame(rows)


_HEAD_NLLS: dict[int, Tensor] = {}


def _cost(nlls: Tensor, sets: dict[str, Seen], cell: str, name: str) -> dict[str, float]:
    """Of clean data: the difference to the NLL of the staged head, and its standard error."""
    if cell != "test/clean":
        return {}
    if name == "head":
        _HEAD_NLLS[id(sets)] = nlls
    if id(sets) not in _HEAD_NLLS:
        return {}
    cost = nlls - _HEAD_NLLS[id(sets)]
    return {"cost": float(cost.mean()), "cost_error": float(cost.std()) / math.sqrt(len(cost))}


def _alarms(sets: dict[str, Seen], run: str) -> Iterator[dict[str, Any]]:
    """The share of windows with an alarm, of random clean ones and of each cell; nothing perturbed was seen."""
    for window in (64, 256):
        guard = Guard([1] * sets["calib/clean"].far.shape[1], window)
        own, far = together([sets["calib/clean"]])
        guard.fit_far(own, far, None, None)
        guard.far = lambda stages: stages  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(0)
        for name, one in sets.items():
            if name.startswith("calib/"):
                continue
            n = 1000 if name == "test/clean" else 20
            alarms = []
            for _ in range(n):
                rows = torch.randperm(len(one.labels), generator=generator)[:window]
                guard.reset()
                guard(one.far[rows], one.logits[rows])
                alarms.append(guard.shift.alarm)
            where = {
                "run": run,
                "left_out": "all",
                "method": f"alarm-{window}",
                "cell": name.partition("/")[2],
            }
            yield {**where, "alarms": float(np.mean(alarms)), "windows": n}


# --- figures


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By run and method: mean ECE over kinds as a share of temperature scaling's, and the cost on clean data."""
    measured = table[~table.method.str.startswith("alarm") & ~table.cell.str.startswith(("svhn", "cifar"))]
    clean = measured[measured.cell == "clean"].groupby(["run", "method"], sort=False)
    shifted = measured[measured.cell != "clean"]
    kinds = shifted.groupby(["run", "method", "left_out"], sort=False).ece.mean()
    ece = kinds.groupby(["run", "method"], sort=False).mean()
    base = ece.xs("temperature", level="method")
    found = pd.DataFrame({"ece": ece, "clean_ece": clean.ece.mean(), "clean_nll": clean.nll.mean()})
    found["share"] = [value / base[run] for (run, _), value in ece.items()]
    head = found.clean_nll.xs("head", level="method")
    found["cost"] = [100 * (value / head[run] - 1) for (run, _), value in found.clean_nll.items()]
    upper = clean.apply(lambda part: (part.cost + 1.96 * part.cost_error).mean(), include_groups=False)
    found["cost_high"] = [100 * value / head[run] for (run, _), value in upper.items()]
    return found


def page(table: pd.DataFrame) -> str:
    """The table of docs/shift.md."""
    found, lines = summary(table), []
    for run in dict.fromkeys(found.index.get_level_values("run")):
        for name, label in SHOWN.items():
            row = found.loc[run, name]
            high = "" if name == "head" else f" (up to {row.cost_high:+.2f})"
            numbers = [f"{100 * row.ece:.1f}", f"{row.share:.2f}", f"{100 * row.clean_ece:.2f}"]
            lines.append([run.split("-cross")[0], label, *numbers, f"{row.cost:+.2f}{high}"])
    return markdown(["network", "method", "ECE %", "share", "clean ECE %", "clean cost %"], lines)


def frontier(table: pd.DataFrame) -> Figure:
    """Clean cost against shifted ECE, for each network."""
    found = summary(table)
    runs = list(dict.fromkeys(found.index.get_level_values("run")))
    figure = Figure(figsize=(4 * len(runs) + 1.6, 3.6), layout="constrained")
    for ax, run in zip(np.atleast_1d(figure.subplots(1, len(runs), sharey=True)), runs):
        own = found.loc[run]
        sweep = own.loc[[f"single-{prior:g}" for prior in PRIORS]]
        ax.plot(sweep.cost, sweep.share, "-", color=plots.INK, linewidth=0.8, label="guard, larger priors")
        for i, (name, label) in enumerate(SHOWN.items()):
            ax.plot(own.cost[name], own.share[name], "o^sDvP*"[i], label=label, markersize=8)
        ax.axvline(0, color=plots.INK, linewidth=0.8, linestyle=":")
        ax.set(
            xlabel="change of the clean NLL against the staged head, percent", title=run.split("-cross")[0]
        )
        ax.set_ylim(0, 1.1)
        ax.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.set_ylabel("mean ECE, share of temperature scaling's")
    figure.legend(*first.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


@torch.no_grad()
def stream(sets: dict[str, Seen], kind: str = "blurs", family: str = "gaussian_blur") -> Figure:
    """Confidence, accuracy and alarm over a stream that drifts from clean to corrupted images and back."""
    methods = fit_methods(sets, kind)
    cells = ["test/clean", *(f"test/{family}/{level}" for level in range(1, 6)), "test/clean"]
    parts = [Seen(*(p[600 * (i > 5) :][:400] for p in sets[cell])) for i, cell in enumerate(cells)]
    whole = Seen(*(torch.cat(columns) for columns in zip(*parts)))
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    ax = figure.subplots()

    def smooth(values: Tensor, size: int = 64) -> np.ndarray:
        return np.convolve(values.double().numpy(), np.ones(size) / size, "valid")

    place = np.arange(63, len(whole.labels))
    correct = (whole.logits.argmax(1) == whole.labels).float()
    ax.plot(place, smooth(correct), color=plots.INK, label="accuracy")
    for name, label in (
        ("temperature", "confidence, temperature scaling"),
        ("window-64", "confidence, guard"),
    ):
        ax.plot(place, smooth(methods[name](whole).softmax(1).amax(1)), label=label)
    guard = Guard([1] * whole.far.shape[1], 64)
    own, far = together([sets["calib/clean"]])
    guard.fit_far(own, far, None, None)
    guard.far = lambda stages: stages  # type: ignore[method-assign]
    alarm = []
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["observe", "measure", "draw"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--root")
    parser.add_argument("--output", type=Path, default=Path("seen"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "observe":
        for path in options.paths:
            print(observe(RunFolder(path), options.root, options.output))
        return
    if options.what == "measure":
        about: dict[str, Any] = {
            "runs": [path.stem for path in options.paths],
            "environment": environment(torch.device("cpu")),
        }
        about["environment"].pop("command")
        measure(options.paths).round(6).to_csv(TABLE, index=False)
        TABLE.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
        plots.save(stream(read(options.paths[0])), IMAGES / "shift.png", dpi=90)
    table = pd.read_csv(TABLE)
    print(summary(table).round(4).to_string())
    plots.save(frontier(table), IMAGES / "frontier.png", dpi=90)
    document = IMAGES.parent / "shift.md"
    document.write_text(fill(document.read_text(), "shift", page(table)))


if __name__ == "__main__":
    main()
