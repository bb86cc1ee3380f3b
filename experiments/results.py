"""What is committed of every run, and the long table of numbers that is made from it.

experiments/logits/<run>.npz   quantised calibration and test logits, and what else calibration needs (`store`)
experiments/runs/<run>.json    certificate: config, commit, versions, device, times, epochs, shift
experiments/results.csv        run, output, metric, value

    python experiments/results.py FOLDER ...   # store runs from the arrays that a job script kept (`import_folder`)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from packing import pack, pack_scores, unpack, unpack_scores, write_npz
from torch import Tensor

from doublehead import Bins, Predictions, metrics
from doublehead.calibrators.head_stages import class_distances, fit_opinions
from doublehead.metrics import fine_bins
from doublehead.training.config import Config
from doublehead.training.evaluation import as_plain

HERE = Path(__file__).resolve().parent
LOGITS, TABLE = HERE / "logits", HERE / "results.csv"
COLUMNS = ["run", "output", "metric", "value"]
FOLDS = 5
SCORE_LEVELS = {
    "doubt": 1024,
    "brier": 256,
    "wrong": 512,
}  # see `pack_scores`; bins of the ECE need the first
Z = 1.959963984540054  # 97.5 % of a standard normal lie below


# --- numbers


def paired(nll: Tensor, other: Tensor) -> tuple[float, float]:
    """The mean difference of the NLLs (N,) of the same samples, and half the width of its 95 % interval."""
    gap = (nll - other).double()
    return float(gap.mean()), Z * float(gap.std()) / math.sqrt(len(gap))


class Scores(NamedTuple):
    """Per test sample: NLL, Brier score, 1 - confidence, and whether the prediction is right, (N,) each.

    `ece_all` is the ECE of all components, as the paper's Table 4 has it.
    """

    nll: Tensor
    brier: Tensor
    doubt: Tensor
    correct: Tensor
    ece_all: float

    @classmethod
    def of(cls, p: Predictions) -> Scores:
        """The scores of some predictions, in float64."""
        p = Predictions(p.logits.double(), p.labels)
        found = metrics.per_sample(p)
        pooled = float(metrics.ece(p, components="all"))
        return cls(found["nll"], found["brier"], 1 - p.confidence, p.correct, pooled)

    def bins(self, n_bins: int = 15) -> Bins:
        """The counts behind a reliability diagram."""
        return Bins.of(1 - self.doubt.double(), self.correct, n_bins)

    def numbers(self, none: Scores, temperature: Scores) -> dict[str, float]:
        """All metrics; `phi` and `delta` compare with the raw network and with temperature scaling."""
        floor = metrics.ece_floor(self.bins(fine_bins(15)), 15)  # of a perfectly calibrated model
        delta, reach = paired(self.nll, temperature.nll)
        accuracy, nll, brier, raw = (
            float(part.double().mean()) for part in (self.correct, self.nll, self.brier, none.nll)
        )
        found = {"n": len(self.nll), "accuracy": accuracy, "nll": nll, "brier": brier}
        found |= {"ece": float(self.bins().ece()), "ece_low": floor.low, "ece_high": floor.high}
        found |= {} if math.isnan(self.ece_all) else {"ece_all": self.ece_all}
        found |= {"phi": 1 - nll / raw, "delta": delta}
        return found | {"delta_low": delta - reach, "delta_high": delta + reach}


# --- files


class Split(NamedTuple):
    """What is known of the samples of one split; None where it was not stored."""

    labels: Tensor  # (N,)
    main: Tensor  # (N, K) logits of the network
    flip: Tensor | None = None  # (N, K) of the mirrored image
    opinion: Tensor | None = None  # (N, K) of heads that never saw the sample
    sphere: Tensor | None = None  # (N, K) minus distances to the class means, see `class_distances`
    projected: Tensor | None = None
    numbers: Tensor | None = None  # (N, 5) of the features

    @property
    def predictions(self) -> Predictions:
        """Of the network as it is."""
        return Predictions(self.main, self.labels)


@dataclass(frozen=True)
class StoredRun:
    """A committed run."""

    name: str
    folder: Path = HERE

    @cached_property
    def certificate(self) -> dict[str, Any]:
        """Config, environment and all that is not computed from logits."""
        found: dict[str, Any] = json.loads((self.folder / "runs" / f"{self.name}.json").read_text())
        return found

    @cached_property
    def config(self) -> Config:
        """The settings of the run."""
        return Config.from_json(json.dumps(self.certificate["config"]))

    @cached_property
    def calib(self) -> Split:
        """The calibration split."""
        return self._split("calib")

    @cached_property
    def test(self) -> Split:
        """The test split."""
        return self._split("test")

    @cached_property
    def heads(self) -> dict[str, Scores]:
        """The test scores of heads that were trained beside the network."""
        found: dict[str, Scores] = {}
        with np.load(self.folder / "logits" / f"{self.name}.npz") as file:
            for name in [key.split("/")[1] for key in file.files if key.endswith("/correct")]:
                correct = torch.from_numpy(file[f"heads/{name}/correct"])
                doubt, brier, wrong = (
                    unpack_scores(file[f"heads/{name}/{field}"], levels)
                    for field, levels in SCORE_LEVELS.items()
                )
                nll = -torch.log1p(-doubt)
                nll[~correct] = wrong
                found[name] = Scores(nll, brier, doubt, correct, file[f"heads/{name}/ece_all"].item())
        return found

    def _split(self, part: str) -> Split:
        with np.load(self.folder / "logits" / f"{self.name}.npz") as file:
            return Split(**unpack(file, part))


def stored_runs(folder: Path = HERE) -> list[StoredRun]:
    """All committed runs, sorted by name."""
    return [StoredRun(file.stem, folder) for file in sorted((folder / "runs").glob("*.json"))]


def arrays_of(calib: Split, test: Split, heads: Mapping[str, Scores]) -> dict[str, Any]:
    """What is stored of a run, besides its certificate."""
    arrays = pack(calib._asdict(), test._asdict())
    for head, scores in heads.items():
        wrong = scores.nll[~scores.correct]  # of the others it is -log(1 - doubt)
        for (field, levels), value in zip(SCORE_LEVELS.items(), (scores.doubt, scores.brier, wrong)):
            arrays[f"heads/{head}/{field}"] = pack_scores(value, levels)
        arrays[f"heads/{head}/correct"] = scores.correct.numpy()
        arrays[f"heads/{head}/ece_all"] = np.float32(scores.ece_all)
    return arrays


def store(
    name: str,
    calib: Split,
    test: Split,
    heads: Mapping[str, Scores],
    certificate: Mapping[str, Any],
    folder: Path = HERE,
) -> Path:
    """Write a run's arrays and certificate; returns the file of arrays."""
    about = as_plain(dict(certificate)) | {"config": certificate["config"]}
    text = folder / "runs" / f"{name}.json"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(json.dumps(about, separators=(",", ":")) + "\n")
    return write_npz(folder / "logits" / f"{name}.npz", arrays_of(calib, test, heads))


