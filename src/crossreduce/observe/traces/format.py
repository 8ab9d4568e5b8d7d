"""The files of a trace: their names, the JSON in their header ("facts"), and their records.

Input: the bytes of one rank's file. Output: its facts and records. The native ``trace_file.hpp`` defines the layout and
writes the file. If the process is killed, the file is complete up to its last record.
"""

from __future__ import annotations

import json
import os
import re
import struct
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from ..files import open_regular

DEFAULT_NBYTES: Final = 1 << 26
LEAST_NBYTES: Final = 1 << 18
FILE: Final = re.compile(r"rank\d{1,9}\.[0-9a-f]{1,64}(\.\d{1,9})?\.trace")
TOPOLOGY: Final = re.compile(r"topology\.(?P<token>[0-9a-f]{1,64})\.(?P<number>\d{1,18})\.json")
RUNNING: Final = 255
"""The outcome of a call that has not ended. For other outcomes see ``ranks.intra_host.shared_memory``."""

_MAGIC: Final = b"CRTRACE1"
_HEADER: Final = struct.Struct("=8s6Qq6q")
_MOST_RECORDS: Final = 1 << 36  # a file whose header states more is malformed
_AT_ONCE: Final = 1 << 15  # records that are read at once, about 1 MiB
_MOST_TEXTS: Final = 1 << 20  # bytes of texts; ranks write no more
_MOST_BEFORE_RECORDS: Final = 1 << 26  # bytes of the header and texts; a file whose header states more is malformed
MOST_READ: Final = 1 << 27  # bytes that are read of a directory: 4 million records, each of which takes 5 us
_DAY_NS: Final = 86_400 * 10**9


class Phase(IntEnum):
    """The kinds of records, with the numbers of the native ``trace_file.hpp``. Most are phases of a call."""

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

Times are nanoseconds of the monotonic clock. ``rank``: the position on the host of the rank that was waited for.
``detail``: for a phase its stage; for a call the number of its text, from 1, or 0 if there was no room for the text."""


_CALL: Final = int(Phase.CALL)
_PHASES: Final = frozenset(map(int, Phase))


class ClockReading(NamedTuple):
    """Readings of the monotonic and the calendar clock, in nanoseconds, and the maximum time between both."""

    monotonic_ns: int
    calendar_ns: int
    error_ns: int


class Facts(NamedTuple):
    """The JSON in the header of a rank's file. ``rank`` and ``hosts`` contain the numbers by which messages name ranks.

    Processes with the same ``clock`` share a monotonic clock. ``process`` is random, since pids repeat in containers.
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
        """Return the facts from JSON. Raise ``ValueError`` if it is malformed."""
        try:
            fields: dict[str, Any] = json.loads(text)
            hosts = tuple(tuple(map(_number, host)) for host in fields["hosts"])
            texts = [fields[name] for name in ("group", "token", "hostname", "process", "clock", "version")]
            group, token, hostname, process, clock, version = texts
            rank, pid = _number(fields["rank"]), _number(fields["pid"])
            facts = cls(group, token, rank, hosts, hostname, pid, process, clock, version)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ValueError("the JSON of its header is malformed") from None
        ranks = [rank for host in hosts for rank in host]
        if not all(isinstance(text, str) for text in texts) or facts.rank not in ranks or len({*ranks}) < len(ranks):
            raise ValueError("the JSON of its header is malformed")
        return facts


class TraceContent(NamedTuple):
    """The content of a file. ``texts``: the texts of calls. ``notes``: descriptions of what is missing in the file.

    ``records``: buffers of whole records, oldest first. ``clocks``: a reading at the start, and a later one.
    """

    facts: Facts
    texts: tuple[str, ...]
    records: list[bytes]
    clocks: tuple[ClockReading, ClockReading]
    notes: tuple[str, ...]


class _Header(NamedTuple):
    """The numbers at the start of a file. Of the ``written`` records, ``expected`` were not replaced by newer ones."""

    json_nbytes: int
    texts_at: int
    records_at: int
    texts_nbytes: int
    capacity: int
    written: int
    problem: int
    clocks: tuple[ClockReading, ClockReading]
    expected: int
    present: int

    @property
    def nbytes(self) -> int:
        """The bytes that a reader of the whole file reads after the header."""
        return self.json_nbytes + self.texts_nbytes + self.present * RECORD.size


