"""The staged head against its rivals on every classifier there is, and on small calibration sets.

    python experiments/rivals.py versus [--shared FOLDER]    # versus.csv; rows of missing files are kept
    python experiments/rivals.py safety --draws 50 [--shared FOLDER]    # an hour of a core; safety.csv

FOLDER may hold logits/resnet110_c10.npz and imagenet/resnet50_val5k.npz. `versus` needs probmetrics.

versus: classifiers that are no runs of this project; those are in results.csv. Settings of the head were chosen on the
part "development". The part "blind" is the first look at the classifiers of blind.py, by the code of commit 370ea41; it
is never written again. What today's code gives for them is the part "after", which is not blind. The head reads logits
alone, as its rivals do, except in rows named "features".

safety: each draw fits to n samples of a network's calibration and test data and judges by up to 5,000 others.
A loss is the NLL above the better of the raw network and temperature scaling, which is known only afterwards. Two
classes are cats and dogs, and animals and vehicles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blind
import numpy as np
import pandas as pd
import torch
from post_hoc import METHODS, RIVALS, against
from results import HERE, Scores, Split, StoredRun, arguments
from tables import Runs, Tables, markdown, percent
from torch import Tensor

from doublehead import PAPER, Predictions, metrics
from doublehead.calibration_head import HeadBank
from doublehead.calibrators import Head, Temperature
from doublehead.head_training import HeadTraining
from doublehead.torch_tools import evaluating

VERSUS, SAFETY = HERE / "versus.csv", HERE / "safety.csv"
HALVES = 4  # of ImageNet, two images of each class in each half
SIZES = (50, 100, 200, 500, 1000, 2500, 5000)
DRAWN = ("cifar10-resnet50-cross_entropy-e80-s0", "cifar10-resnet50-cross_entropy-e80-s1",
         "cifar100-resnet50-cross_entropy-e80-s0", "cifar100-resnet50-cross_entropy-e80-s1",
         "svhn-resnet50-cross_entropy-e40-s0")  # fmt: skip
# Parts of our runs by the end of their training: until settings of stages were fixed, and until stages were pooled.
ENDED = {"development": "2026-11-16T07:00", "later": "2026-11-16T13:16", "new": "9"}
ANIMALS, VEHICLES, CAT_DOG = [2, 3, 4, 5, 6, 7], [0, 1, 8, 9], [3, 5]  # of CIFAR-10
WORSE = 0.002  # a loss that counts
LEVEL = 5e-5  # differences of the NLL that are level whatever their interval: not visible in four digits
JUDGED = 5000
EPOCHS = 40  # of the paper's head on ImageNet
DRAW = ["network", "classes", "n", "seed", "raw", "temperature", "head", "stages"]


# --- classifiers


class Case(NamedTuple):
    """One classifier; `head` gives the test logits of another head than the staged one on logits."""

    part: str
    name: str
    calib: Split
    test: Split
    head: Callable[[], Tensor] | None = None


def resnet110(shared: Path) -> Case:
    """A published ResNet-110 on CIFAR-10."""
    with np.load(shared / "logits" / "resnet110_c10.npz") as file:
        arrays = [
            torch.from_numpy(file[f"{s}_{what}"]) for s in ("val", "test") for what in ("labels", "logits")
        ]
    calib, test = Split(arrays[0].long(), arrays[1].float()), Split(arrays[2].long(), arrays[3].float())
    return Case("development", "cifar10-resnet110", calib, test)


def imagenet(shared: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, features and labels of a ResNet-50 on five images of each class."""
    with np.load(shared / "imagenet" / "resnet50_val5k.npz") as file:
        logits, features, labels = (torch.from_numpy(file[key]) for key in ("logits", "features", "labels"))
    return logits.float(), features.float(), labels.long()


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
        halves = Split(labels[calib], logits[calib]), Split(labels[test], logits[test])
        heads = {"": None, ", features": partial(features_head, layer)}
        if seed == 0:  # it is far behind
            heads[", paper's head"] = paper_head
        for what, head in heads.items():
            own = None if head is None else partial(head, *halves, features[calib], features[test])
            yield Case("development", f"imagenet-resnet50, half {seed}{what}", *halves, own)


