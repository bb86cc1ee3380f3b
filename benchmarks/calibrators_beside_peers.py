"""Our calibrators and probmetrics' on the same logits of trained networks: NLL, ECE, Brier score, side by side.

    PYTHONPATH=src peers/bin/python benchmarks/calibrators_beside_peers.py "CIFAR-10, ResNet-110" resnet110_c10.npz
    PYTHONPATH=src peers/bin/python benchmarks/calibrators_beside_peers.py "CIFAR-10, ResNet-50" RUN_FOLDER ...

Sources are those of experiments/post_hoc.py. Every method is fitted to the calibration data with its default settings
and measured by us on the test data. The numbers go into results/calibrators_beside_peers.json, in place of those that
the network has there; docs/calibrators.md shows them after `make results`. Install probmetrics in an environment of
its own, with numba and relplot, which it needs and does not name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent / "experiments"))

from doublehead.training.finish import as_plain  # noqa: E402
from post_hoc import PEERS_FILE, TEST, pairs  # noqa: E402

from doublehead import Predictions, Summary, calibrators  # noqa: E402
from doublehead.training.run_folder import environment  # noqa: E402

OURS = ("temperature", "gaussian_process", "head")
THEIRS = ("temp-scaling", "ts-mix", "svs", "sms")  # the last two: structured vector and matrix scaling
Method = Callable[[Predictions, Predictions], Predictions]


def ours(name: str) -> Method:
    return lambda calib, test: calibrators.make(name).fit(calib).calibrate(test)


def theirs(name: str) -> Method:
    def calibrated(calib: Predictions, test: Predictions) -> Predictions:
        logits = import_module("probmetrics.distributions").CategoricalLogits
        peer = import_module("probmetrics.calibrators").get_calibrator(name)
        peer.fit_torch(logits(calib.logits.float()), calib.labels)
        made = peer.predict_proba_torch(logits(test.logits.float()))
        return Predictions(made.get_logits().float(), test.labels)

    return calibrated


def methods() -> dict[str, Method]:
    """All by name."""
    return {**{name: ours(name) for name in OURS}, **{f"probmetrics {name}": theirs(name) for name in THEIRS}}


def measure(name: str, method: Method, calib: Predictions, test: Predictions) -> dict[str, Any]:
    """The numbers of one method on one pair."""
    began = time.perf_counter()
    made = method(calib, test)
    seconds = round(time.perf_counter() - began, 2)
    found = Summary.of(made).values
    return {"method": name, **{key: found[number] for key, number in TEST.items()}, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="what the table shall call it")
    parser.add_argument("sources", type=Path, nargs="+", help="run folders or files, one a seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [pair for source in options.sources for pair in pairs(source)]
    numbers = [measure(name, method, *pair) for name, method in methods().items() for pair in found]
    networks = json.loads(PEERS_FILE.read_text()) if PEERS_FILE.exists() else {}
    networks[options.network] = as_plain({
        "environment": {**environment(torch.device("cpu")), "probmetrics": version("probmetrics")},
        "sources": [source.name for source in options.sources],
        "numbers": numbers,
    })  # fmt: skip
    PEERS_FILE.write_text(
        json.dumps(networks, separators=(",", ":")).replace('{"method"', '\n{"method"') + "\n"
    )
    for one in numbers:
        print(f"{one['method']:25s} NLL {one['nll']:.4f} ECE {100 * one['ece']:.2f} {one['seconds']} s")


if __name__ == "__main__":
    main()
