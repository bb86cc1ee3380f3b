"""Tables as pivots of results.csv and its siblings: one page of Markdown each.

`paper.csv` is the paper's Table 1: ECE of the predicted class before and after temperature scaling, and the
temperature. Annealing Double-Head: An Architecture for Online Calibration of Deep Neural Networks, by Guo, Draper and
De Iorio. Nothing in it was measured here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import pandas as pd
from results import HERE, StoredRun

MADE = "<!-- made by `make results` from experiments/results.csv; do not edit -->\n"
DATA = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "imagenet": "ImageNet",
    "sst-fine": "SST fine",
    "sst-binary": "SST binary",
    "20newsgroups": "20 Newsgroups",
    "20newsgroups-bydate": "20 Newsgroups by date",
}
NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "densenet121": "DenseNet-121",
    "wide_resnet28_10": "Wide ResNet 28-10",
    "tree_lstm": "TreeLSTM",
    "gp_cnn": "GP CNN",
    "minilm": "MiniLM",
}
METHODS = {
    "none": "network as trained",
    "temperature": "temperature scaling (NLL)",
    "temperature_grid": "temperature scaling (paper's grid)",
    "vector": "vector scaling",
    "matrix": "matrix scaling",
    "svs": "structured vector scaling (probmetrics)",
    "sms": "structured matrix scaling (probmetrics)",
    "dirichlet": "Dirichlet",
    "spline": "spline",
    "gaussian_process": "Gaussian process",
    "double-head": "paper's head, no annealing",
    "annealing-double-head": "paper's head, beta0 1.2",
    "head": "staged head, logits alone",
    "head+features": "staged head, features",
    "head+opinion": "staged head, features and second opinion",
    "head+mirror": "staged head, both and the mirror view",
}
STAGES = {
    "temperature": "temperature",
    "stage: map": "+ class map",
    "stage: head": "+ temperature per sample",
    "stage: numbers": "+ numbers of the features",
    "stage: distances": "+ pool with distances to class means",
    "stage: opinion": "+ pool with heads trained beside",
    "head+opinion": "+ curve",
    "head+mirror": "+ mirror view",
}
EPOCHS = {"cifar10": 80, "cifar100": 80, "svhn": 40}  # of ResNet-50; other networks have fewer
REFERENCE = "cifar10-resnet50-cross_entropy-e80-s0"  # of Table 3
# The paper's Table 3: calibration period, ECE and overhead, percent.
PERIODS = {10: (0.97, 8.86), 20: (0.98, 3.80), 30: (1.01, 2.53),
           40: (0.97, 1.28), 50: (1.28, 1.28), 70: (1.29, 1.28)}  # fmt: skip
# The paper's Table 2: AUROC of cross entropy before and after a temperature, and of the annealed head, percent.
AUROC = {
    ("wide_resnet28_10", "test/gaussian_noise/5"): (74.73, 75.87, 92.60),
    ("wide_resnet28_10", "unknown/svhn"): (87.00, 85.48, 93.75),
    ("resnet101", "test/gaussian_noise/5"): (73.83, 73.99, 82.76),
    ("resnet101", "unknown/svhn"): (86.04, 85.43, 93.25),
}
SETS = {"test/gaussian_noise/5": "Gaussian noise, severity 5", "unknown/svhn": "SVHN"}
BAND = "In brackets: 5th to 95th percentile of the ECE of a perfectly calibrated model. Bold: not above that band."
Runs = Sequence[StoredRun]
Page = Callable[[pd.DataFrame, Runs], str]
Cell = Callable[[pd.Series], str]


# --- rows and cells


def row_of(run: str) -> str:
    """A run's name without its seed, or an ensemble's without its size.

    >>> row_of("svhn-resnet50-cross_entropy-e40-s12"), row_of("svhn-resnet50-brier-e40-ensemble3")
    ('svhn-resnet50-cross_entropy-e40', 'svhn-resnet50-brier-e40')
    """
    return re.sub(r"-(s|ensemble)\d+$", "", run)


def rows(runs: Runs) -> dict[str, StoredRun]:
    """The first run of every row."""
    found: dict[str, StoredRun] = {}
    for run in runs:
        found.setdefault(row_of(run.name), run)
    return found


def networks(runs: Runs) -> dict[str, StoredRun]:
    """The first run of every row of cross entropy."""
    return {row: run for row, run in rows(runs).items() if run.config.loss == "cross_entropy"}


def title_of(run: StoredRun, epochs: bool = True) -> str:
    """Data set, network and epochs as people write them. Epochs of short runs are shown always."""
    config = run.config
    title = f"{DATA.get(config.data, config.data)}, {NETWORKS.get(config.model, config.model)}"
    short = config.epochs < EPOCHS.get(config.data, 0)
    return f"{title}, {config.epochs} epochs" if epochs or short else title


def means(table: pd.DataFrame, row: str, *, ensemble: bool = False) -> pd.DataFrame:
    """Output x metric: the mean over the seeds of a row (or its ensemble), and "runs", how many there are."""
    own = table[(table.run.map(row_of) == row) & (table.run.str.contains("-ensemble") == ensemble)]
    found = own.pivot_table("value", "output", "metric")
    found["runs"] = own.groupby("output").run.nunique()
    found["delta_sd"] = own[own.metric == "delta"].groupby("output").value.std()
    return found


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *lines))


def percent(value: float, digits: int = 2) -> str:
    """0.1234 as 12.34."""
    return f"{100 * value:.{digits}f}"


def ece_cell(row: pd.Series, bold: bool = True) -> str:
    """1.23 (0.40 to 0.80), bold where not above the band; percent."""
    ece = percent(row.ece)
    strong = f"**{ece}**" if bold and row.ece <= row.ece_high else ece
    return f"{strong} ({percent(row.ece_low)} to {percent(row.ece_high)})"


# --- methods


def methods_page(table: pd.DataFrame, runs: Runs) -> str:
    """All post-hoc methods on the cross-entropy network of each row."""
    parts = ["# Calibration methods on the same networks\n"]
    delta = "difference in NLL to temperature scaling"
    head = ["method", "accuracy", "NLL", delta, "Brier", "ECE", "PHI", "runs"]
    for row, first in networks(runs).items():
        found, together = means(table, row), means(table, row, ensemble=True)
        lines = [_method(title, found.loc[name]) for name, title in METHODS.items() if name in found.index]
        for name, what in (("none", ""), ("temperature", ", then a temperature")):
            if name in together.index:
                size = f"ensemble of {found.loc['none'].runs:.0f}"
                lines.append(_method(f"{size}{what}", together.loc[name]))
        sizes = "{:,} train, {:,} calibrate, {:,} test".format(*first.certificate["sizes"])
        parts.append(f"## {title_of(first)}\n\n{sizes}.\n\n{markdown(head, lines)}")
    notes = [
        f"Percent for accuracy, ECE and PHI; means over runs (seeds). {BAND}",
        "Differences: mean over test samples with a 95 % interval, averaged over runs; ± is the deviation over runs.",
        "PHI: share of the raw network's log-loss that is removed. Ensembles are compared with their average member.",
        "The staged head keeps the predictions of what it calibrates; the mirror view averages two views first.",
    ]
    return "\n".join([*parts, "".join(f"- {note}\n" for note in notes)])


def _method(title: str, row: pd.Series) -> list[str]:
    spread = f" ± {row.delta_sd:.4f}" if row.runs > 1 and pd.notna(row.delta_sd) else ""
    delta = f"{row.delta:+.4f}{spread} [{row.delta_low:+.4f}, {row.delta_high:+.4f}]" if row.delta else ""
    numbers = [percent(row.accuracy), f"{row.nll:.4f}", f"**{delta}**" if row.delta_high < -5e-5 else delta]
    return [title, *numbers, f"{row.brier:.4f}", ece_cell(row), percent(row.phi, 1), f"{row.runs:.0f}"]


def readme_table(table: pd.DataFrame, runs: Runs) -> str:
    """The README's table: two networks, four methods."""
    lines = []
    for data in ("cifar10", "cifar100"):
        found = means(table, f"{data}-resnet50-cross_entropy-e80")
        for method in ("temperature", "sms", "annealing-double-head", "head+opinion"):
            row = found.loc[method]
            numbers = [percent(row.accuracy), f"{row.nll:.4f}", ece_cell(row, bold=False)]
            lines.append([f"{DATA[data]}, ResNet-50", METHODS[method], *numbers])
    return markdown(["network", "method", "accuracy", "NLL", "ECE"], lines)


