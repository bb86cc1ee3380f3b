"""What the benchmarks share: their arguments, the peers that are installed, turns, and how results are kept.

Import it first: it holds the libraries to one thread where nothing else is asked for.
"""

# ruff: noqa: E402 (the number of threads is set before numpy and torch are loaded)
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from doublehead.system import require

RESULTS = Path(__file__).parent / "results"
PAUSE = 0.02  # seconds; idle threads of OpenMP wait for some milliseconds in a busy loop


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, whose docstring is its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the file in benchmarks/results")
    return parser


def save(name: str, record: Mapping[str, Any]) -> None:
    """benchmarks/results/<name>.json"""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def about(packages: Collection[str] = (), cores: str = "1 thread") -> dict[str, Any]:
    """When and where a benchmark ran."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "device": f"{names[0] if names else platform.processor() or platform.machine()}, {cores}",
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("torch", "numpy", *packages)},
    }


def fill(page: Path, mark: str, text: str) -> None:
    """Put text between a mark and the next <!-- end --> of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(mark)
    after = rest.partition("<!-- end -->")[2]
    page.write_text(f"{before}{mark}\n{text}\n<!-- end -->{after}", encoding="utf-8")


def stored_run(name: str) -> Any:
    """A committed run of `experiments`, with its calibration and test logits."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
    return import_module("results").StoredRun(name)


def installed(packages: Mapping[str, str]) -> dict[str, Any]:
    """The modules that can be imported, by package; the reason is printed for each that cannot."""
    found = {}
    for module, package in packages.items():
        try:
            require("torchvision", extra="models")  # some peers fail oddly on one that does not fit torch
            found[package] = import_module(module)
        except Exception as error:
            print(f"skipped {package}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def take_turns(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, slow: float = math.inf
) -> dict[str, dict[str, Any]]:
    """By candidate: CPU and wall seconds, each of its fastest round, and its value; or what it failed with.

    One that takes over `slow` seconds runs in three rounds. Before each there is a pause, in which the threads of the
    one before stop waiting for more work; their waiting counts as CPU time.
    """
    found: dict[str, dict[str, Any]] = {name: {"cpu": math.inf, "wall": math.inf} for name in candidates}
    for number in range(rounds):
        for name, candidate in candidates.items():
            row = found[name]
            if "error" in row or (number >= 3 and row["cpu"] > slow):
                continue
            time.sleep(PAUSE)
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                row["value"] = candidate()
            except Exception as error:  # a peer that fails is a result too
                row.update(cpu=None, wall=None, error=f"{type(error).__name__}: {error}"[:200])
                continue
            row["cpu"] = min(row["cpu"], time.process_time() - cpu)
            row["wall"] = min(row["wall"], time.perf_counter() - wall)
    return found
