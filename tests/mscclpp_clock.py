"""A clock of MSCCL++ plans: how long an exported file takes on a topology. It shares no code with the library.

Each threadblock runs its operations in order. Rank k is the topology's k-th device. Operations that write into another
GPU's memory move their bytes over all links of the route between the two devices; several destinations of a ``res`` are
served at the same time, those of a ``put`` one after the other. A link serves transfers in the order of their requests;
the next link of a route starts when the first one does, and ends no earlier. The threadblock goes on when the
last byte has left; a port channel makes its transfers itself, one after the other, and the threadblock goes on at
once. Signals arrive the latency of the route later, and waits block. Local operations and synchronisation take no time.

A GPU's reductions and stores through a switch (``glres``) read from all devices and write to all of them: they use the
links of the group's switch, each for its own bytes.
"""

import heapq
import json
from collections import defaultdict, deque


class Stuck(Exception):
    """Threadblocks wait forever."""


def shortest_route(topology, src, dst):
    """Return the nodes between two devices: a direct link, or else the route over the fewest links and devices."""
    links = defaultdict(list)
    for link in topology.links:
        links[link.src].append((link.dst, float(link.bandwidth)))
    devices = set(topology.devices)
    queue = [(0, 0, -1e99, [src])]
    seen = set()
    while queue:
        passed, hops, narrow, nodes = heapq.heappop(queue)
        here = nodes[-1]
        if here == dst:
            return nodes
        if here in seen:
            continue
        seen.add(here)
        for node, speed in links[here]:
            if node not in seen:
                through = passed + (here in devices and here != src)
                heapq.heappush(queue, (through, hops + 1, max(narrow, -speed), [*nodes, node]))
    raise ValueError(f"no route from {src} to {dst}")


class PlanClock:
    """Runs one call of a plan for a message of some bytes; ``seconds`` is when its last threadblock ends."""

    def __init__(self, text, topology, nbytes, routes=None):
        """``routes``: by (src, dst), the nodes of routes that are not the shortest ones."""
        self.plan, self.topology, self.given = json.loads(text), topology, routes or {}
        gpus = self.plan["gpus"]
        chunks = gpus[0]["output_chunks" if self.plan["collective"] == "allgather" else "input_chunks"]
        self.chunk = nbytes / chunks
        self.links = {(link.src, link.dst): link for link in topology.links}
        self.bandwidth = {pair: float(link.bandwidth) * 1e9 for pair, link in self.links.items()}
        self.free = defaultdict(float)  # by link
        self.busy = defaultdict(float)
        self.routes = {}
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
        self.port_free = defaultdict(float)  # by end of a port channel
        self.asleep = defaultdict(list)
        self.blocks = [self.steps(rank, block) for rank, gpu in enumerate(gpus) for block in gpu["threadblocks"]]
        self.names = [(rank, k) for rank, gpu in enumerate(gpus) for k in range(len(gpu["threadblocks"]))]
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

            if name in ("wait", "signal"):
                for end in ends():
                    yield name, end
            elif name in ("put", "pws") and kind == "port":
                for end, dst in zip(ends(), op["dst_buff"], strict=True):
                    yield "post", (end, peer(dst), size(dst), name == "pws")
            elif name == "put":
                for dst in op["dst_buff"]:
                    yield "move", [(peer(dst), size(dst))]
            elif name == "res":
                yield "move", [(peer(dst), size(dst)) for dst in op["dst_buff"][1:]]
            elif name == "glres":
                yield "switch", size(op["src_buff"][0])
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

    # ---- links

    def route(self, src, dst):
        if (src, dst) not in self.routes:
            devices = self.topology.devices
            nodes = self.given.get((devices[src], devices[dst]))
            nodes = nodes or shortest_route(self.topology, devices[src], devices[dst])
            pairs = list(zip(nodes, nodes[1:], strict=False))
            self.routes[src, dst] = pairs, sum(float(self.links[pair].latency_s) for pair in pairs)
        return self.routes[src, dst]

    def transfer(self, now, src, dst, nbytes):
        """Return when a transfer that is requested now has left its last link."""
        start = end = now
        for pair in self.route(src, dst)[0]:
            start = max(start, self.free[pair])
            end = max(start + nbytes / self.bandwidth[pair], end)
            self.free[pair] = end
            self.busy[pair] += nbytes / self.bandwidth[pair]
        return end

    def through_switch(self, now, rank, nbytes):
        """Return when a GPU has reduced and stored bytes of all devices through their switch."""
        devices = self.topology.devices
        (switch,) = {dst for src, dst in self.links if src == devices[rank]}
        end = now
        for device in devices:  # each device sends its bytes up, and receives the sum
            for pair in ((device, switch), (switch, device)):
                start = max(now, self.free[pair])
                self.free[pair] = start + nbytes / self.bandwidth[pair]
                self.busy[pair] += nbytes / self.bandwidth[pair]
                end = max(end, self.free[pair])
        return end

    # ---- the run

    def run(self):
        queue = [(0.0, number) for number in range(len(self.blocks))]
        pending = [None] * len(self.blocks)  # an action that could not be finished yet
        done, last = 0, 0.0
        heapq.heapify(queue)
        while queue:
            now, number = heapq.heappop(queue)
            rank = self.names[number][0]
            while True:
                action = pending[number] or next(self.blocks[number], None)
                pending[number] = None
                if action is None:
                    done, last = done + 1, max(last, now)
                    break
                kind, what = action
                if kind == "wait":
                    arrivals = self.signals[what]
                    if not arrivals:
                        pending[number] = action
                        self.asleep[what].append(number)
                        break
                    now = max(now, arrivals.popleft())
                    continue
                if kind == "signal":
                    self.deliver(what, now, queue)
                    continue
                if queue and now > queue[0][0]:  # links serve requests in the order of time
                    pending[number] = action
                    heapq.heappush(queue, (now, number))
                    break
                if kind == "move":
                    now = max(self.transfer(now, rank, dst, nbytes) for dst, nbytes in what)
                elif kind == "switch":
                    now = self.through_switch(now, rank, what)
                else:
                    end, dst, nbytes, signals = what
                    self.port_free[end] = self.transfer(max(now, self.port_free[end]), rank, dst, nbytes)
                    if signals:
                        self.deliver(end, self.port_free[end], queue)
        if done < len(self.blocks):
            raise Stuck(f"{len(self.blocks) - done} threadblocks wait")
        return last

    def deliver(self, end, now, queue):
        rank, kind, _ = end
        peer, which = self.pairs[end]
        at = max(now, self.port_free[end]) if kind == "port" else now
        other = self.ends[peer, kind, rank, which]
        arrival = at + self.route(rank, peer)[1]
        self.signals[other].append(arrival)
        for number in self.asleep.pop(other, ()):
            heapq.heappush(queue, (arrival, number))
