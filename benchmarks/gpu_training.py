"""How fast the training loop is on one GPU, what the calibration head adds and what determinism costs.

    python benchmarks/gpu_training.py --save     # writes benchmarks/results/gpu_training.json

ResNet-50, 32x32 images, batch 128. A plain eager loop (bf16 autocast, channels_last, the same on-device batches), our
loop, and our loop with the paper's head every 10 and every 70 steps take turns on the same network in one process; each
figure is the median over the rounds. Then whole runs are trained twice from one seed, with and without deterministic
algorithms: which groups of saved tensors differ, and the time of the last epochs. Images are random numbers: speed does
not depend on what they show.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
import torch.nn.functional as F

from doublehead import PAPER, DoubleHead
from doublehead.data import Images, Splits
from doublehead.system import require
from doublehead.torch_tools import uncompiled
from doublehead.training.config import Config
from doublehead.training.loop import make_fabric, run_epoch, set_up, train
from doublehead.training.run_folder import RunFolder, environment


def generated(n_train: int) -> Splits:
    random = np.random.RandomState(0)
    parts = [
        Images(random.randint(0, 256, (n, 32, 32, 3), np.uint8), random.randint(0, 10, n).astype(np.int64))
        for n in (n_train, 5_000, 500)
    ]
    return Splits("generated", *parts, class_names=tuple("abcdefghij"))


def eager_epoch(run) -> None:
    """What a careful person writes by hand, without compiling anything."""
    run.net.train()
    for x, y in run.inputs.train:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run.net(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)


def seconds(epoch, *arguments) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    epoch(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def trained_twice(config: Config, splits: Splits) -> dict[str, Any]:
    """Two runs from one seed: the groups of saved tensors that differ, and the seconds of the last epochs."""
    load = require("safetensors.torch", extra="train").load_file
    weights, took = [], []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as place:
            folder = RunFolder(Path(place) / "run")
            train(config, folder, splits)
            weights.append(load(folder.path / "model.safetensors"))
            before, last = (line["seconds"] for line in folder.lines()[-2:])
            took.append(round(last - before, 3))
    one, other = weights
    differing = sorted({name.partition(".")[0] for name in one if not torch.equal(one[name], other[name])})
    return {"tensors": len(one), "differing": differing, "seconds": took}


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4, help="of each run that is trained twice")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)  # `records` holds others to one
    config = Config(batch_size=128, precision="bf16-mixed", compile=True, epochs=1000, evaluate_every=10_000)
    fabric = make_fabric(config, accelerator="cuda", devices=1)
    n_images = options.steps * config.batch_size
    splits = generated(n_images)
    run = set_up(config, fabric, splits, None)

    def with_head(every: int):
        calib = run.inputs.make_calib()
        return {"paper": DoubleHead(run.forward, calib, follow=run.optimizer, heads=PAPER, every=every)}

    ways = {"eager": {}, "ours": {}} | {f"ours, head every {k}": with_head(k) for k in (10, 70)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds + 1):
        for name, companions in ways.items():
            run.companions, run.epoch = companions, 0
            took = seconds(eager_epoch, run) if name == "eager" else seconds(run_epoch, run)
            print(f"round {round_} {name}: {took:.3f} s, {n_images / took:,.0f} images/s", flush=True)
            if round_:  # the first round compiles and captures
                times[name].append(took)
    medians = {name: statistics.median(took) for name, took in times.items()}
    added = {name: round(100 * (medians[name] / medians["ours"] - 1), 2) for name in list(ways)[2:]}
    assert uncompiled(run.forward) is run.net
    twice = {}
    for compiled, deterministic in product((True, False), repeat=2):
        way = ("compiled" if compiled else "eager") + (", deterministic" if deterministic else "")
        again = replace(
            config,
            compile=compiled,
            deterministic=deterministic,
            epochs=options.epochs,
            heads={"paper": PAPER},
        )
        twice[way] = trained_twice(again, splits)
        print(way, twice[way], flush=True)
    result = {
        "what": "ResNet-50 (32x32 stem), batch 128, bf16, channels_last; images per second in training",
        "steps_per_round": options.steps,
        "images_per_second": {name: round(n_images / took) for name, took in medians.items()},
        "faster_than_eager": round(medians["eager"] / medians["ours"], 3),
        "head_adds_percent": added,
        "seconds": times,
        "trained_twice": twice,
        "environment": environment(fabric.device),
    }
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=1))
    if options.save:
        records.save("gpu_training", result)


if __name__ == "__main__":
    main()
