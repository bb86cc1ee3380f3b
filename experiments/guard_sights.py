"""What guards are tried on: calibration images of a finished run as its network sees them; see guard_trials.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from constants import constants
from doublehead.plumbing import seeded
from last_layer import trained
from torch import Tensor

from doublehead import shift_guard
from doublehead.data import FAMILIES, Normalise, Perturb, Shifts, corrupt
from doublehead.shift_guard import Guard, ShiftGuard, Sights
from doublehead.training.inputs import Inputs, load_inputs
from doublehead.training.run_folder import RunFolder, environment

HELD_BACK, SEVERITIES = 0.3, (1, 3, 5)
# What is in use; each name in capitals is the constant of shift_guard that it stands for.
LOOKING = {name: getattr(shift_guard, name.upper()) for name in ("n_layers", "channels", "shrink", "views")}
Settings = Mapping[str, Any]


class Seen(NamedTuple):
    """What `look` keeps: Sights whose stages are strangeness, (N, 2 L), and where they come from.

    `fit` are the clean images to learn from, each measured by the others, and `settle` the same as the finished guard
    sees them; `held` those held back. `taught:FAMILY` are corrupted ones to learn from, `FAMILY:SEVERITY` held back.
    """

    sights: dict[str, Sights]
    about: dict[str, Any]

    def save(self, file: Path) -> None:
        """As arrays alone, with `about` as text."""
        arrays = {f"{part}/{name}": one.cpu().numpy() for part, sights in self.sights.items()
                  for name, one in sights._asdict().items()}  # fmt: skip
        np.savez_compressed(file, about=np.array(json.dumps(self.about)), **arrays)

    @classmethod
    def load(cls, file: Path) -> Seen:
        """What `save` wrote."""
        with np.load(file) as held:
            parts = sorted({name.partition("/")[0] for name in held.files} - {"about"})
            sights = {
                part: Sights(*(torch.from_numpy(held[f"{part}/{name}"]) for name in Sights._fields))
                for part in parts
            }
            return cls(sights, json.loads(str(held["about"])))


def settled(settings: Settings) -> AbstractContextManager[None]:
    """Those settings that are constants of shift_guard, set for a while."""
    theirs = {name.upper(): value for name, value in settings.items() if hasattr(shift_guard, name.upper())}
    return constants(shift_guard, theirs)


def look(
    folder: RunFolder, network: str, device: torch.device, root: str | None, settings: Settings, seed: int = 0
) -> Seen:
    """Run a finished run's network over its calibration images, clean and corrupted."""
    if not folder.finished:
        raise SystemExit(f"{folder.path} must be the folder of a finished run: results.json is not there")
    inputs = load_inputs(folder.config, device, None, root)
    if inputs.normalise is None:
        raise SystemExit(f"{folder.path} must be a run on images, got one on {folder.config.data}")
    learn, held = divided(inputs, seed)
    families = [family for family in FAMILIES if inputs.coloured or family != "saturate"]
    dealt: list[Tensor] = []
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=folder.config.precision == "bf16-mixed")
    with settled(settings), seeded(seed, device), bf16:
        guard = ShiftGuard(trained(folder, inputs, device), n_layers=settings["n_layers"])
        clean = guard.look(learn)
        perturb = partial(deal, families, inputs.normalise, dealt)
        taught = guard.look_at_views(learn, perturb, settings["views"])
        generator = torch.Generator(device).manual_seed(seed)
        seen = {"held": guard.look(held)}
        for family, severity in ((family, severity) for family in families for severity in SEVERITIES):
            one = partial(corrupt, family=family, severity=severity, generator=generator)
            seen[f"{family}:{severity}"] = guard.look(held, Perturb([one], 1.0, inputs.normalise))
        fit, taught = guard.guard._measure(clean, taught)
    seen = {name: _strange(guard.guard, one) for name, one in {"settle": clean, **seen}.items()}
    for number, family in enumerate(families):
        seen[f"taught:{family}"] = Sights(*(part[torch.cat(dealt) == number] for part in taught))
    about = {"network": network, "layers": guard.tap.layers, "settings": dict(settings), "seed": seed}
    return Seen({"fit": fit, **seen}, {**about, "environment": environment(device)})


def divided(inputs: Inputs, seed: int) -> tuple[Any, Any]:
    """Batches of the calibration images to learn from, and of those held back."""
    calib = inputs.splits.calib
    order = np.random.RandomState(seed).permutation(len(calib))
    n_held = round(HELD_BACK * len(order))
    learn, held = (inputs.whole(calib.take(np.sort(rows))) for rows in (order[n_held:], order[:n_held]))
    return learn, held


def deal(families: Sequence[str], normalise: Normalise, dealt: list[Tensor], images: Tensor) -> Tensor:
    """Corrupt each image by one of the families, as Shifts does, and put the numbers of these into `dealt`."""
    turn = int(torch.randint(len(families), ()))
    which = (torch.arange(len(images), device=images.device) + turn) % len(families)
    perturbed = images.clone()
    for number, family in enumerate(families):
        mine, others = which == number, [other for other in FAMILIES if other != family]
        if bool(mine.any()):
            perturbed[mine] = Shifts(1.0, normalise, others)(images[mine])
    dealt.append(which)
    return perturbed


def _strange(guard: Guard, sights: Sights) -> Sights:
    return sights._replace(stages=guard.strangeness(sights.stages))
