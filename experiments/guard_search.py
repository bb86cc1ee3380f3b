"""How the guard's settings were chosen: the table of what was tried, where the file of that search is there.

experiments/results/guard-search.json is a list with a dict for each setting tried, numbers as fractions:
    inputs     what the guard reads: "stages" (what goes into 6 normalisation layers of the first three quarters of the
               network), "stages-all" (8 layers of all depths), "blocks" (what comes out of the stem and the first
               three stages); any other text is shown as it is
    form       "guard", "guard+refit" (a scalar temperature fitted again on clean calibration data after it),
               "temperature+refit" (a plain per-sample one, capped at a quantile), "none" (likewise, never capped),
               or "scalar" (temperature scaling); likewise
    keep       the share of clean images that is left alone, or the quantile; null where there is none
    clean_ece, clean_nll   on the calibration images held back
    shift_ece  on the same corrupted, mean over families, each left out of what taught the guard
    n_images   how many images were held back
    note       what else was different; may be left out
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
OPTIONAL = ("note",)
CHOSEN = {"inputs": "stages", "form": "guard+refit", "keep": 0.9}  # what the guard of a training run does
INPUTS = {
    "none": "nothing",
    "stages": "inputs of 6 layers, first three quarters",
    "stages-all": "inputs of 8 layers, all depths",
    "blocks": "outputs of stem and stages 1 to 3",
}
FORMS = {
    "guard": "guard",
    "guard+refit": "guard, then a temperature",
    "temperature+refit": "per-sample temperature capped at a quantile, then a temperature",
    "none": "per-sample temperature, never capped",
    "scalar": "temperature scaling",
}
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


def search_table(tried: Sequence[Setting]) -> Table:
    """What was tried and what came out; the chosen setting in bold."""
    head = ["the guard reads", "form", "share left alone", "clean ECE", "clean NLL", "mean ECE, families left out",
            "images held back", "note"]  # fmt: skip
    lines = [_line(one) for one in tried]
    notes = [
        "Percent but for NLL. Bold: the setting in use, chosen by these numbers, which are therefore no measure of it. "
        "The choice of inputs and of the share was first made for the guard without a temperature after it.",
        "Dropout 0.5, 128 hidden units and 20 epochs unless a note says otherwise. Taught by the 13 families, with "
        "folds of them left out in turn; mean ECE is over those left out, at severities 1, 3 and 5.",
        "On so few images ECE has a higher floor than on a test set: compare these lines with each other alone.",
    ]
    return Table("guard-search", "The search for the guard's settings", head, lines, notes)


def _line(one: Setting) -> list[str]:
    keep = "" if one["keep"] is None else f"{one['keep']:g}"
    cells = [INPUTS.get(one["inputs"], one["inputs"]), FORMS.get(one["form"], one["form"]), keep,
             f"{100 * one['clean_ece']:.2f}", f"{one['clean_nll']:.4f}", f"{100 * one['shift_ece']:.2f}",
             f"{one['n_images']:,}", one.get("note", "")]  # fmt: skip
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
