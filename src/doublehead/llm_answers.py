"""Log-probabilities of the most likely tokens, as servers of language models return them, read as scores of options.

In files they are JSON Lines with a label:

    {"label": "B", "top_logprobs": {"A": -1.2, "B": -0.4, "C": -3.0}}

The classes are the `options` (or `choices`) of the first line, or else the labels of the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

ANSWERS = ("top_logprobs", "logprobs")
LABELS = ("label", "labels", "answer", "target", "gold", "correct")
MARKS = " \t\n\u0120\u2581"  # what tokenizers put before a word
SMALLEST = 1e-10  # probability of an option that is missing where nothing is left for it


def token_logprobs(answer: Any) -> dict[str, float]:
    """Log-probabilities by token, from the forms in which servers return them.

    {"A": -0.1, ...}; OpenAI's and vLLM's chat [{"token": "A", "logprob": -0.1}, ...], also inside the answer
    that carries it as `top_logprobs`; vLLM's {"32": {"decoded_token": "A", "logprob": -0.1}}; llama.cpp's
    [{"tok_str": "A", "prob": 0.9}, ...]. Blanks before a token do not count; tokens that differ by them alone add up.

    >>> token_logprobs([{"token": " A", "logprob": math.log(0.5)}, {"token": "A", "logprob": math.log(0.25)}])
    {'A': -0.2876820724517809}
    """
    found: dict[str, float] = {}
    for token, value in _pairs(_innermost(answer)):
        name = token.strip(MARKS)
        found[name] = float(np.logaddexp(found.get(name, -math.inf), value))
    return found


def _innermost(answer: Any) -> Any:
    """What lies under `top_logprobs` or the like, of the first token where there are several."""
    keys = ("top_logprobs", "logprobs", "content", "completion_probabilities", "probs")
    inner = None
    if isinstance(answer, Mapping):
        inner = next((answer[key] for key in keys if isinstance(answer.get(key), (Mapping, list))), None)
    elif isinstance(answer, list) and answer:
        first = answer[0]  # a token with alternatives of its own, a list or dict of them, or just a token
        if isinstance(first, list) or (
            isinstance(first, Mapping)
            and ({"top_logprobs", "probs"} & first.keys() or not {"token", "tok_str"} & first.keys())
        ):
            inner = first
    return answer if inner is None else _innermost(inner)


def _pairs(answer: Any) -> list[tuple[str, float]]:
    if isinstance(answer, Mapping) and all(isinstance(value, Mapping) for value in answer.values()):
        answer = [{"token": token, **value} for token, value in answer.items()]
    try:
        if isinstance(answer, Mapping):
            return [(str(token), float(value)) for token, value in answer.items()]
        found = []
        for entry in answer:
            token = next(
                entry[key] for key in ("decoded_token", "token", "tok_str") if entry.get(key) is not None
            )
            value = entry["logprob"] if "logprob" in entry else math.log(max(float(entry["prob"]), SMALLEST))
            found.append((str(token), float(value)))
        return found
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(
            f"log-probabilities of tokens must be a dict or a list of tokens with `logprob`, got {answer!r:.120}"
        ) from error


def option_logprobs(
    answers: Sequence[Any], options: Sequence[str], rest: Literal["share", "other"] = "share"
) -> np.ndarray[Any, Any]:
    """(N, K) log-probabilities of the options; with `rest="other"` (N, K + 1), the last of any other answer.

    What is not among the tokens listed shares the probability that is left, and is at most as likely as the least
    likely token listed.
    """
    if rest not in ("share", "other"):
        raise ValueError(f"rest must be 'share' or 'other', got {rest!r}")
    if len(set(options)) != len(options) or len(options) < 2:
        raise ValueError(f"options must be two or more different tokens, got {list(options)}")
    table = np.empty((len(answers), len(options) + (rest == "other")))
    for row, answer in zip(table, answers):
        known = token_logprobs(answer)
        missing = [option for option in options if option not in known]
        left = max(1 - math.fsum(math.exp(value) for value in known.values()), SMALLEST)
        share = left / (len(missing) + (rest == "other")) if missing else left
        guess = min([math.log(share), *known.values()])
        row[: len(options)] = [known.get(option, guess) for option in options]
        if rest == "other":
            row[-1] = math.log(max(1 - math.fsum(np.exp(row[:-1])), SMALLEST))
    return table


def holds_answers(record: Mapping[str, Any]) -> bool:
    """Whether a record has log-probabilities of tokens; a list of numbers has no tokens.

    Not where it has calibrated probabilities beside them, as `doublehead calibrate` writes them.
    """
    try:
        return not isinstance(record.get("probs"), dict) and bool(token_logprobs(_answer(record)))
    except (AttributeError, TypeError, ValueError):
        return False


def read_answers(rows: Iterable[dict[str, Any]], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The columns of the rows of a file `name`: the label, if there is one, and a log-probability for each option."""
    records = list(rows)
    answers = [_answer(record) for record in records]
    if None in answers:
        i = answers.index(None)
        raise ValueError(f"{name}, line {i + 1} must have {' or '.join(ANSWERS)}, got {str(records[i])[:80]}")
    labels = [next((str(record[key]) for key in LABELS if key in record), None) for record in records]
    known = [label for label in labels if label is not None]
    if known and len(known) < len(records):
        raise ValueError(f"{name}, line {labels.index(None) + 1} must have a label like the others, got none")
    options = _options(records[0], answers, known)
    columns = dict(zip(options, option_logprobs(answers, options).T))
    return {**({"label": np.array(labels, dtype=object)} if known else {}), **columns}


def _answer(record: Mapping[str, Any]) -> Any:
    """The log-probabilities of a record, also of a whole answer of a server (`choices`)."""
    if any(record.get(key) is not None for key in ANSWERS):
        return next(record[key] for key in ANSWERS if record.get(key) is not None)
    inner = record.get("response", record).get("choices")
    return _answer(inner[0]) if isinstance(inner, list) and inner and isinstance(inner[0], dict) else None


def _options(first: dict[str, Any], answers: list[Any], labels: list[str]) -> list[str]:
    stated = next((first[key] for key in ("options", "choices") if key in first), None)
    if isinstance(stated, (list, dict)) and all(isinstance(option, str) for option in stated):
        return list(stated)
    if len(set(labels)) >= 2:
        return sorted(set(labels))
    return sorted(set.intersection(*(set(token_logprobs(answer)) for answer in answers)))