OVERVIEW = {
    "none": "as trained",
    "temperature": "temperature",
    "sms": "SMS",
    "annealing-double-head": "paper's head",
    "head": "staged head, logits",
    "head+opinion": "and features, second opinion",
}


def overview_table(table: pd.DataFrame, runs: Runs) -> str:
    """NLL and ECE of a few methods on every cross-entropy network."""
    lines = []
    for row, first in networks(runs).items():
        found = means(table, row)
        own, cells = found.loc["none"], [_few(found, name) for name in OVERVIEW]
        lines.append([title_of(first, epochs=False), f"{own.runs:.0f}", percent(own.accuracy), *cells])
    return markdown(["network", "seeds", "accuracy", *OVERVIEW.values()], lines)


def losses_table(table: pd.DataFrame, runs: Runs) -> str:
    """The training losses on the same network, before and after calibration."""
    shown, lines = ("none", "temperature", "head"), []
    by_row = rows(runs).items()
    several = {run.config.data for _, run in by_row if run.config.loss != "cross_entropy"}
    for row, first in sorted(by_row, key=lambda one: (one[1].config.data, one[1].config.loss)):
        config, found = first.config, means(table, row)
        if config.data in several and config.model == "resnet50":
            loss = {"flsd53": "FLSD-53", "mmce": "MMCE"}.get(config.loss, config.loss.replace("_", " "))
            own = found.loc["none"]
            cells = [percent(own.accuracy), *(_few(found, name) for name in shown), f"{own.runs:.0f}"]
            lines.append([DATA[config.data], loss, *cells])
    head = ["data", "loss", "accuracy", "as trained", "temperature", "staged head, logits", "seeds"]
    return markdown(head, lines)