def _read_header(file: BinaryIO) -> _Header:
    """Return the header of a file. Raise ``ValueError`` if it is malformed."""
    size, start = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
    if len(start) < _HEADER.size or start[:8] != _MAGIC:
        raise ValueError("it is not a trace of crossreduce, or its rank ended while it created the file")
    _, json_nbytes, texts_at, records_at, texts_nbytes, capacity, count, problem, *clocks = _HEADER.unpack(start)
    if (
        not _HEADER.size + json_nbytes <= texts_at <= texts_at + texts_nbytes <= records_at <= _MOST_BEFORE_RECORDS
        or not 0 < capacity <= _MOST_RECORDS
        or texts_nbytes > _MOST_TEXTS
    ):
        raise ValueError("its header is malformed")
    if size < texts_at + texts_nbytes:
        raise ValueError("it is truncated before its first record")
    readings, expected = (ClockReading(*clocks[:3]), ClockReading(*clocks[3:])), min(count, capacity)
    present = min(expected, max(0, size - records_at) // RECORD.size)
    return _Header(
        json_nbytes, texts_at, records_at, texts_nbytes, capacity, count, problem, readings, expected, present
    )


def needed_nbytes(path: Path) -> int:
    """Return how many bytes ``read_trace`` needs to read all of a file. If it is not a trace, return 0."""
    with suppress(OSError, ValueError), open_regular(path) as file:
        return _read_header(file).nbytes
    return 0


def read_trace(path: Path, most: int = MOST_READ) -> TraceContent:
    """Return the content of a file. If the file is truncated, a note says so, and the rest is returned.

    ``most``: the bytes to read at most. If the file has more, only its newest records are read, and a note says so.

    Raises:
      ValueError: the file is not a trace, or ``most`` is too little for its texts.
      OSError, MemoryError: the file cannot be read.
    """
    with open_regular(path) as file:
        header = _read_header(file)
        records_at, capacity, count, present = header.records_at, header.capacity, header.written, header.present
        room = (most - header.json_nbytes - header.texts_nbytes) // RECORD.size
        if room < 0:
            raise ValueError(f"its texts are too large: {MOST_READ >> 20} MiB of a directory are read at most")
        facts = Facts.decode(file.read(header.json_nbytes))
        file.seek(header.texts_at)
        texts = _texts(file.read(header.texts_nbytes))
        # In a full file, the oldest record is not read, since a running process may be replacing it. The records that
        # follow it in the file are older than those before it.
        oldest = count % capacity if count > capacity else 0
        first, end = min(present, oldest + (count > capacity)), min(present, oldest)
        readable = present - first + end
        unread = max(0, readable - room)
        older = _records(file, records_at, min(present, first + unread), present)
        records = [*older, *_records(file, records_at, max(0, unread - (present - first)), end)]
    notes = []
    if present < header.expected:
        notes.append(f"it is truncated: {header.expected - present} of {header.expected} records are missing")
    if count > capacity:
        replaced = count - (capacity - 1)
        notes.append(f"the oldest {replaced} of {count} records were replaced; see CROSSREDUCE_TRACE_BYTES")
    if unread:
        limit = f"{MOST_READ >> 20} MiB of a directory are read at most"
        notes.append(f"the oldest {unread} of {readable} records are left out: {limit}")
    if header.problem:
        notes.append(f"the file could not grow (error {header.problem}), so new records replaced old ones early")
    malformed = readable - unread - sum(map(len, records)) // RECORD.size
    if malformed:
        notes.append(f"{malformed} records are malformed and left out")
    without_text = sum(
        phase == _CALL and not detail for part in records for phase, _, _, detail, *_ in RECORD.iter_unpack(part)
    )
    if without_text:
        notes.append(f'there was no room for the texts of {without_text} calls, which are shown as "?"')
    return TraceContent(facts, texts, records, header.clocks, tuple(notes))


def _records(file: BinaryIO, at: int, first: int, end: int) -> list[bytes]:
    """Return the valid records from number ``first`` to ``end``, in several buffers. ``at``: where records begin."""
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
