"""Many heads on one network, trained as one."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import Alternation, Annealing, DoubleHead, HeadBank, HeadSpec, Readings, hold_back
from doublehead.calibrators import Temperature
from doublehead.data import fashion_subset
from doublehead.head_bank import FEW, MANY
from doublehead.predictions import Predictions
from doublehead.training.config import Config

SPECS = (
    HeadSpec(beta0=1.0, lr=1.0, kind="mlp"),
    HeadSpec(beta0=1.5, lr=0.3, kind="temperature"),
    HeadSpec(beta0=0.6, lr=0.5, kind="mlp", seed=3),
    HeadSpec(beta0=1.2, lr=0.1, kind="temperature", reads=("statistics", "features"), hidden=8),
    HeadSpec(beta0=1.1, lr=0.2, kind="temperature", reads="statistics", hidden=0),
)


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def data(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, (x[:, :3] + 0.7 * torch.randn(n, 3, generator=generator)).argmax(1))


def bank_on(network: nn.Module, specs: tuple[HeadSpec, ...] = SPECS) -> DoubleHead:
    return DoubleHead(network, head=lambda f, k: HeadBank(f, k, specs))


def test_each_head_trains_as_it_would_alone() -> None:
    model = bank_on(net())
    calib = DataLoader(data(48, 1), 16)
    together = Alternation(model, calib, every=1, lr=0.2)
    for i in range(9):
        together.step((i % 3) / 3)
    x = data(5, 2).tensors[0]
    model.eval()
    all_logits = model.head.all_heads(*model._tap.run(model.model, (x,), {})[::-1])
    for number, spec in enumerate(SPECS):
        alone = DoubleHead(net(), head=spec.make)
        steps = Alternation(alone, calib, every=1, lr=0.2 * spec.lr, annealing=Annealing(spec.beta0))
        for i in range(9):
            steps.step((i % 3) / 3)
        torch.testing.assert_close(all_logits[number], alone.eval()(x), rtol=1e-4, atol=1e-5)
        features, main = alone._tap.run(alone.model, (x,), {})[::-1]
        torch.testing.assert_close(model.head.head(number)(features, main), all_logits[number])


def trained_readings() -> tuple[DoubleHead, Readings]:
    model = bank_on(net())
    optimizer = torch.optim.SGD(model.main_parameters(), 0.1, 0.9)
    fit, held = hold_back(data(600, 1), share=0.5)
    alternation = Alternation(model, DataLoader(fit, 100, shuffle=True), every=1, lr=0.1)
    for epoch in range(20):
        for x, y in DataLoader(data(96, 3), 32):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            alternation.step(epoch / 20)
    return model, model.read(DataLoader(held, 64))


@torch.no_grad()
def nll_of(head: nn.Module, held: Readings) -> float:
    return float(F.cross_entropy(head.eval()(held.features, held.main), held.labels))


@torch.no_grad()
def at_best_scale(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Each sample's NLL after temperature scaling on this very data, and the temperature."""
    temperature = Temperature().fit(Predictions(logits, labels))
    nll = F.cross_entropy(temperature(logits), labels, reduction="none")
    return nll, float(temperature.temperature_)


class Fixed(nn.Module):
    """Stands in for a stack: heads whose logits are given numbers, whatever they read."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits  # (H, N, K)

    def forward(self, features: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
        return self.logits[:, features[:, 0].long()]


def bank_of(logits: torch.Tensor, kind: str = "temperature") -> HeadBank:
    """A bank whose heads give logits (H, N, K); features tell the sample's number."""
    bank = HeadBank(1, logits.shape[-1], [HeadSpec(seed=i, kind=kind) for i in range(len(logits))])
    bank.stacks = nn.ModuleList([Fixed(logits)])
    return bank.eval()


def known(n: int) -> tuple[torch.Tensor, Readings]:
    """Logits that the labels were drawn from, and readings whose main logits are these, spoiled by noise."""
    generator = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(n, 3, generator=generator)
    labels = torch.multinomial(true.softmax(1), 1, generator=generator)[:, 0]
    main = true + 2 * torch.randn(n, 3, generator=generator)
    return true, Readings(torch.arange(n)[:, None].float(), main, labels)


