"""How the guard's settings were chosen: the table of what was tried, where the file of that search is there.

experiments/results/guard-search.json is a list with a dict for each setting tried, numbers as fractions:
    inputs     what the guard reads: "statistics" (of the logits), "features" (the last), "stages" (pooled, of the first
               three quarters of the network), "stages-all" (of all depths); any other text is shown as it is
    form       "guard", "guard+refit", or "temperature" (a plain per-sample one, capped at a quantile); likewise
    keep       the share of clean images that is left alone, or the quantile; null where there is none
    clean_ece, clean_nll   on the calibration images held back
    shift_ece  on the same corrupted, mean over families, each left out of what taught the guard
    n_images   how many images were held back
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
KEYS = ("inputs", "form", "keep", "clean_ece", "clean_nll", "shift_ece", "n_images")
CHOSEN = {"inputs": "stages", "form": "guard", "keep": 0.9}  # what `ShiftGuard` does
INPUTS = {
    "statistics": "statistics of the logits",
    "features": "last features",
    "stages": "pooled stages of the first three quarters",
    "stages-all": "pooled stages of all depths",
}
FORMS = {
    "guard": "guard",
    "guard+refit": "guard, with a refit",
    "temperature": "per-sample temperature, capped at a quantile",
}
Setting = Mapping[str, Any]


def read_search(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The settings tried, in the file's order; none where there is no file."""
    file = results / NAME
    tried: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    for number, one in enumerate(tried):
        if set(one) != set(KEYS):
            raise ValueError(
                f"{NAME} must hold {', '.join(KEYS)} in every entry, got {', '.join(one)} in entry {number}"
            )
    return tried


def search_table(tried: Sequence[Setting]) -> Table:
    """What was tried and what came out; the chosen setting in bold."""
    head = ["the guard reads", "form", "share left alone", "clean ECE", "clean NLL", "mean ECE, families left out",
            "images held back"]  # fmt: skip
    lines = [_line(one) for one in tried]
    notes = [
        "Percent but for NLL. Bold: the setting of `ShiftGuard`, chosen by these numbers, which are therefore no "
        "measure of it.",
        "On so few images ECE has a higher floor than on a test set: compare these lines with each other alone.",
    ]
    return Table("guard-search", "The search for the guard's settings", head, lines, notes)


def _line(one: Setting) -> list[str]:
    keep = "" if one["keep"] is None else f"{one['keep']:g}"
    cells = [INPUTS.get(one["inputs"], one["inputs"]), FORMS.get(one["form"], one["form"]), keep,
             f"{100 * one['clean_ece']:.2f}", f"{one['clean_nll']:.4f}", f"{100 * one['shift_ece']:.2f}",
             f"{one['n_images']:,}"]  # fmt: skip
    return [f"**{cell}**" if cell else "" for cell in cells] if is_chosen(one) else cells


def is_chosen(one: Setting) -> bool:
    """Whether a setting is the one that `ShiftGuard` has."""
    return all(one[key] == value for key, value in CHOSEN.items())


def search_text(tried: Sequence[Setting]) -> str:
    """Where the chosen setting stands among those tried, counted; nothing where no figures were kept."""
    if not tried:
        return ""
    ours = next(filter(is_chosen, tried), None)
    if ours is None:
        return "The setting that was chosen is not among those whose figures were kept:"
    others = [one for one in tried if not is_chosen(one)]
    keys = ("clean_ece", "shift_ece")
    lower = {key: sum(one[key] < ours[key] for one in others) for key in keys}
    return said(
        """The chosen one has a clean ECE of {clean:.2f} and {shifted:.2f} on families left out. Of the {n} others
        {lower[clean_ece]} have a lower clean ECE, {lower[shift_ece]} a lower one on families left out, and {both} both:
        """,
        clean=100 * ours["clean_ece"],
        shifted=100 * ours["shift_ece"],
        n=len(others),
        lower=lower,
        both=sum(all(one[key] < ours[key] for key in keys) for one in others),
    )
