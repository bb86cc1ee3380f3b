"""The staged head: small corrections of different kinds, one after the other, each pulled towards no change.

1. temperature: one number for all samples.
2. map: class by class, z + (D + M) z + b, pulled towards no change (Berta et al. 2025). For few classes.
3. head: a temperature for each sample, linear in statistics of its logits and, for a network, of its features.
4. pool: a weighted sum of the log-probabilities after each of these stages, pulled towards the temperature's alone, and
   of other opinions about the same sample. For a network these are distances of its features to the class means
   (with few samples per class, its last layer's answer to features whose large values are damped), and the answers of
   heads that were trained beside it.
5. curve: a function of the log-probability, the same for all classes.

Every stage is fitted to outputs of the stages before it on samples that those were not fitted to. Together they replace
the temperature unless their NLL on held-back samples is higher by more than a standard error, or keeping predictions
that they contradict would raise the ECE by five points. With few samples or few errors only map and pool are tried, and
must win clearly; with fewer only a temperature is fitted. Below 1 it is fitted as if there were half an error more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from doublehead.calibration_head import MIN_LOGIT, feature_numbers, keep_top, statistics
from doublehead.calibrators import head_stages as stages
from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.choose import Choice, Scores, choose, stratified_folds
from doublehead.calibrators.head_stages import OF_FEATURES, OWN, STAGES, Evidence, Params
from doublehead.predictions import Predictions
from doublehead.score_arrays import Target
from doublehead.system import warn
from doublehead.torch_tools import one_thread

if TYPE_CHECKING:
    from typing_extensions import Self

MARGIN = -1.0  # the stages are used unless they are worse than the temperature by a standard error
MIN_SAMPLES = 300  # below, head and curve are not fitted
MIN_WRONG = 30  # likewise with fewer wrong predictions, which are too few to learn from
MIN_MAPPED = 200  # below, only a temperature is fitted
MARGIN_FEW = 3.0  # standard errors by which map and pool must win where head and curve are not fitted
MAX_REFITTED = 2000  # samples up to which the stages are judged by whole fits without a fold
WARN_SAMPLES = 100  # below, a warning says that this is little data
MAX_SAMPLES = 20_000  # more do not help a head of a few dozen weights
MAX_ENTRIES = 25_000_000  # of logits that are fitted to
MAX_ECE_RISE = 0.05  # above the temperature's, each less its floor, that keeping predictions may cause
PER_CLASS = 20  # samples per class from which maps of the classes and distances to their means are tried

Opinion = Tensor | Sequence[Tensor] | None  # one (N, K), or several


class Head(Calibrator):
    """The staged head. The default for networks and files; never changes a prediction unless asked to.

    `fit(predictions)` learns from logits alone. `fit(predictions, features=...)` also reads the features (N, F)
    that went into the network's last layer, whose weight (K, F) is `last_layer`. `opinion` is the output of heads
    trained beside the network for the same samples, each sample by a head that was trained without it. What was
    chosen, and why, is in `choice`.

    `keep="predictions"` never overrules the network's class. `keep="best"` lets stages change it if that does not
    lower the accuracy on held-back samples.

    >>> logits = 3 * torch.randn(500, 4)
    >>> head = Head().fit(Predictions(logits, logits.softmax(1).multinomial(1)[:, 0]))
    >>> torch.equal(head(logits).argmax(1), logits.argmax(1))
    True
    """

    learned = (
        "stages_", "temperature_", "weight_", "bias_", "center_", "mean_", "deviation_", "slope_", "pool_", "curve_",
        *OF_FEATURES,
    )  # fmt: skip

    takes_weights = True

    stages_: Tensor  # (6,) bool: temperature, map, head, pool, curve, keep predictions
    temperature_: Tensor
    weight_: Tensor  # (K, K) or (K,): D + M, or D alone
    bias_: Tensor  # (K,)
    center_: Tensor  # (K,)
    mean_: Tensor  # (S,) of the head's inputs
    deviation_: Tensor  # (S,)
    slope_: Tensor  # (S + 1,) with the intercept last
    pool_: Tensor  # (3 + opinions,)
    curve_: Tensor  # (knots,)
    feature_mean_: Tensor  # (F,), empty without features, as are the next four
    class_means_: Tensor  # (K, F) of centred features of length 1
    projection_: Tensor  # (F, R) into directions in which classes have unit spread
    projected_means_: Tensor  # (K, R)
    spreads_: Tensor  # (2,) usual squared distances to the own class's mean
    last_layer_: Tensor  # (K, F), or empty
    usual_: Tensor  # twice the mean size of a feature

    choice: Choice | None = None
    allowed: Sequence[str] = STAGES  # others are not tried
    judged = True  # whether stages are compared with the temperature; else all that are allowed are used

    def __init__(
        self, keep: Literal["predictions", "best"] = "predictions", folds: int = 5, seed: int = 0
    ) -> None:
        super().__init__()
        self.keep, self.folds, self.seed = keep, folds, seed
        self._open: tuple[bool, ...] = ()

    def fit(
        self,
        predictions: Predictions,
        *,
        features: Tensor | None = None,
        opinion: Opinion = None,
        numbers: Tensor | None = None,
        last_layer: Tensor | None = None,
        folds: Tensor | None = None,
    ) -> Self:
        """Learn from predictions the network was not trained on, and what else is known of the same samples.

        Samples of one number in `folds` (N,) are held back together; by default folds are drawn at random.
        """
        known = {"features": features, "opinion": opinion, "numbers": numbers}
        self._fit(predictions, **known, last_layer=last_layer, folds=folds)
        self.refresh()
        return self

    def refresh(self) -> None:
        """Note on the host which stages are in use, after the buffers were set."""
        self._open = tuple(bool(flag) for flag in self.stages_) if self.is_fitted else ()

    def _learn(self, predictions: Predictions, **known: Any) -> dict[str, Any]:
        if self.keep not in ("predictions", "best"):
            raise ValueError(f"keep must be 'predictions' or 'best', got {self.keep!r}")
        if self.folds < 2:
            raise ValueError(f"folds must be at least 2, got {self.folds}")
        with one_thread(), torch.autocast("cpu", enabled=False):
            return _Fit(self, predictions, **known).learned()

    def forward(
        self,
        logits: Tensor,
        features: Tensor | None = None,
        *,
        opinion: Opinion = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Calibrated logits (..., K); `features`, `opinion` and `numbers` are needed where it was fitted with
        them."""
        self._check_use(logits)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        wide = wide.clamp(min=MIN_LOGIT)
        evidence = self._evidence(wide, features, opinion, numbers)
        params = {name: getattr(self, name) for name in self.learned}
        outputs = {"none": wide}
        for name, is_open in zip(STAGES, self._open):
            if is_open:
                outputs[name] = stages.apply(name, params, stages.reads(name, outputs, evidence))
        z = next(reversed(outputs.values()))
        return keep_top(z, logits) if self._open[-1] else z

    def _evidence(
        self, logits: Tensor, features: Tensor | None, opinion: Opinion, numbers: Tensor | None
    ) -> Evidence:
        n_numbers = len(self.mean_) - statistics(torch.zeros(1, logits.shape[-1])).shape[-1]
        n_opinions, pools = len(self.pool_) - len(OWN), self._open[STAGES.index("pool")]
        more = [] if numbers is None else [numbers.to(logits.dtype)]
        opinions: list[Tensor] = []
        if self.feature_mean_.numel():
            if features is None:
                raise ValueError("features must be given: this head was fitted with them")
            features = features.to(logits.dtype)
            more.insert(0, feature_numbers(features).to(logits.dtype))
            if pools:
                opinions += stages.opinions_of(features, {name: getattr(self, name) for name in OF_FEATURES})
        opinions += [part.to(logits.dtype) for part in _several(opinion)]
        if pools and len(opinions) != n_opinions:
            raise ValueError("opinion must be given exactly where this head was fitted with one")
        joined = torch.cat([logits[..., :0], *more], -1)
        if joined.shape[-1] != n_numbers:
            raise ValueError(f"numbers must have {n_numbers} columns as in fit, got {joined.shape[-1]}")
        return Evidence(joined, tuple(opinions))

    @property
    def keeps_argmax(self) -> bool:
        """Whether predictions are kept; only known once fitted where `keep` is 'best'."""
        return bool(self.stages_[-1]) if self.is_fitted else self.keep == "predictions"

    def in_words(self) -> str:
        """The stages in use."""
        if not self.is_fitted:
            return ""
        names = [name for name, used in zip(STAGES, self._open) if used]
        return (
            " + ".join(names).replace("temperature", f"temperature {float(self.temperature_):.4g}") or "none"
        )

    def _n_classes(self) -> int | None:
        return self.bias_.shape[0]

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._open = () if self.stages_ is None else tuple(args[0][args[1] + "stages_"].bool().tolist())


