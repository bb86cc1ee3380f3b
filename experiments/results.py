"""What is committed of every run, and the long table of numbers that is made from it.

experiments/logits/<run>.npz   quantised calibration and test logits, and what else calibration needs (`store`)
experiments/runs/<run>.json    certificate: config, commit, versions, device, times, epochs, shift
experiments/results.csv        run, output, metric, value

Logits are kept in 8-bit steps (`quantise`), which lose precision within a tested bound. What is stored of the steps is
what a linear guess leaves of them, modulo 256. That is exact on any machine, since guesses are sums of integers below
2**53. A guess for one class reads the network's steps and those of the classes before it; its weights are stored. A
run of 100 classes takes 1.9 MB so, and 3.9 without guesses.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from doublehead import Bins, Predictions, metrics
from doublehead.calibrators.choose import mean_and_error
from doublehead.metrics import fine_bins
from doublehead.outcomes import NORMAL
from doublehead.saving import under
from doublehead.training.config import Config
from doublehead.training.evaluation import as_plain
from doublehead.training.run_folder import environment

HERE = Path(__file__).resolve().parent
TABLE = HERE / "results.csv"
COLUMNS = ["run", "output", "metric", "value"]
# Levels per unit of log(1 + distance to the row's largest). The network's NLL changes by less than 0.05 %.
LEVELS = {"main": 32, "flip": 12, "opinion": 12, "sphere": 8, "projected": 8}
PER_DEVIATION = 16  # levels of other numbers
SCORE_LEVELS = {"doubt": 1024, "brier": 256, "wrong": 512}  # see `pack_scores`; the ECE needs the first
FINEST = 0.01  # of scores
UNIT = 4096  # of the integer weights
CONSTANT = 64  # steps: read by every guess
RIDGE = 100.0  # of the weights, in squared steps

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a script, whose docstring is its help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def where_computed() -> dict[str, Any]:
    """Code, versions and time of numbers that are computed on the CPU."""
    return {key: value for key, value in environment(torch.device("cpu")).items() if key != "command"}


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
        return Bins.of(1 - self.doubt.double(), self.correct, n_bins)

    def gap(self, other: Scores) -> tuple[float, float]:
        """How the NLL differs from that of other scores, sample by sample: the mean and half its 95 % interval."""
        mean, error = mean_and_error(self.nll - other.nll)
        return mean, NORMAL * error

    def numbers(self, none: Scores, temperature: Scores) -> dict[str, float]:
        """All metrics; `phi` and `delta` compare with the raw network and with temperature scaling."""
        floor = metrics.ece_floor(self.bins(fine_bins(15)), 15)  # of a perfectly calibrated model
        (delta, reach), nll = self.gap(temperature), float(self.nll.mean())
        return {
            "n": len(self.nll),
            "accuracy": float(self.correct.double().mean()),
            "nll": nll,
            "brier": float(self.brier.mean()),
            "ece": float(self.bins().ece()),
            "ece_low": floor.low,
            "ece_high": floor.high,
            "ece_all": self.ece_all,
            "phi": 1 - nll / float(none.nll.mean()),
            "delta": delta,
            "delta_low": delta - reach,
            "delta_high": delta + reach,
        }


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
        return Predictions(self.main, self.labels)


class Splits(NamedTuple):
    """What any classifier has."""

    calib: Split
    test: Split


class StoredRun:
    """A committed run: arrays in `file`, the certificate in `text`."""

    def __init__(self, name: str, folder: Path = HERE) -> None:
        self.name = name
        self.file, self.text = folder / "logits" / f"{name}.npz", folder / "runs" / f"{name}.json"

    @cached_property
    def certificate(self) -> dict[str, Any]:
        return json.loads(self.text.read_text())

    @cached_property
    def config(self) -> Config:
        return Config.from_json(json.dumps(self.certificate["config"]))

    @cached_property
    def splits(self) -> Splits:
        with np.load(self.file) as stored:
            arrays = {name: stored[name] for name in stored if not name.startswith("heads/")}
        return Splits(*(unpack(arrays, part) for part in Splits._fields))

    calib = property(lambda self: self.splits.calib)
    test = property(lambda self: self.splits.test)

    @cached_property
    def heads(self) -> dict[str, Scores]:
        """The test scores of heads that were trained beside the network."""
        with np.load(self.file) as arrays:
            names = [key.split("/")[1] for key in arrays if key.endswith("/correct")]
            return {name: unpack_scores(arrays, f"heads/{name}") for name in names}


def stored_runs(folder: Path = HERE) -> list[StoredRun]:
    """All committed runs, sorted by name."""
    return [StoredRun(file.stem, folder) for file in sorted((folder / "runs").glob("*.json"))]


def store(run: StoredRun, splits: Splits, heads: Mapping[str, Scores], certificate: dict[str, Any]) -> None:
    """Write a run's certificate, and its arrays as np.savez does but compressed by LZMA: equal ones as equal files."""
    about = as_plain(certificate) | {"config": certificate["config"]}
    for path in (run.text, run.file):
        path.parent.mkdir(parents=True, exist_ok=True)
    run.text.write_text(json.dumps(about, separators=(",", ":")) + "\n")
    arrays = pack(splits)
    for head, scores in heads.items():
        arrays |= pack_scores(scores, f"heads/{head}")
    with zipfile.ZipFile(run.file, "w", zipfile.ZIP_LZMA) as file:
        for name, value in arrays.items():
            with file.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.ascontiguousarray(value), allow_pickle=False)


