"""The staged head against its rivals on every classifier there is, and on small calibration sets.

    python experiments/rivals.py versus [--shared FOLDER]     # writes versus.csv; rows of missing files are kept
    python experiments/rivals.py safety --draws 200 [--shared FOLDER] [--processes 8]   # hours of a core; safety.csv

FOLDER may hold logits/resnet110_c10.npz and imagenet/resnet50_val5k.npz.

versus: settings of the head were chosen on the part "development". The part "blind" is the first look at the
classifiers of blind.py, by the code of commit 370ea41; it is never written again. What today's code gives for them is
the part "after", which is not blind. The head reads logits alone, as its rivals do, except in rows named "features".

safety: each draw fits to n samples of a network's calibration and test data and judges by up to 5,000 others.
A loss is the NLL above the better of the raw network and temperature scaling, which is known only afterwards. Two
classes are cats and dogs, and animals and vehicles.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blind
import numpy as np
import pandas as pd
import torch
from post_hoc import METHODS
from results import HERE, Scores, Split, StoredRun, paired, stored_runs
from torch import Tensor

from doublehead import Predictions, metrics
from doublehead.calibrators import Head, Temperature

VERSUS, SAFETY = HERE / "versus.csv", HERE / "safety.csv"
RIVALS = ("temperature", "svs", "sms")
HALVES = 4  # of ImageNet, two images of each class in each half
SIZES = (50, 100, 200, 500, 1000, 2500, 5000)
DRAWN = ("cifar10-resnet50-cross_entropy-e80-s0", "cifar10-resnet50-cross_entropy-e80-s1",
         "cifar100-resnet50-cross_entropy-e80-s0", "cifar100-resnet50-cross_entropy-e80-s1",
         "svhn-resnet50-cross_entropy-e40-s0")  # fmt: skip
ANIMALS, VEHICLES, CAT_DOG = [2, 3, 4, 5, 6, 7], [0, 1, 8, 9], [3, 5]  # of CIFAR-10
WORSE = 0.002  # a loss that counts
JUDGED = 5000
DRAW = ["network", "classes", "n", "seed", "raw", "temperature", "head", "stages"]


# --- classifiers


class Case(NamedTuple):
    """One classifier; `features` are (calibration, test) features and `layer` its last layer."""

    part: str
    name: str
    calib: Split
    test: Split
    features: tuple[Tensor, Tensor] | None = None
    layer: Tensor | None = None


def resnet110(shared: Path) -> Case:
    """A published ResNet-110 on CIFAR-10."""
    with np.load(shared / "logits" / "resnet110_c10.npz") as file:
        parts = [
            Split(torch.from_numpy(file[f"{s}_labels"]).long(), torch.from_numpy(file[f"{s}_logits"]).float())
            for s in ("val", "test")
        ]
    return Case("development", "cifar10-resnet110", parts[0], parts[1])


def imagenet(shared: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, features and labels of a ResNet-50 on five images of each class."""
    with np.load(shared / "imagenet" / "resnet50_val5k.npz") as file:
        logits, features = (torch.from_numpy(file[name]).float() for name in ("logits", "features"))
        return logits, features, torch.from_numpy(file["labels"]).long()


def imagenet_halves(shared: Path) -> Iterator[Case]:
    """Halves that are balanced by class; the last layer is the linear map from features to logits."""
    logits, features, labels = imagenet(shared)
    inputs = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    centred = (logits - logits.mean(1, keepdim=True)).double()
    layer = torch.linalg.lstsq(inputs, centred).solution[:-1].mT.float()
    by_class = labels.argsort(stable=True).reshape(1000, 5)
    for seed in range(HALVES):
        order = torch.rand(1000, 5, generator=torch.Generator().manual_seed(seed)).argsort(1)
        chosen = by_class.gather(1, order)
        calib, test = chosen[:, :2].reshape(-1), chosen[:, 2:4].reshape(-1)
        name, halves = (
            f"imagenet-resnet50, half {seed}",
            [Split(labels[at], logits[at]) for at in (calib, test)],
        )
        yield Case("development", name, halves[0], halves[1])
        both = (features[calib], features[test])
        yield Case("development", f"{name}, features", halves[0], halves[1], both, layer)


# --- versus


def cases(shared: Path | None) -> Iterator[Case]:
    """All classifiers that are at hand."""
    for run in stored_runs():
        if run.config.loss == "cross_entropy":
            yield Case("development", run.name, run.calib, run.test)
    if shared is not None:
        yield resnet110(shared)
        yield from imagenet_halves(shared)
    for name in blind.LOADERS:
        if (blind.FOLDER / f"{name}.npz").exists():
            yield Case("after", name, *blind.load(name))


