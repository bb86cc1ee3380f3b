"""Humility under distribution shift: a guard that is added to any trained classifier and costs nothing on usual inputs.

The layers of a network see unusual things when its inputs are noisy, blurred or pale, long before the logits say so.
A `ShiftGuard` reads the mean and deviation of channels at a few normalisation layers, measures layer by layer how far
they lie from the calibration data's, in whatever direction, and learns from perturbed copies of that data by how much
to scale the logits down. On nine tenths of the unperturbed calibration data it then does nothing at all: only what
looks stranger than those makes it act. Predictions never change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.calibration_data import unpack
from doublehead.calibration_head import Standardise
from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.network import find_logits, with_logits
from doublehead.predictions import Predictions
from doublehead.torch_tools import StaysFloat32, device_of, evaluating, seeded, uncompiled

# Chosen on CIFAR-10 calibration images with families and whole kinds of corruption left out in turn (docs/results).
N_LAYERS = 9  # over the whole depth of the network
CHANNELS = 128  # of a layer at most, evenly spaced: more would take more data to know their usual ways
SHRINK = 0.02  # of a covariance towards the identity
HIDDEN = 16
STEPS, BATCH, LR, WEIGHT_DECAY = 1000, 256, 0.03, 1e-4
COST = 0.05  # of a unit of humility on unperturbed data, in nats
VIEWS = 6  # perturbed copies of the calibration data to learn from
MARGIN = 1.2  # how much more humility is shown than was learned: beside clean data too little is
MOST = 10.0  # humility there is
TINY = 1e-6


class Sights(NamedTuple):
    """What a guard learns from: stages (N, S), the classifier's logits (N, K), labels (N,)."""

    stages: Tensor
    logits: Tensor
    labels: Tensor