def features_head(
    layer: Tensor, calib: Split, test: Split, features: Tensor, test_features: Tensor
) -> Tensor:
    """Test logits (N, K) of the staged head that reads features and the last layer."""
    head = Head().fit(calib.predictions, features=features, last_layer=layer)
    with torch.no_grad():
        return head(test.main, test_features)


def paper_head(calib: Split, test: Split, features: Tensor, test_features: Tensor) -> Tensor:
    """Test logits (N, K) of the paper's head, trained on the finished network with a cosine schedule."""
    torch.manual_seed(0)
    bank, rate = HeadBank(features.shape[1], test.main.shape[1], [PAPER]), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([rate], lr=1.0)  # holds the schedule
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    training, none = HeadTraining(bank, follow=optimizer), torch.zeros_like(calib.labels)
    for _ in range(EPOCHS):
        batches = torch.randperm(len(none)).split(128)
        for i, at in enumerate(batches):
            training.step(calib.main[at], features[at], calib.labels[at], none[at], i / len(batches))
        optimizer.step()
        schedule.step()
    with evaluating(bank), torch.no_grad():
        return bank(test.main, test_features)[0]


# --- versus


def cases(shared: Path | None) -> Iterator[Case]:
    """All classifiers that are at hand."""
    if shared is not None:
        yield resnet110(shared)
        yield from imagenet_halves(shared)
    for name in blind.LOADERS:
        if (blind.FOLDER / f"{name}.npz").exists():
            yield Case("after", name, *blind.load(name))


def row_of(case: Case) -> dict[str, Any]:
    """The numbers of one classifier."""
    scores = {name: METHODS[name](case) for name in ("none", *RIVALS, "head")}
    if case.head is not None:
        scores["head"] = Scores.of(Predictions(case.head(), case.test.labels))
    numbers = scores["head"].numbers(scores["none"], scores["temperature"]) | against(case, scores)
    row: dict[str, Any] = {"part": case.part, "name": case.name, "calib": len(case.calib.labels)}
    row |= {f"nll_{name}": float(found.nll.mean()) for name, found in scores.items()}
    wanted = [f"{what}_{name}" for what in ("to", "reach") for name in RIVALS]
    return row | {key: numbers[key] for key in ("n", "classes", "accuracy", "ece", "ece_high", *wanted)}


def versus(shared: Path | None) -> None:
    """Measure all classifiers that are at hand."""
    old = pd.read_csv(VERSUS).to_dict("records") if VERSUS.exists() else []
    rows = {(row["part"], row["name"]): row for row in old}
    for case in cases(shared):
        made = rows[case.part, case.name] = row_of(case)
        print(case.name, f"{made['nll_head']:.4f}", flush=True)
    pd.DataFrame(list(rows.values())).to_csv(VERSUS, index=False, float_format="%.6g")


# --- small calibration sets


