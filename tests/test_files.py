"""Predictions in files: layouts, formats and encodings, which columns are guessed, what is refused, the tally."""

import gzip
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doublehead import Predictions, evaluate
from doublehead.files import TableError, formats, read_predictions
from doublehead.outcomes import Outcomes
from doublehead.stream import Tally
from doublehead.summary import Summary
from samples import random_predictions

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

PROBS = [[0.75, 0.25], [0.125, 0.875], [0.5, 0.5]]
TRUTH = [0, 1, 1]

LOGITS = [[2.0, 0.5, -1.0], [0.0, 3.0, 0.25], [1.0, 1.5, 4.0], [-1.0, 2.0, 0.0]]
LABELS = [0, 1, 2, 2]


def write_csv(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def refused(message: str, *args: Any, **options: Any) -> None:
    """That these predictions cannot be read."""
    with pytest.raises(TableError, match=message):
        read_predictions(*args, **options).load()


def simple_csv(path: Path) -> Path:
    rows = [f"{i},{y},{','.join(map(str, z))}" for i, (y, z) in enumerate(zip(LABELS, LOGITS))]
    return write_csv(path, "id,label,logit_0,logit_1,logit_2", *rows)


def columns(dtype: str = "float32") -> dict[str, Any]:
    z = np.array(LOGITS, dtype=dtype)
    return {"label": LABELS, **{f"logit_{k}": z[:, k] for k in range(3)}}


def as_parquet(path: Path, table: dict[str, Any] | None = None, **kwargs: Any) -> Path:
    parquet.write_table(pa.table(table or columns()), path, **kwargs)
    return path


def test_npy_pair_in_either_order(tmp_path: Path) -> None:
    scores, labels = tmp_path / "z.npy", tmp_path / "y.npy"
    np.save(scores, np.array(LOGITS, dtype=np.float32))
    np.save(labels, np.array(LABELS))
    for pair in ([scores, labels], [labels, scores], [tmp_path]):
        p = read_predictions(pair, kind="logits").load()
        assert p.logits.dtype == torch.float32
        assert p.logits.tolist() == LOGITS
        assert p.labels.tolist() == LABELS


def test_npz_states_its_kind_and_must_not_be_contradicted(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, logits=np.array(LOGITS), labels=np.array(LABELS))
    assert read_predictions(file).kind == "logits"
    refused("holds an array called 'logits', but --probs was given", file, kind="probs")
    saved = Predictions.from_probs([[0.25, 0.75]], [1]).save(tmp_path / "b.npz")
    assert read_predictions(saved).load().are_probs


def test_npz_with_several_sets(tmp_path: Path) -> None:
    file = tmp_path / "both.npz"
    z, y = np.array(LOGITS), np.array(LABELS)
    np.savez(file, val_logits=z[:1], val_labels=y[:1], test_logits=z[1:], test_labels=y[1:])
    assert len(read_predictions(f"{file}:test").load()) == 3
    refused("both.npz:test or .*both.npz:val", file)
    refused("does not hold arrays called train_", f"{file}:train")


def test_folder_and_many_files_keep_order(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    (folder / "site=a").mkdir(parents=True)
    as_parquet(folder / "site=a" / "1.parquet", {name: column[:2] for name, column in columns().items()})
    as_parquet(folder / "z.parquet", {name: column[2:] for name, column in columns().items()})
    as_parquet(folder / "_metadata.parquet", {"nothing": [1]})  # hidden, as Spark leaves them
    table = read_predictions(folder, kind="logits")
    assert table.load().labels.tolist() == LABELS
    both = read_predictions([simple_csv(tmp_path / "a.csv"), folder], kind="logits")
    assert both.load().labels.tolist() == LABELS + LABELS


@pytest.mark.parametrize(
    ("header", "kind", "wanted"),
    [
        ("y,logit_1,logit_0", "logits", ("logit_0", "logit_1")),  # by number, not by place
        ("target,0,1", "probs", ("0", "1")),
        ("label,prob_cat,prob_dog,age", "probs", ("prob_cat", "prob_dog")),
        ("label,logit_0,logit_1,prob_0,prob_1", "probs", ("prob_0", "prob_1")),
        ("label,logit_0,logit_1,prob_0,prob_1", "logits", ("logit_0", "logit_1")),
        ("Label,cat,dog", "logits", ("cat", "dog")),
        ("y_true,prob", "probs", ("prob",)),
        ("label,p1,p2,p3", "probs", ("p1", "p2", "p3")),
    ],
)
def test_guessed_columns(header: str, kind: Any, wanted: tuple[str, ...], tmp_path: Path) -> None:
    names = header.split(",")
    file = write_csv(tmp_path / "a.csv", header, ",".join(["1"] + ["0.5"] * (len(names) - 1)))
    layout = read_predictions(file, kind=kind).layout
    assert (layout.label, layout.scores) == (names[0], wanted)
    assert layout.guesses[0] == f"label column {names[0]!r}"
    assert all(name in layout.guesses[1] for name in (wanted[0], wanted[-1]))


def test_labels_from_a_base_on_and_a_binary_score_in_an_array(tmp_path: Path) -> None:
    based = write_csv(tmp_path / "c.csv", "label,cat,dog", "1,0.5,0.5", "2,0.5,0.5")
    assert read_predictions(based, kind="probs", base=1).load().labels.tolist() == [0, 1]
    np.savez(tmp_path / "b.npz", logits=np.array([2.0, -1.0]), labels=np.array([1, 0]))
    assert read_predictions(tmp_path / "b.npz").load().logits.tolist() == [[0.0, 2.0], [0.0, -1.0]]


def test_where_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**columns(), "site": ["A", None, "A", "B"], "month": [1, 1, 2, 2]}
    file = as_parquet(tmp_path / "a.parquet", table)
    for where, wanted in (({"site": "A"}, [0, 2]), ({"site": "A", "month": "2"}, [2])):
        assert read_predictions(file, kind="logits", where=where).load().labels.tolist() == wanted
    groups = read_predictions(file, kind="logits", by="site").tally().groups
    assert {name: tally.n for name, tally in groups.items()} == {"A": 2, "B": 1, "(missing)": 1}
    days = np.array(["2024-01-01", "2024-01-01", "2024-01-02T06", "2024-01-03"], dtype="datetime64[s]")
    file = as_parquet(tmp_path / "b.parquet", {**columns(), "new": [True, False, True, True], "day": days})
    for by, wanted in (
        ("new", {"True": 3, "False": 1}),
        ("day", {"2024-01-01": 2, "2024-01-02 06:00:00": 1, "2024-01-03": 1}),
    ):  # as CSV files write them
        groups = read_predictions(file, kind="logits", by=by).tally().groups
        assert {name: tally.n for name, tally in groups.items()} == wanted
    file = as_parquet(tmp_path / "a.parquet", table)
    rows = ["0,0.25,0.75,007"] * 30 + ["1,0.25,0.75,A1"]
    codes = write_csv(tmp_path / "codes.csv", "label,prob_0,prob_1,site", *rows)
    monkeypatch.setattr(formats, "BLOCK", 100)  # codes that look like whole numbers at first
    groups = read_predictions(codes, by="site").tally().groups
    assert {name: tally.n for name, tally in groups.items()} == {"007": 30, "A1": 1}
    said = "none of the 4 rows of .* has site=C; the values there are .*A, B"
    refused(said, file, kind="logits", where={"site": "C"})


def test_rows_and_groups_without_weight_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = random_predictions(90, 3)
    scores = {f"logit_{k}": p.logits[:, k].numpy() for k in range(3)}
    table = {
        "label": p.labels.numpy(),
        **scores,
        "size": [0.0] * 60 + [1.0, 0.5] * 15,
        "part": [0] * 30 + [1] * 60,
    }
    file = as_parquet(tmp_path / "a.parquet", table)
    monkeypatch.setattr("doublehead.files.reading.MAX_ROWS", 20)  # whole chunks have no weight
    found = evaluate(file, weights="size", by="part")
    kept = Summary.of(Predictions(p.logits[60:], p.labels[60:], table["size"][60:]))
    assert found.values["nll"] == kept.values["nll"]
    assert found.values["ece_classwise"] == kept.values["ece_classwise"]
    assert [*found.groups] == ["1"]
    assert read_predictions(file, weights="size").load().weights.tolist() == table["size"]
    with pytest.raises(ValueError, match="weights must be above 0 for some sample, got 0 for all"):
        evaluate(file, weights="size", where={"part": "0"})


def test_objects_whose_other_values_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "BLOCK", 100)
    rows: list[dict[str, Any]] = [{"label": i % 2, "probs": {"0": i % 2, "1": 1 - i % 2}} for i in range(12)]
    rows += [{"label": 1, "probs": {"0": 0.25, "1": 0.75}, "note": "late"}]
    others = ["x", 1, None, [1, {}], 2**70]
    rows = [{**row, "id": i if i < 9 else f"x{i}", "other": others[i % 5]} for i, row in enumerate(rows)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_predictions(file, label="label").load().probs[-1].tolist() == [0.25, 0.75]
    refused("column 'id' must hold one kind of values, got number and string", file, label="label", by="id")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"label": 1, "pro')
    refused('a.jsonl, line 14 must be a JSON object, got \'."label": 1, "pro\'', file, label="label")
    (tmp_path / "none.json").write_text("[]")
    refused("none.json has no rows", tmp_path / "none.json")
    (tmp_path / "one.json").write_text('{"label": 1, "probs": [0.25, 0.75]}')
    assert len(read_predictions([tmp_path / "one.json", tmp_path / "none.json"]).load()) == 1
    (tmp_path / "b.jsonl").write_text('"[0.5, 0.5]"\n[1]\n')
    refused("b.jsonl, line 1 must be a JSON object, got .*0.5, 0.5", tmp_path / "b.jsonl")


def test_named_columns(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", "truth2,m_10,m_9,m_8,label", "10,0.5,0.25,0.25,x")
    table = read_predictions(file, kind="probs", label="truth2", scores=["m_*"])
    assert table.layout.scores == ("m_8", "m_9", "m_10")
    assert table.layout.guesses == ()
    assert table.load().labels.tolist() == [2]  # the label 10 is the column m_10
    file = write_csv(tmp_path / "a.csv", 'label,"yes, no",no', "0,0.75,0.25")
    for scores in ("no, y*", ["no", "yes, no"]):
        assert read_predictions(file, kind="probs", scores=scores).layout.scores == ("no", "yes, no")
    assert read_predictions(file, kind="probs", scores="yes, no").layout.binary
    refused("scores must name at least one column, got none", file, kind="probs", scores=[])


def test_evaluate_refuses_what_an_array_cannot_use() -> None:
    pandas = pytest.importorskip("pandas")
    p = random_predictions(30, 3)
    for unused in ({"where": {"site": "A"}}, {"cluster": "local"}, {"lable": "y"}):
        with pytest.raises(
            TypeError, match=f"{next(iter(unused))} must be given with a DataFrame or with files"
        ):
            evaluate(p.probs, p.labels, **unused)
    assert evaluate(p.logits, p.labels, kind="logits").values == Summary.of(p).values
    for given in ({"labels": p.labels}, {"weights": torch.ones(30)}):
        with pytest.raises(TypeError, match=f"{next(iter(given))} must not be given with Predictions"):
            evaluate(p, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes must be different names, got a, b, a"):
        evaluate(p.probs, ["a", "b", "a"] * 10, classes=["a", "b", "a"])
    with pytest.raises(TypeError, match="no option 'bins'; did you mean n_bins"):
        evaluate(pandas.DataFrame(p.probs.numpy()).assign(label=p.labels.numpy()), bins=10)
    frame = pandas.DataFrame(p.logits.numpy()).assign(label=p.labels.numpy(), site=[1.0, None] * 15)
    assert [*evaluate(frame, kind="logits", by="site").groups] == ["(missing)", "1"]
    with pytest.raises(TypeError, match="classes are given with an array"):
        evaluate(frame, classes=["a", "b", "c"])
    with pytest.raises(TableError, match="more than one column called '1'"):
        evaluate(frame[["label", 0, 1, 1]])


def test_a_kind_is_asked_for_only_where_it_is_not_certain(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", "label,cat,dog", "cat,-1.5,4.5")
    refused(r"lie in -1.5..4.5 and rows do not sum to 1; .* looks like logits; give --logits", file)
    certain = {"cat,0.25,0.75": "probs", "cat,-0.693147,-0.693147": "logits"}
    for row, kind in certain.items():
        assert read_predictions(write_csv(tmp_path / "b.csv", "label,cat,dog", row)).kind == kind
    assert read_predictions(simple_csv(tmp_path / "c.csv")).kind == "logits"  # by the names of the columns
    file = write_csv(tmp_path / "d.csv", "label,prob", "0,0.25", "1,0.5")
    assert read_predictions(file).kind == "probs"
    high = write_csv(tmp_path / "e.csv", "label,prob", *["0,0.75", "1,0.5"] * 10)
    assert read_predictions(high, scores=["prob"]).load().labels.tolist() == [0, 1] * 10  # never below 0.5


def test_an_empty_file_of_a_folder_does_not_describe_it(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", "label,cat,dog")
    write_csv(tmp_path / "b.csv", "label,cat,dog", "cat,0.25,0.75")
    assert len(read_predictions(tmp_path).load()) == 1
    (tmp_path / "c.csv").write_text("label,cat,dog")  # without a line break
    (tmp_path / "d.csv").write_text("label,cat,dog\n\ndog,0.5,0.5\n")
    assert len(read_predictions(tmp_path).load()) == 2
    assert len(read_predictions([tmp_path / name for name in ("d.csv", "c.csv")]).load()) == 1


def test_probabilities_a_rounding_error_outside_are_certain_and_clipped(tmp_path: Path) -> None:
    rows = ["cat,1.00001,-1e-9", "dog,0.25,0.75"]
    table = read_predictions(write_csv(tmp_path / "a.csv", "label,cat,dog", *rows))
    assert (table.kind, table.why) == ("probs", "rows sum to 1")
    assert table.load().probs[0].tolist() == [1.0, 0.0]
    assert table.counts == {"clipped": 1}


def test_a_class_with_zeros_alone_is_a_class(tmp_path: Path) -> None:
    rows = ["cat,0.25,0,0.75", "dog,0.5,0,0.5"]
    table = read_predictions(write_csv(tmp_path / "a.csv", "label,cat,mouse,dog", *rows))
    assert table.layout.classes == ("cat", "mouse", "dog")
    assert table.load().labels.tolist() == [0, 2]


Z_HEADER, HEADER = "label,logit_0,logit_1\n", "label,score_0,score_1\n"
TOTAL = HEADER + "0,0.25,0.75\n" * 20 + ",5.00,15.00"  # the last row
BAD_LOGITS = {  # text -> message
    "id,x\n1,2": "no column that looks like the label: name it with label .*--label.*, it has 'id', 'x'",
    "label,name\n1,x": "no columns that look like scores: name them with --scores",
    "label,name,confidence\n1,x,0.5": "rename the column of the class that 'confidence' is about",
    Z_HEADER + "0,1,2\n1,abc,2": "a.csv, column 'logit_0', row 2 must hold .*got 'abc'",
    "label,cat,dog\ncat,1.5,2.5\nmouse,1,2": "row 2 must hold one of the classes 'cat', 'dog', got 'mouse'",
    Z_HEADER + "0,1,2\n1,,2": "column 'logit_0', row 2 must .* nothing or nan",
    Z_HEADER + "0,1,inf": "column 'logit_1', row 1 must hold a finite number, got inf",
    Z_HEADER + "0,1,2\n,1,2": "column 'label', row 2 must hold a class .* got nothing",
    Z_HEADER + "0.5,1,2": "column 'label', row 1 must hold a class .* got 0.5",
    Z_HEADER + "0,1,2\n1,3": "row 2 has 2 values where the header has 3: .* truncated",
    Z_HEADER + "1,1,2\n2,1,2": "row 2: labels of 2 .* lie in 0..1, got 2; .*--label-base 1",
    "label,logit_1,logit_2\n0,1,2\n1,1,2": "row 1: labels .* must lie in 1..2, got 0; .*--label-base 0",
    Z_HEADER: "a.csv has no rows",
    "label,cat,dog\ncat,1.5,2.5\ndog,abc,2.5": "column 'cat', row 2 must hold a number, got 'abc'",
    "label,logit_0,logit_0\n0,1,2": "more than one column called 'logit_0'",
    HEADER + "0,0.25,0.75\n1,0.5,0.5": "each row sums to 1, so these are probabilities: give --probs",
    HEADER + "0,25,75\n1,50,50": "each row sums to 100, so these are percentages",
    HEADER + "0,1e300,0\n1,2,3": r"row 1: logits must lie within 1e\+30",
    HEADER + "1e20,1,2": "row 1 must hold a class",
    "label,prob_0,prob_1,size\n0,0.5,0.5,1.5": "columns such as 'prob_0', but --logits was given: give --probs",
}
BAD_PROBS = {
    "label,prob_0,prob_1,p_0,p_1\n0,1,0,1,0": r"several sets of score columns \(prob_0, p_0, ...\)",
    HEADER + "0,0.7,0.2": "row 1: probabilities must sum to 1 within 0.001, got 0.9; .*larger --tolerance",
    HEADER + "0,1.5,-0.5": "row 1: probabilities must lie in 0..1, got -0.5; give --logits",
    HEADER + "0,25,75\n1,50,50": "each row sums to 100, so these are percentages",
    HEADER + "0,-0.693147,-0.693147\n1,-1.386294,-0.287682": "these are log-probabilities: give --logits",
    TOTAL: "row 21: probabilities must lie in 0..1.* if it is a total",
}
BAD_UNSTATED = {
    TOTAL: "row 21: .* got 15; remove it if it is a total",
    "cat,0.0,0.0,1.0\ndog,0.0,1.0,0.0": "'label', row 1 must hold a class .a whole number., got 'cat'",
    "label,prob_0,prob_2,prob_3\n0,0.5,0.25,0.25\n1,0.5,0.25,0.25": "row 2 .* '0', '2', '3', got '1'",
    "label,prob\n0,25.5\n1,75.5": "must lie in 0..1, got 25.5 .*; divide percentages by 100",
    "label,score\n0,25.5\n1,75.5": "divide percentages by 100, or give --logits",
    "label,cat,dog\ncat,25.5%,74.5%": "column 'cat' must hold numbers: divide percentages by 100",
    "label,a_prob,b_prob\na,25.5%,74.5%": "must hold a number, got '25.5%'; divide percentages by 100",
    "label,m_a,m_b,n_a,n_b\na,0.75,0.25,0.5,0.5": "rows do not sum to 1; name the columns of all .* --scores",
    "label,score\nham,0.25\nspam,0.5": "labels of a single score .* got 'ham', 'spam' .* prob_X",
    "label,prob\n" + "0,0.75\n1,0.5\n" * 10: "no score in 'prob' is below 0.5.* 'predicted'",
    "target,predicted,confidence\n"
    + "0,no,0.75\n1,yes,0.5\n" * 10: "must call the classes by the same names",
    "label,cat,dog\ncat,0.75,0.25\n,,": "column 'cat', row 2 must hold a finite number, got nothing",
    "<html><body>404</body></html>": "a.csv has no rows",
    "y,prob\n0,3\n1,75": "row 1: probabilities must lie in 0..1, got 3 .*; divide percentages by 100",
    "label,prob_0\n0,0.9\n1,0.2": "one score column, 'prob_0', and a single score must be that of class 1",
    "label,prob_4,prob_5\n0,0.75,0.25\n1,0.5,0.5": "must lie in 4..5, got 0; if .* from 0, give --label-base 0",
    "label\n0": "no columns that look like scores: .* it has no other columns",
    HEADER + "0,0.25,0.75\n" * 20 + "1,1.5,-0.5": "row 21: .* got -0.5; remove it if it is a total",
    "correct,confidence\n1,75.0\n0,50.5": "row 1 must hold a confidence in 0..1, got 75",
    "correct,confidence\n2,0.75": "must say whether the answer was right",
    "label,predicted,confidence\na,,0.75": "column 'predicted', row 1 holds nothing",
    "id,label,class,prob\n1,a,a,0.5\n1,a,b,0.5\n2,b,a,0.5": "must have 2 rows for each sample",
    "id,label,class,prob\n1,a,a,0.5\n1,b,b,0.5": "one label for each sample",
}
BAD = {"logits": BAD_LOGITS, "probs": BAD_PROBS, None: BAD_UNSTATED}
BAD_CSV = [(kind, *case) for kind, cases in BAD.items() for case in cases.items()]


@pytest.mark.parametrize(("kind", "text", "message"), BAD_CSV)
def test_bad_csv_names_the_place(kind: Any, text: str, message: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", text)
    with pytest.raises(TableError, match=message):
        read_predictions(file, kind=kind).tally()


@pytest.mark.parametrize("name", ["plain.csv", "gzip.csv.gz", "a.parquet", "a.npz"])
def test_cut_off_and_empty_files(name: str, tmp_path: Path) -> None:
    file, whole = tmp_path / name, CONTENTS[name]()
    file.write_bytes(whole[: len(whole) - (8 if name == "plain.csv" else len(whole) // 3)])
    refused(rf"{name}.*truncated", file, kind="probs")
    file.write_bytes(b"")
    refused(rf"{name} is empty \(0 bytes\)", file, kind="probs")


def test_columns_of_parquet_that_are_text_ragged_or_missing_in_a_later_file(tmp_path: Path) -> None:
    text = as_parquet(tmp_path / "t.parquet", {**columns(), "logit_1": ["1", "2", "x", "3"]})
    refused("t.parquet: column 'logit_1' must hold numbers, got text", text, kind="logits")
    ragged = as_parquet(tmp_path / "r.parquet", {"label": [0, 1], "logits": [[1.0, 2.0], [3.0]]})
    refused(
        "r.parquet, column 'logits', row 2 must hold a list of 2 numbers, got none, or", ragged, kind="logits"
    )
    both = {"label": [0], "logits": [[1.0, 2.0]], "probs": [[0.5, 0.5]]}
    refused(
        r"several sets of score columns \(logits, probs, ...\)", as_parquet(tmp_path / "both.parquet", both)
    )
    short = columns()
    del short["logit_2"]
    files = [as_parquet(tmp_path / "a.parquet"), as_parquet(tmp_path / "b.parquet", short)]
    refused("b.parquet has no column 'logit_2', which .*a.parquet has", files, kind="logits")
    bad = {**columns(), "logit_0": np.array([1, 2, 3, np.nan], dtype=np.float32)}
    table = read_predictions(as_parquet(tmp_path / "a.parquet", bad, row_group_size=2), kind="logits")
    with pytest.raises(TableError, match="row 4 must hold a finite number"):  # its place in the file
        table.split()[1].tally()


def test_places_that_are_not_tables(tmp_path: Path) -> None:
    refused("nowhere.csv does not exist", tmp_path / "nowhere.csv", kind="logits")
    refused("holds no file that ends in one of .csv", tmp_path, kind="logits")
    refused("name of a file is empty", "", kind="logits")
    (tmp_path / "a.pt").write_text("x")
    refused("a.pt must end in one of", tmp_path / "a.pt", kind="logits")
    simple_csv(tmp_path / "a.csv")
    as_parquet(tmp_path / "a.parquet")
    refused("mixes files of .csv and .parquet", tmp_path, kind="logits")
    refused("has no column 'site', it has 'id', 'label'", tmp_path / "a.csv", kind="logits", by="site")
    np.save(tmp_path / "alone.npy", np.zeros((2, 2)))
    refused("alone.npy has no partner", tmp_path / "alone.npy", kind="logits")


def test_chunks_do_not_change_the_tally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = random_predictions(500)
    table = {"label": p.labels.numpy(), **{f"logit_{k}": p.logits[:, k].numpy() for k in range(7)}}
    file = as_parquet(tmp_path / "a.parquet", table, row_group_size=64)
    monkeypatch.setattr("doublehead.files.reading.CHUNK_ENTRIES", 7 * 50)
    source = read_predictions(file, kind="logits")
    sizes = [len(chunk.scores) for chunk in source.chunks()]
    assert max(sizes) == 50
    told: list[int] = []
    found = source.tally(advance=told.append)
    assert sum(told) == file.stat().st_size
    assert found.sums == Tally.of(p).sums
    pieces = [piece.tally() for piece in source.split()]
    assert len(pieces) == 8
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    assert total.top == found.top
    assert total.predicted == found.predicted


def scores_csv(path: Path, names: list[str], extra: str, kind: str, text: bool) -> Path:
    """Scores under names of classes, labels as names or numbers, and a column of decimal numbers that is no score."""
    p = random_predictions(200, len(names), 1.0)
    scores = p.logits if kind == "logits" else p.probs.double()
    rows = [
        f"{names[y] if text else int(y)},{','.join(f'{v:.6f}' for v in z)}" + (",31.5" if extra else "")
        for y, z in zip(p.labels.tolist(), scores.tolist())
    ]
    return write_csv(path, ",".join(["label", *names, *([extra] if extra else [])]), *rows)


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("text", [True, False], ids=["names", "numbers"])
def test_a_decimal_column_that_is_no_score_is_refused(kind: Any, text: bool, tmp_path: Path) -> None:
    names = ["ant", "bee", "cow"]
    file = scores_csv(tmp_path / "a.csv", names, "loss", kind, text)
    for stated in (kind, None):
        if text and kind == "probs":  # rows of the columns that labels name sum to 1
            assert read_predictions(file, kind=stated).layout.scores == tuple(names)
        else:
            refused("no label in 'label' stands for 'loss': name the score|sum to 1", file, kind=stated)
    named = read_predictions(file, kind=kind, scores=names)
    assert named.load().n_classes == 3
    assert read_predictions(file, kind=kind, like=named).layout.scores == tuple(names)
    fine = scores_csv(tmp_path / "b.csv", names, "", kind, text)
    assert read_predictions(fine, kind=kind).load().n_classes == 3


def test_rows_that_rounding_moved_from_one(tmp_path: Path) -> None:
    for row, is_rounded in (("0.33,0.33,0.33", True), ("0.3,0.3,0.3", False), ("0.3333,0.33,0.33", False)):
        file = write_csv(tmp_path / "a.csv", "label,a,b,c", "0,0.2,0.3,0.5", f"1,{row}")
        if is_rounded:
            assert len(read_predictions(file, kind="probs").load()) == 2
        else:
            refused("row 2: probabilities must sum to 1", file, kind="probs")


IDS = [f"{i % 2},0.25,{i}" for i in range(1001)]


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    file = simple_csv(tmp_path / "a.csv")
    refused(r"--tolerance\) must lie in 0..1, got nan", file, kind="logits", tolerance=math.nan)
    refused("must name a column", file, kind="logits", by="")
    with pytest.raises(ValueError, match="at most 1000 different values"):  # a column of ids
        read_predictions(write_csv(tmp_path / "ids.csv", "label,prob,id", *IDS), by="id").tally()
    for how in ({"by": "label"}, {"where": {"label": "2"}}):
        refused("cannot be selected or grouped by their label", file, kind="logits", **how)
    np.savez(tmp_path / "none.npz", logits=np.zeros((4, 0)), labels=np.zeros(4, dtype=int))
    refused("at least one score per row", tmp_path / "none.npz")
    (tmp_path / "b.csv").write_bytes(b"label,cat,dog\n\x00\x81,0.5,0.5\n")
    refused("b.csv must be text", tmp_path / "b.csv", kind="probs")


def test_dangerous_and_damaged_npz_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", logits=np.array([[1.0, 2.0]]), labels=np.array([{}], dtype=object))
    refused("a.npz must hold plain arrays, not pickled objects", tmp_path / "a.npz")
    file, logits = tmp_path / "a.npz", np.random.default_rng(0).normal(size=(500, 9))
    np.savez_compressed(file, logits=logits, labels=np.zeros(500, dtype=int))
    data = bytearray(file.read_bytes())
    data[200:400] = bytes(200)
    file.write_bytes(bytes(data))
    refused("a.npz cannot be read as npz", file)
    monkeypatch.setattr("doublehead.files.readers.MAX_UNPACKED", 1 << 20)
    n = 200_000
    np.savez_compressed(tmp_path / "a.npz", logits=np.zeros((n, 2)), labels=np.zeros(n, dtype=int))
    refused("GiB unpacked", tmp_path / "a.npz")  # a small file that unpacks to much


# --- files as people have them

TEXTS = {
    "decimal commas": "label;a;b\n0;0,75;0,25\n1;0,125;0,875\n1;0,5;0,5\n",
    "decimal commas, no header": "0;0,75;0,25\n1;0,125;0,875\n1;0,5;0,5\n",
    "spaces": "label, a, b\na, 0.75, 0.25\nb, 0.125, 0.875\nb, 0.5, 0.5\n",
    "no header": "0,0.75,0.25\n1,0.125,0.875\n1,0.5,0.5\n",
    "no header, label last": "0.75,0.25,0\n0.125,0.875,1\n0.5,0.5,1\n",
    "bars": "label|a|b\na|0.75|0.25\nb|0.125|0.875\nb|0.5|0.5\n",
    "commas in the names": "label;b, c, d, e;a, e\nb, c, d, e;0.75;0.25\na, e;0.125;0.875\na, e;0.5;0.5\n",
    "blanks": "label a b\na 0.75 0.25\nb 0.125 0.875\nb 0.5 0.5\n",
    "Excel's first line": "sep=;\nlabel;a;b\na;0,75;0,25\nb;0,125;0,875\nb;0,5;0,5\n",
    "blank lines first": "\n\nlabel,a,b\na,0.75,0.25\nb,0.125,0.875\nb,0.5,0.5\n",
    "R's row names": '"label" "a" "b"\n"1" "a" 0.75 0.25\n"2" "b" 0.125 0.875\n"3" "b" 0.5 0.5\n',
    "other case": "label,Cat,dog\nCAT ,0.75,0.25\nDog,0.125,0.875\ndog,0.5,0.5\n",
    "prefixes": "label,net_a,net_b\na,0.75,0.25\nb,0.125,0.875\nb,0.5,0.5\n",
    "numbers as names": "label,prob_1,prob_7\n1,0.75,0.25\n7,0.125,0.875\n7,0.5,0.5\n",
    "negative numbers": "label,-1,1\n-1,0.75,0.25\n1,0.125,0.875\n1,0.5,0.5\n",
    "numbers in disorder": "label,40,7\n40,0.75,0.25\n7,0.125,0.875\n7,0.5,0.5\n",
    "one probability": "label,prob\nFalse,0.25\nTrue,0.875\nTrue,0.5\n",
    "yes and no": "label,p\nNo,0.25\nYes,0.875\nYes,0.5\n",
    "one named probability": "y_true,p_spam\nham,0.25\nspam,0.875\nspam,0.5\n",
    "one probability of no": "label,prob_False\n1,0.25\n0,0.875\n0,0.5\n",
    "yes first": "label,True,False\nTrue,0.75,0.25\nFalse,0.125,0.875\nfalse,0.5,0.5\n",
    "yes first, labels are numbers": "y,prob_pos,prob_neg\n1,0.75,0.25\n0,0.125,0.875\n0,0.5,0.5\n",
    "floats as names": "label,prob_20.0,prob_10.0\n20.0,0.75,0.25\n10.0,0.125,0.875\n10,0.5,0.5\n",
    "floats as names in disorder": "label,1.0,0.0\n0.0,0.25,0.75\n1.0,0.875,0.125\n1,0.5,0.5\n",
    "one-hot": "y_a,y_b,p_a,p_b\n1,0,0.75,0.25\n0,1,0.125,0.875\n0,1,0.5,0.5\n",
    "ids": "row_id,gt,prob_a,prob_b\n7,a,0.75,0.25\n8,b,0.125,0.875\n9,b,0.5,0.5\n",
    "long": "id,label,class,prob\n0,a,a,0.75\n0,a,b,0.25\n1,b,a,0.125\n1,b,b,0.875\n2,b,a,0.5\n2,b,b,0.5\n",
    "names that end in a number": "label,stage1,stage2\nstage1,0.75,0.25\nstage2,0.125,0.875\nstage2,0.5,0.5\n",
    "numbers after a blank": "label,grade 1,grade 2\ngrade 1,0.75,0.25\ngrade 2,0.125,0.875\nGRADE 2,0.5,0.5\n",
    "a prefix, a word and a number": "label,p_kind 1,p_kind 2\nkind 1,0.75,0.25\nkind 2,0.125,0.875\nkind 2,0.5,0.5\n",
    "names like class_0": "label,class_0,class_1\nclass_0,0.75,0.25\nclass_1,0.125,0.875\nclass_1,0.5,0.5\n",
    "label is the name of a column": "label,p_a,p_b\np_a,0.75,0.25\np_b,0.125,0.875\nb,0.5,0.5\n",
    "counted from 1": "label,prob_1,prob_2\n1,0.75,0.25\n2.0,0.125,0.875\n2,0.5,0.5\n",
    "byte order mark": "\ufefflabel;a;b\na;0.75;0.25\nb;0.125;0.875\nb;0.5;0.5\n",
    "long, mixed": "sample,class,prob,gt\nu,b,0.25,a\nt,a,0.125,b\nu,a,0.75,a\nt,b,0.875,b\ns,a,0.5,b\ns,b,0.5,b\n",
}


def test_labels_of_several_belong_to_the_scores_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y_b,y_a,p_a,p_b\n1,0,0.75,0.25\n1,1,0.5,0.5\n")
    table = read_predictions(tmp_path / "a.csv", label="y_*", kind="probs")
    assert table.layout.labels == ("y_a", "y_b")
    assert table.load().labels.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("label", ["gt", "actual", "category", "True Class", "y_true", "Ground Truth"])
@pytest.mark.parametrize(
    "scores", ["{}_prob", "softmax_{}", "Prob({})", "prob_{}", "P(y={})", "{} probability"]
)
def test_names_that_are_guessed(label: str, scores: str, tmp_path: Path) -> None:
    header = ",".join([label, scores.format("a"), "age", scores.format("b")])
    rows = [f"{'ab'[y]},{p[0]},31.5,{p[1]}" for y, p in zip(TRUTH, PROBS)]
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]) + "\n")
    table = read_predictions(tmp_path / "a.csv")
    assert table.load().probs.tolist() == PROBS
    assert table.layout.classes == ("a", "b")


def plain() -> bytes:
    rows = [f"{y},{p[0]},{p[1]}" for y, p in zip(TRUTH, PROBS)]
    return "\n".join(["label,prob_0,prob_1", *rows, ""]).encode()


def as_table() -> Any:
    return pa.table({"label": TRUTH, "prob_0": [p[0] for p in PROBS], "prob_1": [p[1] for p in PROBS]})


def as_json_lines(lists: bool = True) -> bytes:
    names = (lambda p: {"probs": p}) if lists else (lambda p: {"prob_0": p[0], "prob_1": p[1]})
    return "".join(json.dumps({"label": y, **names(p)}) + "\n" for y, p in zip(TRUTH, PROBS)).encode()


def as_arrow() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, as_table().schema) as writer:
        writer.write_table(as_table(), max_chunksize=2)
    return sink.getvalue()


def as_parquet_bytes(table: Any) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


def as_npz_bytes(**arrays: Any) -> bytes:
    sink = io.BytesIO()
    np.savez(sink, **arrays)
    return sink.getvalue()


def as_pipeline() -> bytes:
    """A line of {"truth": "b", "scores": [{"label": "b", "score": 0.875}, ...]} per sample, the likeliest first."""
    lines = []
    for y, p in zip(TRUTH, PROBS):
        pairs = sorted(({"label": c, "score": s} for c, s in zip("ab", p)), key=lambda pair: -pair["score"])
        lines.append(json.dumps({"truth": "ab"[y], "scores": pairs}) + "\n")
    return "".join(lines).encode()


CONTENTS = {
    **{f"{case}.csv": text.encode for case, text in TEXTS.items()},
    "plain.csv": plain,
    "table.txt": plain,
    "gzip.csv.gz": lambda: gzip.compress(plain()),
    "windows-1252.csv": lambda: b"label;caf\xe9;b\ncaf\xe9;0,75;0,25\nb;0,125;0,875\nb;0,5;0,5\n",
    "a.parquet": lambda: as_parquet_bytes(as_table()),
    "booleans.parquet": lambda: as_parquet_bytes(
        pa.table({"label": [True, False, False], **dict(zip(("True", "False"), zip(*PROBS)))})
    ),
    "lists.parquet": lambda: as_parquet_bytes(pa.table({"label": TRUTH, "probs": PROBS})),
    "categories.parquet": lambda: as_parquet_bytes(
        pa.table({"label": pa.array(list("abb")).dictionary_encode(), **dict(zip("ab", zip(*PROBS)))})
    ),
    "a.npz": lambda: as_npz_bytes(probs=PROBS, labels=TRUTH),
    "old mac.csv": lambda: plain().replace(b"\n", b"\r"),
    "list.json": lambda: b"[" + b",".join(as_json_lines(False).splitlines()) + b"]",
    "nested.jsonl": lambda: b"".join(
        json.dumps({"label": "ab"[y], "out": {"id": 1, "probs": dict(zip("ab", p))}}).encode() + b"\n"
        for y, p in zip(TRUTH, PROBS)
    ),
    "pipeline.jsonl": as_pipeline,
    "columns.npz": lambda: as_npz_bytes(probs=PROBS, labels=np.array(TRUTH)[:, None]),
    "one-hot.npz": lambda: as_npz_bytes(probs=PROBS, labels=np.eye(2)[TRUTH]),
    "classes.npz": lambda: as_npz_bytes(
        probs=PROBS, labels=np.array(list("abb")), classes=np.array(list("ab"))
    ),
    "gzip by content.csv": lambda: gzip.compress(plain()),
    "utf-16.csv": lambda: plain().decode().encode("utf-16"),
    "big endian.csv": lambda: b"\xfe\xff" + plain().decode().encode("utf-16-be"),
    "windows.csv": lambda: plain().replace(b"\n", b"\r\n"),
    "a.jsonl": lambda: as_json_lines(False),
    "lists.ndjson": lambda: as_json_lines(True),
    "gzip by content.jsonl": lambda: gzip.compress(as_json_lines(False)),
    "a.jsonl.gz": lambda: gzip.compress(as_json_lines(True)),
    "a.arrow": as_arrow,
    "a.feather": as_arrow,
}


@pytest.mark.parametrize("name", CONTENTS)
def test_layouts_formats_and_encodings_without_a_flag(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(CONTENTS[name]())
    p = read_predictions(tmp_path / name, label="y_*" if name == "one-hot.csv" else None).load()
    assert p.probs.tolist() == PROBS
    assert p.labels.tolist() == TRUTH


@pytest.mark.parametrize("content", [plain, as_arrow, as_json_lines])
def test_standard_input(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content())))
    assert read_predictions("-").load().probs.tolist() == PROBS


TOP_LABEL = {
    "pipeline": "label,score,true_label\na,0.75,a\na,0.5,b\nb,0.875,b\n",
    "predicted": "label,predicted,confidence\na,a,0.75\nb,a,0.5\nb,b,0.875\n",
    "numbers": "y_true,y_pred,conf\n1,1,0.75\n2,1.0,0.5\n2,2,0.875\n",
    "correct": "correct,confidence\n1,0.75\n0,0.5\n1,0.875\n",
    "words": "confidence,is_correct\n0.75,true\n0.5,False\n0.875,TRUE\n",
    "top-k": "label,class_1,prob_1,class_2,prob_2\na,a,0.75,b,0.25\nb,a,0.5,b,0.5\nb,b,0.875,a,0.125\n",
    "top1": "label,top1_class,top1_prob,top2_class,top2_prob\na,a,0.75,b,0.25\nb,a,0.5,b,0.5\nb,b,0.875,a,0.125\n",
    "ranked": "label,pred_1,confidence_1,pred_2,confidence_2\na,a,0.75,b,0.25\nb,a,0.5,b,0.5\nb,b,0.875,a,0.125\n",
}


@pytest.mark.parametrize("case", TOP_LABEL)
def test_the_confidence_in_the_predicted_class_alone(case: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TOP_LABEL[case])
    table = read_predictions(tmp_path / "a.csv")
    (chunk,) = table.chunks()
    assert isinstance(chunk.predictions, Outcomes)
    assert chunk.predictions.confidence.tolist() == [0.75, 0.5, 0.875]
    assert chunk.predictions.correct.tolist() == [True, False, True]
    summary = table.tally().summary()
    assert summary.values["accuracy"] == pytest.approx(2 / 3)
    assert "nll" not in summary.metrics
    assert "3 predictions" in str(summary)
    with pytest.raises(TableError, match="a score for every class is needed"):
        table.load()


def test_groups_by_the_predicted_class_and_not_by_whether_it_is_right(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TOP_LABEL["predicted"])
    groups = read_predictions(tmp_path / "a.csv", by="predicted").tally().groups
    assert {name: tally.n for name, tally in groups.items()} == {"a": 2, "b": 1}
    (tmp_path / "a.csv").write_text(TOP_LABEL["correct"])
    with pytest.raises(TableError, match="cannot be selected or grouped by their label .'correct'"):
        read_predictions(tmp_path / "a.csv", by="correct")


def test_folders_named_by_a_column_and_files_named_twice(tmp_path: Path) -> None:
    for site in ("north", "south"):
        (tmp_path / "new" / f"site={site}").mkdir(parents=True)
        (tmp_path / "new" / f"site={site}" / "part.csv").write_bytes(plain())
    groups = read_predictions(tmp_path / "new", by="site").tally().groups
    assert {name: tally.n for name, tally in groups.items()} == {"north": 3, "south": 3}
    assert read_predictions(tmp_path / "new", where={"site": "north"}).tally().n == 3
    file, link = tmp_path / "new/site=north/part.csv", tmp_path / "link.csv"
    link.symlink_to(file)
    assert read_predictions([file, str(file), link]).tally().n == 3


def test_excel(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [["label", "prob_0", "prob_1"], *([y, *p] for y, p in zip(TRUTH, PROBS))]:
        book.active.append(row)
    book.save(tmp_path / "a.xlsx")
    assert read_predictions(tmp_path / "a.xlsx").load().probs.tolist() == PROBS
    book.active["B3"] = None
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(TableError, match="'prob_0', row 2 must hold a finite number, got nothing"):
        read_predictions(tmp_path / "a.xlsx").load()


def wide_lines(scores: Any, texts: list[str]) -> list[str]:
    header = ",".join(["text", *(f"logit_{i}" for i in range(scores.shape[1])), "label", "site"])
    rows = zip(texts, scores.tolist(), range(len(texts)))
    return [header, *(",".join([text, *map(str, row), str(i), "ab"[i % 2]]) for text, row, i in rows)]


@pytest.mark.parametrize("case", ["plain", "windows", "mac", "zipped", "quotes", "line break in quotes"])
def test_wide_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "WIDE_BLOCK", 1 << 15)  # so that there are several
    scores = np.random.default_rng(0).normal(size=(12, 2000)).round(4)
    odd = {"quotes": '"x, y"', "line break in quotes": '"x\ny"'}.get(case, "")
    text = "\n".join(wide_lines(scores, ["t"] * 9 + [odd] + ["t"] * 2)) + "\n"
    content = text.replace("\n", {"windows": "\r\n", "mac": "\r"}.get(case, "\n")).encode()
    file = tmp_path / "a.csv"
    file.write_bytes(gzip.compress(content) if case == "zipped" else content)
    table = read_predictions(file, by="site", extra=["text"])
    chunks = list(table.chunks())
    assert np.array_equal(np.concatenate([chunk.scores for chunk in chunks]), scores)
    texts = np.concatenate([chunk.batch.columns["text"] for chunk in chunks]).tolist()
    assert texts[9] == odd.strip('"')
    assert table.load().labels.tolist() == list(range(12))
    assert {name: group.n for name, group in table.tally().groups.items()} == {"a": 6, "b": 6}


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("x", "column 'logit_1', row 10 must hold a number, got 'x'"),
        ("", "column 'logit_1', row 10 must hold a finite number, got nothing"),
        ("1.0,1.0", "row 10 has 2004 values where the header has 2003"),
    ],
)
def test_wide_files_name_the_place(cell: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(formats, "WIDE_BLOCK", 1 << 15)
    lines = wide_lines(np.random.default_rng(0).normal(size=(12, 2000)).round(4), ["t"] * 12)
    cells = lines[10].split(",")
    lines[10] = ",".join([*cells[:2], cell, *cells[3:]])
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.raises(TableError, match=message):
        read_predictions(tmp_path / "a.csv").tally()


def test_frames_in_one_json_object_are_refused(tmp_path: Path) -> None:
    frame = pytest.importorskip("pandas").DataFrame(
        {"label": [0, 1, 1], "p_0": [0.9, 0.2, 0.4], "p_1": [0.1, 0.8, 0.6]}
    )
    for orient in ("columns", "index", "split"):
        for rows in (frame, frame[frame.label == 1]):
            rows.to_json(tmp_path / "a.json", orient=orient)
            refused(r"one of columns: .* to_json\(path, orient='records', lines=True\)", tmp_path / "a.json")
    frame.to_json(tmp_path / "a.json", orient="records", lines=True)
    assert len(read_predictions(tmp_path / "a.json").load()) == 3
    (tmp_path / "b.json").write_text('{"label": 1, "probs": {"0": 0.25, "1": 0.75}}\n')  # a row
    assert read_predictions(tmp_path / "b.json").load().probs.tolist() == [[0.25, 0.75]]


def test_files_of_different_classes_are_named(tmp_path: Path) -> None:
    for name, k in (("a", 3), ("b", 4)):
        np.savez(
            tmp_path / f"{name}.npz",
            logits=np.random.default_rng(0).normal(size=(5, k)),
            labels=np.arange(5) % k,
        )
    table = read_predictions([tmp_path / "a.npz", tmp_path / "b.npz"])
    for read in (table.load, table.tally):
        with pytest.raises(TableError, match=r"b\.npz has 4 scores in a row, but the first file has 3"):
            read()


def test_scores_of_three_dimensions_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", logits=np.zeros((4, 5, 3)), labels=np.zeros((4, 5), dtype=int))
    refused(r"a\.npz: 'logits' must hold scores \(N, K\), got shape \(4, 5, 3\)", tmp_path / "a.npz")
    np.save(tmp_path / "x.npy", np.zeros((4, 5, 3)))
    np.save(tmp_path / "y.npy", np.zeros(4, dtype=int))
    refused(
        r"'scores' must hold scores \(N, K\), got shape \(4, 5, 3\)", [tmp_path / "x.npy", tmp_path / "y.npy"]
    )
    np.savez(
        tmp_path / "b.npz", images=np.zeros((4, 5, 3)), logits=np.zeros((4, 3)), labels=np.zeros(4, dtype=int)
    )
    assert len(read_predictions(tmp_path / "b.npz").load()) == 4