class StageTap:
    """Catches what goes into some normalisation layers while a model runs, as a mean and a deviation per channel.

    `layers` names them; without it the model is cut into `n_layers` equal parts, and the first layer of each is taken.
    Of a layer with more than 128 channels every second one is read, or every third, and so on. `widths` are the sizes
    of what is caught.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str] | None = None, n_layers: int = N_LAYERS
    ) -> None:
        found = normalisation_layers(model)
        names = list(found)
        if layers is None:
            places = [round(i * (len(names) - 1) / n_layers) for i in range(n_layers)]
            layers = names if len(names) <= n_layers else [names[place] for place in places]
        unknown = [name for name in layers if name not in found]
        if unknown or not layers:
            raise ValueError(
                f"layers must name normalisation layers, such as {names[:3]}, got {unknown or layers}"
            )
        self.layers = list(layers)
        read = [-(-n // _stride(n)) for n in (channels_of(found[name]) or 0 for name in self.layers)]
        self.widths = [width for width in read for _ in ("mean", "deviation")]
        self._recording = False
        self._caught: dict[int, Tensor] = {}
        for number, name in enumerate(self.layers):
            found[name].register_forward_hook(partial(self._catch, number))
        if any(module is not uncompiled(module) for module in model.modules()):
            torch.compiler.reset()  # what was compiled so far does not know the hooks and would pass them by

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Catch while the model runs in here; `take` gives what was caught."""
        self._recording, self._caught = True, {}
        try:
            yield
        finally:
            self._recording = False

    def take(self, n: int) -> Tensor:
        """The stages (n, S) of the last run, which was over `n` samples; they are let go."""
        caught, self._caught = self._caught, {}
        missing = [name for number, name in enumerate(self.layers) if number not in caught]
        if missing:
            raise RuntimeError(f"layers must be run in the model's forward, but these were not: {missing}")
        strange = [name for number, name in enumerate(self.layers) if caught[number].shape[0] != n]
        if strange:
            raise RuntimeError(
                f"layers must see one row for each of the {n} samples, but these do not: {strange}; "
                "name others with layers=[...]"
            )
        return torch.cat([caught[number] for number in range(len(self.layers))], 1)

    def _catch(self, number: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._recording:
            maps, last = args[0].detach(), _channels_last(layer, args[0])
            stride = _stride(channels_of(layer) or 1)
            self._caught[number] = moments(maps[..., ::stride] if last else maps[:, ::stride], last)


def moments(maps: Tensor, channels_last: bool = False) -> Tensor:
    """The mean and the deviation of each channel over all places, (B, C, ...) or (B, ..., C) -> (B, 2 C).

    >>> moments(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]])).tolist()
    [[2.0, 5.0, 1.0, 0.0]]
    """
    with torch.autocast(maps.device.type, enabled=False):
        maps = maps.float().flatten(1, -2) if channels_last and maps.ndim > 2 else maps.float()
        maps = maps.mT if channels_last and maps.ndim > 2 else maps
        flat = maps.flatten(2) if maps.ndim > 2 else maps[:, :, None]  # (B, C, places)
        if flat.shape[0] == 0:  # torch would warn of a deviation of nothing
            return flat.new_zeros(0, 2 * flat.shape[1])
        return torch.cat([flat.mean(-1), flat.std(-1, correction=0)], 1)


def _stride(n_channels: int) -> int:
    """Every how many channels one is read."""
    return max(1, math.ceil(n_channels / CHANNELS))


def normalisation_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The normalisation layers of a model by name; an error for a model without any, which cannot be guarded."""
    model = uncompiled(model)
    found = {name: module for name, module in model.named_modules() if channels_of(module)}
    if not found:
        raise ValueError(
            "model must have normalisation layers (BatchNorm, GroupNorm, LayerNorm) for a guard to read, "
            f"got {type(model).__name__} without any"
        )
    return found


def channels_of(layer: nn.Module) -> int | None:
    """How many channels a normalisation layer has; None for any other module."""
    if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    return layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm) else None


def _channels_last(layer: nn.Module, maps: Tensor) -> bool:
    """As LayerNorm has them; but ConvNeXt's kind of it, in torchvision and timm, takes maps (B, C, H, W)."""
    of_maps = type(layer) is not nn.LayerNorm and maps.ndim == 4 and maps.shape[1] == channels_of(layer)
    return isinstance(layer, nn.LayerNorm) and not of_maps


class Distance(nn.Module):
    """Values (B, W) -> how far each row is from the usual ones, (B, 1): the logarithm of a mean squared distance.

    It is measured in units in which the usual values vary by 1 in every direction (Mahalanobis' distance), so a shift
    that breaks the usual relations between channels counts, even where each channel alone looks usual.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("root", torch.eye(width))  # of the inverse covariance
        self.mean: Tensor
        self.root: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """The distance of each row."""
        squares = ((values.float() - self.mean) @ self.root).square()
        return squares.mean(-1, keepdim=True).clamp(min=TINY).log()

    @torch.no_grad()
    def set_usual(self, values: Tensor) -> Tensor:
        """Take (N, W) for what is usual; the distance of each row from all the others, (N, 1).

        From statistics that it is part of a row is nearer than a new one would be: with few rows by far.
        """
        device, n, values = values.device, len(values), values.cpu().double()  # some devices have no float64
        mean, deviation = values.mean(0), values.std(0, correction=0).clamp(min=TINY)
        unit = (values - mean) / deviation
        eye = torch.eye(len(mean), dtype=unit.dtype)
        covariance = torch.lerp(unit.mT @ unit / n, eye, SHRINK)
        lower: Tensor = torch.linalg.cholesky(covariance)
        root = torch.linalg.solve_triangular(lower, eye, upper=False).mT
        self.mean.copy_(mean)
        self.root.copy_(root / deviation[:, None])
        # Sherman and Morrison's formula takes a row out of the covariance; its mean moves away from the row too.
        squares, grown = (unit @ root).square().sum(1, keepdim=True), n / max(1, n - 1)
        squares = grown**2 * squares / (1 - (1 - SHRINK) * squares / n).clamp(min=TINY)
        far: Tensor = (squares / len(mean)).clamp(min=TINY).log()
        return far.float().to(device)


class Guard(StaysFloat32):
    """Stages (B, S) -> the factor (B, 1) by which to scale logits, above 0; 1 up to the threshold of humility.

    Before `fit` it is 1 everywhere. It computes in float32 whatever the model does.
    """

    def __init__(self, widths: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        self.seed, self.widths = seed, list(widths)
        self.distances = nn.ModuleList(Distance(width) for width in widths)
        self.standardise = Standardise(len(self.widths))
        with seeded(seed):  # the caller's random numbers stay as they were
            self.first, self.last = nn.Linear(len(self.widths), HIDDEN), nn.Linear(HIDDEN, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, -0.5)  # little humility to begin with
        self.register_buffer("threshold", torch.full((), math.inf))
        self.register_buffer("scale", torch.ones(()))  # of all logits: the last temperature, see `settle`
        self.threshold: Tensor
        self.scale: Tensor

    def strangeness(self, stages: Tensor) -> Tensor:
        """(B, S) -> (B, 2 L): how far the means and the deviations of each layer are from the calibration data's."""
        with torch.autocast(stages.device.type, enabled=False):
            parts = stages.split(self.widths, 1)
            return torch.cat([distance(part) for distance, part in zip(self.distances, parts)], 1)

    def humility(self, stages: Tensor) -> Tensor:
        """How far to turn the logits down, (B, 1): the logarithm of a temperature, before the threshold."""
        return self._humility(self.strangeness(stages))

    def _humility(self, strangeness: Tensor) -> Tensor:
        with torch.autocast(strangeness.device.type, enabled=False):
            hidden = F.relu(self.first(self.standardise(strangeness)))
            return F.softplus(self.last(hidden), beta=4)

    def forward(self, stages: Tensor) -> Tensor:
        """The factor (B, 1); the least there is for stages that are not finite.

        Up to the threshold there is no humility, from twice the threshold on all of it, and between a growing part.
        """
        humility = self.humility(stages).nan_to_num(MOST)
        share = (humility / self.threshold - 1).clamp(0, 1)
        return (-(MARGIN * share * humility).clamp(max=MOST)).exp()

    def fit(
        self, clean: Sights, perturbed: Sights, *, keep: float = 0.9, steps: int = STEPS, seed: int = 0
    ) -> None:
        """Learn from both by their NLL, then set the threshold: a share `keep` of the clean ones is left alone.

        It starts anew each time: nothing of an earlier fit stays.
        """
        if not 0 <= keep <= 1:
            raise ValueError(f"keep must lie in 0..1, got {keep}")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        for sights in (clean, perturbed):
            _check(sights)
        self.load_state_dict(Guard(self.widths, self.seed).state_dict())
        clean, perturbed = self._measure(clean, perturbed)
        start = float(fit_inverse_temperature(clean.logits, clean.labels))
        with seeded(seed, device_of(self)), torch.enable_grad():
            self.train()
            parameters = list(self.parameters())
            optimizer = torch.optim.SGD(parameters, LR, 0.9, weight_decay=WEIGHT_DECAY, nesterov=True)
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / steps))
                optimizer.zero_grad()
                self._loss(start, clean, perturbed).backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        self.zero_grad()  # an optimizer over the whole model's parameters shall leave the guard alone
        self.eval()
        with torch.no_grad():
            self.threshold.copy_(self._humility(clean.stages).quantile(keep).clamp(min=TINY))

    @torch.no_grad()
    def _measure(self, clean: Sights, perturbed: Sights) -> tuple[Sights, Sights]:
        """Learn what is usual from clean sights; both with their strangeness in place of their stages."""
        parts = clean.stages.split(self.widths, 1)
        each = [distance.set_usual(part) for distance, part in zip(self.distances, parts)]  # type: ignore[operator]
        clean = clean._replace(stages=torch.cat(each, 1))
        self.standardise.set_moments(clean.stages)
        return clean, perturbed._replace(stages=self.strangeness(perturbed.stages))

    @torch.no_grad()
    def settle(self, clean: Sights) -> None:
        """Fit the last temperature to the guarded logits of calibration data."""
        self.scale.copy_(fit_inverse_temperature(scaled(clean.logits, self(clean.stages)), clean.labels))

    def _loss(self, start: float, clean: Sights, perturbed: Sights) -> Tensor:
        """Of half a batch of each; the clean half also pays for its humility."""
        halves = []
        for sights in (clean, perturbed):
            rows = torch.randint(len(sights.labels), (BATCH // 2,), device=sights.labels.device)
            halves.append(Sights(*(part[rows] for part in sights)))
        stages, logits, labels = (torch.cat(parts) for parts in zip(*halves))
        humility = self._humility(stages)
        nll = F.cross_entropy(start * logits * (-humility).exp(), labels)
        return nll + COST * humility[: BATCH // 2].mean()


class ShiftGuard(nn.Module):
    """A trained classifier that becomes less sure where its input looks unlike the calibration data.

    `model` is any classifier without a guard, a DoubleHead among them; it is not changed. `fit` needs calibration data
    that the classifier did not learn from, and a perturbation such as `doublehead.data.Shifts`, and takes about
    `views + 1` passes over the data; after a `refit` of the DoubleHead it is due again. `guard` is the part that
    learned, `guard.threshold` from where on it acts.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    >>> batches = [(torch.rand(32, 3, 8, 8), torch.randint(4, (32,)))]
    >>> safe = ShiftGuard(net).fit(batches, lambda images: images + 0.3 * torch.randn_like(images))
    >>> safe(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 4])
    """

    goes_round_double_head = True  # a DoubleHead refuses a model with one inside

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] | None = None,
        *,
        n_layers: int = N_LAYERS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_unguarded(model)
        self.model = model
        self.tap = StageTap(model, layers, n_layers)
        self.guard = Guard(self.tap.widths, seed).to(device_of(model)).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; in evaluation mode with its logits scaled by the guard's factor."""
        if self.training:
            return self.model(*args, **kwargs)
        with self.tap.recording():
            output = self.model(*args, **kwargs)
        logits = find_logits(output)
        return with_logits(
            output, scaled(logits, self.guard.scale * self.guard(self.tap.take(logits.shape[0])))
        )

    def fit(
        self,
        calib_batches: Iterable[Any],
        perturb: Callable[[Any], Any],
        *,
        views: int = VIEWS,
        keep: float = 0.9,
        steps: int = STEPS,
        settle: bool = False,
        seed: int = 0,
    ) -> ShiftGuard:
        """Learn humility from calibration data and `views` perturbed copies of it; the model stays as it is.

        `settle` also fits a last scalar temperature to what comes out: for a model that is not calibrated yet.

        `keep` is the share of the unperturbed data on which the guard never acts. `calib_batches` is iterated
        again for each view.
        """
        with seeded(seed, device_of(self)):
            clean = self.look(calib_batches)
            perturbed = self.look_at_views(calib_batches, perturb, views)
        self.guard.fit(clean, perturbed, keep=keep, steps=steps, seed=seed)
        if settle:
            self.guard.settle(clean)
        return self.eval()

    @torch.no_grad()
    def look(self, batches: Iterable[Any], perturb: Callable[[Any], Any] | None = None) -> Sights:
        """Run the model over (perturbed) batches in evaluation mode and keep what the guard learns from."""
        rows = []
        with evaluating(self), self.tap.recording():
            for batch in batches:
                args, kwargs, labels, _ = unpack(batch, device_of(self))
                if perturb is not None:
                    args = (perturb(args[0]), *args[1:]) if args else args
                    kwargs = kwargs if args else perturb(kwargs)
                logits = find_logits(uncompiled(self.model)(*args, **kwargs)).float()
                rows.append((self.tap.take(logits.shape[0]), logits, labels))
        if not rows:
            raise ValueError(
                "calib_batches must hold at least one batch and start again when iterated again, got none"
            )
        return Sights(*(torch.cat(parts) for parts in zip(*rows)))

    def look_at_views(
        self, batches: Iterable[Any], perturb: Callable[[Any], Any], views: int = VIEWS
    ) -> Sights:
        """Look at so many perturbed copies of the batches, one after the other."""
        if views < 1:
            raise ValueError(f"views must be at least 1, got {views}")
        seen = [self.look(batches, perturb) for _ in range(views)]
        return Sights(*(torch.cat(parts) for parts in zip(*seen)))


def _check_unguarded(model: nn.Module) -> None:
    model = uncompiled(model)
    for name, module in model.named_modules():
        if isinstance(module, ShiftGuard):
            got = f"{type(model).__name__} with one as {name!r}" if name else "a ShiftGuard"
            raise ValueError(
                f"model must be a classifier without a ShiftGuard, got {got}: guard what that one guards"
            )


def _check(sights: Sights) -> None:
    Predictions(sights.logits, sights.labels)  # refuses what is empty, not finite, or has labels out of range
    if not bool(torch.isfinite(sights.stages).all()):
        raise ValueError("what the model's layers see must be finite, got nan or inf")


def scaled(logits: Tensor, factor: Tensor) -> Tensor:
    """Logits (B, K) times a factor (B, 1), moved so that the largest is 0: rounding can never make a new tie there."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits - logits.amax(-1, keepdim=True)) * factor