def test_selection_is_the_best_head_at_its_best_scale_and_is_given_that_scale() -> None:
    true, held = known(600)
    bank = bank_of(torch.stack([held.main.flip(0), 5 * true, held.main]))
    choice = bank.select(held)
    tried = [at_best_scale(one, held.labels) for one in bank.stacks[0].logits]
    assert choice.scores == pytest.approx([float(nll.mean()) for nll, _ in tried], abs=1e-5)
    assert choice.index == 1  # five times too sure, which costs it nothing
    by_temperature, _ = at_best_scale(held.main, held.labels)
    assert choice.temperature_score == pytest.approx(float(by_temperature.mean()), abs=1e-6)
    assert choice.temperature == pytest.approx(tried[1][1], rel=1e-4)
    torch.testing.assert_close(bank(*held[:2]), 5 * true / choice.temperature)
    by_brier = bank.select(held, score="brier")
    probs = (5 * true / tried[1][1]).softmax(1)
    want = ((probs - F.one_hot(held.labels, 3)) ** 2).sum(1).mean()
    assert by_brier.scores[1] == pytest.approx(float(want), abs=1e-6)


@pytest.mark.parametrize(("seed", "taken"), [(9, False), (44, True)])
def test_a_gain_within_its_standard_error_is_not_taken(seed: int, taken: bool) -> None:
    """Heads as noisy as the main logits: one is better by chance alone, the other by more than a standard error."""
    true, held = known(600)
    head = true + 2 * torch.randn(600, 3, generator=torch.Generator().manual_seed(seed))
    gain = at_best_scale(held.main, held.labels)[0] - at_best_scale(head, held.labels)[0]
    assert float(gain.mean()) > 0
    assert (float(gain.mean()) > float(gain.std()) / 600**0.5) == taken
    bank = bank_of(head[None])
    choice = bank.select(held)
    assert choice.scores[0] < choice.temperature_score
    assert choice.index == (0 if taken else None)
    torch.testing.assert_close(bank(*held[:2]), (head if taken else held.main) / choice.temperature)


def test_the_last_temperature_is_fitted_on_all_calibration_data_where_given() -> None:
    true, everything = known(900)
    held = Readings(*(part[:400] for part in everything))
    bank = bank_of(3 * true[None])
    choice = bank.select(held, everything)
    assert choice.index == 0
    assert choice.temperature == pytest.approx(at_best_scale(3 * true, everything.labels)[1], rel=1e-4)
    assert choice.temperature != pytest.approx(at_best_scale(3 * true[:400], held.labels)[1], rel=1e-4)


def test_an_mlp_has_its_last_temperature_from_data_that_it_was_not_trained_on() -> None:
    true, everything = known(900)
    held = Readings(*(part[:400] for part in everything))
    choice = bank_of(3 * true[None], "mlp").select(held, everything)
    assert choice.index == 0
    assert choice.temperature == pytest.approx(at_best_scale(3 * true[:400], held.labels)[1], rel=1e-4)


def test_an_mlp_that_is_right_less_often_than_the_network_is_not_chosen() -> None:
    """The network is right 200 times of 300 and always as sure; the heads are surer when right, 199 or 200 times."""
    labels = torch.arange(300) % 3
    held = Readings(torch.arange(300)[:, None].float(), guesses(labels, 200, 1.0), labels)
    worse, better = guesses(labels, 199, 0.1), guesses(labels, 200, 0.1)
    assert bank_of(worse[None], "temperature").select(held).index == 0  # that kind is not asked
    assert bank_of(worse[None], "mlp").select(held).index is None
    assert bank_of(torch.stack([worse, better]), "mlp").select(held).index == 1


def test_an_mlp_needs_many_held_back_samples_to_be_chosen() -> None:
    true, held = known(MANY)
    assert bank_of(true[None], "mlp").select(held).index == 0
    few = Readings(*(part[: MANY - 1] for part in held))
    assert bank_of(true[None], "mlp").select(few).index is None
    assert bank_of(true[None], "temperature").select(few).index == 0


def guesses(labels: torch.Tensor, n_right: int, when_wrong: float) -> torch.Tensor:
    """Logits that are right for the first `n_right` labels, and wrong for the rest with less of a margin."""
    right, wrong = F.one_hot(labels, 3).float(), F.one_hot((labels + 1) % 3, 3).float()
    return torch.where(torch.arange(len(labels))[:, None] < n_right, right, when_wrong * wrong)