# --- arrays in few bytes


def pack(splits: Splits) -> Arrays:
    """What is stored of two splits."""
    weights: Arrays = {}
    parts = [{"labels": own.labels.byte().numpy(), "top": own.main.amax(1).half().numpy()} for own in splits]
    orders, known = [packed_order(own) for own in parts], [np.zeros((len(own["top"]), 0)) for own in parts]
    for field in [field for field in LEVELS if getattr(splits.calib, field) is not None]:
        steps = [quantise(getattr(part, field), LEVELS[field]) for part in splits]
        left, weights[field] = encode(steps, known)
        for own, one, order in zip(parts, left, orders):
            own[field] = one[:, order]
        known = steps if field == "main" else known
    if (numbers := splits.calib.numbers) is not None:
        mean, step = numbers.mean(0), numbers.std(0).clamp(min=1e-6) / PER_DEVIATION
        weights["numbers"] = torch.stack([mean, step]).numpy()
        for own, part, order in zip(parts, splits, orders):
            scaled = ((part.numbers - mean) / step).round().clamp(-127, 127)
            own["numbers"] = scaled.to(torch.int8).numpy().T[:, order]
    groups = zip(("weights", *Splits._fields), (weights, *parts))
    return {f"{group}/{name}": value for group, own in groups for name, value in own.items()}


def unpack(arrays: Arrays, part: str) -> Split:
    """What `pack` was given for the part "calib" or "test"."""
    own = under(arrays, f"{part}/")
    found = {"labels": torch.from_numpy(own["labels"]).long()}
    known, back = np.zeros((len(found["labels"]), 0)), np.argsort(packed_order(own))
    for field in [field for field in LEVELS if field in own]:
        steps = decode(own[field][:, back], arrays[f"weights/{field}"], known)
        found[field] = dequantise(steps, LEVELS[field])
        known = steps if field == "main" else known
    found["main"] += torch.from_numpy(own["top"]).float()[:, None]
    if "numbers" in own:
        mean, step = torch.from_numpy(arrays["weights/numbers"])
        found["numbers"] = torch.from_numpy(own["numbers"][:, back].T.astype(np.float32)) * step + mean
    return Split(**found)


def packed_order(own: Arrays) -> Array:
    """Samples of one class and of like logits beside each other, which compress better; both are stored unsorted."""
    return np.lexsort((own["top"], own["labels"]))


