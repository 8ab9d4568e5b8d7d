"""A clock of MSCCL++ plans: how long an exported file takes on a topology. It shares no code with the exporter.

Each threadblock runs its operations in order. Rank k is the topology's k-th device. Operations that write into another
GPU's memory move their bytes over all links of the route between the two devices, in slices of at most ``SLICE`` bytes
per transfer, so that transfers that share a link share its bandwidth. Each slice of a ``res`` goes to all destinations;
a ``put`` serves one after the other. A link serves slices in the order of their requests, and
the next link of a route starts when the first one does, and ends no earlier. The threadblock continues when the bytes
have left the first link, but signals only when they have left the last one. A port channel makes its transfers itself,
one after the other, and the threadblock continues at once. Signals arrive the latency of the route later, and waits
block. Local operations and synchronisation take no time.

Files do not state routes. Where a plan uses several between two devices, ``routes`` lists them with weights, and the
transfers are distributed over them in proportion.

A ``glres`` reads from all devices and writes to all of them through their switch: each device sends its bytes and
receives the sum, and the device that runs the operation also receives the sum of the reads and sends it to the switch.
"""

import heapq
import json
from collections import defaultdict, deque
from fractions import Fraction
from itertools import pairwise

from crossreduce.lowering import lower

SLICE = 1 << 16


class StuckError(Exception):
    """Threadblocks wait forever."""


