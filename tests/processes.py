"""Two real processes for tests, and how they end."""

import gc
from collections.abc import Callable
from multiprocessing import get_all_start_methods, set_forkserver_preload
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes


def in_two_processes(work: Callable[[int, Path], None], folder: Path) -> None:
    """Run `work(rank, folder)` in two new processes that form a gloo group.

    `work` must be a function of a module. The processes are forked from a small server that has imported torch and used
    none of it: after threads of OpenMP or of autograd have run, a fork is not safe.
    """
    method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    set_forkserver_preload(["doublehead", "doublehead.training.loop"])  # before the server starts
    start_processes(_one, args=(work, folder), nprocs=2, start_method=method)


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
