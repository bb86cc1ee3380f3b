"""The staged head against its rivals on every classifier there is, in two parts: development and blind.

    python experiments/versus.py [--shared FOLDER]   # writes versus.csv; rows of files that are not there are kept

Settings of the head were chosen on the first part. Rows of the part "blind" are the first look at the classifiers of
blind.py, by the code of commit 370ea41; they are never written again. What today's code gives for them is the part
"after", which is not blind. The head reads logits alone, as its rivals do, except where the name says "features".
Differences are paired, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import blind
import numpy as np
import pandas as pd
import torch
from post_hoc import METHODS
from results import HERE, Scores, Split, Z, stored_runs
from torch import Tensor

from doublehead import Predictions
from doublehead.calibrators import Head

TABLE = HERE / "versus.csv"
RIVALS = ("temperature", "svs", "sms")
SPLITS = 4  # of ImageNet, two images of each class in each half


class Case(NamedTuple):
    """One classifier; `features` are (calibration, test) features and `layer` its last layer."""

    part: str
    name: str
    calib: Split
    test: Split
    features: tuple[Tensor, Tensor] | None = None
    layer: Tensor | None = None


def cases(shared: Path | None) -> Iterator[Case]:
    """All classifiers that are at hand."""
    for run in stored_runs():
        if run.config.loss == "cross_entropy" and "method" not in run.certificate:
            yield Case("development", run.name, run.calib, run.test)
    if shared is not None:
        with np.load(shared / "logits" / "resnet110_c10.npz") as file:
            parts = [
                Split(
                    torch.from_numpy(file[f"{s}_labels"]).long(),
                    torch.from_numpy(file[f"{s}_logits"]).float(),
                )
                for s in ("val", "test")
            ]
        yield Case("development", "cifar10-resnet110", parts[0], parts[1])
        yield from imagenet(shared / "imagenet" / "resnet50_val5k.npz")
    for name in blind.LOADERS:
        if (blind.FOLDER / f"{name}.npz").exists():
            yield Case("after", name, *blind.load(name))


def imagenet(path: Path) -> Iterator[Case]:
    """Halves that are balanced by class; the last layer is the linear map from features to logits."""
    with np.load(path) as file:
        logits, features = (torch.from_numpy(file[name]).float() for name in ("logits", "features"))
        labels = torch.from_numpy(file["labels"]).long()
    inputs = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    layer = (
        torch.linalg.lstsq(inputs, (logits - logits.mean(1, keepdim=True)).double()).solution[:-1].mT.float()
    )
    by_class = labels.argsort(stable=True).reshape(1000, 5)
    for seed in range(SPLITS):
        order = torch.rand(1000, 5, generator=torch.Generator().manual_seed(seed)).argsort(1)
        chosen = by_class.gather(1, order)
        calib, test = chosen[:, :2].reshape(-1), chosen[:, 2:4].reshape(-1)
        halves = [Split(labels[at], logits[at]) for at in (calib, test)]
        yield Case("development", f"imagenet-resnet50, half {seed}", halves[0], halves[1])
        name = f"imagenet-resnet50, half {seed}, features"
        yield Case("development", name, halves[0], halves[1], (features[calib], features[test]), layer)


def row_of(case: Case) -> dict[str, Any] | None:
    """The numbers of one classifier; None where a rival is not installed."""
    scores = {name: METHODS[name](case) for name in ("none", *RIVALS, "head")}  # type: ignore[arg-type]
    if any(found is None for found in scores.values()):
        return None
    if case.features is not None:
        head = Head().fit(case.calib.predictions, features=case.features[0], last_layer=case.layer)
        with torch.no_grad():
            out = head(case.test.main, case.features[1])
        scores["head"] = Scores.of(Predictions(out, case.test.labels))
    known = {name: found for name, found in scores.items() if found is not None}
    numbers = known["head"].numbers(known["none"], known["temperature"])
    row: dict[str, Any] = {"part": case.part, "name": case.name, "classes": case.calib.main.shape[1]}
    row |= {"calib": len(case.calib.labels), "test": len(case.test.labels), "accuracy": numbers["accuracy"]}
    row |= {f"nll_{name}": float(found.nll.mean()) for name, found in known.items()}
    row |= {"ece": numbers["ece"], "ece_high": numbers["ece_high"]}
    for name in RIVALS:
        gap = (known["head"].nll - known[name].nll).double()
        row |= {f"to_{name}": float(gap.mean()), f"reach_{name}": Z * float(gap.std()) / math.sqrt(len(gap))}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    old = pd.read_csv(TABLE).to_dict("records") if TABLE.exists() else []
    rows = {(row["part"], row["name"]): row for row in old}
    for case in cases(options.shared):
        made = row_of(case)
        if made is not None:
            rows[case.part, case.name] = made
            print(case.name, f"{made['nll_head']:.4f}", flush=True)
    pd.DataFrame(list(rows.values())).to_csv(TABLE, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
