"""The CUDA engine: compiled kernels reduce batches in the memory of CUDA devices.

Input: a layout on CUDA devices (and on the host, whose arrays are copied to and from one of them). Output: launches and
copies, queued on the callers' current streams without waiting. Arrays in one device's memory are reduced in one launch.
If devices can read each other's memory, their kernels do so; otherwise the driver copies. ``fusion.py``,
``batching.py`` and ``streams.py`` make the plan, ``native/plan.cpp`` runs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ...devices import parse
from ...frameworks import Array
from ...ops import Numbers
from ..base import Executable, Layout, PreparedRun
from ..loop import ENGINE as LOOP
from . import driver
from .batching import operations
from .encoding import plan_of
from .kernels import MAX_ADDRESSES, is_supported
from .memory import DeviceMemory, Operands, device_memory
from .streams import Operations


class _Placed(NamedTuple):
    """The physical devices of a layout.

    ``numbers`` has the driver's number of each device, by name. ``host_sources`` and ``host_destinations`` are the
    positions of the sources and destinations on the host, whose arrays are copied to and from the device ``proxy``.
    """

    numbers: dict[str, int]
    proxy: str
    host_sources: tuple[int, ...]
    host_destinations: tuple[int, ...]


@lru_cache(maxsize=1024)
def _placement(layout: Layout) -> _Placed | None:
    """Return the physical devices of a layout, or ``None`` if no device is a CUDA device, or one cannot be used."""
    names = {*layout.sources, *layout.destinations, *(name for program in layout.programs for name in program.devices)}
    parsed = {name: parse(name) for name in names}
    if any(device.host or device.kind not in ("cuda", "cpu") for device in parsed.values()):
        return None
    cuda = sorted(device.index for device in parsed.values() if device.kind == "cuda")
    if not cuda:
        return None
    memory = _memory(layout)
    ordinals = {index: memory.ordinal(index) for index in {*cuda}}
    usable = {index: number for index, number in ordinals.items() if number is not None}
    if len(usable) < len(ordinals):
        return None
    numbers = {name: usable[device.index if device.kind == "cuda" else cuda[0]] for name, device in parsed.items()}
    on_host = [
        tuple(k for k, name in enumerate(each) if parsed[name].kind == "cpu")
        for each in (layout.sources, layout.destinations)
    ]
    return _Placed(numbers, f"cuda:{cuda[0]}", on_host[0], on_host[1])


def _memory(layout: Layout) -> DeviceMemory:
    memory = device_memory(layout.framework.name)
    assert memory is not None
    return memory


def _jax_module() -> Any:
    return importlib.import_module(".jax", __package__)


def _is_custom_call(layout: Layout) -> bool:
    """Return whether XLA runs a layout by a custom call, as for JAX arrays that are traced or on one CUDA device."""
    return layout.framework.name == "jax" and bool(_jax_module().supports(layout))


class CudaEngine:
    """See ``engines.base.Engine``."""

    name = "cuda"
    checks_overlap = False

    def supports(self, layout: Layout) -> bool:
        """Return whether sizes are known, devices are CUDA (and perhaps CPU) devices, and the driver works."""
        if not layout.is_sized or layout.mixed or device_memory(layout.framework.name) is None:
            return False
        if _is_custom_call(layout):
            return not driver.unusable()
        placed = None if layout.on_host else _placement(layout)
        if placed is None or driver.unusable():
            return False
        numbers = {*placed.numbers.values()}
        return max(numbers) < int(driver.native().device_count()) and not any(map(driver.lacks_kernels, numbers))

    def bind(self, layout: Layout, arrays: Sequence[Sequence[Array]]) -> Any | None:
        """Return addresses, or the arrays of a custom call, or ``None`` if the engine cannot run these arrays."""
        if _is_custom_call(layout):
            return _jax_module().bind(layout, arrays)
        memory, placed = _memory(layout), _placement(layout)
        assert placed is not None
        if placed.host_sources:
            move = layout.framework.to_device
            arrays = [
                [move(x, placed.proxy) if k in placed.host_sources else x for k, x in enumerate(row)] for row in arrays
            ]
        return memory.operands(arrays, [placed.numbers[name] for name in layout.sources])

    def compile(self, layout: Layout, numbers: Numbers, with_out: bool) -> Executable:
        converts = numbers.divisor != 1 or numbers.result != numbers.dtype
        too_many = len(layout.sources) + len(layout.destinations) > MAX_ADDRESSES
        unsupported = not is_supported(numbers) or too_many or (len(layout.sources) == 1 and converts)
        if _is_custom_call(layout):
            by_loop = unsupported or not layout.nbytes
            return LOOP.compile(layout, numbers, with_out) if by_loop else _jax_module().JaxExecutable(layout, numbers)
        if unsupported:
            return _ByLoop(layout, numbers)
        return CudaExecutable(layout, numbers, with_out)


class _ByLoop:
    """The executable of a layout that the kernels cannot reduce: the loop engine runs it."""

    prepared = None

    def __init__(self, layout: Layout, numbers: Numbers) -> None:
        self._executable = LOOP.compile(layout, numbers, False)

    def run(self, operands: Operands, out: Sequence[Sequence[Array]] | None) -> Sequence[Sequence[Array]]:
        return self._executable.run(operands.arrays, out)


class _Planned(NamedTuple):
    """Operations and their compiled plan."""

    operations: Operations
    plan: Any


class CudaExecutable:
    """Queues the operations of a layout on streams. See ``engines.base.Executable``.

    If the devices can read each other's memory, the first plan does so. Another one copies between devices. It is made
    when the memory of an array is such that other devices cannot read it.
    """

    def __init__(self, layout: Layout, numbers: Numbers, with_out: bool) -> None:
        memory, placed = _memory(layout), _placement(layout)
        assert placed is not None
        self._memory, self._framework = memory, layout.framework
        self._shapes, self._dtype = layout.shapes, numbers.result
        self._devices = [placed.numbers[name] for name in layout.destinations]
        self._on_host = {k: layout.destinations[k] for k in placed.host_destinations}
        physical = sorted(set(placed.numbers.values()))
        for number in physical:
            driver.load_kernels(number)

        def plan(has_peers: bool) -> _Planned:  # ``has_peers``: kernels may read the memory of other devices
            enable = driver.native().enable_peer
            readable = tuple(tuple(a == b or (has_peers and enable(a, b)) for b in physical) for a in physical)
            planned = operations(layout, numbers, placed.numbers, readable, with_out)
            return _Planned(planned, plan_of(planned, any(row.count(True) > 1 for row in readable)))

        self._new_plan = plan
        self.planned = plan(len(physical) > 1 and driver.allows_peers())
        self._otherwise: _Planned | None = None
        is_preparable = self.planned.operations.operations and not (placed.host_sources or placed.host_destinations)
        self.prepared = PreparedRun(self.planned.plan) if is_preparable else None

    def run(self, operands: Operands, out: Sequence[Sequence[Array]] | None) -> Sequence[Sequence[Array]]:
        """Queue the operations on the current streams."""
        memory, queued = self._memory, self.planned.operations
        writable = self._framework.writable_array
        on_host = [{k: writable(row[k], name) for k, name in self._on_host.items()} for row in out or ()]
        # New arrays are needed for all destinations, or, with ``out``, only for those on the host.
        fresh = [k for k in range(len(self._devices)) if out is None or k in self._on_host]
        results = memory.allocate_all(self._shapes, self._dtype, [self._devices[k] for k in fresh])
        addresses_by_destination = [{} for _ in self._shapes] if out is None else self._addresses_in(out)
        for row, addresses in zip(results, addresses_by_destination, strict=True):
            addresses.update((k, memory.address(x)) for k, x in zip(fresh, row, strict=True))
        targets = [[addresses[k] for k in range(len(self._devices))] for addresses in addresses_by_destination]
        owners: list[Any] = [operands, results]  # of all memory, until everything is queued
        with memory.queueing(queued.devices if queued.operations else (), results) as finished:
            if queued.operations and not self._queue(self.planned, operands.addresses, targets, owners):
                if self._otherwise is None:
                    self._otherwise = self._new_plan(False)
                    self.planned.plan.use_otherwise(self._otherwise.plan)
                self._queue(self._otherwise, operands.addresses, targets, owners)
        if out is not None:
            for row, host_row in zip(finished, on_host, strict=True):
                for k, x in zip(fresh, row, strict=True):
                    self._framework.write(host_row[k], self._framework.to_device(x, self._on_host[k]))
            memory.mark_dirty(out)
            return out
        move = self._framework.to_device
        return [[move(x, self._on_host[k]) if k in self._on_host else x for k, x in enumerate(row)] for row in finished]

    def _queue(self, planned: _Planned, sources: Any, targets: list[list[int]], owners: list[Any]) -> bool:
        """Queue a plan's operations, or return ``False`` if its kernels cannot read the memory of other devices.

        ``owners`` of the memory get those of the temporary memory, and the plan, whose streams a capture may use. A
        graph that captures the operations keeps them.
        """
        queued, plan = planned
        scratch: list[tuple[Any, int]] = [
            self._memory.scratch(size, device) if size else (None, 0)
            for size, device in zip(queued.scratch, queued.devices, strict=True)
        ]
        owners += [scratch, plan]
        streams = [self._memory.stream(device) for device in queued.devices]
        kept = None if len(streams) == 1 and self._memory.belongs_to_graphs else owners
        return bool(plan.run(sources, targets, [[address for _, address in scratch]], [streams], kept))

    def _addresses_in(self, out: Sequence[Sequence[Array]]) -> list[dict[int, int]]:
        """Return for each tensor the addresses of its arrays of ``out`` on CUDA devices, by destination."""
        on_cuda = {k: device for k, device in enumerate(self._devices) if k not in self._on_host}
        rows = [[row[k] for k in on_cuda] for row in out]
        address_rows = self._memory.writable_outputs(rows, list(on_cuda.values()))
        return [dict(zip(on_cuda, addresses, strict=True)) for addresses in address_rows]


ENGINE: Final = CudaEngine()
