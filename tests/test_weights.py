"""Sample weights and soft labels: a weight of 2 is a sample twice, a soft label its classes by their share."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import doublehead as dh
from commands import call
from doublehead import Predictions, metrics
from doublehead.bins import Bins
from doublehead.calibrators import CALIBRATORS, make
from doublehead.curves import class_gaps, reliability
from doublehead.outcomes import Outcomes
from doublehead.stream import Tally
from doublehead.summary import Summary
from samples import overconfident, refused


def sample(n: int = 400, k: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Overconfident logits, labels, and whole weights 0 to 3."""
    p, generator = overconfident(n, k, 2.5, spread=2.0, seed=seed), torch.Generator().manual_seed(seed)
    return p.logits, p.labels, torch.randint(4, (n,), generator=generator).double()


def twice(n: int = 400) -> tuple[Predictions, Predictions]:
    """Weighted predictions, and the same with each row as often as its weight says."""
    logits, labels, weights = sample(n)
    rows = torch.arange(n).repeat_interleave(weights.long())
    return Predictions(logits, labels, weights), Predictions(logits[rows], labels[rows])


SCALARS = "accuracy nll brier mean_entropy mean_confidence overconfidence ece mce ece2".split()  # noqa: SIM905


def test_a_weight_is_a_number_of_times() -> None:
    weighted, repeated = twice()
    for name in SCALARS:
        metric = getattr(metrics, name)
        assert metric(weighted) == pytest.approx(metric(repeated), rel=1e-6), name
    for components in ("classwise", "all"):
        one, other = (metrics.ece(p, components=components) for p in (weighted, repeated))
        assert one == pytest.approx(other, rel=1e-6)


def test_bins_of_weights_add_up_exactly_and_with_whole_ones() -> None:
    p, _ = twice()
    assert Bins.top(p[:100]) + Bins.top(p[100:]) == Bins.top(p)
    assert Bins.classwise(p[:100]) + Bins.classwise(p[100:]) == Bins.classwise(p)
    plain = Predictions(p.logits, p.labels)
    ones = Predictions(p.logits, p.labels, torch.ones(len(p)))
    assert Bins.top(ones) == Bins.top(plain).weighted()
    assert Bins.zeros(15) + Bins.top(p) == Bins.top(p)
    mixed = Bins.classwise(plain).add_classwise_(p)  # samples without weights, then samples with weights
    assert mixed == Bins.classwise(plain).weighted() + Bins.classwise(p)
    assert float(Bins.top(p).n) == pytest.approx(float(p.weights.sum()))
    parts = Tally.of(p[:150]) + Tally.of(p[150:])
    assert parts.summary().to_dict() == Tally.of(p).summary().to_dict()


@pytest.mark.parametrize("factor", [1e-9, 1e-5, 0.3, 1e3, 1e6])
def test_only_the_ratios_of_weights_matter(factor: float) -> None:
    logits, labels, weights = sample()
    p, scaled = (Predictions(logits, labels, weights * times) for times in (1, factor))
    wanted, found = Summary.of(p), Summary.of(scaled)
    for name, interval in wanted.metrics.items():
        assert found.metrics[name] == pytest.approx(tuple(interval), rel=1e-5, abs=1e-6, nan_ok=True), name
    assert found.floor == pytest.approx(tuple(wanted.floor), rel=1e-5)
    assert found.p_value == pytest.approx(wanted.p_value, abs=2e-3)
    for name in SCALARS:
        assert getattr(metrics, name)(scaled) == pytest.approx(getattr(metrics, name)(p), rel=1e-5), name


def test_large_weights_of_a_stream_add_up_and_tiny_ones_are_refused() -> None:
    logits, labels, weights = sample()
    large = Predictions(logits, labels, weights * 1e6)
    parts = Tally.of(large[:150]) + Tally.of(large[150:])
    assert parts.summary().to_dict() == Tally.of(large).summary().to_dict() == Summary.of(large).to_dict()
    total = Bins.top(large)
    with pytest.raises(ValueError, match="weights must have a sum below"):
        for _ in range(8):
            total = total + total
    with pytest.raises(ValueError, match="weights must have a mean of at least 0.0001, got 1.5e-06"):
        Tally.of(Predictions(logits, labels, weights / weights.mean() * 1.5e-6)).summary()


