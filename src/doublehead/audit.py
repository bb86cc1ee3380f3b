"""The verbs `evaluate` and `report`: predictions in any form in, a `Summary` or an HTML page out.

Predictions may be `Predictions`, arrays or tensors with labels, a pandas DataFrame, or paths. An array holds
probabilities; logits are given as `logits=...` or as `Predictions(logits, labels)`. Of a DataFrame or a file the kind
may be left out where it is certain (the names of the arrays or columns state it, or rows sum to 1); else it is
`logits=...`, or "logits:FILE".
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import doublehead
from doublehead.calibrators import Temperature
from doublehead.files.columns import in_order
from doublehead.files.formats import open_source
from doublehead.files.reading import PredictionTable, read_predictions
from doublehead.files.sources import Kind, Source, TableError, find_sources
from doublehead.files.values import to_text
from doublehead.guard import Shift as Window
from doublehead.predictions import Predictions
from doublehead.report_page.page import TITLE, Page, Shift, build_page
from doublehead.report_page.record import Record, as_times
from doublehead.stream import row_groups
from doublehead.summary import Summaries, Summary
from doublehead.system import did_you_mean, replacing

Data: TypeAlias = Any  # Predictions, an array or tensor, a DataFrame, a path or several


def evaluate(
    probs: Data = None,
    labels: Any = None,
    *,
    logits: Data = None,
    weights: Any = None,
    n_bins: int = 15,
    by: Any = None,
    classes: Sequence[str] | None = None,
    cluster: Any = None,
    **reading: Any,
) -> Summary:
    """Every number of some predictions with intervals, and whether they are calibrated.

    Arrays need `labels`: class numbers from 0 on, or names, whose columns are named by `classes` or in sorted order as
    scikit-learn has them. In a DataFrame or a file, `labels` names the column of the label (guessed where it is not
    given) and labels may be the names of the score columns; several such columns of 0 and 1 are labels that a sample
    may have at once. `by` is the group of each sample, or the name of a column; see `Summary.groups`. `weights` say how
    much each sample counts, or name a column. Files are streamed, so they may be larger than
    memory; `cluster` reads them on a Dask cluster. Further arguments are those of `files.read_predictions`.

    >>> summary = evaluate([[0.9, 0.1], [0.2, 0.8]], [0, 1])
    >>> summary.n, summary.values["accuracy"], summary.grade.word
    (2, 1.0, 'too few samples to judge')
    """
    if (probs is None) == (logits is None):
        given = "neither" if probs is None else "both"
        raise ValueError(f"give probabilities as the first argument or logits=..., got {given}")
    kind: Kind | None = reading.pop("kind", None) if logits is None else "logits"
    data = probs if logits is None else logits
    if not is_table(data):
        _refuse_for_arrays([*reading, *(["cluster"] if cluster is not None else [])])
        return Summary.of(as_predictions(data, labels, kind or "probs", classes, weights), n_bins, by)
    if classes is not None:
        raise TypeError("classes are given with an array: columns of a DataFrame or a file have names")
    column = by if isinstance(by, str) else None
    if is_path(data) and by is not column:
        raise ValueError(f"by must name a column of the files, got {type(by).__name__}")
    table = read_table(data, kind, labels, weights=weights, by=column, **reading)
    if is_path(data):
        return table.tally(n_bins, cluster=cluster).summary()
    p, groups = table.load(), by if column is None else to_text(np.asarray(data[column]))
    return Summary.of(p, n_bins, row_groups(p, groups, table.layout.labels))


def load_predictions(data: Data, labels: Any = None) -> Predictions:
    """`Predictions` of probabilities (N, K) and labels, of a DataFrame, or of paths, as for `evaluate`."""
    return read_table(data, None, labels).load() if is_table(data) else as_predictions(data, labels)


def report(
    predictions: Data,
    path: str | os.PathLike[str] = "report.html",
    *,
    title: str | None = None,
    classes: Sequence[str] | None = None,
    shift: Shift | None = None,
    windows: Sequence[Window] = (),
    n_bins: int = 15,
    by: Any = None,
    time: Any = None,
    **reading: Any,
) -> Path:
    """Write one self-contained HTML page about the calibration of one or several methods.

    `predictions` are the methods by name, the one to improve on first, or one method. A method is a `Predictions`, a
    pair (probs, labels), a DataFrame, or paths: a file ("logits:FILE" where it does not show what it holds), or the
    folder of a run with its outputs. `shift[data][method]` are predictions on shifted data in the same forms, and
    `shift[data]` may be a folder of files called like the methods; `windows` say whether new data raise an alarm
    (`list(shift_guard.watch(clean, new))` or `[guard.shift]`). `by` and `time` are the group and the time of each
    sample, or names of columns: the report then compares groups, and stretches of time.
    Further arguments are those of `files.read_predictions`, such as `weights`. The file is written completely or
    not at all.
    """
    path = check_page_path(path)
    named = predictions if isinstance(predictions, Mapping) else {"": predictions}
    inputs = collect(list(named.items()), n_bins=n_bins, by=by, time=time, **reading)
    how = {name: value for name, value in reading.items() if name != "weights" or isinstance(value, str)}
    shifted = read_shifts(shift or {}, inputs.methods, n_bins=n_bins, **how)
    return write_page(path, inputs.page(title, classes, shifted, windows))


def summaries(
    logits: Mapping[str, Any],
    labels: Any,
    weights: Any = None,
    n_labels: int | None = None,
    path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Summaries:
    """The summary of each method, given by its logits; with `path` the page of `report` is written too."""
    methods = {name: Predictions(values, labels, weights) for name, values in logits.items()}
    for p in methods.values():
        p.n_labels = n_labels
    if path is not None:
        report(methods, path, **options)
    return Summaries({name: Summary.of(p, options.get("n_bins", 15)) for name, p in methods.items()})


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{path.stat().st_size:,} bytes, SHA-256 {digest.hexdigest()}"


def write_page(path: Path, page: Page) -> Path:
    """Write a page, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(page.html, encoding="utf-8", newline="\n")
    return path


