"""A calibration head for a network that is already trained: one call, seconds, never a leap in the dark.

Small heads that give one inverse temperature per sample start at the fitted scalar temperature. Which of them, and how
many steps of training, is chosen by their NLL on calibration data held back from them, fold by fold; the scalar
temperature is kept unless a head is better there by more than chance. A smooth curve follows where it pays (`LastMap`).
`refit` does the same, in place, to the head of a DoubleHead that was trained beside its network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from doublehead.calibrators.temperature import fit_inverse_temperature
from doublehead.double_head import (
    LOWEST,
    Annealing,
    CalibrationHead,
    DoubleHead,
    Readings,
    double_head_in,
)
from doublehead.head_bank import HeadSpec
from doublehead.head_inputs import Standardise
from doublehead.integrations.head_config import put_head
from doublehead.integrations.nll_curves import NllCurves, inverse_softplus
from doublehead.integrations.overlap import check_disjoint, until_repeated
from doublehead.last_map import LastMap
from doublehead.plumbing import device_of, from_every_process, same_on_all_processes, seeded
from doublehead.predictions import Predictions

PASSES, STEPS = 20, 20  # passes at most, and steps in each, over which beta runs from beta0 to 1
PATIENCE = 4  # passes without a better held-back NLL before a candidate's training stops
LEAST = 1e-4  # a smaller fall of the held-back NLL is none
LR = 0.01  # of Adam; 0.003 .. 0.03 end within 0.001 NLL of each other on ImageNet calibration halves
ENOUGH = 20_000  # samples that a head of a few hundred weights can make use of
FEW = 50  # below this only the scalar temperature is fitted
# So it is with fewer samples than this that the network gets wrong: a handful cannot teach a head when to doubt.
FEW_WRONG = 10

BETAS = (1.0, 1.1)  # beta0 of the candidates
CANDIDATES = tuple(
    HeadSpec(beta0=beta0, kind="temperature", hidden=hidden, reads="statistics")
    for hidden in (0, 16)
    for beta0 in BETAS
)
TEMPERATURE = HeadSpec(kind="temperature", hidden=0, reads="statistics")  # untrained: the scalar it starts at


@dataclass(frozen=True)
class Choice:
    """What `fit_head` chose and why: `spec` None is the scalar temperature; NLLs are those of held-back data."""

    spec: HeadSpec | None
    passes: int
    n: int
    temperature: float
    nll: float
    nll_of_temperature: float
    nlls: tuple[float, ...]  # of each candidate at its best number of steps
    bends: bool = False  # whether a smooth curve follows; NLLs are those before it

    def in_words(self) -> str:
        """What was chosen, and its NLL beside the temperature's, in a line."""
        name = f"the scalar temperature {self.temperature:.4g}" if self.spec is None else "a head"
        name += " and a curve" if self.bends else ""
        return f"{name}, held-back NLL {self.nll:.4f} (temperature {self.nll_of_temperature:.4f}, {self.n:,} samples)"


class FittedHead(CalibrationHead):
    """A calibration head that remembers how it was chosen, in `choice`."""

    choice: Choice

    def extra_repr(self) -> str:
        """The choice, for print(head)."""
        name = "scalar temperature" if self.choice.spec is None else str(self.choice.spec)
        name += " and a curve" if self.choice.bends else ""
        return f"chosen: {name}, held-back NLL {self.choice.nll:.4f} (temperature {self.choice.nll_of_temperature:.4f})"


@torch.inference_mode(False)  # the head has to learn
def fit_head(
    model: nn.Module,
    calib_loader: Iterable[Any],
    *,
    train_loader: Any = None,
    candidates: Sequence[HeadSpec] = CANDIDATES,
    folds: int = 5,
    layer: str | None = None,
    n_classes: int | None = None,
    seed: int = 0,
) -> DoubleHead:
    """Train a calibration head on a frozen network, and return both as a DoubleHead in evaluation mode.

    `calib_loader` gives (inputs, labels) or dicts with "labels" that the network was not trained on; with
    `train_loader` that is checked where it can be. The network runs over it once and is left as it was. What was
    chosen, and by how much, stands in `head.choice`. No sample should come twice: one that is in two folds is
    held back from nobody, and a head looks better than it is. Where the network is wrong on fewer than 10
    of them, only a scalar temperature is fitted; where on none, as sharp as one wrong sample more would allow.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> model = fit_head(net, [(torch.randn(64, 4), torch.randint(3, (64,)))])
    >>> model(torch.randn(2, 4)).shape, model.head.choice.n
    (torch.Size([2, 3]), 64)
    """
    if train_loader is not None:
        check_disjoint(calib_loader, train_loader)
    model = model.model if isinstance(model, DoubleHead) else model
    reads = {
        part for spec in candidates for part in ([spec.reads] if isinstance(spec.reads, str) else spec.reads)
    }
    if "features" not in reads and layer is None:
        n_classes = n_classes or 2  # nobody looks for a layer; the head that asks is replaced below
    double = DoubleHead(model, n_classes, reads=("statistics", *sorted(reads)), hidden=0, layer=layer)
    with seeded(seed, device_of(model)):
        readings = double.read(calib_loader)
    head = fit_head_on(readings, candidates=candidates, folds=folds, seed=seed)
    return put_head(double, head).eval()


