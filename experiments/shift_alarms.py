"""How often the shift guard raises a false alarm with few calibration samples: a simulation.

    python experiments/shift_alarms.py   # shift_alarms.csv, the table in docs/shift.md

Each of many calibration sets has a guard of its own, which sees windows of new samples of the same kind, and of weakly
shifted ones. An alarm that knows all clean data shows what shift can be seen at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from results import HERE
from tables import fill, markdown
from torch import Tensor

from doublehead.guard import RATE, WINDOW, Guard, Observed, hotelling, mean_and_precision

TABLE = HERE / "shift_alarms.csv"
SAMPLES = (200, 872, 5000)
CHANNELS = {
    "normal": [128] * 18,
    "heavy tails": [128] * 18,
    "sparse": [100, 100],
}  # of each part of the stages
SHIFTS = {"normal": 0.015, "heavy tails": 0.3, "sparse": 0.05}
NEW, WINDOWS = 10_000, 20_000  # samples, and windows drawn from them


def stages(kind: str, n: int, generator: torch.Generator, shift: float = 0.0) -> Tensor:
    """(n, S) of one kind; a shift of 0.1 makes them vary by a tenth more."""
    widths = CHANNELS[kind]
    values = torch.randn(n, len(widths), widths[0], generator=generator)
    if kind == "heavy tails":
        values *= (0.4 * torch.randn(n, 1, 1, generator=generator)).exp()
        values *= (0.2 * torch.randn(n, len(widths), 1, generator=generator)).exp()
    values *= 1 + shift
    if kind == "sparse":  # some channels are 0 in all but a few samples
        values = (values - torch.linspace(0, 3.2, widths[0])).clamp(min=0)
    return values.flatten(1)


def measure(kind: str, samples: int, sets: int) -> Iterator[dict[str, Any]]:
    """A row for each calibration set: shares of clean and of shifted windows with an alarm."""
    generator = torch.Generator().manual_seed(samples)
    new = {name: stages(kind, NEW, generator, by) for name, by in (("clean", 0.0), ("shifted", SHIFTS[kind]))}
    for number in range(sets):
        guard, none = Guard(CHANNELS[kind]), torch.zeros(samples, dtype=torch.int64)
        calib, logits = stages(kind, samples, generator), torch.zeros(samples, 2)
        guard.fit(Observed(calib, logits, none, none, torch.arange(samples)), seed=number)
        means = {}
        for name, values in new.items():
            far = guard.bounded(guard.numbers(values, torch.zeros(NEW, 2)))
            rows = torch.randint(NEW, (WINDOWS, WINDOW), generator=generator)
            means[name] = torch.cat([far[some].mean(1) for some in rows.split(1000)])
        found = {name: guard.p_values(values) <= RATE for name, values in means.items()}
        # The mean and covariance of the means of clean windows are known here, so this test is exact.
        centre, precision = mean_and_precision(means["clean"])
        clean, shifted = (hotelling(means[name] - centre, precision) for name in ("clean", "shifted"))
        known = shifted > clean.quantile(1 - RATE)
        row = {"stages": kind, "samples": samples, "set": number, "false": found["clean"]}
        yield row | {"seen": found["shifted"], "known": known}
    print(kind, samples, flush=True)


def page(table: pd.DataFrame) -> str:
    """The table of docs/shift.md, in percent."""
    lines = []
    for (kind, samples), own in table.groupby(["stages", "samples"], sort=False):
        shares = [own.false.mean(), own.false.quantile(0.95), own.seen.mean(), own.known.mean()]
        lines.append([kind, f"{samples:,}", *(f"{100 * share:.2f}" for share in shares[:2])])
        lines[-1] += [f"{100 * share:.0f}" for share in shares[2:]]
    titles = ["stages", "samples", "false alarms", "in 95 % of sets at most", "alarms", "of a perfect test"]
    return markdown(titles, lines)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=40, help="calibration sets of each size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for kind in CHANNELS for n in SAMPLES for row in measure(kind, n, options.sets)]
    shares = [
        {k: float(v.float().mean()) if isinstance(v, Tensor) else v for k, v in r.items()} for r in rows
    ]
    pd.DataFrame(shares).round(6).to_csv(TABLE, index=False)
    document = HERE.parent / "docs" / "shift.md"
    document.write_text(fill(document.read_text(), "shift-alarms", page(pd.read_csv(TABLE))))


if __name__ == "__main__":
    main()
