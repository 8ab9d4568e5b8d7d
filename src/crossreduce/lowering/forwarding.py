"""Programs for engines that cannot route messages: devices on a route receive the value and send it on."""

from __future__ import annotations

from functools import lru_cache

from ..topology import Topology
from .instructions import Read, finish_instructions
from .program import Program


@lru_cache(maxsize=256)
def forward_through_devices(program: Program, topology: Topology) -> Program:
    """Return the same program for devices that send messages only over direct links or through switches.

    Devices on a route receive the value and send it on, each in a separate round.

    >>> from crossreduce.lowering import lower
    >>> from crossreduce.planning import one_shot
    >>> line = Topology.mesh(1, 3)
    >>> print(forward_through_devices(lower(one_shot(line.devices, destinations=["cpu:2"])), line))
    reduce one_shot: 3 devices, 1 chunk, 2 instructions
      chunk 0: v3 on cpu:1 = v0
      chunk 0: v4 on cpu:2 = v3 + v1 + v2 (final)
    """
    numbers = {device: k for k, device in enumerate(program.devices)}

    def between(chunk: int, src: int, dst: int, r: int) -> tuple[int, ...]:
        """Return the devices on the route of a transfer, without its ends."""
        route = program.through(r, chunk, src, dst)
        if route is None:
            route = topology.route(program.devices[src], program.devices[dst]) or ()
        return tuple(numbers[node] for node in route if node in numbers and numbers[node] not in (src, dst))

    extra_rounds = [
        max((len(between(transfer.chunk, transfer.src, transfer.dst, r)) for transfer in transfers), default=0)
        for r, transfers in enumerate(program.transfers)
    ]
    if not any(extra_rounds):
        return program
    starts = [r + sum(extra_rounds[:r]) for r in range(program.round_count)]  # for each round, its first new round
    chunks = []
    for c, chunk in enumerate(program.chunks):
        inputs, places = len(chunk.sources), chunk.devices
        numbered = list(range(inputs))  # for each value of the chunk, its number in the new chunk
        read: list[Read] = []
        copies: dict[tuple[int, int], tuple[int, int]] = {}  # by value and device: the number of the copy, its round
        for instruction in chunk.instructions:
            operands, r = [], instruction.round
            for operand in instruction.operands:
                value = numbered[operand]
                for hop, device in enumerate(between(c, places[operand], instruction.device, r)):
                    copy = copies.get((operand, device))
                    if copy is None or copy[1] > starts[r] + hop:  # there is no copy, or only one of a later round
                        copy = copies[operand, device] = inputs + len(read), starts[r] + hop
                        read.append((starts[r] + hop, device, (value,)))
                    value = copy[0]
                operands.append(value)
            numbered.append(inputs + len(read))
            read.append((starts[r] + extra_rounds[r], instruction.device, tuple(operands)))
        results = tuple(numbered[value] for value in chunk.results)
        chunks.append(chunk._replace(instructions=finish_instructions(inputs, read, results), results=results))
    round_count = program.round_count + sum(extra_rounds)
    return Program(
        program.collective, program.algorithm, program.devices, tuple(chunks), round_count, program.pieces, ()
    )
