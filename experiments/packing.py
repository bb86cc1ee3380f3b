"""Logits in few bytes: 8-bit steps, and what a linear guess from other steps leaves of them.

`quantise` loses precision; its error bound is tested. What follows is exact on any machine, since guesses are sums of
integers below 2**53. A guess for one class reads the network's steps and those of the classes before it; its weights
are stored. A run of 100 classes takes 2.1 MB so, and 3.9 without guesses.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
# Levels per unit of log(1 + distance to the row's largest). The network's NLL changes by less than 0.05 %.
LEVELS = {"main": 32, "flip": 12, "opinion": 12, "sphere": 8, "projected": 8}
PER_DEVIATION = 16  # levels of other numbers
FINEST = 0.01  # of scores
UNIT = 4096  # of the integer weights
CONSTANT = 64  # steps: read by every guess
RIDGE = 100.0  # of the weights, in squared steps


def pack(calib: Mapping[str, Any], test: Mapping[str, Any]) -> Arrays:
    """Arrays to store of two splits: labels (N,), fields of LEVELS (N, K) and numbers (N, S) that are not None."""
    both, arrays, main = {"calib": calib, "test": test}, {}, None
    for field in [field for field in LEVELS if calib[field] is not None]:
        steps = [quantise(part[field], LEVELS[field]) for part in both.values()]
        left, arrays[f"weights/{field}"] = encode(steps, main)
        arrays |= {f"{name}/{field}": one for name, one in zip(both, left)}
        main = main or steps
    for name, part in both.items():
        arrays[f"{name}/labels"] = part["labels"].numpy().astype(np.uint8)
        arrays[f"{name}/top"] = part["main"].amax(1).numpy().astype(np.float16)
    if calib["numbers"] is not None:
        mean, step = calib["numbers"].mean(0), calib["numbers"].std(0).clamp(min=1e-6) / PER_DEVIATION
        arrays["weights/numbers"] = torch.stack([mean, step]).numpy()
        for name, part in both.items():
            scaled = ((part["numbers"] - mean) / step).round().clamp(-127, 127)
            arrays[f"{name}/numbers"] = scaled.to(torch.int8).numpy().T
    return arrays


def unpack(arrays: Mapping[str, Array], part: str) -> dict[str, Tensor]:
    """What `pack` was given for a part, "calib" or "test", less the fields that were None."""
    found = {"labels": torch.from_numpy(arrays[f"{part}/labels"].astype(np.int64))}
    main = None
    for field, levels in LEVELS.items():
        if f"{part}/{field}" in arrays:
            steps = decode(arrays[f"{part}/{field}"], arrays[f"weights/{field}"], main)
            found[field] = dequantise(steps, levels)
            main = steps if main is None else main
    found["main"] += torch.from_numpy(arrays[f"{part}/top"].astype(np.float32))[:, None]
    if f"{part}/numbers" in arrays:
        mean, step = torch.from_numpy(arrays["weights/numbers"])
        found["numbers"] = torch.from_numpy(arrays[f"{part}/numbers"].T.astype(np.float32)) * step + mean
    return found


def pack_scores(scores: Tensor, levels: int) -> Array:
    """Scores (N,) >= 0 in `levels` steps per unit of log(1 + 100 score).

    >>> pack_scores(torch.tensor([0.0, 0.5, 20.0]), 256).tolist()
    [0, 1007, 1946]
    """
    return (scores.double() / FINEST).log1p().mul(levels).round().numpy().astype(np.uint16)


def unpack_scores(steps: Array, levels: int) -> Tensor:
    """Scores (N,) in float64."""
    return torch.expm1(torch.from_numpy(steps.astype(np.float64)) / levels) * FINEST


def quantise(logits: Tensor, levels: int) -> Array:
    """(N, K) uint8: fine steps near the row's largest entry, coarse ones far below. The predicted class stays.

    An entry that lies d below the largest is off by at most (1 + d) / (2 * levels - 1), or by 1 / levels next to it.

    >>> quantise(torch.tensor([[5.0, 4.0, -20.0]]), 32).tolist()
    [[0, 22, 104]]
    """
    below = logits.amax(1, keepdim=True) - logits
    steps = (below.double().log1p() * levels).round().clamp(1, 255)  # 0 is for the largest entry alone
    return steps.scatter(1, logits.argmax(1, keepdim=True), 0).to(torch.uint8).numpy()


def dequantise(steps: Array, levels: int) -> Tensor:
    """Logits (N, K) whose largest entry in a row is 0."""
    return -torch.expm1(torch.from_numpy(steps).float() / levels)


def encode(parts: Sequence[Array], known: Sequence[Array] | None) -> tuple[list[Array], Array]:
    """What guesses leave of the steps (N, K) of each part, (K, N) uint8, and the weights of the guesses.

    `known` are steps (N, P) of the same samples that the reader has already.
    """
    rows = [_rows(part, None if known is None else known[i]) for i, part in enumerate(parts)]
    weights = _fit(rows, parts[0].shape[1])
    left = [_left(part, row, weights) for part, row in zip(parts, rows)]
    if known is None and sum(map(_bits, left)) > sum(map(_bits, parts)):  # no guess is better
        weights = np.zeros_like(weights)
        left = [np.ascontiguousarray(part.T) for part in parts]
    return left, weights


def decode(left: Array, weights: Array, known: Array | None) -> Array:
    """The steps (N, K) of a part."""
    rows = _rows(np.zeros(left.T.shape, np.uint8), known)
    first = len(rows) - 1 - len(left)
    if not weights.any():
        return np.ascontiguousarray(left.T)
    for k, part in enumerate(left):
        rows[first + k] = (part + _guess(weights[:, k], rows)) % 256
    return np.ascontiguousarray(rows[first:-1].T.astype(np.uint8))


def _rows(steps: Array, known: Array | None) -> Array:
    """(P + K + 1, N): what guesses read."""
    parts = [steps.T, np.full((1, len(steps)), CONSTANT)]
    return np.concatenate([*([] if known is None else [known.T]), *parts]).astype(np.float64)


def _guess(weights: Array, rows: Array) -> Array:
    return np.floor(weights.T.astype(np.float64) @ rows / UNIT + 0.5)


def _left(steps: Array, rows: Array, weights: Array) -> Array:
    return ((steps.T - _guess(weights, rows)) % 256).astype(np.uint8)


def _fit(parts: Sequence[Array], k: int) -> Array:
    """Least-squares weights (P + K + 1, K) int16; 0 for classes that come later."""
    gram = sum(part @ part.T for part in parts)
    size = len(gram)
    weights = np.zeros((size, k), np.int16)
    for column in range(k):
        target = size - 1 - k + column
        read = [*range(target), size - 1]
        ridge = RIDGE * np.eye(len(read))
        found = np.linalg.solve(gram[np.ix_(read, read)] + ridge, gram[read, target])
        weights[read, column] = np.clip(np.round(UNIT * found), -32768, 32767)
    return weights


def _bits(values: Array) -> float:
    shares = np.bincount(values.ravel()) / values.size
    shares = shares[shares > 0]
    return float(-values.size * (shares * np.log2(shares)).sum())


def write_npz(path: Path, arrays: Mapping[str, Array]) -> Path:
    """As np.savez, compressed by LZMA; np.load reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for name, value in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(value), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy")  # without the time, so that equal arrays give equal files
            info.compress_type = zipfile.ZIP_LZMA
            file.writestr(info, buffer.getvalue())
    return path
