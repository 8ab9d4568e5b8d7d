"""What can reduce between ranks, made alike for ``crossreduce bench``: PyTorch's process groups, and MPI's world.

In: arrays in host memory.  Out: functions that run a collective once. Knows no clock and prints nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .trainers import load

Call = Callable[[], None]


class Task(Protocol):
    """Which collective, and the reduction's name in this library."""

    @property
    def collective(self) -> str:
        """all_reduce, reduce, broadcast, all_gather or reduce_scatter."""

    @property
    def op(self) -> str:
        """sum, product, min, max or mean."""


class Engine(Protocol):
    """Ranks that can reduce: what the loop asks of them."""

    rank: int
    size: int

    def array(self, x: np.ndarray[Any, Any]) -> Any:
        """Return a copy of an array, as the engine takes it."""

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """Return its elements."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank."""

    def call(self, task: Task, source: Any, result: Any, root: int, in_place: bool) -> Call:
        """Return the collective. In place it leaves its result in ``source``."""


class Torch:
    """A process group of PyTorch's."""

    def __init__(self, group: Any, control: Any) -> None:
        """Take the group that is measured, and the one that brings the times together."""
        import torch
        import torch.distributed as dist

        self._dist, self._group, self._control = dist, group, control
        self._averages = dist.get_backend(group) != "gloo"  # gloo has no average: its users divide
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._framework = load("torch", ("cpu:0",))
        torch.set_num_threads(1)

    def array(self, x: np.ndarray[Any, Any]) -> Any:
        return self._framework.put(x, "cpu:0")

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return self._framework.get(x)

    def gather(self, value: Any) -> list[Any]:
        found = [None] * self.size
        self._dist.all_gather_object(found, value, group=self._control)
        return found

    def call(self, task: Task, source: Any, result: Any, root: int, in_place: bool) -> Call:
        dist, group, size = self._dist, self._group, self.size
        names = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "mean": "AVG"}
        # torch 2.13 renamed them.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        divides = task.op == "mean" and not self._averages
        op = getattr(dist.ReduceOp, "SUM" if divides else names[task.op])

        def divided(x: Any) -> None:
            if divides:
                x.div_(size)

        def reduced(x: Any) -> None:
            if task.collective == "all_reduce":
                dist.all_reduce(x, op, group=group)
            else:
                dist.reduce(x, root, op, group=group)
            divided(x)

        def out_of_place() -> None:  # PyTorch's are in place: whoever needs the inputs copies them
            result.copy_(source)
            reduced(result)

        def scattered() -> None:
            scatter(result, source, op, group=group)
            divided(result)

        return {
            "broadcast": lambda: dist.broadcast(source, root, group=group),
            "all_gather": lambda: gather(result, source, group=group),
            "reduce_scatter": scattered,
        }.get(task.collective, (lambda: reduced(source)) if in_place else out_of_place)


class Mpi:
    """MPI's world."""

    def __init__(self) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def array(self, x: np.ndarray[Any, Any]) -> Any:
        return x.copy()

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def gather(self, value: Any) -> list[Any]:
        return list(self._world.allgather(value))

    def call(self, task: Task, source: Any, result: Any, root: int, in_place: bool) -> Call:
        mpi, world, size = self._mpi, self._world, self.size
        op = {"sum": mpi.SUM, "mean": mpi.SUM, "product": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[task.op]

        def after(x: np.ndarray[Any, Any]) -> None:  # MPI has no average: its users divide
            if task.op == "mean":
                np.divide(x, size, out=x)

        def all_reduce() -> None:
            world.Allreduce(mpi.IN_PLACE if in_place else source, source if in_place else result, op)
            after(source if in_place else result)

        def reduce() -> None:
            here = self.rank == root
            into = source if in_place else result
            world.Reduce(mpi.IN_PLACE if in_place and here else source, into if here else None, op, root)
            after(into if here else np.empty(0))

        def scatter() -> None:
            world.Reduce_scatter_block(source, result, op)
            after(result)

        return {
            "all_reduce": all_reduce,
            "reduce": reduce,
            "broadcast": lambda: world.Bcast(source, root),
            "all_gather": lambda: world.Allgather(source, result),
            "reduce_scatter": scatter,
        }[task.collective]