def slices(total):
    """Return the sizes of the slices of a transfer."""
    count = max(1, -(-total // SLICE))
    return [total / count] * int(count)


class PlanClock:
    """Runs one call of a plan for a message of some bytes; ``seconds`` is when its last threadblock ends."""

    def __init__(self, text, topology, nbytes, routes=None):
        """``routes``: by (src, dst), the nodes of each route with its weight; not given: that of the topology."""
        self.plan, self.topology, self.given = json.loads(text), topology, routes or {}
        gpus = self.plan["gpus"]
        chunks = gpus[0]["output_chunks" if self.plan["collective"] == "allgather" else "input_chunks"]
        self.chunk = nbytes / chunks
        self.links = {(link.src, link.dst): link for link in topology.links}
        self.bandwidth = {pair: float(link.bandwidth) * 1e9 for pair, link in self.links.items()}
        self.free = defaultdict(float)  # by link
        self.routes = {}
        self.moved = {}
        self.pairs = {}
        for rank, gpu in enumerate(gpus):
            for kind in ("memory", "port"):
                seen = defaultdict(int)
                numbers = [p for c in gpu["channels"] if c["channel_type"] == kind for p in c["connected_to"]]
                for number, peer in enumerate(numbers):
                    self.pairs[rank, kind, number] = peer, seen[peer]
                    seen[peer] += 1
        self.ends = {(rank, kind, *pair): (rank, kind, k) for (rank, kind, k), pair in self.pairs.items()}
        self.signals = defaultdict(deque)  # by end of a channel that receives: the times of arrival
        self.posted = defaultdict(deque)  # by end of a port channel: its actions that are still to be done
        self.asleep = defaultdict(list)
        self.blocks = [self.steps(rank, block) for rank, gpu in enumerate(gpus) for block in gpu["threadblocks"]]
        self.ranks = [rank for rank, gpu in enumerate(gpus) for _ in gpu["threadblocks"]]
        self.proxies = {}  # by end of a port channel: the number of what makes its transfers, among the blocks
        for end in self.pairs:
            if end[1] == "port":
                self.proxies[end] = len(self.blocks)
                self.blocks.append(self.proxy(end))
                self.ranks.append(end[0])
        self.seconds = self.run()

    # ---- what a threadblock does, step by step

    def steps(self, rank, block):
        """Yield a threadblock's actions: ("wait", end), ("signal", end), ("move", [(dst, bytes)]), ("post", ...)."""
        channels = {used["channel_type"]: used["channel_ids"] for used in block["channels"]}
        buffers = {used["access_channel_type"]: used["remote_buffer_ids"] for used in block["remote_buffer_refs"]}
        remote = self.plan["gpus"][rank]["remote_buffers"]

        def actions(op, offset, unit):
            name, kind = op["name"], op.get("channel_type", "none")

            def size(span):
                left = span["size"] * self.chunk - offset
                return left if unit is None else min(left, unit)

            def peer(span):
                return remote[buffers[kind][span["buffer_id"]]]["rank"]

            def ends():
                return [(rank, kind, channels[kind][k]) for k in op["channel_ids"]]

            if name == "signal" and kind == "port":
                for end in ends():
                    yield "post", (end, [("signal", end)])
            elif name in ("wait", "signal"):
                for end in ends():
                    yield name, end
            elif name in ("put", "pws") and kind == "port":
                for end, dst in zip(ends(), op["dst_buff"], strict=True):
                    posts = [("move", [(peer(dst), part)]) for part in slices(size(dst))]
                    yield "post", (end, posts + [("signal", end)] * (name == "pws"))
            elif name == "put":
                for dst in op["dst_buff"]:
                    for part in slices(size(dst)):
                        yield "move", [(peer(dst), part)]
            elif name == "res":
                for part in slices(size(op["src_buff"][0])):
                    yield "move", [(peer(dst), part) for dst in op["dst_buff"][1:]]
            elif name == "glres":
                for part in slices(size(op["src_buff"][0])):
                    yield "switch", part
            else:
                assert name in ("nop", "re", "copy"), name

        for op in block["ops"]:
            if op["name"] == "pipeline":
                unit = op["iter_context"]["unit_size"]
                total = op["iter_context"]["num_chunks"] * self.chunk
                k = 0
                while k * unit < total - 1e-6:
                    for inner in op["ops"]:
                        yield from actions(inner, k * unit, unit)
                    k += 1
            else:
                yield from actions(op, 0, None)

    def proxy(self, end):
        """Yield the actions that are posted to one end of a port channel."""
        while True:
            while self.posted[end]:
                yield self.posted[end].popleft()
            yield "idle", end

    # ---- links

    def route(self, src, dst):
        if (src, dst) not in self.routes:
            devices = self.topology.devices
            ends = devices[src], devices[dst]
            listed = self.given.get(ends) or [(self.topology.route(*ends), 1)]
            found = []
            for nodes, weight in listed:
                pairs = list(pairwise(nodes))
                found.append((pairs, sum(float(self.links[pair].latency_s) for pair in pairs), float(weight)))
            self.routes[src, dst] = found
            self.moved[src, dst] = [0.0] * len(found)
        return self.routes[src, dst]

    def next_route(self, src, dst, nbytes):
        """Return the route that is behind its part of the bytes so far."""
        routes = self.route(src, dst)
        moved = self.moved[src, dst]
        k = min(range(len(routes)), key=lambda k: moved[k] / routes[k][2])
        moved[k] += nbytes
        return routes[k][0]

    def transfer(self, now, number, src, dst, nbytes):
        """Request the first link for a slice; return when the slice has left it."""
        route = self.next_route(src, dst, nbytes)
        self.open[number] += 1
        return self.hop(now, (number, route, 0, nbytes, now))

    def hop(self, now, slice_):
        """Let a slice pass a link, and request the next one; return when it has left the link."""
        number, route, k, nbytes, before = slice_
        seconds = nbytes / self.bandwidth[route[k]]
        start = max(now, self.free[route[k]])
        self.free[route[k]] = start + seconds
        end = max(start + seconds, before)
        if k + 1 < len(route):
            self.push(start, (number, route, k + 1, nbytes, end))
        else:
            self.open[number] -= 1
            self.fence[number] = max(self.fence[number], end)
            if not self.open[number]:
                for waiting in self.asleep.pop(("fence", number), ()):
                    self.push(now, waiting)
        return start + seconds

    def push(self, time, what):
        """Add an event: a block that continues, or a slice that requests a link."""
        self.order += 1
        heapq.heappush(self.queue, (time, self.order, what))

    def through_switch(self, now, rank, nbytes):
        """Return when a GPU has reduced and stored bytes of all devices through their switch."""
        devices = self.topology.devices
        (switch,) = {dst for src, dst in self.links if src == devices[rank]}
        end = now
        for k, device in enumerate(devices):  # this GPU also receives the sum and sends it back
            for pair in ((device, switch), (switch, device)):
                seconds = (2 if k == rank else 1) * nbytes / self.bandwidth[pair]
                start = max(now, self.free[pair])
                self.free[pair] = start + seconds
                end = max(end, self.free[pair])
        return end

    # ---- the run

    def run(self):
        self.queue, self.order = [], 0
        self.open = [0] * len(self.blocks)  # slices that have not requested their last link
        self.fence = [0.0] * len(self.blocks)  # when all that a block has sent has left its last link
        pending = [None] * len(self.blocks)  # an action that could not be finished yet
        for number in range(len(self.blocks)):
            self.push(0.0, number)
        done, last = 0, 0.0
        while self.queue:
            now, _, number = heapq.heappop(self.queue)
            if isinstance(number, tuple):
                self.hop(now, number)
                continue
            rank = self.ranks[number]
            while True:
                action = pending[number] or next(self.blocks[number], ("end", None))
                pending[number] = None
                kind, what = action
                if kind in ("signal", "end") and self.open[number]:
                    pending[number] = action
                    self.asleep["fence", number].append(number)
                    break
                if kind == "end":
                    done, last = done + 1, max(last, now, self.fence[number])
                    break
                if kind == "wait":
                    arrivals = self.signals[what]
                    if not arrivals:
                        pending[number] = action
                        self.asleep[what].append(number)
                        break
                    now = max(now, arrivals.popleft())
                    continue
                if kind == "idle":
                    self.asleep["post", what].append(number)
                    break
                if kind == "signal":
                    now = max(now, self.fence[number])
                    self.deliver(what, now)
                    continue
                if kind == "post":
                    end, posts = what
                    self.posted[end] += posts
                    for proxy in self.asleep.pop(("post", end), ()):
                        self.push(now, proxy)
                    continue
                if self.queue and now > self.queue[0][0]:  # links serve requests in the order of time
                    pending[number] = action
                    self.push(now, number)
                    break
                if kind == "move":
                    now = max([self.transfer(now, number, rank, dst, nbytes) for dst, nbytes in what])
                else:
                    now = self.through_switch(now, rank, what)
        if done < len(self.blocks) - len(self.proxies):
            raise StuckError(f"{len(self.blocks) - len(self.proxies) - done} threadblocks wait")
        return last

    def deliver(self, end, now):
        """Let the other end of a channel receive a signal that is sent now."""
        rank, kind, _ = end
        peer, which = self.pairs[end]
        other = self.ends[peer, kind, rank, which]
        arrival = now + self.route(rank, peer)[0][1]
        self.signals[other].append(arrival)
        for number in self.asleep.pop(other, ()):
            self.push(arrival, number)


def routes_of(schedule, topology):
    """Return the routes of a schedule between each two devices, and the part of the buffer that takes each of them."""
    found = defaultdict(lambda: defaultdict(Fraction))
    for transfers in lower(schedule).transfers:
        for chunk, src, dst, through, _ in transfers:
            a, b = schedule.devices[src], schedule.devices[dst]
            nodes = topology.route(a, b) if through is None else (a, *through, b)
            found[a, b][nodes] += schedule.chunks[chunk].share
    return {pair: list(routes.items()) for pair, routes in found.items()}


def algbw(text, schedule, topology, size=256 << 20):
    """Return the GB/s of a file for messages of at least ``size`` bytes that it runs for, with its plan's routes."""
    gpu = json.loads(text)["gpus"][0]
    step = 16 * max(gpu["input_chunks"], gpu["output_chunks"])
    nbytes = -(-size // step) * step
    return nbytes / PlanClock(text, topology, nbytes, routes_of(schedule, topology)).seconds / 1e9
