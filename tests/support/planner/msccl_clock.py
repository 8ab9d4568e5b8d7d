"""A clock for MSCCL XML files: how long a file takes on the links of a machine, one event at a time.

It is an independent model of the runtimes and shares no code with the library. Threadblocks run as the kernels of
msccl-executor-nccl and RCCL run them under the Simple protocol:

- A chunk of the buffer is divided into slices of at most 2 MiB. For each slice, a threadblock runs all its steps in
  order. It waits for another threadblock only if a step depends on one, and for messages and free slots of connections.
- A step of several chunks is divided into messages of at most 2 MiB, a message into two halves of at least 32 KiB. A
  connection holds four halves. A step that receives and sends does so half by half.
- A half is sent in eight packets. Each takes its turn on each link of its route, first come, first served, so that
  threadblocks share a link in proportion to the sizes of their messages. Switches pass packets on as they arrive. The
  sender continues when it has sent the half on its first link. Local steps take no time.

With ``cap``, a threadblock moves at most so many bytes per second.

Source: src/device/msccl_kernel.cu (the loop, flags), src/device/prims_simple.h (halves) and init.cc (4 MiB buffers of 8
steps) in github.com/Azure/msccl-executor-nccl.
"""

import heapq
import itertools
import math
import xml.etree.ElementTree as ET
from bisect import bisect_left
from collections import defaultdict

from msccl_machine import LOADING, RECEIVING, SENDING, STORING, transmissions

SLICE = 1 << 21
LEAST_HALF = 1 << 15
SLOTS = 4
PACKETS = 8


