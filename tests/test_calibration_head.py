"""Calibration heads, stacks and banks of them, and what they read."""

import copy
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doublehead import PAPER, CalibrationHead, HeadSpec
from doublehead.calibration_head import HeadBank, Standardise, feature_numbers, scale_logits, statistics
from doublehead.head_training import HeadTraining, anneal
from samples import refused

YES = torch.tensor(True)
TEMPERATURE = HeadSpec(kind="temperature", reads="features")


def test_head_has_the_papers_shape() -> None:
    head = CalibrationHead(64, 10)
    assert [tuple(p.shape) for p in head.parameters()] == [(1, 32, 64), (1, 32), (1, 10, 32), (1, 10)]
    features = torch.randn(3, 64)
    hidden = F.relu(features @ head.first_weight[0].T + head.first_bias[0])
    by_hand = hidden @ head.last_weight[0].T + head.last_bias[0]
    torch.testing.assert_close(head(torch.randn(3, 10), features), by_hand)


def test_temperature_head_starts_at_one_and_keeps_every_prediction() -> None:
    head = CalibrationHead(16, 5, TEMPERATURE)
    main = torch.randn(1000, 5)
    torch.testing.assert_close(head(main, torch.randn(1000, 16)).softmax(1), main.softmax(1))
    nn.init.normal_(head.last_weight, std=3.0)
    main[:500] = main[:500].round()  # plenty of ties at the top
    main[500:] = 1000 + torch.rand(500, 5) * 1e-4  # neighbours that rounding could merge
    calib = head(main, torch.randn(1000, 16))
    assert torch.equal(calib.argmax(1), main.argmax(1))
    assert not torch.allclose(calib.softmax(1), main.softmax(1))


def test_temperature_head_by_hand() -> None:
    head = CalibrationHead(2, 3, replace(TEMPERATURE, hidden=0))
    with torch.no_grad():
        head.last_weight.copy_(torch.tensor([[[0.5, -1.0]]]))
        head.last_bias.fill_(0.25)
    main = torch.tensor([[1.0, 3.0, 0.0]])
    scale = math.exp(0.5 * 2.0 - 1.0 * 1.0 + 0.25)
    want = (main * scale).log_softmax(1)
    torch.testing.assert_close(head(main, torch.tensor([[2.0, 1.0]])).log_softmax(1), want)


def test_masked_classes_keep_probability_zero() -> None:
    main = torch.tensor([[2.0, 1.0, -math.inf]])
    scaled = scale_logits(main, torch.tensor([[-3.0]])).softmax(1)
    assert float(scaled[0, 2]) == 0.0
    assert torch.isfinite(scaled).all()


def test_scaled_logits_have_no_new_tie() -> None:
    least = torch.tensor([[5.0, torch.nextafter(torch.tensor(5.0), torch.tensor(6.0)), 1.0]])
    double = torch.tensor([[1.0, 1 + 1e-14, 0.0]], dtype=torch.float64)  # equal in float32
    for logits in (least, double):
        out = scale_logits(logits, torch.tensor([[-4.0]]))
        assert out.argmax().item() == 1
        assert (out == 0).sum() == 1
    assert scale_logits(torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, 1)).dtype == torch.float32


def test_statistics_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])  # probabilities 1/4 and 3/4
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    want = [math.log(0.75), math.log(0.25), math.log(4.0), entropy, math.log(3.0)]
    torch.testing.assert_close(statistics(logits), torch.tensor([want]))
    assert statistics(torch.randn(6, 100)).shape == (6, 13)
    assert torch.isfinite(statistics(torch.tensor([[0.0, -math.inf]]))).all()


def test_feature_numbers_by_hand() -> None:
    numbers = feature_numbers(torch.tensor([[0.0, 0.0, 3.0, 4.0]]))[0]
    off = torch.tensor([-1.75, -1.75, 1.25, 2.25])
    kurtosis = float(off.pow(4).mean() / off.square().mean() ** 2)
    want = [math.log(5.0), math.log(4.0), 0.5, math.log(1.75), math.log(kurtosis)]
    torch.testing.assert_close(numbers, torch.tensor(want))
    assert torch.isfinite(feature_numbers(torch.zeros(2, 8))).all()


