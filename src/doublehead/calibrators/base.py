"""The contract every calibrator keeps: `fit(predictions) -> self`, then `calibrator(logits) -> logits`."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from doublehead.predictions import Predictions
from doublehead.torch_tools import StaysFloat32

if TYPE_CHECKING:
    from typing_extensions import Self


class NotFitted(RuntimeError):
    """A calibrator was used before it was fitted."""


class NotConverged(UserWarning):
    """A fit stopped before it reached its optimum; the message says how far it came."""


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
            warnings.warn(f"{type(self).__name__} did not converge: {facts}", NotConverged, stacklevel=3)
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

        `features`, `opinion` and `numbers` are for the staged head; calibrators that read logits alone ignore them.
        """
        self._check_use(logits)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return self._transform(logits)

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
        """What it learned, where that is a number or two; else nothing.

        >>> class Constant(Calibrator):
        ...     learned = ("value_",)
        ...     def _learn(self, predictions):
        ...         return {"value_": 2.5}
        >>> Constant().fit(Predictions([[0.0, 1.0]], [0])).in_words()
        'value 2.5'
        """
        found = {name: value for name, value in self.state_dict().items() if value.numel() == 1}
        told = [f"{name.rstrip('_')} {float(x):.4g}" for name, x in found.items() if x.is_floating_point()]
        return ", ".join(told)

    def fresh(self) -> Self:
        """An unfitted calibrator with the same parameters."""
        return type(self)(**self.get_params())

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments by name, as scikit-learn wants them."""
        return {name: getattr(self, name) for name in _argument_names(type(self))}

    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments; they take effect at the next `fit`."""
        known = _argument_names(type(self))
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{type(self).__name__} has the parameters {list(known)}, got {name!r}")
            setattr(self, name, value)
        return self

    def extra_repr(self) -> str:
        """The parameters, as the constructor takes them, and what was learned."""
        params = [f"{name}={value!r}" for name, value in self.get_params().items()]
        shapes = [
            f"{name.rstrip('_')} {tuple(getattr(self, name).shape)}"
            for name in self.learned
            if self.is_fitted
        ]
        learned = self.in_words() or ", ".join(shapes) or "nothing"
        return ", ".join([*params, f"learned: {learned}" if self.is_fitted else "not fitted"])

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


def _argument_names(cls: type[Calibrator]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(cls.__init__).parameters if name != "self")
