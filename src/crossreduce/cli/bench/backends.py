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
        self._averages = dist.get_backend(group) != "gloo"  # gloo has no AVG
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
        names = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "mean": "AVG"}
        # torch 2.13 renamed these two.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        divides = op == "mean" and not self._averages
        reduce_op = getattr(dist.ReduceOp, "SUM" if divides else names[op])

        def divide(x: Any) -> None:
            if divides:
                x.div_(size)

        def reduce(x: Any) -> None:
            if collective == "all_reduce":
                dist.all_reduce(x, reduce_op, group=group)
            else:
                dist.reduce(x, root, reduce_op, group=group)
            divide(x)

        def out_of_place() -> None:  # PyTorch reduces in place: a program that needs its inputs has to copy them
            result.copy_(source)
            reduce(result)

        def reduce_scatter() -> None:
            scatter(result, source, reduce_op, group=group)
            divide(result)

        return {
            "broadcast": lambda: dist.broadcast(source, root, group=group),
            "all_gather": lambda: gather(result, source, group=group),
            "reduce_scatter": reduce_scatter,
        }.get(collective, (lambda: reduce(source)) if in_place else out_of_place)


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

        def divide(x: NDArray[Any]) -> None:  # MPI has no average
            if op == "mean":
                np.divide(x, size, out=x)

        def all_reduce() -> None:
            world.Allreduce(mpi.IN_PLACE if in_place else source, source if in_place else result, mpi_op)
            divide(source if in_place else result)

        def reduce() -> None:
            here = self.rank == root
            into = source if in_place else result
            world.Reduce(mpi.IN_PLACE if in_place and here else source, into if here else None, mpi_op, root)
            divide(into if here else np.empty(0))

        def reduce_scatter() -> None:
            world.Reduce_scatter_block(source, result, mpi_op)
            divide(result)

        return {
            "all_reduce": all_reduce,
            "reduce": reduce,
            "broadcast": lambda: world.Bcast(source, root),
            "all_gather": lambda: world.Allgather(source, result),
            "reduce_scatter": reduce_scatter,
        }[collective]
