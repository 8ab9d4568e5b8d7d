"""Kernels for host memory: compiled ones, and the same functions in NumPy as fallback and oracle.

Input: fused programs (which operands are combined, in which order), element ranges, and arrays as buffers or
addresses. Output: filled results. However many steps a program has, a compiled ``Kernel`` reads every source once and
writes every result once: it processes one cache line, or one tile of at most 4 KiB, after another. Tensors are not
packed. This package does not use schedules, devices or frameworks.

The instruction set is chosen once, when it is first needed: ``avx512``, ``avx2`` or ``baseline``. Environment variables
override the defaults: ``CROSSREDUCE_KERNELS`` names an instruction set, or ``numpy``; ``CROSSREDUCE_NUM_THREADS`` sets
the number of threads of one reduction.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

from ..errors import ArgumentError, BackendError, shown

_LOG: Final = logging.getLogger("crossreduce")
_NATIVE: Final[list[Any]] = []  # the compiled module, or None, once `native` has imported it
_Rows = Sequence[Sequence[Any]]  # for each tensor, its sources or its results

# Results that together have at least this many bytes are written with streaming stores, except in place, since they and
# their sources do not fit into the cache anyway (32 MiB for 8 cores of an AMD EPYC).
STREAMING_BYTES: Final = 1 << 24
# Results of at least this many bytes use memory from a pool (see ``memory``). Smaller ones come from the framework's
# allocator; the C library itself reuses blocks below its mmap threshold, 128 KiB at first.
POOLED_BYTES: Final = 1 << 17
# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
# Below this many bytes read and written, waking another thread costs more time than it saves.
THREADED_BYTES: Final = 1 << 22


class FusedProgram(NamedTuple):
    """The computation of each element.

    An operand is a source, ``0, 1, ...``, or a slot, ``~0, ~1, ...``, which stores an intermediate value. The folds
    ``(slot, *operands)`` run in order. Each combines its operands, left to right, in the accumulator's dtype, and
    stores the value in its slot, which only its first operand may be. The operand ``results[i]`` becomes result i.
    """

    slots: int
    folds: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]


class Segment(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor, in C order, and the number of the program that computes them."""

    tensor: int
    start: int
    stop: int
    program: int


class Kernel(Protocol):
    """A compiled reduction of a batch of tensors of one dtype, which can run any number of times."""

    def run(
        self, sources: _Rows, results: _Rows, threads: int, streaming: bool, check_overlap: bool
    ) -> tuple[int, int] | None:
        """Reduce a batch.

        Args:
          sources: for each tensor its sources, each an object with the buffer protocol, an address (an int;
            C order), or ``(address, shape, strides)`` with strides in bytes.
          results: for each tensor its results, each a writable buffer or an address, in C order.
          threads: the number of threads, the caller's included.
          streaming: whether results are written with streaming stores, which bypass the cache.
          check_overlap: whether to check first that no result shares memory with another result or with a source. A
            result may have exactly the memory of a source of its tensor. If the check fails, nothing is written.
        Returns:
          ``(tensor, result)`` of a result that shares memory, else ``None``.
        """


def native() -> Any:
    """Return the compiled module, or ``None`` where it was not built."""
    # This does not use functools.cache, which has a lock in free-threaded interpreters. A child that is forked while
    # the lock is held would wait for it forever.
    if not _NATIVE:
        try:
            _NATIVE.append(importlib.import_module("._native", __name__))
        except ImportError as error:
            _LOG.info("the compiled kernels are not installed (%s); NumPy is used instead", error)
            _NATIVE.append(None)
    return _NATIVE[0]


