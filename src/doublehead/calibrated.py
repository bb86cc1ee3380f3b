"""A network and its calibration as one module, and the reading of calibration data that it is fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from doublehead.calibration_data import BATCH_SIZE, ToPair, as_batches, length_of, until_repeated
from doublehead.calibration_head import CalibrationHead, keep_top
from doublehead.network import POSITIONS, Answer, Reader, Readings
from doublehead.torch_tools import device_of, evaluating, from_every_process, meet, n_processes, seeded

ROWS_AT_ONCE = 1 << 17  # calibrated together: a large image has more
MAX_SAMPLES = 20_000  # read from calibration data that does not know its length and may be endless


class Heads(NamedTuple):
    """The log-probabilities of the network and of its calibrated answer, (N, K) each, of samples or positions."""

    main: Tensor
    calib: Tensor


class Calibrated(nn.Module):
    """A classifier and its calibration as one module. `model(x)` gives normalised log-probabilities (B, K).

    The output keeps its form: (B, T, K) for tokens, (B, K, H, W) for pixels. A network with one logit, or one per
    label, gives calibrated logits of the same shape: their sigmoid is the calibrated probability. An output that
    carries `logits`, as those of Hugging Face models do, comes back in the same form with the new ones in their
    place; any other comes back as a tensor. `head` maps main logits and features to calibrated logits: a
    CalibrationHead, or any Calibrator. `opinion` are heads that were trained beside the network, pooled by the
    staged head. The network's own answer is `model.network(x)`, both are `model.heads(x)`.
    """

    def __init__(
        self, network: nn.Module, head: nn.Module, reader: Reader, opinion: CalibrationHead | None = None
    ) -> None:
        super().__init__()
        self.network, self.head, self.opinion = network, head, opinion
        self.reader = reader

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's output with calibrated, normalised log-probabilities in place of its logits."""
        answer = self._run(args, kwargs)
        log_probs = self.calibrated(answer.logits, answer.features, answer.numbers)
        return self.reader.replaced(answer.output, log_probs)

    def heads(self, *args: Any, **kwargs: Any) -> Heads:
        """The log-probabilities of the network and the calibrated ones, as rows of classes in every task."""
        answer = self._run(args, kwargs)
        calib = self.calibrated(answer.logits, answer.features, answer.numbers)
        return Heads(answer.logits.float().log_softmax(-1), calib)

    def _run(self, args: Any, kwargs: Any) -> Answer:
        """The network's answer; in evaluation mode also where the network itself is trained on meanwhile."""
        if self.training or not self.network.training:
            return self.reader.run(args, kwargs, network=self.network)
        with evaluating(self.network):
            return self.reader.run(args, kwargs, network=self.network)

    def calibrated(self, main: Tensor, features: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Calibrated log-probabilities for given logits and features of the network."""
        return in_parts(self._calibrated, main, features, numbers)

    def _calibrated(self, main: Tensor, features: Tensor, numbers: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {}
        with torch.autocast(main.device.type, enabled=False):
            if self.opinion is not None:
                options["opinion"] = self.opinion(main, features).log_softmax(-1).mean(0)
            if numbers is not None and numbers.shape[-1]:
                options["numbers"] = numbers
            calibrated: Tensor = self.head(main, features, **options)
            log_probs = calibrated.float().log_softmax(-1)
            # Logits that a large temperature brings close together are equal after rounding.
            return keep_top(log_probs, main) if getattr(self.head, "keeps_order", False) else log_probs

    @torch.no_grad()
    def report(
        self, data: Any, path: str | Path | None = None, *, to_pair: ToPair | None = None, **options: Any
    ) -> Any:
        """Measure on test data: `Summaries` of the network, of a temperature where one was fitted, and calibrated.

        `print` shows NLL, ECE, its floor and accuracy of each. With `path`, an .html file, the page of
        `doublehead.report` is written too; `options` are its options.
        """
        from doublehead.audit import summaries

        with evaluating(self), seeded(0, device_of(self.network), data):
            readings = read(self.reader, data, to_pair)
            parts = (readings.logits, readings.features, readings.numbers)
            calib = in_parts(self._calibrated, *parts, at_once=BATCH_SIZE)
        outputs = {"network": readings.logits}
        # Where samples have several labels, the temperature is that of the calibrator they share.
        temperature = getattr(getattr(self.head, "shared", self.head), "temperature_", None)
        if temperature is not None:
            outputs["temperature"] = readings.logits / temperature
        outputs["calibrated"] = calib
        return summaries(outputs, readings.labels, readings.weights, self.reader.n_labels, path, **options)

    def extra_repr(self) -> str:
        """What was chosen, for print(model)."""
        return str(getattr(self.head, "choice", None) or "")

    def save(self, path: str | Path) -> Path:
        """Write weights and calibration into the folder `path`; `doublehead.load(path, network)` brings both back."""
        from doublehead.saving import save

        return save(self, path)

    def export(self, path: str | Path, example: Any, to: str = "onnx", **options: Any) -> Path:
        """Write one model with the outputs probs, label and confidence into the folder `path`; returns its file.

        `to` is "onnx", "torch-export" or "safetensors". `example` is a batch of inputs; `options` are those of
        `doublehead.integrations.export.export_model`.
        """
        from doublehead.integrations.export import export_model

        return export_model(self, path, example, to, **options)  # type: ignore[arg-type]


def in_parts(answer: Callable[..., Tensor], *rows: Tensor | None, at_once: int | None = None) -> Tensor:
    """`answer` for some rows, `at_once` in one pass; a large image has too many for one."""
    parts, at_once = [part for part in rows if part is not None], at_once or ROWS_AT_ONCE
    if torch.compiler.is_compiling() or parts[0].shape[0] <= at_once:
        return answer(*parts)
    n = min(len(part) for part in parts)  # samples, which may have several rows
    samples = max(1, at_once * n // len(parts[0]))
    return torch.cat([answer(*some) for some in zip(*(p.split(samples * (len(p) // n)) for p in parts))])


def read(
    reader: Reader,
    data: Any,
    to_pair: ToPair | None = None,
    positions: int = POSITIONS,
    alone: bool = False,
    skip: bool = False,
) -> Readings:
    """Run the network over calibration data once, or over enough of it where it has no length and may be endless.

    Where a DistributedSampler divides the samples among several processes, each process gets all of them, every
    sample once; with `alone` it gets only its own. With `skip` batches that cannot be used are left out.
    """
    batches: Iterable[Any] = as_batches(data)
    max_samples = math.inf
    if not length_of(batches):
        batches, max_samples = until_repeated(batches, to_pair), MAX_SAMPLES
    own = reader.read(batches, to_pair=to_pair, max_samples=max_samples, positions=positions, skip=skip)
    sampler = getattr(batches, "sampler", None)
    if alone or n_processes() == 1 or not isinstance(sampler, DistributedSampler):
        return own
    meet("report, or calibrate, with a DistributedSampler")
    n = n_own = len(own.features)
    if reader.task not in ("tokens", "pixels"):  # more samples are there to fill up
        n_own = len(range(sampler.rank, length_of(sampler.dataset), sampler.num_replicas))
    shares = from_every_process(
        tuple(None if part is None else part[: n_own * (len(part) // n)].cpu() for part in own)
    )
    device = own.labels.device
    return Readings(*(None if parts[0] is None else torch.cat(parts).to(device) for parts in zip(*shares)))  # type: ignore[arg-type]