def _several(opinion: Opinion) -> list[Tensor]:
    return [] if opinion is None else [opinion] if isinstance(opinion, Tensor) else list(opinion)


class _Fit:
    """One fit: every stage on cross-fitted outputs of those before it, then the choice.

    It runs on the CPU wherever the predictions are: thousands of small steps are slow on a GPU.
    """

    def __init__(
        self,
        head: Head,
        predictions: Predictions,
        features: Tensor | None,
        opinion: Opinion,
        numbers: Tensor | None,
        last_layer: Tensor | None,
        folds: Tensor | None,
    ) -> None:
        n, k = predictions.logits.shape
        order = torch.randperm(n, generator=torch.Generator().manual_seed(head.seed))
        order = order[: min(MAX_SAMPLES, max(1, MAX_ENTRIES // k))]

        def rows(values: Tensor) -> Tensor:
            return values[order.to(values.device)].cpu()

        self.head = head
        self.target = Target(*(None if part is None else rows(part) for part in predictions.target))  # type: ignore[arg-type]
        self.labels = self.target.labels
        self.logits = rows(predictions.logits).float().clamp(min=MIN_LOGIT)
        self.n, self.k = self.logits.shape
        # A fit that judges another one lacks a fold, but must open the same stages.
        self.size = self.n if head.judged else self.n * head.folds // (head.folds - 1)
        self.folds = stratified_folds(self.labels, min(head.folds, self.n), head.seed)
        if folds is not None and len(rows(folds).unique()) > 1:
            self.folds = rows(folds)
        self.of_features: Params = dict.fromkeys(OF_FEATURES, self.logits.new_empty(0))
        self.features = features = None if features is None else rows(features).float()
        self.numbers = None if numbers is None else rows(numbers).float()
        self.given, self.last_layer = [rows(part).float() for part in _several(opinion)], last_layer
        opinions: list[Tensor] = []
        more: list[Tensor] = []
        if features is not None:
            more.append(feature_numbers(features))
            self.of_features["feature_mean_"] = features.new_zeros(features.shape[1])
            layer = None if self._fills_classes or last_layer is None else last_layer.cpu()
            if self.size >= MIN_SAMPLES and (self._fills_classes or layer is not None):
                found, opinions = stages.fit_opinions(
                    features, self.labels, self.folds, self.k, layer, head.seed
                )
                self.of_features |= found
        opinions += self.given
        more += [] if self.numbers is None else [self.numbers]
        self.evidence = Evidence(torch.cat([self.logits[:, :0], *more], 1), tuple(opinions))
        self.outputs = {"none": self.logits}  # by stage, cross-fitted
        self.params: dict[str, Params] = {}

    @property
    def _fills_classes(self) -> bool:
        return self.size >= PER_CLASS * self.k

    def learned(self) -> dict[str, Any]:
        """What the head learns."""
        if self.n < WARN_SAMPLES:
            warn(f"{self.n} calibration samples are little data: only a temperature is fitted")
        wrong = int((self.logits.argmax(1) != self.labels).sum())  # by the likeliest class of soft labels
        self._add("temperature")
        opened: Sequence[str] = ()
        if not self.head.judged or (self.n >= MIN_SAMPLES and wrong >= MIN_WRONG):
            opened = STAGES[1:] if self._fills_classes else ("head", "pool", "curve")
        elif self.n >= MIN_MAPPED and self._fills_classes and not self.evidence.opinions:
            opened = ("map", "pool")  # few errors do not show which other opinion to trust
        for name in opened:
            if name in self.head.allowed:
                self._add(name)
        margin = MARGIN if "curve" in opened else MARGIN_FEW
        used = self._choose(margin) if self.head.judged else list(self.outputs)[1:]
        fitted = stages.unused(self.logits, self.evidence)
        for name in used:
            fitted |= self.params[name]
        keep = self.head.keep == "predictions" or not self._as_accurate(used[-1])
        flags = torch.tensor([*(name in used for name in STAGES), keep])
        return {**fitted, **self.of_features, "stages_": flags}

    def _add(self, name: str) -> None:
        """Fit a stage to cross-fitted outputs of those before it."""
        read = stages.reads(name, self.outputs, self.evidence)
        whole = stages.fit(name, read, self.target)
        out = read[0].clone()
        for fold in self.folds.unique() if self.n > 1 else ():
            held = self.folds == fold
            params = stages.fit(name, [part[~held] for part in read], self.target.rows(~held), whole)
            out[held] = stages.apply(name, params, [part[held] for part in read])
        self.outputs[name], self.params[name] = out, whole

    def _choose(self, margin: float) -> list[str]:
        """The stages that are used: all that were fitted, or the temperature alone."""
        names = list(self.outputs)[1:]
        last = " + ".join(names)
        held_back = {" + ".join(names[: i + 1]): self._kept(name) for i, name in enumerate(names)}
        if len(names) > 1 and self.n <= MAX_REFITTED:
            held_back = dict(zip(("temperature", last), self._refitted(names)))
        held_back["none"] = self.logits
        nlls = {title: stages.nlls(z, self.target) for title, z in held_back.items()}
        # Not candidates: the stages between, and no calibration, which the folds of a small sample favour.
        choice = choose({title: nlls[title] for title in ("temperature", last)}, ["temperature"], margin)
        means = {title: float(values.mean()) for title, values in nlls.items()}
        scores = {
            title: Scores.of(self._predictions(held_back[title]))
            for title in dict.fromkeys(("none", "temperature", choice.chosen))
        }
        kept, tempered = (
            scores[title].ece - scores[title].ece_floor for title in (choice.chosen, "temperature")
        )
        if self.head.keep == "predictions" and kept > tempered + MAX_ECE_RISE:
            note = "not used: predictions that these stages contradict would be kept with too high a confidence; "
            note += "keep='best' lets them change"
            choice = replace(choice, chosen="temperature", gain=0.0, gain_error=0.0, notes={last: note})
        self.head.choice = replace(
            choice, nlls=dict(sorted(means.items(), key=lambda item: item[1])), scores=scores
        )
        return names if choice.chosen == last else names[:1]

    def _refitted(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Outputs (N, K) of temperatures and of whole heads that were fitted without the sample's fold.

        The cross-fitted outputs that stages are fitted to would make them look worse than they are, by up to 4 % of the
        NLL with 1,000 samples: the randomness of a fold enters twice, through a stage's input and the labels it lacks.
        """
        temperature, last = torch.empty_like(self.logits), torch.empty_like(self.logits)
        whole = self._predictions(self.logits)
        for fold in self.folds.unique():
            held = self.folds == fold
            inner = Head(self.head.keep, self.head.folds, self.head.seed)
            inner.allowed, inner.judged = names, False
            inner.fit(whole[~held], **self._known(~held), last_layer=self.last_layer, folds=self.folds[~held])
            last[held] = inner(self.logits[held], **self._known(held))
            softened = {"temperature_": inner.temperature_}
            temperature[held] = stages.apply("temperature", softened, [self.logits[held]])
        return temperature, last

    def _known(self, rows: Tensor) -> dict[str, Any]:
        """Features, opinions and numbers of some samples."""
        opinions = [part[rows] for part in self.given]
        features, numbers = (None if part is None else part[rows] for part in (self.features, self.numbers))
        return {"features": features, "opinion": opinions, "numbers": numbers}

    def _predictions(self, logits: Tensor) -> Predictions:
        truth = self.labels if self.target.probs is None else self.target.probs
        return Predictions(logits, truth, self.target.weights)

    def _kept(self, name: str) -> Tensor:
        """Cross-fitted outputs (N, K) of a stage, with the network's predictions kept where they are."""
        z = self.outputs[name]
        return keep_top(z, self.logits) if self.head.keep == "predictions" else z

    def _as_accurate(self, name: str) -> bool:
        before, after = (
            self.target.weighted((z.argmax(1) == self.labels).double()).sum()
            for z in (self.logits, self.outputs[name])
        )
        return bool(after >= before)
