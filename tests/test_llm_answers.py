"""Answers of language models: log-probabilities of the likeliest tokens, in arrays, records and files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import doublehead as dh
from commands import call
from doublehead import Predictions, metrics
from doublehead.llm_answers import option_logprobs, token_logprobs
from doublehead.system import require

PLAIN = {"A": -0.1, "B": -2.5}
LISTED = [{"token": "A", "logprob": -0.1, "bytes": [65]}, {"token": " B", "logprob": -2.5, "bytes": [32, 66]}]
BY_ID = {
    "32": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
    "33": {"logprob": -2.5, "rank": 2, "decoded_token": "\u0120B"},
}


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN,
        LISTED,
        {"top_logprobs": LISTED},
        {"content": [{"token": "A", "logprob": -0.1, "top_logprobs": LISTED}]},  # chat completions
        {"tokens": ["A"], "top_logprobs": [PLAIN]},  # completions
        BY_ID,
        [BY_ID],  # vLLM's own
        {"completion_probabilities": [{"content": "A", "probs": [
            {"tok_str": "A", "prob": math.exp(-0.1)}, {"tok_str": " B", "prob": math.exp(-2.5)}]}]},  # llama.cpp
        {"completion_probabilities": [{"id": 1, "token": "A", "logprob": -0.1, "top_logprobs": LISTED}]},
    ],
)  # fmt: skip
def test_what_servers_return(answer: Any) -> None:
    assert token_logprobs(answer) == pytest.approx(PLAIN)


def test_missing_options_share_what_is_left() -> None:
    logs = {"A": math.log(0.5), "B": math.log(0.2), "so": math.log(0.1)}
    shared, other = (option_logprobs([logs], "ABCD", rest) for rest in ("share", "other"))
    np.testing.assert_allclose(np.exp(shared), [[0.5, 0.2, 0.1, 0.1]])  # 0.2 is left, at most 0.1 each
    np.testing.assert_allclose(np.exp(other)[0, :4], [0.5, 0.2, 0.2 / 3, 0.2 / 3])
    np.testing.assert_allclose(np.exp(other).sum(1), 1)
    assert np.ptp(option_logprobs([{"so": -0.1}], "AB")) == 0  # nothing is known of either
    p = Predictions.from_logprobs([logs] * 2, ["A", "C"], "ABCD")
    torch.testing.assert_close(p.probs[0], torch.tensor([0.5, 0.2, 0.1, 0.1]).double() / 0.9)
    assert Predictions.from_logprobs([logs] * 2, ["A", "C"], "ABCD", rest="other").n_classes == 5


def test_bad_answers_are_named() -> None:
    for refused, message in (
        (lambda: Predictions.from_logprobs([PLAIN], ["E"], "ABCD"), r"among the options .* got 'E'"),
        (lambda: Predictions.from_logprobs([PLAIN], ["A", "B"]), "one for each of 1 answers, got 2"),
        (lambda: Predictions.from_logprobs([[3]], ["A"], "AB"), "must be a dict or a list of tokens"),
        (lambda: option_logprobs([PLAIN], ["A"]), "two or more different tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


def questions(n: int, k: int, seed: int) -> list[dict[str, Any]]:
    """Records of an overconfident model: the ten likeliest tokens of the true ones, and the label."""
    rng = np.random.default_rng(seed)
    names = [chr(65 + i) if k <= 26 else f"option{i}" for i in range(k)]
    truth = rng.normal(size=(n, k)) * 2
    probs = np.exp(truth) / np.exp(truth).sum(1, keepdims=True)
    labels = [int(rng.choice(k, p=row)) for row in probs]
    said = 3 * truth
    logs = said - np.log(np.exp(said).sum(1, keepdims=True))
    tops = [{names[i]: row[i] for i in np.argsort(-row)[:10]} for row in logs]
    return [{"label": names[y], "options": names, "top_logprobs": top} for y, top in zip(labels, tops)]


@pytest.mark.parametrize("k", [2, 4, 50])
def test_files_of_answers(k: int, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    files = [tmp_path / name for name in ("calib.jsonl", "test.jsonl")]
    for seed, file in enumerate(files):
        file.write_text("".join(json.dumps(record) + "\n" for record in questions(400, k, seed)))
    records = [json.loads(line) for line in files[1].read_text().splitlines()]
    labels, options = [record["label"] for record in records], records[0]["options"]
    want = metrics.nll(Predictions.from_logprobs([r["top_logprobs"] for r in records], labels, options))
    assert dh.evaluate(files[1]).values["nll"] == pytest.approx(want)
    out, page = tmp_path / "fixed.jsonl", tmp_path / "page.html"
    for command in (
        f"evaluate {files[1]}",
        f"calibrate --fit {files[0]} --apply {files[1]} -o {out} --method temperature",
        f"report {files[1]} -o {page}",
    ):
        call(*command.split())
    fixed = [json.loads(line) for line in out.read_text().splitlines()]
    probs = np.array([[record["probs"][option] for option in options] for record in fixed])
    assert metrics.nll(Predictions.from_probs(probs, [options.index(label) for label in labels])) < want - 0.1
    assert [record["top_logprobs"] for record in fixed] == [record["top_logprobs"] for record in records]


def test_files_that_are_no_answers_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "a.jsonl"
    good = json.dumps({"label": "A", "top_logprobs": PLAIN})
    for text, message in (
        ('{"x": 1}\n', "looks like the label"),  # an ordinary table
        (good + "\n{broken\n", "line 2 must be a JSON object"),
        (good + '\n{"label": "A"}\n', "line 2 must have top_logprobs"),
        (good + "\n" + json.dumps({"top_logprobs": PLAIN}) + "\n", "line 2 must have a label"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            dh.evaluate(file)
    file.write_text(good + "\n" + json.dumps({"label": "B", "top_logprobs": PLAIN}) + "\n")  # no options
    assert dh.evaluate(file).values["accuracy"] == 0.5
    file.write_text('{"label": 1, "logprobs": [-1.0, -0.5]}\n')  # an ordinary column
    assert dh.evaluate(logits=file).values["accuracy"] == 1


def test_a_causal_model_and_its_next_tokens() -> None:
    """A real model class with random weights, trained to choose among four tokens."""
    transformers = require("transformers", extra="transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_positions=4, n_embd=32, n_layer=1, n_head=2, bos_token_id=0,
                                     eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    net = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(4, 40, (900, 3))
    answers = (ids[:, -1] + (torch.rand(900) < 0.3)) % 4  # three in ten are off by one
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(40):
        torch.nn.functional.cross_entropy(net(ids[:200]).logits[:, -1], answers[:200]).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()

    def options(output: Any) -> Tensor:
        found: Tensor = output.logits[:, -1, :4]
        return found

    model = dh.calibrate(net, (ids[200:500], answers[200:500]), logits_of=options)
    with torch.no_grad():
        before, after = options(net(ids[500:])), model(ids[500:]).logits
    assert after.shape == (400, 4)
    nlls = [metrics.nll(Predictions(out, answers[500:])) for out in (before, after)]
    assert nlls[1] < nlls[0]
    data = ids[200:500], answers[200:500]
    whole = dh.calibrate(net, data, logits_of=lambda out: out.logits[:, -1], method="temperature")
    assert whole(ids[:3]).logits.shape == (3, 40)
    with pytest.raises(ValueError, match=r"got its inputs: .* labels\[:, 1:\]"):
        dh.calibrate(net, [{"input_ids": ids, "labels": ids}])
