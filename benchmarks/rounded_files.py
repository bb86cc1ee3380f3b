"""Every calibrator on probabilities as files have them: rounded to 6 .. 2 digits, or in half precision.

    python benchmarks/rounded_files.py            # prints the table
    python benchmarks/rounded_files.py --save     # also writes it into docs/rounded-files.md

The logits are those of a committed run (a ResNet-50 on CIFAR-10): calibrators are fitted on its 5,000 calibration
images and measured on its 10,000 test images. Nothing is downloaded; it takes a minute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import records
import torch
from torch import Tensor

from doublehead import Predictions, metrics
from doublehead.calibrators import CALIBRATORS, make

MARK = "<!-- written by benchmarks/rounded_files.py -->"
PAGE = Path(__file__).parents[1] / "docs" / "rounded-files.md"
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "exact": lambda probs: probs,
    "float16": Tensor.half,
    "6 digits": lambda probs: probs.round(decimals=6),
    "4 digits": lambda probs: probs.round(decimals=4),
    "3 digits": lambda probs: probs.round(decimals=3),
    "2 digits": lambda probs: probs.round(decimals=2),
}


def cell(method: str, form: str, splits: list[Predictions]) -> str:
    """ECE in percent and NLL on the test images."""
    calib, test = (
        Predictions.from_probs(FORMS[form](p.probs.double()), p.labels, tolerance=0.05) for p in splits
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = make(method).fit(calib).calibrate(test) if method != "none" else test
    return f"{100 * metrics.ece(after):.2f} / {metrics.nll(after):.3f}"


def main() -> None:
    options = records.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    run = records.stored_run("cifar10-resnet50-cross_entropy-e80-s0")
    splits = [run.calib.predictions, run.test.predictions]
    lines = ["| method | " + " | ".join(FORMS) + " |", "|---|" + "---:|" * len(FORMS)]
    methods = [name for name, kind in CALIBRATORS.items() if not kind.binary_only and name != "per_label"]
    for method in methods:
        cells = [cell(method, form, splits) for form in FORMS]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if options.save:
        records.fill(PAGE, MARK, "\n".join(lines))


if __name__ == "__main__":
    main()
