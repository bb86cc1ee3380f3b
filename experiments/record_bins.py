"""Write the bins of a committed run from its saved predictions, for runs whose results.json has none.

    python experiments/record_bins.py runs/cifar10-resnet50-cross_entropy-e30-s0/predictions

The folder holds test-<output>.npz of a run whose results are in experiments/results under the name of the folder above
it, or under --run. Each output's bins must give the ECE that results.json states, or nothing is written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from committed import RESULTS, Run, bins_of, small

from doublehead import Predictions
from doublehead.training.evaluation import binned


def bins_from(run: Run, folder: Path) -> dict[str, Any]:
    """Bins of every output found in `folder`, as trained and after the temperature that results.json states."""
    made: dict[str, Any] = {}
    for file in sorted(folder.glob("test-*.npz")):
        output = file.stem.removeprefix("test-")
        if output not in run.results["outputs"]:
            raise SystemExit(f"{file} must hold an output of {run.name}, which has none called {output!r}")
        p = Predictions.load(file)
        scaled = Predictions(p.logits / run.number(output, "temperature", ""), p.labels)
        made[output] = {"before": small(binned(p)), "after": small(binned(scaled))}
        check(run, output, made[output])
    return made


def check(run: Run, output: str, bins: dict[str, Any]) -> None:
    """The bins must be those of the run: they give its ECE."""
    for when, recorded in bins.items():
        stated, found = run.number(output, "ece", when), float(bins_of(recorded).ece())
        if stated is None or abs(stated - found) > 1e-5:
            raise SystemExit(
                f"{run.name}, {output}, {when}: ECE {stated} in results.json, {found} from predictions"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("predictions", type=Path)
    parser.add_argument("--run", help="the run's name in experiments/results")
    options = parser.parse_args()
    run = Run.read(RESULTS / (options.run or options.predictions.resolve().parent.name))
    made = bins_from(run, options.predictions)
    (run.path / "bins.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")
    print(f"{run.name}: bins of {', '.join(made)}")


if __name__ == "__main__":
    main()
