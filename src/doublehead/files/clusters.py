"""Predictions too large for one machine: the same tally, made by the workers of a Dask cluster.

Dask and not Ray: its scheduler and workers are pure Python (2.5 MB of wheels against 79 MB), run on every Python and
system that torch does, and start on SLURM, Kubernetes, SSH or one machine. The work is split into row groups of
Parquet files, whole files otherwise. Sums are whole numbers, so the result has the same bits however it is split.

Workers need doublehead installed and must see the files under the same paths.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from doublehead.files.reading import PredictionTable
from doublehead.files.sources import NoRows
from doublehead.optional import require
from doublehead.summary import Tally

MAX_PIECES = 2000  # tasks, to keep the load on the scheduler small
CONNECT_SECONDS = 20


def tally_on(
    cluster: Any, table: PredictionTable, n_bins: int = 15, advance: Callable[[int], None] | None = None
) -> Tally:
    """`table.tally(n_bins, advance)`, made on a Dask cluster.

    `cluster` is a `distributed.Client`, the address of a scheduler ("tcp://10.0.0.1:8786"), or "local" for one
    worker process per core of this machine. A script that starts a local cluster must do so under
    `if __name__ == "__main__":`, because each worker imports the script.
    """
    pieces = _pieces(table)
    distributed = require("distributed", extra="cluster")
    found: Tally | None = None
    with connect(cluster) as client:
        futures = client.map(_tally_piece, pieces, n_bins=n_bins, pure=False)
        try:
            for future in distributed.as_completed(futures):
                n_bytes, part = future.result()
                future.release()
                found = part if found is None else found if part is None else found + part
                if advance is not None:
                    advance(n_bytes)
        finally:
            client.cancel(futures)
    if found is None:
        wanted = "".join(f" with {name}={value}" for name, value in table.where.items())
        raise NoRows(f"no rows in {table.name}{wanted}")
    return found


@contextmanager
def connect(cluster: Any) -> Iterator[Any]:
    """A client of the cluster; a client or cluster started here is stopped at the end."""
    distributed = require("distributed", extra="cluster")
    if isinstance(cluster, distributed.Client):
        yield cluster
    elif cluster == "local":
        workers = os.cpu_count() or 1
        with (
            distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=logging.ERROR
            ) as local,
            distributed.Client(local) as client,
        ):
            yield client
    else:
        try:
            client = distributed.Client(cluster, timeout=CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            raise ConnectionError(f"no Dask scheduler answers at {cluster!r}") from error
        with client:
            yield client


def _pieces(table: PredictionTable) -> list[PredictionTable]:
    pieces = table.split()
    return pieces if len(pieces) <= MAX_PIECES else table.split(-(-len(pieces) // MAX_PIECES))


def _tally_piece(piece: PredictionTable, n_bins: int) -> tuple[int, Tally | None]:
    """Runs on a worker. A piece may be empty; only a table may not."""
    try:
        return piece.n_bytes, piece.tally(n_bins)
    except NoRows:
        return piece.n_bytes, None
