"""The tally on a real local Dask cluster of two processes: the same bits as one process."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doublehead.files import reading
from doublehead.files.reading import TableError, read_predictions
from samples import overconfident

distributed = pytest.importorskip("distributed")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    how = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    how["silence_logs"] = logging.CRITICAL
    with distributed.LocalCluster(**how) as cluster, distributed.Client(cluster) as client:
        assert len(client.scheduler_info()["workers"]) == 2
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    for part in range(3):
        p = overconfident(900, 5, 1.0, spread=4.0, seed=part)
        table = {"label": p.labels.numpy(), "site": [f"site {i % 2}" for i in range(900)]}
        table |= {f"logit_{k}": p.logits[:, k].numpy() for k in range(5)}
        parquet.write_table(pa.table(table), folder / f"{part}.parquet", row_group_size=250)
    parquet.write_table(pa.table(table).slice(0, 0), folder / "empty.parquet")
    return folder


def test_the_same_bits_as_one_process(client: Any, folder: Path) -> None:
    table = read_predictions(folder, kind="logits", by="site")
    wanted = table.tally()
    told: list[int] = []
    found = table.tally(advance=told.append, cluster=client)
    assert len(told) == 3 * 4 + 1  # row groups, one of them empty
    assert found.n == 2700
    assert found.top == wanted.top
    assert found.classwise == wanted.classwise
    assert (found.sums, found.squares) == (wanted.sums, wanted.squares)
    assert sorted(found.groups) == sorted(wanted.groups) == ["site 0", "site 1"]
    for site, tally in wanted.groups.items():
        assert found.groups[site].top == tally.top
        assert found.groups[site].sums == tally.sums
    assert found.summary().to_dict() == wanted.summary().to_dict()
    by_address = table.tally(cluster=client.scheduler.address)
    assert by_address.top == wanted.top


def test_work_is_spread_over_processes(client: Any, folder: Path) -> None:
    before = client.run(lambda dask_worker: repr(list(dask_worker.state.log)[-1:]))  # its length is bounded
    read_predictions(folder, kind="logits").tally(cluster=client)
    after = client.run(lambda dask_worker: repr(list(dask_worker.state.log)[-1:]))
    assert len(after) == 2
    assert all(after[worker] != before[worker] for worker in after)


def test_errors_come_back_in_the_same_words(client: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="4 files .* have no rows with site=nowhere"):
        read_predictions(folder, kind="logits", where={"site": "nowhere"}).tally(cluster=client)
    bad = {"label": [0, 1, 5], "logit_0": [1.0, 2.0, 3.0], "logit_1": [0.0, 1.0, 2.0]}
    parquet.write_table(pa.table(bad), tmp_path / "bad.parquet", row_group_size=2)
    with pytest.raises(TableError, match=r"bad.parquet, column 'label', row 3: labels of 2 classes"):
        read_predictions(tmp_path, kind="logits").tally(cluster=client)


def test_many_row_groups_become_few_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_PIECES", 6)
    pieces = read_predictions(folder, kind="logits").split()
    assert len(pieces) == 7  # three row groups each, and what is left of each file
    parts = [reading._tally_piece(piece, 15)[1] for piece in pieces]
    assert [part.n for part in parts if part is not None] == [750, 150] * 3  # the empty file counts nothing


def test_nobody_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CONNECT_SECONDS", 0.2)
    with pytest.raises(ConnectionError, match="no Dask scheduler answers at 'tcp://127.0.0.1:1'"):
        read_predictions(folder, kind="logits").tally(cluster="tcp://127.0.0.1:1")
