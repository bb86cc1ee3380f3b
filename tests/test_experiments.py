"""Committed results: what is stored, what is made from it, and that both agree."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("safetensors")
ROOT = Path(__file__).resolve().parents[1]

import post_hoc  # noqa: E402
import results  # noqa: E402
import rivals  # noqa: E402
import run as run_script  # noqa: E402
import tables  # noqa: E402
from results import LEVELS, Scores, Split, Splits, StoredRun, stored_runs  # noqa: E402

from doublehead import PAPER, Predictions, metrics  # noqa: E402
from doublehead.training.config import Config  # noqa: E402
from doublehead.training.loop import train  # noqa: E402
from doublehead.training.run_folder import RunFolder  # noqa: E402

RUNS, TABLE = stored_runs(), pd.read_csv(results.TABLE)
TABLES = tables.TABLES | rivals.TABLES


# --- storage


@pytest.mark.parametrize("levels", LEVELS.values())
def test_quantised_logits_keep_the_prediction_and_small_distances(levels: int) -> None:
    logits = 3 * torch.randn(500, 10)
    logits[0, :2] = logits[0].max() + 1  # a tie at the top: the first class is predicted
    back = results.dequantise(results.quantise(logits, levels), levels)
    assert torch.equal(back.argmax(1), logits.argmax(1))
    below = logits.amax(1, keepdim=True) - logits
    bound = ((1 + below) / (2 * levels - 1)).clamp(min=1.1 / levels)
    assert ((back + below).abs() <= bound).all()


@pytest.mark.parametrize("sizes", [(300, 200), (5, 3)])
def test_guessed_steps_are_decoded_exactly(sizes: tuple[int, int]) -> None:
    """With related and unrelated steps, of all sizes, and with fewer samples than classes."""
    draw = torch.Generator().manual_seed(0)
    main = [torch.randint(256, (n, 12), generator=draw, dtype=torch.uint8).numpy() for n in sizes]
    other = [np.clip(part.astype(int)[:, ::-1] + 3, 0, 255).astype(np.uint8) for part in main]
    none = [part[:, :0] for part in main]
    for known, parts in ((none, main), (none, other), (main, other), (other, main)):
        left, weights = results.encode(parts, known)
        for i, part in enumerate(parts):
            assert np.array_equal(results.decode(left[i], weights, known[i]), part)
    small = left[0].astype(np.int8)  # what is left of related steps is near 0
    assert np.abs(small).mean() < 5


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    def split(n: int) -> Split:
        parts = [torch.randn(n, 4) for _ in range(5)]
        return Split(torch.randint(4, (n,)), *parts, numbers=torch.randn(n, 5))

    calib, test = split(30), split(40)
    scores = Scores.of(Predictions(torch.randn(40, 4), test.labels))
    certificate = {"config": {"data": "x"}, "sizes": [9, 30, 40]}
    results.store(StoredRun("one", tmp_path), Splits(calib, test), {"a@b-1.2": scores}, certificate)
    (run,) = stored_runs(tmp_path)
    for stored, given in ((run.calib, calib), (run.test, test)):
        assert torch.equal(stored.labels, given.labels)
        for name, levels in LEVELS.items():
            value, wanted = (getattr(part, name) for part in (stored, given))
            steps = results.quantise(wanted, levels)
            top = wanted.amax(1, keepdim=True).half() if name == "main" else 0
            assert torch.equal(value, results.dequantise(steps, levels) + top)
        reach = calib.numbers.std(0) * 0.501 / results.PER_DEVIATION
        assert ((stored.numbers - given.numbers).abs() <= reach).all()
    for stored, given in zip(run.heads["a@b-1.2"], scores):
        torch.testing.assert_close(stored, given, atol=1e-4, rtol=2e-3)
    assert run.certificate == certificate
    first = run.file.read_bytes()
    results.store(run, Splits(calib, test), {"a@b-1.2": scores}, certificate)
    assert run.file.read_bytes() == first


def test_class_distances_of_calibration_samples_ignore_their_own_label() -> None:
    """A label that is wrong must not pull its sample's distances: means come from other folds."""
    labels = torch.arange(300) % 3
    features = torch.nn.functional.one_hot(labels, 8).float() * 4 + torch.randn(300, 8)
    changed = labels.clone()
    changed[7] = (labels[7] + 1) % 3
    one, other = (run_script.distances(features, y, features[:5], 3)[0] for y in (labels, changed))
    for before, after in zip(one, other):
        assert torch.equal(before[7], after[7])
        assert not torch.equal(before, after)


