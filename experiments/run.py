"""Train the runs of a row and keep their small results.

    python experiments/run.py cifar10 resnet50 --epochs 30 --seeds 0 1 2 --root data --output runs
    python experiments/run.py 20newsgroups-bydate --seeds 0 --root data

Runs that are finished are not trained again. Each run's results.json (numbers of every output, config, seed, commit,
versions, device, time) and metrics are copied to experiments/results/.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from rows import image_row, text_row

from doublehead.training.loop import train
from doublehead.training.run_folder import RunFolder

TEXT = ("20newsgroups", "20newsgroups-bydate", "sst-binary", "sst-fine")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("model", nargs="?", default="resnet50")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", help="of cross-entropy, mmce, brier, focal; all unless given")
    parser.add_argument("--root")
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="start no run after so many seconds"
    )
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()
    began = time.perf_counter()
    for seed in options.seeds:
        if options.data in TEXT:
            runs = text_row(options.data, seed, options.epochs or 50)
        else:
            runs = image_row(options.data, options.model, options.epochs or 30, seed)
        for name, config in runs.items():
            if options.methods and name not in options.methods:
                continue
            if time.perf_counter() - began > options.budget:
                print(f"out of time before {name}, seed {seed}", flush=True)
                return
            folder = RunFolder(options.output / config.name)
            started = time.perf_counter()
            results = train(
                config,
                folder,
                root=options.root,
                accelerator=options.accelerator,
                checkpoint_seconds=120,
                report=tell,
            )
            keep(folder, options.results)
            numbers = results["outputs"]["main"]
            print(
                f"{config.name}: {time.perf_counter() - started:.0f} s, {results['samples_per_second']} samples/s, "
                f"accuracy {100 * numbers['before']['accuracy']:.2f}, ECE {100 * numbers['before']['ece']:.2f} "
                f"-> {100 * numbers['after']['ece']:.2f} (T {numbers['temperature']:.2f})",
                flush=True,
            )


def tell(row: dict) -> None:
    test = row.get("test", {}).get("main", {})
    print(
        f"epoch {row['epoch']} loss {row['train_loss']:.4f} acc {test.get('accuracy', 0):.4f} {row['seconds']} s",
        flush=True,
    )


def keep(folder: RunFolder, results: Path) -> None:
    target = results / folder.path.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "metrics.jsonl", "gradients.npz"):
        if (folder.path / name).exists():
            shutil.copy(folder.path / name, target / name)


if __name__ == "__main__":
    main()
