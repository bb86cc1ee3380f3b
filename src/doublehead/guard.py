"""The guard itself: stages of a network and its logits in, less confident logits and an alarm out.

Stages are a mean and a deviation of each channel of some layers. Their distances from the calibration data's are used
twice:

- A single sample: the log scale learned from perturbed calibration data is multiplied by the probability that the
  sample is shifted. The prior of that probability is the largest that costs next to nothing on clean data.
- A window of the last samples: their mean distances are tested against the calibration data's. During an alarm the
  logits get the scale learned from perturbed windows. A window shows a shift that no single sample shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.calibration_head import MAX_LOG_SCALE, scale_logits, statistics
from doublehead.calibrators.choose import mean_and_error
from doublehead.calibrators.optimise import fit_log_scale, fit_logistic
from doublehead.predictions import Predictions
from doublehead.torch_tools import StaysFloat32

# Developed with whole kinds of corruption left out in turn (docs/results/notes/guard-settings.md).
WINDOW = 64
RATE = 1e-3  # largest share of clean windows that may raise an alarm
LARGEST = 1e4  # deviations that enter a window: sums of larger ones would lose all others
BOUND = 3.0  # deviations to which distances are clipped for the test: a few calibration samples do not show its tails
LOW, HIGH = -3.0, 6.0  # deviations to which distances and statistics are clipped
DEPTHS = 4  # parts of the network whose distances have weights of their own
RIDGE = 0.02  # of the learned weights, as a share of the samples
PRIORS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)  # shares of shifted samples that are tried
COST = 1e-3  # share of the clean NLL that guarding single samples may cost, by the upper 95 % bound
MIN_SAMPLES = 20  # fewer do not show what is usual: clean windows would raise alarms
DRAWS = 10_000  # windows of calibration data, for p-values
RESAMPLES, SURE = 100, 0.95  # of the calibration data; the share of them for which the rate holds
MOST = MAX_LOG_SCALE  # the largest logarithm of a temperature
SHRINK = 0.02  # of a covariance of stages towards the identity
TINY = 1e-6


class Shift(NamedTuple):
    """The test of the last window of samples.

    `p_value` bounds the share of clean windows that look as unusual, and `alarm` says whether it is below the rate;
    `strength` is 1 for a usual window and grows with the distance. `since` is the number of the sample with which the
    present alarm began, `seen` how many samples there were. Before the first full window p_value is 1.
    """

    alarm: bool
    p_value: float
    strength: float
    since: int | None
    seen: int

    @property
    def sentence(self) -> str:
        """The result in words, with samples counted from 1."""
        when = f"No alarm at sample {self.seen:,}"
        if self.since is not None:
            when = f"Alarm since sample {self.since + 1:,} of {self.seen:,}"
        far = f"{self.strength:.1f} times as far from the calibration data as usual"
        return f"{when}: p-value {self.p_value:.2g}, {far}."


class Observed(NamedTuple):
    """What a guard learns from: stages (N, S), the classifier's logits (N, K), labels, groups and samples (N,).

    Samples of one group were perturbed together, and form windows. `samples` are the same for copies of one sample.
    """

    stages: Tensor
    logits: Tensor
    labels: Tensor
    groups: Tensor
    samples: Tensor


class Guard(StaysFloat32):
    """Stages (B, S) and logits (B, K) -> the logits, each sample's scaled by a number, with a memory of the window.

    Before `fit` that is 1. `window=0` judges each sample by itself. It computes in float32 in any model.
    """

    learned = (
        "mean", "deviation", "single", "windowed", "posterior", "centre", "precision", "null", "recent"
    )  # fmt: skip

    mean: Tensor  # (D + S,) of a clean sample's distances and statistics
    deviation: Tensor  # (D + S,)
    single: Tensor  # (P,) weights of a sample's log scale
    windowed: Tensor  # (P,) of a window's
    posterior: Tensor  # (Q,) of the log odds that a sample is shifted
    centre: Tensor  # (D,) mean of the clipped distances
    precision: Tensor  # (D, D) their inverse covariance
    null: Tensor  # (DRAWS,) the test statistic of clean windows, sorted
    recent: Tensor  # (W - 1, D + S) the last samples' numbers
    seen: Tensor
    since: Tensor  # -1 without an alarm
    last: Tensor  # (2,) statistic and p-value of the last window

    def __init__(self, widths: Sequence[int], window: int = WINDOW, rate: float = RATE) -> None:
        super().__init__()
        if window < 0 or window == 1:
            raise ValueError(f"window must be 0 or at least 2 samples, got {window}")
        if not 1 / DRAWS <= rate < 1:  # no p-value is smaller
            raise ValueError(f"rate must be at least {1 / DRAWS} and below 1, got {rate}")
        self.window, self.rate, self._alone = window, rate, False
        self.distances, self.n_far = Distances(widths), len(widths)
        for name in self.learned:
            self.register_buffer(name, torch.zeros(0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("since", torch.full((), -1, dtype=torch.int64))
        self.register_buffer("last", torch.ones(2))

    @property
    def shift(self) -> Shift:
        """The test of the last window."""
        since, seen = int(self.since), int(self.seen)
        statistic, p_value = self.last.tolist()
        usual = float(self.null.median()) if len(self.null) else 1.0  # 0 of constant calibration data
        strength = math.sqrt((statistic + TINY) / (usual + TINY)) if seen >= self.window > 0 else 1.0
        return Shift(since >= 0, p_value, strength, since if since >= 0 else None, seen)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Judge each sample by itself in here, and leave the window as it is."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def reset(self) -> None:
        """Forget the window: the next sample is the first of a new stream."""
        self.recent.zero_()
        self.seen.zero_()
        self.since.fill_(-1)
        self.last.fill_(1)

    def forward(self, stages: Tensor, logits: Tensor) -> Tensor:
        """Scaled logits; predictions never change."""
        return scale_logits(logits, self.log_scale(stages, logits))

    def log_scale(self, stages: Tensor, logits: Tensor) -> Tensor:
        """(B, 1), and the window moves on; the lowest value for stages that are not finite."""
        if not len(self.null):
            return logits.new_zeros(logits.shape[0], 1, dtype=torch.float32)
        with torch.autocast(stages.device.type, enabled=False):
            rows = self.numbers(stages, logits)
            log_scale = self._of_samples(rows, self.single, self.posterior)
            if self.window and not self._alone and logits.shape[0]:
                log_scale = self._with_window(rows, log_scale)
        return log_scale.nan_to_num(-MOST).clamp(-MOST, MOST)[:, None]

    def numbers(self, stages: Tensor, logits: Tensor) -> Tensor:
        """(B, D + S): distances and statistics of the logits, in deviations from the clean calibration data."""
        values = torch.cat([self.distances(stages), statistics(logits.float())], 1)
        return (values - self.mean) / self.deviation

    def _of_samples(self, rows: Tensor, single: Tensor, posterior: Tensor) -> Tensor:
        """(B,) of single samples: the log scale of a shifted sample times the probability that it is one."""
        shifted = (_squares(rows[:, : self.n_far]) @ posterior).sigmoid()
        return shifted * (design(rows, self.n_far) @ single).clamp(-MOST, 0.0)

    def _with_window(self, rows: Tensor, log_scale: Tensor) -> Tensor:
        """The log scale (B,) with the window's in place of a sample's own where there is an alarm."""
        n, w = rows.shape[0], self.window
        rows = rows.nan_to_num(HIGH).clamp(-LARGEST, LARGEST)
        # Row i is the mean of sample i and the w - 1 before it. The first samples of a stream share the first window.
        at = torch.maximum(torch.arange(n, device=rows.device), w - 1 - self.seen)
        full, at = at < n, at.clamp(max=n - 1)

        past = torch.cat([self.recent, rows])
        means, far = (values.unfold(0, w, 1).mean(2)[at] for values in (past, self.bounded(past)))
        p_values = self.p_values(far)
        alarm = full & (p_values <= self.rate)
        windowed = (design(means, self.n_far) @ self.windowed).clamp(-MOST, 0.5)
        unbounded = hotelling(means[-1:, : self.n_far], self.precision)[0]
        with torch.no_grad():  # the window moves on
            # the last sample without an alarm
            quiet = torch.where(alarm, -1, torch.arange(n, device=rows.device)).amax()
            began = torch.where((quiet < 0) & (self.since >= 0), self.since, self.seen + quiet + 1)
            self.since.copy_(torch.where(quiet == n - 1, -1, began))
            self.recent.copy_(past[n:])
            self.seen.add_(n)
            self.last.copy_(torch.stack([unbounded, torch.where(full[-1], p_values[-1], 1.0)]))
        return torch.where(alarm, windowed, log_scale)

    def bounded(self, rows: Tensor) -> Tensor:
        """(B, D) the distances among the numbers of samples, as the test reads them."""
        return rows[:, : self.n_far].clamp(-BOUND, BOUND)

    def p_values(self, means: Tensor) -> Tensor:
        """(B,) of windows whose bounded distances have these means (B, D)."""
        statistic, draws = hotelling(means - self.centre, self.precision), len(self.null) + 1
        return (draws - torch.searchsorted(self.null, statistic)) / draws

    @torch.no_grad()
    def fit(
        self, clean: Observed, perturbed: Observed | None = None, *, prior: float | None = None, seed: int = 0
    ) -> None:
        """Learn from clean calibration data, and from perturbed copies of it unless only the alarm is wanted.

        An earlier fit is discarded.
        """
        if prior is not None and not 0 <= prior < 1:
            raise ValueError(f"prior must be at least 0 and below 1, got {prior}")
        for observed in filter(None, (clean, perturbed)):
            Predictions(observed.logits, observed.labels)  # refuses what is empty, not finite, or mislabelled
            if not bool(torch.isfinite(observed.stages).all()):
                raise ValueError("the inputs of the model's layers must be finite, got nan or inf")
        if len(clean.stages) < MIN_SAMPLES:
            raise ValueError(
                f"a guard needs at least {MIN_SAMPLES} calibration samples, got {len(clean.stages)}"
            )
        values = torch.cat([self.distances.set_usual(clean.stages), statistics(clean.logits.float())], 1)
        self._set(mean=values.mean(0), deviation=values.std(0, correction=0).clamp(min=TINY**0.5))
        clean = clean._replace(stages=(values - self.mean) / self.deviation)
        none = values.new_zeros(design(clean.stages[:1], self.n_far).shape[1])
        never = _with_prior(values.new_zeros(2 * self.n_far + 1), 0.0)
        recent = values.new_zeros(max(0, self.window - 1), values.shape[1])
        self._set(single=none, windowed=none.clone(), posterior=never, recent=recent)
        self._fit_test(clean.stages, seed)
        if perturbed is not None:
            perturbed = perturbed._replace(stages=self.numbers(perturbed.stages, perturbed.logits))
            prior = self._choose_prior(clean, perturbed, seed) if prior is None else prior
            single, odds = self._learn_single(clean, perturbed)
            size, both = self.window or WINDOW, (clean, perturbed)
            means = torch.cat([_window_means(part.stages, part.groups, size) for part in both])
            logits, labels = (torch.cat(pair).to(means.device) for pair in zip(clean[1:3], perturbed[1:3]))
            windowed = _fit_scale(logits, labels, design(means, self.n_far))
            self._set(single=single, windowed=windowed, posterior=_with_prior(odds, prior))
        self.reset()

    def _set(self, **learned: Tensor) -> None:
        for name, value in learned.items():
            setattr(self, name, value.float())

    # Below, the stages of what was observed are the numbers that were made of them.

    def _fit_test(self, rows: Tensor, seed: int) -> None:
        """The test statistic of clean windows, so large that the rate holds for 95 % of calibration sets.

        The calibration data are one sample of many. Windows drawn from them are compared with the mean and covariance
        of resamples, as new windows are with those of the calibration data.
        """
        far, size = self.bounded(rows), self.window or WINDOW
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return far[torch.randint(len(far), shape, generator=generator).to(far.device)]

        means = torch.cat([draw(DRAWS // 10, size).mean(1) for _ in range(10)])
        # The covariance of the channels, too, is known from these samples: each channel takes a degree of freedom.
        free = max(len(far) - max(self.distances.widths), len(far) // 4, 1)
        # Few samples for each distance would make the null larger than what clipped distances can reach.
        ridge = max(TINY**0.5, (self.n_far / free) ** 2)
        resamples = (mean_and_precision(draw(free), ridge) for _ in range(RESAMPLES))
        drawn = [hotelling(means - mean, precision).sort()[0] for mean, precision in resamples]
        centre, precision = mean_and_precision(far, ridge)
        self._set(centre=centre, precision=precision, null=torch.stack(drawn).quantile(SURE, 0))

    def _learn_single(self, clean: Observed, perturbed: Observed) -> tuple[Tensor, Tensor]:
        """Weights of a single sample's log scale, and of the log odds that it is shifted if half of all are."""
        single = _fit_scale(perturbed.logits, perturbed.labels, design(perturbed.stages, self.n_far))
        inputs = _squares(torch.cat([clean.stages, perturbed.stages])[:, : self.n_far])
        is_shifted = torch.arange(len(inputs), device=inputs.device) >= len(clean.stages)
        n_of = torch.where(is_shifted, max(1, len(perturbed.stages)), len(clean.stages))
        none, weights = torch.zeros_like(inputs[0]), 0.5 * len(inputs) / n_of
        odds, _, _ = fit_logistic(inputs, is_shifted, towards=none, ridge=1e-3, weights=weights)
        return single, odds.float()

    def _choose_prior(self, clean: Observed, perturbed: Observed, seed: int) -> float:
        """The largest prior whose cost on held-back clean samples is at most COST, by the upper 95 % bound."""
        base = F.cross_entropy(clean.logits.float(), clean.labels, reduction="none")
        fold = torch.randint(2, base.shape, generator=torch.Generator().manual_seed(seed)).to(base.device)
        costs = {prior: torch.zeros_like(base) for prior in PRIORS}
        for held in (0, 1):
            rows = fold[clean.samples] == held
            ours, rest = (Observed(*(part[which] for part in clean)) for which in (rows, ~rows))
            others = Observed(*(part[fold[perturbed.samples] != held] for part in perturbed))
            single, odds = self._learn_single(rest, others)
            for prior, values in costs.items():
                log_scale = self._of_samples(ours.stages, single, _with_prior(odds, prior))
                logits = scale_logits(ours.logits, log_scale[:, None])
                values[rows] = F.cross_entropy(logits, ours.labels, reduction="none") - base[rows]
        for prior, values in costs.items():
            cost, error = mean_and_error(values)
            if cost + 1.96 * error <= COST * float(base.mean()):
                return prior
        return 0.0

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in self.learned:  # their sizes come with the fit
            if prefix + name in state_dict:
                self._set(**{name: torch.empty_like(state_dict[prefix + name], device=self.seen.device)})
        super()._load_from_state_dict(state_dict, prefix, *args)