# --- numbers


def test_numbers_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    logits = (torch.tensor([[z, 0.0]] * 4) for z in (2.0, 1.0, 0.0))
    none, scaled, best = (Scores.of(Predictions(z, labels)) for z in logits)
    found = best.numbers(none, scaled)
    assert found["nll"] == pytest.approx(np.log(2))
    assert (found["accuracy"], found["brier"], found["n"]) == (0.5, 0.5, 4)
    assert found["ece"] == pytest.approx(0.0)
    raw = (np.log(1 + np.exp(-2)) + np.log(1 + np.exp(2))) / 2
    assert found["phi"] == pytest.approx(1 - np.log(2) / raw)
    differences = np.log(2) - np.log(1 + np.exp(np.array([-1, -1, 1, 1])))
    assert found["delta"] == pytest.approx(differences.mean())
    reach = 1.959964 * differences.std(ddof=1) / 2
    assert found["delta_high"] - found["delta"] == pytest.approx(reach)


def test_scores_agree_with_the_metrics() -> None:
    p = Predictions(2 * torch.randn(400, 5), torch.randint(5, (400,)))
    found = Scores.of(p).numbers(Scores.of(p), Scores.of(p))
    for name in ("accuracy", "nll", "brier", "ece"):
        assert found[name] == pytest.approx(float(getattr(metrics, name)(p)), abs=1e-6), name


def test_the_mirror_view_is_averaged_and_compared() -> None:
    one, other = torch.randn(20, 4), torch.randn(20, 4)
    logits, evidence = post_hoc.evidence_of(Split(torch.zeros(20), one, flip=other), ("flip",))
    torch.testing.assert_close(logits, (one.log_softmax(1) + other.log_softmax(1)) / 2)
    agree = torch.stack([view.argmax(1) == logits.argmax(1) for view in (one, other)]).float().mean(0)
    torch.testing.assert_close(evidence["numbers"][:, 1], agree)


def test_an_ensemble_is_of_equal_runs_and_equal_samples() -> None:
    for name, members in post_hoc.ensembles(RUNS):
        assert len(members) >= 3
        assert name.endswith(f"-ensemble{len(members)}")
        assert len({run.config.seed for run in members}) == len(members)
    splits = (Split(torch.tensor([0, 1, y]), torch.randn(3, 2)) for y in (0, 1))
    one, two = (Splits(split, split) for split in splits)
    with pytest.raises(ValueError, match="the same samples in the same order"):
        post_hoc.ensemble_numbers("x", [one, two])


# --- what is committed


def heads_of(run: StoredRun) -> set[str]:
    """The names of `run.heads`, without unpacking their scores."""
    with np.load(run.file) as arrays:
        return {key.split("/")[1] for key in arrays if key.endswith("/correct")}


def test_every_run_has_arrays_and_a_certificate() -> None:
    logits = {file.stem: file.stat().st_size for file in (results.HERE / "logits").glob("*.npz")}
    assert set(logits) == {run.name for run in RUNS}
    assert sum(logits.values()) <= 25e6
    for run in RUNS:
        assert run.name == run.config.name
        assert {"commit", "torch", "device", "time"} <= set(run.certificate["environment"])
        with np.load(run.file) as arrays:
            sizes = [len(arrays[f"{part}/labels"]) for part in ("calib", "test")]
        assert run.certificate["sizes"][1:] == sizes
        heads = run.config.heads
        assert {name for name in heads if "@" not in name} <= heads_of(run)
        if "annealing-double-head" in heads:
            assert heads["annealing-double-head"] == PAPER


