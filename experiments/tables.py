"""Tables as pivots of results.csv: one page of Markdown each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from paper import LOSSES, TABLE_1, TABLE_3_ECE, TABLE_3_OVERHEAD
from results import HERE, StoredRun, stored_runs

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
    "fashion": "Fashion-MNIST",
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
REFERENCE = "cifar10-resnet50-cross_entropy-e80-s0"  # of Table 3
BAND = "In brackets: 5th to 95th percentile of the ECE of a perfectly calibrated model. Bold: not above that band."


def row_of(run: str) -> str:
    """A run's name without its seed, or an ensemble's without its size.

    >>> row_of("svhn-resnet50-cross_entropy-e40-s12"), row_of("svhn-resnet50-brier-e40-ensemble3")
    ('svhn-resnet50-cross_entropy-e40', 'svhn-resnet50-brier-e40')
    """
    return re.sub(r"-(s|ensemble)\d+$", "", run)


def title_of(run: StoredRun) -> str:
    """Data set, network and epochs as people write them."""
    config = run.config
    return f"{DATA.get(config.data, config.data)}, {NETWORKS.get(config.model, config.model)}, {config.epochs} epochs"


def means(table: pd.DataFrame, row: str, *, ensemble: bool = False, test_set: str = "test") -> pd.DataFrame:
    """Output x metric: the mean over the seeds of a row (or its ensemble), and "runs", how many there are."""
    rows = table[(table.run.map(row_of) == row) & (table.test_set == test_set)]
    rows = rows[rows.run.str.contains("-ensemble") == ensemble]
    found = rows.pivot_table("value", "output", "metric")
    found["runs"] = rows.groupby("output").run.nunique()
    deltas = rows[rows.metric == "delta"]
    found["delta_sd"] = deltas.groupby("output").value.std()
    return found


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *lines))


def ece_cell(row: pd.Series) -> str:
    """1.23 (0.40 to 0.80), bold where not above the band; percent."""
    ece, low, high = (100 * row[key] for key in ("ece", "ece_low", "ece_high"))
    return f"{f'**{ece:.2f}**' if ece <= high else f'{ece:.2f}'} ({low:.2f} to {high:.2f})"


def methods_page(table: pd.DataFrame, runs: Sequence[StoredRun]) -> str:
    """All post-hoc methods on the cross-entropy network of each row."""
    parts = ["# Calibration methods on the same networks\n"]
    head = [
        "method",
        "accuracy",
        "NLL",
        "difference in NLL to temperature scaling",
        "Brier",
        "ECE",
        "PHI",
        "runs",
    ]
    for row in dict.fromkeys(row_of(run.name) for run in runs):
        first = next(run for run in runs if row_of(run.name) == row)
        if first.config.loss != "cross_entropy" or "method" in first.certificate:
            continue
        found = means(table, row)
        lines = [
            _method_line(title, found.loc[name]) for name, title in METHODS.items() if name in found.index
        ]
        together = means(table, row, ensemble=True)
        for name, what in (("none", ""), ("temperature", ", then a temperature")):
            if name in together.index:
                size = re.search(
                    r"ensemble(\d+)", " ".join(table.run[table.run.str.startswith(f"{row}-ensemble")])
                )
                lines.append(_method_line(f"ensemble of {size[1] if size else ''}{what}", together.loc[name]))
        sizes = "{:,} train, {:,} calibrate, {:,} test".format(*first.certificate["sizes"])
        parts.append(f"## {title_of(first)}\n\n{sizes}.\n\n{markdown(head, lines)}")
    notes = [
        f"Percent for accuracy, ECE and PHI; means over runs (seeds). {BAND}",
        "Differences: mean over test samples with a 95 % interval, averaged over runs; ± is the deviation over runs.",
        "PHI: share of the raw network's log-loss that is removed. Ensembles are compared with their average member.",
        "The staged head keeps the predictions of what it calibrates; the mirror view averages two views first.",
    ]
    return "\n".join([*parts, "".join(f"- {note}\n" for note in notes)])


def _method_line(title: str, row: pd.Series) -> list[str]:
    spread = f" ± {row.delta_sd:.4f}" if row.runs > 1 and pd.notna(row.delta_sd) else ""
    clear = row.delta_high < 0
    delta = f"{row.delta:+.4f}{spread} [{row.delta_low:+.4f}, {row.delta_high:+.4f}]" if row.delta else ""
    numbers = [f"{100 * row.accuracy:.2f}", f"{row.nll:.4f}", f"**{delta}**" if clear else delta]
    return [title, *numbers, f"{row.brier:.4f}", ece_cell(row), f"{100 * row.phi:.1f}", f"{row.runs:.0f}"]


def paper_page(table: pd.DataFrame, runs: Sequence[StoredRun]) -> str:
    """The paper's Tables 1 and 3 with its numbers beside ours."""
    head = [
        "row",
        "loss",
        "as trained",
        "temperature (NLL)",
        "temperature (grid)",
        "no annealing",
        "beta0 1.2",
    ]
    lines = []
    for row in dict.fromkeys(row_of(run.name) for run in runs):
        config = next(run for run in runs if row_of(run.name) == row).config
        loss = config.loss.replace("_", "-")
        if (config.data, config.model) not in TABLE_1 or loss not in LOSSES or config.mixup:
            continue
        printed, found = TABLE_1[config.data, config.model], means(table, row)
        cell = printed.cell(loss)
        heads = {"double-head": printed.no_annealing, "annealing-double-head": printed.annealing}
        theirs = {"none": cell.before, "temperature": None, "temperature_grid": cell.after, **heads}
        title = f"{DATA[config.data]}, {NETWORKS[config.model]}"
        cells = [_beside(found, name, value) for name, value in theirs.items()]
        lines.append([title, loss, *cells])
    return "\n".join(
        [
            "# The paper's tables beside ours\n",
            "## Table 1: ECE of the predicted class, percent\n",
            markdown(head, lines),
            "Ours with the band of a perfect model; after the slash the paper's number. The paper fits temperatures "
            "on a grid of 0.1.\n",
            "## Table 3: calibration period k, CIFAR-10, ResNet-50\n",
            _periods(table),
        ]
    )


