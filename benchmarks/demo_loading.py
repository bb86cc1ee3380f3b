"""How much of the demo's training is spent waiting for batches: the demo's network, heads and data, on the CPU.

    python benchmarks/demo_loading.py --save     # writes benchmarks/results/demo_loading.json

Batches are made in the training process itself, so each moment spent making one, for the network or for the heads, is
a moment in which nothing learns. The first epoch warms up and is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import records
import torch

from doublehead.cli.train import DEMO as SHOWN
from doublehead.data import fashion_subset
from doublehead.data.batches import Batches
from doublehead.training.config import RECIPES, runs_for
from doublehead.training.loop import make_fabric, run_epoch, set_up
from doublehead.training.run_folder import environment

waited = 0.0  # seconds spent in making batches


def timed(batches: Batches, original: Any = Batches.__iter__) -> Iterator[Any]:
    global waited  # noqa: PLW0603 (a stopwatch)
    iterator = original(batches)
    while True:
        began = time.perf_counter()
        batch = next(iterator, None)
        waited += time.perf_counter() - began
        if batch is None:
            return
        yield batch


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--augment", default="none", help="none as in the demo, crop or crop-flip")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)  # as in the demo; `records` holds others to one
    base = replace(RECIPES["fashion"], evaluate_every=1000, augment=options.augment)
    config, methods = runs_for(base, SHOWN)[0]  # cross entropy and all heads
    run = set_up(config, make_fabric(config, accelerator="cpu", devices=1), fashion_subset(), None)
    Batches.__iter__ = timed  # type: ignore[method-assign]
    rows = []
    for epoch in range(options.epochs + 1):
        before, began = waited, time.perf_counter()
        run_epoch(run)
        took = round(time.perf_counter() - began, 3)
        row = {"seconds": took, "waited_seconds": round(waited - before, 4)}
        print(f"epoch {epoch}: {row}", flush=True)
        rows += [row] if epoch else []
    share = sum(row["waited_seconds"] for row in rows) / sum(row["seconds"] for row in rows)
    result = {
        "what": f"epochs of the demo on the CPU: {config.model}, 8,500 images, batch {config.batch_size}, {methods}",
        "augment": config.augment,
        "waiting_percent": round(100 * share, 2),
        "epochs": rows,
        "environment": environment(torch.device("cpu")),
    }
    print(f"{result['waiting_percent']} % of the time was spent waiting for batches")
    if options.save:
        records.save("demo_loading", result)


if __name__ == "__main__":
    main()
