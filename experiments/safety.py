"""Small calibration sets: how often is the staged head worse than doing nothing and than temperature scaling?

    python experiments/safety.py --draws 200 --processes 8 [--shared FOLDER]   # hours of one core; writes safety.csv

Each draw takes n samples of a network's calibration and test data to fit to, and up to 5,000 others to judge by. A loss
is the NLL above the better of the raw network and temperature scaling, which is known only afterwards. FOLDER may hold
logits/resnet110_c10.npz and imagenet/resnet50_val5k.npz. Two classes are cats and dogs, and animals and vehicles.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from results import HERE, StoredRun
from torch import Tensor

from doublehead import Predictions, metrics
from doublehead.calibrators import Head, Temperature

TABLE = HERE / "safety.csv"
SIZES = (50, 100, 200, 500, 1000, 2500, 5000)
RUNS = (
    "cifar10-resnet50-cross_entropy-e80-s0",
    "cifar10-resnet50-cross_entropy-e80-s1",
    "cifar100-resnet50-cross_entropy-e80-s0",
    "cifar100-resnet50-cross_entropy-e80-s1",
    "svhn-resnet50-cross_entropy-e40-s0",
)
ANIMALS, VEHICLES, CAT_DOG = [2, 3, 4, 5, 6, 7], [0, 1, 8, 9], [3, 5]  # of CIFAR-10
WORSE = 0.002  # a loss that counts
TEST = 5000
COLUMNS = ("network", "classes", "n", "seed", "raw", "temperature", "head", "stages")


def networks(shared: Path | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, logits (N, K) and labels (N,)."""
    for name in RUNS:
        run = StoredRun(name)
        logits, labels = (
            torch.cat([run.calib.main, run.test.main]),
            torch.cat([run.calib.labels, run.test.labels]),
        )
        yield name, logits, labels
        if name == RUNS[0]:
            yield from two_classes(name, logits, labels)
    if shared is not None:
        with np.load(shared / "logits" / "resnet110_c10.npz") as file:
            arrays = [
                torch.from_numpy(np.concatenate([file[f"{split}_{what}"] for split in ("val", "test")]))
                for what in ("logits", "labels")
            ]
        logits, labels = arrays[0].float(), arrays[1].long()
        yield "cifar10-resnet110", logits, labels
        yield from two_classes("cifar10-resnet110", logits, labels)
        with np.load(shared / "imagenet" / "resnet50_val5k.npz") as file:
            logits, labels = torch.from_numpy(file["logits"]).float(), torch.from_numpy(file["labels"]).long()
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
        calib, test = (Predictions(logits[at], labels[at]) for at in (order[:n], order[n : n + TEST]))
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
    found = table.assign(loss=table["head"] - best, theirs=table["temperature"] - best)
    found["worse"], found["theirs_worse"] = found.loss > WORSE, found.theirs > WORSE
    found["opened"] = found.stages != "temperature"
    groups = found.groupby(["classes", "n"])
    return pd.DataFrame(
        {
            "draws": groups.size(),
            "worse": groups.worse.mean(),
            "worst": groups.loss.max(),
            "temperature_worse": groups.theirs_worse.mean(),
            "temperature_worst": groups.theirs.max(),
            "opened": groups.opened.mean(),
            "gain": groups.apply(lambda rows: 1 - rows["head"].mean() / rows["temperature"].mean()),
        }
    ).reset_index()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shared", type=Path)
    options = parser.parse_args()
    rows: list[tuple[object, ...]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for name, logits, labels in networks(options.shared):
            one = partial(draw, name=name, logits=logits, labels=labels)
            for made in pool.map(one, range(options.draws)):
                rows += made
            print(name, flush=True)
    save(rows)


def save(rows: Sequence[tuple[object, ...]]) -> None:
    """Write the summary of all draws."""
    summary(pd.DataFrame(rows, columns=list(COLUMNS))).to_csv(TABLE, index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
