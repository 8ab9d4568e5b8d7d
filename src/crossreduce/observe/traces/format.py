"""The files of a trace: their names, the facts at their start, and their records.

Input: the bytes of one rank's file. Output: its facts and records. The native ``trace_file.hpp`` defines the layout and
writes the file; a file that a killed process has left is complete up to its last record.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

DEFAULT_NBYTES: Final = 1 << 26
LEAST_NBYTES: Final = 1 << 18
FILE: Final = re.compile(r"rank\d{1,9}\.[0-9a-f]{1,64}(\.\d{1,9})?\.trace")
TOPOLOGY: Final = re.compile(r"topology\.(?P<token>[0-9a-f]{1,64})\.(?P<number>\d{1,18})\.json")
RUNNING: Final = 255
"""The outcome of a call that has not ended; other outcomes are those of ``ranks.intra_host.shared_memory``."""

_MAGIC: Final = b"CRTRACE1"
_HEADER: Final = struct.Struct("=8s6Qq6q")
_MOST_RECORDS: Final = 1 << 36  # a file that claims more is damaged
_AT_ONCE: Final = 1 << 15  # records that are read at a time, about a megabyte
_MOST_BEFORE_RECORDS: Final = 1 << 26  # bytes of the header and texts; a file that claims more is damaged
_DAY_NS: Final = 86_400 * 10**9


class Phase(IntEnum):
    """What a record describes; as in the native ``trace_file.hpp``."""

    CALL = 1
    QUEUE = 2
    WAIT = 3
    COPY_IN = 4
    REDUCE = 5
    COPY_OUT = 6
    BETWEEN_HOSTS = 7
    AGREE = 8
    INNER = 9


RECORD: Final = struct.Struct("=BBHIqqQ")
"""A record, as in the native ``trace_file.hpp``: phase, outcome, rank, detail, begin, end and number of the op.

Times are nanoseconds of the monotonic clock. ``rank`` is the place on the host of the rank that was waited for.
``detail`` is the stage of a phase, or the number of a call's text, from 1, with 0 for a text that had no room."""


_CALL: Final = int(Phase.CALL)
_PHASES: Final = frozenset(map(int, Phase))


class ClockReading(NamedTuple):
    """Readings of the monotonic and the calendar clock, in nanoseconds, and the most time between the two readings."""

    monotonic_ns: int
    calendar_ns: int
    error_ns: int


class Facts(NamedTuple):
    """What a rank states at the start of its file. ``rank`` and ``hosts`` have the ranks' numbers in messages.

    ``clock`` is equal for processes that share a monotonic clock. ``process`` is random: pids repeat in containers.
    """

    group: str
    token: str
    rank: int
    hosts: tuple[tuple[int, ...], ...]
    hostname: str
    pid: int
    process: str
    clock: str
    version: str

    def encode(self) -> bytes:
        """Return the facts as JSON.

        >>> facts = Facts("world", "ab", 1, ((0, 1),), "node", 7, "1f", "boot", "1")
        >>> Facts.decode(facts.encode()) == facts
        True
        """
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, text: bytes) -> Facts:
        """Return the facts from JSON; raise ``ValueError`` if it is malformed."""
        try:
            fields: dict[str, Any] = json.loads(text)
            hosts = tuple(tuple(map(_number, host)) for host in fields["hosts"])
            texts = [fields[name] for name in ("group", "token", "hostname", "process", "clock", "version")]
            group, token, hostname, process, clock, version = texts
            rank, pid = _number(fields["rank"]), _number(fields["pid"])
            facts = cls(group, token, rank, hosts, hostname, pid, process, clock, version)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ValueError("the facts at its start are malformed") from None
        ranks = [rank for host in hosts for rank in host]
        if not all(isinstance(text, str) for text in texts) or facts.rank not in ranks or len({*ranks}) < len(ranks):
            raise ValueError("the facts at its start are malformed")
        return facts


