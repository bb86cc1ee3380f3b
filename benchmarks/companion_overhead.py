"""What a DoubleHead adds to a training loop on one CPU thread: small networks, every 10th step, beside the bare loop.

    python benchmarks/companion_overhead.py --save

Epochs with and without `double.step()` take turns in one process, on two equal networks. Figures are CPU times of the
thread in the best round, so that other work on the machine counts little. Batches come from a DataLoader over tensors
in memory ("loader"), or are slices of these tensors ("slices"), for which the bare loop is as short as it can be.
"""

from __future__ import annotations

import copy
import json
import time

import records
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import DoubleHead

STEPS = 640  # in an epoch: 64 calibration batches, which the heads learn from in one burst
NETWORKS = {  # name: inputs, classes, batch size, layers
    "20-32-3": (20, 3, 32, lambda: [nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)]),
    "784-256-10": (784, 10, 64, lambda: [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)]),
    "784-1024-1024-10": (
        784, 10, 64,
        lambda: [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)],
    ),
    "LeNet": (
        784, 10, 64,
        lambda: [
            nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5),
            nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 120), nn.ReLU(), nn.Linear(120, 10),
        ],
    ),
}  # fmt: skip


def seconds(network, optimizer, double, batches) -> float:
    began = time.thread_time()
    for x, y in batches:
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if double is not None:
            double.step()
    if double is not None:
        _ = double.bank  # makes the heads' steps that are due, so that no epoch is timed without its own
    return time.thread_time() - began


def measure(name: str, source: str, duration: float) -> dict[str, float]:
    """Rounds for `duration` seconds: many of a small network, whose figures suffer most from other work."""
    torch.manual_seed(0)
    n_inputs, n_classes, size, layers = NETWORKS[name]
    network = nn.Sequential(*layers())
    bare = copy.deepcopy(network)  # which the companion never touches
    optimizer, other = (torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (network, bare))
    x, y = torch.randn(STEPS * size, n_inputs), torch.randint(n_classes, (STEPS * size,))
    loader = DataLoader(TensorDataset(x, y), size, shuffle=True)
    calib = TensorDataset(torch.randn(2000, n_inputs), torch.randint(n_classes, (2000,)))
    calib_data = DataLoader(calib, size, shuffle=True) if source == "loader" else calib
    double = DoubleHead(network, calib_data, follow=optimizer, batch_size=size)
    times: dict[str, list[float]] = {"bare": [], "with": []}
    end = time.monotonic() + duration
    while time.monotonic() < end or len(times["bare"]) < 3:
        for way, trained in (("bare", (bare, other, None)), ("with", (network, optimizer, double))):
            batches = loader if source == "loader" else zip(x.split(size), y.split(size))
            times[way].append(seconds(*trained, batches))
    alone, beside = (min(took[1:]) / STEPS * 1e6 for took in times.values())  # the first warms up
    return {
        "bare_us_per_step": round(alone),
        "with_us_per_step": round(beside),
        "ratio": round(beside / alone, 3),
        "rounds": len(times["bare"]) - 1,
    }


def main() -> None:
    parser = records.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=25, help="for each network and source")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        name: {source: measure(name, source, options.seconds) for source in ("loader", "slices")}
        for name in NETWORKS
    }
    result = {
        "what": "CPU time per step of the loop alone and with DoubleHead.step(), every=10, one thread",
        "results": found,
        **records.about(),
    }
    print(json.dumps(result, indent=1))
    if options.save:
        records.save("companion_overhead", result)


if __name__ == "__main__":
    main()
