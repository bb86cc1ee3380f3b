"""Confidence under distribution shift: a guard around any trained classifier, and an alarm.

The layers of a network change when its inputs are noisy, blurred or low in contrast, more than the logits show. A
`ShiftGuard` reads the mean and deviation of channels at a few normalisation layers and measures, layer by layer, how
far they lie from the calibration data's. Where they are far, it lowers the confidence and raises an alarm.
Predictions never change. `doublehead.guard` holds what it learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.calibrated import Calibrated
from doublehead.calibration_data import as_batches, unpack
from doublehead.guard import RATE, WINDOW, Guard, Observed, Shift
from doublehead.tasks import find_logits, with_logits
from doublehead.torch_tools import Tap, device_of, evaluating, seeded, uncompiled

VIEWS = 6  # perturbed copies of the calibration data to learn from
N_LAYERS = 9  # over the whole depth of the network
CHANNELS = 128  # of a layer at most, evenly spaced: more would take more data to know their usual values
SUPPORTED = (
    "a ShiftGuard supports classifiers with one of several classes for each sample, logits (B, K) and labels (B,), not "
    "one logit, several labels, tokens or pixels: got "
)


class ShiftGuard(nn.Module):
    """A trained classifier that is less confident where its inputs look unlike the calibration data, with an alarm.

    `model` is any classifier of samples into several classes without a guard, best a calibrated one; it is not changed.
    `fit` needs calibration data that the classifier did not learn from, and a perturbation such as
    `doublehead.data.Shifts`; without one there is only the alarm. `shift` is the test of the last `window` samples, and
    `reset` begins a new stream; `window=0` judges each sample by itself. `rate` is the largest share of clean windows
    that may raise an alarm.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    >>> batches = [(torch.rand(32, 3, 8, 8), torch.randint(4, (32,))) for _ in range(4)]
    >>> safe = ShiftGuard(net, window=16).fit(batches, lambda images: images + 0.3 * torch.randn_like(images))
    >>> safe(torch.rand(32, 3, 8, 8) + 2).shape, safe.shift.alarm
    (torch.Size([32, 4]), True)
    """

    goes_round_double_head = True  # calibrate and DoubleHead refuse a model with one inside

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] | None = None,
        *,
        window: int = WINDOW,
        rate: float = RATE,
    ) -> None:
        super().__init__()
        for name, module in uncompiled(model).named_modules():
            if isinstance(module, ShiftGuard):
                got = f"{type(uncompiled(model)).__name__} with one as {name!r}" if name else "a ShiftGuard"
                raise ValueError(
                    f"model must be a classifier without a ShiftGuard, got {got}: pass the model inside it"
                )
        self.model = model
        self.tap = StageTap(model, layers)
        with torch.inference_mode(False):  # the window moves on outside of it, too
            self.guard = Guard(self.tap.widths, window, rate).to(device_of(model)).eval()

    @property
    def shift(self) -> Shift:
        """Whether the last window of samples is shifted, with its p-value, strength and first sample."""
        return self.guard.shift

    def reset(self) -> None:
        """Begin a new stream."""
        self.guard.reset()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; in evaluation mode with its logits scaled by the guard.

        Those of a `Calibrated` stay normalised log-probabilities.
        """
        if self.training:
            return self.model(*args, **kwargs)
        output, logits, stages = self._run(self.model, args, kwargs)
        scaled: Tensor = self.guard(stages, logits)
        if isinstance(uncompiled(self.model), Calibrated):
            scaled = scaled.log_softmax(-1)
        return with_logits(output, scaled)

    def _run(self, model: nn.Module, args: Sequence[Any], kwargs: Any) -> tuple[Any, Tensor, Tensor]:
        """The model's output, its logits (B, K) and stages (B, S)."""
        with self.tap.recording(kwargs.get("attention_mask")):  # Hugging Face's name for what is not padding
            output = model(*args, **kwargs)
        logits = find_logits(output)
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise ValueError(f"{SUPPORTED}logits of shape {tuple(logits.shape)}")
        return output, logits, self.tap.take(logits.shape[0])

    @torch.inference_mode(False)
    def fit(
        self,
        calib_data: Any,
        perturb: Callable[[Any], Any] | None = None,
        *,
        views: int = VIEWS,
        prior: float | None = None,
        seed: int = 0,
    ) -> ShiftGuard:
        """Learn from calibration data and `views` perturbed copies of each batch; the model stays as it is.

        `calib_data` is a loader, a Dataset or a pair of arrays. A loader must give samples in random order, not sorted
        by class: neighbours form the windows to learn from. `perturb` should change a batch in one way, as real shifts
        do: `Shifts(share=1.0, together=True)`. `prior` is the share of shifted samples to expect outside of an alarm; a
        larger one guards single samples more and costs more on clean data. By default it is the largest one that costs
        at most 0.1 % of the NLL of held-back clean samples, by the upper 95 % bound.
        """
        with seeded(seed, device_of(self), calib_data):
            clean, perturbed = self.observe(calib_data, perturb, views)
        self.guard.fit(clean, perturbed, prior=prior, seed=seed)
        return self.eval()

    @torch.no_grad()
    def observe(
        self, calib_data: Any, perturb: Callable[[Any], Any] | None = None, views: int = VIEWS
    ) -> tuple[Observed, Observed | None]:
        """Run the model over calibration data and perturbed copies of it, and keep what the guard learns from."""
        if views < 1:
            raise ValueError(f"views must be at least 1, got {views}")
        clean: list[tuple[Tensor, ...]] = []
        perturbed: list[tuple[Tensor, ...]] = []
        n = 0
        batches = calib_data if isinstance(calib_data, Iterator) else as_batches(calib_data, shuffle=True)
        with evaluating(self):
            for number, batch in enumerate(batches):
                args, kwargs, labels, *_ = unpack(batch, device_of(self))
                samples = torch.arange(n, n + len(labels), device=labels.device)
                n += len(labels)
                # Clean batches are random samples of one distribution: all of them are one group.
                clean.append(self._look(args, kwargs, labels, torch.zeros_like(samples), samples))
                for view in range(views if perturb is not None else 0):
                    assert perturb is not None
                    other = (perturb(args[0]), *args[1:]) if args else args
                    others = kwargs if args else perturb(kwargs)
                    group = torch.full_like(samples, number * views + view)
                    perturbed.append(self._look(other, others, labels, group, samples))
        if not clean:
            raise ValueError("calib_data must hold at least one batch, got none")
        seen = [Observed(*(torch.cat(parts) for parts in zip(*rows))) for rows in (clean, perturbed) if rows]
        return seen[0], seen[1] if len(seen) > 1 else None

    def _look(self, args: Sequence[Any], kwargs: Any, *known: Tensor) -> tuple[Tensor, ...]:
        _, logits, stages = self._run(uncompiled(self.model), args, kwargs)
        if known[0].ndim != 1:
            raise ValueError(f"{SUPPORTED}labels of shape {tuple(known[0].shape)}")
        return stages, logits.float(), *known


