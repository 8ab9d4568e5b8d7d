"""The work of one process in a collective of JAX devices: first among its devices, then with the other processes.

Input: the description of a call, the group of its processes, and the addresses of the devices' arrays. Output: the
written results. ``process_group`` decides which call runs when.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from .. import kernels
from ..kernels import FusedProgram, Kernel, Segment
from ..ops import KERNEL_OPS, Numbers, ReduceOp
from ..packing import itemsize
from ..processes import RankGroup
from ..processes.weighted_mean import as_array
from ..ranks.array_views import ArrayView

Array = np.ndarray[Any, Any]
_KEPT_NBYTES: Final = 1 << 16  # the largest buffer that a call keeps for the next one
SENT_NBYTES: Final = 1 << 11
"""The most bytes that a process sends together with the offer of a call. Then every process reduces the parts of all,
in the same order, and the call is one exchange instead of two."""


def array_at(address: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return the array at an address, which must live as long as the result."""
    return as_array(ArrayView(address, math.prod(shape), dtype, shape))


def address_of(array: Array) -> int:
    """Return the address of an array."""
    return int(array.__array_interface__["data"][0])


class Job:
    """A collective of one call site and one group of devices, which runs any number of times.

    ``text``: describes the call, see ``engines.jax.process_calls``. ``group``: the number of the group of devices.
    ``members``: the processes of the group, in order. ``own``: the place of this process in ``members``.
    """

    def __init__(self, text: str, group: int, members: Sequence[int], own: int) -> None:
        call = json.loads(text)
        op, *rest = call["numbers"]
        self.numbers = Numbers(ReduceOp(op), *rest)
        self.kind, self.program, self.axes = call["kind"], call["program"], call["axes"]
        self.shapes = [tuple(shape) for shape in call["shapes"]]
        self.positions = call["positions"]
        self.processes = processes = call["processes"][group * self.positions : (group + 1) * self.positions]
        # For each process the positions of its devices.
        self.places = [[k for k, process in enumerate(processes) if process == member] for member in members]
        self.own, self.devices = own, len(self.places[own])
        self.most = max(map(len, self.places))  # devices of a process
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.total = sum(self.sizes)
        self._starts = [0, *itertools.accumulate(self.sizes[:-1])]  # of the operands in a flat array
        self._sent_at_once: bool | None = None
        self.runs = 0
        self._kept: dict[str, Array] = {}
        self._kernels: dict[str, Kernel] = {}

    def words(self) -> str:
        """Return a description for errors."""
        numbers = self.numbers
        what = self.kind if self.kind in ("all_gather", "all_to_all") else f"{self.kind} {numbers.op.value}"
        shapes = ", ".join(f"{numbers.dtype}{list(shape)}" for shape in self.shapes[:3])
        more = ", ..." * (len(self.shapes) > 3)
        owners = ", ".join(map(str, self.processes[:16])) + ", ..." * (len(self.processes) > 16)
        return f"{what} of {shapes}{more} over {self.axes}, on devices of processes {owners}, in {self.program}"

    def run(self, group: RankGroup, addresses: Sequence[int]) -> None:
        """Run the collective. ``addresses``: for each device of this process those of its operands and results."""
        rows, count = self._rows(addresses), len(self.shapes)
        sources, results = [row[:count] for row in rows], [row[count:] for row in rows]
        if self.total == 0:
            return
        getattr(self, f"_{self.kind}")(group, sources, results)

    # all_reduce

    def is_sent_at_once(self) -> bool:
        """Return whether this reduction is so small that its parts are sent together with the offer of the call."""
        if self._sent_at_once is None:
            nbytes = self.total * itemsize(self.numbers.accumulator)
            self._sent_at_once = self.kind == "all_reduce" and not self.numbers.exact and 0 < nbytes <= SENT_NBYTES
        return self._sent_at_once

    def part(self, addresses: Sequence[int]) -> Array:
        """Return what this process contributes, as bytes, if ``is_sent_at_once``."""
        flat = self._array("partial", self.numbers.accumulator, (self.total,))
        count = len(self.shapes)
        self._combine([row[:count] for row in self._rows(addresses)], flat)
        return flat.view(np.uint8)

    def reduce_parts(self, parts: Sequence[Array], addresses: Sequence[int]) -> None:
        """Write the results, given the contributions of all processes, in order."""
        numbers, count = self.numbers, len(self.shapes)
        kinds = numbers.accumulator, numbers.accumulator, numbers.result
        kernel = self._kernel("parts", KERNEL_OPS[numbers.op, False], kinds, numbers.divisor, len(parts), self.devices)
        size, firsts = itemsize(numbers.accumulator), list(map(address_of, parts))
        sources = [tuple(first + start * size for first in firsts) for start in self._starts]
        results = [row[count:] for row in self._rows(addresses)]
        self._run(kernel, sources, list(zip(*results, strict=True)), 0)

    def _rows(self, addresses: Sequence[int]) -> list[Sequence[int]]:
        """Return the addresses of each device."""
        each = len(addresses) // self.devices
        return [addresses[k * each : (k + 1) * each] for k in range(self.devices)]

    def _all_reduce(self, group: RankGroup, sources: list[Any], results: list[Any]) -> None:
        numbers = self.numbers
        op = "sum" if numbers.op is ReduceOp.MEAN else numbers.op.value
        if self.most == 1 and len(self.sizes) == 1 and numbers.dtype == numbers.result:
            # The mean of n processes with one device each is that of the group.
            source, result = (array_at(row[0][0], numbers.dtype, (self.total,)) for row in (sources, results))
            group.all_reduce(source, numbers.op, out=result, exact=numbers.exact)
            return
        if numbers.exact:
            flat = self._exact(group, sources)
            self._finish(flat, numbers.result, 1, results)
            return
        flat = self._array("partial", numbers.accumulator, (self.total,))
        self._combine(sources, flat)
        group.all_reduce(flat, op, out=flat)
        self._finish(flat, numbers.accumulator, numbers.divisor, results)

    def _combine(self, sources: list[Any], flat: Array) -> None:
        """Combine the operands of the devices of this process into one flat array of the accumulator's dtype."""
        numbers, size = self.numbers, itemsize(self.numbers.accumulator)
        op, kinds = KERNEL_OPS[numbers.op, False], (numbers.dtype, numbers.accumulator, numbers.accumulator)
        kernel = self._kernel("combine", op, kinds, 1, self.devices, 1)
        first = address_of(flat)
        self._run(
            kernel, list(zip(*sources, strict=True)), [(first + start * size,) for start in self._starts], flat.nbytes
        )

    def _finish(self, flat: Array, dtype: str, divisor: float, results: list[Any]) -> None:
        """Write a flat array to the results of all devices of this process, divided and rounded."""
        kinds = (dtype, dtype, self.numbers.result)
        kernel = self._kernel("finish", KERNEL_OPS[self.numbers.op, False], kinds, divisor, 1, self.devices)
        first, size = address_of(flat), itemsize(dtype)
        sources = [(first + start * size,) for start in self._starts]
        self._run(kernel, sources, list(zip(*results, strict=True)), flat.nbytes * self.devices)

    def _exact(self, group: RankGroup, sources: list[Any]) -> Array:
        """Return the exact sums of all devices' operands. Each process computes a share of them."""
        numbers, count = self.numbers, group.size
        share = -(-self.total // count)
        sent = self._array("sent", numbers.dtype, (count, self.most, share))
        own = np.full((self.most, count * share), -0.0, sent.dtype)  # adding -0.0 changes no sum
        for device, row in enumerate(sources):
            np.concatenate(
                [array_at(at, numbers.dtype, (size,)) for at, size in zip(row, self.sizes, strict=True)],
                out=own[device, : self.total],
            )
        sent[...] = own.reshape(self.most, count, share).swapaxes(0, 1)
        received = group.all_to_all(sent)
        summed = np.empty(share, jnp.dtype(numbers.result))
        fold = FusedProgram(1, ((0, *range(count * self.most)),), (~0,))
        dtypes = numbers.dtype, numbers.accumulator, numbers.result
        kernel = kernels.compile_kernel(
            "exact_sum", dtypes, numbers.divisor, count * self.most, 1, (share,), (fold,), (Segment(0, 0, share, 0),)
        )
        rows = received.reshape(count * self.most, share)
        self._run(kernel, [[row.ctypes.data for row in rows]], [[summed.ctypes.data]], received.nbytes)
        return group.all_gather(summed).reshape(-1)[: self.total]

    # the others, on bytes

    def _all_gather(self, group: RankGroup, sources: list[Any], results: list[Any]) -> None:
        nbytes = self.total * itemsize(self.numbers.dtype)
        outs = [array_at(row[0], "uint8", (self.positions, nbytes)) for row in results]
        in_order = self.most == 1 and [places[0] for places in self.places] == [*range(self.positions)]
        if in_order:
            group.all_gather(array_at(sources[0][0], "uint8", (nbytes,)), out=outs[0])
            return
        sent = self._array("sent", "uint8", (self.most, nbytes))
        for device, row in enumerate(sources):
            sent[device] = array_at(row[0], "uint8", (nbytes,))
        received = self._array("received", "uint8", (group.size, self.most, nbytes))
        group.all_gather(sent, out=received)
        for member, places in enumerate(self.places):
            for device, position in enumerate(places):
                for out in outs:
                    out[position] = received[member, device]

    def _reduce_scatter(self, group: RankGroup, sources: list[Any], results: list[Any]) -> None:
        numbers, share = self.numbers, self.total // self.positions
        kind, divisor = numbers.accumulator, numbers.divisor
        flat = self._array("partial", kind, (self.positions, share))
        self._combine(sources, flat)
        sent = self._array("sent", kind, (group.size, self.most, share))
        for member, places in enumerate(self.places):
            sent[member, : len(places)] = flat[places]
        own = group.reduce_scatter(sent, "sum")
        dtypes = (kind, kind, numbers.result)
        program, segment = FusedProgram(1, ((0, 0),), (~0,)), Segment(0, 0, share, 0)
        kernel = kernels.compile_kernel("sum", dtypes, divisor, 1, 1, (share,), (program,), (segment,))
        for device, row in enumerate(results):
            self._run(kernel, [[own[device].ctypes.data]], [[row[0]]], own[device].nbytes)

    def _all_to_all(self, group: RankGroup, sources: list[Any], results: list[Any]) -> None:
        nbytes = self.total // self.positions * itemsize(self.numbers.dtype)
        shape = (group.size, self.most, self.most, nbytes)  # process, device that sends, device that receives
        sent, received = self._array("sent", "uint8", shape), self._array("received", "uint8", shape)
        for device, row in enumerate(sources):
            rows = array_at(row[0], "uint8", (self.positions, nbytes))
            for member, places in enumerate(self.places):
                for slot, position in enumerate(places):
                    sent[member, device, slot] = rows[position]
        group.all_to_all(sent, out=received)
        for device, row in enumerate(results):
            out = array_at(row[0], "uint8", (self.positions, nbytes))
            for member, places in enumerate(self.places):
                for slot, position in enumerate(places):
                    out[position] = received[member, slot, device]

    # memory and kernels

    def _array(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        """Return an array with undefined elements. Small ones are kept for the next run; large ones are from a pool."""
        nbytes = math.prod(shape) * itemsize(dtype)
        found = self._kept.get(name)
        if found is None:
            found = np.frombuffer(kernels.memory(nbytes), np.uint8).view(jnp.dtype(dtype)).reshape(shape)
            if nbytes <= _KEPT_NBYTES:
                self._kept[name] = found
        return found

    def _kernel(
        self, name: str, op: str, dtypes: tuple[str, str, str], divisor: float, sources: int, results: int
    ) -> Kernel:
        if name not in self._kernels:
            program = FusedProgram(1, ((0, *range(sources)),), (~0,) * results)
            segments = tuple(Segment(tensor, 0, size, 0) for tensor, size in enumerate(self.sizes) if size)
            self._kernels[name] = kernels.compile_kernel(
                op, dtypes, divisor, sources, results, tuple(self.sizes), (program,), segments
            )
        return self._kernels[name]

    @staticmethod
    def _run(kernel: Kernel, sources: Any, results: Any, nbytes: int) -> None:
        threads = kernels.threads() if nbytes >= kernels.THREADED_BYTES else 1
        kernel.run(sources, results, threads, nbytes >= kernels.STREAMING_BYTES, False)
