"""Operations in the form of the compiled module: ``_cuda.Plan``."""

from __future__ import annotations

from typing import Any

from .driver import accepts_large_tables, native
from .launches import split
from .operations import BEGIN, Launch, Operation, Operations


def plan_of(made: Operations) -> Any:
    """Return the compiled form of operations."""
    events: dict[int, int] = {}
    for number, operation in enumerate(made.operations):
        if operation.is_waited_for:
            events[number] = len(events)
    found = []
    for number, operation in enumerate(made.operations):
        waits, event = tuple(BEGIN if k == BEGIN else events[k] for k in operation.waits), events.get(number, -1)
        found += _encoded(operation, made.devices, waits, event)
    streams = [(device, -1 if to is None else to) for device, to in made.streams]
    joins = made.begins, tuple(events[k] for k in made.ends), made.resumes
    return native().Plan(made.devices, streams, made.scratch, found, *joins)


def _encoded(operation: Operation, devices: tuple[int, ...], waits: tuple[int, ...], event: int) -> list[Any]:
    """Return an operation as ``_cuda.Plan`` reads it; a launch whose table is too large as several."""
    work = operation.work
    if not isinstance(work, Launch):
        copy = (work.src, work.dst, (work.source, work.target), work.nbytes)
        return [(None, copy, operation.stream, waits, event)]
    launches = list(split(work, accepts_large_tables(devices[work.device])))
    last = len(launches) - 1
    return [
        (launch, None, operation.stream, waits if k == 0 else (), event if k == last else -1)
        for k, launch in enumerate(launches)
    ]