class StageTap(Tap):
    """Catches what goes into some layers while a model runs, as a mean and a deviation per channel.

    `layers` names normalisation or linear layers. Without it the model is cut into nine equal parts, and the first
    normalisation layer of each is taken, or the first linear layer in a model without any. Of a layer with more than
    128 channels every second one is read, or every third, and so on. `widths` are the sizes of what is caught.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str] | None = None) -> None:
        super().__init__()
        modules = dict(uncompiled(model).named_modules())
        names = layers_to_read(model)
        if layers is None:
            places = [round(i * (len(names) - 1) / N_LAYERS) for i in range(N_LAYERS)]
            layers = names if len(names) <= N_LAYERS else [names[place] for place in places]
        unknown = [name for name in layers if name not in modules or not channels_of(modules[name])]
        if unknown or not layers:
            raise ValueError(
                f"layers must name normalisation or linear layers, such as {names[:3]}, got {unknown or layers}"
            )
        self.layers = list(layers)
        read = [-(-n // _stride(n)) for n in (channels_of(modules[name]) for name in self.layers)]
        self.widths = [width for width in read for _ in ("mean", "deviation")]
        for number, name in enumerate(self.layers):
            modules[name].register_forward_hook(partial(self._catch, number))
        if any(module is not uncompiled(module) for module in model.modules()):
            torch.compiler.reset()  # what was compiled before does not know the hooks and would skip them

    @contextmanager
    def recording(self, inside: Tensor | None = None) -> Iterator[None]:
        """Catch while the model runs in here; `take` gives what was caught.

        `inside` (B, T) is 0 where a text is only padding.
        """
        both = self._compiled, self.now
        for notes in both:
            notes.inside, notes.caught = inside, None
        self.record(True)
        try:
            yield
        finally:
            self.record(False)
            for notes in both:
                notes.inside = None

    def take(self, n: int) -> Tensor:
        """Return the stages (n, S) of the last run, over `n` samples, and forget them."""
        caught: dict[int, Tensor] = self.collect() or {}
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
        if self.now.recording:
            maps, stride = args[0].detach(), _stride(channels_of(layer))
            if _channels_last(layer, maps):
                maps = maps.movedim(-1, 1)
            found = {number: moments(maps[:, ::stride], self.now.inside)}
            self.now.caught = {**(self.now.caught or {}), **found}


def moments(maps: Tensor, inside: Tensor | None = None) -> Tensor:
    """The mean and the deviation of each channel over all places, (B, C, ...) -> (B, 2 C).

    Of texts (B, C, T) only the places where `inside` (B, T) is not 0 count.

    >>> moments(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]])).tolist()
    [[2.0, 5.0, 1.0, 0.0]]
    """
    with torch.autocast(maps.device.type, enabled=False):
        flat = maps.float().flatten(2) if maps.ndim > 2 else maps.float()[:, :, None]  # (B, C, places)
        if flat.shape[0] == 0:  # torch would warn of a deviation of nothing
            return flat.new_zeros(0, 2 * flat.shape[1])
        if inside is None or inside.shape != (maps.shape[0], *maps.shape[2:]):
            return torch.cat([flat.mean(-1), flat.std(-1, correction=0)], 1)
        share = (inside != 0).float()[:, None]
        share = share / share.sum(-1, keepdim=True).clamp(min=1)
        mean = (flat * share).sum(-1, keepdim=True)
        return torch.cat([mean[..., 0], ((flat - mean).square() * share).sum(-1).sqrt()], 1)


def _stride(n_channels: int) -> int:
    """Every how many channels one is read."""
    return max(1, math.ceil(n_channels / CHANNELS))


def layers_to_read(model: nn.Module) -> list[str]:
    """The names of a model's normalisation layers, or of the linear layers of a model without any."""
    modules = {name: module for name, module in uncompiled(model).named_modules() if channels_of(module)}
    found = [name for name, module in modules.items() if not isinstance(module, nn.Linear)]
    if not modules:
        raise ValueError(
            "model must have normalisation layers (BatchNorm, GroupNorm, LayerNorm) or a linear layer for a guard to "
            f"read, got {type(uncompiled(model)).__name__} without any"
        )
    return found or list(modules)


