"""Rivals that need more than one network's logits: an ensemble of seeds, and last-layer retraining.

    python experiments/rivals.py runs/cifar10-resnet50-... --root data   # retrains last layers of run folders (a GPU)

The ensemble is made from committed logits: the mean probability of several seeds, as it is and after a temperature.
Last-layer retraining is the two-stage training of Jordahn and Olmos (ICML 2024): the network is frozen, and a new head
with one hidden layer is trained on the training data for 40 epochs with Adam at 1e-4.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from results import Scores, Split, StoredRun, rows_of, store
from run import certificate_of, reopened
from torch import Tensor

from doublehead import PAPER, CalibrationHead, Predictions
from doublehead.calibration_data import unpack
from doublehead.calibrators import Temperature
from doublehead.torch_tools import evaluating
from doublehead.training.config import Config
from doublehead.training.run import Run
from doublehead.training.run_folder import RunFolder

MIN_MEMBERS = 3
EPOCHS, LR = 40, 1e-4


# --- ensemble


def ensembles(runs: Sequence[StoredRun]) -> Iterator[tuple[str, list[StoredRun]]]:
    """Runs that differ in their seed alone, three or more, with a name for them."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        bare = replace(run.config, seed=0, heads={}, auto=False, guards=(), every_of={}, augment_of={})
        bare = replace(bare, evaluate_every=1, record_gradients=False, shift=(), predict_train=True)
        groups.setdefault(bare.to_json(), []).append(run)
    for text, members in groups.items():
        if len(members) >= MIN_MEMBERS:
            config = Config.from_json(text)
            yield f"{config.name.removesuffix('-s0')}-ensemble{len(members)}", members


def mean_of(members: Sequence[Predictions]) -> Predictions:
    """Predictions whose probabilities are the mean of the members'.

    >>> one, two = Predictions([[0.0, 0.0]], [0]), Predictions.from_probs([[0.9, 0.1]], [0])
    >>> [round(p, 3) for p in mean_of([one, two]).probs[0].tolist()]
    [0.7, 0.3]
    """
    for member in members[1:]:
        if not torch.equal(member.labels, members[0].labels):
            raise ValueError("members must have predicted the same samples in the same order")
    probs = torch.stack([member.probs.double() for member in members]).mean(0)
    return Predictions.from_probs(probs, members[0].labels)


def ensemble_rows(name: str, members: Sequence[StoredRun]) -> Iterator[tuple[object, ...]]:
    """Lines of the long table; phi and delta compare with the average member, raw and after temperature scaling."""
    calib, test = (
        mean_of([getattr(run, split).predictions for run in members]) for split in ("calib", "test")
    )
    scaled = [Temperature().fit(run.calib.predictions).calibrate(run.test.predictions) for run in members]
    none = average([Scores.of(run.test.predictions) for run in members])
    temperature = average([Scores.of(p) for p in scaled])
    yield from rows_of(name, "none", Scores.of(test).numbers(none, temperature))
    after = Temperature().fit(calib).calibrate(test)
    yield from rows_of(name, "temperature", Scores.of(after).numbers(none, temperature))


def average(scores: Sequence[Scores]) -> Scores:
    """Scores with the mean NLL of several."""
    return scores[0]._replace(nll=torch.stack([one.nll for one in scores]).mean(0))


# --- last-layer retraining


def retrain(run: Run, epochs: int = EPOCHS) -> dict[str, Predictions]:
    """The predictions of a fresh head that was trained on the training data, on the frozen network of a run."""
    head = CalibrationHead(run.reader.n_features, run.reader.n_classes, replace(PAPER, seed=run.config.seed))
    head.to(run.fabric.device)
    optimizer = torch.optim.Adam(head.parameters(), LR)
    for _ in range(epochs):
        for batch in run.inputs.train:
            main, features, labels = seen(run, batch)
            F.cross_entropy(head(main, features), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    made = {}
    for split in ("calib", "test"):
        rows = [seen(run, batch) for batch in run.inputs.whole(getattr(run.inputs.splits, split))]
        with torch.no_grad():
            logits = torch.cat([head(main, features) for main, features, _ in rows])
        made[split] = Predictions(logits.cpu(), torch.cat([labels for *_, labels in rows]).cpu())
    return made


def seen(run: Run, batch: object) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, features and labels of a batch."""
    args, kwargs, labels, _ = unpack(batch, run.fabric.device)
    with torch.no_grad(), evaluating(run.net), run.fabric.autocast():
        _, features, main, _ = run.reader.run(args, kwargs)
    return main.float(), features.float(), labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--root")
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()
    for path in options.folders:
        folder = RunFolder(path)
        run = reopened(folder, options.root, options.accelerator)
        made = retrain(run)
        splits = {name: Split(p.labels, p.logits) for name, p in made.items()}
        name = run.config.name.replace(run.config.loss, "last_layer", 1)
        about = {
            **certificate_of(folder),
            "method": f"last-layer retraining, {EPOCHS} epochs, Adam at {LR:g}",
        }
        file = store(name, splits["calib"], splits["test"], {}, about)
        print(f"{name}: {file.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