def _beside(found: pd.DataFrame, output: str, printed: float | None) -> str:
    ours = ece_cell(found.loc[output]) if output in found.index else "-"
    return ours if printed is None else f"{ours} / {printed:.2f}"


def _periods(table: pd.DataFrame) -> str:
    found = means(table[table.run == REFERENCE], row_of(REFERENCE))
    lines = []
    for k, printed in TABLE_3_ECE.items():
        name = "annealing-double-head" + (f"-k{k}" if k != 10 else "")
        one = found.loc[[name]] if name in found.index else found.iloc[:0]
        nll = f"{one.nll.iloc[0]:.4f}" if len(one) else "-"
        lines.append([str(k), _beside(one, name, printed), nll, f"{TABLE_3_OVERHEAD[k]:.2f}"])
    return markdown(["k", "ECE, percent / the paper's", "NLL", "the paper's overhead, percent"], lines)


def shift_page(table: pd.DataFrame, runs: Sequence[StoredRun]) -> str:
    """Mean ECE and AUROC over shifted test sets, where some were measured."""
    shifted = table[table.test_set != "test"]
    lines = []
    for (run, output), rows in shifted.groupby(["run", "output"], sort=False):
        mean = rows.groupby("metric").value.mean()
        shown = [f"{100 * mean[key]:.2f}" if key in mean else "-" for key in ("ece", "auroc")]
        lines.append([str(run), str(output), *shown, str(rows.test_set.nunique())])
    head = ["run", "output", "mean ECE", "mean AUROC against clean images", "test sets"]
    return f"# Distribution shift\n\n{markdown(head, lines)}"


def runs_page(table: pd.DataFrame, runs: Sequence[StoredRun]) -> str:
    """One line per run: what was trained, how long, on what, by which code."""
    lines = []
    for run in runs:
        about, place = run.certificate, run.certificate["environment"]
        found = means(table[table.run == run.name], row_of(run.name))
        accuracy = [f"{100 * value:.2f}" for value in (about["train_accuracy"], found.loc["none"].accuracy)]
        what = [f"`{run.name}`", *accuracy, f"{about['train_seconds']:.0f}", place["device"], place["torch"]]
        lines.append([*what, place["commit"], place["time"][:10]])
    head = ["run", "train accuracy", "test accuracy", "seconds", "device", "torch", "commit", "date"]
    note = "Several runs shared one device, so seconds say little about speed.\n"
    return f"# Runs\n\n{markdown(head, lines)}\n{note}"


Page = Callable[[pd.DataFrame, Sequence[StoredRun]], str]
PAGES: dict[str, Page] = {
    "methods": methods_page,
    "paper": paper_page,
    "runs": runs_page,
    "shift": shift_page,
}


README_ROWS = ("cifar10-resnet50-cross_entropy-e80", "cifar100-resnet50-cross_entropy-e80")
README_METHODS = ("temperature", "sms", "annealing-double-head", "head+opinion")


def readme_table(table: pd.DataFrame) -> str:
    """The README's table: two networks, four methods."""
    lines = ["| network | method | accuracy | NLL | ECE |", "| --- | --- | --- | --- | --- |"]
    for row in README_ROWS:
        found, data, network = means(table, row), *row.split("-")[:2]
        for method in README_METHODS:
            numbers = found.loc[method]
            band = f"{100 * numbers.ece_low:.2f} to {100 * numbers.ece_high:.2f}"
            cells = (
                f"{DATA[data]}, {NETWORKS[network]}",
                METHODS[method],
                f"{100 * numbers.accuracy:.2f}",
                f"{numbers.nll:.4f}",
                f"{100 * numbers.ece:.2f} ({band})",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: str, name: str, text: str) -> str:
    """The page with `text` between `<!-- results: name -->` and the next `<!-- end -->`.

    >>> fill("a <!-- results: x -->old<!-- end -->", "x", "new")
    'a <!-- results: x -->\\n\\nnew\\n\\n<!-- end -->'
    """
    before, _, rest = page.partition(f"<!-- results: {name} -->")
    after = rest.partition("<!-- end -->")[2]
    return f"{before}<!-- results: {name} -->\n\n{text}\n\n<!-- end -->{after}"


def write_pages(
    table: pd.DataFrame, output: Path, pages: Mapping[str, Page], folder: Path = HERE
) -> list[str]:
    """Write every page that has something to show; returns their names."""
    runs, written = stored_runs(folder), []
    for name, page in pages.items():
        if name == "shift" and not (table.test_set != "test").any():
            continue
        (output / f"{name}.md").write_text(MADE + page(table, runs))
        written.append(name)
    return written