def row_of(case: Case) -> dict[str, Any] | None:
    """The numbers of one classifier; None where a rival is not installed."""
    scores = {name: METHODS[name](case) for name in ("none", *RIVALS, "head")}
    if case.features is not None:
        head = Head().fit(case.calib.predictions, features=case.features[0], last_layer=case.layer)
        with torch.no_grad():
            out = head(case.test.main, case.features[1])
        scores["head"] = Scores.of(Predictions(out, case.test.labels))
    known = {name: found for name, found in scores.items() if found is not None}
    if len(known) < len(scores):
        return None
    numbers = known["head"].numbers(known["none"], known["temperature"])
    row: dict[str, Any] = {"part": case.part, "name": case.name, "classes": case.calib.main.shape[1]}
    row |= {"calib": len(case.calib.labels), "test": len(case.test.labels), "accuracy": numbers["accuracy"]}
    row |= {f"nll_{name}": float(found.nll.mean()) for name, found in known.items()}
    row |= {"ece": numbers["ece"], "ece_high": numbers["ece_high"]}
    for name in RIVALS:
        row[f"to_{name}"], row[f"reach_{name}"] = paired(known["head"].nll, known[name].nll)
    return row


def versus(shared: Path | None) -> None:
    """Measure all classifiers that are at hand."""
    old = pd.read_csv(VERSUS).to_dict("records") if VERSUS.exists() else []
    rows = {(row["part"], row["name"]): row for row in old}
    for case in cases(shared):
        made = row_of(case)
        if made is not None:
            rows[case.part, case.name] = made
            print(case.name, f"{made['nll_head']:.4f}", flush=True)
    pd.DataFrame(list(rows.values())).to_csv(VERSUS, index=False, float_format="%.6g")


# --- small calibration sets


def networks(shared: Path | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, logits (N, K) and labels (N,)."""
    known: list[Any] = [StoredRun(name) for name in DRAWN] + ([] if shared is None else [resnet110(shared)])
    for one in known:
        logits, labels = (
            torch.cat([one.calib.main, one.test.main]),
            torch.cat([one.calib.labels, one.test.labels]),
        )
        yield one.name, logits, labels
        if one.name in (DRAWN[0], "cifar10-resnet110"):
            yield from two_classes(one.name, logits, labels)
    if shared is not None:
        logits, _, labels = imagenet(shared)
        yield "imagenet-resnet50", logits, labels


def two_classes(name: str, logits: Tensor, labels: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Two problems of two classes made from CIFAR-10: two of the classes, and two groups of classes."""
    rows = torch.isin(labels, torch.tensor(CAT_DOG))
    yield f"{name}, cat or dog", logits[rows][:, CAT_DOG], (labels[rows] == CAT_DOG[1]).long()
    groups = torch.stack([logits[:, group].logsumexp(1) for group in (VEHICLES, ANIMALS)], 1)
    yield f"{name}, vehicle or animal", groups, torch.isin(labels, torch.tensor(ANIMALS)).long()


def draw(seed: int, name: str, logits: Tensor, labels: Tensor) -> list[tuple[object, ...]]:
    """The rows of one draw of every size."""
    torch.set_num_threads(1)
    rows = []
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for n in SIZES:
        if n > len(labels) / 2 or (n == 2500 and len(labels) >= 10_000):
            continue
        calib, test = (Predictions(logits[at], labels[at]) for at in (order[:n], order[n : n + JUDGED]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            head = Head().fit(calib)
        scaled = Temperature().fit(calib).calibrate(test)
        nlls = [float(metrics.nll(p)) for p in (test, scaled, head.calibrate(test))]
        stages = "" if head.choice is None else head.choice.chosen
        rows.append((name, logits.shape[1], n, seed, *nlls, stages))
    return rows


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By number of classes and samples: the share of draws with a loss above 0.002, and the largest loss."""
    best = table[["raw", "temperature"]].min(axis=1)
    found = table.assign(worst=table["head"] - best, temperature_worst=table["temperature"] - best)
    for name in ("", "temperature_"):
        found[f"{name}worse"] = found[f"{name}worst"] > WORSE
    found["opened"] = found.stages != "temperature"
    groups = found.groupby(["classes", "n"])
    made = pd.DataFrame({"draws": groups.size()})
    for name in ("worse", "worst", "temperature_worse", "temperature_worst", "opened"):
        made[name] = groups[name].max() if name.endswith("worst") else groups[name].mean()
    made["gain"] = 1 - groups["head"].mean() / groups["temperature"].mean()
    return made.reset_index()


def safety(shared: Path | None, draws: int, processes: int) -> None:
    """Draw small calibration sets from every network and write the summary."""
    rows: list[tuple[object, ...]] = []
    with ProcessPoolExecutor(processes) as pool:
        for name, logits, labels in networks(shared):
            for made in pool.map(partial(draw, name=name, logits=logits, labels=labels), range(draws)):
                rows += made
            print(name, flush=True)
    summary(pd.DataFrame(rows, columns=DRAW)).to_csv(SAFETY, index=False, float_format="%.5g")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["versus", "safety"])
    parser.add_argument("--shared", type=Path)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "versus":
        versus(options.shared)
    else:
        safety(options.shared, options.draws, options.processes)


if __name__ == "__main__":
    main()