def channels_of(layer: nn.Module) -> int:
    """How many channels go into a normalisation or linear layer; 0 for any other module."""
    if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm) else 0


def _channels_last(layer: nn.Module, maps: Tensor) -> bool:
    """As LayerNorm has them; but ConvNeXt's kind of it, in torchvision and timm, takes maps (B, C, H, W)."""
    of_maps = type(layer) is not nn.LayerNorm and maps.ndim == 4 and maps.shape[1] == channels_of(layer)
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.LayerNorm) and not of_maps)


def watch(clean: Tensor, stream: Tensor, window: int = WINDOW, rate: float = RATE) -> Iterator[Shift]:
    """Test a stream of features (N, F) against clean ones (M, F), one window after the other.

    >>> clean, stream = torch.randn(500, 8), torch.cat([torch.randn(128, 8), 3 * torch.randn(128, 8)])
    >>> [shift.alarm for shift in watch(clean, stream)]
    [False, False, True, True]
    """
    for name, values in (("clean", clean), ("stream", stream)):
        finite = bool(torch.isfinite(values).all())
        if values.ndim != 2 or values.shape[1] != clean.shape[1] or not finite:
            raise ValueError(
                f"{name} must be finite numbers (N, {clean.shape[-1]}), got shape {tuple(values.shape)}"
                + ("" if finite else " with nan or inf")
            )
    if len(clean) < 2 * window:
        raise ValueError(f"clean must hold at least two windows of {window} rows, got {len(clean)} rows")
    stride = -(-clean.shape[1] // CHANNELS)
    clean, stream = (moments(values[:, ::stride]) for values in (clean, stream))
    guard = Guard([clean.shape[1] // 2] * 2, window, rate)
    none = torch.zeros(len(clean), dtype=torch.int64)
    guard.fit(Observed(clean, clean.new_zeros(len(clean), 2), none, none, torch.arange(len(clean))))
    for rows in stream.split(window):
        guard(rows, rows.new_zeros(len(rows), 2))
        yield guard.shift