@cache
def instruction_set() -> str:
    """Return the instruction set of the kernels: ``"avx512"``, ``"avx2"``, ``"baseline"`` or ``"numpy"``.

    Raises:
      BackendError: ``CROSSREDUCE_KERNELS`` names a set that this machine or this build does not support.
    """
    supported = [*(native().supported() if native() else []), "numpy"]
    wanted = os.environ.get("CROSSREDUCE_KERNELS") or supported[0]
    if wanted not in supported:
        problem = "CROSSREDUCE_KERNELS names kernels that this machine or this build cannot run."
        raise BackendError.of(problem, shown(wanted), "one of " + ", ".join(supported))
    return wanted


def compile_kernel(
    op: str,
    dtypes: tuple[str, str, str],
    divisor: float,
    sources: int,
    results: int,
    sizes: tuple[int, ...],
    programs: tuple[FusedProgram, ...],
    segments: tuple[Segment, ...],
    weights: tuple[int, ...] = (),
) -> Kernel:
    """Return a kernel for the instruction set in use.

    Args:
      op: ``"sum"``, ``"min"``, ``"max"``, ``"product"`` or ``"exact_sum"``. The programs of exact sums are single folds
        of sources, whose value is every result; their accumulator is not used.
      dtypes: the names of the dtypes of the sources, the accumulator and the results.
      divisor: results are divided by it; integers, which must have one dtype, are truncated towards zero.
      sources: the number of sources of each tensor.
      results: the number of results of each tensor.
      sizes: the numbers of elements of the tensors.
      programs: the computations.
      segments: the elements that each program computes. Elements outside all segments are not written.
      weights: for exact sums: how often each source counts, at most 2^24 in all; (): once.

    >>> import numpy as np
    >>> mean = compile_kernel("sum", ("float16", "float32", "float16"), 2, 2, 1, (2,),
    ...                       (FusedProgram(1, ((0, 0, 1),), (~0,)),), (Segment(0, 0, 2, 0),))
    >>> out = np.empty(2, np.float16)
    >>> mean.run([[np.float16([40000, 1]), np.float16([40000, 2])]], [[out]], 1, False, False)
    >>> out
    array([4.0e+04, 1.5e+00], dtype=float16)
    """
    chosen = instruction_set()
    if chosen == "numpy":
        from .reference import ReferenceKernel

        return ReferenceKernel(op, dtypes, divisor, sizes, programs, segments, weights)
    kernel: Kernel = native().Kernel(chosen, op, *dtypes, divisor, sources, results, sizes, programs, segments, weights)
    return kernel


def memory(nbytes: int) -> Any:
    """Return new memory with the buffer protocol, aligned to 64 bytes. Its content is undefined.

    The compiled module keeps freed memory in a pool, for requests of the same size (see ``memory_usage``).
    """
    if native():
        return native().Memory(nbytes)
    from .reference import memory as aligned

    return aligned(nbytes)


def memory_usage() -> dict[str, int]:
    """Return the bytes of the memory that this process uses for results.

    It counts results of at least 128 KiB in NumPy and torch, and all results in JAX and TensorFlow. The memory of freed
    results is kept for later ones. After 5 seconds without use, it is returned to the system.

    Returns:
      A dict: ``"live"``, the bytes that results use now; ``"pooled"``, the bytes that are kept; ``"peak"``, the most
      bytes that results ever used at once. ``live`` and ``pooled`` together never exceed ``peak``. Without the compiled
      kernels all three are 0.

    >>> import numpy as np
    >>> import crossreduce as cr
    >>> cr.empty_cache()
    >>> before = cr.memory_usage()["live"]
    >>> reduced = cr.all_reduce([np.ones(1 << 20, "float32"), np.ones(1 << 20, "float32")])  # 2 results of 4 MiB
    >>> usage = cr.memory_usage()
    >>> usage["live"] - before >= 8 << 20 or usage["peak"] == 0
    True
    """
    return dict(native().memory_usage()) if native() else {"live": 0, "pooled": 0, "peak": 0}


