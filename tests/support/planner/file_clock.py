"""A clock of MSCCL XML files and MSCCL++ plans: how long an exported file takes on a topology.

It shares no code with the exporters. Each threadblock runs its operations in order. Rank k is the k-th device. Data
moves over all links of a route, in slices, so that transfers that share a link share its bandwidth. A link serves
slices in the order of their requests. The next link of a route starts when the previous one starts, and ends no
earlier than it. A threadblock continues when its data has left the first link. Local operations take no time.

MSCCL XML (github.com/Azure/msccl-executor-nccl, src/device/msccl_kernel.cu, prims_simple.h): a chunk of the buffer is
divided into parts of at most 2 MiB; for each, a threadblock runs all its steps. A step's messages have at most 2 MiB,
in two halves of at least 32 KiB, sent in eight packets; a connection holds four halves.

MSCCL++: a threadblock signals when its data has left the last link, and the signal arrives the latency of the route
later. A port channel makes its transfers itself, one after the other.

Files do not state routes. If a schedule has several routes between two devices, slices are divided in proportion.
"""

import heapq
import json
import math
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict, deque
from itertools import pairwise

from msccl_machine import RECEIVING, SENDING, transmissions

from crossreduce.lowering import lower

SLICE, PART, LEAST_HALF, SLOTS, PACKETS = 1 << 16, 1 << 21, 1 << 15, 4, 8  # bytes, bytes, bytes, halves, packets


class StuckError(Exception):
    """Threadblocks wait forever."""


class Clock:
    """Runs threads. A thread yields the time at which it continues, or a key, to wait for ``wake`` with this key."""

    def __init__(self, topology, schedule=None):
        self.devices, self.topology = topology.devices, topology
        self.bandwidth = {(link.src, link.dst): float(link.bandwidth) * 1e9 for link in topology.links}
        self.latency = {(link.src, link.dst): float(link.latency_s) for link in topology.links}
        self.free, self.events, self.asleep, self.now, self.number = Counter(), [], defaultdict(list), 0.0, 0
        self.routes = defaultdict(Counter)  # by source and destination: the share of the buffer that takes each route
        for sent in lower(schedule).transfers if schedule else ():
            for chunk, src, dst, through, _ in sent:
                a, b = schedule.devices[src], schedule.devices[dst]
                nodes = topology.route(a, b) if through is None else (a, *through, b)
                self.routes[src, dst][nodes] += float(schedule.chunks[chunk].share)
        self.moved = Counter()

    def route(self, src, dst, nbytes):
        """Return the links of the route that has carried the least of the bytes that are due to it so far."""
        routes = self.routes[src, dst] or {self.topology.route(self.devices[src], self.devices[dst]): 1}
        nodes = min(routes, key=lambda nodes: self.moved[src, dst, nodes] / routes[nodes])
        self.moved[src, dst, nodes] += nbytes
        return list(pairwise(nodes))

    def delay(self, src, dst):
        return sum(self.latency[pair] for pair in self.route(src, dst, 0))

    def at(self, time, action, *args):
        self.number += 1  # events at the same time happen in the order in which they were scheduled
        heapq.heappush(self.events, (time, self.number, action, *args))

    def wake(self, key):
        for thread in self.asleep.pop(key, ()):
            self.at(self.now, self.resume, thread)

    def resume(self, thread):
        wanted = next(thread, None)
        if isinstance(wanted, float):
            self.at(wanted, self.resume, thread)
        elif wanted is not None:
            self.asleep[wanted].append(thread)
        else:
            self.running -= 1

    def run(self, threads=()):
        """Return the seconds until all threads are done, or, without threads, until the last event."""
        self.running = len(threads)
        for thread in threads:
            self.at(0.0, self.resume, thread)
        while self.events and (self.running or not threads):
            self.now, _, action, *args = heapq.heappop(self.events)
            action(*args)
        if self.running:
            raise StuckError(f"{self.running} threadblocks wait")
        return self.now

    def occupy(self, pair, nbytes):
        """Send bytes over a link from now on, or when it is free. Return when they have left it."""
        self.free[pair] = max(self.now, self.free[pair]) + nbytes / self.bandwidth[pair]
        return self.free[pair]

    def transfer(self, src, dst, nbytes, done):
        """Return when bytes have left the first link. ``done`` is called when they have left the last link."""
        return self.hop(self.route(src, dst, nbytes), nbytes, 0.0, done)

    def hop(self, route, nbytes, before, done):
        """Send bytes over the first link of a route. ``before`` is when they have left the link before it."""
        start, left = max(self.now, self.free[route[0]]), self.occupy(route[0], nbytes)
        end = max(left, before)
        if route[1:]:
            self.at(start, self.hop, route[1:], nbytes, end, done)
        else:
            self.at(end, done)
        return left


