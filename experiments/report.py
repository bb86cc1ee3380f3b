"""docs/results/index.md: the text of report.md with numbers that are looked up in committed files.

In the template `{word}` is a text made here, and `{figure: caption}` a picture of that name, left out with its caption
where it could not be drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from committed import RESULTS, Row, Run, mean_shift, numbers
from disagreements import disagreements, said
from figures import FIGURES, GRADIENT_BETAS, SWEEP, gradient_sample, sweep, with_gradients
from guard_search import read_search, search_text
from guards import guard_text, rows_with_guards
from head_ablation import ablation_text
from headline import between
from other_networks import only_brief
from paper import ODDITIES, TABLE_1
from post_hoc import post_hoc_text
from seen import FAMILY_UNSEEN, KIND_UNSEEN
from shift import NOT_NOISE, evaluated, rows_with_shift, sets_of, shift_summary
from tables import (
    AUTO,
    PAPER_SOURCES,
    RIVALS,
    Rows,
    Source,
    Table,
    paper_order,
    reference,
    row_title,
    title_of,
)
from withdrawal import first_run

from doublehead.data import FAMILIES

TEMPLATE = Path(__file__).with_suffix(".md")
SEEDS_WANTED = 3
PAPER_EPOCHS = 200  # of its image networks
NO_MIXUP = ("20newsgroups", "sst-")  # words do not mix


def page(
    rows: Rows,
    runs: Sequence[Run],
    tables: Mapping[str, Table],
    drawn: Sequence[str],
    results: Path = RESULTS,
    brief: Sequence[Run] = (),
) -> str:
    """The whole report; `drawn` names the figures that could be drawn, `brief` are trials that are no results."""
    values = {
        **facts(rows, runs),
        **{name: with_notes(tables[name]) for name in ("headline", "targets", "imagenet")},
        "shift_table": with_notes(tables["shift"]),
        "shift_text": shift_text(rows),
        "guard_text": guard_text(rows),
        "guard_table": with_notes(tables["guards"]) if rows_with_guards(rows) else "",
        "guard_search": search(tables, results),
        "post_hoc": fitted_after(tables, results),
        "head_ablation": choices(tables, results),
        "auto_table": with_notes(tables["auto"]),
        "candidates": with_notes(tables["candidates"]),
        "networks": with_notes(tables["other-networks"]),
        "beta_text": beta_text(rows),
        "gaps": bullets(gaps(rows, brief)),
        "first_run": first_run(rows),
        "disagreements": bullets(disagreements(rows)),
        "oddities": bullets(ODDITIES),
    }
    text = re.sub(r"\{(\w+)\}", lambda found: values[found[1]], TEMPLATE.read_text())
    text = re.sub(r"\{([\w-]+): ([^{}]+)\}", lambda found: picture(drawn, found[1], found[2]), text)
    return re.sub(r"\n{3,}", "\n\n", text)


def with_notes(table: Table) -> str:
    """A table and its notes, without its title."""
    return f"{table.markdown()}\n{bullets(table.notes)}"


def search(tables: Mapping[str, Table], results: Path) -> str:
    """The search for the guard's settings, where its figures were kept."""
    found = search_text(read_search(results))
    return f"{found} [All that was tried](guard-search.md)." if "guard-search" in tables else ""


def fitted_after(tables: Mapping[str, Table], results: Path) -> str:
    """Calibrators fitted after training, where they were measured."""
    return (
        f"{post_hoc_text(results)}\n\n{with_notes(tables['post-hoc'])}"
        if "post-hoc" in tables
        else "Not measured."
    )


def choices(tables: Mapping[str, Table], results: Path) -> str:
    """The choices behind `fit_head`, where they were measured."""
    if "head-ablation" not in tables:
        return "Not measured."
    return f"{ablation_text(results)}\n\n{with_notes(tables['head-ablation'])}"


def bullets(lines: Sequence[str]) -> str:
    """One point a line."""
    return "\n".join(f"- {line}" for line in lines)


def picture(drawn: Sequence[str], name: str, caption: str) -> str:
    """A figure with its caption, or nothing where it could not be drawn."""
    if name not in FIGURES:
        raise ValueError(f"{TEMPLATE.name} must name figures of FIGURES, got {name!r}")
    return f"![{name}](figures/{name}.png)\n\n*{' '.join(caption.split())}*" if name in drawn else ""