def pack_scores(scores: Scores, name: str) -> Arrays:
    """Scores as steps of log(1 + 100 score). Of correct predictions the NLL is -log(1 - doubt)."""
    kept = {"doubt": scores.doubt, "brier": scores.brier, "wrong": scores.nll[~scores.correct]}
    arrays = {f"{name}/correct": scores.correct.numpy(), f"{name}/ece_all": np.float32(scores.ece_all)}
    for field, levels in SCORE_LEVELS.items():
        steps = levels * (kept[field].double() / FINEST).log1p()
        arrays[f"{name}/{field}"] = steps.round().numpy().astype(np.uint16)
    return arrays


def unpack_scores(arrays: Mapping[str, Array], name: str) -> Scores:
    """What `pack_scores` was given, in float64."""
    doubt, brier, wrong = (
        torch.expm1(torch.from_numpy(arrays[f"{name}/{field}"].astype(np.float64)) / levels) * FINEST
        for field, levels in SCORE_LEVELS.items()
    )
    nll, correct = -torch.log1p(-doubt), torch.from_numpy(arrays[f"{name}/correct"])
    nll[~correct] = wrong
    return Scores(nll, brier, doubt, correct, arrays[f"{name}/ece_all"].item())


def quantise(logits: Tensor, levels: int) -> Array:
    """(N, K) uint8: fine steps near the row's largest entry, coarse ones far below. The predicted class stays.

    An entry that lies d below the largest is off by at most (1 + d) / (2 * levels - 1), or by 1 / levels next to it.

    >>> quantise(torch.tensor([[5.0, 4.0, -20.0]]), 32).tolist()
    [[0, 22, 104]]
    """
    below = logits.amax(1, keepdim=True) - logits
    steps = (below.double().log1p() * levels).round().clamp(1, 255)  # 0 is for the largest entry alone
    return steps.scatter(1, logits.argmax(1, keepdim=True), 0).to(torch.uint8).numpy()


def dequantise(steps: Array, levels: int) -> Tensor:
    """Logits (N, K) whose largest entry in a row is 0."""
    return -torch.expm1(torch.from_numpy(steps).float() / levels)


def encode(parts: Sequence[Array], known: Sequence[Array]) -> tuple[list[Array], Array]:
    """What guesses leave of the steps (N, K) of each part, (K, N) uint8, and the least-squares weights of the guesses.

    `known` are steps (N, P) of the same samples that the reader has already. Weights are (P + K + 1, K) int16.
    """
    rows, k = [_rows(part, other) for part, other in zip(parts, known)], parts[0].shape[1]
    gram = sum(part @ part.T for part in rows)
    last = len(gram) - 1  # the constant
    weights = np.zeros((last + 1, k), np.int16)
    for column, target in enumerate(range(last - k, last)):
        read = [*range(target), last]
        found = np.linalg.solve(gram[np.ix_(read, read)] + RIDGE * np.eye(len(read)), gram[read, target])
        weights[read, column] = np.clip(np.round(UNIT * found), -32768, 32767)
    return [((part.T - _guess(weights, r)) % 256).astype(np.uint8) for part, r in zip(parts, rows)], weights


def decode(left: Array, weights: Array, known: Array) -> Array:
    """The steps (N, K) of a part."""
    rows = _rows(left.T, known)
    for k, part in enumerate(left, known.shape[1]):
        rows[k] = (part + _guess(weights[:, k - known.shape[1]], rows)) % 256
    return np.ascontiguousarray(rows[known.shape[1] : -1].T.astype(np.uint8))


def _rows(steps: Array, known: Array) -> Array:
    """(P + K + 1, N): what guesses read. Weights of classes that come later are 0."""
    return np.vstack([known.T, steps.T, np.full(len(steps), CONSTANT)]).astype(np.float64)


def _guess(weights: Array, rows: Array) -> Array:
    return np.floor(weights.T.astype(np.float64) @ rows / UNIT + 0.5)