def test_ece_of_all_components_with_weights_and_many_classes() -> None:
    """The pooled counts, a weight for each of 40,000 classes, do not fit into an int64."""
    k, rows = 40_000, 60
    logits = torch.randn(rows, k, generator=torch.Generator().manual_seed(0)) * 4
    labels = torch.arange(rows)
    plain, weighted = Predictions(logits, labels), Predictions(logits, labels, torch.full((rows,), 1000.0))
    wanted = metrics.ece(plain, components="all")
    assert wanted > 0.1
    assert metrics.ece(weighted, components="all") == pytest.approx(wanted, rel=1e-6)
    assert Summary.of(weighted).values["ece_all"] == pytest.approx(wanted, rel=1e-6)


def test_samples_of_weight_0_make_no_group_and_no_point_of_a_curve() -> None:
    logits, labels, _ = sample()
    rows = torch.arange(len(labels))
    p = Predictions(logits, labels, (rows < 300).double())
    assert list(Summary.of(p, by=np.where(rows < 300, "a", "b")).groups) == ["a"]
    curve = metrics.risk_coverage(Outcomes.of(p))  # type: ignore[arg-type]
    known = metrics.risk_coverage(Predictions(logits[:300], labels[:300]))
    torch.testing.assert_close(curve, known)


def test_weights_of_one_change_nothing_in_a_summary() -> None:
    logits, labels, _ = sample()
    weights = None, torch.ones(len(labels))
    plain, ones = (Summary.of(Predictions(logits, labels, w)).to_dict() for w in weights)
    for name, value in ones["metrics"].items():
        assert value == pytest.approx(plain["metrics"][name])
    assert ones["ece_floor"] == pytest.approx(plain["ece_floor"])
    assert ones["n"] == plain["n"]
    assert "smooth_ece" not in ones["metrics"]  # needs all samples, equally weighted


def test_bands_of_uneven_weights_hold_the_accuracies_of_calibrated_models() -> None:
    outside, bins = np.zeros(2), np.zeros(2)
    for seed in range(25):
        p = overconfident(600, 3, 1.0, spread=3.0, seed=seed)
        weights = np.random.default_rng(seed).lognormal(0, 1.5, 600)  # an effective number of about 80
        weighted = Predictions(p.logits, p.labels, weights)
        curve, gaps = reliability(weighted), class_gaps(weighted)
        beyond = (gaps.accuracy < gaps.band_low) | (gaps.accuracy > gaps.band_high)
        full = curve.counts > 0
        outside += curve.outside[full].sum(), beyond.sum()
        bins += full.sum(), len(beyond)
    assert (
        outside / bins < 0.2
    ).all()  # 0.1 but for chance and the normal form; 0.35 with the number of samples


def test_drift_of_uneven_weights() -> None:
    pytest.importorskip("jinja2")
    from doublehead.report_page.record import Record, measure
    from doublehead.report_page.tables import drift

    confidence = torch.cat([torch.linspace(0.7, 0.9, 10), torch.linspace(0.55, 0.95, 390)]).repeat(2)
    heavy, when = (torch.arange(800) % 400 < 10), torch.arange(800) // 400
    right = torch.arange(800) % 2 == 0
    right[:10], right[400:410] = (
        torch.arange(10) < 9,
        torch.arange(10) < 7,
    )  # so that ten answers decide nearly alone
    probs = torch.stack([confidence, 1 - confidence], 1)
    p = Predictions.from_probs(probs, (~right).long(), torch.where(heavy, 1000.0, 0.1))
    method = measure(0, "a", Record.of(p, times=when.double().numpy()))
    assert method.periods is not None
    assert "does not change" in drift(method.periods)  # 9 of 10 against 7 of 10


def test_uneven_weights_widen_intervals_and_raise_the_floor() -> None:
    logits, labels, _ = sample(2000)
    weights = torch.where(torch.arange(2000) % 10 == 0, 10.0, 0.1)  # a tenth decides nearly alone
    plain, heavy = (Summary.of(Predictions(logits, labels, w)) for w in (None, weights))
    for name in ("accuracy", "ece", "nll"):
        ratio = [s.metrics[name].high - s.metrics[name].low for s in (heavy, plain)]
        assert ratio[0] > 2 * ratio[1]
    assert heavy.floor.mean > 2 * plain.floor.mean