class Clock:
    """One call of a file.

    Args:
      text: the file.
      links: bytes per second and seconds of latency of each link, by the nodes at its ends.
      route: returns the nodes that a message passes, with both ends, by the ranks that send and receive it and its
        position in the buffer, from 0 to 1; ``None``: the position is unknown.
      nbytes: the size of the whole buffer.
    """

    def __init__(self, text, links, route, nbytes, *, cap=math.inf):
        top = ET.fromstring(text)
        self.links, self.cap = links, cap
        self.chunk = nbytes / int(top.get("nchunksperloop"))
        self.iterations = max(1, math.ceil(self.chunk / SLICE))
        self.programs, self.ends = {}, {}
        for gpu in top:
            g = int(gpu.get("id"))
            for block in gpu:
                place = g, int(block.get("id"))
                self.programs[place] = transmissions(block)
                send, recv, channel = (int(block.get(key)) for key in ("send", "recv", "chan"))
                self.ends[place] = (g, send, channel), (recv, g, channel)
        self.find_routes(top.get("coll"), int(top.get("nchunksperloop")), int(top.get("ngpus")), route)
        self.flags = dict.fromkeys(self.programs, (-1, -1))
        self.arrived = defaultdict(int)
        self.received = defaultdict(int)
        self.sent = defaultdict(int)
        self.free = defaultdict(float)  # when a link has sent all that was given to it
        self.events, self.waiting, self.count, self.now = [], defaultdict(list), 0, 0.0

    def find_routes(self, coll, chunks, ranks, route):
        """Determine the route of each step that sends: by the part of the buffer that its data belongs to.

        Scratch memory belongs to the part that the other end of a step that uses it belongs to, here or at the peer.
        """
        scratch = {}

        def position(rank, span):
            buffer, offset = span
            if buffer == "s":
                return scratch.get((rank, offset))
            part = {"i": "allgather", "o": "reducescatter"}[buffer] == coll
            return (offset + (rank * chunks // ranks if part else 0) + 0.5) / chunks

        received = defaultdict(list)
        for place, program in self.programs.items():
            received[self.ends[place][1]] += [step for step in program if step.type in RECEIVING]
        groups = []  # the ends of each step, and of the step that receives its message
        sending = {}
        for place, program in self.programs.items():
            out = self.ends[place][0]
            others = iter(received[out])
            for step in program:
                ends = [(place[0], step.src)] * (step.type in LOADING) + [(place[0], step.dst)] * (step.type in STORING)
                if step.type in SENDING:
                    other = next(others)
                    ends += [(out[1], other.src)] * (other.type in LOADING)
                    ends += [(out[1], other.dst)] * (other.type in STORING)
                    sending[step] = out, ends
                groups.append(ends)
        known = -1
        while known < len(scratch):
            known = len(scratch)
            for ends in groups:
                found = next((place for place in itertools.starmap(position, ends) if place is not None), None)
                if found is not None:
                    scratch |= {(rank, span[1]): found for rank, span in ends if span[0] == "s"}
        for step, (out, ends) in sending.items():
            found = next((place for place in itertools.starmap(position, ends) if place is not None), None)
            step.route = list(itertools.pairwise(route(*out[:2], found)))

    def halves(self, count, iteration):
        """Return the bytes of the halves of a step's messages in an iteration."""
        size = min(SLICE, self.chunk - iteration * SLICE)
        most = max(1, int(SLICE // size))
        found = []
        for first in range(0, count, most):
            message = min(most, count - first) * size
            half = min(message, max(message / 2, LEAST_HALF))
            found += [half, message - half]
        return found

    def threadblock(self, place):
        """Yield what a threadblock waits for, until all its iterations are done."""
        out, into = self.ends[place]
        for iteration in range(self.iterations):
            for step in self.programs[place]:
                for block, number in step.waits:
                    target = place[0], block
                    while self.flags[target] < (iteration, number):
                        yield "flag", target
                receives, sends = step.type in RECEIVING, step.type in SENDING
                for size in self.halves(step.count, iteration):
                    while receives and self.arrived[into] == self.received[into]:
                        yield "message", into
                    while sends and self.sent[out] - self.received[out] == SLOTS:
                        yield "slot", out
                    start = self.now
                    if sends:
                        self.sent[out] += 1
                        for k in range(PACKETS):
                            last = k + 1 == PACKETS
                            yield "sleep", self.hop(out, step.route, size / PACKETS, 0, self.now, self.now, last)
                        if self.cap < math.inf:
                            yield "sleep", max(self.now, start + size / self.cap)
                    elif size and self.cap < math.inf:
                        yield "sleep", start + size / self.cap
                    if receives:
                        self.received[into] += 1
                        self.wake("slot", into)
                if step.flag is not None:
                    self.flags[place] = iteration, step.flag
                    self.wake("flag", place)

    def hop(self, connection, route, size, number, head, tail, last):
        """Send a packet on a link of its route: its first byte is there at ``head``, its last one at ``tail``.

        ``last``: whether it is the last one of its half, which has then arrived.
        """
        pair = route[number]
        bandwidth, latency = self.links[pair]
        start = max(head, self.free[pair])
        self.free[pair] = start + size / bandwidth
        end = max(self.free[pair], tail)
        if number + 1 < len(route):
            self.at(start + latency, ("hop", connection, route, size, number + 1, end + latency, last))
        elif last:
            self.at(end + latency, ("arrival", connection))
        return end

    def at(self, time, event):
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

    def wake(self, kind, key):
        for thread in self.waiting.pop((kind, key), ()):
            self.at(self.now, ("resume", thread))

    def resume(self, thread):
        wanted = next(thread, None)
        if wanted is None:
            self.running -= 1
        elif wanted[0] == "sleep":
            self.at(wanted[1], ("resume", thread))
        else:
            self.waiting[wanted].append(thread)

    def run(self):
        """Return the seconds until all threadblocks are done."""
        self.running = len(self.programs)
        for place in self.programs:
            self.at(0.0, ("resume", self.threadblock(place)))
        while self.events:
            self.now, _, (kind, *rest) = heapq.heappop(self.events)
            if kind == "resume":
                self.resume(*rest)
            elif kind == "hop":
                self.hop(*rest[:4], self.now, *rest[4:])
            else:
                self.arrived[rest[0]] += 1
                self.wake("message", rest[0])
        if self.running:
            raise RuntimeError(f"{self.running} threadblocks wait forever: {list(self.waiting)[:4]}")
        return self.now


def seconds(text, topology, schedule, nbytes, **options):
    """Return how long a file of a schedule takes on a topology: rank k is the schedule's k-th device.

    Messages take the routes that the schedule gives for their chunk (in its last round), else that of the topology.
    """
    links = {(link.src, link.dst): (float(link.bandwidth) * 1e9, float(link.latency_s)) for link in topology.links}
    names, chunks = schedule.devices, list(enumerate(schedule.chunks))
    if schedule.collective in ("all_gather", "reduce_scatter"):  # the buffer is in the order of the owners
        owner = "sources" if schedule.collective == "all_gather" else "destinations"
        chunks.sort(key=lambda entry: getattr(entry[1], owner))
    numbers = [number for number, chunk in chunks if chunk.share]
    ends = list(itertools.accumulate(float(chunk.share) for _, chunk in chunks if chunk.share))
    given = {(chunk, src, dst): through for chunk, src, dst, through, *_ in schedule.routes}

    def route(src, dst, position):
        chunk = None if position is None else numbers[min(bisect_left(ends, position), len(ends) - 1)]
        if (chunk, src, dst) in given:
            return names[src], *given[chunk, src, dst], names[dst]
        return topology.route(names[src], names[dst])

    return Clock(text, links, route, nbytes, **options).run()
