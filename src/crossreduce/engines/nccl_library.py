"""NCCL by ctypes: the functions of ``libnccl.so.2`` that the engine "nccl" calls, and this process's communicators.

Input: devices, streams and calls. Output: nothing; the work is queued on the streams.
Source of signatures and constants: NCCL's public header nccl.h (version 2.32.3).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import BackendError

SONAME: Final = "libnccl.so.2"
OLDEST: Final = 21000  # 2.10, the first version with ncclAvg; versions before 2.9 have four digits

DATA_TYPES: Final = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float32": 7, "float64": 8,
}  # fmt: skip
"""The ``ncclDataType_t`` of each dtype that this library passes to NCCL."""
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)  # ncclRedOp_t
_IN_PROGRESS: Final = 7  # the ncclResult_t of a communicator that does not block, as with NCCL_COMM_BLOCKING=0
TIMEOUT_S: Final = 300
"""How long such communicators may take to be connected, or to queue the calls of a group, in seconds."""

_BUFFERS: Final = (c_void_p, c_void_p, c_size_t, c_int)  # the sent and the received array, their size and data type
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclCommInitAll": (POINTER(c_void_p), c_int, POINTER(c_int)),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommAbort": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (*_BUFFERS, c_int, c_void_p, c_void_p),
    "ncclReduce": (*_BUFFERS, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (*_BUFFERS, c_int, c_void_p, c_void_p),
}


class Call(NamedTuple):
    """A call of NCCL's ``function`` for one rank. ``arguments`` precede the communicator and the stream."""

    function: str
    rank: int
    arguments: tuple[Any, ...]