def _few(found: pd.DataFrame, output: str) -> str:
    """NLL / ECE, the ECE bold where not above the band of a perfect model."""
    if output not in found.index:
        return "-"
    row = found.loc[output]
    return f"{row.nll:.4f} / {ece_cell(row).partition(' ')[0]}"


# --- the paper


def paper_page(table: pd.DataFrame, runs: Runs) -> str:
    """The paper's tables with its numbers beside ours."""
    periods = _periods(means(table[table.run == REFERENCE], row_of(REFERENCE)))
    parts = [
        "# The paper's tables beside ours\n",
        "After the slash the paper's number. It fits temperatures on a grid of 0.1.\n",
        "## Table 1: ECE of the predicted class, percent\n",
        f"{_eces(table, runs, 1, ece_cell)}\n{BAND}\n",
        "## Table 2: AUROC of telling clean test images of CIFAR-10 from shifted ones, percent\n",
        f"{_aurocs()}\nBy the confidence. The paper's head was not run on shifted images here; networks of MMCE, "
        "Brier and focal loss neither.\n",
        f"## Table 3: calibration period k, CIFAR-10, ResNet-50\n\n{periods}",
        "## Table 4: ECE of all components, percent\n",
        _eces(table, runs, 4, lambda row: percent(row.ece_all)),
        "All N K probabilities in one set of bins, the error divided by N, as the paper has it.\n",
        "## Where the paper disagrees with itself\n",
        "Table 3 gives 0.97 for k = 10 where Table 1 gives 0.50, and the same overhead for k = 40, 50 and 70. "
        "Caption, text and rows of Table 2 name different networks. For SVHN, Wide ResNet 28-10 and Brier loss, a "
        "temperature raises the ECE in Table 1.\n",
    ]
    return "\n".join(parts)


def _eces(table: pd.DataFrame, runs: Runs, number: int, cell: Cell) -> str:
    """Table 1 or 4: the rows that were run here."""
    printed = pd.read_csv(HERE / "paper.csv").set_index(["table", "data", "model", "method"]).loc[number]
    lines = []
    for row, first in rows(runs).items():
        config, found = first.config, means(table, row)
        where, loss = (config.data, config.model), config.loss.replace("_", "-")
        if (*where, loss) not in printed.index or config.mixup:
            continue
        own = printed.loc[(*where, loss)]
        theirs = {"none": own.before, "temperature": None, "temperature_grid": own.after}
        heads = ("double-head", "annealing-double-head") if loss == "cross-entropy" else ()
        theirs |= {name: printed.loc[(*where, name)].before for name in heads}
        cells = [_beside(found, name, value, cell) for name, value in theirs.items()]
        lines.append([title_of(first, epochs=False), loss, *cells, *[""] * (5 - len(cells))])
    head = ["as trained", "temperature (NLL)", "temperature (grid)", "no annealing", "beta0 1.2"]
    return markdown(["row", "loss", *head], lines)


def _aurocs() -> str:
    found = pd.read_csv(HERE / "auroc.csv").pivot(index=["run", "set"], columns="output", values="auroc")
    lines = []
    for (name, shift), row in found.iterrows():
        run = StoredRun(name)
        theirs = [f" / {value:.2f}" for value in AUROC.get((run.config.model, shift), ())] or [""] * 3
        ours = [percent(row[output]) for output in ("none", "temperature", "head")]
        cells = [ours[0] + theirs[0], ours[1] + theirs[1], ours[2], f"-{theirs[2]}"]
        lines.append([title_of(run, epochs=False), SETS[shift], *cells])
    head = ["as trained", "temperature (NLL)", "staged head, logits", "paper's head, beta0 1.2"]
    return markdown(["row", "shift", *head], lines)