def distances(
    calib: Tensor, labels: Tensor, test: Tensor, n_classes: int
) -> tuple[list[Tensor], list[Tensor]]:
    """`class_distances` of calibration features (N, F), each to means that it is no part of, and of test features."""
    folds = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)) % FOLDS
    means, made = fit_opinions(calib, labels, folds, n_classes, None, seed=0)
    return made, class_distances(test, means)


# --- the table


def rows_of(run: str, output: str, numbers: Mapping[str, float]) -> list[tuple[Any, ...]]:
    """Lines of the long table."""
    return [(run, output, metric, float(f"{value:.6g}")) for metric, value in numbers.items()]


def read_table(path: Path = TABLE) -> pd.DataFrame:
    """The committed table; empty where there is none yet."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)


def write_table(rows: Sequence[tuple[Any, ...]], path: Path = TABLE) -> pd.DataFrame:
    """Write and return the table, sorted."""
    table = pd.DataFrame(rows, columns=COLUMNS).sort_values(COLUMNS[:3], ignore_index=True)
    table.to_csv(path, index=False, float_format="%.6g")
    return table


# --- runs of a job script: folders with arrays.npz, features.npz, about.json and run/metrics.jsonl


def import_folder(source: Path, folder: Path = HERE) -> Path:
    """Store a run from what the job script kept: logits * 64 as int16, features as 256 components.

    Of other losses than cross entropy the network's logits are kept alone.
    """
    about = json.loads((source / "about.json").read_text())
    config = Config.from_json(json.dumps(about["config"]))
    with np.load(source / "arrays.npz") as file:
        arrays = {
            name: torch.from_numpy(value.astype(np.float32) / (64 if value.dtype == np.int16 else 1))
            for name, value in file.items()
        }
    calib, test = (_job_split(arrays, split) for split in ("calib", "test"))
    if config.loss != "cross_entropy":
        calib, test = (Split(part.labels, part.main) for part in (calib, test))
    else:
        with np.load(source / "features.npz") as file:
            features = [torch.from_numpy(file[f"{s}/id"].astype(np.float32)) for s in ("calib", "test")]
        both = distances(features[0], calib.labels, features[1], calib.main.shape[1])
        calib, test = (part._replace(sphere=d[0], projected=d[1]) for part, d in zip((calib, test), both))
    kept_heads = [name for name in config.heads if "@" not in name]  # no table shows perturbed ones
    heads = {name: Scores.of(Predictions(arrays[f"test/id/{name}"], test.labels)) for name in kept_heads}
    lines = [json.loads(line) for line in (source / "run/metrics.jsonl").read_text().splitlines()]
    about["environment"].pop("command")
    kept = ("config", "environment", "sizes", "train_seconds", "samples_per_second", "train_accuracy")
    certificate = {key: about[key] for key in kept} | curves(lines, config) | gradients(source)
    return store(config.name, calib, test, heads, certificate, folder)


def _job_split(arrays: Mapping[str, Tensor], split: str) -> Split:
    opinion = {"calib": "own-f", "test": "mean-f"}[split]  # five heads of 256 hidden units with dropout
    stats = arrays.get(f"{split}/id/stats")
    return Split(
        arrays[f"{split}/labels"].long(),
        arrays[f"{split}/id/main"],
        arrays.get(f"{split}/flip/main"),
        arrays.get(f"{split}/id/{opinion}"),
        numbers=None if stats is None else stats[:, :5],
    )


def curves(lines: Sequence[Mapping[str, Any]], config: Config) -> dict[str, Any]:
    """What figures need of metrics.jsonl: numbers over the epochs, and the last entropy of every head."""
    shown = ("main", *(name for name in ("double-head", "annealing-double-head") if name in config.heads))
    tested = [line for line in lines if "test" in line]
    keys = ("accuracy", "ece", "nll", "mean_entropy")
    epochs = {
        output: {key: [round(line["test"][output][key], 5) for line in tested] for key in keys}
        for output in shown
    }
    last = tested[-1]["test"]
    return {
        "epochs": {"epoch": [line["epoch"] + 1 for line in tested], **epochs},
        "train_loss": [round(line["train_loss"], 5) for line in lines],
        "entropy": {name: last[name]["mean_entropy"] for name in config.heads},
    }


def gradients(folder: Path) -> dict[str, Any]:
    """Gradient norms (epochs, 6) of the two heads of the paper's figure, where they were recorded."""
    if not (folder / "gradients.npz").exists():
        return {}
    with np.load(folder / "gradients.npz") as file:
        heads, norms = file["heads"].tolist(), file["norms"].round(4)  # norms (epochs, 6, heads)
    shown = [name for name in ("mlp-0.6", "mlp-1.5") if name in heads]
    return {"gradients": {name: norms[:, :, heads.index(name)].tolist() for name in shown}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        made = import_folder(Path(argument))
        print(f"{made.name} {made.stat().st_size / 1e6:.2f} MB", flush=True)
