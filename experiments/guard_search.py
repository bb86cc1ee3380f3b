"""How the guard's settings were chosen: the table of what was tried, where the file of that search is there.

experiments/results/guard-search.json is a list with a dict for each setting tried, numbers as fractions:
    network    data set and network whose calibration images were used
    reads      what the guard reads
    form       what it makes of that
    keep       the share of clean images that is left alone; null where there is none
    clean_ece, clean_nll   on the calibration images held back
    family_ece on the same corrupted, mean over families, each left out of what taught the guard
    kind_ece   likewise with the whole kind of corruption left out; null where that was not tried
    n_images   how many images were held back
    note       what else was different; may be left out
    chosen     true for the setting in use; may be left out
    commit, device   of the code that tried it, and where the network ran; not in the entries made by hand
guard_trials.py makes such entries; those without a commit are a record made by hand before it was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from committed import RESULTS
from disagreements import said
from tables import Table

NAME = "guard-search.json"
KEYS = ("network", "reads", "form", "keep", "clean_ece", "clean_nll", "family_ece", "kind_ece", "n_images")
OPTIONAL = ("note", "chosen", "commit", "device")
SAME = ("network", "reads", "form", "keep", "note")  # in two entries: the same trial
UNSEEN = ("family_ece", "kind_ece")
Setting = Mapping[str, Any]


def read_search(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The settings tried, in the file's order; none where there is no file."""
    file = results / NAME
    tried: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    for number, one in enumerate(tried):
        if set(one) - set(OPTIONAL) != set(KEYS):
            raise ValueError(
                f"{NAME} must hold {', '.join(KEYS)} in every entry, got {', '.join(one)} in entry {number}"
            )
    return tried


def keep_search(tried: Sequence[Setting], results: Path = RESULTS) -> None:
    """Write the settings tried, a line each; of two entries for one trial the later takes the place of the former."""
    by_trial = {tuple(one.get(key) for key in SAME): one for one in tried}
    lines = ",\n".join(f" {json.dumps(one)}" for one in by_trial.values())
    (results / NAME).write_text(f"[\n{lines}\n]\n")


def search_table(tried: Sequence[Setting]) -> Table:
    """What was tried and what came out; the chosen setting in bold."""
    head = ["network", "the guard reads", "form", "share left alone", "clean ECE", "clean NLL",
            "mean ECE, families left out", "mean ECE, whole kinds left out", "images held back", "note"]  # fmt: skip
    notes = [
        "Percent but for NLL. Bold: the setting in use, chosen by the numbers of the first network that has it, which "
        "are therefore no measure of it. On the networks after that one it was tried when it had been fixed.",
        "Taught by the 13 families unless a note says otherwise, with folds of them, or whole kinds, left out in turn; "
        "mean ECE is over those left out, at severities 1, 3 and 5.",
        "On so few images ECE has a higher floor than on a test set: compare lines of one network with each other.",
    ]
    lines = [_line(one) for one in tried]
    return Table("guard-search", "The search for the guard's settings", head, lines, notes)


def _line(one: Setting) -> list[str]:
    def percent(key: str) -> str:
        return "" if one[key] is None else f"{100 * one[key]:.2f}"

    keep = "" if one["keep"] is None else f"{one['keep']:g}"
    cells = [one["network"], one["reads"], one["form"], keep, percent("clean_ece"), f"{one['clean_nll']:.4f}",
             *map(percent, UNSEEN), f"{one['n_images']:,}", one.get("note", "")]  # fmt: skip
    return [f"**{cell}**" if cell else "" for cell in cells] if one.get("chosen") else cells


def search_text(tried: Sequence[Setting]) -> str:
    """Where the setting in use stands on each network where it was tried, counted; nothing where none was kept."""
    if not tried:
        return ""
    in_use = [one for one in tried if one.get("chosen")]
    if not in_use:
        return "The setting that was chosen is not among those whose figures were kept."
    return " ".join(_standing(one, tried) for one in in_use)


def _standing(ours: Setting, tried: Sequence[Setting]) -> str:
    others = [one for one in tried if one["network"] == ours["network"] and one is not ours]
    others = [one for one in others if one["kind_ece"] is not None]
    lower = {key: sum(one[key] < ours[key] for one in others) for key in ("clean_nll", *UNSEEN)}
    return said(
        """On {network} the setting in use has a mean ECE of {family:.2f} on families left out, {kind:.2f} on whole
        kinds left out, and a clean NLL of {nll:.4f}. Of the {n} other trials there {lower[family_ece]} are lower on
        families, {lower[kind_ece]} on whole kinds and {lower[clean_nll]} in clean NLL; {all} in all three.""",
        network=ours["network"],
        family=100 * ours["family_ece"],
        kind=100 * ours["kind_ece"],
        nll=ours["clean_nll"],
        n=len(others),
        lower=lower,
        all=sum(all(one[key] < ours[key] for key in lower) for one in others),
    )
