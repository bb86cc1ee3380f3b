"""The audit on the command line: what it prints and writes, and one sentence for everything that can be wrong."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import samples
from commands import call
from doublehead import Predictions, Summary, abstain, calibrators, metrics
from doublehead.__main__ import main
from doublehead.files.reading import read_predictions

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("safetensors")

N, K = 600, 4


def calibrate(fit: Path | str, apply: Path | str, out: Path, *options: str | Path, code: int = 0) -> Any:
    return call("calibrate", "--fit", fit, "--apply", apply, "-o", out, *options, code=code)


def fitted_to_itself(file: Path, out: Path, *options: str, method: str = "temperature") -> Any:
    return calibrate(file, file, out, "--method", method, *options)


def overconfident(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits three times as large as the labels were drawn from."""
    p = samples.overconfident(N, K, spread=2.0, seed=seed)
    return p.logits, p.labels


def write_csv(path: Path, seed: int, names: str = "logit") -> Path:
    logits, labels = overconfident(seed)
    lines = ["id,label," + ",".join(f"{names}_{k}" for k in range(K)) + ",site,note"]
    for i, (z, y) in enumerate(zip(logits.tolist(), labels.tolist())):
        note = '"a, b"' if i == 7 else ""
        lines.append(f"{i:04d},{y},{','.join(map(repr, z))},site {i % 3},{note}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def val(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "val.csv", 0)


@pytest.fixture
def test(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "test.csv", 1)


def test_evaluate_prints_numbers_intervals_floor_and_groups(test: Path) -> None:
    result = call("evaluate", test, "--logits", "--by", "site")
    numbers = Summary.of(read_predictions(test, kind="logits").load()).values
    assert re.search(rf"ECE \(15 bins\) +{100 * numbers['ece']:.2f} %", result.stdout)
    assert re.search(rf"NLL +{numbers['nll']:.4f} +\d\.\d{{4}} to ", result.stdout)
    assert f"{100 * numbers['ece_floor_low']:.2f} to {100 * numbers['ece_floor_high']:.2f} %" in result.stdout
    assert re.search(r"site 2 +200 ", result.stdout)
    assert "Badly miscalibrated: overconfident by" in result.stdout
    assert "label column 'label', score columns 'logit_0' .. 'logit_3' (4 classes)" in result.stderr


def test_evaluate_json_is_the_summary(test: Path) -> None:
    result = call("evaluate", test, "--logits", "--by", "site", "--json", "--bins", "10")
    found = json.loads(result.stdout)
    p = read_predictions(test, kind="logits").load()
    wanted = Summary.of(p, 10).values
    assert found["n"] == N
    for name, number in found["metrics"].items():
        assert number["value"] == pytest.approx(wanted[name], abs=1e-9)
    assert found["ece_floor"]["mean"] == wanted["ece_floor"]
    ece = found["metrics"]["ece"]
    assert ece["low"] < ece["value"] < ece["high"]
    rows = torch.arange(N) % 3 == 1
    accuracy = found["groups"]["site 1"]["metrics"]["accuracy"]["value"]
    assert accuracy == pytest.approx(metrics.accuracy(p[rows]))
    assert set(found["groups"]) == {"site 0", "site 1", "site 2"}


def test_names_from_files_are_not_markup(tmp_path: Path) -> None:
    file = tmp_path / "[bold]x.csv"
    file.write_text("label,cat,dog,site\ncat,0.5,0.5,[red]A\ndog,0.5,0.5,[/red]\ndog,0.5,0.5,:x:\n")
    result = call("evaluate", file, "--probs", "--by", "site")
    assert "[bold]x.csv" in result.stdout
    assert "[red]A" in result.stdout
    assert ":x:" in result.stdout


def test_calibrate_repairs_a_csv_and_keeps_the_rest(val: Path, test: Path, tmp_path: Path) -> None:
    out = tmp_path / "fixed.csv"
    result = calibrate(val, test, out, "--logits", "--method", "temperature")
    known, new = read_predictions(val, kind="logits").load(), read_predictions(test, kind="logits").load()
    fitted = calibrators.Temperature().fit(known)
    fixed = read_predictions(out, kind="probs")
    assert torch.allclose(fixed.load().probs, fitted(new.logits).softmax(1), atol=1e-12)
    before, after = test.read_text().splitlines(), out.read_text().splitlines()
    assert after[0] == before[0].replace("logit", "prob")
    for old, row in zip(before[1:], after[1:]):
        a, b = old.split(",", 2 + K), row.split(",", 2 + K)
        assert (a[:2], a[-1]) == (b[:2], b[-1])  # 0007 stays 0007, quotes stay where they are needed
    assert f"temperature {float(fitted.temperature_):.4g}" in result.stdout
    assert "No predicted class changed." in result.stdout


def test_calibrate_prints_held_back_numbers_before_and_after(val: Path, test: Path, tmp_path: Path) -> None:
    result = calibrate(val, test, tmp_path / "fixed.csv", "--logits")
    found = json.loads((tmp_path / "fixed.calibrator.json").read_text())["held_back"]
    assert found["temperature"]["nll"] < found["none"]["nll"]
    assert all(f"{one['nll']:.4f}" in result.stdout for one in found.values())
    assert "Fitted head on" in result.stdout
    assert "No predicted class changed." in result.stdout


def test_keep_best_may_change_predicted_classes(tmp_path: Path) -> None:
    honest, labels = overconfident(0)
    logits = honest / 3 + torch.tensor([2.0, 0, 0, 0])  # the first class is predicted too often
    Predictions(logits, labels).save(tmp_path / "a.npz")
    found = {}
    for keep in ("predictions", "best"):
        words = ("--keep", keep, "--json")
        result = fitted_to_itself(tmp_path / "a.npz", tmp_path / f"{keep}.npz", *words, method="head")
        found[keep] = json.loads(result.stdout)
    shown = found["best"]["before"], found["predictions"]["after"], found["best"]["after"]
    before, kept, best = (one["metrics"]["accuracy"]["value"] for one in shown)
    assert before == kept < best - 0.05


def test_calibrator_beside_the_output_can_be_loaded_and_used(val: Path, test: Path, tmp_path: Path) -> None:
    out = tmp_path / "fixed.csv"
    calibrate(val, test, out, "--logits", "--method", "vector")
    weights = tmp_path / "fixed.calibrator.safetensors"
    about = json.loads((tmp_path / "fixed.calibrator.json").read_text())
    facts = [about["method"], about["reads"], about["n_classes"], about["fitted_on"]["n"]]
    assert facts == ["vector", "logits", K, N]
    assert about["after"]["metrics"]["nll"]["value"] < about["before"]["metrics"]["nll"]["value"]
    loaded = calibrators.load(weights)
    new = read_predictions(test, kind="logits").load()
    fixed = read_predictions(out, kind="probs").load().probs
    assert torch.allclose(fixed, loaded(new.logits).softmax(1), atol=1e-12)
    call("calibrate", "--use", weights, "--apply", test, "--logits", "-o", tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == out.read_bytes()
    assert not (tmp_path / "again.calibrator.json").exists()
    wrong = call("calibrate", "--use", weights, "--apply", test, "--probs", "-o", tmp_path / "b.csv", code=2)
    assert "was fitted on logits, but --probs was given" in wrong.stderr
    probs = tmp_path / "probs.csv"
    probs.write_text("label,prob_0,prob_1,prob_2,prob_3\n0,0.25,0.25,0.25,0.25\n")
    wrong = call("calibrate", "--use", weights, "--apply", probs, "-o", tmp_path / "b.csv", code=2)
    assert "was fitted on logits, but" in wrong.output
    assert "--logits" not in wrong.output


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_calibrate_json_and_auto(val: Path, test: Path, tmp_path: Path, monkeypatch: Any) -> None:
    class Broken(calibrators.Temperature):
        def _learn(self, predictions: Predictions) -> dict[str, Any]:
            raise RuntimeError("it could not be fitted")

    few = {name: calibrators.CALIBRATORS[name] for name in ("none", "temperature", "vector")}
    monkeypatch.setattr("doublehead.calibrators.CALIBRATORS", {**few, "broken": Broken})
    result = calibrate(val, test, tmp_path / "fixed.csv", "--logits", "--method", "auto", "--json")
    found = json.loads(result.stdout, parse_constant=no_constant)
    nlls = found["cross_validation"]["nll"]
    assert list(nlls)[-2:] == ["none", "broken"]
    assert nlls["broken"] is None
    assert "could not be fitted" in found["cross_validation"]["notes"]["broken"]
    assert found["method"] in ("temperature", "vector")
    assert found["after"]["metrics"]["nll"]["value"] < found["before"]["metrics"]["nll"]["value"]
    json.loads((tmp_path / "fixed.calibrator.json").read_text(), parse_constant=no_constant)


def test_calibrate_without_labels_writes_and_does_not_measure(val: Path, test: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.csv"
    rows = [line.split(",") for line in test.read_text().splitlines()]
    bare.write_text("\n".join(",".join(row[2 : 2 + K]) for row in rows) + "\n")
    result = calibrate(val, bare, tmp_path / "fixed.csv", "--logits")
    assert "has no labels" in result.stdout
    assert len((tmp_path / "fixed.csv").read_text().splitlines()) == N + 1


def test_calibrate_every_format(tmp_path: Path) -> None:
    (z, y), (new, labels) = overconfident(0), overconfident(1)
    known = Predictions(z, y)
    wanted = calibrators.Temperature().fit(known)(new).double().softmax(1).float()
    val = known.save(tmp_path / "val.npz")
    Predictions(new, labels).save(tmp_path / "test.npz")
    np.save(tmp_path / "z.npy", new.numpy())
    np.save(tmp_path / "y.npy", labels.numpy())
    wide = pa.table({**{f"logit_{k}": new[:, k].numpy() for k in range(K)}, "label": labels.numpy()})
    lists = pa.table({"note": ["a, b"] * N, "logits": new.tolist(), "label": labels.numpy()})
    parquet.write_table(wide, tmp_path / "wide.parquet")
    parquet.write_table(lists, tmp_path / "lists.parquet")
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists.to_pylist()))
    for name in ("lists.arrow", "lists.feather"):
        with pa.ipc.new_file(str(tmp_path / name), lists.schema) as writer:
            writer.write_table(lists)
    lists_in = [f"lists.{end}" for end in ("parquet", "jsonl", "arrow", "feather")]
    for name in ("test.npz", "wide.parquet", *lists_in, "z.npy"):
        out = tmp_path / f"fixed_{name}"
        pair = ["--apply", tmp_path / "y.npy"] if name == "z.npy" else []
        calibrate(val, tmp_path / name, out, *pair, "--logits", "--method", "temperature", "--force")
        if name == "z.npy":
            assert np.allclose(np.load(out), wanted, atol=1e-6)
            continue
        fixed = read_predictions(out, kind="probs", extra=["note"] if "lists" in name else [])
        assert torch.allclose(fixed.load().probs.float(), wanted, atol=1e-5)
        assert fixed.load().labels.tolist() == labels.tolist()
        assert all(set(chunk.batch.columns.get("note", ["a, b"])) == {"a, b"} for chunk in fixed.chunks())
    schema = parquet.read_schema(tmp_path / "fixed_wide.parquet")
    assert schema.names == ["prob_0", "prob_1", "prob_2", "prob_3", "label"]
    assert str(schema.field("prob_0").type) == "float"


def test_calibrate_a_folder(val: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    (folder / "deep").mkdir(parents=True)
    write_csv(folder / "a.csv", 3)
    write_csv(folder / "deep" / "b.csv", 4)
    result = calibrate(val, folder, tmp_path / "out", "--logits")
    files = sorted(str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*.csv"))
    assert files == ["a.csv", "deep/b.csv"]
    assert "1,200 predictions" in result.stdout
    again = calibrate(val, folder, tmp_path / "out", "--logits", code=2)
    assert "must be a new or empty folder" in again.stderr


def test_calibrate_a_binary_score(tmp_path: Path) -> None:
    file, out = tmp_path / "binary.csv", tmp_path / "out.csv"
    scores = [0.02 + 0.96 * i / 59 for i in range(60)]
    labels = [int(i % 20 < i / 3) for i in range(60)]
    file.write_text("y,prob\n" + "\n".join(f"{y},{s}" for y, s in zip(labels, scores)) + "\n")
    fitted_to_itself(file, out, "--probs", method="platt")
    p = Predictions.from_binary(np.array(scores), labels, are_probs=True)
    wanted = calibrators.Platt().fit(p)(p.logits).softmax(1)[:, 1]
    lines = out.read_text().splitlines()
    assert lines[0] == "y,prob"
    assert [float(line.split(",")[1]) for line in lines[1:]] == pytest.approx(wanted.tolist(), abs=1e-9)


def test_calibrate_on_answers_that_are_all_right(tmp_path: Path) -> None:
    logits, _ = overconfident(0)
    file = Predictions(logits, logits.argmax(1)).save(tmp_path / "right.npz")  # the best temperature is 0
    fitted_to_itself(file, tmp_path / "out.npz")
    assert bool(calibrators.load(tmp_path / "out.calibrator.safetensors").at_bound_)
    assert metrics.accuracy(read_predictions(tmp_path / "out.npz").load()) == 1


FIT = "calibrate --fit val.csv --apply test.csv --logits"
BAD_CALLS = {
    "evaluate test.csv --logits --abstain 2": "--abstain must lie between 0 and 1",
    "calibrate --fit val.csv --apply top.csv --logits -o out.csv": "score",
    "evaluate test.csv --logits --probs": "give one of --logits and --probs, not both",
    "evaluate nowhere.csv --logits": "nowhere.csv does not exist",
    "evaluate test.csv --logits --label truth": "no column 'truth' for the label",
    "evaluate test.csv --logits --where site": "--where must read COLUMN=VALUE, got 'site'",
    "evaluate test.csv --logits --where site=a --where site=b": "--where must be given once for each COLUMN",
    "evaluate test.csv --logits --abstain 0.1 --weights id": "give one of --abstain and --weights",
    "evaluate test.csv --logits --cluster tcp://127.0.0.1:1": "no Dask scheduler answers",
    "calibrate --apply test.csv --logits -o out.csv": "give either --fit FILE",
    f"{FIT} -o out.csv --keep all": "--keep must be",
    f"{FIT} -o out.csv --keep best --method temperature": "--keep must be",
    f"{FIT} -o out.csv --method temprature": "did you mean temperature",
    f"{FIT} -o out.csv --method platt": "platt cannot be fitted on val.csv: Platt needs predictions of 2 classes",
    f"{FIT} -o three.csv": "three.csv exists: give another name to --output, or --force to replace it",
    "calibrate --fit top.csv --apply three.csv -o out.csv": "a score for every class is needed",
    f"{FIT} -o no/such/out.csv": "out.csv cannot be written: there is no folder no/such",
    f"{FIT} -o /proc/out.csv": "/proc/out.csv cannot be written: ",
    f"{FIT} -o val.csv": "val.csv is one of the files to read",
    f"{FIT} -o out.parquet": "out.parquet must end in .csv like the file it is made from, test.csv",
    "calibrate --fit val.csv --apply nan.csv --logits -o out.csv": "'logit_2', row 300 must hold a finite number",
    "calibrate --fit val.csv --apply three.csv --logits -o out.csv": "in the same order, but it lacks 3",
    "calibrate --fit three.csv --apply test.csv --logits -o out.csv": "in the same order, but it also has 3",
    "calibrate --fit list.json --apply list.json -o out.json": "list.json cannot be written back",
    "calibrate --use nowhere.safetensors --apply test.csv --logits -o out.csv": "nowhere",
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    good = write_csv(folder / "test.csv", 1).read_text()
    write_csv(folder / "val.csv", 0)
    lines = good.splitlines()
    (folder / "top.csv").write_text("label,predicted,confidence\ncat,cat,0.75\ndog,cat,0.5\n")
    records = [{"label": "a", "a": 0.75, "b": 0.25}, {"label": "b", "a": 0.5, "b": 0.5}]
    (folder / "list.json").write_text(json.dumps(records))
    row = lines[300].split(",")
    row[4] = "nan"
    (folder / "nan.csv").write_text("\n".join([*lines[:300], ",".join(row), *lines[301:]]) + "\n")
    (folder / "three.csv").write_text("label,logit_0,logit_1,logit_2\n0,1.5,2.5,3.5\n")
    return folder


@pytest.mark.parametrize("command", BAD_CALLS)
def test_what_is_wrong_is_said_in_one_sentence(command: str, bad_files: Path, monkeypatch: Any) -> None:
    if "--cluster" in command:
        pytest.importorskip("distributed")
    monkeypatch.chdir(bad_files)
    monkeypatch.setattr("doublehead.files.reading.CONNECT_SECONDS", 0.2)
    files = sorted(bad_files.rglob("*"))
    result = call(*command.split(), code=2)
    errors = [line for line in result.stderr.splitlines() if line and "reading" not in line]
    assert len(errors) == 1
    assert errors[0].startswith("Error: ")
    assert BAD_CALLS[command] in errors[0]
    assert result.stdout == ""
    assert sorted(bad_files.rglob("*")) == files  # nothing written, nothing left behind


def test_the_tutorial_runs(shared: Path, tmp_path: Path, monkeypatch: Any) -> None:
    page = (Path(__file__).parents[1] / "docs" / "tutorials" / "audit.md").read_text(encoding="utf-8")
    write_tutorial_files(shared / "data" / "logits" / "resnet110_c10.npz", page, tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL)
    commands = 0
    for block in blocks:
        result = None
        for line in block.splitlines():
            if line.startswith("$ doublehead "):
                result = call(*shlex.split(line)[2:])
                commands += 1
            elif "$ doublehead evaluate" in block and line.strip() not in ("", "..."):  # nothing fitted
                printed = re.sub(r"\s+", " ", result.output)
                assert re.sub(r"\s+", " ", line.strip()) in printed
            elif name := re.match(r"(accuracy|ECE \(15 bins\)|ECE floor|NLL)  ", line):  # fitted
                (printed,) = [other for other in result.output.splitlines() if other.startswith(name[0])]
                numbers = (re.findall(r"\d+\.\d+", one) for one in (line, printed))
                shown, found = (np.reshape(three, (-1, 3)).astype(float) for three in numbers)
                assert found[:, 0] == pytest.approx(shown[:, 0], rel=0.02)
                # The ends are quantiles of 1,000 resamples, with a standard error of 2 % of the interval's width. A
                # sample that moves to another bin changes what is drawn.
                for ends, wanted in zip(found[:, 1:], shown[:, 1:]):
                    assert ends == pytest.approx(wanted, abs=0.1 * (wanted[1] - wanted[0]))
    assert commands == 5
    assert (tmp_path / "report.html").stat().st_size > 10_000


def write_tutorial_files(real: Path, page: str, folder: Path) -> None:
    """The CSV files the tutorial speaks of, with the header it shows."""
    header = re.search(r"^image,label,.*$", page, flags=re.MULTILINE)
    names = header[0].split(",")[4:]
    arrays = np.load(real)
    for split in ("val", "test"):
        lines = [header[0]]
        probs = torch.from_numpy(arrays[f"{split}_logits"]).double().softmax(1).round(decimals=4)
        for i, (row, y) in enumerate(zip(probs.tolist(), arrays[f"{split}_labels"])):
            place = f"{'north' if i % 3 else 'south'},2024-{1 + 12 * i // len(probs):02d}-01"
            cells = ",".join(f"{value:g}" for value in row)
            lines.append(f"{split}/{i:05d}.png,{names[int(y)]},{place},{cells}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_abstaining_is_the_threshold_of_the_predictions(test: Path) -> None:
    choice = abstain.choose_threshold(read_predictions(test).load(), 0.2)
    found = json.loads(call("evaluate", test, "--abstain", "0.2", "--json").stdout)["abstain"]
    assert (found["threshold"], found["n_accepted"]) == (choice.threshold, choice.n_accepted)
    assert str(choice) in call("evaluate", test, "--abstain", "0.2").stdout


def test_force_replaces_and_a_closed_pipe_is_silent(test: Path, tmp_path: Path, monkeypatch: Any) -> None:
    arguments = (test, test, tmp_path / "out.csv", "--method", "temperature")
    calibrate(*arguments)
    calibrate(*arguments, code=2)
    calibrate(*arguments, "--force")
    rows = [f"{i % 2},0.6,0.4,{i % 900} {'x' * 90}" for i in range(1800)]  # more text than a pipe holds
    (tmp_path / "many.csv").write_text("\n".join(["label,cat,dog,g", *rows]) + "\n")
    command = shlex.join(
        [sys.executable, "-m", "doublehead", "evaluate", str(tmp_path / "many.csv"), "--by", "g"]
    )
    piped = ["bash", "-c", f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}"]
    result = subprocess.run(piped, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[1:] == ["0"]
    assert "Traceback" not in result.stderr
    assert "Error" not in result.stderr
    monkeypatch.setattr(sys, "argv", ["doublehead", "evaluate", "nowhere.csv"])
    with pytest.raises(SystemExit, match="2"):
        main()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_leaves_nothing_behind(number: signal.Signals, val: Path, tmp_path: Path) -> None:
    files = sorted(tmp_path.iterdir())
    stopping = (
        "import os, signal, sys, doublehead.files.writing as w\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where tests run in the background
        f"def stop(*_): os.kill(os.getpid(), {int(number)})\n"
        "w._csv_lines = stop\n"
        "from doublehead.__main__ import main\n"
        "main()"
    )
    words = ["calibrate", "--fit", val, "--apply", val, "--method", "temperature", "-o", tmp_path / "out.csv"]
    command = [sys.executable, "-c", stopping, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    ("header", "labels"),  # of the classes b and a
    [
        ("label,b,a", "01"),  # numbers beside columns with names
        ("truth,PROB_A,PROB_B", "BA"),
        ("label,prob_a,prob_b", "ba"),
        ("label,b,a", ["", ""]),  # no labels after all
    ],
)
def test_classes_of_the_fit_are_found_by_name(header: str, labels: Any, tmp_path: Path) -> None:
    scores, truth = np.array([(0.75, 0.25), (0.125, 0.875), (0.625, 0.375)] * 20), [0, 1, 1] * 20
    fit, new, own, out = (tmp_path / f"{name}.csv" for name in ("fit", "new", "own", "out"))
    order = [1, 0] if header.lower().endswith("b") else [0, 1]
    files = (fit, "label,b,a", "01", scores), (new, header, labels, scores[:, order])
    for path, first, names, columns in files:
        lines = [f"{names[y]},{p},{q}" for y, (p, q) in zip(truth, columns)]
        path.write_text("\n".join([first, *lines]) + "\n")
    results = (calibrate(fit, *pair, "--method", "vector", "--json") for pair in ((fit, own), (new, out)))
    wanted, found = (json.loads(result.stdout) for result in results)
    assert found["before"] == (wanted["before"] if labels[0] else None)
    mine, theirs = (np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2)) for path in (own, out))
    assert np.array_equal(theirs[:, order], mine)


def test_text_is_written_back_as_utf_8_with_its_delimiter_and_decimal_commas(tmp_path: Path) -> None:
    text = "label;caf\xe9;dog\n" + "caf\xe9;0,75;0,25\ndog;0,5;0,5\ndog;0,25;0,75\n" * 20
    for encoding in ("cp1252", "utf-8-sig"):
        file, out = tmp_path / f"{encoding}.csv", tmp_path / f"{encoding}_out.csv"
        file.write_bytes(text.encode(encoding))
        fitted_to_itself(file, out)
        header, *lines = out.read_bytes().splitlines()
        assert header.decode("utf-8-sig") == "label;caf\xe9;dog"
        assert header.startswith(b"\xef\xbb\xbf")
        assert lines[0].decode().startswith("caf\xe9;")
        assert all(b"." not in line and line.count(b",") == 2 for line in lines)
        assert len(read_predictions(out).load()) == 60


@pytest.mark.parametrize("form", ["columns", "object", "list", "pairs", "probs"])
def test_json_keeps_everything_but_the_scores(form: str, tmp_path: Path) -> None:
    logits, labels = overconfident(0)
    rows: list[dict[str, Any]] = []
    for i, (scores, label) in enumerate(zip(logits.tolist(), labels.tolist())):
        by_name = dict(zip("abcd", scores))
        pairs = [{"label": name, "score": score} for name, score in by_name.items()]
        forms = {"object": by_name, "list": scores, "pairs": pairs}
        flat = {f"logit_{k}": score for k, score in enumerate(scores)}
        probs = {"probs": dict(zip("abcd", torch.tensor(scores).softmax(0).tolist()))}
        own = {"columns": flat, "probs": probs}.get(form) or {"logits": forms[form]}
        named = "abcd"[label] if form in ("object", "pairs", "probs") else label
        other = {
            "when": "2024-01-01T00:00:00Z",
            "big": 2**70,
            "mixed": [1, {"é": None}, "x"],
            "id": [i, str(i)][i % 2],
        }
        rows.append({"truth": named, **own, **other, **({"rare": 1.0} if i == 7 else {})})
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fitted_to_itself(file, out, "--probs" if form == "probs" else "--logits")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for row, new in zip(rows, found, strict=True):
        assert [*new] == [name.replace("logit", "prob") for name in row]
        assert all(new[name] == row[name] for name in row.keys() - own.keys())
    wanted = calibrators.Temperature().fit(Predictions(logits, labels))(logits).softmax(1)
    assert torch.allclose(read_predictions(out, kind="probs").load().probs.float(), wanted.float(), atol=1e-4)


def test_what_is_refused_at_first_may_be_stated(tmp_path: Path) -> None:
    file, rough = write_csv(tmp_path / "a.csv", 0, names="prob"), tmp_path / "b.csv"
    call("evaluate", file, "--logits", code=2)
    call("evaluate", file, "--logits", "--scores", "prob_*")
    rough.write_text("label,prob_0,prob_1\n0,0.7,0.33\n1,0.2,0.8\n")
    call("evaluate", rough, code=2)
    call("evaluate", rough, "--tolerance", "0.1")


def test_sets_of_one_npz_are_apart_and_keep_the_names_of_their_classes(tmp_path: Path) -> None:
    (logits, labels), file, sets = overconfident(0), tmp_path / "both.npz", {}
    for name in ("val", "test"):
        sets[f"{name}_logits"], sets[f"{name}_labels"] = logits.numpy(), labels.numpy()
    names = tuple(f"kind {k}" for k in range(K))
    np.savez(file, **sets, classes=np.array(names))
    done = calibrate(f"{file}:val", f"{file}:test", tmp_path / "out.npz", "--method", "temperature")
    assert "share a file" not in done.stderr
    assert read_predictions(tmp_path / "out.npz").layout.classes == names


def test_a_calibrator_is_replaced_only_by_force(val: Path, tmp_path: Path) -> None:
    assert "share a file" in fitted_to_itself(val, tmp_path / "out.csv").stderr
    (tmp_path / "out.csv").unlink()
    kept = (tmp_path / "out.calibrator.safetensors").read_bytes()
    said = calibrate(val, val, tmp_path / "out.csv", "--method", "vector", code=2)
    assert "out.calibrator.safetensors exists" in said.stderr
    assert (tmp_path / "out.calibrator.safetensors").read_bytes() == kept
    fitted_to_itself(val, tmp_path / "out.csv", "--force")