def networks(shared: Path | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, logits (N, K) and labels (N,)."""
    for one in [*map(StoredRun, DRAWN), *([] if shared is None else [resnet110(shared)])]:
        logits = torch.cat([one.calib.main, one.test.main])
        labels = torch.cat([one.calib.labels, one.test.labels])
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


def draw(seed: int, name: str, logits: Tensor, labels: Tensor) -> Iterator[tuple[object, ...]]:
    """A row of one draw of every size."""
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
        yield (name, logits.shape[1], n, seed, *nlls, stages)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By number of classes and samples: the share of draws with a loss above 0.002, and the largest loss."""
    best = table[["raw", "temperature"]].min(axis=1)
    found = table.assign(worst=table["head"] - best, temperature_worst=table["temperature"] - best)
    found["opened"] = found.stages != "temperature"
    groups = found.groupby(["classes", "n"])
    made = pd.DataFrame({"draws": groups.size()})
    for name in ("worst", "temperature_worst"):
        made[name.replace("worst", "worse")] = groups[name].agg(lambda losses: (losses > WORSE).mean())
        made[name] = groups[name].max()
    made["opened"] = groups.opened.mean()
    made["gain"] = 1 - groups["head"].mean() / groups["temperature"].mean()
    return made.reset_index()


def safety(shared: Path | None, draws: int) -> None:
    """Draw small calibration sets from every network and write the summary."""
    rows = [row for network in networks(shared) for seed in range(draws) for row in draw(seed, *network)]
    summary(pd.DataFrame(rows, columns=DRAW)).to_csv(SAFETY, index=False, float_format="%.5g")


# --- tables


def versus_table(part: str, table: pd.DataFrame, runs: Runs) -> str:
    """The staged head against temperature scaling and the two best rivals, each classifier and their count."""
    found = pd.concat([of_runs(table, runs), pd.read_csv(VERSUS)])
    own = found[found.part == part]
    staged = own[~own.name.str.endswith("paper's head")]
    return f"{markdown([_versus(row) for _, row in own.iterrows()])}\n{wins(staged)}"


def of_runs(table: pd.DataFrame, runs: Runs) -> pd.DataFrame:
    """The rows of versus.csv that runs of this project would have."""
    nlls = table[table.metric == "nll"].pivot(index="run", columns="output", values="value")
    heads = table[table.output == "head"].pivot(index="run", columns="metric", values="value")
    rows = []
    for run in [run for run in runs if run.config.loss == "cross_entropy"]:
        time = run.certificate["environment"]["time"]
        part = next(part for part, end in ENDED.items() if time < end)
        row = {"part": part, "name": run.name, "calib": run.certificate["sizes"][1]}
        row |= {f"nll_{name}": nlls.loc[run.name, name] for name in ("none", *RIVALS, "head")}
        rows.append(row | dict(heads.loc[run.name]))
    return pd.DataFrame(rows)


def _versus(row: pd.Series) -> dict[str, str]:
    line = {"classifier": row["name"], "classes": f"{row.classes:.0f}"}
    line["samples"] = f"{row.calib:,.0f} / {row.n:,.0f}"
    outputs = {"none": "as it is", **RIVALS, "head": "head"}
    line |= {f"NLL {title}": f"{row[f'nll_{name}']:.4f}" for name, title in outputs.items()}
    for name, title in RIVALS.items():
        gap, reach = row[f"to_{name}"], row[f"reach_{name}"]
        text = f"{gap:+.4f} ± {reach:.4f}"
        line[f"to {title}"] = f"**{text}**" if abs(gap) > max(reach, LEVEL) else text
    return line | {"ECE head": f"{percent(row.ece)} ({percent(row.ece_high)})"}


def wins(found: pd.DataFrame) -> str:
    """Each classifier counts once: of ImageNet the first half, by logits."""
    found, lines = found[~found.name.str.contains("half [1-9]|features")], []
    for name, title in RIVALS.items():
        gap, reach = found[f"to_{name}"], found[f"reach_{name}"].clip(lower=LEVEL)
        change = (found.nll_head / found[f"nll_{name}"] - 1).mean()
        line = {"head against": title, "clearly lower": str((gap < -reach).sum())}
        line |= {"level": str((gap.abs() <= reach).sum()), "clearly higher": str((gap > reach).sum())}
        lines.append(line | {"mean change of NLL, percent": f"{100 * change:+.2f}"})
    return markdown(lines)


def safety_table(table: pd.DataFrame, runs: Runs) -> str:
    """How often the head is worse than the better of doing nothing and temperature scaling."""
    lines = []
    for _, row in pd.read_csv(SAFETY).iterrows():
        sizes = {"classes": row.classes, "samples": row.n, "draws": row.draws}
        line = {title: f"{size:,.0f}" for title, size in sizes.items()}
        line |= {"head worse": percent(row.worse, 1), "largest loss": f"{max(row.worst, 0):.4f}"}
        line |= {"temperature worse": percent(row.temperature_worse, 1)}
        line |= {"its largest loss": f"{max(row.temperature_worst, 0):.4f}"}
        lines.append(line | {"stages opened": percent(row.opened, 1), "NLL saved": f"{100 * row.gain:+.1f}"})
    return markdown(lines)


TABLES: Tables = {
    "blind": ("docs/results/index.md", lambda *_: wins(pd.read_csv(VERSUS).query("part == 'blind'"))),
    "safety": ("docs/results/safety.md", safety_table),
    **{
        f"versus-{part}": ("docs/results/versus.md", partial(versus_table, part))
        for part in (*ENDED, "blind", "after")
    },
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["versus", "safety"])
    parser.add_argument("--shared", type=Path)
    parser.add_argument("--draws", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "versus":
        versus(options.shared)
    else:
        safety(options.shared, options.draws)


if __name__ == "__main__":
    main()
