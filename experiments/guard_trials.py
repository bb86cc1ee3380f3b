"""Try settings of the shift guard on the calibration images of a finished run alone: no test image has a part in it.

    python experiments/guard_trials.py look runs/cifar10-resnet101-cross_entropy-e30-s0 --root data --output sights.npz
    python experiments/guard_trials.py try sights.npz --setting keep=0.95 --setting keep=0.8,margin=1.0

`look` runs the network, once and for all: over 70 % of the images to learn from, as they are and in corrupted copies,
each image by one family at a severity of 1 to 5; over 30 % held back, as they are and corrupted by every family at
severities 1, 3 and 5. It keeps logits, labels and how strange each image looks to the layers.

`try` fits seven guards for each --setting, by the library's own `Guard.fit` and `Guard.settle`: three without a part of
the families, four without a whole kind of them. Each is measured on images held back, clean and corrupted by families
that it never saw; beside them stands temperature scaling. The numbers go into guard-search.json (guard_search.py says
what they mean), in place of those that the same setting has there on the same network. No GPU, a minute each at most.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from committed import RESULTS
from doublehead.training.finish import as_plain
from guard_search import keep_search, read_search
from guard_sights import LOOKING, Seen, Settings, look, settled
from torch import Tensor

from doublehead import Predictions, metrics, shift_guard
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.data import FAMILIES
from doublehead.shift_guard import Guard, Sights, scaled
from doublehead.training.config import LEFT_OUT
from doublehead.training.run_folder import RunFolder, commit

TRYING = {  # what is in use, by names as guard_sights.LOOKING has them
    "keep": inspect.signature(Guard.fit).parameters["keep"].default,
    **{name: getattr(shift_guard, name.upper())
       for name in ("margin", "hidden", "steps", "cost", "batch", "lr", "weight_decay")},
    "seed": 0,
}  # fmt: skip
WORDS = {  # of a note; keep, margin and n_layers have columns of their own
    "channels": "at most {:,} channels of a layer", "shrink": "covariance shrunk by {:g}",
    "views": "corrupted copies to learn from: {:,}", "hidden": "{:,} hidden units", "steps": "{:,} steps",
    "cost": "cost of humility {:g}", "batch": "batches of {:,}", "lr": "learning rate {:g}",
    "weight_decay": "weight decay {:g}", "seed": "another seed ({})",
}  # fmt: skip


class Measured(Guard):
    """A guard that gets strangeness in place of stages, as `look` has measured it; all the rest is the library's."""

    def strangeness(self, stages: Tensor) -> Tensor:
        return stages

    def _measure(self, clean: Sights, perturbed: Sights) -> tuple[Sights, Sights]:
        self.standardise.set_moments(clean.stages)
        return clean, perturbed


def fitted(seen: Seen, left_out: Sequence[str], settings: Settings) -> Guard:
    """A guard that learned nothing from these families."""
    absent = [f"taught:{family}" for family in left_out]
    taught = [one for name, one in seen.sights.items() if name.startswith("taught:") and name not in absent]
    perturbed = Sights(*(torch.cat(parts) for parts in zip(*taught)))
    seed, clean = settings["seed"], seen.sights["fit"]
    guard = Measured([1] * clean.stages.shape[1], seed)
    guard.fit(clean, perturbed, keep=settings["keep"], steps=settings["steps"], seed=seed)
    guard.settle(seen.sights["settle"])
    return guard


def trial(seen: Seen, settings: Settings) -> dict[str, Any]:
    """The numbers of a setting: clean ones are means over all seven guards."""
    clean, unseen = [], {"family_ece": [], "kind_ece": []}
    with settled(settings), torch.no_grad():
        for fold, left_out in LEFT_OUT.items():
            guard = fitted(seen, left_out, settings)
            clean.append(guarded(guard, seen.sights["held"]))
            found = unseen["family_ece" if fold.isdecimal() else "kind_ece"]
            found += [ece(guarded(guard, seen.sights[name])) for name in shifted(seen, left_out)]
    return {"clean_ece": fmean(map(ece, clean)), "clean_nll": fmean(float(metrics.nll(p)) for p in clean),
            **{key: fmean(found) for key, found in unseen.items()}}  # fmt: skip


def guarded(guard: Guard, sights: Sights) -> Predictions:
    return Predictions(scaled(sights.logits, guard.scale * guard(sights.stages)), sights.labels)