def facts(rows: Rows, runs: Sequence[Run]) -> dict[str, str]:
    """What was run, on what and for how long."""
    named = [
        f"{title_of(row.data, row.model)} ({row.epochs} epochs, {seeds_of(rows[row])})"
        for row in sorted(rows, key=paper_order)
    ]
    found = reference(rows)
    trained = [run for run in runs if run.results.get("train_seconds") and "kind" not in run.results]
    minutes = sum(run.results["train_seconds"] for run in trained) / 60
    return {
        "n_runs": str(len(trained)),
        "devices": " and ".join(sorted({run.results["environment"]["device"] for run in runs})),
        "minutes": f"{minutes:.0f}",
        "commits": ", ".join(sorted({run.results["environment"]["commit"][:7] for run in runs})),
        "rows": "; ".join(named),
        "reference": f"{title_of(*found[0][:2])}, {found[0].epochs} epochs" if found else "not run",
        "n_gradients": str(n_gradients(found[1]) if found else 0),
    }


def seeds_of(methods: Mapping[str, list[Run]]) -> str:
    """How many seeds the methods of a row have."""
    counts = [len(runs) for method, runs in methods.items() if not method.startswith("ensemble")] or [1]
    low, high = min(counts), max(counts)
    return "one seed" if high == 1 else f"{high} seeds" if low == high else f"{low} to {high} seeds"


def n_gradients(methods: Mapping[str, list[Run]]) -> int:
    """How many values a histogram of gradient norms holds."""
    runs = with_gradients(methods.get("cross-entropy", []))
    return len(gradient_sample(runs, GRADIENT_BETAS[0], 0)) if runs else 0


def gaps(rows: Rows, brief: Sequence[Run] = ()) -> list[str]:
    """What was planned and is missing, as sentences."""
    made = []
    for row in sorted(rows, key=paper_order):
        made += _gaps_of(row, rows[row], row_title(row, rows))
    made += _guard_gaps(rows)
    absent = [key for key in TABLE_1 if not any((row.data, row.model) == key for row in rows)]
    if absent:
        made.append(f"Rows of the paper without any run: {'; '.join(title_of(*key) for key in absent)}.")
    if any(data == "svhn" for data, _ in absent):
        made.append(
            "SVHN's rows for want of its training set; its test images serve as the other data of Table 2."
        )
    short = [title_of(*key) for key in only_brief(rows, brief)]
    if short:
        made.append(
            f"More than [a brief trial](other-networks.md), which is no result, of {'; '.join(short)}."
        )
    heads = {
        name for row in rows for some in rows[row].values() for run in some for name in run.results["outputs"]
    }
    if not any(name.startswith("annealing-double-head-k") for name in heads):
        made.append(
            "ECE against the calibration period k (Table 3); overhead was measured for k = 10 and 70."
        )
    if not any(row.epochs >= PAPER_EPOCHS for row in rows):
        made.append(f"The paper's number of epochs: {PAPER_EPOCHS} for images.")
    return [*made, "The official CIFAR-10-C files (ours are made with the published constants)."]


def _gaps_of(row: Row, methods: Mapping[str, list[Run]], name: str) -> list[str]:
    """The methods that a row lacks, and the seeds that those it has lack."""
    sources = [s for s in (*PAPER_SOURCES[:4], *RIVALS) if _applies(s, row)]
    missing = [source.title for source in sources if source.method not in methods]
    alone = {method: runs for method, runs in methods.items() if not method.startswith("ensemble")}
    lacking: dict[int, list[str]] = {}
    for method, runs in alone.items():
        lacking.setdefault(SEEDS_WANTED - len(runs), []).append(method)
    made = [f"{name}: {', '.join(missing)}."] if missing else []
    few = [f"{n} for {', '.join(lacking[n])}" for n in sorted(lacking) if n > 0]
    if few:
        alone_said = " One seed has no spread." * (SEEDS_WANTED - 1 in lacking)
        made.append(f"{name}, of {SEEDS_WANTED} seeds, missing: {'; '.join(few)}.{alone_said}")
    return made


