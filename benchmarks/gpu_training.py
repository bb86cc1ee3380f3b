"""How fast the training loop is on one GPU, and what the calibration head adds: ResNet-50, 32x32 images, batch 128.

    python benchmarks/gpu_training.py --save     # writes benchmarks/results/gpu_training.json

A plain eager loop (bf16 autocast, channels_last, the same on-device batches), our loop, and our loop with the
paper's head every 10 and every 70 steps take turns on the same network in one process; each figure is the median
over the rounds. Images are random numbers: speed does not depend on what they show.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import numpy as np
import records
import torch
import torch.nn.functional as F

from doublehead import PAPER, DoubleHead
from doublehead.data import Images, Splits
from doublehead.torch_tools import uncompiled
from doublehead.training.config import Config
from doublehead.training.loop import make_fabric, run_epoch, set_up
from doublehead.training.run_folder import environment


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


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)  # `records` holds others to one
    config = Config(batch_size=128, precision="bf16-mixed", compile=True, epochs=1000, evaluate_every=10_000)
    fabric = make_fabric(config, accelerator="cuda", devices=1)
    n_images = options.steps * config.batch_size
    run = set_up(config, fabric, generated(n_images), None)

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
    result = {
        "what": "ResNet-50 (32x32 stem), batch 128, bf16, channels_last; images per second in training",
        "steps_per_round": options.steps,
        "images_per_second": {name: round(n_images / took) for name, took in medians.items()},
        "faster_than_eager": round(medians["eager"] / medians["ours"], 3),
        "head_adds_percent": added,
        "seconds": times,
        "environment": environment(fabric.device),
    }
    assert uncompiled(run.forward) is run.net
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=1))
    if options.save:
        records.save("gpu_training", result)


if __name__ == "__main__":
    main()
