"""Tables of Markdown, made from results.csv and its siblings. Pages are written by hand and mark the places of tables.

`paper.csv` has the numbers of the paper. Tables 1 and 4: ECE before and after temperature scaling, and the temperature.
Table 2: AUROC. Table 3: ECE and overhead. Annealing Double-Head: An Architecture for Online Calibration of Deep Neural
Networks, by Guo, Draper and De Iorio. Nothing in it was measured here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from typing import Any

import pandas as pd
from results import HERE, StoredRun

ROOT = HERE.parent
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "sst-fine": "SST fine",
        "sst-binary": "SST binary", "20newsgroups-bydate": "20 Newsgroups by date"}  # fmt: skip
NETWORKS = {"resnet50": "ResNet-50", "resnet101": "ResNet-101", "densenet121": "DenseNet-121",
            "wide_resnet28_10": "Wide ResNet 28-10", "tree_lstm": "TreeLSTM", "gp_cnn": "GP CNN",
            "minilm": "MiniLM"}  # fmt: skip
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
SHIFTS = {"gaussian_noise:5": "noise", "ood:svhn": "SVHN"}  # of Table 2
SHIFTED = {  # its outputs
    "main": "",
    "annealing-double-head": METHODS["annealing-double-head"],
    "annealing-double-head-noise": "the same, half of each calibration batch noisy",
    "annealing-double-head-broad": "the same, half perturbed in other ways",
    "auto": METHODS["head+opinion"],
}
OVERVIEW = {
    "none": "as trained",
    "temperature": "temperature",
    "sms": "SMS",
    "annealing-double-head": "paper's head",
    "head": "staged head, logits",
    "head+opinion": "and features, second opinion",
}
Runs = Sequence[StoredRun]
Cell = Callable[[pd.Series], str]
Lines = Iterator[dict[str, str]]  # by the titles of the columns


def row_of(run: str) -> str:
    """A run's name without its seed.

    >>> row_of("svhn-resnet50-cross_entropy-e40-s12")
    'svhn-resnet50-cross_entropy-e40'
    """
    return re.sub(r"-s\d+$", "", run)


def rows(runs: Runs) -> dict[str, StoredRun]:
    """The first run of every row."""
    return {row: next(members) for row, members in groupby(runs, lambda run: row_of(run.name))}


def networks(runs: Runs) -> dict[str, StoredRun]:
    """The first run of every row of cross entropy."""
    return rows([run for run in runs if run.config.loss == "cross_entropy"])


def title_of(run: StoredRun, epochs: bool = False) -> str:
    """Data set, network and epochs as people write them. Epochs of short runs are shown always."""
    config = run.config
    title = f"{DATA.get(config.data, config.data)}, {NETWORKS.get(config.model, config.model)}"
    short = config.epochs < EPOCHS.get(config.data, 0)
    return f"{title}, {config.epochs} epochs" if epochs or short else title


def means(table: pd.DataFrame) -> pd.DataFrame:
    """(row, output) x metric: means over seeds, "runs", how many there are, and "delta_sd", the deviation of delta."""
    table = table.assign(row=table.run.map(row_of))
    found = table.pivot_table("value", ["row", "output"], "metric")
    found["runs"] = table.groupby(["row", "output"]).run.nunique()
    found["delta_sd"] = table[table.metric == "delta"].groupby(["row", "output"]).value.std()
    return found


def markdown(lines: Any) -> str:
    """A Markdown table of lines whose keys are the titles of the columns."""
    frame = pd.DataFrame(lines)
    cells = [list(frame), ["---"] * len(frame.columns), *frame.to_numpy().tolist()]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def percent(value: float, digits: int = 2) -> str:
    """0.1234 as 12.34."""
    return f"{100 * value:.{digits}f}"


def ece_cell(row: pd.Series) -> str:
    """1.23 (0.40 to 0.80), bold where not above the band; percent."""
    ece, low, high = map(percent, row[["ece", "ece_low", "ece_high"]])
    return f"**{ece}** ({low} to {high})" if row.ece <= row.ece_high else f"{ece} ({low} to {high})"


def cells(found: pd.DataFrame) -> pd.DataFrame:
    """`means` as they are printed; "short" is NLL / ECE."""

    def line(row: pd.Series) -> dict[str, str]:
        spread = f" ± {row.delta_sd:.4f}" if row.runs > 1 and pd.notna(row.delta_sd) else ""
        delta = f"{row.delta:+.4f}{spread} [{row.delta_low:+.4f}, {row.delta_high:+.4f}]" if row.delta else ""
        return {
            "accuracy": percent(row.accuracy),
            "NLL": f"{row.nll:.4f}",
            "difference in NLL to temperature scaling": f"**{delta}**" if row.delta_high < -5e-5 else delta,
            "Brier": f"{row.brier:.4f}",
            "ECE": ece_cell(row),
            "PHI": percent(row.phi, 1),
            "runs": f"{row.runs:.0f}",
            "short": f"{row.nll:.4f} / {ece_cell(row).partition(' ')[0]}",
        }

    return found.apply(line, axis=1, result_type="expand")


def methods_table(table: pd.DataFrame, runs: Runs) -> str:
    """All post-hoc methods on the cross-entropy network of each row, under a heading each."""
    parts, every = [], cells(means(table)).drop(columns="short")
    for row, first in networks(runs).items():
        shown = every.loc[row].reindex(METHODS).dropna().rename(METHODS)
        size = shown["runs"].iloc[0]
        if f"{row}-ensemble{size}" in every.index:
            names = {"none": f"ensemble of {size}", "temperature": f"ensemble of {size}, then a temperature"}
            shown = pd.concat([shown, every.loc[f"{row}-ensemble{size}"].rename(names)])
        sizes = "{:,} train, {:,} calibrate, {:,} test".format(*first.certificate["sizes"])
        lines = markdown(shown.rename_axis("method").reset_index())
        parts.append(f"## {title_of(first, epochs=True)}\n\n{sizes}.\n\n{lines}")
    return "\n".join(parts)


def readme_table(table: pd.DataFrame, runs: Runs) -> Lines:
    """The README's table: two networks, four methods."""
    found = cells(means(table)).replace(r"\*", "", regex=True)[["accuracy", "NLL", "ECE"]]
    methods = ("temperature", "sms", "annealing-double-head", "head+opinion")
    for data, method in product(("cifar10", "cifar100"), methods):
        line = {"network": f"{DATA[data]}, ResNet-50", "method": METHODS[method]}
        yield line | found.loc[f"{data}-resnet50-cross_entropy-e80", method].to_dict()


