"""Collectives inside JAX programs: under ``shard_map``, ``pmap`` and ``vmap``, in ``jit``, through ``grad``.

Input: a pytree of this device's arrays, and the name of the axis. Output: the same tree of results on every device.
They use the compiled kernels (on CPU devices of one process, or of several), XLA's own collectives, or schedules that
``engines.jax`` runs. Outside such programs, ``crossreduce.all_reduce`` reduces lists of per-device arrays.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

try:
    import jax
except ImportError as error:
    from ..frameworks import missing_framework

    raise missing_framework("crossreduce.jax needs JAX, but", "jax", error) from error

from ..engines.jax import process_calls
from .collectives import all_gather, all_to_all, reduce_scatter
from .reduction import all_reduce

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def _serve_processes() -> None:
    from .process_group import start  # slow to import, and only jobs of several processes need it

    start()


process_calls.servers.append(_serve_processes)


def _announce() -> None:
    """Let other processes of the job notice if this one ends before its first collective."""
    with contextlib.suppress(Exception):  # another version of JAX; the first collective raises an error
        from . import coordination

        coordination.announce()


def _announce_on_initialize() -> None:
    """Announce this process as soon as it is in a job of ``jax.distributed.initialize``."""
    initialize = jax.distributed.initialize

    @functools.wraps(initialize)
    def initialize_and_announce(*arguments: Any, **named: Any) -> None:
        initialize(*arguments, **named)
        _announce()

    jax.distributed.initialize = initialize_and_announce
    if jax.distributed.is_initialized():
        _announce()


_announce_on_initialize()