def _beside(found: pd.DataFrame, output: str, printed: float | None, cell: Cell = ece_cell) -> str:
    ours = cell(found.loc[output]) if output in found.index else "-"
    return ours if printed is None else f"{ours} / {printed:.2f}"


def _periods(found: pd.DataFrame) -> str:
    lines = []
    for k, (ece, overhead) in PERIODS.items():
        name = "annealing-double-head" + (f"-k{k}" if k != 10 else "")
        nll = f"{found.loc[name].nll:.4f}" if name in found.index else "-"
        lines.append([str(k), _beside(found, name, ece), nll, f"{overhead:.2f}"])
    return markdown(["k", "ECE, percent / the paper's", "NLL", "the paper's overhead, percent"], lines)


def runs_page(table: pd.DataFrame, runs: Runs) -> str:
    """One line per run: what was trained, how long, on what, by which code."""
    accuracy = table[(table.output == "none") & (table.metric == "accuracy")].set_index("run").value
    lines = []
    for run in runs:
        about, place = run.certificate, run.certificate["environment"]
        cells = [
            percent(about["train_accuracy"]),
            percent(accuracy[run.name]),
            f"{about['train_seconds']:.0f}",
        ]
        cells += [place["device"], place["torch"], place["commit"], place["time"][:10]]
        lines.append([f"`{run.name}`", *cells])
    head = ["run", "train accuracy", "test accuracy", "seconds", "device", "torch", "commit", "date"]
    note = "Several runs shared one device, so seconds say little about speed.\n"
    return f"# Runs\n\n{markdown(head, lines)}\n{note}"


# --- the staged head


def stages_page(table: pd.DataFrame, runs: Runs) -> str:
    """What each stage of the staged head is worth, and what keeping the predictions costs."""
    wide = table.pivot_table("value", ["run", "output"], "metric")
    needed = [name for name in STAGES if "mirror" not in name]
    shown = [run for run in runs if all((run.name, name) in wide.index for name in needed)]
    wide["change"] = wide.nll / wide.nll.xs("temperature", level="output") - 1
    wide["row"] = wide.index.get_level_values("run").map(row_of)
    by_row = wide.loc[[run.name for run in shown]].groupby(["row", "output"])[["change", "ece"]].mean()
    cells = by_row.apply(lambda one: f"{100 * one.change:+.2f} / {percent(one.ece)}", axis=1)
    lines = [
        [title_of(first, epochs=False), *(cells.get((row, name), "-") for name in STAGES)]
        for row, first in rows(shown).items()
    ]
    kept = []
    for run in shown:
        own, free = wide.loc[run.name, "head+opinion"], wide.loc[run.name, "head+opinion, best"]
        shares = [f"{percent(own[key])} / {percent(free[key])}" for key in ("ece", "accuracy")]
        kept.append([f"`{run.name}`", f"{own.nll:.4f} / {free.nll:.4f}", *shares])
    return "\n".join(
        [
            "# The stages of the staged head\n",
            "## What each stage is worth\n",
            "Change of the test NLL against temperature scaling, percent / ECE, percent; means over seeds. Each column "
            "allows one more stage, and the head uses it unless it loses on held-back calibration data.\n",
            markdown(["network", *STAGES.values()], lines),
            '## `keep="predictions"` and `keep="best"`\n',
            "The staged head with features and second opinion: the default, which keeps every prediction, / "
            '`keep="best"`.\n',
            markdown(["run", "NLL", "ECE", "accuracy"], kept),
        ]
    )


# --- writing

FILLED: dict[str, tuple[str, Page]] = {  # tables in pages that are written by hand
    "readme": ("README.md", readme_table),
    "overview": ("docs/results/index.md", overview_table),
    "losses": ("docs/results/index.md", losses_table),
}
PAGES: dict[str, Page] = {
    "methods": methods_page,
    "paper": paper_page,
    "runs": runs_page,
    "stages": stages_page,
}


def fill(page: str, name: str, text: str) -> str:
    """The page with `text` between `<!-- results: name -->` and the next `<!-- end -->`.

    >>> fill("a <!-- results: x -->old<!-- end -->", "x", "new")
    'a <!-- results: x -->\\n\\nnew\\n\\n<!-- end -->'
    """
    before, _, rest = page.partition(f"<!-- results: {name} -->")
    after = rest.partition("<!-- end -->")[2]
    return f"{before}<!-- results: {name} -->\n\n{text.strip()}\n\n<!-- end -->{after}"
