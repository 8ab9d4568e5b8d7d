"""The least number of channels that any MSCCL++ plan of a schedule needs.

Input: a program. Output: nothing, or PlanError if every plan exceeds a limit of the executor. Channels are counted on
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

    One threadblock sends a value to all receivers, and one threadblock receives all operands of a combination.
    """
    hosts = Hosts(schedule.devices)
    for rank in program.alike:
        for peers in _peers_of_threadblocks(program.on(rank)):
            for kind in ("memory", "port"):
                count = sum(hosts.kind(rank, peer) == kind for peer in peers)
                if count > MOST_CHANNELS:
                    raise over_limit(schedule, rank, "channels per threadblock", f"at least {count}", MOST_CHANNELS)


def _peers_of_threadblocks(part: DeviceProgram) -> list[set[int]]:
    """Return sets of ranks: the receivers of each value, and the senders of the operands of each combination."""
    receivers = defaultdict[int, set[int]](set)
    senders = []
    for stage in part.stages:
        for value, peer in stage.sends:
            receivers[value].add(peer)
        source = dict(stage.receives)
        operands = (combined.operands for combined in stage.combinations)
        senders += [{source[value] for value in values if value in source} for values in operands]
    return [*receivers.values(), *senders]
