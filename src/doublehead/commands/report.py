"""`doublehead report`: one HTML page that says whether confidences can be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from doublehead.calibrators import Temperature
from doublehead.commands import options
from doublehead.commands.errors import UserError, told_to_user
from doublehead.predictions import Predictions


@dataclass
class Gathered:
    """What the inputs hold: methods by name, their classes where a table names them, shift results."""

    methods: dict[str, Predictions] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    shift: dict[str, dict[str, Any]] = field(default_factory=dict)


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Predictions, one method each: .npz, .csv, .parquet, pairs of .npy in a folder, or run folders "
            "(every output of the run on its test set). NAME=FILE names a method; logits:FILE or probs:FILE says "
            "what one file holds where they differ.",
            metavar="[NAME=]INPUT",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write, .html.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Text file with the names of the classes, one a line.")
    ] = None,
    shift: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE: the same model on shifted data; with several methods a folder whose files are called "
            "like the methods. May be given several times.",
        ),
    ] = None,
    logits: options.Logits = False,
    probs: options.Probs = False,
    label: options.Label = None,
    scores: options.Scores = None,
    bins: options.BinCount = 15,
    label_base: options.LabelBase = None,
    tolerance: options.Tolerance = 1e-3,
) -> None:
    """Write one HTML page that says whether confidences can be trusted, and shows why.

    The page works offline and in print: verdict, reliability diagrams with the band of a perfect model, metrics with
    intervals, methods side by side, the worst classes, and a slider for when to abstain. Put the method to improve
    on first.

    Examples:

        doublehead report test.csv --logits -o report.html

        doublehead report before=test.csv after=probs:repaired.csv --logits -o report.html

        doublehead report runs/cifar10-resnet50 --title "ResNet-50 on CIFAR-10"
    """
    with told_to_user():
        how: dict[str, Any] = {
            "kind": options.stated_kind(logits, probs),
            "label": label,
            "scores": scores,
            "base": label_base,
            "tolerance": tolerance,
        }
        found = gather(inputs, how)
        names = _read_classes(classes) if classes else found.classes or None
        shifts = {**found.shift, **_read_shifts(shift or [], found.methods, how)}
        _write(output, title, found.methods, names, shifts, bins)


def _write(
    output: Path,
    title: str | None,
    methods: Mapping[str, Predictions],
    classes: Sequence[str] | None,
    shift: Mapping[str, Mapping[str, Any]],
    n_bins: int,
) -> None:
    from rich.markup import escape

    from doublehead.commands import show
    from doublehead.report.build import TITLE, build_page, write_page

    if output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output must end in .html, got {output.name!r}")
    if output.is_dir() or not output.parent.is_dir():
        raise UserError(f"{output} cannot be written: it is a folder, or its folder does not exist")
    try:
        page = build_page(methods, title=title or TITLE, classes=classes, shift=shift, n_bins=n_bins)
    except ValueError as error:
        raise UserError(str(error)) from error
    write_page(output, page)
    out = show.results()
    out.print(escape(page.verdict))
    out.print(f"Wrote {escape(str(output))}")


def gather(inputs: Sequence[str], how: Mapping[str, Any]) -> Gathered:
    """The methods of all inputs under names of their own."""
    parts = [(name, path, _read_input(path, kind, how)) for name, path, kind in map(_parse, inputs)]
    found = Gathered()
    several = len(parts) > 1
    for name, path, part in parts:
        for inner, p in part.methods.items():
            shown = _named(name, path, inner, several, found.methods)
            found.methods[shown] = p
            for data, by_method in part.shift.items():
                if inner in by_method:
                    found.shift.setdefault(data, {})[shown] = by_method[inner]
        found.classes = found.classes or part.classes
    return found


def _parse(text: str) -> tuple[str, str, str | None]:
    """(name, path, kind) from [NAME=][logits:|probs:]PATH; a path that exists is taken as it is."""
    name = ""
    if not Path(text).exists() and "=" in text:
        name, _, text = text.partition("=")
    for kind in ("logits", "probs"):
        if text.startswith(f"{kind}:") and not Path(text).exists():
            return name, text.removeprefix(f"{kind}:"), kind
    return name, text, None


def _named(name: str, path: str, inner: str, several: bool, taken: Mapping[str, Any]) -> str:
    """`inner` is the name inside a folder, empty for a file of its own."""
    stem = Path(path.rstrip("/")).name
    if not inner:
        shown = name or (stem.replace(".npz:", ":") if ".npz:" in stem else Path(path).stem)
        candidates = [shown, f"{Path(path).parent.name}/{shown}", path]
    else:
        candidates = [
            f"{name}/{inner}" if name else f"{stem}/{inner}" if several else inner,
            f"{path}/{inner}",
        ]
    free = [candidate for candidate in candidates if candidate not in taken]
    if not free:
        raise UserError(f"two inputs have the name {candidates[0]!r}: give them different ones as NAME=FILE")
    return free[0]


def _read_input(path: str, kind: str | None, how: Mapping[str, Any]) -> Gathered:
    folder = Path(path)
    if folder.is_dir():
        inside = folder / "predictions" if (folder / "predictions").is_dir() else folder
        files = sorted(inside.glob("*.npz"))
        tests = {file.stem.removeprefix("test-"): file for file in files if file.stem.startswith("test-")}
        if tests:
            return _read_run(folder, inside, tests)
        if files:
            return Gathered({file.stem: _load(str(file), kind, how)[0] for file in files})
    p, classes = _load(path, kind, how)
    return Gathered({"": p}, classes)


def _read_run(folder: Path, inside: Path, tests: Mapping[str, Path]) -> Gathered:
    """Every output of a run on its test set, and the main one after a temperature fitted on its calibration set."""
    found = Gathered()
    for name in sorted(tests, key=lambda output: (output != "main", output)):
        p = _load_npz(tests[name])
        found.methods[name] = p
        calib = inside / f"calib-{name}.npz"
        if name == "main" and calib.exists():
            found.methods["main+T"] = Temperature().fit(_load_npz(calib)).calibrate(p)
    results = folder / "results.json"
    if results.exists():
        try:
            found.shift = json.loads(results.read_text()).get("shift") or {}
        except (ValueError, AttributeError) as error:
            raise UserError(f"{results} is not the results of a run: {error}") from error
    return found


def _load_npz(file: Path) -> Predictions:
    try:
        return Predictions.load(file)
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: {error}") from error


def _load(path: str, kind: str | None, how: Mapping[str, Any]) -> tuple[Predictions, tuple[str, ...]]:
    from doublehead.commands import show

    table = options.open_any([path], **{**how, "kind": kind or _kind_for(path, how["kind"])})
    other = options.other_kind(table)
    if kind is None and (first := options.misnamed(table)) is not None:
        raise UserError(
            f"--{table.kind} is given, but {path} has columns such as {first!r}: write {other}:{path} if they are "
            f"{other}, else {table.kind}:{path}"
        )
    show.tell_reading(table, table.name)
    return table.load(), table.layout.classes


def _kind_for(path: str, kind: str | None) -> str | None:
    """An .npz states itself what it holds; --logits and --probs are for the other files beside it."""
    if Path(path).suffix == ".npz" and Path(path).is_file():
        from doublehead.tables.files import find_sources, open_source

        return open_source(find_sources([path])[0]).states or kind
    return kind


def _read_classes(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} must be a text file in UTF-8, one class a line: {error}") from error


def _read_shifts(
    given: Sequence[str], methods: Mapping[str, Predictions], how: Mapping[str, Any]
) -> dict[str, dict[str, Predictions]]:
    shifts: dict[str, dict[str, Predictions]] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name:
            raise UserError(f"--shift must read NAME=FILE, got {text!r}")
        _, path, kind = _parse(path)
        part = _read_input(path, kind, how).methods
        if len(part) == 1 and len(methods) == 1:
            part = dict(zip(methods, part.values()))
        if not part.keys() & methods.keys():
            raise UserError(
                f"{path} must hold predictions of {', '.join(methods)} under these names, got {', '.join(part)}"
                if any(part)
                else f"--shift {name}: with several methods give a folder whose files are called like them, got {path}"
            )
        shifts[name] = {method: p for method, p in part.items() if method in methods}
    return shifts
