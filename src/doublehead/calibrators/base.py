"""The contract every calibrator keeps: `fit(predictions) -> self`, then `calibrator(logits) -> logits`.

Below it the maps of probabilities that several share: log odds, steps, straight lines, a new top confidence. They are
functions of the log odds of a class, not of its probability: confidences that round to 1 remain distinct.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from doublehead.calibration_head import keep_top
from doublehead.predictions import Predictions
from doublehead.system import warn
from doublehead.torch_tools import StaysFloat32

if TYPE_CHECKING:
    from typing_extensions import Self


class NotFitted(RuntimeError):
    """A calibrator was used before it was fitted."""


class NotConverged(UserWarning):
    """A fit stopped before it reached its optimum; the message says how far it got."""


class Calibrator(StaysFloat32):
    """What all calibrators share.

    A subclass lists in `learned` the names of what `fit` learns. They are buffers, None until then, so a
    `state_dict` holds them exactly when the calibrator is fitted, and loading it into a fresh instance restores
    their shapes, values and dtype: those of the logits fitted on. Its constructor stores its arguments under their
    own names and calls `super().__init__()`, nothing else; `_learn` and `_transform` do the work.
    """

    learned: ClassVar[tuple[str, ...]] = ()
    binary_only: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False  # and soft labels
    keeps_order: ClassVar[bool] = False  # the predicted class never changes, whatever the parameters
    converged_: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("converged_", None)
        for name in self.learned:
            self.register_buffer(name, None)

    def fit(self, predictions: Predictions) -> Self:
        """Learn from predictions the network was not trained on; they are left as they were."""
        return self._fit(predictions)

    def _fit(self, predictions: Predictions, **known: Any) -> Self:
        """`fit`, with what else `_learn` takes."""
        if not isinstance(predictions, Predictions):
            raise TypeError(
                f"predictions must be a Predictions, got {type(predictions).__name__}; "
                "make one with Predictions(logits, labels) or Predictions.from_probs(probs, labels)"
            )
        if self.binary_only and predictions.n_classes != 2:
            raise ValueError(
                f"{type(self).__name__} needs predictions of 2 classes, got {predictions.n_classes} classes"
            )
        if not self.takes_weights and (predictions.weights is not None or predictions.are_soft):
            raise TypeError(
                f"{type(self).__name__} takes neither sample weights nor soft labels: "
                "'temperature', 'head' and 'none' do"
            )
        with torch.no_grad():
            learned = self._learn(predictions, **known)
        if not learned.get("converged_", True):
            facts = learned.get("facts", "it ran out of steps")
            warn(f"{type(self).__name__} did not converge: {facts}", NotConverged)
        like = predictions.logits[:1]
        for name in (*self.learned, "converged_"):
            value = learned.get(name, True)
            value = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None).detach()
            dtype = like.dtype if value.is_floating_point() else value.dtype
            # a copy, since formats of weights refuse shared memory
            setattr(self, name, value.to(like.device, dtype, copy=True))
        return self

    def forward(
        self,
        logits: Tensor,
        features: Tensor | None = None,
        *,
        opinion: Tensor | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Calibrated logits (..., K) for logits (..., K); half precision is widened to float32.

        A logit of -inf excludes a class: its probability stays 0.

        `features`, `opinion` and `numbers` are for the staged head; calibrators that read logits alone ignore them.
        """
        self._check_use(logits)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if logits.is_cpu and not traced and logits.numel() and bool(logits.amin() > -torch.inf):
            return self._transform(logits)  # as nearly always; what follows takes longer than a temperature
        # A class excluded by -inf stays excluded, and the only one left stays certain.
        excluded = logits == -torch.inf
        alone = excluded.sum(-1, keepdim=True) == logits.shape[-1] - 1
        return torch.where(excluded | alone, logits.detach(), self._transform(logits))

    def _check_use(self, logits: Tensor) -> None:
        if not self.is_fitted:
            raise NotFitted(f"this {type(self).__name__} is not fitted: call fit(predictions) first")
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"logits must be a tensor (..., K), got {type(logits).__name__}; calibrate() takes Predictions"
            )
        wanted = self._n_classes()
        if wanted is not None and logits.shape[-1] != wanted:
            raise ValueError(
                f"logits must have shape (..., {wanted}), the number of classes fitted on, got {tuple(logits.shape)}"
            )

    def calibrate(self, predictions: Predictions) -> Predictions:
        """The same predictions with calibrated logits."""
        with torch.no_grad():
            return predictions.with_logits(self(predictions.logits))

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` has run, or a fitted state has been loaded."""
        return self.converged_ is not None

    @property
    def keeps_argmax(self) -> bool:
        """Whether the predicted class never changes."""
        return self.keeps_order

    def in_words(self) -> str:
        """What it learned, if that is one or two numbers, such as "temperature 2.5"; else empty."""
        found = {name: value for name, value in self.state_dict().items() if value.numel() == 1}
        told = [f"{name.rstrip('_')} {float(x):.4g}" for name, x in found.items() if x.is_floating_point()]
        return ", ".join(told)

    def fresh(self) -> Self:
        """An unfitted calibrator with the same parameters."""
        return type(self)(**self.get_params())

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments by name, as scikit-learn wants them."""
        names = inspect.signature(type(self).__init__).parameters
        return {name: getattr(self, name) for name in names if name != "self"}

    def extra_repr(self) -> str:
        """The parameters, as the constructor takes them, and what was learned."""
        params = [f"{name}={value!r}" for name, value in self.get_params().items()]
        if not self.is_fitted:
            return ", ".join([*params, "not fitted"])
        shapes = [f"{name.rstrip('_')} {tuple(getattr(self, name).shape)}" for name in self.learned]
        return ", ".join([*params, f"learned: {self.in_words() or ', '.join(shapes) or 'nothing'}"])

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        """The values of `learned`; and, where it is not certain, `converged_` with the `facts` for a warning."""
        raise NotImplementedError

    def _transform(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def _n_classes(self) -> int | None:
        """How many classes the fitted state is for; None where any number will do."""
        return 2 if self.binary_only else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the shapes from the state, so that it fits a fresh instance; what it lacks becomes unfitted."""
        for name in (*self.learned, "converged_"):
            value, own = state_dict.get(prefix + name), getattr(self, name)
            if value is not None:
                value = torch.empty_like(value, device=value.device if own is None else own.device)
            setattr(self, name, value)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __sklearn_is_fitted__(self) -> bool:
        return self.is_fitted


# --- maps


def log_odds(logits: Tensor) -> Tensor:
    """(..., K) -> (..., K): log p - log(1 - p) of every class, exact where p rounds to 1.

    >>> log_odds(torch.tensor([[100.0, 0.0], [0.0, 0.0]])).tolist()
    [[100.0, -100.0], [0.0, 0.0]]
    """
    log_probs = logits.log_softmax(-1)
    # p > 1/2 only where the class is the largest; the others' log(1 - p) is safe.
    others = (-log_probs.clamp(max=-1e-3).expm1()).log()
    top = logits.argmax(-1, keepdim=True)
    return (log_probs - others).scatter(-1, top, top_log_odds(logits)[..., None])


def top_log_odds(logits: Tensor) -> Tensor:
    """(..., K) -> (...): the log odds of the predicted class, its logit less the log-sum-exp of all others."""
    top = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, top, -torch.inf).logsumexp(-1)
    return logits.gather(-1, top)[..., 0] - rest


def steps(x: Tensor, edges: Tensor, values: Tensor) -> Tensor:
    """A step function of each class: x (..., C), edges (C, M - 1) rising, values (C, M). Steps are right-closed.

    >>> steps(torch.tensor([[0.0], [1.0], [1.5]]), torch.tensor([[1.0]]), torch.tensor([[10.0, 20.0]]))[:, 0].tolist()
    [10.0, 10.0, 20.0]
    """
    columns = x.movedim(-1, 0).reshape(x.shape[-1], -1).contiguous()  # (C, n)
    at = torch.searchsorted(edges.to(x.dtype), columns)
    return _rows(values.to(x.dtype).gather(1, at), x)


def lines(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """A piecewise linear function of each class: x (..., C), knots (C, M) rising, values (C, M); constant outside.

    >>> lines(torch.tensor([[0.25], [9.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[10.0, 20.0]]))[:, 0].tolist()
    [12.5, 20.0]
    """
    columns = x.movedim(-1, 0).reshape(x.shape[-1], -1).contiguous()  # (C, n)
    knots, values = knots.to(x.dtype), values.to(x.dtype)
    right = torch.searchsorted(knots, columns).clamp(1, knots.shape[1] - 1)
    x0, x1 = knots.gather(1, right - 1), knots.gather(1, right)
    y0, y1 = values.gather(1, right - 1), values.gather(1, right)
    share = ((columns - x0) / (x1 - x0).clamp(min=torch.finfo(x.dtype).tiny)).clamp(0, 1)
    return _rows(torch.lerp(y0, y1, share), x)


def log_normalise(probs: Tensor, floor: float = 0.0) -> Tensor:
    """Log probabilities (..., K) from one-vs-rest probabilities that need not sum to 1, none below `floor`."""
    return probs.clamp(min=max(floor, torch.finfo(probs.dtype).tiny)).log().log_softmax(-1)


def with_top_odds(logits: Tensor, odds: Tensor) -> Tensor:
    """Log probabilities whose top class has the log odds (...) given, the others in their old proportions.

    The top class stays on top: its probability is never set below that of the runner-up.
    """
    top = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, top, -torch.inf).log_softmax(-1)  # (..., K) shares of what the top class leaves
    odds = torch.maximum(odds, rest.amax(-1))[..., None]
    both = torch.nn.functional.logsigmoid(-odds) + rest
    return keep_top(both.scatter(-1, top, torch.nn.functional.logsigmoid(odds)), logits)


def _rows(columns: Tensor, like: Tensor) -> Tensor:
    """(C, n) -> the shape (..., C) of `like`."""
    return columns.reshape(like.shape[-1], *like.shape[:-1]).movedim(0, -1)