def slices(nbytes):
    """Return the sizes of the slices of a transfer."""
    count = max(1, math.ceil(nbytes / SLICE))
    return [nbytes / count] * count


def msccl_seconds(text, topology, nbytes, schedule=None):
    """Return the seconds of one call of an MSCCL XML file."""
    top, clock = ET.fromstring(text), Clock(topology, schedule)
    chunk = nbytes / int(top.get("nchunksperloop"))
    flags, arrived, received, sent = {}, Counter(), Counter(), Counter()

    def halves(count, part):
        """Yield the bytes of each half of the messages that move ``count`` chunks of a part."""
        size = min(PART, chunk - part * PART)
        most = max(1, int(PART // size))
        for first in range(0, count, most):
            message = min(most, count - first) * size
            half = min(message, max(message / 2, LEAST_HALF))
            yield from [half, message - half] if half < message else [half]

    def arrive(out):
        arrived[out] += 1
        clock.wake(out)

    def threadblock(place, program, out, into):
        for part in range(max(1, math.ceil(chunk / PART))):
            for step in program:
                for block, number in step.waits:
                    while flags.get((place[0], block), (-1, -1)) < (part, number):
                        yield "flag", (place[0], block)
                for size in halves(step.count, part):
                    while step.type in RECEIVING and arrived[into] == received[into]:
                        yield into
                    if step.type in SENDING:
                        while sent[out] - received[out] == SLOTS:
                            yield "slot", out
                        sent[out] += 1
                        later, done = clock.delay(*out[:2]), lambda: None
                        for k in range(PACKETS):
                            if k + 1 == PACKETS:
                                done = lambda later=later: clock.at(clock.now + later, arrive, out)  # noqa: E731
                            yield clock.transfer(*out[:2], size / PACKETS, done)
                    if step.type in RECEIVING:
                        received[into] += 1
                        clock.wake(("slot", into))
                if step.flag is not None:
                    flags[place] = part, step.flag
                    clock.wake(("flag", place))

    threads = []
    for gpu in top:
        for block in gpu:
            g, send, recv, channel = int(gpu.get("id")), *(int(block.get(key)) for key in ("send", "recv", "chan"))
            program = transmissions(block)
            threads.append(threadblock((g, int(block.get("id"))), program, (g, send, channel), (recv, g, channel)))
    return clock.run(threads)


def mscclpp_seconds(text, topology, nbytes, schedule=None):
    """Return the seconds of one call of an MSCCL++ plan.

    A ``glres`` reads from all devices and writes to all of them through their switch. Each device sends its bytes and
    receives the sum. The device that runs the ``glres`` also receives the sum of the reads and sends it to the switch.
    """
    plan, clock = json.loads(text), Clock(topology, schedule)
    gpus = plan["gpus"]
    chunk = nbytes / gpus[0]["output_chunks" if plan["collective"] == "allgather" else "input_chunks"]
    signals, requests, peers, numbered = Counter(), defaultdict(deque), {}, Counter()
    # ``peers``: for (rank, kind, number of a channel) its peer, and how many earlier channels have the same peer.
    for rank, gpu in enumerate(gpus):
        for kind in ("memory", "port"):
            connected = [p for c in gpu["channels"] if c["channel_type"] == kind for p in c["connected_to"]]
            for k, peer in enumerate(connected):
                peers[rank, kind, k] = peer, numbered[rank, kind, peer]
                numbered[rank, kind, peer] += 1
    ends = {(rank, kind, *pair): (rank, kind, k) for (rank, kind, k), pair in peers.items()}
    moving = Counter()  # by sender: slices that have not left their last link

    def move(sender, dst, size):
        """Send a slice, and return when it has left the first link."""

        def done():
            moving[sender] -= 1
            clock.wake(("moved", sender))

        moving[sender] += 1
        return clock.transfer(sender[0], dst, size, done)

    def signal(sender, end):
        """Signal through a channel when all slices of the sender have arrived."""

        def deliver(other):
            signals[other] += 1
            clock.wake(other)

        while moving[sender]:
            yield "moved", sender
        peer, which = peers[end]
        clock.at(clock.now + clock.delay(end[0], peer), deliver, ends[peer, end[1], end[0], which])

    def port(end):
        """Make the requested transfers and signals of a port channel, one after the other."""
        while True:
            while requests[end]:
                dst, size = requests[end].popleft()
                if dst is None:
                    yield from signal(end, end)
                else:
                    yield move(end, dst, size)
            yield "port", end

    def switch(rank, size):
        """Run a part of a ``glres`` of a rank, and return when it is done."""
        (node,) = {dst for src, dst in clock.bandwidth if src == clock.devices[rank]}
        pairs = [pair for device in clock.devices for pair in ((device, node), (node, device))]
        return max(clock.occupy(pair, size * (2 if clock.devices[rank] in pair else 1)) for pair in pairs)

    def operation(sender, channels, buffers, op, offset=0, unit=math.inf):
        """Run an operation of a threadblock: in a pipeline, only the bytes from ``offset`` to ``offset + unit``."""
        rank, name, kind = sender[0], op["name"], op.get("channel_type", "none")
        used = [(rank, kind, channels[kind][k]) for k in op.get("channel_ids", ())]
        size = lambda span: min(span["size"] * chunk - offset, unit)  # noqa: E731
        peer = lambda span: gpus[rank]["remote_buffers"][buffers[kind][span["buffer_id"]]]["rank"]  # noqa: E731
        if kind == "port" and name != "wait":
            spans = op.get("dst_buff", [None] * len(used))
            for end, dst in zip(used, spans, strict=True):
                requests[end] += [(peer(dst), part) for part in slices(size(dst))] if dst else []
                requests[end] += [(None, 0)] if name != "put" else []
                clock.wake(("port", end))
        elif name == "wait":
            for end in used:
                while not signals[end]:
                    yield end
                signals[end] -= 1
        elif name == "signal":
            for end in used:
                yield from signal(sender, end)
        elif name == "put":
            for dst in op["dst_buff"]:
                for part in slices(size(dst)):
                    yield move(sender, peer(dst), part)
        elif name == "res":
            for part in slices(size(op["src_buff"][0])):
                yield max(move(sender, peer(dst), part) for dst in op["dst_buff"][1:])
        elif name == "glres":
            for part in slices(size(op["src_buff"][0])):
                yield switch(rank, part)
        else:
            assert name in ("nop", "re", "copy"), name

    def threadblock(rank, block):
        sender = rank, "block", block["id"]
        channels = {used["channel_type"]: used["channel_ids"] for used in block["channels"]}
        buffers = {used["access_channel_type"]: used["remote_buffer_ids"] for used in block["remote_buffer_refs"]}
        for op in block["ops"]:
            if op["name"] != "pipeline":
                yield from operation(sender, channels, buffers, op)
                continue
            unit, total = op["iter_context"]["unit_size"], op["iter_context"]["num_chunks"] * chunk
            for k in range(math.ceil(total / unit - 1e-9)):
                for inner in op["ops"]:
                    yield from operation(sender, channels, buffers, inner, k * unit, unit)
        while moving[sender]:
            yield "moved", sender

    for end in peers:
        if end[1] == "port":
            clock.at(0.0, clock.resume, port(end))
    return clock.run([threadblock(rank, block) for rank, gpu in enumerate(gpus) for block in gpu["threadblocks"]])


def algbw(text, schedule, topology, size=256 << 20):
    """Return the GB/s of an MSCCL++ plan for messages of at least ``size`` bytes, with the routes of its schedule."""
    gpu = json.loads(text)["gpus"][0]
    step = 16 * max(gpu["input_chunks"], gpu["output_chunks"])
    nbytes = -(-size // step) * step
    return nbytes / mscclpp_seconds(text, topology, nbytes, schedule) / 1e9
