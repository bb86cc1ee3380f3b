"""Do we agree with netcal, torchmetrics, scikit-learn and probmetrics on the same real predictions? If not, why not?

    python benchmarks/peers_agreement.py ../shared/data/logits/resnet110_c10.npz          # prints the table
    python benchmarks/peers_agreement.py ../shared/data/logits/resnet110_c10.npz --save   # also JSON and docs/peers.md

Every number is computed by us, by its definition written out in numpy (definitions.py), and by every peer that is
installed. Where a peer differs from the definition, the number is computed once more with what we say is the reason,
and that must give the peer's number: an explanation that does not reproduce the difference fails, and so does a
difference without an explanation. Install the peers in an environment of their own: netcal and probmetrics bring many
packages (probmetrics also needs numba and relplot, which it does not name).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import definitions as by
import numpy as np
import records
import torch

from doublehead import metrics
from doublehead.calibrators import Temperature
from doublehead.predictions import Predictions

DOCS = Path(__file__).parents[1] / "docs" / "peers.md"
MARK = "<!-- written by benchmarks/peers_agreement.py -->"
SAME = 2e-6  # float32 probabilities of 10,000 samples leave about 1e-7
PEERS = {
    "netcal": "netcal",
    "torchmetrics": "torchmetrics",
    "sklearn": "scikit-learn",
    "probmetrics": "probmetrics",
}
Array = Any

OWN_BIN = "bins are closed on the left, exactly 1.0 gets a sixteenth bin of its own, and sums are added up in float32"
CLAMPED = "cuts probabilities to 1e-7 .. 1 - 1e-7, rescales the rows, and has torchmetrics bin them"
ON_LEFT = "bins are closed on the left, so a confidence on an edge falls one bin higher"


class Reason(NamedTuple):
    """Why a peer differs, and its number computed for that reason (None: it raises)."""

    why: str
    reproduces: float | None
    within: float = SAME


class Row(NamedTuple):
    name: str
    ours: float
    definition: float
    peers: dict[str, Callable[[], Any]]
    reasons: dict[str, Reason]
    within: float = SAME


class Set(NamedTuple):
    """One set of predictions, as arrays."""

    p: Predictions
    probs: Array  # (N, K)
    labels: Array  # (N,)
    confidence: Array  # (N,)
    correct: Array  # (N,)

    @classmethod
    def of(cls, p: Predictions) -> Set:
        probs, labels = p.probs.numpy(), p.labels.numpy()
        return cls(p, probs, labels, probs.max(1), probs.argmax(1) == labels)


def score_rows(data: Set) -> list[Row]:
    """Accuracy and proper scores: nothing to disagree about."""
    p, probs, labels = data.p, data.probs.astype(np.float64), data.labels
    sk, tm = import_module("sklearn.metrics"), import_module("torchmetrics.functional.classification")
    classes = list(range(p.n_classes))
    scaled = probs / probs.sum(1, keepdims=True)  # scikit-learn warns of float32 sums
    tensors = torch.from_numpy(probs), torch.from_numpy(labels), p.n_classes
    at_label, one_hot = probs[np.arange(len(labels)), labels], np.eye(p.n_classes)[labels]
    accuracy = {
        "sklearn": lambda: sk.accuracy_score(labels, probs.argmax(1)),
        "torchmetrics": lambda: tm.multiclass_accuracy(*tensors, average="micro"),
        "probmetrics": lambda: probmetrics_value(data, "accuracy"),
    }
    nll = {
        "sklearn": lambda: sk.log_loss(labels, scaled, labels=classes),
        "probmetrics": lambda: probmetrics_value(data, "logloss"),
    }
    brier = {
        "sklearn": lambda: sk.brier_score_loss(labels, scaled, labels=classes),
        "probmetrics": lambda: probmetrics_value(data, "brier"),
    }
    return [
        Row("accuracy", metrics.accuracy(p), float(data.correct.mean()), accuracy, {}),
        Row("NLL", metrics.nll(p), float(-np.log(at_label).mean()), nll, {}),
        Row("Brier score", metrics.brier(p), float(((probs - one_hot) ** 2).sum(1).mean()), brier, {}),
    ]


def binned_rows(data: Set, title: str = "") -> list[Row]:
    """ECE, RMS and maximum calibration error in 15 bins."""
    kinds = (
        ("ECE", metrics.ece, by.ece_of, "ECE", "l1", "ece-15"),
        ("RMS calibration error", metrics.ece2, by.rms_of, None, "l2", "rmsce-15"),
        ("MCE", metrics.mce, by.mce_of, "MCE", "max", "mce-15"),
    )
    handed = Set.of(Predictions.from_probs(by.clamped(data.probs), data.labels))
    right, left = (by.binned(data.confidence, data.correct, left=left) for left in (False, True))
    own_bin, after_clamp = (by.binned_as_torchmetrics(d.confidence, d.correct) for d in (data, handed))
    rows = []
    for name, ours, of, in_netcal, norm, in_probmetrics in kinds:
        peers: dict[str, Callable[[], Any]] = {
            "torchmetrics": lambda norm=norm: torchmetrics_error(data, norm),
            "probmetrics": lambda key=in_probmetrics: probmetrics_value(data, key),
        }
        if in_netcal:
            peers["netcal"] = lambda key=in_netcal: netcal(key, 15).measure(data.probs, data.labels)
        if name == "ECE":
            peers["sklearn"] = lambda: sklearn_ece(data)
        reasons = {
            "netcal": Reason(ON_LEFT, of(left)),
            "torchmetrics": Reason(OWN_BIN, of(own_bin)),
            "probmetrics": Reason(CLAMPED, of(after_clamp)),
        }
        rows.append(Row(name + title, ours(data.p), of(right), peers, reasons))
    return rows


def classwise_row(data: Set) -> Row:
    each = [(data.probs[:, c].copy(), (data.labels == c).astype(int)) for c in range(data.p.n_classes)]
    binary = import_module("torchmetrics.functional.classification").binary_calibration_error
    tensors = [tuple(map(torch.from_numpy, one)) for one in each]
    peers = {
        "netcal": lambda: np.mean([netcal("ECE", 15).measure(c.astype(float), y) for c, y in each]),
        "torchmetrics": lambda: np.mean([float(binary(*one, 15)) for one in tensors]),
    }
    definition = float(np.mean([by.ece_of(by.binned(c, y)) for c, y in each]))
    reason = Reason(OWN_BIN, float(np.mean([by.ece_of(by.binned_as_torchmetrics(c, y)) for c, y in each])))
    ours = metrics.ece(data.p, components="classwise")
    return Row("class-wise ECE", ours, definition, peers, {"torchmetrics": reason})


def other_rows(data: Set) -> list[Row]:
    """Adaptive ECE and the errors without bins."""
    few = Set.of(data.p[:2000])
    top = data.confidence, data.correct
    adaptive = {"netcal": lambda: netcal("ECE", 15, equal_intervals=False).measure(data.probs, data.labels)}
    share = f"{100 * (data.confidence == 1).mean():.0f} %"
    coincide = f"raises: {share} of the confidences are exactly 1.0, so edges of its bins coincide"
    mmce = {"netcal": lambda: netcal("MMCE").measure(few.probs.astype(float), few.labels)}
    smooth = metrics.smooth_ece(data.p)
    mirror = Reason(
        "computed by relplot, whose mirror image leaves out the ends of 0..1: confidences of 1.0 count half",
        by.smooth_as_relplot(*top),
        within=1e-3,
    )
    by_relplot = {"probmetrics": lambda: probmetrics_value(data, "smece")}
    reasons = {"netcal": Reason(coincide, None)}
    return [
        Row("adaptive ECE", metrics.adaptive_ece(data.p), by.equal_mass(*top), adaptive, reasons),
        Row("MMCE, first 2,000", metrics.mmce(few.p), by.mmce_of(few.confidence, few.correct), mmce, {}),
        Row("smooth ECE", smooth, by.smooth_of(*top, width=smooth), by_relplot, {"probmetrics": mirror}),
        Row("KS error", metrics.ks_error(data.p), by.ks_of(*top), {}, {}),
    ]


def temperature_rows(val: Predictions) -> list[Row]:
    """The temperature that minimises the NLL, from float32 and from float64 inputs."""
    double = Predictions(val.logits.double(), val.labels)
    best = by.golden_temperature(val.logits, val.labels)
    stays = Reason("stays where it starts, at 1.0, on float32 probabilities, without a warning", 1.0)
    rows = []
    for title, p in (("float32", val), ("float64", double)):
        peers = {
            "netcal": lambda p=p: netcal_temperature(p),
            "sklearn": lambda p=p: sklearn_temperature(p),
            "probmetrics": lambda p=p: probmetrics_temperature(p),
        }
        ours = float(Temperature().fit(p).temperature_)
        rows.append(Row(f"temperature, {title}", ours, best, peers, {"netcal": stays}, within=1e-4))
    return rows


def netcal(name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(import_module("netcal.metrics"), name)(*arguments, **options)


def torchmetrics_error(data: Set, norm: str) -> float:
    functional = import_module("torchmetrics.functional.classification")
    probs, labels = torch.from_numpy(data.probs), torch.from_numpy(data.labels)
    return float(functional.multiclass_calibration_error(probs, labels, data.p.n_classes, 15, norm))


def probmetrics_value(data: Set, name: str) -> float:
    known = import_module("probmetrics.metrics").Metrics.from_names([name])
    found = known.compute_all_from_labels_probs(torch.from_numpy(data.labels), torch.from_numpy(data.probs))
    return float(found[name])


def sklearn_ece(data: Set) -> float:
    """scikit-learn has no ECE; this is its reliability curve, weighted by the counts of the same bins."""
    curve = import_module("sklearn.calibration").calibration_curve
    accuracy, confidence = curve(data.correct, data.confidence.astype(np.float64), n_bins=15)
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, 16)[1:-1], data.confidence), minlength=15)
    return float((counts[counts > 0] * np.abs(accuracy - confidence)).sum() / counts.sum())


def netcal_temperature(p: Predictions) -> float:
    scaling = import_module("netcal.scaling").TemperatureScaling()
    scaling.fit(p.probs.numpy(), p.labels.numpy())
    return 1 / float(np.asarray(scaling.temperature).reshape(-1)[0])


def sklearn_temperature(p: Predictions) -> float:
    """Through CalibratedClassifierCV around a linear classifier that passes logits on."""
    logits, labels = p.logits.numpy(), p.labels.numpy()
    passes_on = import_module("sklearn.linear_model").LogisticRegression()
    passes_on.classes_ = np.arange(p.n_classes)
    passes_on.coef_, passes_on.intercept_ = np.eye(p.n_classes, dtype=logits.dtype), logits.dtype.type(0)
    frozen = import_module("sklearn.frozen").FrozenEstimator(passes_on)
    model = import_module("sklearn.calibration").CalibratedClassifierCV(frozen, method="temperature")
    fitted = model.fit(logits, labels).calibrated_classifiers_[0].calibrators[0]
    return 1 / float(fitted.beta_)


def probmetrics_temperature(p: Predictions) -> float:
    get = import_module("probmetrics.calibrators").get_calibrator
    found = get("temp-scaling", calibrate_with_mixture=False)
    found.fit_torch(import_module("probmetrics.distributions").CategoricalLogits(p.logits), p.labels)
    return 1 / float(found.invtemp_)


def judge(row: Row, installed: dict[str, str]) -> dict[str, Any]:
    """A row of the table: every number and, for each peer, agrees, explained or an error."""
    result: dict[str, Any] = {"name": row.name, "ours": row.ours, "definition": row.definition, "peers": {}}
    result["right"] = abs(row.ours - row.definition) <= row.within
    for peer, call in row.peers.items():
        if peer not in installed:
            continue
        try:
            value, said = float(call()), ""
        except Exception as error:  # peers fail in many ways
            value, said = math.nan, f"{type(error).__name__}: {error}"
        reason = row.reasons.get(peer)
        cell = {"value": None if math.isnan(value) else value, "raises": said}
        if abs(value - row.definition) <= row.within:
            cell["verdict"] = "agrees"
        elif reason is not None and _explains(reason, value):
            cell |= {"verdict": "explained", "why": reason.why, "reproduced": reason.reproduces}
        else:
            cell["verdict"] = "unexplained"
        result["peers"][peer] = cell
    return result


def _explains(reason: Reason, value: float) -> bool:
    if reason.reproduces is None:
        return math.isnan(value)
    return abs(value - reason.reproduces) <= reason.within


def as_markdown(rows: list[dict[str, Any]], installed: dict[str, str]) -> str:
    """The table, and below it why each number in italics differs."""
    titles = ["number", "ours", "definition", *(f"{PEERS[p]} {version}" for p, version in installed.items())]
    lines, reasons = [titles], {}
    for row in rows:
        lines.append([row["name"], f"{row['ours']:.6f}", f"{row['definition']:.6f}"])
        for peer in installed:
            cell = row["peers"].get(peer)
            if cell is None:
                lines[-1].append("-")
                continue
            text = "raises" if cell["value"] is None else f"{cell['value']:.6f}"
            lines[-1].append(text if cell["verdict"] == "agrees" else f"*{text}*")
            if cell["verdict"] != "agrees":
                why = cell.get("why", "UNEXPLAINED")
                reasons.setdefault(f"{PEERS[peer]}: {why}", []).append(row["name"])
    table = [f"| {' | '.join(line)} |" for line in lines]
    table.insert(1, "|---" * len(titles) + "|")
    return "\n".join([*table, "", *(f"- {why} (in: {'; '.join(names)})." for why, names in reasons.items())])


def main() -> int:
    parser = records.arguments(__doc__)
    parser.add_argument("file", type=Path, help=".npz with val_logits, val_labels, test_logits, test_labels")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    parts = {"netcal": "netcal.scaling", "probmetrics": "probmetrics.metrics"}
    found = records.installed({parts.get(module, module): name for module, name in PEERS.items()})
    installed = {module: version(name) for module, name in PEERS.items() if name in found}
    arrays = np.load(arguments.file)
    pairs = ((arrays[f"{part}_logits"], arrays[f"{part}_labels"]) for part in ("val", "test"))
    val, test = (Predictions(logits, labels.astype(np.int64)) for logits, labels in pairs)
    calibrated = Temperature().fit(val).calibrate(test)
    rounded = Predictions.from_probs(calibrated.probs.double().numpy().round(2), test.labels, tolerance=0.1)
    data = Set.of(test)
    rows = [*score_rows(data), *binned_rows(data), *binned_rows(Set.of(rounded), ", calibrated, 2 digits")]
    rows += [classwise_row(data), *other_rows(data), *temperature_rows(val)]
    table = [judge(row, installed) for row in rows]
    text = as_markdown(table, installed)
    print(text)
    bad = [row["name"] for row in table if not row["right"]]
    for row in table:
        differ = (peer for peer, cell in row["peers"].items() if cell["verdict"] == "unexplained")
        bad += [f"{peer} in {row['name']}" for peer in differ]
    if bad:
        print(f"\nwrong or unexplained: {', '.join(bad)}", file=sys.stderr)
    if arguments.save:
        save(table, text, installed, arguments.file.name)
    return int(bool(bad))


def save(table: list[dict[str, Any]], text: str, installed: dict[str, str], name: str) -> None:
    about = records.about()
    versions = about["versions"] | installed
    records.save("peers_agreement", {"file": name, **about, "versions": versions, "rows": table})
    records.fill(DOCS, MARK, text)


if __name__ == "__main__":
    sys.exit(main())
