"""The part of one device in a program, for devices that exchange messages: its sends, receives and combinations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .instructions import ChunkProgram


class LocalValue(NamedTuple):
    """A value that one device stores."""

    chunk: int
    final: bool  # fully reduced and in the result's dtype, rather than an input or a partial sum


class Combination(NamedTuple):
    """Makes local value ``made`` from the local values ``operands``, in this order; see ``Instruction.final``."""

    made: int
    operands: tuple[int, ...]
    final: bool


class DeviceStage(NamedTuple):
    """The part of one device in a round: send, receive, then combine.

    Sends and receives are ``(number of the local value, other device)``. Two devices list the messages between them in
    the same order. A value that is sent is complete when the round begins. A combination waits for received operands.
    """

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    combinations: tuple[Combination, ...]


class DeviceProgram(NamedTuple):
    """One device's part in a program.

    Args:
      values: all values that the device stores, numbered in this order; the first are its inputs, one for each chunk
        (unused for chunks to which the device does not contribute).
      stages: one per round of the schedule.
      results: for each chunk the local value that is its result, or -1 if the device is not a destination.
    """

    values: tuple[LocalValue, ...]
    stages: tuple[DeviceStage, ...]
    results: tuple[int, ...]


class Operand(NamedTuple):
    """A value of a chunk that an instruction reads."""

    device: int  # that stores the value
    value: int
    final: bool


class Event(NamedTuple):
    """The part of one device in an instruction: it makes the value, or sends operands to the device that makes it."""

    round: int
    device: int  # that makes the value
    value: int
    operands: tuple[Operand, ...]  # all operands if this device makes the value, otherwise those that it sends
    final: bool


class ChunkEvents:
    """The events of each device in one chunk, in the order of the instructions, and the chunk's inputs and results.

    They are computed once per chunk. So making the program of a device visits only instructions that involve it.
    """

    def __init__(self, chunk: ChunkProgram) -> None:
        places, kinds = chunk.devices, chunk.kinds
        self.by_device: defaultdict[int, list[Event]] = defaultdict(list)
        self.inputs = {source: k for k, source in enumerate(chunk.sources)}
        self.results = dict(zip(chunk.destinations, chunk.results, strict=True))
        self.is_final = kinds[0] == "final"  # whether the chunk has a single input, which is also its result
        for value, (device, operands, r, final, *_) in enumerate(chunk.instructions, start=len(chunk.sources)):
            read = tuple([Operand(places[operand], operand, kinds[operand] == "final") for operand in operands])
            self.by_device[device].append(Event(r, device, value, read, final))
            for operand in read:
                if operand.device != device:
                    self.by_device[operand.device].append(Event(r, device, value, (operand,), final))


class PartInChunk(NamedTuple):
    """The part of a device in one chunk: the events of device ``origin``, after all devices are renumbered."""

    events: ChunkEvents
    origin: int
    moved: Callable[[int], int]  # returns the new number of a device


def device_program(round_count: int, parts: Iterable[PartInChunk], in_order: bool = False) -> DeviceProgram:
    """Return the part of one device, given its part in each chunk.

    Every read of another device's value is a message, as in the simulation.

    Args:
      round_count: the number of rounds of the program.
      parts: the parts of the device, one for each chunk, in the order of the chunks.
      in_order: whether the instructions of a round, and the operands of each, are sorted by the new device numbers.
    """
    values: list[LocalValue] = []
    local: dict[tuple[int, int], int] = {}  # the local number of each value on this device
    rounds: list[list[tuple[int, PartInChunk, Event]]] = [[] for _ in range(round_count)]
    listed = list(parts)
    for c, part in enumerate(listed):
        events, origin, moved = part
        values.append(LocalValue(c, events.is_final))
        if origin in events.inputs:
            local[c, events.inputs[origin]] = c
        device_events = events.by_device.get(origin, [])
        for event in sorted(device_events, key=lambda event: moved(event.device)) if in_order else device_events:
            rounds[event.round].append((c, part, event))
    stages = []
    for events_of_round in rounds:
        sends, receives, combinations = [], [], []
        for c, (_, origin, moved), (_, device, value, read, final) in events_of_round:
            if device != origin:
                sends += [(local[c, operand.value], moved(device)) for operand in read]
                continue
            operands = []
            for operand in sorted(read, key=lambda operand: moved(operand.device)) if in_order else read:
                if operand.device == origin:
                    operands.append(local[c, operand.value])
                else:
                    receives.append((len(values), moved(operand.device)))
                    operands.append(len(values))
                    values.append(LocalValue(c, operand.final))
            local[c, value] = operands[0]
            if len(operands) > 1:
                local[c, value] = len(values)
                combinations.append(Combination(len(values), tuple(operands), final))
                values.append(LocalValue(c, final))
        stages.append(DeviceStage(tuple(sends), tuple(receives), tuple(combinations)))
    chunk_results = [part.events.results.get(part.origin) for part in listed]
    results = tuple([-1 if result is None else local[c, result] for c, result in enumerate(chunk_results)])
    return DeviceProgram(tuple(values), tuple(stages), results)