def test_standardise_follows_the_data_it_is_given() -> None:
    moments = Standardise(2)
    data = torch.randn(40, 50, 2) * torch.tensor([3.0, 0.1]) + torch.tensor([5.0, -1.0])
    for batch in data:
        moments.follow(batch, YES)
    torch.testing.assert_close(moments.mean, data.flatten(0, 1).mean(0), rtol=1e-4, atol=1e-4)
    before = copy.deepcopy(moments.state_dict())
    out = moments.train()(data.flatten(0, 1))
    torch.testing.assert_close(out.mean(0), torch.zeros(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(out.std(0), torch.ones(2), atol=1e-2, rtol=0)
    moments.follow(torch.tensor([[math.nan, 2.0], [3.0, math.inf]]), YES)
    moments.follow(torch.tensor([[1e9, 2.0], [3.0, 1.0]]), ~YES)
    assert all(torch.equal(before[key], value) for key, value in moments.state_dict().items())


def test_annealing_by_hand() -> None:
    for beta0 in (0.1, 0.6, 1.0, 1.2, 3.0):
        assert anneal(beta0, 1.0) == 1.0
        for t, s in ((0, 10), (3, 10), (7, 9)):
            assert anneal(beta0, t / s) == pytest.approx(beta0 - (beta0 - 1) * t / s)  # Eq. 5
    refused(r"progress must lie in 0..1, .* got 1.5", anneal, 1.2, 1.5)


def test_specs_know_their_defaults_and_what_is_wrong() -> None:
    assert (PAPER.kind, PAPER.reads, PAPER.lr, PAPER.beta0) == ("mlp", ("features",), 0.1, 1.2)
    usual = HeadSpec(kind="temperature")
    assert (usual.reads, usual.lr, usual.beta0) == (("statistics",), 0.03, 1.0)
    for wrong, message in (
        ({"kind": "cnn"}, "kind must be 'mlp' or 'temperature', got 'cnn'"),
        ({"reads": "pixels"}, "reads must be one or several of"),
        ({"beta0": 0.0}, r"beta0 must be positive, got 0\.0"),
    ):
        refused(message, HeadSpec, **wrong)
    refused("must have the same shape", CalibrationHead, 4, 3, PAPER, TEMPERATURE)


SPECS = (
    PAPER,
    HeadSpec(beta0=1.0, lr=0.03, seed=1),
    TEMPERATURE,
    HeadSpec(kind="temperature", beta0=1.1),
    replace(TEMPERATURE, beta0=1.5, seed=3),
    HeadSpec(kind="temperature", reads=("statistics", "features"), hidden=0),
)


def test_each_head_of_a_bank_trains_as_it_would_alone() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(32, 4), torch.randn(32, 10), torch.randint(4, (32,))) for _ in range(6)]
    none = torch.zeros(32, dtype=torch.int64)

    def trained(specs: tuple[HeadSpec, ...]) -> HeadBank:
        bank = HeadBank(10, 4, specs)
        training = HeadTraining(bank)
        for step, (main, features, labels) in enumerate(batches):
            training.add(step / 6, 3 * main, features, labels, none)
        training.catch_up()
        return bank

    together = trained(SPECS)
    main, features = torch.randn(8, 4), torch.randn(8, 10)
    answers = together.eval()(main, features)
    assert answers.shape == (6, 8, 4)
    for number, spec in enumerate(SPECS):
        alone = trained((spec,)).eval()
        torch.testing.assert_close(answers[number], alone(main, features)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.take(number)(main, features), answers[number])
    torch.testing.assert_close(together.take(4, 2)(main, features), answers[[4, 2]])
    assert together.take(2).specs == SPECS[2:3]


PLAIN = (*SPECS, HeadSpec(hidden=0, dropout=0.4), HeadSpec(dropout=0.5))
OF_LABELS = (PAPER, HeadSpec(reads=("features", "logits")), HeadSpec(hidden=0))
STEPS = [*product(PLAIN, (False, True), (None,)), *product(OF_LABELS, (False,), (3,))]


@pytest.mark.parametrize(("spec", "soft", "n_labels"), STEPS, ids=str)
def test_a_step_is_that_of_autograd_and_sgd(spec: HeadSpec, soft: bool, n_labels: int | None) -> None:
    """Of several labels each pair of a sample and a label is one of two classes, no and yes."""
    torch.manual_seed(0)
    n, k = (32, 4) if n_labels is None else (32 * n_labels, 2)
    main, features, labels = 3 * torch.randn(n, k), torch.randn(32, 10), torch.randint(k, (n,))
    known = torch.rand(n, k).softmax(1) if soft else labels
    bank = HeadBank(10, k, (spec, replace(spec, seed=5)), n_labels)
    with torch.no_grad():
        for parameter in bank.parameters():  # a temperature head starts at zeros
            parameter.add_(0.3 * torch.randn_like(parameter))
    training = HeadTraining(bank, clip=math.inf)
    bank.stacks[0].follow(main, features, YES)  # type: ignore[operator]
    twin = copy.deepcopy(bank)
    optimizer = torch.optim.SGD(twin.parameters(), spec.lr, 0.9, weight_decay=5e-5, nesterov=True)
    for _ in range(3):
        dropout = training.generator.get_state()
        training.add(0.25, main, features, known, torch.zeros(n).long())
        training.catch_up()
        twin.stacks[0].follow(main, features, YES)  # type: ignore[operator]
        torch.set_rng_state(dropout)
        scaled = anneal(float(spec.beta0), 0.25) * twin(main, features)
        losses = torch.stack([F.cross_entropy(one, known) for one in scaled])
        torch.testing.assert_close(training.losses, losses)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    torch.testing.assert_close([*bank.parameters()], [*twin.parameters()], rtol=1e-4, atol=1e-6)


def test_a_broken_head_does_not_stop_the_others() -> None:
    bank = HeadBank(10, 4, (PAPER, HeadSpec(seed=1)))
    with torch.no_grad():
        bank.stacks[0].last_bias[1] = math.nan
    training = HeadTraining(bank)
    before = copy.deepcopy(bank.state_dict())
    training.add(0.0, torch.randn(8, 4), torch.randn(8, 10), torch.randint(4, (8,)), torch.zeros(8).long())
    training.catch_up()
    after = bank.state_dict()
    key = "stacks.0.first_weight"
    assert not torch.equal(before[key][0], after[key][0])
    assert torch.equal(before[key][1], after[key][1])
    training.count_skipped(wait=True)
    assert training.skipped == 0