def empty_cache() -> None:
    """Return the memory of freed results to the system at once, instead of after 5 seconds without use.

    After ``keep_memory``, the C library also returns the freed memory that it kept.

    >>> import crossreduce as cr
    >>> cr.empty_cache()
    >>> cr.memory_usage()["pooled"]
    0
    """
    if native():
        native().empty_pool()
    if _keeps:
        library = glibc()
        assert library
        library.malloc_trim(0)


_keeps = False  # whether the C library keeps freed memory


def keep_memory(enabled: bool = True) -> bool:
    """Let the C library keep freed memory for later arrays, instead of returning it to the system.

    By default, the C library maps new memory for each large array. So the system has to clear its pages, which can take
    longer than the reduction. After this call, the process reuses the memory of freed arrays, also of NumPy, PyTorch
    and JAX. It then keeps its peak of memory, and more, since free blocks do not always have the right size. Threads
    that start later share one arena of the allocator, whose blocks can have any size, so call this before JAX computes
    anything. crossreduce's own results do not need it (see ``memory_usage``). TensorFlow gains little (docs/host.md).

    Args:
      enabled: ``False`` returns freed memory to the system, now and from now on. The C library then maps arrays of at
        least 32 MiB, the maximum of its own threshold. Threads that share an arena continue to share it.
    Returns:
      Whether the C library accepted the settings. Only glibc has them (``mallopt``). With other C libraries (musl,
      macOS, Windows) nothing changes, and the result is ``False``. An allocator that replaces glibc's (``LD_PRELOAD``)
      ignores the settings.
    Raises:
      ArgumentError: ``enabled`` is not a bool.

    >>> import crossreduce as cr
    >>> told = cr.keep_memory()
    >>> cr.empty_cache()  # returns what is kept now
    >>> cr.keep_memory(False) == told
    True

    Source: mallopt(3); glibc 2.36, malloc/malloc.c (DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB, and trimming starts at twice
    the threshold), malloc/arena.c (arenas of threads have at most 64 MiB, so larger blocks are mapped).
    """
    global _keeps
    if not isinstance(enabled, bool):
        raise ArgumentError.of("keep_memory requires a bool.", shown(enabled), "True or False")
    library = glibc()
    if library is None:
        return False
    if enabled:
        settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _ARENA_MAX: 1}
    else:
        settings = {_MMAP_MAX: 1 << 16, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
        library.malloc_trim(0)
    told = all(library.mallopt(parameter, value) for parameter, value in settings.items())
    _keeps = enabled and told
    return told


def glibc() -> Any:
    """Return the C library of this process if it is glibc, else ``None``."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no handle of the process itself
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


def available_memory() -> int:
    """Return the bytes that this process may still allocate, as far as the machine and its control groups report them.

    Where nothing is reported, and without the compiled kernels, the result is 2^62.
    """
    return int(native().available_memory()) if native() else 1 << 62


def threads() -> int:
    """Return the number of threads of one reduction.

    This is ``CROSSREDUCE_NUM_THREADS`` if it is set. Otherwise it is the number of CPUs that the process may use, but
    at most ``OMP_NUM_THREADS``. If that is a list, its first number is used; a value that is not an integer from 1 to
    4096 is ignored.

    Raises:
      ArgumentError: ``CROSSREDUCE_NUM_THREADS`` is not an integer from 1 to 4096.
    """
    setting = os.environ.get("CROSSREDUCE_NUM_THREADS")
    if setting:
        number = _count(setting)
        if number is None:
            problem = "CROSSREDUCE_NUM_THREADS must be an integer from 1 to 4096."
            raise ArgumentError.of(problem, shown(setting), "CROSSREDUCE_NUM_THREADS=4")
        return number
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, _count(os.environ.get("OMP_NUM_THREADS", "").split(",")[0]) or cpus)


def _count(text: str) -> int | None:
    """Return the number of threads that a text denotes, or ``None`` if it is not an integer from 1 to 4096."""
    return int(text) if re.fullmatch(r"\s*[0-9]{1,8}\s*", text) and 0 < int(text) <= 4096 else None