def test_the_table_is_what_the_arrays_give() -> None:
    """The cheap rows of the smallest run; `make results` computes all of them."""
    run = min(RUNS, key=lambda run: run.file.stat().st_size)
    own = TABLE[TABLE.run == run.name].pivot(index="output", columns="metric", values="value")
    scores = post_hoc.all_scores(run, ["none", "temperature", "vector", "head+opinion"])
    for name, one in scores.items():
        found = one.numbers(scores["none"], scores["temperature"])
        close = 1e-2 if "head+" in name else 1e-4  # stages are chosen, which may turn on the last bit
        for metric in ("accuracy", "nll", "brier"):
            assert own.loc[name, metric] == pytest.approx(found[metric], rel=close), (name, metric)
        assert own.loc[name, "ece"] == pytest.approx(found["ece"], abs=2e-3 if "head+" in name else 1e-4)


def test_the_table_has_every_run_and_method() -> None:
    assert not TABLE.duplicated(["run", "output", "metric"]).any()
    for run in RUNS:
        outputs = set(TABLE.output[TABLE.run == run.name])
        assert {"none", "temperature", "head", *heads_of(run)} <= outputs
    assert set(TABLE.run) == {run.name for run in RUNS} | {name for name, _ in post_hoc.ensembles(RUNS)}


@pytest.mark.parametrize("name", TABLES)
def test_pages_show_the_committed_numbers(name: str) -> None:
    file, made = TABLES[name]
    page = (ROOT / file).read_text()
    assert f"<!-- results: {name} -->" in page
    assert tables.fill(page, name, made(TABLE, RUNS)) == page


# --- tables


def test_summary_of_small_calibration_sets_by_hand() -> None:
    rows = [
        ("a", 10, 50, 0, 0.50, 0.40, 0.401, "temperature"),  # level with temperature scaling
        ("a", 10, 50, 1, 0.50, 0.60, 0.503, "temperature + head"),  # 0.003 above the raw network
    ]
    (found,) = rivals.summary(pd.DataFrame(rows, columns=rivals.DRAW)).to_dict("records")
    assert (found["draws"], found["worse"], found["temperature_worse"], found["opened"]) == (2, 0.5, 0.5, 0.5)
    assert found["worst"] == pytest.approx(0.003)
    assert found["temperature_worst"] == pytest.approx(0.1)
    assert found["gain"] == pytest.approx(1 - 0.904 / 1.0)


def test_means_are_over_the_seeds_of_a_row() -> None:
    nlls = {"d-m-l-e1-s0": 1.0, "d-m-l-e1-s1": 3.0, "d-m-l-e1-ensemble3": 9.0, "d-m-l-e2-s0": 7.0}
    rows = [(run, "none", metric, nll) for run, nll in nlls.items() for metric in ("nll", "delta")]
    table = pd.DataFrame(rows, columns=results.COLUMNS)
    found = tables.means(table).loc["d-m-l-e1", "none"]
    assert (found.nll, found.runs) == (2.0, 2)
    assert found.delta_sd == pytest.approx(2**0.5)
    assert tables.means(table).nll["d-m-l-e1-ensemble3", "none"] == 9.0


# --- training


def test_a_run_is_trained_with_the_settings_of_its_certificate() -> None:
    for run in RUNS:
        like = run_script.config_like(run.name, {})
        assert replace(like, predict_train=run.config.predict_train) == run.config
    full = run_script.config_like("cifar10-resnet50-cross_entropy-e80-s0", {})
    assert {"mlp-0.6", "mlp-1.5", "annealing-double-head-k70"} <= set(full.heads)
    change = {"model": "densenet121", "epochs": 40, "seed": 1}
    other = run_script.config_like("cifar100-resnet50-focal-e80-s0", change)
    assert other.name == "cifar100-densenet121-focal-e40-s1"
    assert other.predict_train
    with pytest.raises(ValueError, match="not known here: \\['layers'\\]"):
        run_script.config_like(full.name, {"layers": 3})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    config = Config(
        data="fashion", model="small_cnn", epochs=1, batch_size=64, augment="none", every=2, auto=True,
        heads={"double-head": replace(PAPER, beta0=1.0), "annealing-double-head": PAPER},
        n_train=512, n_calib=210, n_test=120, record_gradients=True,
    )  # fmt: skip
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "run")
    train(config, folder, accelerator="cpu")
    return folder


