"""Export all-reduces through a switch that adds and multicasts (NVLS), with MSCCL++'s switch channels.

Input: an in-network all-reduce and its topology. Output: threadblocks in ``GpuPlan``s.

The operation ``glres`` loads the sum of a block of all GPUs through the switch, and stores it on all GPUs. Each GPU
does this for one part of the buffer, regardless of the device on which the schedule reduces. So all links carry the
same number of bytes. A part is divided among as many threadblocks as fill the GPU's link. Threadblock k of each GPU
first waits until threadblock k of all others has begun, since earlier calls may still use the buffers. At the end it
waits until all of them have stored their blocks.

Source: handleMultiLoadReduceStore in src/core/include/execution_kernel.hpp of github.com/microsoft/mscclpp.
"""

from __future__ import annotations

import math

from .....errors import PlanError
from .....schedule import Schedule, fluid_rate
from .....topology import Topology
from ...channels import CHANNEL_GB_PER_S
from ..limits import MOST_CHANNELS
from .connections import GpuPlan, Hosts, LocalEnd, ThreadblockPlan, connect


def uses_switches(schedule: Schedule, topology: Topology | None) -> bool:
    """Return whether a schedule combines or copies data in switches."""
    switches = {switch.name for switch in topology.switches} if topology is not None else set()
    return any(device in switches for device in schedule.devices)


def refusal_reason(topology: Topology, collective: str) -> str | None:
    """Return, as a sentence, why an MSCCL++ plan cannot use the switches of a topology, or ``None`` if it can.

    >>> refusal_reason(Topology.star(4).with_switches(reducing=True), "all_reduce") is None
    True
    >>> refusal_reason(Topology.star(18).with_switches(reducing=True), "all_reduce")
    'a threadblock has at most 16 channels, and so joins at most 17 GPUs.'
    """
    hosts = Hosts(topology.devices)
    reducing = [switch.name for switch in topology.switches if switch.reduces]
    if collective != "all_reduce":
        return "only all-reduces are exported with its switch channels."
    if len(set(hosts.hosts)) > 1:
        return "its switch channels join GPUs of one host."
    if len(reducing) != 1:
        return "its switch channels need one switch that reduces and joins all GPUs."
    links = topology.by_ends
    if any((a, reducing[0]) not in links or (reducing[0], a) not in links for a in topology.devices):
        return "its switch channels need a switch that has links from and to all GPUs."
    if len(topology.devices) > MOST_CHANNELS + 1:
        return f"a threadblock has at most {MOST_CHANNELS} channels, and so joins at most {MOST_CHANNELS + 1} GPUs."
    return None


def switch_threadblocks(
    schedule: Schedule, topology: Topology, most: int, *, inplace: bool
) -> tuple[list[GpuPlan], int]:
    """Return the GPUs of an in-network all-reduce with at most ``most`` threadblocks each, and the units of the buffer.

    Raises:
      PlanError: the topology does not have one switch that reduces and joins all devices of one host, or the schedule
        is not an all-reduce of all devices.
    """
    devices = [device for device in schedule.devices if device in topology.devices]
    everyone = {schedule.devices.index(device) for device in devices}
    fits = all(set(chunk.sources) == set(chunk.destinations) == everyone for chunk in schedule.chunks if chunk.share)
    reason = refusal_reason(topology, "all_reduce" if fits else schedule.collective)
    if reason is None and (not fits or set(devices) != set(topology.devices)):
        reason = "only all-reduces of all devices are exported with its switch channels."
    if reason is not None:
        raise PlanError.of(f"MSCCL++ cannot hold this plan: {reason}", schedule.head, "a topology without in_network")
    ranks = len(devices)
    rate = fluid_rate(schedule, topology)
    parts = 1 if rate is None else 1 << (max(1, math.ceil(rate / ranks / CHANNEL_GB_PER_S)) - 1).bit_length()
    parts = min(parts, 1 << most.bit_length() - 1)
    gpus = [GpuPlan(rank) for rank in range(ranks)]
    group = {"size": ranks, "ranks": list(range(ranks))}
    buffers = ["i"] if inplace else ["i", "o"]
    for gpu in gpus:
        gpu.switches = [
            {"channel_type": "switch", "buffer_type": buffer, "rank_groups": [dict(group)]} for buffer in buffers
        ]
    for k in range(parts):
        ends: list[list[LocalEnd]] = [[] for _ in gpus]
        for a in range(ranks):
            for b in range(a + 1, ranks):
                near, far = connect(gpus, a, b, "memory")
                ends[a].append(near)
                ends[b].append(far)
        for gpu, local_ends in zip(gpus, ends, strict=True):
            block = ThreadblockPlan(gpu)
            block.signal(local_ends)
            block.wait(local_ends)
            block.reduce_in_switch(gpu.rank * parts + k, 1, len(buffers))
            block.signal(local_ends)
            block.wait(local_ends)
            gpu.threadblocks.append(block)
    return gpus, ranks * parts