def test_the_chosen_head_alone_has_the_last_temperature_too() -> None:
    model, held = trained_readings()
    model.head._choose(2)
    model.head._fit_last(held, 2)
    assert float(model.head.after.scale) != 1
    torch.testing.assert_close(model.head.head(2).eval()(*held[:2]), model.eval().head(*held[:2]))
    assert float(model.head.head(1).after.scale) == 1


def test_a_score_that_is_not_known_is_refused() -> None:
    model, held = trained_readings()
    with pytest.raises(ValueError, match="score must be one of .* got 'ece'"):
        model.head.select(held, score="ece")


def test_too_few_held_back_samples_to_choose_by_are_said() -> None:
    """The choice is made all the same; at the threshold itself nothing is said."""
    model = bank_on(net(), SPECS[:2])
    held = model.read(DataLoader(data(50, 5), 50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enough = model.head.select(held)
    few = Readings(*(part[:49] for part in held))
    with pytest.warns(UserWarning) as caught:
        choice = model.head.select(few)
    assert str(caught[0].message) == (
        "held_out should hold at least 50 samples to choose among 2 heads and a temperature, got 49: "
        "the choice may be chance, and its temperature is far from certain"
    )
    assert len(caught) == 1
    assert caught[0].filename == __file__  # whoever called is named
    assert choice.scores != enough.scores


def test_the_demo_holds_back_enough_to_choose_by() -> None:
    n_calib = len(fashion_subset().calib.labels)
    assert round(Config().hold_back * n_calib) >= FEW


def test_temperature_wins_over_useless_heads() -> None:
    network = net()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9)
    for _ in range(30):
        x, y = data(200, 3).tensors
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = bank_on(network, (HeadSpec(kind="mlp"),))  # a head that was never trained
    held = model.read(DataLoader(data(200, 5), 50))
    choice = model.head.select(held)
    assert choice.index is None
    assert choice.spec is None
    calib = model.eval()(data(10, 6).tensors[0])
    main = model.heads(data(10, 6).tensors[0]).main
    torch.testing.assert_close(calib, main / choice.temperature)


def test_ensemble_is_the_mean_of_probabilities() -> None:
    model, held = trained_readings()
    model.eval()
    each = torch.stack([model.head.head(i).eval()(*held[:2]).softmax(1) for i in range(len(SPECS))])
    torch.testing.assert_close(model.head.ensemble()(*held[:2]).exp(), each.mean(0))


def test_choice_travels_with_the_state() -> None:
    model, held = trained_readings()
    model.head.select(held)
    other = bank_on(net())
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval().head(*held[:2]), model.eval().head(*held[:2]))
    assert int(other.head.chosen) == int(model.head.chosen) != HeadBank.ENSEMBLE


def test_a_broken_head_neither_stops_the_others_nor_is_chosen() -> None:
    specs = (HeadSpec(kind="mlp", lr=1e9), HeadSpec(kind="mlp", lr=0.1), HeadSpec(kind="temperature", lr=0.1))
    model = bank_on(net(), specs)
    alternation = Alternation(model, DataLoader(data(64, 1), 32), every=1, lr=1.0)
    for _ in range(12):
        losses = alternation.step(0.5)
    assert losses is not None
    assert not torch.isfinite(losses[0])
    assert torch.isfinite(losses[1:]).all()
    assert all(torch.isfinite(model.head.head(i).last.weight).all() for i in (1, 2))
    assert model.head.select(model.read(DataLoader(data(64, 2), 32))).index != 0


def test_auto_bank_and_resume() -> None:
    def fresh() -> tuple[DoubleHead, Alternation]:
        model = DoubleHead(net(), head=HeadBank.auto)
        return model, Alternation(model, DataLoader(data(64, 1), 16, shuffle=True), every=1, lr=0.1)

    model, alternation = fresh()
    for i in range(7):
        if i == 3:
            saved = copy.deepcopy((model.state_dict(), alternation.state_dict()))
        alternation.step(i / 7)
    again, resumed = fresh()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for i in range(3, 7):
        resumed.step(i / 7)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), name


def test_hold_back_is_disjoint_and_refuses_empty_parts() -> None:
    fit, held = hold_back(data(50, 0), share=0.2, seed=1)
    assert sorted([*fit.indices, *held.indices]) == list(range(50))
    assert len(held) == 10
    with pytest.raises(ValueError, match="share must leave both parts some of the 3 samples, got 0.1"):
        hold_back(data(3, 0), share=0.1)
    with pytest.raises(ValueError, match="specs must hold at least one HeadSpec"):
        HeadBank(4, 3, [])