def test_a_run_is_kept_whole(finished: RunFolder, tmp_path: Path) -> None:
    run_script.keep(finished, None, "cpu", tmp_path)
    (run,) = stored_runs(tmp_path)
    assert run.config == finished.config
    for name, split in (("calib", run.calib), ("test", run.test)):
        saved = Predictions.load(finished.path / f"predictions/{name}-main.npz")
        assert torch.equal(split.labels, saved.labels)
        torch.testing.assert_close(split.main, saved.logits, atol=0.2, rtol=0.05)
        assert all(part is not None for part in split)
    saved = Predictions.load(finished.path / "predictions/test-annealing-double-head.npz")
    nll = run.heads["annealing-double-head"].nll
    torch.testing.assert_close(nll, Scores.of(saved).nll, atol=2e-3, rtol=2e-3)
    outputs = post_hoc.all_scores(run, ["none", "temperature", "head", "head+opinion", "head+mirror"])
    assert len(outputs) == 5 + 2
    assert {"epochs", "entropy", "gradients"} <= set(run.certificate)


# --- the paper's tables as experiments have them, against its LaTeX

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "SVHN": "svhn", "ImageNet": "imagenet",
        "SST Fine Grained": "sst-fine", "SST Binary": "sst-binary", "20 Newsgroups": "20newsgroups"}  # fmt: skip
MODELS = {"ResNet 50": "resnet50", "ResNet 101": "resnet101", "ResNet 152": "resnet152",
          "DenseNet 121": "densenet121", "Wide ResNet 28-10": "wide_resnet28_10", "TreeLSTM": "tree_lstm",
          "GP CNN": "gp_cnn"}  # fmt: skip


def printed(source: str, label: str) -> dict[tuple[str, str], list[float]]:
    """All numbers of each line of a table in the paper's LaTeX, read without knowing what they mean."""
    start = source.rindex(r"\begin{tabular}", 0, source.index(rf"\label{{tab: {label}}}"))
    found, data = {}, ""
    for line in source[start : source.index(r"\end{tabular}", start)].split(r"\\"):
        cells = [re.sub(r"\\(midrule|toprule)", "", cell).strip() for cell in line.split("&")]
        if len(cells) == 12 and cells[1] in MODELS:
            data = re.sub(r"\\multirow\{\d\}\{\*\}\s*\{(.*)\}", r"\1", cells[0], flags=re.DOTALL) or data
            words = " ".join(cells[2:])
            found[DATA[data.strip()], MODELS[cells[1]]] = [float(n) for n in re.findall(r"\d+\.\d+", words)]
    return found


@pytest.mark.parametrize(("number", "label", "rows"), [(1, "ece_max", 17), (4, "ece_all", 15)])
def test_every_cell_of_tables_1_and_4_is_the_papers(shared: Path, number: int, label: str, rows: int) -> None:
    copied = pd.read_csv(results.HERE / "paper.csv")
    copied = copied[copied.table == number]
    assert set(copied.groupby(["data", "model"]).size()) == {6}
    numbers = {
        key: [x for x in some[["before", "after", "temperature"]].to_numpy().flat if x == x]
        for key, some in copied.groupby(["data", "model"], sort=False)
    }
    assert len(numbers) == rows
    assert numbers == printed((shared / "paper.tex").read_text(), label)


def test_every_cell_of_table_2_is_the_papers(shared: Path) -> None:
    source = (shared / "paper.tex").read_text()
    parts = dict(zip(tables.SHIFTS, ("CIFAR-10-C", "CIFAR-10/SVHN")))
    copied = tables.paper(2)[["before", "after"]].groupby(level=["data", "model"], sort=False)
    assert len(copied) == 4
    for (shift, model), wanted in copied:
        name = next(printed for printed, ours in MODELS.items() if ours == model)
        place = source.index(name, source.index(parts[shift], source.index("tab: ece_max")))
        found = [float(n) for n in re.findall(r"\d+\.\d+", source[place : source.index(r"\\", place)])]
        assert found == wanted.to_numpy().flatten().tolist()


def test_every_cell_of_table_3_is_the_papers(shared: Path) -> None:
    source = (shared / "paper.tex").read_text()
    lines = source[source.index("Calibration Period &") :].split(r"\\")[:3]
    numbers = [[float(n) for n in re.findall(r"[\d.]+", line)] for line in lines]
    copied = tables.paper(3)
    periods = [float(name.partition("-k")[2] or 10) for name in copied.index.get_level_values("method")]
    assert numbers == [periods, copied.before.to_list(), copied.after.to_list()]
