"""Many calibration heads on one network, trained as one: a search over beta0, lr and kind, and ensembles.

Heads of the same shape are one stacked computation, so a whole sweep costs little more than one head. What came out
best is chosen by a proper score on calibration data held back from the heads' training, if it beats one fitted scalar
temperature there by more than chance; a `LastMap`, a temperature with or without a smooth curve, follows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.double_head import Annealing, CalibrationHead, Readings, Reads
from doublehead.head_inputs import Standardise
from doublehead.last_map import LastMap
from doublehead.losses import brier, cross_entropy
from doublehead.plumbing import StaysFloat32, evaluating

SCORES = {"nll": cross_entropy, "brier": brier}
FEW, MANY = (
    50,
    150,
)  # held-back samples below which `select` warns, or an "mlp" does not compete; its docstring says why


@dataclass(frozen=True)
class HeadSpec:
    """One head of a bank: it reads features unless told otherwise, also where it gives temperatures.

    `lr` is relative to the learning rate of the Alternation that trains the bank.
    """

    beta0: float = 1.0
    lr: float = 1.0
    kind: Literal["mlp", "temperature"] = "temperature"
    hidden: int | None = None
    reads: Reads | tuple[Reads, ...] = "features"
    dropout: float = 0.0
    standardise: bool | None = None
    seed: int = 0
    fold: int | None = (
        None  # the fold of the calibration data (0 to N_FOLDS - 1) that this head never trains on
    )

    def make(self, n_features: int, n_classes: int) -> CalibrationHead:
        """The head that this describes."""
        return CalibrationHead(
            n_features,
            n_classes,
            self.kind,
            self.hidden,
            reads=self.reads,
            dropout=self.dropout,
            standardise=self.standardise,
            seed=self.seed,
        )


_AUTO_INPUTS: tuple[tuple[tuple[Reads, ...], int | None, float], ...] = (
    (("features",), None, 0.1),
    (("statistics",), 16, 0.3),
    (("statistics", "features"), 32, 0.1),
)
AUTO = (
    *(
        HeadSpec(beta0=beta0, lr=lr, kind="temperature", reads=reads, hidden=hidden)
        for reads, hidden, lr in _AUTO_INPUTS
        for beta0 in (1.0, 1.1, 1.2, 1.35)
    ),
    *(HeadSpec(beta0=beta0, kind="mlp") for beta0 in (1.0, 1.2)),  # the paper's, without and with annealing
)


@dataclass(frozen=True)
class Selection:
    """What `select` chose: a head's number, or None for the scalar temperature, and every candidate's score.

    Scores are means over the held-back data, each candidate at the scale that suits it best there; `temperature` is the
    last one, by which the chosen logits are divided, and `bends` says whether a smooth curve follows.
    """

    index: int | None
    spec: HeadSpec | None
    scores: tuple[float, ...]
    temperature_score: float
    temperature: float
    bends: bool


class HeadBank(StaysFloat32):
    """Calibration heads of many settings on one network, in place of one head.

    In training mode it gives the logits of all heads, (H, B, K). In evaluation mode it gives those of the head that
    `select` chose, or, before that and after `ensemble()`, the logarithm of the heads' mean probabilities.

    >>> specs = [HeadSpec(beta0=b) for b in (1.0, 1.2, 1.5)]
    >>> from doublehead import DoubleHead
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> model = DoubleHead(net, head=lambda n_features, n_classes: HeadBank(n_features, n_classes, specs))
    >>> model.head.all_heads(torch.randn(5, 16), torch.randn(5, 3)).shape
    torch.Size([3, 5, 3])
    """

    lr = 0.1  # what the heads' own rates are relative to, where an Alternation is not told otherwise
    CHOSEN_TEMPERATURE = -1  # values of `chosen` that are not a head's number
    ENSEMBLE = -2

    def __init__(self, n_features: int, n_classes: int, specs: Sequence[HeadSpec]) -> None:
        super().__init__()
        if not specs:
            raise ValueError("specs must hold at least one HeadSpec, got none")
        self.specs = tuple(specs)
        self.sizes = (n_features, n_classes)
        groups: dict[
            HeadSpec, list[int]
        ] = {}  # spec without what may differ inside a stack -> numbers of its heads
        for number, spec in enumerate(self.specs):
            groups.setdefault(replace(spec, beta0=1.0, lr=1.0, seed=0, fold=None), []).append(number)
        self.members = list(groups.values())
        self.stacks = nn.ModuleList(
            _Stack([self.specs[number].make(n_features, n_classes) for number in numbers])
            for numbers in self.members
        )
        order = [number for numbers in self.members for number in numbers]
        self.register_buffer("order", torch.tensor(order).argsort(), persistent=False)
        self.register_buffer("chosen", torch.tensor(self.ENSEMBLE))
        self.order: Tensor
        self.chosen: Tensor
        self.after = LastMap()  # what the chosen logits go through
        self._choice = self.ENSEMBLE

    @classmethod
    def auto(cls, n_features: int, n_classes: int) -> HeadBank:
        """The bank behind beta0="auto": per-sample temperatures over several inputs and beta0, and the paper's head."""
        return cls(n_features, n_classes, AUTO)

    @property
    def annealing(self) -> Annealing:
        """Each head's own annealing, (H, 1, 1)."""
        beta0 = torch.tensor([spec.beta0 for spec in self.specs], device=self.chosen.device)
        return Annealing(beta0[:, None, None])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """For `HeadSGD`: the parameters of each stack, which heads they belong to and their learning rates."""
        groups = []
        for stack, numbers in zip(self.stacks, self.members):
            scale = torch.tensor([self.specs[number].lr for number in numbers], device=self.chosen.device)
            rows = torch.tensor(numbers, device=self.chosen.device)
            groups.append({"params": list(stack.parameters()), "rows": rows, "scale": scale})
        return groups

    def follow(self, features: Tensor, main: Tensor, fine: Tensor) -> None:
        """Let the moments of what the heads read go along with a calibration batch that is `fine`."""
        for stack in self.stacks:
            stack.follow(features, main, fine)  # type: ignore[operator]

    @property
    def has_folds(self) -> bool:
        """Whether some head is kept from a fold of the calibration data."""
        return any(spec.fold is not None for spec in self.specs)

    def weights(self, folds: Tensor) -> Tensor:
        """(H, B) how much each head learns from each sample of a batch whose folds (B,) are these; rows sum to 1."""
        blind = torch.tensor([-1 if s.fold is None else s.fold for s in self.specs], device=folds.device)
        sees = (folds != blind[:, None]).float()
        return sees / sees.sum(1, keepdim=True).clamp(min=1.0)

    def grad_norms(self) -> Tensor:
        """(H,) the 2-norm of each head's gradient."""
        squares = []
        for stack in self.stacks:
            flat = [p.grad.flatten(1) for p in stack.parameters() if p.grad is not None]
            squares.append(torch.cat(flat, 1).square().sum(1))
        return torch.cat(squares)[self.order].sqrt()

    def all_heads(self, features: Tensor, main: Tensor) -> Tensor:
        """Features (B, F) and main logits (B, K) -> the logits of every head, (H, B, K)."""
        return torch.cat([stack(features, main) for stack in self.stacks])[self.order]

    def forward(self, features: Tensor, main: Tensor) -> Tensor:
        """(H, B, K) of all heads in training mode, (B, K) of the chosen or mean one in evaluation mode."""
        if self.training:
            return self.all_heads(features, main)
        if self._choice == self.CHOSEN_TEMPERATURE:
            return self._last(main.float())
        logits = self.all_heads(features, main)
        if self._choice == self.ENSEMBLE:
            return logits.log_softmax(-1).logsumexp(0) - torch.tensor(float(len(logits))).log()
        return self._last(logits[self._choice])

    def _last(self, logits: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            mapped: Tensor = self.after(logits)
            return mapped

    @torch.no_grad()
    def select(
        self, held_out: Readings, calib: Readings | None = None, score: Literal["nll", "brier"] = "nll"
    ) -> Selection:
        """Choose the head with the best proper score on data held back from training (see `DoubleHead.read`).

        Each head competes at the scale that suits it best on the held-back data, as does the scalar temperature; that
        one is kept unless the best head's gain over it is larger than the gain's standard error. An "mlp" competes only
        on at least 150 samples, and if it is right there as often as the network. What was chosen then goes through a
        `LastMap`, fitted on `calib`, all of the calibration data, or else on `held_out`: always on that where an "mlp"
        was chosen, which knows what it was trained on too well.

        Fewer than 50 held-back samples get a warning. On Fashion-MNIST (experiments/held_back.py), with 50 to 800
        samples held back of five times as many, what `auto` chose had a higher NLL on new data than a temperature
        fitted to all of them in 0 to 12 of 60 draws, by 0.034 at most. Without the standard error, the last map
        and what is asked of an "mlp" it was 17 to 30.
        """
        if score not in SCORES:
            raise ValueError(f"score must be one of {sorted(SCORES)}, got {score!r}")
        features, main, labels = held_out
        if len(labels) < FEW:
            warnings.warn(
                f"held_out should hold at least {FEW} samples to choose among {len(self.specs)} heads and a "
                f"temperature, got {len(labels)}: the choice may be chance, and its temperature is far from certain",
                UserWarning,
                stacklevel=3,  # the caller; between lies no_grad
            )
        with evaluating(self):
            logits = self.all_heads(features, main)  # (H, N, K)
        by_temperature = _at_best_scale(main.float(), labels, score)  # (N,)
        tried = [_at_best_scale(one, labels, score) for one in logits]
        scores = [float(one.mean()) for one in tried]
        right, rights = _right(main, labels), _right(logits, labels)
        competing = [
            number
            for number, spec in enumerate(self.specs)
            if spec.kind == "temperature" or (len(labels) >= MANY and rights[number] >= right)
        ]
        index = _best(by_temperature, {number: tried[number] for number in competing})
        self._choose(self.CHOSEN_TEMPERATURE if index is None else index)
        spec = None if index is None else self.specs[index]
        by_heart = spec is not None and spec.kind == "mlp"
        self._fit_last(held_out if calib is None or by_heart else calib, index)
        last = 1 / float(self.after.scale), self.after.bends
        return Selection(index, spec, tuple(scores), float(by_temperature.mean()), *last)

    def _fit_last(self, calib: Readings, index: int | None) -> None:
        """The last map, of the chosen head's logits or of the main ones."""
        with evaluating(self):
            logits = calib.main if index is None else self.all_heads(calib.features, calib.main)[index]
        self.after.fit(logits, calib.labels)

    def ensemble(self) -> HeadBank:
        """From now on the mean of all heads' probabilities."""
        self._choose(self.ENSEMBLE)
        return self

    def head(self, index: int) -> CalibrationHead:
        """A copy of one head that stands alone."""
        made = self.specs[index].make(*self.sizes).to(self.chosen.device)
        for stack, numbers in zip(self.stacks, self.members):
            if index in numbers:
                stack.write_to(made, numbers.index(index))  # type: ignore[operator]
        if index == self._choice:
            made.after.load_state_dict(self.after.state_dict())
        return made.train(self.training)

    def _choose(self, choice: int) -> None:
        self._choice = (
            choice  # the buffer travels in the state, the number steers without a look at the device
        )
        self.chosen.fill_(choice)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._choice = int(self.chosen)

    def extra_repr(self) -> str:
        """The settings of the heads, for print(bank)."""
        return "\n".join(str(asdict(spec)) for spec in self.specs)


class _Stack(nn.Module):
    """Heads of one shape as one computation: each parameter has a leading dimension for the heads."""

    def __init__(self, heads: Sequence[CalibrationHead]) -> None:
        super().__init__()
        self.standardise = heads[0].standardise  # the heads read the same data: one set of moments
        skeleton = heads[0]
        skeleton.standardise = nn.Identity()
        self._skeleton = (_Calibrate(skeleton),)  # in a tuple, so that its parameters are not registered here
        self.names = [name for name, _ in skeleton.named_parameters()]
        for name in self.names:
            stacked = torch.stack([head.get_parameter(name).detach() for head in heads])
            self.register_parameter(name.replace(".", "_"), nn.Parameter(stacked))

    def forward(self, features: Tensor, main: Tensor) -> Tensor:
        """(B, F), (B, K) -> (h, B, K)."""
        skeleton = self._skeleton[0].train(self.training)
        with torch.autocast(main.device.type, enabled=False):
            inputs = self.standardise(skeleton.head.gather(features, main))

            def one(parameters: dict[str, Tensor]) -> Tensor:
                called: Tensor = torch.func.functional_call(skeleton, parameters, (inputs, main))
                return called

            stacked: dict[str, Tensor] = {f"head.{name}": self._stacked(name) for name in self.names}
            return torch.func.vmap(one, randomness="different")(stacked)

    def follow(self, features: Tensor, main: Tensor, fine: Tensor) -> None:
        """The moments of what the heads read, once for all of them."""
        if isinstance(self.standardise, Standardise):
            self.standardise.follow(self._skeleton[0].head.gather(features, main), fine)

    def _stacked(self, name: str) -> nn.Parameter:
        return self.get_parameter(name.replace(".", "_"))

    @torch.no_grad()
    def write_to(self, head: CalibrationHead, place: int) -> None:
        """Copy the head at `place` of the stack into one that stands alone."""
        for name in self.names:
            head.get_parameter(name).copy_(self._stacked(name)[place])
        head.standardise.load_state_dict(self.standardise.state_dict())


class _Calibrate(nn.Module):
    """A head that starts after its inputs were gathered and standardised."""

    def __init__(self, head: CalibrationHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, inputs: Tensor, main: Tensor) -> Tensor:
        return self.head.calibrate(inputs, main)


def _best(by_temperature: Tensor, tried: Mapping[int, Tensor]) -> int | None:
    """The number of the head with the best scores, if it beats the temperature by more than chance; else None."""
    if not tried:
        return None
    best = min(tried, key=lambda number: float(tried[number].mean()))
    gain = by_temperature - tried[best]
    return best if float(gain.mean()) > float(gain.std()) / math.sqrt(len(gain)) else None


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """How many of the labels are what the logits (..., N, K) predict."""
    return (logits.argmax(-1) == labels).sum(-1)


def _at_best_scale(logits: Tensor, labels: Tensor, score: str) -> Tensor:
    """(N,) the scores of logits (N, K) times the factor that suits them best; infinite for a head that broke."""
    if not bool(torch.isfinite(logits).all()):
        return torch.full(labels.shape, math.inf, device=logits.device)
    return SCORES[score](logits * fit_inverse_temperature(logits, labels), labels)


def hold_back(dataset: Dataset[Any], share: float = 0.2, seed: int = 0) -> tuple[Subset[Any], Subset[Any]]:
    """Split calibration data at random: one part to train heads on, one of `share` to choose among them.

    >>> train, held_out = hold_back(torch.utils.data.TensorDataset(torch.arange(10)))
    >>> len(train), len(held_out)
    (8, 2)
    """
    n = len(dataset)  # type: ignore[arg-type]
    n_held = round(n * share)
    if not 0 < n_held < n:
        raise ValueError(f"share must leave both parts some of the {n} samples, got {share}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return Subset(dataset, order[n_held:]), Subset(dataset, order[:n_held])
