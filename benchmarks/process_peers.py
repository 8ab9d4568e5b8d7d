"""All-reduces between 8 processes of this machine: gloo through ``torch.distributed``, and Open MPI through mpi4py."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
from common import summary
from contenders import Arrays, Batch, Contender, N, installed, plain_sum


class Gloo:
    """gloo's in-place all_reduce in processes that block on a pipe between the calls and use no CPU then."""

    def __init__(self, batch: Batch):
        import torch.multiprocessing as mp

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._sources = batch.tensors[0]
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._tensors = [shared(x) for x in self._sources]
        self._pipes, self._processes = [], []
        for rank, tensor in enumerate(self._tensors):
            mine, its = context.Pipe()
            arguments = (rank, len(self._sources), f"{self._folder.name}/rendezvous", tensor, its)
            self._processes.append(context.Process(target=gloo_rank, args=arguments, daemon=True))
            self._pipes.append(mine)
        for process in self._processes:
            process.start()
        atexit.register(self.end)
        self._wait()  # until the rendezvous is complete
        check = partial(self._check, batch)
        self.contender = Contender(batch, self.run, lambda tensors: [[x.numpy() for x in tensors]], None, check)

    def run(self) -> list[Any]:
        """Run one all-reduce."""
        for pipe in self._pipes:
            pipe.send(True)
        self._wait()
        return self._tensors

    def end(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def _wait(self) -> None:
        for pipe in self._pipes:
            pipe.recv()

    def _check(self, batch: Batch, _: Arrays) -> None:
        """Check one all-reduce of the original data, since the timed calls have summed the tensors repeatedly."""
        for x, tensor in zip(self._sources, self._tensors, strict=True):
            tensor.numpy()[:] = x
        batch.check([[x.numpy() for x in self.run()]], exact=False)


def shared(x: np.ndarray) -> Any:
    """Return a copy of an array as a tensor in shared memory."""
    import torch

    return torch.from_numpy(x.copy()).share_memory_()


def gloo_rank(rank: int, world: int, rendezvous: str, tensor: Any, pipe: Any) -> None:
    """Run one process of ``Gloo``."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    dist.barrier()
    pipe.send(True)
    while pipe.recv():
        dist.all_reduce(tensor)
        pipe.send(True)
    dist.destroy_process_group()


def open_mpi(size: int, repeats: int) -> dict[str, float] | None:
    """Return a ``summary`` of times of MPI_Allreduce of ``size`` float32; ``None``: MPI or mpi4py is missing or fails.

    MPI processes wait actively, so they run alone instead of in turn with other contenders.
    """
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None or not installed("mpi4py"):
        print(f"  Open MPI is not measured: {'mpi4py' if mpiexec else 'mpiexec'} is not installed")
        return None
    words = ["-n", str(N), "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    command = [mpiexec, *words, sys.executable, __file__, str(size), str(repeats)]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        print(f"  Open MPI failed: {done.stderr.strip()[-300:]}")
        return None
    return summary(json.loads(done.stdout))


def mpi_rank(size: int, repeats: int) -> None:
    """Run one process of ``open_mpi``; rank 0 prints the seconds of each repeat."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    ranks = [world.rank] if world.rank else range(world.size)
    xs = [np.random.default_rng(rank).standard_normal(size, np.float32) for rank in ranks]
    x = xs[0]
    out, times = np.full_like(x, np.nan), []
    for _ in range(repeats + 1):
        world.Barrier()
        start = time.perf_counter()
        world.Allreduce(x, out)
        world.Barrier()
        times.append(time.perf_counter() - start)
    if world.rank == 0:
        tolerance = 2.001 * 7 * 2.0**-24 * plain_sum([np.abs(x) for x in xs])
        assert (np.abs(out - plain_sum(xs)) <= tolerance).all()
        print(json.dumps(times[1:]))


if __name__ == "__main__":
    mpi_rank(*map(int, sys.argv[1:]))
