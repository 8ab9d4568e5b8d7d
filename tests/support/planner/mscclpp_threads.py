"""A machine that runs MSCCL++ plans on numbers, thread by thread, in random orders that GPUs and port channels allow.

It shares no code with the library. Each thread of each threadblock runs the plan's operations as the handlers of
MSCCL++'s execution_kernel.hpp do, word by word; each port channel makes its transfers some time after it was asked to;
the user of each GPU writes its input and reads its output between calls. Two accesses to the same word that are
possible at the same time, of which one writes, are a race. Writes are visible at once: the machine does not show what
relaxed signals lack.
"""

import json
import random
from collections import defaultdict, deque
from typing import Any, NamedTuple


class RunError(Exception):
    """A fault of a plan: a race, an invalid access, a wrong result, or a deadlock."""


class Packet(NamedTuple):
    """Data with the number of the call that sends it."""

    value: Any
    call: int


class Step:
    """What an agent does next: it waits for ``ready``, then reads and writes words and calls ``act``."""

    def __init__(self, reads=(), writes=(), act=None, ready=None):
        self.reads, self.writes, self.act, self.ready = set(reads), set(writes), act, ready

    def can_run(self):
        return self.ready is None or self.ready()


class Machine:
    """``calls`` calls of a plan whose chunks have ``chunk`` bytes, with ``threads`` threads per threadblock.

    ``value`` returns a word of a rank's input, by call, rank and word; ``combine`` adds two values.
    """

    def __init__(self, text, chunk, calls, threads, root=None, *, value=None, combine=int.__add__):
        self.plan = json.loads(text)
        self.gpus, self.coll, self.inplace = self.plan["gpus"], self.plan["collective"], self.plan["inplace"]
        self.n, self.chunk, self.calls, self.threads, self.root = len(self.gpus), chunk, calls, threads, root
        self.align = self.plan.get("buffer_alignment", 16)
        self.double, self.combine = self.plan.get("use_double_scratch_buffer", False), combine
        self.value = value or (lambda call, rank, word: (self.n + 2) ** rank * (1 + call * 1000 + word))
        packets = 2 if self.plan["protocol"] == "LL" else 1
        self.sizes = [
            {
                "i": gpu["input_chunks"] * chunk,
                "o": gpu["output_chunks"] * chunk,
                "s": gpu["scratch_chunks"] * chunk * packets * (2 if self.double else 1),
            }
            for gpu in self.gpus
        ]
        self.memory = {}  # by (rank, area, word of 8 bytes)
        self.signals = defaultdict(int)
        self.waits = defaultdict(int)
        self.semaphores = {
            (r, k): s["init_value"] for r, g in enumerate(self.gpus) for k, s in enumerate(g["semaphores"])
        }
        self.started, self.ended = [0] * self.n, [0] * self.n
        self.arrived = defaultdict(int)
        self.queues = defaultdict(deque)
        self.done = defaultdict(int)
        self.asked = defaultdict(int)
        self.agents = {}
        for rank, gpu in enumerate(self.gpus):
            self.agents[rank, "user"] = self.user(rank)
            for t in range(len(gpu["threadblocks"])):
                for j in range(threads):
                    self.agents[rank, t, j] = self.thread(rank, t, j)
            for k in range(len(self.peers(rank, "port"))):
                self.agents[rank, "port", k] = self.port(rank, k)
        self.next, self.position = {}, {}
        self.pending = defaultdict(set)  # by word and whether it is written: the agents whose next step accesses it
        for name in list(self.agents):
            self.advance(name)

    def advance(self, name):
        if name in self.next:
            self.register(name, set.discard)
        step = next(self.agents[name], None)
        if step is None:
            self.next.pop(name, None)
        else:
            self.next[name] = step
            self.register(name, set.add)

    def register(self, name, change):
        step = self.next[name]
        for written, words in ((False, step.reads), (True, step.writes)):
            for word in words:
                change(self.pending[word, written], name)

    def conflicting(self, name):
        """Yield the agents whose next step conflicts with that of an agent: both access a word, and one writes it."""
        step = self.next[name]
        for word in step.reads | step.writes:
            yield from self.pending[word, True]
        for word in step.writes:
            yield from self.pending[word, False]

    def run(self, rng, held=None):
        """Run until nothing can run. ``held``: a (rank, threadblock) and operations at which its threads stay as long
        as others can run."""
        order = {name: rng.random() for name in self.agents}
        fair = rng.random() < 0.5
        while self.next:
            able = [name for name, step in self.next.items() if step.can_run()]
            if not able:
                if any(name[1] != "port" for name in self.next):
                    raise RunError("stuck")
                break
            free = [name for name in able if not self.holds(name, held)] or able
            name = rng.choice(free) if fair else max(free, key=order.__getitem__)
            if rng.random() < 0.02:
                order[name] = rng.random()
            step = self.next[name]
            for other in self.conflicting(name):
                if other != name and self.next[other].can_run():
                    raise RunError(f"a race of {name} and {other}")
            if step.act is not None:
                step.act()
            self.advance(name)
        if any(self.signals[end] != self.waits[end] for end in {*self.signals, *self.waits}):
            raise RunError("a signal without a wait")

    def holds(self, name, held):
        return held is not None and name[:2] == held[:2] and len(name) == 3 and self.position[name] in held[2]

    # ---- memory

    def place(self, rank, buffer, offset, size, part=None, half=0):
        """Return the words of a buffer; ``part``: the rank whose part of the larger buffer it is, in place."""
        area, base = buffer, half * self.sizes[rank]["s"] // 2 if buffer == "s" else 0
        limit = self.sizes[rank][buffer]
        if self.inplace and buffer in "io":
            area, limit = "io", max(self.sizes[rank]["i"], self.sizes[rank]["o"])
            if (self.coll, buffer) in (("allgather", "i"), ("reducescatter", "o")):
                base = (rank if part is None else part) * self.sizes[rank][buffer]
        if base + offset + size > limit:
            raise RunError("out of bounds")
        assert (base + offset) % 8 == size % 8 == 0
        return [(rank, area, (base + offset) // 8 + k) for k in range(size // 8)]

    def load(self, word):
        if self.memory.get(word) is None:
            raise RunError("a read of memory that was never written")
        return self.memory[word]

    def has_packet(self, word, call):
        value = self.memory.get(word)
        return isinstance(value, Packet) and value.call == call

    def split(self, size, op):
        """Return offset and size of a threadblock's part of an operation."""
        info = op.get("tbg_info", {"tb_id": 0, "tbg_size": 1})
        words, n = size // self.align, info["tbg_size"]
        ends = [k * (words // n) + min(k % max(words, 1), words % n) for k in (info["tb_id"], info["tb_id"] + 1)]
        return ends[0] * self.align, (ends[1] - ends[0]) * self.align

    # ---- agents

    def user(self, rank):
        count = self.threads * len(self.gpus[rank]["threadblocks"])
        areas = {"io": max(self.sizes[rank]["i"], self.sizes[rank]["o"])} if self.inplace else self.sizes[rank]
        words = [(rank, area, k) for area, size in areas.items() if area != "s" for k in range(size // 8)]
        for call in range(1, self.calls + 2):

            def between(call=call):
                if call > 1:
                    self.check(rank, call - 1)
                for word in words:
                    self.memory[word] = None
                if self.coll != "broadcast" or rank == self.root:
                    for k, word in enumerate(self.place(rank, "i", 0, self.sizes[rank]["i"])):
                        self.memory[word] = self.value(call, rank, k)
                self.started[rank] = call

            yield Step(words, words, between, lambda call=call: self.ended[rank] == count * (call - 1))

    def check(self, rank, call):
        if self.coll == "reduce" and rank != self.root:
            return
        words = self.sizes[rank]["o"] // 8
        part = (self.sizes[0]["i"] if self.coll == "allgather" else self.sizes[0]["o"]) // 8
        for k, word in enumerate(self.place(rank, "o", 0, 8 * words)):
            if self.coll in ("allreduce", "reduce", "reducescatter"):
                at = rank * part + k if self.coll == "reducescatter" else k
                due = sum(self.value(call, r, at) for r in range(self.n))
            elif self.coll == "broadcast":
                due = self.value(call, self.root, k)
            elif self.coll == "allgather":
                due = self.value(call, k // part, k % part)
            else:
                each = words // self.n
                due = self.value(call, k // each, rank * each + k % each)
            if self.memory.get(word) != due:
                raise RunError(f"call {call}, rank {rank}, word {k}")

    def thread(self, rank, t, j):
        name = (rank, t, j)
        for call in range(1, self.calls + 1):
            self.position[name] = -1
            yield Step(ready=lambda call=call: self.started[rank] == call)
            half = int(self.double and call % 2 == 0)
            for number, op in enumerate(self.gpus[rank]["threadblocks"][t]["ops"]):
                self.position[name] = number
                if op["name"] != "pipeline":
                    yield from self.operation(name, op, call, half)
                    continue
                unit = op["iter_context"]["unit_size"]
                for k in range(-(-op["iter_context"]["num_chunks"] * self.chunk // unit)):
                    for inner in op["ops"]:
                        yield from self.operation(name, inner, call, half, k * unit, unit)
            self.position[name] = -1
            yield Step(act=lambda: self.ended.__setitem__(rank, self.ended[rank] + 1))

    def port(self, rank, k):
        while True:
            queue = self.queues[rank, k]
            yield Step(ready=lambda queue=queue: bool(queue))
            what, *facts = queue.popleft()
            if what == "transfer":
                srcs, dsts = facts
                for src, dst in zip(srcs, dsts, strict=True):
                    yield Step([src], [dst], lambda src=src, dst=dst: self.memory.__setitem__(dst, self.load(src)))
            elif what == "signal":
                yield Step(act=lambda: self.send(rank, "port", k))
            else:
                yield Step(act=lambda: self.done.__setitem__((rank, k), self.done[rank, k] + 1))

    # ---- channels

    def peers(self, rank, kind):
        return [p for c in self.gpus[rank]["channels"] if c["channel_type"] == kind for p in c["connected_to"]]

    def numbers(self, name, op, kind):
        used = self.gpus[name[0]]["threadblocks"][name[1]]["channels"]
        ids = [k for entry in used if entry["channel_type"] == kind for k in entry["channel_ids"]]
        return [ids[k] for k in op["channel_ids"]]

    def end(self, rank, kind, number):
        """Return the name of the direction from a rank's end of a channel, and of the opposite one."""
        peers = self.peers(rank, kind)
        which = peers[:number].count(peers[number])
        return (kind, rank, peers[number], which), (kind, peers[number], rank, which)

    def send(self, rank, kind, number):
        self.signals[self.end(rank, kind, number)[0]] += 1

    # ---- operations of one thread

    def operation(self, name, op, call, half, offset=0, unit=1 << 32):
        rank, t, j = name
        kind = op["name"].removeprefix("rlx")
        if kind == "nop":
            yield from self.sync((rank, t), self.threads)
        elif kind == "barrier":
            yield from self.sync((rank, t), self.threads)
            if op["num_threadblocks"] > 1:
                if j == 0:
                    yield from self.sync((rank, "barrier", op["barrier_id"]), op["num_threadblocks"])
                yield from self.sync((rank, t), self.threads)
        elif kind in ("sem_acquire", "sem_release"):
            if j < len(op["semaphore_ids"]):
                key, change = (rank, op["semaphore_ids"][j]), 1 if kind == "sem_release" else -1
                counter = (rank, "semaphore", op["semaphore_ids"][j]) if change < 0 else ()
                yield Step(
                    writes=[counter] if counter else [],
                    act=lambda: self.semaphores.__setitem__(key, self.semaphores[key] + change),
                    ready=lambda: change > 0 or self.semaphores[key] > 0,
                )
        elif kind in ("signal", "wait", "flush"):
            numbers = self.numbers(name, op, op["channel_type"])
            if j < len(numbers):
                yield from self.on_channel(rank, kind, op["channel_type"], numbers[j])
        elif op.get("channel_type") == "port":
            yield from self.on_port(name, op, call, half, offset, unit)
        else:
            for srcs, dsts, per_step, packets in self.moves(name, op, half, offset, unit):
                yield from self.move(j, srcs, dsts, per_step, packets, call)

    def sync(self, key, count):
        self.arrived[key] += 1
        goal = -(-self.arrived[key] // count) * count
        yield Step(ready=lambda: self.arrived[key] >= goal)

    def on_channel(self, rank, what, kind, number):
        others = self.end(rank, kind, number)[1]
        if what == "wait":

            def taken():
                self.waits[others] += 1

            yield Step(
                writes=[(rank, "expected", kind, number)],
                act=taken,
                ready=lambda: self.waits[others] < self.signals[others],
            )
        elif kind == "memory":
            yield Step(writes=[(rank, "outbound", number)], act=lambda: self.send(rank, kind, number))
        else:
            yield from self.ask(rank, number, (what,))
            if what == "flush":
                goal = self.asked[rank, number]
                yield Step(ready=lambda: self.done[rank, number] >= goal)

    def ask(self, rank, number, request):
        def push():
            self.queues[rank, number].append(request)
            self.asked[rank, number] += request[0] == "flush"

        yield Step(act=push)

    def on_port(self, name, op, call, half, offset, unit):
        rank, _, j = name
        numbers = self.numbers(name, op, "port")
        if op["name"] == "rppkt":
            begin, size = self.split(op["src_buff"][0]["size"] * self.chunk, op)
            start = 2 * (op["src_buff"][0]["index"] * self.chunk + begin)
            packets = self.place(rank, "s", start, 2 * size, None, half)
            yield from self.move(j, [packets], [], 1, ({0}, set()), call)
            yield from self.sync((rank, name[1]), self.threads)
            if j < len(op["dst_buff"]):
                place = op["dst_buff"][j]
                begin, _ = self.split(place["size"] * self.chunk, op)
                targets = self.remote(name, op, place, 2 * (place["index"] * self.chunk + begin), 2 * size, half)
                yield from self.ask(rank, numbers[j], ("transfer", packets, targets))
            return
        if j >= len(op["dst_buff"]):
            return
        src, dst = op["src_buff"][j], op["dst_buff"][j]
        begin, size = self.split(dst["size"] * self.chunk, op)
        size = min(size - offset if size >= offset else unit, unit)
        start = src["index"] * self.chunk + begin + offset
        srcs = self.place(rank, src["type"], start, size, 0)
        dsts = self.remote(name, op, dst, dst["index"] * self.chunk + begin + offset, size)
        if size:
            yield from self.ask(rank, numbers[j], ("transfer", srcs, dsts))
        if op["name"] in ("pws", "pwsf"):
            yield from self.ask(rank, numbers[j], ("signal",))

    def remote(self, name, op, entry, offset, size, half=0):
        block = self.gpus[name[0]]["threadblocks"][name[1]]
        ids = [
            k
            for refs in block["remote_buffer_refs"]
            if refs["access_channel_type"] == op["channel_type"]
            for k in refs["remote_buffer_ids"]
        ]
        target = self.gpus[name[0]]["remote_buffers"][ids[entry["buffer_id"]]]
        return self.place(target["rank"], target["type"], offset, size, name[0], half)

    def everywhere(self, name, op, entry, offset, size):
        used = self.gpus[name[0]]["threadblocks"][name[1]]["channels"]
        ids = [k for e in used if e["channel_type"] == "switch" for k in e["channel_ids"]]
        switches = [
            (c["buffer_type"], group["ranks"])
            for c in self.gpus[name[0]]["channels"]
            if c["channel_type"] == "switch"
            for group in c["rank_groups"]
        ]
        buffer, ranks = switches[ids[entry["switch_channel_id"]]]
        return [self.place(r, buffer, offset, size, name[0]) for r in ranks]

    def moves(self, name, op, half, offset, unit):
        """Yield the moves of an operation: words of each source and destination, words of data per thread's step, and
        which sources and destinations are packets."""
        kind, rank = op["name"], name[0]
        srcs, dsts = op["src_buff"], op["dst_buff"]
        packets = kind.endswith("pkt")

        def span(entry, local_half=half, scale=1, reads_packets=False, other=None):
            begin, size = self.split(entry["size"] * self.chunk, op)
            size = size if packets else min(size - offset if size >= offset else unit, unit)
            start = (other or entry)["index"] * self.chunk + begin + (0 if packets else offset)
            if "switch_channel_id" in entry:
                return self.everywhere(name, op, entry, start, size)
            if "buffer_id" in entry:
                return self.remote(name, op, entry, scale * start, scale * size, half if packets else 0)
            buffer = "s" if reads_packets else entry["type"]
            return self.place(rank, buffer, scale * start, scale * size, None, half)

        if kind in ("put", "pws", "pwsf", "ppkt"):
            for src, dst in zip(srcs, dsts, strict=True):
                own = span({**src, "type": srcs[0]["type"]})
                yield [own], [span(dst, scale=2 if packets else 1)], 1 if packets else 2, ({}, {0} if packets else {})
        elif kind == "get":
            for src, dst in zip(srcs, dsts, strict=True):
                yield [span(src, other=dst)], [span(dst, other=src)], 2, ({}, {})
        elif kind in ("glres", "gstore"):
            sources = span(srcs[0]) if kind == "glres" else [span(srcs[0])]
            yield sources, span(dsts[0]), 1, ({}, {})
        elif not packets:
            yield [span(entry) for entry in srcs], [span(entry) for entry in dsts], 2, ({}, {})
        elif kind in ("upkt", "rppkt"):
            forwards = kind == "rppkt"
            yield (
                [span(srcs[0], scale=2, reads_packets=True)],
                [span(dst, scale=2 if forwards else 1) for dst in dsts],
                1,
                ({0}, set(range(len(dsts))) if forwards else {}),
            )
        elif kind == "cpkt":
            yield [span(srcs[0])], [span(dsts[0], scale=2)], 1, ({}, {0})
        else:  # repkt, respkt, recpkt, recspkt
            sources = [span(srcs[0])] + [span(src, scale=2, reads_packets=True) for src in srcs[1:]]
            targets = [span(dsts[0])] + [span(dst, scale=2) for dst in dsts[1:]]
            yield sources, targets, 1, (set(range(1, len(srcs))), set(range(1, len(dsts))))

    def move(self, j, srcs, dsts, per_step, packets, call):
        count = len(srcs[0]) // (2 if 0 in packets[0] else 1)
        for first in range(j * per_step, count, self.threads * per_step):
            indices = range(first, min(first + per_step, count))
            values = {}
            for s, words in enumerate(srcs):
                for index in indices:
                    if s in packets[0]:
                        cells = words[2 * index : 2 * index + 2]
                        yield Step(cells, ready=lambda cells=cells: all(self.has_packet(c, call) for c in cells))
                        value = self.memory[cells[0]][0]
                    else:
                        yield Step([words[index]])
                        value = self.load(words[index])
                        if isinstance(value, Packet):
                            raise RunError("packets are read as data")
                    values[index] = self.combine(values[index], value) if index in values else value
            for d, words in enumerate(dsts):
                for index in indices:
                    cells = words[2 * index : 2 * index + 2] if d in packets[1] else [words[index]]
                    value = Packet(values[index], call) if d in packets[1] else values[index]
                    made = dict.fromkeys(cells, value)
                    yield Step(writes=cells, act=lambda made=made: self.memory.update(made))


def operations(content):
    """Return (list, position) of each operation of a plan, those of pipelines included."""
    blocks = [block["ops"] for gpu in content["gpus"] for block in gpu["threadblocks"]]
    lists = [ops for block in blocks for ops in (block, *(op["ops"] for op in block if op["name"] == "pipeline"))]
    return [(ops, k) for ops in lists for k in range(len(ops))]


def fault(text, seed, tries, chunk=32, threads=None, root=None, held=None, calls=None):
    """Return the fault of a plan in one of several random executions, or ``None``.

    ``threads``: per threadblock; by default, one more than the channels of an operation, and at least two.
    """
    rng, content = random.Random(seed), json.loads(text)
    threads = threads or 1 + max(1, *(len(ops[k].get("channel_ids", ())) for ops, k in operations(content)))
    for _ in range(tries):
        try:
            machine = Machine(text, chunk, calls or 2 + content.get("use_double_scratch_buffer", False), threads, root)
            machine.run(rng, held)
        except RunError as error:
            return str(error)
    return None
