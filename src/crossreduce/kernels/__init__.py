"""Kernels for host memory: the compiled ones, and the same functions in NumPy as fallback and oracle.

In: a program (what is added to what, in which order), spans, and arrays as buffers or addresses.  Out: filled
results. A ``Plan`` reads every source once and writes every result once, a cache line at a time, however many steps
the program has; tensors are read and written where they lie. It knows no schedules, devices or frameworks.

The compiled kernels choose their instruction set when they are loaded: ``avx512``, ``avx2`` or ``baseline``. The
environment decides over that: ``CROSSREDUCE_KERNELS`` names one of them, or ``numpy``; ``CROSSREDUCE_NUM_THREADS``
says how many threads may work on one reduction.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

from ..errors import ArgumentError, BackendError, message, shown

_LOG: Final = logging.getLogger("crossreduce")

# A result of at least so many bytes, of all replicas together, goes past the cache: it would not stay in it anyway.
PAST_CACHE_BYTES: Final = 1 << 22
# Results of at least so many bytes are in memory that is kept for the next results (see ``memory``). Smaller ones come
# from the framework's own allocator, which keeps what is below the C library's threshold for mapping, 128 KiB at first.
KEPT_BYTES: Final = 1 << 17
# Below so many bytes read and written, waking another thread costs more than it helps.
THREADED_BYTES: Final = 1 << 20


class Program(NamedTuple):
    """What is done to each element.

    An operand is a source, ``0, 1, ...``, or a slot, ``~0, ~1, ...``, which holds a value on the way. ``folds``
    run in order: ``(slot, *operands)`` combines the operands, left to right, in the accumulator's dtype, and leaves the
    value in the slot; the slot itself may be the first operand and no other. ``results`` says for each
    result which operand it is.
    """

    slots: int
    folds: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]


class Segment(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor, counted in C order, and the number of the program that makes them."""

    tensor: int
    start: int
    stop: int
    program: int


class Plan(Protocol):
    """A batch of tensors of one dtype, ready to run as often as one likes."""

    def run(
        self,
        sources: Sequence[Sequence[Any]],
        results: Sequence[Sequence[Any]],
        threads: int,
        past_cache: bool,
        apart: bool,
    ) -> tuple[int, int] | None:
        """Reduce a batch.

        Args:
          sources: for each tensor its sources, each an object with the buffer protocol, an address (an int;
            C order), or ``(address, shape, strides)`` with strides in bytes.
          results: for each tensor its results, each a writable buffer or an address, in C order.
          threads: how many may work, the caller included.
          past_cache: whether results are written past the cache.
          apart: first look whether results share memory with each other, or with a source other than by being
            exactly that source of the same tensor; if so, nothing is written.
        Returns:
          ``(tensor, result)`` of a result that is not apart, else ``None``.
        """


@cache
def native() -> Any:
    """Return the compiled module, or ``None`` where it was not built."""
    try:
        return importlib.import_module("._native", __name__)
    except ImportError as error:
        _LOG.info("kernels: no compiled ones here (%s); NumPy computes instead", error)
        return None


@cache
def instruction_set() -> str:
    """Return what the kernels run on: ``"avx512"``, ``"avx2"``, ``"baseline"`` or ``"numpy"``.

    Raises:
      BackendError: ``CROSSREDUCE_KERNELS`` names something that this machine or this build does not have.
    """
    here = [*(native().supported() if native() else []), "numpy"]
    wanted = os.environ.get("CROSSREDUCE_KERNELS") or here[0]
    if wanted not in here:
        raise BackendError(
            message(
                "CROSSREDUCE_KERNELS names kernels that cannot run here.", shown(wanted), "one of " + ", ".join(here)
            )
        )
    return wanted