class Nccl:
    """An opened library and its communicators.

    A lock is held while calls are queued, because NCCL's communicators must not be used by two threads at once, and two
    groups on the same devices must be queued in the same order on all of them.

    Args:
      path: the path or the name of the library.
      mode: flags for ``dlopen``.
    Raises:
      OSError: the library cannot be opened.
      AttributeError: it lacks a function.
    """

    def __init__(self, path: str, mode: int = 0) -> None:
        self._functions = ctypes.CDLL(path, mode=mode)
        for name, arguments in _SIGNATURES.items():
            getattr(self._functions, name).argtypes = arguments
        self._functions.ncclGetErrorString.argtypes = (c_int,)
        self._functions.ncclGetErrorString.restype = c_char_p
        self._lock = threading.Lock()
        self._is_pending = False  # whether a call has returned before it was done
        self._communicators: dict[tuple[int, ...], list[int]] = {}
        self._process = os.getpid()
        number = c_int()
        self._call("ncclGetVersion", (), ctypes.byref(number))
        self.number = number.value
        atexit.register(self.close)

    @property
    def version(self) -> str:
        """The version as text, such as "2.27.3"."""
        scale = 1000 if self.number < 10000 else 10000
        return f"{self.number // scale}.{self.number % scale // 100}.{self.number % 100}"

    def run(self, devices: tuple[int, ...], streams: Sequence[int], calls: Iterable[Call]) -> None:
        """Queue calls as one group.

        Args:
          devices: the CUDA devices of the ranks, in order.
          streams: the stream of each of the devices.
          calls: the collectives of all ranks; every rank must have the same ones in the same order.
        Raises:
          BackendError: a call of NCCL failed, or took too long. The communicators of these devices have been aborted.
        """
        with self._lock:
            in_group = False
            try:
                communicators = self._ready(devices)
                self._call("ncclGroupStart", devices)
                in_group = True
                for function, rank, arguments in calls:
                    self._call(function, devices[rank : rank + 1], *arguments, communicators[rank], streams[rank])
                in_group = False
                self._call("ncclGroupEnd", devices)
                self._wait(devices, communicators, "ncclGroupEnd")
            except BaseException:
                if in_group:
                    self._functions.ncclGroupEnd()  # else this thread's next group would be part of this one
                for communicator in self._communicators.pop(devices, ()):
                    self._functions.ncclCommAbort(communicator)
                raise

    def close(self) -> None:
        """Destroy all communicators. Later runs make new ones. A forked process does not destroy its parent's."""
        if self._process == os.getpid():
            with self._lock:
                while self._communicators:
                    for communicator in self._communicators.popitem()[1]:
                        self._functions.ncclCommDestroy(communicator)

    def _ready(self, devices: tuple[int, ...]) -> list[int]:
        """Return the communicator of each device. They are made at the first use, and later checked for errors."""
        communicators = self._communicators.get(devices)
        if communicators is not None:
            self._wait(devices, communicators)
            return communicators
        count = len(devices)
        pointers = (c_void_p * count)()
        self._call("ncclCommInitAll", devices, pointers, count, (c_int * count)(*devices))
        communicators = self._communicators[devices] = [pointer or 0 for pointer in pointers]
        self._wait(devices, communicators, "ncclCommInitAll")
        logging.getLogger("crossreduce").info("NCCL %s connects %s", self.version, _names(devices))
        return communicators

    def _wait(self, devices: tuple[int, ...], communicators: list[int], function: str = "") -> None:
        """Wait until communicators have done what ``function`` began, if that did not block, or else check them all."""
        if function and not self._is_pending:
            return
        state, limit = c_int(), time.monotonic() + TIMEOUT_S
        for device, communicator in zip(devices, communicators, strict=True):
            self._call("ncclCommGetAsyncError", (device,), communicator, ctypes.byref(state))
            while state.value == _IN_PROGRESS:
                if time.monotonic() > limit:
                    problem = f"NCCL did not end {function or 'an earlier call'} on cuda:{device}."
                    given = f"{TIMEOUT_S} s, without an error"
                    raise BackendError.of(problem, given, "NCCL_DEBUG=INFO for the cause, or NCCL_COMM_BLOCKING=1")
                time.sleep(1e-4)
                self._call("ncclCommGetAsyncError", (device,), communicator, ctypes.byref(state))
            if state.value:
                raise self._error(function or "an earlier call", (device,), state.value)
        self._is_pending = False

    def _call(self, function: str, devices: tuple[int, ...], *arguments: Any) -> None:
        result = getattr(self._functions, function)(*arguments)
        self._is_pending |= result == _IN_PROGRESS
        if result not in (0, _IN_PROGRESS):
            raise self._error(function, devices, result)

    def _error(self, function: str, devices: tuple[int, ...], result: int) -> BackendError:
        text = self._functions.ncclGetErrorString(result).decode(errors="replace")
        where = f" on {_names(devices)}" if devices else ""
        remedy = 'NCCL_DEBUG=WARN for the cause, or another algorithm, such as all_reduce_alg="auto"'
        return BackendError.of(f"NCCL failed in {function}{where}: {text}.", f"ncclResult_t {result}", remedy)


@cache
def _open() -> Nccl | str:
    """Return the first candidate that can be opened. If none can, or it is too old, return the reason instead."""
    fault = f"{SONAME} cannot be opened"
    for path, mode in _candidates():
        try:
            nccl = Nccl(path, mode)
        except (OSError, AttributeError, BackendError) as error:
            fault = f"{SONAME} cannot be opened: {' '.join(str(error).split()).removeprefix(f'{SONAME}: ')}"
        else:
            return nccl if nccl.number >= OLDEST else f"NCCL {nccl.version} is older than 2.10"
    return fault


def _candidates() -> Iterator[tuple[str, int]]:
    """Yield the paths at which the library may be, and the flags to open it with."""
    yield SONAME, getattr(os, "RTLD_NOLOAD", 0)  # loaded already, as by CUDA builds of torch
    for folder in sys.path:
        path = Path(folder, "nvidia", "nccl", "lib", SONAME)
        if path.is_file():
            yield str(path), 0
    yield SONAME, 0  # where the dynamic linker finds it


_OPENING: Final = threading.Lock()


def library() -> Nccl | str:
    """Return NCCL, which is opened on first use, or the reason why it cannot be used."""
    with _OPENING:
        return _open()


def _names(devices: tuple[int, ...]) -> str:
    return ", ".join(f"cuda:{device}" for device in devices)