def overview_table(table: pd.DataFrame, runs: Runs) -> pd.DataFrame:
    """NLL and ECE of a few methods on every cross-entropy network."""
    found, firsts = cells(means(table)), networks(runs)
    shown = found.short.unstack().loc[list(firsts), list(OVERVIEW)].fillna("-").rename(columns=OVERVIEW)
    own = found.xs("none", level="output").loc[shown.index]
    about = {"network": [*map(title_of, firsts.values())], "seeds": own["runs"], "accuracy": own["accuracy"]}
    return pd.DataFrame(about).join(shown)


def losses_table(table: pd.DataFrame, runs: Runs) -> Lines:
    """The training losses on the same network, before and after calibration."""
    found = cells(means(table))
    by_row = {row: run.config for row, run in rows(runs).items() if run.config.model == "resnet50"}
    several = {config.data for config in by_row.values() if config.loss != "cross_entropy"}
    for row, config in by_row.items():
        if config.data in several:
            own = found.loc[row]
            loss = {"flsd53": "FLSD-53", "mmce": "MMCE"}.get(config.loss, config.loss.replace("_", " "))
            line = {"data": DATA[config.data], "loss": loss, "accuracy": own.accuracy["none"]}
            line |= {OVERVIEW[name]: own.short[name] for name in ("none", "temperature", "head")}
            yield line | {"seeds": own.runs["none"]}


def paper(number: int) -> pd.DataFrame:
    """(data, model, method) x number: a table of the paper, in percent."""
    return pd.read_csv(HERE / "paper.csv").set_index(["table", "data", "model", "method"]).loc[number]


def eces_table(number: int, cell: Cell, table: pd.DataFrame, runs: Runs) -> Lines:
    """The paper's Table 1 or 4: the rows that were run here, ours before theirs."""
    printed, every = paper(number), means(table)
    for row, first in rows(runs).items():
        where, loss = (first.config.data, first.config.model), first.config.loss.replace("_", "-")
        if (*where, loss) not in printed.index:
            continue
        found, theirs = every.loc[row], printed.loc[(*where, loss)]
        line = {
            "row": title_of(first),
            "loss": loss,
            "as trained": _beside(found, "none", theirs.before, cell),
            "temperature (NLL)": cell(found.loc["temperature"]),
            "temperature (grid)": _beside(found, "temperature_grid", theirs.after, cell),
        }
        for name, title in (("double-head", "no annealing"), ("annealing-double-head", "beta0 1.2")):
            trained = loss == "cross-entropy"
            line[title] = _beside(found, name, printed.before[(*where, name)], cell) if trained else ""
        yield line


def _beside(found: pd.DataFrame, output: str, printed: float, cell: Cell = ece_cell) -> str:
    ours = cell(found.loc[output]) if output in found.index else "-"
    return f"{ours} / {printed:.2f}"


