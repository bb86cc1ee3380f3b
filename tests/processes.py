"""Two real processes for tests, and how they end."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def in_two_processes(work: Callable[[int, Path], None], folder: Path) -> None:
    """Run `work(rank, folder)` in two new processes that form a gloo group.

    `work` must be a function of a module. Forked processes have imported everything already. A forked process waits for
    ever for a thread of OpenMP that its parent has started: neither may use a second one.
    """
    method = "fork" if sys.platform.startswith("linux") else "spawn"
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.multiprocessing.start_processes(_one, args=(work, folder), nprocs=2, start_method=method)
    finally:
        torch.set_num_threads(n_threads)


def _one(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    work(rank, folder)
    leave()


def leave() -> None:
    """Take the group down after what used it is freed and before the interpreter shuts down.

    A thread of gloo frees the tensors of the last collective and needs Python's lock for that. Where a
    DistributedDataParallel holds the last reference to the group, its end waits for the thread while holding the lock:
    the process hangs. Where the group lives until the shutdown, the thread finds no interpreter: SIGABRT. Both happen
    only if the thread is late, as on a busy machine. `destroy_process_group` waits without the lock.
    """
    gc.collect()
    dist.barrier()  # nobody closes a connection that the other one still reads from
    dist.destroy_process_group()
