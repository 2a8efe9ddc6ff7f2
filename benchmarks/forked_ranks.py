"""Forked ranks that run one function, for the benchmarks of several processes."""

import os
import socket
import sys

import torch


def in_ranks(processes: int, threads: int, target, *args):
    """Run `target(*args)` in `processes` forked ranks; return the value of rank 0. Imports are done before the fork."""
    results = torch.multiprocessing.get_context("fork").SimpleQueue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    everything = (processes, port, threads, results, target, args)
    torch.multiprocessing.start_processes(_rank, everything, processes, start_method="fork")
    return results.get()


def _rank(rank: int, world: int, port: int, threads: int, results, target, args) -> None:
    torch.set_num_threads(threads)
    if world > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        os.environ |= dict(zip(names, map(str, (rank, rank, world, world, "127.0.0.1", port)), strict=True))
    result = target(*args)
    if rank == 0:
        results.put(result)
    sys.stdout.flush()
    os._exit(0)  # skips the teardown of a process group that other ranks still use
