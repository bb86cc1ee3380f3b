"""Predictions in, one HTML page out."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias

import doublehead
from doublehead.guard import Shift as Window
from doublehead.outcomes import Comparison
from doublehead.predictions import Predictions
from doublehead.report_page import tables
from doublehead.report_page.record import (
    THRESHOLDS,
    Method,
    Record,
    compare_methods,
    measure,
    measure_shift,
)
from doublehead.report_page.tables import clean
from doublehead.system import require

Shift: TypeAlias = "Mapping[str, Mapping[str, Predictions | Record | Mapping[str, float]]]"

TITLE = "Can these confidences be trusted?"
MAX_METHODS = 12


class Page(NamedTuple):
    """The report and its verdict."""

    html: str
    verdict: str


def build_page(
    records: Mapping[str, Record],
    *,
    title: str = TITLE,
    classes: Sequence[str] | None = None,
    shift: Shift | None = None,
    windows: Sequence[Window] = (),
    provenance: Sequence[tuple[str, str]] = (),
) -> Page:
    """The report as one HTML page without outside resources, the same for the same input.

    `records` are the methods by name, the one to improve on first. `classes` are the names of the classes.
    `shift[data][method]` are predictions of the same methods on shifted data, or numbers measured before ("accuracy",
    "ece", "mean_confidence", "auroc"). `windows` say whether new data are like the calibration data: those of
    `shift_guard.watch`, or `[guard.shift]`. `provenance` says where the numbers come from, as pairs of what and which.
    Besides the most confident errors only binned numbers enter the page, so its size does not depend on the number of
    samples.

    >>> page = build_page({"main": Record.of(Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 1]))}, title="Two samples")
    >>> page.html.startswith("<!doctype html>"), "http://" in page.html
    (True, False)
    """
    named = _check(records, classes, shift)
    n_bins = next(iter(named.values())).tally.n_bins
    methods = [measure(i, name, record) for i, (name, record) in enumerate(named.items())]
    pairs = compare_methods(methods)
    shifts = _measure_shifts(methods, shift or {}, n_bins)
    names = [clean(name) for name in classes] if classes is not None else None
    verdict = page_verdict(methods, pairs)
    style, script = _asset("page.css"), _asset("page.js")
    jinja2 = require("jinja2", extra="report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=tables.pixels,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    for shown in (environment.globals, environment.filters):  # the templates use the functions of `tables`
        shown.update({name: value for name, value in vars(tables).items() if not name.startswith("_")})
    html = environment.get_template("page.html.j2").render(
        title=clean(title),
        policy=_policy(style, script),
        style=style,
        script=script,
        version=doublehead.__version__,
        data=_live_data(methods, pairs, names),
        verdict=verdict,
        meta=_meta(methods),
        methods=methods,
        names=names,
        best=_best(methods),
        provenance=provenance,
        thresholds=THRESHOLDS,
        shifts=shifts,
        windows=windows,
        n_bins=n_bins,
    )
    return Page(str(html), verdict)


def page_verdict(methods: Sequence[Method], pairs: Sequence[Sequence[Comparison | None]]) -> str:
    """The result in a few sentences; methods are ranked by paired differences of NLL, never within chance."""
    if len(methods) == 1:
        return f"“{methods[0].name}”: {methods[0].summary.verdict}"
    if any(pair is None for row in pairs for pair in row):
        grades = "; ".join(f"“{m.name}”: {m.summary.grade.word}" for m in methods)
        why = "they were measured on different samples"
        if short := [f"“{m.name}”" for m in methods if "nll" not in m.summary.metrics]:
            why = f"only the confidence of {' and '.join(short)} is known"
        return f"The methods cannot be compared sample by sample: {why}. {grades}."
    best = _best(methods)
    equal = [m for m, pair in zip(methods, pairs[best]) if m is methods[best] or not (pair and pair.is_clear)]
    # of those that chance alone may rank, the one to improve on if it is there
    first, found = equal[0], pairs[0][best]
    names = " and ".join(filter(None, [", ".join(f"“{m.name}”" for m in equal[:-1]), f"“{equal[-1].name}”"]))
    if len(equal) > 1:
        sentence = f"{names} have the lowest NLL; the difference between them is within chance."
    elif best == 0 or found is None:
        sentence = f"{names} has the lowest NLL."
    else:
        low, high = (f"{abs(bound):.4f}" for bound in (found.nll.high, found.nll.low))
        below = f"{-found.nll.estimate:.4f} below “{methods[0].name}” (95 % interval {low} to {high})"
        sentence = f"{names} has the lowest NLL, {below}."
    if found is not None and best > 0:
        drawn = " (a random sample)" if found.n < first.summary.n else ""
        differ = "differs" if found.n_changed == 1 else "differ"
        sentence += (
            f" {found.n_changed:,} of {found.n:,} predicted classes{drawn} {differ} from “{methods[0].name}”."
        )
    return f"{sentence} “{first.name}”: {first.summary.verdict}"


def _check(
    named: Mapping[str, Record], classes: Sequence[str] | None, shift: Shift | None
) -> dict[str, Record]:
    if not 1 <= len(named) <= MAX_METHODS:
        raise ValueError(f"a report must hold 1 to {MAX_METHODS} methods, got {len(named)}")
    for name, record in named.items():
        n = record.tally.n_classes
        if classes is not None and n and len(classes) != n:
            raise ValueError(f"classes must be {n} names, one per class of {name!r}, got {len(classes)}")
    for data, found in (shift or {}).items():
        unknown = [method for method in found if method not in named]
        if unknown:
            raise ValueError(
                f"shift[{data!r}] must be for the methods {list(named)}, got {', '.join(map(repr, unknown))}"
            )
    cleaned = {clean(name): p for name, p in named.items()}
    if len(cleaned) < len(named):
        raise ValueError("names of methods must differ in their first 99 printable characters")
    return cleaned


def _measure_shifts(
    methods: Sequence[Method], shift: Shift, n_bins: int
) -> list[tuple[str, list[dict[str, float] | None]]]:
    """The numbers of each method on its own data, then on each shifted set, None where it was not run on it."""
    found: list[tuple[str, list[dict[str, float] | None]]] = []
    for data, by_method in shift.items():
        known = {clean(method): value for method, value in by_method.items()}
        row = [
            measure_shift(m.record.outcomes, known[m.name], n_bins) if m.name in known else None
            for m in methods
        ]
        found.append((clean(data), row))
    return [("own test data", [{"ece": m.curve.ece} for m in methods]), *found] if found else []


def _live_data(
    methods: Sequence[Method], pairs: Sequence[Sequence[Comparison | None]], names: Sequence[str] | None
) -> dict[str, Any]:
    """The numbers behind the slider, the comparison and the class table."""
    rows = tables.pair_rows(methods)
    return {
        "thresholds": THRESHOLDS.tolist(),
        "rows": rows,
        "names": names,
        "pairs": [[pair and pair._asdict() for pair in row] for row in pairs],
        "methods": [
            {
                "name": m.name,
                "n": float(m.record.accepted[0]),  # at a threshold of 0: all
                "accepted": m.record.accepted.tolist(),
                "wrong": m.record.wrong.tolist(),
                "values": {row["key"]: m.summary.values[row["key"]] for row in rows},
                "classes": tables.class_data(m.summary.classes),
            }
            for m in methods
        ],
    }


def _policy(style: str, script: str) -> str:
    """Allow this style and this script by their hashes, and nothing else: no request, no injected code."""

    def digest(content: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _meta(methods: Sequence[Method]) -> str:
    def each(values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    several = max(m.record.several for m in methods)
    n_classes = [m.summary.n_classes for m in methods]
    n = [m.summary.n // m.record.several for m in methods]
    parts = [f"{each(n)} sample{'s' if max(n) > 1 else ''}"]
    parts += [f"{several} labels each"] if several > 1 else []
    parts += ["weighted"] if any(m.record.outcomes.weights is not None for m in methods) else []
    parts += [f"{each(n_classes)} classes"] if several == 1 and max(n_classes) else []
    parts += [f"{len(methods)} methods"] if len(methods) > 1 else []
    return ", ".join(parts)


def _best(methods: Sequence[Method]) -> int:
    """The method with the lowest NLL."""
    return min(range(len(methods)), key=lambda i: methods[i].summary.values.get("nll", 0.0))


def _asset(name: str) -> str:
    return files("doublehead.report_page").joinpath(name).read_text(encoding="utf-8")