def check_page_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """The path of a page, an argument called `name`, which must end in .html."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{name} must end in .html, got {Path(path).name!r}")
    return Path(path)


@dataclass
class Inputs:
    """What a report shows: methods by name, the names of the classes where a file has them, results on shifted data."""

    methods: dict[str, Record] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    shift: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: list[PredictionTable] = field(default_factory=list)

    def page(
        self,
        title: str | None,
        classes: Sequence[str] | None,
        shift: Shift,
        windows: Sequence[Window],
        command: str = "",
    ) -> Page:
        """The report, with where its numbers come from: files with their sizes and hashes, command, version, date."""
        files = {file for table in self.tables for source in table.sources for file in source.files}
        facts = [(str(file), _fingerprint(file)) for file in sorted(files) if file.is_file()]
        for name, record in self.methods.items():
            facts.append((name, f"{record.tally.n // record.several:,} samples"))
        facts += [("Command", command)] if command else []
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return build_page(
            self.methods,
            title=title or TITLE,
            classes=classes or self.classes or None,
            shift={**self.shift, **shift},
            windows=windows,
            provenance=[*facts, ("Made", f"{now}, doublehead {doublehead.__version__}")],
        )


def collect(named: Sequence[tuple[str, Data]], **reading: Any) -> Inputs:
    """The methods of all inputs under unique names; an empty name is replaced by that of the file."""
    if not any(is_table(data) for _, data in named):
        _refuse_for_arrays(
            [name for name in reading if name not in ("kind", "weights", "n_bins", "by", "time")]
        )
    found = Inputs()
    for name, data in named:
        first = next((table for table in found.tables if table.layout.classes), None)
        part = read_input(data, first=first, **reading)
        for inner, p in part.methods.items():
            shown = _unique_name(name, data, inner, len(named) > 1, found.methods)
            found.methods[shown] = p
            for shifted, by_method in part.shift.items():
                if inner in by_method:
                    found.shift.setdefault(shifted, {})[shown] = by_method[inner]
        found.classes = found.classes or part.classes
        found.tables += part.tables
    return found


def read_input(
    data: Data,
    *,
    kind: Kind | None = None,
    n_bins: int = 15,
    by: Any = None,
    time: Any = None,
    first: PredictionTable | None = None,
    **reading: Any,
) -> Inputs:
    """The methods of one input: one, or several where it is a folder of .npz files or of a run.

    Classes are put in the order of those of the table `first`, where they have the same names.
    """
    if not is_table(data):
        scores, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        groups = None if by is None else np.asarray(by)
        times = None if time is None else as_times(np.asarray(time), "time", "predictions")
        p = as_predictions(scores, labels, kind or "probs", weights=reading.get("weights"))
        return Inputs({"": Record.of(p, n_bins, groups, times)})
    found, files = Inputs(), {"": data}
    folder, inside, tests = Path(), Path(), dict[str, Path]()  # of a run
    if is_path(data) and not isinstance(data, list):
        path, kind = split_kind(str(data), kind)
        folder = Path(path)
        inside = folder / "predictions" if (folder / "predictions").is_dir() else folder
        outputs = {file.stem: file for file in sorted(inside.glob("*.npz"))} if folder.is_dir() else {}
        tests = {
            name.removeprefix("test-"): file for name, file in outputs.items() if name.startswith("test-")
        }
        files = {name: tests[name] for name in sorted(tests, key=lambda name: (name != "main", name))}
        files = files or outputs or {"": path}
    for name, file in files.items():
        table = read_table(file, kind, by=by, extra=[time] if time else [], **reading)
        table = table if first is None else _ordered(table, first)
        first = first or (table if table.layout.classes else None)
        found.tables.append(table)
        found.methods[name] = Record.of_table(table, n_bins, time)
        found.classes = found.classes or (("no", "yes") if table.layout.independent else table.layout.classes)
        if tests and name == "main" and (calib := inside / "calib-main.npz").exists():
            scaled = Temperature().fit(read_predictions(calib).load()).calibrate(table.load())
            found.methods["main+T"] = Record.of(scaled, n_bins)
    if tests and (results := folder / "results.json").exists():
        try:
            found.shift = json.loads(results.read_text()).get("shift") or {}
        except (ValueError, AttributeError) as error:
            raise TableError(f"{results} does not hold the results of a run: {error}") from error
    return found


def _ordered(table: PredictionTable, first: PredictionTable) -> PredictionTable:
    classes = first.layout.classes
    if (layout := in_order(table.layout, classes)) is not None:
        return replace(table, layout=layout)
    if {*map(str.casefold, table.layout.classes)} == {*map(str.casefold, classes)}:
        raise TableError(f"the classes of {table.name} must be in the order of those of {first.name}")
    return table


def read_shifts(
    shift: Mapping[str, Any], methods: Mapping[str, Record], **reading: Any
) -> dict[str, dict[str, Any]]:
    """Results on shifted data by method: from inputs by method, or one whose files are called like the methods."""
    found: dict[str, dict[str, Any]] = {}
    for name, data in shift.items():
        if isinstance(data, Mapping):
            known = {
                method: one for method, one in data.items() if isinstance(one, Mapping)
            }  # measured before
            rest = {method: read_input(data[method], **reading) for method in data.keys() - known.keys()}
            found[name] = known | {method: next(iter(one.methods.values())) for method, one in rest.items()}
            continue
        by_name = read_input(data, **reading).methods
        if len(by_name) == len(methods) == 1:
            by_name = dict(zip(methods, by_name.values()))
        if not by_name.keys() & methods.keys():
            got = ", ".join(filter(None, by_name)) or "one file"
            raise ValueError(
                f"{data} must hold predictions of {', '.join(methods)} under these names, got {got}: with several "
                "methods give a folder whose files are called like them"
            )
        found[name] = {method: record for method, record in by_name.items() if method in methods}
    return found


def as_predictions(
    data: Data,
    labels: Any,
    kind: Kind = "probs",
    classes: Sequence[str] | None = None,
    weights: Any = None,
) -> Predictions:
    """`Predictions` as they are, or from an array (N, K) or (N,) of scores, labels and optional weights."""
    if isinstance(data, Predictions):
        if given := [name for name, value in (("labels", labels), ("weights", weights)) if value is not None]:
            raise TypeError(f"{' and '.join(given)} must not be given with Predictions, which hold their own")
        return data
    if labels is None:
        raise ValueError(f"labels must be given with an array of {kind}, got None")
    names = np.asarray(labels)
    if names.dtype.kind in "OUS":
        names = names.astype(str)
        if classes is not None and len(set(classes)) < len(classes):
            raise ValueError(f"classes must be different names, got {', '.join(map(str, classes))}")
        if classes is None and len(np.unique(names)) != np.shape(data)[-1]:
            raise ValueError(
                "classes must name the columns where labels are names that do not all occur, "
                f"got {len(np.unique(names))} names for scores of shape {tuple(np.shape(data))}"
            )
        known = {str(name): i for i, name in enumerate(np.unique(names) if classes is None else classes)}
        if unknown := sorted({*names.tolist()} - known.keys()):
            raise ValueError(
                f"labels must be among the classes {', '.join([*known][:10])}, got {unknown[0]!r}"
            )
        labels = np.array([known[name] for name in names.tolist()])
    if getattr(data, "ndim", 2) > 2:
        return Predictions.positions(data, labels, are_probs=kind == "probs")
    if getattr(data, "ndim", 2) == 1:
        return Predictions.from_binary(data, labels, weights, are_probs=kind == "probs")
    if kind == "probs":
        return Predictions.from_probs(data, labels, weights)
    p = Predictions(data, labels, weights)
    if bool((p.logits >= 0).all()) and bool(((p.logits.sum(1) - 1).abs() <= 1e-3).all()):
        raise ValueError("logits must not be probabilities, got rows >= 0 that sum to 1: give them as probs")
    return p


def split_kind(text: str, kind: Kind | None) -> tuple[str, Kind | None]:
    """(path, kind) from [logits:|probs:]PATH; a path that exists is taken as it is."""
    stated, colon, path = text.partition(":")
    if colon and stated in ("logits", "probs") and not Path(text).exists():
        return path, "logits" if stated == "logits" else "probs"
    return text, kind


def is_path(data: Data) -> bool:
    """Whether this is a path, or a list of paths."""
    paths = data if isinstance(data, list) and data else [data]
    return all(isinstance(path, str | os.PathLike) for path in paths)


def is_frame(data: Data) -> bool:
    """Whether this is a DataFrame (pandas or polars)."""
    return hasattr(data, "columns") and hasattr(data, "to_numpy")


def is_table(data: Data) -> bool:
    """Whether this has columns with names: a DataFrame or paths."""
    return is_path(data) or is_frame(data)


def _refuse_for_arrays(names: Sequence[str]) -> None:
    if names:
        raise TypeError(f"{', '.join(names)} must be given with a DataFrame or with files, got an array")


def read_table(data: Data, kind: Kind | None, labels: Any = None, **reading: Any) -> PredictionTable:
    """The table of paths or of a DataFrame; an .npz that states what it holds is taken at its word."""
    labels = reading.pop("label", None) if labels is None else labels
    known = {name for verb in (evaluate, read_predictions) for name in inspect.signature(verb).parameters}
    for name in reading.keys() - known:
        raise TypeError(f"there is no option {name!r}{did_you_mean(name, known)}")
    if not is_frame(data):
        if isinstance(data, str):
            data, kind = split_kind(data, kind)
        sources = find_sources(data if isinstance(data, list) else [data])
        kind = kind and (open_source(sources[0]).states or kind)
        return read_predictions(sources, kind=kind, label=labels, **reading)
    names = [str(name) for name in data.columns]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise TableError(f"the DataFrame has more than one column called {repeated[0]!r}")
    arrays = {str(name): np.asarray(data[name]) for name in data.columns}
    columns = {"labels": labels, "weights": reading.pop("weights", None)}
    for what, given in columns.items():
        if given is None or isinstance(given, str):
            continue
        named = isinstance(given, list) and {*map(str, given)} <= {*arrays}
        if named and all(np.isin(arrays[str(name)], (0, 1)).all() for name in given):
            continue  # several columns of labels
        if len(given) != len(data):
            raise ValueError(f"{what} must have {len(data)} entries, one per row, got {len(given)}")
        columns[what] = f"{what} given"
        arrays[f"{what} given"] = np.asarray(given)
    source = Source(Path("DataFrame"), arrays=arrays)
    how = {"label": columns["labels"], "weights": columns["weights"]}
    return read_predictions([source], kind=kind, **how, **reading)


def _unique_name(name: str, data: Data, inner: str, several: bool, taken: Mapping[str, Any]) -> str:
    """`inner` is the name inside a folder, empty for a single method."""
    candidates = [name or "predictions"]
    if is_path(data):
        path, _ = split_kind(str(data[0] if isinstance(data, list) else data), None)
        stem = Path(path).name
        if inner:
            before = name or (stem if several else "")
            candidates = [f"{before}/{inner}" if before else inner, f"{path}/{inner}"]
        else:
            shown = stem.replace(".npz:", ":") if ".npz:" in stem else Path(path).stem
            folder = Path(path).parent.name
            candidates = [name] if name else [shown, f"{folder}/{shown}" if folder else path, path]
    free = [candidate for candidate in candidates if candidate not in taken]
    if not free:
        raise ValueError(f"two inputs have the name {candidates[0]!r}: give them different ones as NAME=FILE")
    return free[0]