@torch.inference_mode(False)
def refit(double: nn.Module, calib_batches: Iterable[Any], *, seed: int = 0) -> Choice:
    """Fit the temperature head of a trained DoubleHead anew, in place, on its network as it is now.

    As `fit_head` does it, with the head's own shape as the only candidate besides the scalar temperature. The head's
    modules and shapes stay, so checkpoints, optimizers and an `Alternation` stay valid: training may go on, and the
    next `refit` starts over. The network runs once over `calib_batches`, in evaluation mode; of batches that do not
    know their number, which may be endless, it sees the first 20,000 samples, or those that come before they come
    again, if they do so unchanged. Where several processes train together, each must call it, and all end with the
    first one's head. A ShiftGuard round `double` learned from the answers of the head as it was: fit it again.

    >>> model = DoubleHead(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    >>> refit(model, [(torch.randn(64, 4), torch.randint(3, (64,)))]).n
    64
    """
    inner = double_head_in(double, "double")
    _check_refit(inner)
    with seeded(seed, device_of(inner)):
        readings = read_once(inner, calib_batches, "calib_batches")
    return refit_on(inner, readings, seed=seed)


def read_once(
    double: DoubleHead, batches: Any, name: str, to_pairs: Callable[[Any], Iterable[Any]] = iter
) -> Readings:
    """`double.read` of `batches`, each turned into a pair: all of them, or enough where they may be endless."""
    enough, pairs = how_many(batches), _some(to_pairs(batches), name)
    return double.read(pairs if math.isinf(enough) else until_repeated(pairs), enough)


def _some(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """The batches; an error where there are none."""
    n = 0
    for n, batch in enumerate(batches, 1):  # noqa: B007
        yield batch
    if n == 0:
        raise ValueError(f"{name} must hold at least one batch and start again when iterated again, got none")


def how_many(batches: Any) -> float:
    """How many samples of `batches` to read: all, or enough where they do not know their number and may be endless."""
    try:
        len(batches)
    except TypeError:
        return ENOUGH
    return math.inf


def refit_on(double: DoubleHead, readings: Readings, *, seed: int = 0) -> Choice:
    """`refit` with what `double.read` gave already at hand."""
    head = _check_refit(double)
    spec = HeadSpec(kind="temperature", hidden=head.hidden, reads=head.reads)  # type: ignore[arg-type]
    candidates = [replace(spec, beta0=beta0) for beta0 in BETAS]
    fitted = fit_head_on(readings, candidates=candidates, seed=seed)
    choice: Choice = from_every_process(fitted.choice)[0]
    same_on_all_processes(fitted)
    if isinstance(head.standardise, nn.Identity):
        _fold_in(fitted)
    head.load_state_dict(fitted.state_dict())
    if isinstance(head, FittedHead):
        head.choice = choice
    return choice


def can_refit(double: DoubleHead) -> bool:
    """Whether the head is one that `refit` can fit: a CalibrationHead of kind "temperature"."""
    return isinstance(double.head, CalibrationHead) and double.head.kind == "temperature"


def _check_refit(double: DoubleHead) -> CalibrationHead:
    head = double.head
    if not isinstance(head, CalibrationHead) or not can_refit(double):
        got = type(head).__name__ + (f" of kind {head.kind!r}" if isinstance(head, CalibrationHead) else "")
        raise TypeError(
            f"double must be a DoubleHead whose head is a CalibrationHead of kind 'temperature', got a head {got}"
        )
    return head


@torch.no_grad()
def _fold_in(head: CalibrationHead) -> None:
    """Let the first layer itself subtract and divide what `standardise` did, for a head that has none."""
    moments, layer = head.standardise, head.first if head.hidden else head.last
    assert isinstance(moments, Standardise)
    assert isinstance(layer, nn.Linear)
    deviation = (moments.square - moments.mean.square()).clamp(min=1e-6).sqrt()
    layer.weight.div_(deviation)
    layer.bias.sub_(layer.weight @ moments.mean)
    head.standardise = nn.Identity()


def fit_head_on(
    readings: Readings, *, candidates: Sequence[HeadSpec] = CANDIDATES, folds: int = 5, seed: int = 0
) -> FittedHead:
    """Train a calibration head on features (N, F), main logits (N, K) and labels (N,) already at hand.

    Every candidate must be of kind "temperature", so no prediction ever changes. Features may be empty, (N, 0), where
    no candidate reads them. Inputs are always standardised. Of more than 20,000 samples a random 20,000 are used.
    Where the scalar temperature is kept, it comes in the shape of the first candidate.

    >>> logits = 3 * torch.randn(200, 4)
    >>> head = fit_head_on(Readings(torch.empty(200, 0), logits, logits.argmax(1)))
    >>> head(torch.empty(200, 0), logits).shape
    torch.Size([200, 4])
    """
    _check_settings(candidates, folds)
    features, main, labels = _check(readings)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:ENOUGH]
    order = order.to(main.device)
    readings = Readings(features[order], main[order], labels[order])
    with torch.autocast(main.device.type, enabled=False):
        inverse = _inverse_temperature(readings.main, readings.labels)
        curves = NllCurves(readings.main, readings.labels, math.log(inverse))
        tells = len(order) >= FEW and _n_wrong(readings.main, readings.labels) >= FEW_WRONG
        choice = _choose(readings, curves, inverse, candidates if tells else (), folds)
        heads = _Heads(choice.spec or next(iter(candidates), TEMPERATURE), readings, [inverse])
        everything = torch.ones(1, len(order), device=main.device)
        for _ in range(choice.passes):
            heads.train_one_pass(curves, everything)
        return _with_last_map(heads.finish(choice), readings)


