"""Runs Chakra traces in random orders that their dependencies allow, and replays them on links that are FIFOs."""

import re
from collections import Counter, defaultdict, deque

from file_clock import Clock

from crossreduce.export.formats.chakra.format import decode
from crossreduce.lowering import lower

COMP, SEND, RECEIVE = 4, 5, 6  # kinds of nodes in Chakra's schema
WITHIN = 0.02  # the greatest relative difference between predictions and replays of large plans
WHAT = re.compile(r"(send|receive|combine|join) chunk (\d+) round (\d+) piece (\d+)")


def what(program, rank, node):
    """Return (verb, chunk, piece, number of the value that it moves or makes in the program) for a node."""
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
    """Return the bytes of each piece, by (chunk, piece)."""
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
    """Assert that the traces move each transfer of the program once per piece, and compute the collective.

    The nodes run in a random order that respects their dependencies. The input of source k is (n + 1)**k.
    """
    program, n = lower(schedule), len(schedule.devices)
    traces = [decode(data) for data in files]
    assert len(traces) == n
    pieces = schedule.pieces if pieces is None else pieces
    sizes = pieces_of(schedule, nbytes, pieces)
    _check_transfers(program, traces, sizes)
    values = [{} for _ in range(n)]  # for each rank, the content of each (chunk, value, piece)
    for c, chunk in enumerate(program.chunks):
        for k, source in enumerate(chunk.sources):
            values[source] |= {(c, k, j): (n + 1) ** source for j in range(pieces)}
    _run(program, traces, sizes, values, rng)
    for c, chunk in enumerate(program.chunks):
        total = sum((n + 1) ** source for source in chunk.sources)
        for dst, result in zip(chunk.destinations, chunk.results, strict=True):
            assert all(values[dst][c, result, j] == total for j in range(pieces) if sizes[c, j]), (c, dst)


def _check_transfers(program, traces, sizes):
    """Assert that sends and receives match, and that together they are the transfers of the program."""
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
                    for (sized_chunk, j), size in sizes.items():
                        if sized_chunk == c and size:
                            expected[src, made.device, c, operand, j] += size
    assert moved == expected


def _run(program, traces, sizes, values, rng):
    """Run all nodes in a random order, and store what they receive and compute in ``values``."""
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
        """Receive a message. When all bytes of its piece are there, store the piece in all copies of the value."""
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
                number = values[rank][chunk, value, piece]  # raises KeyError if the rank does not store it yet
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


def replay(traces, topology, devices=None):
    """Return the seconds that traces take on links that are FIFOs. A trace is the bytes of a file, or its nodes.

    Links behave as in the analytical network of ASTRA-sim that models congestion: a link is busy for the time of a
    message's bytes, and the message arrives one latency later. Switches and devices on a route receive it completely
    before they forward it. A send or receive is complete when the message has arrived, a computation after its
    duration. A rank starts nodes without unfinished dependencies in the order of their numbers.

    Source: github.com/astra-sim/astra-network-analytical, congestion_aware/network/Link.cc, Chunk.cc, and
    common/NetworkFunction.cc; github.com/mlcommons/chakra, src/feeder/et_feeder.h (the order of nodes).
    """
    traces = [decode(trace).nodes if isinstance(trace, bytes) else trace for trace in traces]
    clock, devices = Clock(topology), devices or topology.devices
    nodes = {(rank, node.id): node for rank, listed in enumerate(traces) for node in listed}
    # What each node still waits for: its dependencies, and the message if it receives one.
    left = {at: len(set(node.deps)) + (node.kind == RECEIVE) for at, node in nodes.items()}
    followers, receives = defaultdict(list), defaultdict(deque)
    for at, node in nodes.items():
        for dep in set(node.deps):
            followers[at[0], dep].append(at)
        if node.kind == RECEIVE:
            receives[node.src, node.dst, node.tag, node.size].append(at)
    sends = [(at, node) for at, node in nodes.items() if node.kind == SEND]
    receiver = {at: receives[node.src, node.dst, node.tag, node.size].popleft() for at, node in sends}

    def start(places):
        for at in sorted(places):
            node = nodes[at]
            if node.kind == SEND:
                a, b = devices[node.src], devices[node.dst]
                arrive(at, topology.route(a, b) if node.through is None else (a, *node.through, b))
            else:
                clock.at(clock.now + node.duration_micros * 1e-6, complete, [at])

    def arrive(sender, route):
        """Let a message request the next link, or complete its send and receive nodes at its destination."""
        if route[1:]:
            end = clock.occupy(route[:2], nodes[sender].size) + clock.latency[route[:2]]
            clock.at(end, arrive, sender, route[1:])
        else:
            left[receiver[sender]] -= 1
            complete([sender] + [at for at in [receiver[sender]] if not left[at]])

    def complete(places):
        ready = []
        for follower in [follower for at in places for follower in followers[at]]:
            left[follower] -= 1
            ready += [follower] if not left[follower] else []
        start(ready)

    start([at for at, count in left.items() if not count])
    seconds = clock.run()
    assert not any(left.values()), "the traces do not end"
    return seconds