def shifted(seen: Seen, families: Sequence[str]) -> list[str]:
    """The names of held-back images corrupted by these families."""
    return [name for name in seen.sights if name.partition(":")[0] in families]


def ece(predictions: Predictions) -> float:
    return float(metrics.ece(predictions))


def temperature_scaling(seen: Seen) -> dict[str, Any]:
    """The same numbers with a scalar temperature alone, which learns nothing from any family."""
    scale = fit_inverse_temperature(seen.sights["fit"].logits, seen.sights["fit"].labels)
    made = {part: Predictions(scale * one.logits, one.labels) for part, one in seen.sights.items()}
    both = fmean(ece(made[part]) for part in shifted(seen, FAMILIES))
    return {"clean_ece": ece(made["held"]), "clean_nll": float(metrics.nll(made["held"])),
            "family_ece": both, "kind_ece": both}  # fmt: skip


def entry(seen: Seen, settings: Settings | None) -> dict[str, Any]:
    """An entry of guard-search.json; temperature scaling's without settings."""
    about = seen.about
    numbers = temperature_scaling(seen) if settings is None else trial(seen, settings)
    made = {"network": about["network"], "reads": "nothing", "form": "temperature scaling", "keep": None}
    if settings is not None:
        margin = f", times {settings['margin']:g}" * (settings["margin"] != 1)
        n = len(about["layers"])
        reads = f"distances at {n} layer{'s' * (n != 1)}"
        form = f"all from twice the threshold on{margin}, then a temperature"
        made |= {"reads": reads, "form": form, "keep": settings["keep"]}
    made |= as_plain({**numbers, "n_images": len(seen.sights["held"].labels)})
    tried = {**about["settings"], **settings} if settings is not None else {}
    other = {name: value for name, value in tried.items() if value != {**LOOKING, **TRYING}[name]}
    note = "; ".join(WORDS[name].format(value) for name, value in other.items() if name in WORDS)
    made |= ({"note": note} if note else {}) | ({"chosen": True} if tried and not other else {})
    return {**made, "commit": commit(), "device": about["environment"]["device"]}


def read_setting(text: str) -> dict[str, Any]:
    """The settings in use but for those named.

    >>> read_setting("keep=0.8,hidden=4")["hidden"]
    4
    """
    named = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = sorted(set(named) - set(TRYING))
    if unknown:
        raise argparse.ArgumentTypeError(f"must set some of {', '.join(TRYING)}, got {', '.join(unknown)}")
    try:
        return {**TRYING, **{name: type(TRYING[name])(value) for name, value in named.items()}}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must give numbers, got {text!r}: {error}") from None


def asked() -> argparse.Namespace:
    """The options of the command line."""
    usual = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=usual)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("look", help="run the network of a finished run once")
    one.add_argument("run", type=Path, help="folder of a finished run on images")
    one.add_argument("--root", help="where the data sets lie")
    one.add_argument("--output", type=Path, required=True, help="the file to write, .npz")
    one.add_argument("--network", help='its title, such as "CIFAR-10, ResNet-101"; else the folder\'s name')
    one.add_argument("--seed", type=int, default=0, help="of the division and of the corruptions")
    for name, value in LOOKING.items():
        text = f"as in use: {value}"
        one.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=text)
    other = commands.add_parser("try", help="fit and measure guards on what look has written")
    other.add_argument("sights", type=Path, help="a file that look has written")
    text = ", ".join(f"{name}={value}" for name, value in TRYING.items())
    text = f"one trial each; what it does not name stays as it is in use: {text}"
    other.add_argument(
        "--setting", type=read_setting, action="append", default=[], metavar="NAME=VALUE,...", help=text
    )
    other.add_argument("--results", type=Path, default=RESULTS, help="folder of guard-search.json")
    return parser.parse_args()


def main() -> None:
    options = asked()
    if options.command == "look":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settings = {name: getattr(options, name) for name in LOOKING}
        name = options.network or options.run.resolve().name
        look(RunFolder(options.run), name, device, options.root, settings, options.seed).save(options.output)
        return
    seen = Seen.load(options.sights)
    for settings in (None, *options.setting):
        made = entry(seen, settings)
        keep_search([*read_search(options.results), made], options.results)
        print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
