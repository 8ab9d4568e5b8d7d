"""Adapters of the libraries that ``crossreduce bench`` measures between ranks: torch.distributed's backends, and MPI.

Input: NumPy arrays. Output: functions that run a collective once. The adapters neither measure time nor print.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..trainers import load

Call = Callable[[], None]


class Backend(Protocol):
    """One rank's access to a library that can run collectives."""

    rank: int
    size: int

    def array(self, x: NDArray[Any]) -> Any:
        """Return a copy of an array, in the library's type."""

    def numpy(self, x: Any) -> NDArray[Any]:
        """Return the elements of one of the library's arrays."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank."""

    def call(self, collective: str, op: str, source: Any, result: Any, root: int, in_place: bool) -> Call:
        """Return a function that runs a collective on this rank's ``source``, which may be reduced in place.

        ``root`` is that of reduce and broadcast. In place, the result is written to ``source`` and not to ``result``.
        """


class TorchBackend:
    """A process group of ``torch.distributed``."""

    def __init__(self, group: Any, control: Any) -> None:
        """Measure ``group``; ``gather`` uses the group ``control``."""
        import torch
        import torch.distributed as dist

        self._dist, self._group, self._control = dist, group, control
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._trainer = load("torch", ("cpu:0",))
        torch.set_num_threads(1)

    def array(self, x: NDArray[Any]) -> Any:
        return self._trainer.put(x, "cpu:0")

    def numpy(self, x: Any) -> NDArray[Any]:
        return self._trainer.get(x)

    def gather(self, value: Any) -> list[Any]:
        found = [None] * self.size
        self._dist.all_gather_object(found, value, group=self._control)
        return found

    def call(self, collective: str, op: str, source: Any, result: Any, root: int, in_place: bool) -> Call:
        dist, group, size = self._dist, self._group, self.size
        # torch 2.13 renamed these two.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        divides = op == "mean" and dist.get_backend(group) == "gloo"  # gloo has no AVG
        names = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "mean": "SUM" if divides else "AVG"}
        reduce_op = getattr(dist.ReduceOp, names[op])
        into = source if in_place else result

        def run() -> None:
            if collective == "broadcast":
                dist.broadcast(source, root, group=group)
            elif collective == "all_gather":
                gather(result, source, group=group)
            elif collective == "reduce_scatter":
                scatter(result, source, reduce_op, group=group)
            else:
                if not in_place:  # PyTorch reduces in place: a program that needs its inputs has to copy them
                    result.copy_(source)
                if collective == "all_reduce":
                    dist.all_reduce(into, reduce_op, group=group)
                else:
                    dist.reduce(into, root, reduce_op, group=group)
            if divides:
                into.div_(size)

        return run


class MpiBackend:
    """MPI's ``COMM_WORLD``."""

    def __init__(self) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def array(self, x: NDArray[Any]) -> Any:
        return x.copy()

    def numpy(self, x: Any) -> NDArray[Any]:
        return np.asarray(x)

    def gather(self, value: Any) -> list[Any]:
        return list(self._world.allgather(value))

    def call(self, collective: str, op: str, source: Any, result: Any, root: int, in_place: bool) -> Call:
        mpi, world, size = self._mpi, self._world, self.size
        mpi_op = {"sum": mpi.SUM, "mean": mpi.SUM, "product": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[op]

        into, here = source if in_place else result, collective != "reduce" or self.rank == root
        given = mpi.IN_PLACE if in_place and here else source

        def run() -> None:
            if collective == "broadcast":
                world.Bcast(source, root)
            elif collective == "all_gather":
                world.Allgather(source, result)
            elif collective == "reduce_scatter":
                world.Reduce_scatter_block(source, result, mpi_op)
            elif collective == "all_reduce":
                world.Allreduce(given, into, mpi_op)
            else:
                world.Reduce(given, into if here else None, mpi_op, root)
            if op == "mean" and here:  # MPI has no average
                np.divide(into, size, out=into)

        return run