def plan(
    op: str,
    numbers: tuple[str, str, str, int],
    sources: int,
    results: int,
    sizes: tuple[int, ...],
    programs: tuple[Program, ...],
    segments: tuple[Segment, ...],
) -> Plan:
    """Return a plan for the kernels that run here.

    Args:
      op: ``"sum"``, ``"min"``, ``"max"`` or ``"product"``.
      numbers: the dtypes of sources, accumulator and results, by name, and what results are divided by.
      sources: how many each tensor has.
      results: how many each tensor has.
      sizes: of the tensors, in elements.
      programs: what is done.
      segments: where. Elements that are in none are not written.

    >>> import numpy as np
    >>> mean = plan("sum", ("float16", "float32", "float16", 2), 2, 1, (2,), (Program(1, ((0, 0, 1),), (~0,)),),
    ...             (Segment(0, 0, 2, 0),))
    >>> out = np.empty(2, np.float16)
    >>> mean.run([[np.float16([40000, 1]), np.float16([40000, 2])]], [[out]], 1, False, False)
    >>> out
    array([4.0e+04, 1.5e+00], dtype=float16)
    """
    chosen = instruction_set()
    dtype, accumulator, result, divisor = numbers
    if chosen == "numpy":
        from .reference import Plan as Reference

        return Reference(op, dtype, accumulator, result, divisor, sources, results, sizes, programs, segments)
    made: Plan = native().Plan(
        chosen, op, dtype, accumulator, result, divisor, sources, results, sizes, programs, segments
    )
    return made


def clash(extents: Iterable[tuple[int, int, int, int]]) -> tuple[int, int] | None:
    """Return the first result that shares memory with another result or with a source.

    Args:
      extents: ``(start, stop, tensor, result)``, the addresses of an array's first byte and of the one after its last;
        ``result`` is -1 for a source. A source that is a result itself is left out.
    Returns:
      The ``(tensor, result)``, or ``None``. Empty arrays share nothing.

    >>> clash([(0, 8, 0, 0), (8, 16, 0, 1), (0, 4, 1, -1)])
    (0, 0)
    """
    reached = reached_by_result = (0, 0, -1)  # how far what begins earlier reaches, and which result it is
    for start, stop, tensor, result in sorted(extent for extent in extents if extent[1] > extent[0]):
        other = reached if result >= 0 else reached_by_result
        if other[0] > start:
            return (tensor, result) if result >= 0 else other[1:]
        reached = max(reached, (stop, tensor, result))
        if result >= 0:
            reached_by_result = max(reached_by_result, (stop, tensor, result))
    return None


def memory(nbytes: int) -> Any:
    """Return new memory with the buffer protocol, aligned to 64 bytes; what is in it is undefined.

    When it is freed, it is kept for the next that asks for as many bytes (see ``usage``).
    """
    if native():
        return native().Memory(nbytes)
    from .reference import memory as aligned

    return aligned(nbytes)


def usage() -> dict[str, int]:
    """Return the bytes of ``memory`` in use (``live``), kept for reuse (``kept``), and the most ever in use (``peak``).

    ``live`` and ``kept`` together never exceed ``peak``.
    """
    found: dict[str, int] = native().usage() if native() else {"live": 0, "kept": 0, "peak": 0}
    return found


def empty_cache() -> None:
    """Give the memory that is kept for reuse back to the system."""
    if native():
        native().drop_kept()


def threads() -> int:
    """Return how many threads may work on one reduction.

    ``CROSSREDUCE_NUM_THREADS``; else as many as the process may use CPUs, but no more than ``OMP_NUM_THREADS`` (of a
    list the first; what OpenMP would not read counts as not set).

    Raises:
      ArgumentError: ``CROSSREDUCE_NUM_THREADS`` is no number from 1 to 4096.
    """
    own = os.environ.get("CROSSREDUCE_NUM_THREADS")
    if own:
        found = _count(own)
        if found is None:
            problem = "CROSSREDUCE_NUM_THREADS must be a whole number from 1 to 4096."
            raise ArgumentError(message(problem, shown(own), "CROSSREDUCE_NUM_THREADS=4"))
        return found
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, _count(os.environ.get("OMP_NUM_THREADS", "").split(",")[0]) or cpus)


def _count(text: str) -> int | None:
    """Return the number of threads that a text names, if it does."""
    text = text.strip()
    sane = text.isascii() and text.isdecimal() and len(text) <= 8
    return int(text) if sane and 0 < int(text) <= 4096 else None