@pytest.mark.parametrize("method", ["temperature", "head", "temperature_grid"])
def test_calibrators_take_weights(method: str) -> None:
    weighted, repeated = twice(2000)
    one, other = (make(method).fit(p) for p in (weighted, repeated))
    if method != "head":  # whose folds differ
        assert float(one.temperature_) == pytest.approx(float(other.temperature_), rel=1e-4)
    test = Predictions(*sample(2000, seed=1)[:2])
    nlls = [metrics.nll(calibrator.calibrate(test)) for calibrator in (one, other)]
    assert nlls[0] == pytest.approx(nlls[1], abs=0.01)
    assert nlls[0] < metrics.nll(test) - 0.1


def soft() -> tuple[Predictions, Predictions]:
    """Soft labels of 3 classes, and each row once per class with the probability as weight."""
    logits, _, _ = sample(300, 3)
    q = (logits / 4 + torch.randn(300, 3, generator=torch.Generator().manual_seed(2))).softmax(1)
    rows = torch.arange(300).repeat_interleave(3)
    return Predictions(logits, q), Predictions(logits[rows], torch.arange(3).repeat(300), q.flatten())


def test_a_soft_label_is_its_classes_by_their_share(tmp_path: Path) -> None:
    p, spread = soft()
    for name in SCALARS:
        metric = getattr(metrics, name)
        assert metric(p) == pytest.approx(metric(spread), rel=1e-5), name
    one, other = (dh.calibrate(q, method="temperature") for q in (p, spread))
    torch.testing.assert_close(one.temperature_, other.temperature_, rtol=1e-4, atol=0)
    assert metrics.nll(dh.calibrate(p).calibrate(p)) < metrics.nll(p)
    assert 0 < dh.evaluate(p).values["ece"] < 1
    assert metrics.nll(Predictions.load(p.save(tmp_path / "soft.npz"))) == metrics.nll(p)
    again = Predictions.load(spread.save(tmp_path / "weighted.npz"))
    assert torch.equal(again.weights, spread.weights)


@pytest.mark.parametrize("p", [twice()[0], soft()[0]], ids=["weights", "soft labels"])
def test_other_calibrators_and_metrics_refuse(p: Predictions) -> None:
    for method in set(CALIBRATORS) - {"none", "temperature", "temperature_grid", "head", "per_label"}:
        with pytest.raises((TypeError, ValueError), match="neither sample weights nor soft labels|2 classes"):
            make(method).fit(p)
    for name in ("adaptive_ece", "debiased_ece", "smooth_ece", "ks_error", "mmce", "aurc"):
        refused("class labels and no weights here, got", getattr(metrics, name), p, error=TypeError)
        if not p.are_soft and name != "mmce":
            with pytest.raises(TypeError, match="no weights here, got sample weights"):
                getattr(metrics, name)(Outcomes.of(p))


def test_bad_weights_and_soft_labels_are_named() -> None:
    logits = [[1.0, 0.0], [0.0, 1.0]]
    for labels, weights, message in (
        ([0, 1], [1.0], r"weights must have shape \(2,\).* got \(1,\)"),
        ([0, 1], [1.0, -1.0], "weights must be >= 0"),
        ([0, 1], [0.0, 0.0], "weights must be >= 0 with a sum"),
        ([[0.5, 0.6], [1.0, 0.0]], None, "soft labels must be >= 0 and sum to 1.* row 0"),
        ([[0.5, 0.5], [1.5, -0.5]], None, "soft labels must be >= 0 and sum to 1.* row 1"),
    ):
        refused(message, Predictions, logits, labels, weights)


@pytest.mark.usefixtures("few_fits")
@pytest.mark.parametrize("companion", [False, True])
def test_networks_take_weights_and_soft_labels(companion: bool) -> None:
    """Samples of weight 0 have wrong labels; with weights the calibration does not see them."""
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    net = nn.Linear(4, 3)
    net.weight.data *= 8
    y = (net(x).detach() / 2).softmax(1).multinomial(1)[:, 0]
    wrong = torch.arange(600) % 3 == 0
    broken = torch.where(wrong, (y + 1) % 3, y)
    weights = (~wrong).float()

    def after(*data: Tensor) -> float:
        if companion:
            double = dh.DoubleHead(net, data, every=1)
            for _ in range(40):
                double.step()
            model = double.finish()
        else:
            model = dh.calibrate(net, data)
        return metrics.nll(Predictions(model(x[~wrong]).detach(), y[~wrong]))

    assert after(x, broken, weights) < after(x, broken) - 0.01
    one_hot = torch.nn.functional.one_hot(y, 3)
    assert after(x, one_hot) == pytest.approx(after(x, y), abs=0.02)


