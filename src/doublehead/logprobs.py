"""Log-probabilities of the likeliest tokens, as servers of language models return them, read as scores of options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

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
    while True:
        inner = None
        if isinstance(answer, Mapping):
            inner = next((answer[key] for key in keys if isinstance(answer.get(key), (Mapping, list))), None)
        elif isinstance(answer, list) and answer and _holds_more(answer[0]):
            inner = answer[0]
        if inner is None:
            return answer
        answer = inner


def _holds_more(first: Any) -> bool:
    """Whether an entry of a list is a token with alternatives of its own, or a list or dict of alternatives."""
    if isinstance(first, Mapping):
        return "top_logprobs" in first or "probs" in first or not {"token", "tok_str"} & first.keys()
    return isinstance(first, list)


def _pairs(answer: Any) -> list[tuple[str, float]]:
    if isinstance(answer, Mapping) and all(isinstance(value, Mapping) for value in answer.values()):
        answer = [{"token": token, **value} for token, value in answer.items()]
    try:
        if isinstance(answer, Mapping):
            return [(str(token), float(value)) for token, value in answer.items()]
        return [_entry(entry) for entry in answer]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"log-probabilities of tokens must be a dict or a list of tokens with `logprob`, got {answer!r:.120}"
        ) from error


def _entry(entry: Mapping[str, Any]) -> tuple[str, float]:
    token = entry.get("decoded_token", entry.get("token", entry.get("tok_str")))
    value = entry["logprob"] if "logprob" in entry else math.log(max(float(entry["prob"]), SMALLEST))
    if token is None:
        raise KeyError("token")
    return str(token), float(value)


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