def _guard_gaps(rows: Rows) -> list[str]:
    """Guards that the rows evaluated under shift lack: seeds without any, and lines with a whole kind unseen."""
    made = []
    for row, runs in rows_with_shift(rows):
        name = row_title(row, rows)
        without = [str(run.seed) for run in runs if not run.has(FAMILY_UNSEEN)]
        if without:
            made.append(f"{name}: guards on seed{'s' * (len(without) > 1)} {' and '.join(without)}.")
        if not any(run.has(KIND_UNSEEN) for run in runs):
            made.append(f"{name}: guards with a whole kind of corruption unseen.")
    return made


def _applies(source: Source, row: Row) -> bool:
    return source.method != "mixup" or not row.data.startswith(NO_MIXUP)


def beta_text(rows: Rows) -> str:
    """The caption of the sweep over beta0."""
    best, rises = {}, True
    for row in sorted(rows, key=paper_order):
        betas, runs = sweep(rows[row].get("cross-entropy", []))
        found = {key: [numbers(runs, f"{SWEEP}{b:g}", key) for b in betas] for key in ("ece", "mean_entropy")}
        means = {key: [one.mean for one in some if one] for key, some in found.items()}
        if len(betas) > 1:
            best[row_title(row, rows)] = betas[int(np.argmin(means["ece"]))]
            rises = rises and bool((np.diff(means["mean_entropy"]) > 0).all())
    return said(
        """ECE and mean entropy against beta0: the paper's head at 0.3 times the network's learning rate, all heads of a
        seed on one network; means over the seeds that have the whole sweep. Entropy {rises} throughout. ECE is lowest
        at {best}{moral}. (Read off the test set, to describe the curve; no method here uses it. Grey: a perfect model's
        band on the first row.)""",
        rises="rises with beta0, as the paper says," if rises else "does not rise with beta0",
        best=" and ".join(f"{beta:g} on {name}" for name, beta in best.items()),
        moral=": the best beta0 is no constant of the method" if len(set(best.values())) > 1 else "",
    )


def shift_text(rows: Rows) -> str:
    """Temperature scaling against perturbed heads, row by row, and what heads without perturbation do."""
    lines, shares = [], clean_shares(rows)
    for row, runs in rows_with_shift(rows):
        whole, hard = shift_summary(runs), shift_summary(runs, NOT_NOISE)
        if whole and hard:
            lines.append(_shift_line(row_title(row, rows), whole, hard))
    if not lines:
        return "Not run yet."
    if not shares:
        return bullets(lines)
    moral = said(
        """Heads that saw only clean calibration images (the paper's with and without annealing, and auto) have {shares}
        times temperature scaling's mean ECE: what helps under shift is the perturbation, not the head.""",
        shares=between(shares, 1, 2),
    )
    return f"{bullets(lines)}\n\n{moral}"


def clean_shares(rows: Rows) -> list[float]:
    """Mean ECE under shift as a share of temperature scaling's, of heads that saw only clean calibration images."""
    shares = []
    for _, runs in rows_with_shift(rows):
        for name in ("double-head", "annealing-double-head", AUTO.output):
            has = evaluated(runs, name)
            ours, rival = (mean_shift(has, output, sets_of(FAMILIES)) for output in (name, "main+T"))
            shares += [ours.mean / rival.mean] if ours and rival else []
    return shares


def _shift_line(name: str, whole: Mapping[str, Any], hard: Mapping[str, Any]) -> str:
    return said(
        """{name}{seeds}: temperature scaling {rivals[0]:.1f}, perturbed heads {heads} over the 12 families they never
        saw; over the 9 that are no noise {rivals[1]:.1f} against {hard_heads}. On clean data their ECE is {clean},
        temperature scaling's {before:.2f}; {whole[inside]} of {n} not above the band.""",
        name=name,
        seeds=f" (means over {whole['n_seeds']} seeds)" if whole["n_seeds"] > 1 else "",
        whole=whole,
        rivals=[100 * one["temperature"] for one in (whole, hard)],
        heads=between(whole["heads"], 100, 1),
        hard_heads=between(hard["heads"], 100, 1),
        clean=between(whole["clean"], 100, 2),
        before=100 * whole["clean_temperature"],
        n=len(whole["clean"]),
    )
