"""What every MSCCL++ plan of a schedule needs at least.

Input: a program. Output: nothing, or PlanError if each of its plans exceeds a limit of the executor. This is counted on
one rank of each group of equal ranks before any threadblock is made, so a schedule that cannot fit is refused at once.
"""

from __future__ import annotations

from collections import defaultdict

from .....lowering import DeviceProgram, Program
from .....schedule import Schedule
from ..limits import MOST_CHANNELS
from .connections import Hosts, over_limit


def check_least(schedule: Schedule, program: Program) -> None:
    """Raise a PlanError if a value has more receivers, or a combination more senders, than a threadblock has channels.

    One threadblock sends a value to all of its receivers, and one receives all operands of a combination.
    """
    hosts = Hosts(schedule.devices)
    for rank in program.alike:
        for peers in _groups(program.on(rank)):
            for kind in ("memory", "port"):
                count = sum(hosts.kind(rank, peer) == kind for peer in peers)
                if count > MOST_CHANNELS:
                    raise over_limit(schedule, rank, "channels per threadblock", f"at least {count}", MOST_CHANNELS)


def _groups(part: DeviceProgram) -> list[set[int]]:
    """Return the ranks that each value is sent to, and those from which the operands of each combination come."""
    receivers = defaultdict[int, set[int]](set)
    found = []
    for stage in part.stages:
        for value, peer in stage.sends:
            receivers[value].add(peer)
        source = dict(stage.receives)
        found += [{source[value] for value in made.operands if value in source} for made in stage.combinations]
    return [*receivers.values(), *found]
