"""The paper's other networks, trained for an epoch or three: that they train, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from committed import HERE, Run, numbers, read_runs
from tables import AUTO, GAP, PAPER_SOURCES, Rows, Table, shown, title_of

BRIEF = HERE / "brief"
GUESSING = 0.12  # of ten classes, with some luck
COLUMNS = (PAPER_SOURCES[0], *PAPER_SOURCES[4:], AUTO)


def read_brief(folder: Path = BRIEF) -> list[Run]:
    """The short runs, by name; none where there is no folder."""
    return read_runs(folder)


def networks_table(runs: Sequence[Run]) -> Table:
    """Network, epochs, accuracy of the main head and of the heads beside it, and the time it took."""
    lines = [_line(run) for run in runs]
    head = ["network", "epochs", *(f"accuracy: {source.title}" for source in COLUMNS), "seconds of training", "commit",
            "note"]  # fmt: skip
    notes = [
        "**Not results.** These runs were to show that the networks train, with heads beside them, on the same code; "
        "after so few epochs neither accuracy nor calibration says anything about a method. No other table has them.",
        "Percent, CIFAR-10's test images (ten classes, so 10 is guessing) unless the note says otherwise."
        + _guessing(runs),
        "ImageNet's recipe, which trains from folders of image files, was run only on the small stand-ins named in the "
        "notes, and on generated images in the tests. ImageNet itself was used with a frozen network alone.",
    ]
    return Table(
        "other-networks", "Other networks, trained briefly", head, lines or [[GAP] * len(head)], notes
    )


def _guessing(runs: Sequence[Run]) -> str:
    """Which networks have learned nothing yet."""
    found = [title_of(*run.row[:2]) for run in runs if (run.number("main", "accuracy") or 0.0) < GUESSING]
    return f" So {' and '.join(found)} had learned nothing yet: that it trains is not shown." if found else ""


def _line(run: Run) -> list[str]:
    cells = [shown(numbers([run], source.output, "accuracy"), digits=1) for source in COLUMNS]
    seconds, environment = run.results.get("train_seconds"), run.results["environment"]
    return [title_of(run.row.data, run.row.model), str(run.row.epochs), *cells, f"{seconds:.0f}" if seconds else "",
            environment["commit"][:7], environment.get("note", "")]  # fmt: skip


def only_brief(rows: Rows, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Data set and network of the short runs that no committed row has."""
    have = {(row.data, row.model) for row in rows}
    return [key for key in dict.fromkeys((run.row.data, run.row.model) for run in runs) if key not in have]