class Distances(nn.Module):
    """Stages (B, S) -> how far each part of them is from the usual ones, (B, D), one part for each of `widths`.

    A distance is the logarithm of a mean square in units in which the usual values vary by 1 in every direction
    (Mahalanobis' distance), so a shift that breaks the usual relations between channels counts, even where each
    channel alone looks usual.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = list(widths)
        self.register_buffer("mean", torch.zeros(sum(widths)))
        for number, width in enumerate(widths):  # of the inverse covariance
            self.register_buffer(f"root{number}", torch.eye(width))
        self.mean: Tensor

    def forward(self, stages: Tensor) -> Tensor:
        """The distances of each row."""
        parts = (stages.float() - self.mean).split(self.widths, 1)
        squares = [(part @ self.get_buffer(f"root{i}")).square().mean(1) for i, part in enumerate(parts)]
        return torch.stack(squares, 1).clamp(min=TINY).log()

    @torch.no_grad()
    def set_usual(self, stages: Tensor) -> Tensor:
        """Take (N, S) for what is usual; the distances of each row from all the others, (N, D).

        A row is closer to statistics that include it than a new row would be, much closer if there are few rows.
        """
        values, n = stages.cpu().double(), len(stages)  # some devices have no float64
        mean, deviation = values.mean(0), values.std(0, correction=0).clamp(min=TINY)
        self.mean.copy_(mean)
        units = ((values - mean) / deviation).split(self.widths, 1)
        far = []
        for number, (unit, scale) in enumerate(zip(units, deviation.split(self.widths))):
            eye = torch.eye(len(scale), dtype=unit.dtype)
            lower: Tensor = torch.linalg.cholesky(torch.lerp(unit.mT @ unit / n, eye, SHRINK))
            root = torch.linalg.solve_triangular(lower, eye, upper=False).mT
            self.get_buffer(f"root{number}").copy_(root / scale[:, None])
            # Sherman and Morrison's formula takes a row out of the covariance; its mean moves away from the row too.
            squares, grown = (unit @ root).square().sum(1), n / (n - 1)
            squares = grown**2 * squares / (1 - (1 - SHRINK) * grown * squares / n).clamp(min=TINY)
            far.append((squares / len(scale)).clamp(min=TINY).log())
        return torch.stack(far, 1).float().to(stages.device)


def design(rows: Tensor, n_far: int) -> Tensor:
    """(B, P) what a log scale is linear in, from the numbers of samples or the means of windows, (B, D + S).

    These are distances at four depths of the network, the largest log-probability, the entropy, and 1.
    """
    far = rows[:, :n_far].unflatten(1, (-1, 2))  # (B, layers, mean and deviation)
    depths = [part.mean(1) for part in far.tensor_split(min(DEPTHS, far.shape[1]), 1)]
    inputs = torch.cat([*depths, rows[:, [n_far, -2]]], 1).clamp(LOW, HIGH)
    return torch.cat([inputs, rows.new_ones(rows.shape[0], 1)], 1)


def mean_and_precision(far: Tensor, ridge: float = TINY**0.5) -> tuple[Tensor, Tensor]:
    """The mean (D,) and inverse covariance (D, D) of distances (N, D)."""
    mean, eye = far.mean(0), torch.eye(far.shape[1]).to(far)
    inverse = torch.linalg.inv((far - mean).mT @ (far - mean) / len(far) + ridge * eye)
    return mean, inverse.contiguous()  # torch.export warns of columns that lie together


def hotelling(off: Tensor, precision: Tensor) -> Tensor:
    """(B,) Hotelling's statistic of means (B, D) less the usual one: how far they are from usual, in total."""
    return ((off @ precision) * off).sum(1)


