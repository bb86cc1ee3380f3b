"""Predictions in, one HTML page out."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import doublehead
from doublehead.bins import check_n_bins
from doublehead.optional import require
from doublehead.predictions import Predictions
from doublehead.report import charts, rows
from doublehead.report.numbers import THRESHOLDS, Method, Shifted, changed_answers, measure, measure_shift
from doublehead.report.verdict import describe, grade, percent, verdict

Shift: TypeAlias = "Mapping[str, Mapping[str, Predictions | Mapping[str, float]]]"

TITLE = "Can these confidences be trusted?"
MAX_METHODS = 12
LONGEST_NAME = 100
START = 0.9  # where the slider stands at first


class Page(NamedTuple):
    """The report and its first sentence."""

    html: str
    verdict: str


def build_report(
    named_predictions: Mapping[str, Predictions],
    *,
    title: str = TITLE,
    classes: Sequence[str] | None = None,
    shift: Shift | None = None,
    n_bins: int = 15,
    max_classes: int = 20,
    seed: int = 0,
) -> str:
    """The report as HTML: one page without any outside resource, the same for the same input.

    `named_predictions` are the methods by name, the one to improve on first. `classes` are the names of the
    classes. `shift[data][method]` are predictions of the same methods on shifted data, or numbers measured before
    ("accuracy", "ece", "mean_confidence", "auroc"). The class-wise view shows the `max_classes` worst. Only binned
    numbers enter the page, so it stays small however many samples there are.

    >>> html = build_report({"main": Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 1])}, title="Two samples")
    >>> html.startswith("<!doctype html>"), "http://" in html
    (True, False)
    """
    return build_page(
        named_predictions,
        title=title,
        classes=classes,
        shift=shift,
        n_bins=n_bins,
        max_classes=max_classes,
        seed=seed,
    ).html


def write_report(
    path: str | os.PathLike[str], named_predictions: Mapping[str, Predictions], **options: Any
) -> Path:
    """Write `build_report(named_predictions, **options)`; the file appears whole or not at all."""
    return write_page(path, build_page(named_predictions, **options))


def build_page(
    named_predictions: Mapping[str, Predictions],
    *,
    title: str = TITLE,
    classes: Sequence[str] | None = None,
    shift: Shift | None = None,
    n_bins: int = 15,
    max_classes: int = 20,
    seed: int = 0,
) -> Page:
    """`build_report` with the verdict beside it."""
    named = _check(named_predictions, classes, shift)
    check_n_bins(n_bins)
    methods = [measure(name, p, n_bins, seed) for name, p in named.items()]
    shifts = _measure_shifts(named, shift or {}, n_bins, seed)
    names = [_clean(name) for name in classes] if classes is not None else None
    sentence = verdict(methods)
    style, script = _asset("page.css"), _asset("page.js")
    content = {
        "title": _clean(title),
        "policy": _policy(style, script),
        "style": style,
        "script": script,
        "version": doublehead.__version__,
        "data": _embed(_live_data(methods, named)),
        "verdict": sentence,
        "warning": _warning(methods),
        "meta": _meta(methods),
        "many": len(methods) > 1,
        "methods": [_method(i, m, names, max_classes) for i, m in enumerate(methods)],
        "table": rows.metrics_table(methods),
        "pair": (0, _best_other(methods)),
        "pair_rows": rows.PAIR_ROWS,
        "overlay": charts.overlay_chart(methods),
        "risk": charts.risk_chart(methods),
        "guaranteed": rows.guaranteed_table(methods),
        "n_thresholds": len(THRESHOLDS),
        "threshold_start": int(abs(THRESHOLDS - START).argmin()),
        "shift": _shift(methods, shifts),
        "n_bins": n_bins,
    }
    jinja2 = require("jinja2", extra="report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html = str(environment.from_string(_asset("page.html.j2")).render(content))
    return Page(html, sentence)


def write_page(path: str | os.PathLike[str], page: Page) -> Path:
    """Write a page whole or not at all; `path` must end in .html."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"path must end in .html, got {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(page.html.encode())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _check(
    named: Mapping[str, Predictions], classes: Sequence[str] | None, shift: Shift | None
) -> dict[str, Predictions]:
    if not 1 <= len(named) <= MAX_METHODS:
        raise ValueError(f"named_predictions must hold 1 to {MAX_METHODS} methods, got {len(named)}")
    for name, p in named.items():
        if not isinstance(p, Predictions):
            raise TypeError(f"named_predictions[{name!r}] must be a Predictions, got {type(p).__name__}")
        if classes is not None and len(classes) != p.n_classes:
            raise ValueError(
                f"classes must be {p.n_classes} names, one per class of {name!r}, got {len(classes)}"
            )
    for data, found in (shift or {}).items():
        unknown = [method for method in found if method not in named]
        if unknown:
            raise ValueError(
                f"shift[{data!r}] must be for the methods {list(named)}, got {', '.join(map(repr, unknown))}"
            )
    cleaned = {_clean(name): p for name, p in named.items()}
    if len(cleaned) < len(named):
        raise ValueError("names of methods must differ in their first 99 printable characters")
    return cleaned


def _measure_shifts(
    named: Mapping[str, Predictions], shift: Shift, n_bins: int, seed: int
) -> dict[str, list[Shifted | None]]:
    """Per shifted set one entry per method, None where a method was not run on it."""
    found: dict[str, list[Shifted | None]] = {}
    for data, by_method in shift.items():
        known = {_clean(method): value for method, value in by_method.items()}
        found[_clean(data)] = [
            measure_shift(own, known[name], n_bins, seed) if name in known else None
            for name, own in named.items()
        ]
    return found


def _method(i: int, method: Method, names: Sequence[str] | None, max_classes: int) -> dict[str, Any]:
    histogram = method.histogram
    shown = min(max_classes, method.n_classes)
    return {
        "index": i,
        "name": method.name,
        "grade": grade(method),
        "sentence": describe(method),
        "swatch": charts.swatch(i),
        "reliability": charts.reliability_chart(method),
        "bins": rows.bins_table(method),
        "confidence": charts.confidence_chart(method),
        "confidence_cut": charts.confidence_chart(method, drop_last=True),
        "claimed": percent(histogram.mean_confidence),
        "right": percent(histogram.accuracy),
        "last_bin": percent(histogram.shares[-1], 1),
        "classes": rows.class_rows(method, names, shown),
        "classes_off": rows.classes_off(method),
        "classes_caption": f"The {shown} worst of {method.n_classes} classes"
        if shown < method.n_classes
        else "Classes",
    }


def _shift(
    methods: Sequence[Method], shifts: Mapping[str, Sequence[Shifted | None]]
) -> dict[str, Any] | None:
    if not shifts:
        return None
    return {"chart": charts.shift_chart(methods, shifts), "rows": rows.shift_rows(methods, shifts)}


def _live_data(methods: Sequence[Method], named: Mapping[str, Predictions]) -> dict[str, Any]:
    """What the slider and the comparison need."""
    return {
        "thresholds": THRESHOLDS.tolist(),
        "rows": rows.PAIR_ROWS,
        "changed": changed_answers(named),
        "methods": [
            {
                "name": m.name,
                "n": m.n,
                "accepted": m.accepted.tolist(),
                "wrong": m.wrong.tolist(),
                "values": {row["key"]: rows.value_of(m, row["key"]) for row in rows.PAIR_ROWS},
            }
            for m in methods
        ],
    }


def _embed(value: Any) -> str:
    """JSON that cannot leave its script element, whatever names it holds."""
    made = json.dumps(
        value, allow_nan=False, separators=(",", ":")
    )  # ASCII: no line separators of JavaScript
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, script: str) -> str:
    """Allow this style and this script by their hashes, and nothing else: no request, no injected code."""

    def digest(content: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _warning(methods: Sequence[Method]) -> str:
    if len({m.n for m in methods}) > 1:
        return "The methods were measured on different numbers of samples, so compare them with care."
    return ""


def _meta(methods: Sequence[Method]) -> str:
    def each(values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    n, k = each([m.n for m in methods]), each([m.n_classes for m in methods])
    return f"{n} samples, {k} classes" + (f", {len(methods)} methods" if len(methods) > 1 else "")


def _best_other(methods: Sequence[Method]) -> int:
    """The method to compare the first one with: the best calibrated of the others."""
    others = range(1, len(methods))
    return min(others, key=lambda i: methods[i].curve.ece - methods[i].curve.floor.mean, default=0)


def _asset(name: str) -> str:
    return files("doublehead.report").joinpath(name).read_text(encoding="utf-8")


def _clean(name: str) -> str:
    """A name that can be encoded, printed and fitted in: control characters and broken file names become U+FFFD."""
    whole = "".join(c if c.isprintable() else "\ufffd" for c in str(name))
    return whole if len(whole) <= LONGEST_NAME else whole[: LONGEST_NAME - 1] + "…"
