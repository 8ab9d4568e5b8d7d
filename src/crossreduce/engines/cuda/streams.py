"""Operations on the streams of CUDA devices, and their dependencies, as plain values that ``native/plan.cpp`` runs.

An address is a row of a table of arrays, and an offset in bytes. The rows are the sources of each tensor, then the
results of each tensor, then the temporary memory of each device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from .kernels import KernelKind

Place = tuple[int, int]
"""A row of the table of addresses, and an offset in bytes."""


class Part(NamedTuple):
    """A range of one tensor that a launch processes.

    ``size`` is the number of units in the range (see ``KernelKind``), and ``order`` an index into ``Launch.orders``.
    ``places`` has the places of the sources, then those of the results.
    """

    size: int
    order: int
    places: tuple[Place, ...]


class Launch(NamedTuple):
    """A launch of a kernel on ``device``, which combines ``sources`` sources in each part.

    Each of ``orders`` has the bits of ``fusion.Order`` and, as a fourth number, ``wide``: bit k is set if source k has
    the accumulator's dtype.
    """

    device: int
    kernel: KernelKind
    sources: int
    divisor: float
    orders: tuple[tuple[int, int, int, int], ...]
    parts: tuple[Part, ...]


class Copy(NamedTuple):
    """A copy of ``nbytes`` bytes, made by the driver, from the memory of device ``src`` to that of device ``dst``."""

    src: int
    dst: int
    source: Place
    target: Place
    nbytes: int


BEGIN: Final = -1
"""In ``Operation.waits`` this stands for the work queued before the call in the first and all ``begins`` streams."""
_NOTHING: Final = BEGIN - 1  # less than the number of any operation


class Operation(NamedTuple):
    """A launch or a copy in a stream. ``waits`` has the operations of other streams that must end before it begins."""

    work: Launch | Copy
    stream: int
    waits: tuple[int, ...]
    is_waited_for: bool


class Operations(NamedTuple):
    """The operations of a layout.

    Before an operation touches the memory of a device, the work that was queued in the caller's current stream of that
    device must have ended. Work that is queued there later must begin after the operation. The first stream waits for
    all other streams, and they wait for it: these are 2 n waits for n streams, instead of n * n.

    Args:
      devices: the numbers of all physical devices. The other fields denote a device by its position in ``devices``.
      streams: the device of each stream, and the device to which it copies, or ``None`` for a caller's current stream,
        which runs kernels. The callers' streams come first, one for each of ``devices``.
      scratch: bytes of temporary memory per device.
      operations: in an order in which they can run.
      begins: the streams for which the first one waits at the beginning.
      ends: the operations for which the first stream waits at the end.
      resumes: the streams that then wait for the first one.
    """

    devices: tuple[int, ...]
    streams: tuple[tuple[int, int | None], ...]
    scratch: tuple[int, ...]
    operations: tuple[Operation, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    resumes: tuple[int, ...]


class StreamOrder:
    """Determines the waits of operations for those of other streams, without unnecessary waits.

    ``_ended[a][b]`` is the last operation of stream b that is known to have ended before the next operation of stream a
    begins. The streams with the numbers of devices are the callers' current ones.
    """

    def __init__(self, streams: int, devices: int) -> None:
        self._devices = devices
        self._ended: list[dict[int, int]] = [{} for _ in range(streams)]
        self._ended[0][0] = BEGIN
        self._at: list[dict[int, int]] = []  # for each operation, ``_ended`` of its stream once it has ended
        # For each device, by stream: the last operation that touches the device's memory.
        self._touched: list[dict[int, int]] = [{} for _ in range(devices)]
        self.streams: list[int] = []
        self.waits: list[tuple[int, ...]] = []
        self.begins: set[int] = set()
        self.ends: set[int] = set()
        self.resumes: set[int] = set()

    def add(self, after: Iterable[int], stream: int, touched: set[int]) -> None:
        """Add an operation that begins after the operations ``after`` and uses the memory of devices ``touched``."""
        number = len(self.streams)
        ended, needed = self._ended[stream], []
        for before in sorted(after, reverse=True):
            if self.streams[before] != stream and ended.get(self.streams[before], _NOTHING) < before:
                needed.append(before)
                self._join(ended, self._at[before])
        # Devices whose work from before the call may still run: no operation in their streams is known to have ended.
        foreign = {device for device in touched - {stream} if device not in ended}
        self.begins |= foreign - {0}
        if foreign and 0 not in ended:
            needed.append(BEGIN)
            ended[0] = BEGIN
        ended[stream] = number
        for device in touched:
            self._touched[device][stream] = number
        self.streams.append(stream)
        self.waits.append(tuple(needed))
        self._at.append(dict(ended))

    def end(self) -> None:
        """Let the callers' streams wait for all operations that touch the memory of their devices."""
        needed: dict[int, int] = {}
        for device in range(self._devices):
            missing = {
                stream: last
                for stream, last in self._touched[device].items()
                if self._ended[device].get(stream, _NOTHING) < last
            }
            self._join(needed, missing)
            if missing and device:
                self.resumes.add(device)
        for stream, last in sorted(needed.items(), key=lambda item: -item[1]):  # a later one often covers earlier ones
            if stream != 0 and self._ended[0].get(stream, _NOTHING) < last:
                self.ends.add(last)
                self._join(self._ended[0], self._at[last])

    @staticmethod
    def _join(into: dict[int, int], other: dict[int, int]) -> None:
        """Add the last operation of each stream in ``other`` to ``into``, unless that has a later one."""
        for stream, last in other.items():
            into[stream] = max(into.get(stream, _NOTHING), last)
