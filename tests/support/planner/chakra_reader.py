"""Runs Chakra traces in any order that their dependencies allow, and replays them on links that are FIFOs."""

import heapq
import re
from collections import Counter, defaultdict, deque
from itertools import pairwise

from crossreduce.export.formats.chakra.format import decode
from crossreduce.lowering import lower

COMP, SEND, RECEIVE = 4, 5, 6
WITHIN = 0.02  # the greatest difference between predictions and replays, for which large plans are tested
WHAT = re.compile(r"(send|receive|combine|join) chunk (\d+) round (\d+) piece (\d+)")


def what(program, rank, node):
    """Return a node's verb, chunk, piece, and value: the one that it moves or makes, in the numbers of the program."""
    verb, *numbers = WHAT.match(node.name).groups()
    c, r, piece = map(int, numbers)
    chunk = program.chunks[c]
    device = node.dst if verb in ("send", "receive") else rank
    ((value, made),) = (
        (value, made)
        for value, made in enumerate(chunk.instructions, start=len(chunk.sources))
        if (made.round, made.device) == (r, device)
    )
    if verb in ("send", "receive"):
        (value,) = (operand for operand in made.operands if chunk.devices[operand] == node.src)
    return verb, c, piece, value


def pieces_of(schedule, nbytes, pieces):
    """Return the bytes of each (chunk, piece)."""
    ends = [0]
    for chunk in schedule.chunks:
        ends.append(ends[-1] + chunk.share)
    sizes = {}
    for c in range(len(schedule.chunks)):
        start, stop = int(ends[c] * nbytes), int(ends[c + 1] * nbytes)
        cuts = [start + (stop - start) * j // pieces for j in range(pieces + 1)]
        sizes |= {(c, j): cuts[j + 1] - cuts[j] for j in range(pieces)}
    return sizes


def check(schedule, nbytes, files, rng, pieces=None):
    """Raise unless the traces move each transfer of the program once per piece, and compute the collective.

    The nodes run in a random order that respects their dependencies; the input of source k is (n + 1)**k.
    """
    program, n = lower(schedule), len(schedule.devices)
    traces = [decode(data) for data in files]
    assert len(traces) == n
    pieces = schedule.pieces if pieces is None else pieces
    sizes = pieces_of(schedule, nbytes, pieces)
    _check_transfers(program, traces, sizes)
    values = [{} for _ in range(n)]  # by rank: the number of each (chunk, value, piece)
    for c, chunk in enumerate(program.chunks):
        for k, source in enumerate(chunk.sources):
            values[source] |= {(c, k, j): (n + 1) ** source for j in range(pieces)}
    _run(program, traces, sizes, values, rng)
    for c, chunk in enumerate(program.chunks):
        total = sum((n + 1) ** source for source in chunk.sources)
        for dst, result in zip(chunk.destinations, chunk.results, strict=True):
            assert all(values[dst][c, result, j] == total for j in range(pieces) if sizes[c, j]), (c, dst)


def _check_transfers(program, traces, sizes):
    moved, sent, received = Counter(), Counter(), Counter()
    for rank, trace in enumerate(traces):
        ids = [node.id for node in trace.nodes]
        assert ids == list(range(len(ids)))
        for node in trace.nodes:
            assert all(dep < node.id for dep in node.deps)
            if node.kind in (SEND, RECEIVE):
                _, chunk, piece, value = what(program, rank, node)
                assert rank == (node.src if node.kind == SEND else node.dst)
                assert node.size > 0
                (sent if node.kind == SEND else received)[node.src, node.dst, node.tag, node.size] += 1
                if node.kind == SEND:
                    moved[node.src, node.dst, chunk, value, piece] += node.size
    assert sent == received
    assert len({key[:3] for key in sent}) == sum(sent.values())  # no two messages between two ranks have one tag
    expected = Counter()
    for c, chunk in enumerate(program.chunks):
        for made in chunk.instructions:
            for operand in made.operands:
                src = chunk.devices[operand]
                if src != made.device:
                    for (cc, j), size in sizes.items():
                        if cc == c and size:
                            expected[src, made.device, c, operand, j] += size
    assert moved == expected


def _run(program, traces, sizes, values, rng):
    waiting = {(rank, node.id): set(node.deps) for rank, trace in enumerate(traces) for node in trace.nodes}
    nodes = {(rank, node.id): node for rank, trace in enumerate(traces) for node in trace.nodes}
    followers = defaultdict(list)
    for (rank, number), deps in waiting.items():
        for dep in deps:
            followers[rank, dep].append((rank, number))
    flying, arrived, posted = [], {}, {}  # sent messages; numbers that have arrived; receives that wait for a message
    ready = [at for at, deps in waiting.items() if not deps]
    bytes_in = Counter()
    done = 0

    def finish(at):
        nonlocal done
        done += 1
        for follower in followers[at]:
            waiting[follower].discard(at[1])
            if not waiting[follower]:
                ready.append(follower)

    def receive(rank, chunk, value, piece, size, number):
        bytes_in[rank, chunk, value, piece] += size
        if bytes_in[rank, chunk, value, piece] >= sizes[chunk, piece]:
            arrived[rank, chunk, value, piece] = number
            inputs = len(program.chunks[chunk].sources)
            for k, made in enumerate(program.chunks[chunk].instructions):
                if made.device == rank and made.operands == (value,):
                    values[rank][chunk, inputs + k, piece] = number

    while ready or flying:
        if flying and (not ready or rng.random() < 0.3):
            key, at, data = flying.pop(rng.randrange(len(flying)))
            receive(key[1], *data)
            finish(at)
            arrived[key] = True
            if key in posted:
                finish(posted[key])
            continue
        at = ready.pop(rng.randrange(len(ready)))
        rank, node = at[0], nodes[at]
        key = node.src, node.dst, node.tag
        if node.kind == RECEIVE:
            if key in arrived:
                finish(at)
            else:
                posted[key] = at
            continue
        if node.name != "nothing to do":
            verb, chunk, piece, value = what(program, rank, node)
            if node.kind == SEND:
                number = values[rank][chunk, value, piece]  # KeyError: the value is not there yet
                flying.append((key, at, (chunk, value, piece, node.size, number)))
                continue
            if verb == "combine":
                inputs = len(program.chunks[chunk].sources)
                made = program.chunks[chunk].instructions[value - inputs]
                total = 0
                for operand in made.operands:
                    local = program.chunks[chunk].devices[operand] == rank
                    total += values[rank][chunk, operand, piece] if local else arrived[rank, chunk, operand, piece]
                values[rank][chunk, value, piece] = total
        finish(at)
    assert done == len(nodes)


class Link:
    """A link that carries one message at a time, in the order in which messages reach it."""

    def __init__(self, link):
        self.bytes_per_s, self.latency_s = float(link.bandwidth) * 1e9, float(link.latency_s)
        self.waiting, self.is_busy = deque(), False


class Replay:
    """Runs traces as the analytical network of ASTRA-sim does that models congestion: links are FIFOs.

    A link is busy for the time of a message's bytes, and the message arrives one latency later. Switches and devices on
    a route receive it completely before they forward it. A send or receive is complete when the message has arrived, a
    computation after its duration. A rank starts the nodes that wait for nothing in the order of their numbers.

    Source: github.com/astra-sim/astra-network-analytical, congestion_aware/network/Link.cc, Chunk.cc, and
    common/NetworkFunction.cc; github.com/mlcommons/chakra, src/feeder/et_feeder.h (the order of nodes).
    """

    def __init__(self, traces, topology, devices):
        self.topology, self.devices, self.now, self.number, self.events = topology, devices, 0.0, 0, []
        self.nodes = {(rank, node.id): node for rank, nodes in enumerate(traces) for node in nodes}
        self.left = {at: len(set(node.deps)) + (node.kind == RECEIVE) for at, node in self.nodes.items()}
        self.followers, receives, self.routes = defaultdict(list), defaultdict(deque), {}
        self.links = {(link.src, link.dst): Link(link) for link in topology.links}
        for at, node in self.nodes.items():
            for dep in set(node.deps):
                self.followers[at[0], dep].append(at)
            if node.kind == RECEIVE:
                receives[self.key(node)].append(at)
        sends = {at: node for at, node in self.nodes.items() if node.kind == SEND}
        self.receiver = {at: receives[self.key(node)].popleft() for at, node in sends.items()}

    @staticmethod
    def key(node):
        return node.src, node.dst, node.tag, node.size

    def run(self):
        """Return the time of the last event."""
        self.start([at for at, left in self.left.items() if not left])
        while self.events:
            self.now, _, action, *args = heapq.heappop(self.events)
            action(*args)
        assert not any(self.left.values()), "the traces do not end"
        return self.now

    def after(self, seconds, *what):
        self.number += 1  # events at the same time happen in the order in which they were scheduled
        heapq.heappush(self.events, (self.now + seconds, self.number, *what))

    def start(self, places):
        for at in sorted(places):
            node = self.nodes[at]
            if node.kind == SEND:
                self.arrive(at, self.route(node))
            else:
                self.after(node.duration_micros * 1e-6, self.complete, [at])

    def route(self, node):
        key = node.src, node.dst, node.through
        if key not in self.routes:
            ends = self.devices[node.src], self.devices[node.dst]
            nodes = self.topology.route(*ends) if node.through is None else (ends[0], *node.through, ends[1])
            self.routes[key] = [self.links[pair] for pair in pairwise(nodes)]
        return self.routes[key]

    def arrive(self, sender, rest):
        """Let a message request the next link, or complete its send and receive nodes at its destination."""
        if rest and rest[0].is_busy:
            rest[0].waiting.append((sender, rest))
        elif rest:
            self.carry(sender, rest)
        else:
            self.left[self.receiver[sender]] -= 1
            self.complete([sender] + [at for at in [self.receiver[sender]] if not self.left[at]])

    def carry(self, sender, rest):
        link = rest[0]
        link.is_busy = True
        seconds = self.nodes[sender].size / link.bytes_per_s
        self.after(seconds + link.latency_s, self.arrive, sender, rest[1:])
        self.after(seconds, self.free, link)

    def free(self, link):
        link.is_busy = False
        if link.waiting:
            self.carry(*link.waiting.popleft())

    def complete(self, places):
        ready = []
        for follower in [follower for at in places for follower in self.followers[at]]:
            self.left[follower] -= 1
            ready += [follower] if not self.left[follower] else []
        self.start(ready)


def replay(traces, topology, devices=None):
    """Return the seconds that traces take on links that are FIFOs; a trace is a file's bytes, or its nodes."""
    nodes = [decode(trace).nodes if isinstance(trace, bytes) else trace for trace in traces]
    return Replay(nodes, topology, devices or topology.devices).run()