class TraceContent(NamedTuple):
    """A file: the facts, the texts of calls, the records, oldest first, two readings of the clocks, and notes.

    The records are in several pieces, each of which contains whole records.
    """

    facts: Facts
    texts: tuple[str, ...]
    records: list[bytes]
    clocks: tuple[ClockReading, ClockReading]
    notes: tuple[str, ...]


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
      ValueError: it is not a regular file, but for example a FIFO, for whose writer this does not wait.
      OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is not a regular file")
    return file


def read_trace(path: Path) -> TraceContent:
    """Return the content of a file. If it is truncated, the remaining part is read, and there is a note about it.

    Raises:
      ValueError: it is not a trace.
      OSError, MemoryError: it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_HEADER.size)
        if len(start) < _HEADER.size or start[:8] != _MAGIC:
            raise ValueError("it is not a trace of crossreduce, or its rank ended while it made it")
        _, json_nbytes, texts_at, records_at, texts_nbytes, capacity, count, problem, *clocks = _HEADER.unpack(start)
        if (
            not _HEADER.size + json_nbytes <= texts_at <= texts_at + texts_nbytes <= records_at <= _MOST_BEFORE_RECORDS
            or not 0 < capacity <= _MOST_RECORDS
        ):
            raise ValueError("its header is malformed")
        if size < texts_at + texts_nbytes:
            raise ValueError("it is truncated before its first record")
        facts = Facts.decode(file.read(json_nbytes))
        file.seek(texts_at)
        texts = _texts(file.read(texts_nbytes))
        expected = min(count, capacity)
        present = min(expected, max(0, size - records_at) // RECORD.size)
        # In a full file, a running process writes the next record over the oldest one, so this one is not read. The
        # records after it are older than those before it.
        oldest = count % capacity if count > capacity else 0
        older = _records(file, records_at, min(present, oldest + (count > capacity)), present)
        records = [*older, *_records(file, records_at, 0, min(present, oldest))]
    notes = []
    if present < expected:
        notes.append(f"it is truncated: {expected - present} of {expected} records are missing")
    if count > capacity:
        replaced = count - (capacity - 1)
        notes.append(f"the oldest {replaced} of {count} records were replaced; see CROSSREDUCE_TRACE_BYTES")
    if problem:
        notes.append(f"the file could not grow (error {problem}), so new records replaced old ones early")
    malformed = present - (count > capacity and present > oldest) - sum(map(len, records)) // RECORD.size
    if malformed:
        notes.append(f"{malformed} records are malformed and left out")
    without_text = sum(
        phase == _CALL and not detail for part in records for phase, _, _, detail, *_ in RECORD.iter_unpack(part)
    )
    if without_text:
        notes.append(f'the texts of {without_text} calls had no room, so they are "?"')
    readings = ClockReading(*clocks[:3]), ClockReading(*clocks[3:])
    return TraceContent(facts, texts, records, readings, tuple(notes))


def _records(file: BinaryIO, at: int, first: int, end: int) -> list[bytes]:
    """Return the valid records from number ``first`` to ``end``, in pieces."""
    pieces = []
    file.seek(at + first * RECORD.size)
    for place in range(first, end, _AT_ONCE):
        data = file.read(min(_AT_ONCE, end - place) * RECORD.size)
        data = data[: len(data) // RECORD.size * RECORD.size]  # the file may have become shorter
        valid = [_is_valid(*fields) for fields in RECORD.iter_unpack(data)]
        if not all(valid):
            data = b"".join(data[k * RECORD.size : (k + 1) * RECORD.size] for k, good in enumerate(valid) if good)
        if data:
            pieces.append(data)
    return pieces


def _is_valid(phase: int, outcome: int, _rank: int, _detail: int, begin: int, end: int, _number: int) -> bool:
    if phase not in _PHASES or begin < 0:
        return False
    return 0 <= end - begin < 366 * _DAY_NS or (phase == _CALL and outcome == RUNNING)


def _texts(data: bytes) -> tuple[str, ...]:
    """Return the texts of calls, each of which follows its length in bytes."""
    texts, at = [], 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from("=H", data, at)
        texts.append(data[at + 2 : at + 2 + length].decode(errors="replace"))
        at += 2 + length
    return tuple(texts)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value
