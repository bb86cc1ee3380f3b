"""Train the runs of a row and keep their small results.

    python experiments/run.py cifar10 resnet50 --epochs 30 --seeds 0 1 2 --root data --output runs
    python experiments/run.py cifar10 resnet50 --seeds 0 --methods rivals --root data
    python experiments/run.py 20newsgroups-bydate --seeds 0 --root data
    python experiments/run.py cifar10 resnet50 --seeds 3 --methods cross-entropy --bare --results experiments/members

Runs that are finished are not trained again, and one that was stopped goes on. Of each run results.json (numbers of
every output, config, seed, commit, versions, device, time), metrics and gradient norms are kept in
experiments/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from committed import RESULTS, small, write_small
from rows import methods_of, row

from doublehead.training.config import Config
from doublehead.training.loop import train
from doublehead.training.run_folder import RunFolder

SHARED = "runs shared one device, so seconds and samples per second are not figures of speed"


class Neighbours:
    """Tells whether another of these scripts was at work beside this one, by files that hold process ids."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / f".running-{os.getpid()}"
        self.file.touch()
        self.seen = False

    def look(self) -> bool:
        """Whether any was seen since `forget`; a file whose process is gone is removed."""
        for file in self.folder.glob(".running-*"):
            if file == self.file:
                continue
            if _alive(int(file.name.rpartition("-")[2])):
                self.seen = True
            else:
                file.unlink(missing_ok=True)
        return self.seen

    def forget(self) -> None:
        """Before the next run."""
        self.seen = False

    def leave(self) -> None:
        """At the end."""
        self.file.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def configs(options: argparse.Namespace) -> Iterator[Config]:
    """The runs asked for, seed by seed."""
    for seed in options.seeds:
        runs = row(options.data, options.model, options.epochs, seed)
        asked = (runs[name] for name in methods_of(options.methods) if name in runs)
        yield from (bare(config) if options.bare else config for config in asked)


def bare(config: Config) -> Config:
    """The same network with nothing beside it: no heads, no guards, no shifted test sets."""
    beside: dict[str, Any] = {"heads": {}, "augment_of": {}, "every_of": {}, "auto": False, "guards": ()}
    return replace(config, **beside, record_gradients=False, shift=())


def train_and_keep(config: Config, options: argparse.Namespace, neighbours: Neighbours) -> dict[str, Any]:
    """Train one run, or find it trained, and keep its small results."""
    folder = RunFolder(options.output / config.name)
    neighbours.forget()

    def tell(line: dict[str, Any]) -> None:
        neighbours.look()
        accuracy = line.get("test", {}).get("main", {}).get("accuracy", float("nan"))
        print(
            f"epoch {line['epoch']} loss {line['train_loss']:.4f} acc {accuracy:.4f} {line['seconds']} s",
            flush=True,
        )

    results = train(
        config,
        folder,
        root=options.root,
        accelerator=options.accelerator,
        checkpoint_seconds=120,
        report=tell,
    )
    note = options.note or (SHARED if neighbours.look() else "")
    keep(folder.path, options.results / config.name, note)
    return results


def keep(run: Path, target: Path, note: str = "") -> None:
    """Copy what is small of a run folder: rounded to 6 digits, without blanks."""
    results = json.loads((run / "results.json").read_text())
    if note:
        results["environment"]["note"] = note
    write_small(results, target / "results.json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    packed = [json.dumps(small(line), separators=(",", ":")) for line in lines]
    (target / "metrics.jsonl").write_text("\n".join(packed) + "\n")
    (target / "bins.json").unlink(missing_ok=True)  # of results that had no bins yet
    if (run / "gradients.npz").exists():
        shutil.copyfile(run / "gradients.npz", target / "gradients.npz")


def summary(name: str, results: dict[str, Any], seconds: float) -> str:
    """One line about a run."""
    numbers = results["outputs"]["main"]
    return (
        f"{name}: {seconds:.0f} s, accuracy {100 * numbers['before']['accuracy']:.2f}, "
        f"ECE {100 * numbers['before']['ece']:.2f} -> {100 * numbers['after']['ece']:.2f} "
        f"(T {numbers['temperature']:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("model", nargs="?", help="the paper's for that data set unless given")
    parser.add_argument("--epochs", type=int, help="30, for text 50, for ImageNet 100 unless given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--methods", nargs="+", default=[], help="or baselines, rivals, all; the paper's unless given"
    )
    parser.add_argument(
        "--bare",
        action="store_true",
        help="the network alone, as a member of an ensemble or to be retrained; with --results experiments/members, or "
        "it takes the place of the row's own results",
    )
    parser.add_argument("--root", help="where the data sets lie")
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="start no run after so many seconds"
    )
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--note", default="", help="what a reader of the results should know")
    options = parser.parse_args()
    began, neighbours = time.perf_counter(), Neighbours(options.output)
    try:
        for config in configs(options):
            started = time.perf_counter()
            if started - began > options.budget:
                print(f"out of time before {config.name}", flush=True)
                break
            results = train_and_keep(config, options, neighbours)
            print(summary(config.name, results, time.perf_counter() - started), flush=True)
    finally:
        neighbours.leave()


if __name__ == "__main__":
    main()