def written(path: Path, p: Predictions, weights: Tensor) -> Path:
    rows = (",".join(map(str, row)) for row in zip(p.labels.tolist(), *p.logits.T.tolist(), weights.tolist()))
    path.write_text("\n".join(["label,logit_0,logit_1,logit_2,logit_3,size", *rows]) + "\n")
    return path


@pytest.fixture
def weighted_and_repeated(tmp_path: Path) -> tuple[Path, Path]:
    """A file of weighted samples, and one in which each is repeated as often as its weight says."""
    pytest.importorskip("pyarrow")
    weighted, repeated = twice(300)
    long = written(tmp_path / "long.csv", repeated, torch.ones(len(repeated)))
    return written(tmp_path / "a.csv", weighted, weighted.weights), long


def test_files_take_weights(weighted_and_repeated: tuple[Path, Path], tmp_path: Path) -> None:
    file, long = weighted_and_repeated
    found, wanted = (dh.evaluate(logits=str(path), weights="size").values for path in (file, long))
    for name in SCALARS:
        assert found[name] == pytest.approx(wanted[name], rel=1e-6)
    negative = tmp_path / "negative.csv"
    negative.write_text("label,logit_0,logit_1,size\n0,1.5,2.5,-1\n")
    refused("'size', row 1 must hold a weight >= 0, got -1", dh.evaluate, logits=negative, weights="size")


def test_calibrate_measures_with_weights(weighted_and_repeated: tuple[Path, Path], tmp_path: Path) -> None:
    file, long = weighted_and_repeated
    found = []
    for path, options in ((file, ["--weights", "size"]), (long, [])):
        command = f"calibrate --fit {path} --apply {path} --logits -o {tmp_path / 'b.csv'} --force".split()
        found.append(json.loads(call(*command, "--json", "--method", "temperature", *options).stdout))
    one, other = found
    for when in ("before", "after"):
        values = [each[when]["metrics"]["nll"]["value"] for each in found]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    difference = one["nll_difference"]["value"]
    assert difference == pytest.approx(other["nll_difference"]["value"], rel=1e-4)
    before, after = (one[when]["metrics"]["nll"]["value"] for when in ("before", "after"))
    assert difference == pytest.approx(after - before)
    assert one["nll_difference"]["low"] < difference < one["nll_difference"]["high"]
    said = call(*command, "--weights", "size", "--method", "isotonic", code=2).output
    assert "sample weights" in said


def test_a_report_takes_weights(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    weighted, repeated = twice(300)
    pages = []
    for name, p, sizes in (("a", weighted, weighted.weights), ("b", repeated, torch.ones(len(repeated)))):
        both = p, p.with_logits(p.logits / 2)
        written_files = [written(tmp_path / f"{name}{i}.csv", one, sizes) for i, one in enumerate(both)]
        files = {str(i): f"logits:{file}" for i, file in enumerate(written_files)}
        page = dh.report(files, tmp_path / "page.html", weights="size").read_text()
        pages.append(json.loads(page.split('id="data">')[1].split("</script>")[0]))
    one, other = pages
    for mine, theirs in zip(one["methods"], other["methods"]):
        assert mine["accepted"] == pytest.approx(theirs["accepted"])
        assert mine["wrong"] == pytest.approx(theirs["wrong"])
        assert mine["values"] == pytest.approx(theirs["values"], rel=1e-5)
    assert one["pairs"][0][1]["nll"][0] == pytest.approx(other["pairs"][0][1]["nll"][0], rel=1e-5)


def test_the_report_of_a_model_takes_weights() -> None:
    logits, labels, weights = sample()
    network = nn.Linear(4, 4, bias=False)
    nn.init.eye_(network.weight)
    model = dh.calibrate(network, (logits, labels), method="temperature")
    found = model.report((logits, labels, weights))["network"].values["nll"]
    assert found == pytest.approx(metrics.nll(Predictions(logits, labels, weights)), rel=1e-5)