def aurocs_table(table: pd.DataFrame, runs: Runs) -> Lines:
    """The paper's Table 2: how well confidence tells clean test images from shifted ones, by network and method."""
    printed = paper(2).rename(columns={"before": "", "after": "+T"})
    accuracies = table[table.metric == "accuracy"].set_index(["run", "output"]).value
    for run in [run for run in runs if "ood:svhn" in run.certificate.get("shift", {})]:
        measured, loss = run.certificate["shift"], run.config.loss.replace("_", "-")
        for output in [name for name in SHIFTED if name in measured["ood:svhn"]]:
            method, title = (loss, loss) if output == "main" else (output, SHIFTED[output])
            row = accuracies[run.name, {"main": "none", "auto": "head+opinion"}.get(output, output)]
            line = {"row": title_of(run), "method": title, "accuracy": percent(row)}
            for (shift, found), suffix in product(measured.items(), ("", "+T")):
                where = (shift, run.config.model, method)
                theirs = f" / {printed.loc[where, suffix]:.2f}" if where in printed.index else ""
                line[SHIFTS[shift] + suffix.replace("+", ", ")] = percent(found[output + suffix]) + theirs
            yield line


def periods_table(table: pd.DataFrame, runs: Runs) -> Lines:
    """The paper's Table 3."""
    found = means(table[table.run == REFERENCE]).loc[row_of(REFERENCE)]
    for (_, _, name), printed in paper(3).iterrows():
        yield {
            "k": name.partition("-k")[2] or "10",
            "ECE, percent / the paper's": _beside(found, name, printed.before),
            "NLL": f"{found.nll[name]:.4f}",
            "the paper's overhead, percent": f"{printed.after:.2f}",
        }


def runs_table(table: pd.DataFrame, runs: Runs) -> Lines:
    """One line per run: what was trained, how long, on what, by which code."""
    accuracies = table[table.metric == "accuracy"].set_index(["run", "output"]).value
    for run in runs:
        about, place = run.certificate, run.certificate["environment"]
        yield {
            "run": f"`{run.name}`",
            "train accuracy": percent(about["train_accuracy"]),
            "test accuracy": percent(accuracies[run.name, "none"]),
            "seconds": f"{about['train_seconds']:.0f}",
            **{key: place[key] for key in ("device", "torch", "commit")},
            "date": place["time"][:10],
        }


def stages_table(table: pd.DataFrame, runs: Runs) -> pd.DataFrame:
    """What each stage of the staged head is worth."""
    wide, firsts = table.pivot_table("value", ["run", "output"], "metric"), networks(runs)
    wide["change"] = wide.nll / wide.nll.xs("temperature", level="output") - 1
    by_row = wide[["change", "ece"]].rename(row_of, level="run").groupby(level=["run", "output"]).mean()
    cells = by_row.apply(lambda one: f"{100 * one.change:+.2f} / {percent(one.ece)}", axis=1)
    found = cells.unstack("output").loc[list(firsts), list(STAGES)].fillna("-").rename(columns=STAGES)
    found.insert(0, "network", [*map(title_of, firsts.values())])
    return found


def kept_table(table: pd.DataFrame, runs: Runs) -> pd.DataFrame:
    """What keeping the predictions costs."""
    found = []
    for output in ("head+opinion", "head+opinion, best"):
        own = table[table.output == output].pivot(index="run", columns="metric", values="value")
        shown = {"NLL": own.nll.map("{:.4f}".format)}
        shown |= {"ECE": own.ece.map(percent), "accuracy": own.accuracy.map(percent)}
        found.append(pd.DataFrame(shown).rename("`{}`".format))
    return (found[0] + " / " + found[1]).reset_index()


Tables = Mapping[str, tuple[str, Callable[..., Any]]]  # by name: page and function of what `publish` is given
TABLES: Tables = {
    "readme": ("README.md", readme_table),
    "overview": ("docs/results/index.md", overview_table),
    "losses": ("docs/results/index.md", losses_table),
    "methods": ("docs/results/methods.md", methods_table),
    "paper-1": ("docs/results/paper.md", partial(eces_table, 1, ece_cell)),
    "paper-2": ("docs/results/paper.md", aurocs_table),
    "paper-3": ("docs/results/paper.md", periods_table),
    "paper-4": ("docs/results/paper.md", partial(eces_table, 4, lambda row: percent(row.ece_all))),
    "runs": ("docs/results/runs.md", runs_table),
    "stages": ("docs/results/stages.md", stages_table),
    "kept": ("docs/results/stages.md", kept_table),
}


def publish(tables: Tables, *data: Any) -> None:
    """Put tables into their pages."""
    for name, (file, made) in tables.items():
        page = ROOT / file
        page.write_text(fill(page.read_text(), name, made(*data)))


def fill(page: str, name: str, shown: Any) -> str:
    """The page with a text or table between `<!-- results: name -->` and the next `<!-- end -->`.

    >>> fill("a <!-- results: x -->old<!-- end -->", "x", "new")
    'a <!-- results: x -->\\n\\nnew\\n\\n<!-- end -->'
    """
    before, _, rest = page.partition(f"<!-- results: {name} -->")
    after, text = rest.partition("<!-- end -->")[2], shown if isinstance(shown, str) else markdown(shown)
    return f"{before}<!-- results: {name} -->\n\n{text.strip()}\n\n<!-- end -->{after}"
