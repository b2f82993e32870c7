"""Processes that stay for all tests: ranks of a gloo group, which run what they are sent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import pytest
import torch

LIMIT = 120  # seconds that a test may take in the ranks


def serve(rank, ranks, place, connection, timeout, device):
    """A rank: it joins the group, and runs what comes until nothing more does."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    many = device == "cuda" and torch.cuda.device_count() >= ranks
    if device == "cuda":
        torch.cuda.set_device(rank if many else 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=timeout)
    backend = "nccl" if many else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=ranks, init_method=f"file://{place}", timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, ranks + 1)}
    while (job := connection.recv()) is not None:
        fn, args = job
        try:
            answer = None, fn(groups, *args)
        except Exception as error:
            answer = (type(error).__name__, str(error), traceback.format_exc()), None
        connection.send(answer)


class World:
    """Some ranks, over gloo; of device "cuda" over NCCL where each has a GPU of its own, else all on one."""

    def __init__(self, ranks, timeout=60, device="cpu"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "sartor.distributed", "cases"])
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            args = rank, ranks, f"{self.folder.name}/store", theirs, timeout, device
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            self.connections.append(mine)
            self.processes.append(process)

    def answers(self, ranks, fn, *args):
        """What each of the first ranks gives: (error or None, result)."""
        for connection in self.connections[:ranks]:
            connection.send((fn, args))
        found = []
        for rank, connection in enumerate(self.connections[:ranks]):
            ready = wait([connection, self.processes[rank].sentinel], timeout=LIMIT)
            if connection in ready:
                try:
                    found.append(connection.recv())
                    continue
                except EOFError:
                    pass
            found.append((("Lost", f"rank {rank} ended" if ready else "no answer in time", ""), None))
        return found

    def run(self, ranks, fn, *args):
        """The results of all of them; an error of one is this test's."""
        answers = self.answers(ranks, fn, *args)
        for rank, (error, _) in enumerate(answers):
            assert error is None, f"rank {rank}: {error[2]}"
        return [result for _, result in answers]

    def end(self):
        """Let them go."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


@pytest.fixture(scope="session")
def world():
    """Four ranks, and groups of the first 1, 2, 3 and 4 of them."""
    made = World(4)
    yield made
    made.end()


@pytest.fixture(scope="session")
def large_world():
    """Eight ranks."""
    made = World(8)
    yield made
    made.end()


@pytest.fixture(scope="session")
def gpu_world():
    """Four ranks with CUDA tensors."""
    made = World(4, device="cuda")
    yield made
    made.end()


@pytest.fixture(scope="session")
def two_gpus():
    """Two ranks over NCCL, each with a GPU of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, got {torch.cuda.device_count()}")
    made = World(2, device="cuda")
    yield made
    made.end()


@pytest.fixture
def lone_world():
    """Makes worlds that a test may break."""
    made = []

    def make(ranks, timeout):
        made.append(World(ranks, timeout))
        return made[-1]

    yield make
    for one in made:
        one.end()