def _with_prior(odds: Tensor, prior: float) -> Tensor:
    """The log odds where a share `prior` of samples is shifted; 0 for never."""
    bias = math.log(prior / (1 - prior)) if prior else -math.inf
    return torch.cat([odds[:-1], odds[-1:] + bias])


def _squares(far: Tensor) -> Tensor:
    """(B, 2 D + 1): distances, their squares and 1."""
    far = far.clamp(-4.0, 8.0)
    return torch.cat([far, far.square() / 4, far.new_ones(far.shape[0], 1)], 1)


def _window_means(rows: Tensor, groups: Tensor, size: int) -> Tensor:
    """(N, D + S) the mean of each row's window: up to `size` neighbouring rows of one group."""
    place = torch.arange(len(groups), device=groups.device)
    first = torch.searchsorted(groups, groups)  # where the row's group begins
    window = groups * (len(groups) + 1) + (place - first) // size
    which = window.unique(return_inverse=True)[1]
    sums = rows.new_zeros(len(rows), rows.shape[1]).index_add_(0, which, rows)
    return (sums[which].T / torch.bincount(which)[which]).T


def _fit_scale(logits: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
    ridge = inputs.new_tensor([*[RIDGE] * (inputs.shape[1] - 1), TINY]) * len(inputs)
    return fit_log_scale(logits.float(), labels, inputs, ridge)
