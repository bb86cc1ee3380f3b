"""What a classifier does, and how its outputs and labels are read as rows of logits (N, K) and classes (N,).

| task      | outputs        | labels                                     | calibrated outputs             |
|-----------|----------------|--------------------------------------------|--------------------------------|
| "classes" | (B, K)         | (B,), or rows of probabilities (B, K)      | log-probabilities (B, K)       |
| "binary"  | (B,) or (B, 1) | 0 and 1, (B,) or (B, 1)                    | the logit, in its shape        |
| "labels"  | (B, L)         | 0 and 1, (B, L): a sample may have several | logits (B, L)                  |
| "tokens"  | (B, T, K)      | (B, T)                                     | log-probabilities (B, T, K)    |
| "pixels"  | (B, K, H, W)   | (B, H, W)                                  | log-probabilities (B, K, H, W) |
|           | (B, 1, H, W)   | 0 and 1, (B, H, W) or (B, 1, H, W)         | logits (B, 1, H, W)            |

Everything after this works on rows, for every task.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

LogitsOf = Callable[[Any], Tensor]
Outputs = Literal["logits", "log_probs", "probs"]
Task = Literal["classes", "binary", "labels", "tokens", "pixels"]
TOLERANCE = 1e-3  # by which rows of probabilities may miss a sum of 1
IGNORE_INDEX = -100  # the label of positions that do not count, as in torch's cross entropy
SUPPORTED = (
    "supported are classes: logits (B, K) with labels (B,) or rows of probabilities (B, K), one logit (B,) or (B, 1) "
    "with labels 0 and 1, independent labels (B, L) with as many 0 and 1, tokens (B, T, K) with labels (B, T), and "
    "pixels (B, K, H, W) or one logit (B, 1, H, W) with labels (B, H, W); ordinal and regression models are not"
)


def recognise(values: Tensor, task: Task = "classes") -> Outputs:
    """What a network's outputs are. A single one is a logit; where it may be a probability, that must be stated.

    >>> recognise(torch.tensor([[0.9, 0.1], [0.5, 0.5]])), recognise(torch.tensor([[0.9, 0.1], [0.5, 0.6]]))
    ('probs', 'logits')
    """
    rows = values.detach().double()
    if _is_one_logit(values.shape, task):
        if bool(((rows >= 0) & (rows <= 1)).all()) and bool((rows != rows.flatten()[0]).any()):
            raise ValueError(
                "the network's outputs lie between 0 and 1: say with outputs='logits' or outputs='probs' what they are"
            )
        return "logits"
    rows = rows.movedim(1, -1) if task == "pixels" else rows
    rounding = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0  # bfloat16: 8e-3
    if bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < max(TOLERANCE, rounding / 2)).all()):
        return "probs"
    if bool((rows <= 0).all()) and bool((rows.logsumexp(-1).abs() < TOLERANCE).all()):
        return "log_probs"
    return "logits"


def recognise_task(values: Tensor, labels: Tensor) -> Task:
    """What a network does, by the shapes of its outputs and of the labels.

    Labels of the shape of the outputs (B, K) are probabilities of K classes where every row sums to 1, else K
    independent labels.

    >>> recognise_task(torch.randn(4, 1), torch.tensor([0.0, 1, 1, 0]))
    'binary'
    >>> recognise_task(torch.randn(4, 3), torch.tensor([[1.0, 1, 0]] * 4))
    'labels'
    """
    if values.ndim in (1, 2) and values.numel() == len(values) == labels.numel():
        return "binary"
    if values.ndim == 2 and len(values) == len(labels) and values.shape[1] > 1:
        if labels.ndim == 1:
            return "classes"
        if labels.shape == values.shape:
            return "classes" if bool(((labels.sum(1) - 1).abs() < TOLERANCE).all()) else "labels"
    if values.ndim == 3 and values.shape[:2] == labels.shape:
        return "tokens"
    one = values.ndim > 3 and values.shape[1] == 1 and values.shape == labels.shape
    if one or (values.ndim > 2 and (values.shape[0], *values.shape[2:]) == labels.shape):
        return "pixels"
    raise ValueError(
        f"the network's outputs have shape {tuple(values.shape)} and the labels {tuple(labels.shape)}: {SUPPORTED}"
    )


def class_scores(values: Tensor, task: Task, outputs: Outputs = "logits") -> Tensor:
    """Logits (..., K) of samples or positions from a network's outputs; one logit z becomes those of two classes, 0, z.

    Log-probabilities serve as logits: their softmax gives back the probabilities.

    >>> class_scores(torch.tensor([[0.5]]), "binary", "probs")
    tensor([[0., 0.]])
    """
    if task == "classes" and outputs != "probs":
        return values
    if _is_one_logit(values.shape, task):
        column = values.reshape(-1) if task == "binary" else values  # also of one sample, squeezed
        column = column.squeeze(1) if task == "pixels" else column
        column = torch.logit(column.float(), eps=1e-7) if outputs == "probs" else column
        return torch.stack([torch.zeros_like(column), column], -1)
    values = values.movedim(1, -1) if task == "pixels" else values
    return values.float().clamp(min=torch.finfo(torch.float32).tiny).log() if outputs == "probs" else values


def _is_one_logit(shape: Sequence[int], task: Task) -> bool:
    """Whether each output is a logit of its own, of yes against no."""
    return task in ("binary", "labels") or (task == "pixels" and shape[1] == 1)


def in_form(log_probs: Tensor, shape: Sequence[int], task: Task) -> Tensor:
    """Log-probabilities (N, K) in the form of outputs of a shape; one logit, or one per label, is their log-odds."""
    if task == "classes":
        return log_probs
    if _is_one_logit(shape, task):
        return (log_probs[:, 1] - log_probs[:, 0]).reshape(shape)
    if task == "tokens":
        return log_probs.reshape(shape)
    return log_probs.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def targets_of(
    labels: Tensor, task: Task, n_classes: int, ignore_index: int = IGNORE_INDEX, *, check: bool = True
) -> Tensor:
    """Labels as classes (N,), -1 where they do not count, or as rows of probabilities (N, K).

    Without `check` nothing is read from the device, and labels that are no class are left as they are.

    >>> targets_of(torch.tensor([[2, -100]]), "tokens", 3).tolist()
    [2, -1]
    """
    if not labels.is_floating_point():
        labels = labels.long()  # masks are often uint8, which holds no -1
    if task in ("binary", "labels"):
        labels = labels.flatten()
        if check:
            low, high = float(labels.min()), float(labels.max())
            if not (low >= 0 and high <= 1):  # nor nan
                raise ValueError(
                    f"labels must lie in 0..1 for a network with one output per label, got {low:g}..{high:g} (a label "
                    f"that is missing is a 0 with weight 0); {SUPPORTED}"
                )
            if bool((labels == labels.round()).all()):
                return labels.long()
        return torch.stack([1 - labels, labels], 1) if labels.is_floating_point() else labels
    if task == "pixels" and labels.is_floating_point() and n_classes == 2:  # masks for one logit
        if check and bool((labels != labels.round()).any()):
            raise ValueError("labels of pixels must be whole numbers, got fractions")
        labels = labels.round().long()
    if task == "classes" and labels.ndim == 2:  # rows of probabilities, or of 0 and 1
        labels = labels.float()
    if labels.is_floating_point():
        if check:
            _check_soft(labels, n_classes)
        return labels
    if task in ("tokens", "pixels"):
        labels = labels.masked_fill(labels == ignore_index, -1).flatten()
    counted = labels[labels >= 0] if check and task in ("tokens", "pixels") else labels
    if check and counted.numel():
        low, high = int(counted.min()), int(counted.max())
        if low < 0 or high >= n_classes:
            ignored = f" where they are not ignore_index = {ignore_index}" if counted is not labels else ""
            raise ValueError(
                f"labels must lie in 0..{n_classes - 1} for a network with {n_classes} classes{ignored}, got "
                f"{low}..{high}; {SUPPORTED}"
            )
    return labels


def _check_soft(labels: Tensor, n_classes: int) -> None:
    """An error unless labels are rows of probabilities (B, K)."""
    if labels.ndim != 2 or labels.shape[1] != n_classes:
        raise TypeError(
            f"labels must be whole numbers, or rows of probabilities of {n_classes} classes, got {labels.dtype} of "
            f"shape {tuple(labels.shape)}; {SUPPORTED}"
        )
    if bool((labels < 0).any()) or not float((labels.sum(1) - 1).abs().max()) <= TOLERANCE:  # nor nan
        raise ValueError(
            "labels that are rows of probabilities must be >= 0 and sum to 1, got a row that does not; "
            "give task='labels' where a sample may have several labels"
        )


def find_logits(output: Any, logits_of: LogitsOf | None = None) -> Tensor:
    """The logits in what a classifier returned: a tensor, or the `logits` of a Hugging Face output or dict."""
    if logits_of is not None:
        output = logits_of(output)
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the network must return a tensor or an object with a tensor `logits`, got {type(output).__name__}; "
            "give logits_of=, a function from its output to the logits"
        )
    return logits


def with_logits(output: Any, logits: Tensor) -> Any:
    """The same output with other `logits`; the original is not changed. Where it has none, the logits alone."""
    if "logits" not in output if isinstance(output, Mapping) else not hasattr(output, "logits"):
        return logits
    if hasattr(output, "_replace"):  # a named tuple
        return output._replace(logits=logits)
    changed = copy.copy(output)
    if isinstance(changed, Mapping):
        changed["logits"] = logits  # type: ignore[index]
    else:
        object.__setattr__(changed, "logits", logits)  # a dataclass may be frozen
    return changed


def check_shifted(ids: Any, labels: Tensor, task: Task, ignore_index: int) -> None:
    """Refuse labels of a causal language model that are its `input_ids`: it predicts the next token."""
    aligned = task == "tokens" and isinstance(ids, Tensor) and ids.shape == labels.shape
    counted = labels != ignore_index
    if aligned and bool(counted.any()) and bool((ids == labels)[counted].all()):
        raise ValueError(
            "labels must be what the network predicts at each position, got its inputs: for a language model give "
            "logits_of=lambda output: output.logits[:, :-1] and a to_pair= that shifts the labels, labels[:, 1:]"
        )


class Reservoir:
    """Rows from batches: all of them, or `limit` of those that count, every one as likely as any other."""

    def __init__(self, limit: int | None = None, generator: torch.Generator | None = None) -> None:
        self.limit, self.generator, self.keys = limit, generator, torch.empty(0, dtype=torch.float64)
        self._parts: list[tuple[Tensor, ...]] = []
        self._drawn = self.keys

    def draw(self, targets: Tensor) -> Tensor | None:
        """Which rows of a batch to add: those whose random number is among the `limit` smallest so far."""
        if self.limit is None:
            return None
        self.keys = self.keys.to(targets.device)
        bound = self.keys.max() if len(self.keys) >= self.limit else 1.0
        # in float64, of which no two are equal
        keys = torch.rand(targets.shape, dtype=torch.float64, generator=self.generator, device=targets.device)
        rows = ((targets >= 0) & (keys < bound)).nonzero()[:, 0]
        keys = keys[rows]
        both = torch.cat([self.keys, keys])
        if len(both) > self.limit:
            last = both.kthvalue(self.limit).values
            rows, keys, old = rows[keys <= last], keys[keys <= last], self.keys <= last
            self._parts = [tuple(part[old] for part in self.rows())] if self._parts else []
            self.keys = self.keys[old]
        self._drawn = keys
        return rows

    def add(self, *parts: Tensor) -> None:
        """Add the rows drawn last."""
        self._parts.append(parts)
        self.keys = torch.cat([self.keys.to(self._drawn), self._drawn])

    def rows(self) -> tuple[Tensor, ...]:
        """All that is kept; classes (N,) become rows of probabilities (N, K) where those of another batch are."""
        columns = []
        for parts in zip(*self._parts, strict=True):
            widest = max(parts, key=lambda part: part.ndim)
            same = (
                part if part.ndim == widest.ndim else one_hot(part, widest.shape[-1]).float()
                for part in parts
            )
            columns.append(torch.cat(list(same)))
        return tuple(columns)
