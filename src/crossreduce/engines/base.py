"""The protocol of engines, and their registry.

An engine compiles a ``Layout`` (tensors and the programs that reduce them) once, and then runs it on any number of
arrays. Its arguments contain everything that it needs to know about a call, so engines import nothing from ``torch/``,
``jax/``, ``tensorflow/`` or ``strategy/``. ``pipeline.select`` chooses the engine of a call.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, Protocol

from ..frameworks import Array, Framework
from ..lowering import Program
from ..ops import Numbers
from ..packing import Buffer, itemsize

ENGINES: Final = ["host", "cuda", "loop"]
"""Modules of this package that define ``ENGINE``, in the order in which they are tried. "loop" runs any layout."""

EXACT_ENGINES: Final = ["host"]
"""The engines in ``ENGINES`` that can compute exact sums."""


class ProgramRange(NamedTuple):
    """A range of a buffer's elements and the program that reduces it."""

    program: Program
    start: int
    stop: int


class LoweredBuffer(NamedTuple):
    """A flat buffer and the ranges that tile it."""

    buffer: Buffer
    ranges: tuple[ProgramRange, ...]


@dataclass(frozen=True, eq=False)  # layouts are cached, so identity is enough: a cheap cache key
class Layout:
    """Tensors of one dtype with the same sources and destinations, and the programs that reduce them.

    Args:
      framework: the framework of the arrays.
      tensors: the positions of the tensors in the caller's batch, in the order of the spans of ``buffers``.
      buffers: flat buffers, the spans of the tensors in them, and the programs.
      sources: the device of each replica's component.
      destinations: the device of each component of the results.
      mixed: whether some components were sparse and have been made dense, perhaps in a wider dtype.
      prefers_nccl: whether the caller chose "nccl". The programs are those of "auto", in case NCCL cannot be used.
    Raises:
      ScheduleError: the chunks of a program differ in their sources or destinations.
    """

    framework: Framework
    tensors: tuple[int, ...]
    buffers: tuple[LoweredBuffer, ...]
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    mixed: bool = False
    prefers_nccl: bool = False

    def __post_init__(self) -> None:
        for program in self.programs:
            program.require_uniform()

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return tuple(part.program for lowered in self.buffers for part in lowered.ranges)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [span.shape for lowered in self.buffers for span in lowered.buffer.spans]

    @cached_property
    def is_sized(self) -> bool:
        """Whether the sizes of all tensors are known. While tracing, each tensor of unknown size has its own layout."""
        return self.buffers[0].buffer.size is not None

    @cached_property
    def nbytes(self) -> int:
        """The bytes of one replica's tensors, or 0 if their size is unknown."""
        return sum((buffer.size or 0) * itemsize(buffer.dtype) for buffer, _ in self.buffers)

    @cached_property
    def on_host(self) -> bool:
        """Whether all devices of all programs are CPU devices of this host, which share its memory."""
        return all(device.startswith("cpu:") for program in self.programs for device in program.devices)


class OverlapError(Exception):
    """The memory of result ``result`` of tensor ``tensor`` overlaps that of another result or of an input.

    A result that has exactly the memory of an input of the same tensor is not an error.
    """

    def __init__(self, tensor: int, result: int) -> None:
        super().__init__(tensor, result)
        self.tensor, self.result = tensor, result


class PreparedRun(NamedTuple):
    """The arguments with which compiled code repeats a run of an executable."""

    kernel: Any  # a kernel for host memory, or a plan for CUDA devices
    streaming: bool = False  # whether results are written with streaming stores, which bypass the caches
    threaded: bool = False  # whether the run is large enough for several threads


class Executable(Protocol):
    """A compiled layout, which can run any number of times, in several threads at once."""

    @property
    def prepared(self) -> PreparedRun | None:
        """The arguments with which compiled code repeats a run of this executable, or ``None`` if it cannot."""

    def run(self, operands: Any, out: Sequence[Sequence[Array]] | None) -> Sequence[Sequence[Array]]:
        """Reduce arrays.

        Args:
          operands: what ``Engine.bind`` returned.
          out: for each tensor the arrays to write its results into. ``None`` means that the results are new arrays.
        Returns:
          For each tensor its results, in the order of the destinations; ``out`` itself if it was given.
        Raises:
          OverlapError: an array of ``out`` overlaps another one or an input. Nothing was written.
          BufferError, ValueError: an array of ``out`` cannot be written into. Nothing was written.
          Both are raised only by engines with ``checks_overlap``.
        """


class Engine(Protocol):
    """A way to run programs. A new engine needs a module of this package, its name in ``ENGINES``, tests and docs."""

    name: str

    def __hash__(self) -> int:
        """Return the hash, since engines are in the keys of caches."""

    checks_overlap: bool
    """Whether executables check ``out`` for overlaps. If not, the caller checks it before ``run``."""

    def supports(self, layout: Layout) -> bool:
        """Return whether this engine can run layouts with this framework, these devices and these sizes."""

    def bind(self, layout: Layout, arrays: Sequence[Sequence[Array]]) -> Any | None:
        """Return ``arrays``, one row of components per tensor, in the form that ``Executable.run`` reads.

        Return ``None`` if the engine cannot run these arrays after all, for example because they are traced.
        """

    def compile(self, layout: Layout, numbers: Numbers, with_out: bool) -> Executable:
        """Return the executable of a layout, which callers cache.

        Args:
          layout: one that the engine supports.
          numbers: how the reduction is computed.
          with_out: whether ``run`` will write into the caller's arrays.
        """


@lru_cache(maxsize=64)
def engine_named(name: str) -> Engine:
    """Return an engine, importing its module on first use."""
    engine: Engine = importlib.import_module(f".{name}", __package__).ENGINE
    return engine