@torch.no_grad()
def _with_last_map(head: FittedHead, readings: Readings) -> FittedHead:
    """The head with a curve after it where that pays; else as it is."""
    if _n_wrong(readings.main, readings.labels) < FEW_WRONG:
        return head
    last = LastMap().to(readings.main.device).fit(head(readings.features, readings.main), readings.labels)
    if last.bends:
        head.after.load_state_dict(last.state_dict())
        head.choice = replace(head.choice, bends=True)
    return head


def _n_wrong(main: Tensor, labels: Tensor) -> int:
    """How many labels have not the largest logit."""
    return int((main.gather(1, labels[:, None])[:, 0] < main.amax(1)).sum())


def _inverse_temperature(main: Tensor, labels: Tensor) -> float:
    """The best inverse temperature; where no label is wrong, that of one wrong sample more, but not below 1.

    Without a wrong one the surer is the better, and nothing says where to stop. The sample more is a usual one, that
    of the median margin, and its label the second best.
    """
    if _n_wrong(main, labels):
        return float(fit_inverse_temperature(main, labels))
    top = main.topk(2)
    usual = (top.values[:, 0] - top.values[:, 1]).argsort()[[len(labels) // 2]]
    more = torch.cat([main, main[usual]]), torch.cat([labels, top.indices[usual, 1]])
    return max(1.0, float(fit_inverse_temperature(*more)))


def _choose(
    readings: Readings, curves: NllCurves, inverse: float, candidates: Sequence[HeadSpec], folds: int
) -> Choice:
    """Cross-fit the scalar temperature and every candidate; the best one must win by a standard error."""
    n, device = len(readings.labels), readings.main.device
    folds = min(folds, n)
    fold = torch.arange(n, device=device) % folds  # the samples are in random order
    learns = (fold != torch.arange(folds, device=device)[:, None]).float()  # (folds, N), 0 where held back
    if n == 1:
        learns = torch.ones(1, 1, device=device)
    starts = [_inverse_temperature(readings.main[at], readings.labels[at]) for at in learns.bool()]
    heads = _Heads(TEMPERATURE, readings, starts)
    by_temperature = heads.held_back(curves, learns)  # (N,)
    tried = [_cross_fit(_Heads(spec, readings, starts), curves, learns) for spec in candidates]
    spec, passes, nlls = None, 0, by_temperature
    if tried:
        best = min(range(len(tried)), key=lambda number: float(tried[number][1].mean()))
        gain = by_temperature - tried[best][1]
        if float(gain.mean()) > float(gain.std()) / math.sqrt(n):
            spec, (passes, nlls) = candidates[best], tried[best]
    scores = tuple(float(nlls.mean()) for _, nlls in tried)
    return Choice(spec, passes, n, 1 / inverse, float(nlls.mean()), float(by_temperature.mean()), scores)


def _cross_fit(heads: _Heads, curves: NllCurves, learns: Tensor) -> tuple[int, Tensor]:
    """The number of passes with the best held-back NLL, and each sample's (N,) there."""
    best, nlls = 0, heads.held_back(curves, learns)
    for passes in range(1, PASSES + 1):
        heads.train_one_pass(curves, learns)
        now = heads.held_back(curves, learns)
        if float(now.mean()) < float(nlls.mean()) - LEAST:
            best, nlls = passes, now
        elif passes - best >= PATIENCE:
            break
    return best, nlls


class _Heads:
    """Copies of one head, each started at its own inverse temperature, trained side by side as one computation."""

    def __init__(self, spec: HeadSpec, readings: Readings, starts: Sequence[float]) -> None:
        sizes = readings.features.shape[1], readings.main.shape[1]
        options: dict[str, Any] = {"kind": "temperature", "hidden": spec.hidden, "seed": spec.seed}
        self.head = FittedHead(*sizes, reads=spec.reads, standardise=True, **options).to(readings.main.device)
        inputs = self.head.gather(readings.features, readings.main)
        assert isinstance(self.head.standardise, Standardise)
        self.head.standardise.set_moments(inputs)
        self.inputs = self.head.eval().standardise(inputs)  # (N, size)
        self.parameters = {
            name: value.detach().repeat(len(starts), *[1] * value.ndim).requires_grad_()
            for name, value in self.head.named_parameters()
        }  # each (H, ...)
        with torch.no_grad():
            self.parameters["last.bias"].copy_(torch.tensor([[inverse_softplus(start)] for start in starts]))
        self.annealing = Annealing(spec.beta0)
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=LR * spec.lr)

    def train_one_pass(self, curves: NllCurves, learns: Tensor) -> None:
        """Each head takes STEPS full steps on its own samples, marked 1 in (H, N)."""
        weights = learns / learns.sum(1, keepdim=True)
        with torch.enable_grad():
            for step in range(STEPS):
                beta = self.annealing(step / STEPS)
                self.optimizer.zero_grad()
                (curves(self.log_inverse() + math.log(beta)) * weights).sum().backward()
                self.optimizer.step()

    @torch.no_grad()
    def held_back(self, curves: NllCurves, learns: Tensor) -> Tensor:
        """(N,) each sample's NLL under the head that did not learn from it (or, with one head, that did)."""
        nlls = curves(self.log_inverse())  # (H, N)
        return nlls[learns.argmin(0), torch.arange(nlls.shape[1], device=nlls.device)]

    def log_inverse(self) -> Tensor:
        """(H, N) the log inverse temperatures: CalibrationHead.calibrate for all heads at once."""
        inputs = self.inputs
        if self.head.hidden:
            first = self.parameters["first.weight"].mT, self.parameters["first.bias"][:, None]
            inputs = torch.relu(inputs @ first[0] + first[1])  # (H, N, hidden)
        out = inputs @ self.parameters["last.weight"].mT + self.parameters["last.bias"][:, None]  # (H, N, 1)
        return nn.functional.softplus(out[..., 0]).clamp(min=1e-6).log()

    @torch.no_grad()
    def finish(self, choice: Choice) -> FittedHead:
        """The first of the heads, by itself."""
        for name, value in self.head.named_parameters():
            value.copy_(self.parameters[name][0])
        self.head.choice = choice
        return self.head


def _check_settings(candidates: Sequence[HeadSpec], folds: int) -> None:
    for spec in candidates:
        if spec.kind != "temperature":
            raise ValueError(f"candidates must be of kind 'temperature', got {spec}")
        if spec.dropout:
            raise ValueError(f"candidates must have no dropout (they stop early instead), got {spec}")
    if folds < 2:
        raise ValueError(f"folds must be at least 2, got {folds}")


def _check(readings: Readings) -> Readings:
    features, main, labels = readings
    main = main.clamp(min=LOWEST)  # classes that are masked out with -inf
    checked = Predictions(main, labels)  # refuses what is empty, not finite, or has labels out of range
    if float(checked.logits.amax()) > -LOWEST:
        raise ValueError(f"logits must not be above {-LOWEST:g}, got {float(checked.logits.amax()):g}")
    if features.ndim != 2 or len(features) != len(checked):
        raise ValueError(f"features must have shape ({len(checked)}, F), got {tuple(features.shape)}")
    return Readings(features.float(), checked.logits.float(), checked.labels)
