"""The files of a trace: their names, the facts at their start, and their records.

Input: the bytes of one rank's file. Output: its facts and records. The native ``trace_file.hpp`` defines the layout and
writes the file; a file that a killed process has left is complete up to its last record.
"""

from __future__ import annotations

import json
import re
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

DEFAULT_NBYTES: Final = 1 << 26
LEAST_NBYTES: Final = 1 << 18
FILE: Final = re.compile(r"rank\d{1,9}\.[0-9a-f]{1,64}(\.\d{1,9})?\.trace")
TOPOLOGY: Final = re.compile(r"topology\.(?P<token>[0-9a-f]{1,64})\.(?P<number>\d{1,18})\.json")
RUNNING: Final = 255
"""The outcome of a call that has not ended; other outcomes are those of ``ranks.shared_memory``."""

_MAGIC: Final = b"CRTRACE1"
_HEADER: Final = struct.Struct("=8s6Qq6q")
_RECORD: Final = struct.Struct("=BBHIqqQ")
_MOST_RECORDS: Final = 1 << 28
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


class Record(NamedTuple):
    """A record, as in the native ``trace_file.hpp``. Times are nanoseconds of the monotonic clock."""

    phase: Phase
    outcome: int
    rank: int
    detail: int
    begin_ns: int
    end_ns: int
    number: int


class ClockReading(NamedTuple):
    """The monotonic and the calendar clock at one time, in nanoseconds, and by how much they may differ from it."""

    monotonic_ns: int
    calendar_ns: int
    error_ns: int


class Facts(NamedTuple):
    """What a rank states at the start of its file. ``rank`` and ``hosts`` have the ranks' numbers in messages.

    ``clock`` is equal for processes that share a monotonic clock.
    """

    group: str
    token: str
    rank: int
    hosts: tuple[tuple[int, ...], ...]
    hostname: str
    pid: int
    clock: str
    version: str

    def encoded(self) -> bytes:
        """Return the facts as JSON.

        >>> facts = Facts("world", "ab", 1, ((0, 1),), "node", 7, "boot", "1")
        >>> Facts.decoded(facts.encoded()) == facts
        True
        """
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decoded(cls, text: bytes) -> Facts:
        """Return the facts from JSON; raise ``ValueError`` if it is malformed."""
        try:
            found: dict[str, Any] = json.loads(text)
            hosts = tuple(tuple(map(_number, host)) for host in found["hosts"])
            texts = [found[name] for name in ("group", "token", "hostname", "clock", "version")]
            group, token, hostname, clock, version = texts
            facts = cls(group, token, _number(found["rank"]), hosts, hostname, _number(found["pid"]), clock, version)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ValueError("the facts at its start are malformed") from None
        ranks = [rank for host in hosts for rank in host]
        if not all(isinstance(text, str) for text in texts) or facts.rank not in ranks or len({*ranks}) < len(ranks):
            raise ValueError("the facts at its start are malformed")
        return facts


class TraceContent(NamedTuple):
    """A file: the facts, the texts of calls, the records, oldest first, two readings of the clocks, and notes."""

    facts: Facts
    texts: tuple[str, ...]
    records: list[Record]
    clocks: tuple[ClockReading, ClockReading]
    notes: tuple[str, ...]


def read_trace(path: Path) -> TraceContent:
    """Return the content of a file. Of a truncated one the rest is read, and a note says so.

    Raises:
      ValueError: it is not a trace.
      OSError: it cannot be read.
    """
    data = path.read_bytes()
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise ValueError("it is not a trace of crossreduce, or its rank ended while it made it")
    _, json_nbytes, texts_at, records_at, texts_nbytes, capacity, count, problem, *clocks = _HEADER.unpack_from(data)
    if not _HEADER.size + json_nbytes <= texts_at <= texts_at + texts_nbytes <= records_at or capacity > _MOST_RECORDS:
        raise ValueError("its header is malformed")
    if len(data) < texts_at + texts_nbytes:
        raise ValueError("it is truncated before its first record")
    facts = Facts.decoded(data[_HEADER.size : _HEADER.size + json_nbytes])
    texts = _texts(data[texts_at : texts_at + texts_nbytes])
    notes = []
    kept = min(count, capacity)
    here = (len(data) - records_at) // _RECORD.size
    if here < kept:
        notes.append(f"it is truncated: {kept - max(0, here)} of {kept} records are missing")
    # The place of the oldest record is the one that a running process writes next.
    first = count % capacity + 1 if count > capacity else 0
    order = [place % capacity for place in range(first, first + kept - (count > capacity))] if capacity else []
    if count > capacity:
        notes.append(f"the oldest {count - len(order)} of {count} records were replaced; see CROSSREDUCE_TRACE_BYTES")
    if problem:
        notes.append(f"the file could not grow (error {problem}), so new records replaced old ones early")
    records, malformed = [], 0
    for place in order:
        if place >= here:
            continue
        record = _record(_RECORD.unpack_from(data, records_at + place * _RECORD.size))
        if record is None:
            malformed += 1
        else:
            records.append(record)
    if malformed:
        notes.append(f"{malformed} records are malformed and left out")
    readings = ClockReading(*clocks[:3]), ClockReading(*clocks[3:])
    return TraceContent(facts, texts, records, readings, tuple(notes))


def _record(fields: tuple[int, ...]) -> Record | None:
    try:
        record = Record(Phase(fields[0]), *fields[1:])
    except ValueError:
        return None
    open_call = record.phase is Phase.CALL and record.outcome == RUNNING
    if record.begin_ns < 0 or (not open_call and not 0 <= record.end_ns - record.begin_ns < 366 * _DAY_NS):
        return None
    return record


def _texts(data: bytes) -> tuple[str, ...]:
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
