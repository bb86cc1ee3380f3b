"""`doublehead evaluate` and `report` beside pandas with scikit-learn, on the same file: seconds and memory.

    python benchmarks/audit_speed.py            # a CSV and a Parquet file of 2 million rows of 10 classes
    python benchmarks/audit_speed.py --save     # also writes benchmarks/results/audit_speed.json

Each command runs in a process of its own, with one thread; commands take turns and the round with the least CPU time
counts, because a busy machine adds to it. Seconds are CPU seconds, with starting Python and importing;
memory is the largest that the process held. pandas reads the file whole (with its fastest reader, pyarrow, for CSV
too), then scikit-learn and numpy compute accuracy, NLL, Brier score, ECE and class-wise ECE: part of what `evaluate`
prints, which has intervals, the floor and the tests besides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import records
from pyarrow import csv, parquet

PEER = """
import sys, numpy as np, pandas as pd
from sklearn.metrics import accuracy_score, log_loss
path = sys.argv[1]
frame = pd.read_csv(path, engine="pyarrow") if path.endswith("csv") else pd.read_parquet(path)
probs, labels = frame.filter(like="prob_").to_numpy(), frame["label"].to_numpy()
top, said = probs.max(1), probs.argmax(1)
def ece(confidence, hit):
    which = np.clip(np.ceil(confidence * 15).astype(int) - 1, 0, 14)
    gaps = np.bincount(which, confidence - hit, 15)
    return np.abs(gaps).sum() / len(hit)
one_hot = np.eye(probs.shape[1])[labels]
print(accuracy_score(labels, said), log_loss(labels, probs), ((probs - one_hot) ** 2).sum(1).mean(),
      ece(top, said == labels), np.mean([ece(probs[:, k], labels == k) for k in range(probs.shape[1])]))
"""

# A process of its own: the peak of a process is never below what the one that started it held.
STARTER = """
import json, os, subprocess, sys, time
start = time.monotonic()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
assert status == 0, sys.argv[1:]
print(json.dumps([usage.ru_utime + usage.ru_stime, time.monotonic() - start, usage.ru_maxrss]))
"""


def write_files(folder: Path, rows: int, classes: int) -> dict[str, Path]:
    """Probabilities rounded to six digits, labels drawn from them; the last file has groups and times besides."""
    files = {"csv": "test.csv", "parquet": "test.parquet", "grouped": "grouped.parquet"}
    files = {kind: folder / name for kind, name in files.items()}
    rng, places = np.random.default_rng(0), np.arange(rows)
    odds = np.exp(2 * rng.normal(size=(rows, classes)))
    probs = odds / odds.sum(1, keepdims=True)
    labels = (probs.cumsum(1) < rng.random((rows, 1))).sum(1).clip(max=classes - 1)
    table = pa.table({"label": labels, **{f"prob_{k}": probs[:, k].round(6) for k in range(classes)}})
    sites, days = np.array(list("ABCDE"))[places % 5], np.datetime64("2025-01-01") + places * 300 // rows
    more = table.append_column("site", pa.array(sites)).append_column("day", pa.array(days.astype(str)))
    csv.write_csv(table, files["csv"])
    parquet.write_table(table, files["parquet"], row_group_size=100_000)
    parquet.write_table(more, files["grouped"], row_group_size=100_000)
    return files


def measured(command: list[str]) -> dict[str, Any]:
    """CPU seconds, seconds and peak memory (MB) of a process."""
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "ARROW", "OPENBLAS")}
    started, how = [sys.executable, "-c", STARTER, *command], {"env": os.environ | one_thread}
    found = subprocess.run(started, stdout=subprocess.PIPE, check=True, text=True, **how).stdout
    cpu, wall, peak = json.loads(found)
    return {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2), "peak_mb": round(peak / 1024)}


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        files = write_files(Path(name), options.rows, options.classes)
        sizes = {kind: round(path.stat().st_size / 1e6) for kind, path in files.items()}
        ours = [sys.executable, "-m", "doublehead"]
        start = measured([*ours, "--version"])
        for kind, path in files.items():
            report = [*ours, "report", str(path), "-o", f"{path}.html", "--force"]
            commands = {
                "evaluate": [*ours, "evaluate", str(path)],
                "report": report,
                "pandas + scikit-learn": [sys.executable, "-c", PEER, str(path)],
            }
            if kind == "grouped":
                commands = {"report": [*report, "--by", "site", "--time", "day"]}
            rounds = [
                {what: measured(command) for what, command in commands.items()} for _ in range(options.rounds)
            ]
            for what in commands:
                one = found[f"{what}, {kind}"] = min((r[what] for r in rounds), key=lambda m: m["cpu_s"])
                one["cpu_s_of_all"] = [r[what]["cpu_s"] for r in rounds]
                print(f"{what}, {kind} ({sizes[kind]} MB): {one}", flush=True)
    if options.save:
        facts = {"rows": options.rows, "classes": options.classes, "megabytes": sizes, "start": start}
        about = records.about(("doublehead", "pyarrow", "pandas", "scikit-learn"))
        records.save("audit_speed", {**facts, "rounds": options.rounds, "results": found, **about})


if __name__ == "__main__":
    main()
