"""Custom calls of XLA for collectives among CPU devices of several processes (``native/xla/process_calls.cpp``).

Input: a lowering context of JAX, and the description of a collective. Output: the target and the attributes of the
custom call. Its text is the same in all processes, and ``jax/process_group.py`` finds matching calls by it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import jax

from ... import kernels
from ...ops import Numbers
from .axes import MeshAxes
from .in_process_limits import limit_s

_LOG: Final = logging.getLogger("crossreduce")
TARGET: Final = "crossreduce_process_call"
PROCESS_LIMIT_S: Final = 300.0
"""How long a process waits for others by default: they may load data, or compile, at different times."""

servers: Final[list[Callable[[], None]]] = []
"""Functions that let this process take part in such calls, called before the first one is lowered."""


def processes_of(ctx: Any, axes: MeshAxes, others: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the process of each device, in an order in which the devices of a group follow one another.

    Return ``None`` if the mesh of the program is not known while it is lowered, or has axes that XLA partitions.
    """
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    names = (*others, *axes.names)
    if not isinstance(mesh, jax.sharding.Mesh) or set(names) != set(mesh.axis_names):
        return None
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in names])
    return tuple(device.process_index for device in devices.flat)


def spans_processes(processes: Sequence[int], positions: int) -> bool:
    """Return whether any group of devices has devices of several processes."""
    groups = [processes[k : k + positions] for k in range(0, len(processes), positions)]
    return any(len({*group}) > 1 for group in groups)


def attributes(
    ctx: Any, kind: str, numbers: Numbers, shapes: Sequence[Sequence[int]], axes: MeshAxes, processes: Sequence[int]
) -> dict[str, Any]:
    """Return the attributes of the custom call of a collective.

    ``kind``: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all". ``shapes``: of the operands.
    """
    from jax.extend.mlir import ir

    register()
    program = ir.StringAttr(ctx.module_context.module.operation.attributes["sym_name"]).value
    described = {
        "program": program,
        "call": ctx.module_context.new_channel(),  # numbers the collectives of a program, in the order of the program
        "kind": kind,
        "numbers": [numbers.op.value, *numbers[1:]],
        "shapes": [list(shape) for shape in shapes],
        "axes": str(axes),
        "positions": axes.devices,
        "processes": list(processes),
    }
    return {
        "call": ir.StringAttr.get(json.dumps(described, separators=(",", ":"))),
        "processes": ir.DenseI64ArrayAttr.get([axes.devices, *processes]),
    }


@lru_cache(maxsize=1)
def register() -> None:
    """Register the custom call with JAX, once."""
    handlers = kernels.native().process_call_handlers(jax.process_index(), limit_s())
    jax.ffi.register_ffi_target(TARGET, handlers, platform="cpu")
    # Two equal calls of a program are told apart by their order, so each thread must know where a program ends.
    for serve in servers:
        serve()
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    _warn_of_few_threads()


def _warn_of_few_threads() -> None:
    """Warn if programs in flight could stop this process.

    A program runs in one thread of XLA per device. XLA starts it there, too, which blocks the thread while 32 programs
    of the device are unfinished (``PjRtCpuClient``). If no thread is left for a device, the others wait for it in vain.
    """
    devices = len(jax.local_devices(backend="cpu"))
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(ValueError):
        processors = int(os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or processors)
    if devices > 1 and max(processors, devices) < 2 * devices:
        _LOG.warning(
            "XLA has %d threads for %d devices: more than 31 unfinished programs can stop this process. "
            "Set PJRT_NPROC=%d before JAX starts, or call jax.block_until_ready at least every 30 steps.",
            *(max(processors, devices), devices, 2 * devices),
        )


def _on_event(event: str, *_: Any, **__: Any) -> None:
    if event.endswith("backend_compile_duration"):
        kernels.native().end_program()


def process_limit_s() -> float:
    """Return how long a process waits for other processes: ``CROSSREDUCE_JAX_TIMEOUT``, or 300 s."""
    return limit_s() if "CROSSREDUCE_JAX_TIMEOUT" in os.environ else PROCESS_LIMIT_S
