"""A machine that runs MSCCL XML on numbers, one event at a time, in any possible order.

It is an independent model of the runtimes and shares no code with the library. It turns each threadblock into a list of
transmissions with flags and dependencies, as the runtimes' parsers do, and stores messages as queues of single chunks.
A receive that combines reads its own data at any time after it has begun, as the LL protocols do.
"""

import copy
import random
import xml.etree.ElementTree as ET
from collections import defaultdict, deque

SENDING = {"s", "rcs", "rrs", "rrcs"}
RECEIVING = {"r", "rcs", "rrs", "rrc", "rrcs"}
LOADING = {"s", "rrs", "rrc", "rrcs", "cpy", "re"}
STORING = {"r", "rcs", "rrc", "rrcs", "cpy", "re"}


class RunError(Exception):
    """The file is invalid, performs an invalid access, does not finish, or leaves a wrong result."""


class Transmission:
    """One action of a threadblock: a step, or adjacent ``re`` steps that run as one."""

    def __init__(self, step, waits):
        self.type = step.get("type")
        self.src = step.get("srcbuf"), int(step.get("srcoff"))
        self.dst = step.get("dstbuf"), int(step.get("dstoff"))
        self.count = int(step.get("cnt"))
        self.waits = waits
        self.adds = [self.src[1]]  # the source offsets of this step and of the ``re`` steps fused with it
        self.flag = None
        self.loop = 0  # the number of the slice of the message that this transmission moves

    def in_loop(self, loop):
        """Return the same transmission for another slice."""
        made = copy.copy(self)
        made.loop = loop
        return made


def transmissions(block):
    """Return a threadblock's transmissions, as the runtimes' parsers do.

    Several ``re`` steps in succession with one destination, a ``chain``, become one transmission.
    """
    made, waits, chain, reductions, counter = [], [], None, 0, 0
    for step in block:
        if int(step.get("depid")) >= 0:
            waits.append((int(step.get("depid")), int(step.get("deps"))))
        if step.get("type") == "nop":
            continue
        joined = step.get("type") == "re" and int(step.get("depid")) < 0
        joined = joined and chain == (step.get("dstbuf"), step.get("dstoff"), step.get("srcbuf"))
        if joined:
            last = made[-1]
            last.adds.append(int(step.get("srcoff")))
            last.count = int(step.get("cnt"))
        else:
            counter += len(waits) - 1 if waits else 0
            made.append(Transmission(step, waits))
            waits = []
        signals = step.get("hasdep") == "1"
        if signals:
            made[-1].flag = counter
        counter += 1
        chain = None
        if step.get("type") == "re":
            reductions += 1
            if not signals and reductions != 16:
                chain = step.get("dstbuf"), step.get("dstoff"), step.get("srcbuf")
    return made


class Machine:
    """One call of a file: its memory, queues and threadblocks.

    Args:
      text: the file.
      inplace: input and output are the same memory.
      root: the root of a reduce or broadcast.
      slots: the number of chunks that a connection can hold: sent, but not yet received.
      value: a function of rank and chunk that returns the number in this chunk of the rank's input.
      combine: a function that combines the numbers of two chunks.
      loops: the number of slices into which a long message is divided. A threadblock runs all its steps for one slice
        after the other, without waiting for other threadblocks in between. Slices have separate memory and flags.
    """

    def __init__(self, text, inplace, *, root=0, slots=10**9, value=None, combine=lambda a, b: a + b, loops=1):
        top = ET.fromstring(text)
        self.coll, self.n = top.get("coll"), int(top.get("ngpus"))
        self.chunks, self.inplace, self.root, self.slots = int(top.get("nchunksperloop")), inplace, root, slots
        self.part = self.chunks // self.n  # the number of chunks of one rank in an all-gather or reduce-scatter
        self.combine, self.loops = combine, loops
        self.value = value or (lambda rank, chunk: hash((rank, chunk, self.chunks)))
        # By GPU, the chunks of each buffer; by threadblock, its transmissions; by threadblock and end, the connection.
        self.limits, self.programs, self.owner = {}, {}, {}
        ends = {"send": {}, "recv": {}}  # the threadblock at each end of each connection (source, destination, channel)
        for gpu in top:
            g = int(gpu.get("id"))
            self.limits[g] = {b: int(gpu.get(f"{b}_chunks")) for b in "ios"}
            for block in gpu:
                place = g, int(block.get("id"))
                program = transmissions(block)
                self.programs[place] = [now.in_loop(loop) for loop in range(loops) for now in program]
                for end in ends:
                    peer, channel = int(block.get(end)), int(block.get("chan"))
                    if peer >= 0:
                        key = (g, peer, channel) if end == "send" else (peer, g, channel)
                        if key in ends[end] or channel >= int(top.get("nchannels")):
                            raise RunError("two threadblocks use one end of a connection, or a channel is undeclared")
                        ends[end][key] = place
                        self.owner[place, end] = key
        if set(ends["send"]) != set(ends["recv"]):
            raise RunError("a connection has only one end")
        for place, program in self.programs.items():
            for end, types in (("send", SENDING), ("recv", RECEIVING)):
                if (place, end) not in self.owner and any(now.type in types for now in program):
                    raise RunError("a message without a peer")
            if any(now.count < 1 for now in program):
                raise RunError("nothing to move")
        self.memory = {}
        for rank in range(self.n):
            for chunk in range(self.part if self.coll == "allgather" else self.chunks):
                for loop in range(loops if self.coll != "broadcast" or rank == root else 0):
                    self.memory[self.address(rank, "i", chunk, loop)] = self.number(rank, chunk, loop)
        self.queues = defaultdict(deque)  # the messages in each connection
        self.at = dict.fromkeys(self.programs, 0)  # the index of each threadblock's next transmission
        self.flags = dict.fromkeys(self.programs, (-1, -1))  # the last flag of each threadblock: (slice, number)
        self.passed = dict.fromkeys(self.programs, 0)  # how many chunks the next transmission has moved
        self.loaded = {}  # by threadblock, its own data for the next transmission, after the event "load"

    def number(self, rank, chunk, loop):
        """Return the number in a chunk of a rank's input, in a slice."""
        return self.value(rank, chunk + loop * self.chunks)

    def address(self, gpu, buffer, chunk, loop=0):
        """Return the key in ``memory`` of a chunk. In place, input and output are one buffer, "io"."""
        if not self.inplace or buffer == "s":
            return gpu, buffer, chunk, loop
        shift = gpu * self.part
        if self.coll == "allgather":
            return gpu, "io", chunk + shift if buffer == "i" else chunk, loop
        if self.coll == "reducescatter":
            return gpu, "io", chunk + shift if buffer == "o" else chunk, loop
        return gpu, "io", chunk, loop

    def cells(self, place, span, offset=None):
        """Return the addresses of the next transmission's chunks at ``span``, (buffer, offset), or at ``offset``."""
        gpu, (buffer, start) = place[0], span
        start = start if offset is None else offset
        now = self.programs[place][self.at[place]]
        count = now.count
        part = {"i": "allgather", "o": "reducescatter"}.get(buffer) == self.coll
        size = self.limits[gpu][buffer]
        size = size if buffer == "s" else min(size, self.part if part else self.chunks)
        if self.coll == "reduce" and buffer == "o" and gpu != self.root and not self.inplace:
            size = 0
        if start < 0 or start + count > size:
            raise RunError("out of bounds")
        return [self.address(gpu, buffer, start + k, now.loop) for k in range(count)]

    def load(self, cell):
        if cell not in self.memory:
            raise RunError("a read of memory that was never written")
        return self.memory[cell]

    def ready(self, place):
        """Return whether a threadblock's next transmission exists and may begin."""
        if self.at[place] == len(self.programs[place]):
            return False
        now = self.programs[place][self.at[place]]
        for block, step in now.waits:
            target = place[0], block
            if target not in self.flags:
                raise RunError("waits for a threadblock that does not exist")
            if self.flags[target] < (now.loop, step):
                return False
        return True

    def events(self, place):
        """Return a threadblock's possible events: "load" its own data, "go" (transmit a chunk), or a "local" step."""
        if not self.ready(place):
            return []
        now = self.programs[place][self.at[place]]
        kind = now.type
        if kind in ("cpy", "re"):
            return ["local"]
        found = ["load"] if kind in LOADING and kind in RECEIVING and place not in self.loaded else []
        able = kind not in RECEIVING or bool(self.queues[self.owner[place, "recv"]])
        if kind in SENDING and able:
            able = len(self.queues[self.owner[place, "send"]]) < self.slots
        return [*found, "go"] if able else found

    def do(self, place, event):
        now = self.programs[place][self.at[place]]
        if event == "load":
            self.loaded[place] = [self.load(cell) for cell in self.cells(place, now.src)]
            return
        if event == "local":
            targets = self.cells(place, now.dst)
            for offset in now.adds:
                sources = self.cells(place, now.src, offset)
                if sources != targets and set(sources) & set(targets):
                    raise RunError("source and destination overlap")
                values = [self.load(cell) for cell in sources]
                if now.type == "re":
                    values = [self.combine(self.load(cell), value) for cell, value in zip(targets, values, strict=True)]
                self.memory.update(zip(targets, values, strict=True))
            self.finish(place, now)
            return
        k = self.passed[place]
        if now.type in RECEIVING:
            value, number, count = self.queues[self.owner[place, "recv"]].popleft()
            if (number, count) != (k, now.count):
                raise RunError("a message of another size")
            if now.type in LOADING:
                if place not in self.loaded:
                    self.do(place, "load")
                value = self.combine(value, self.loaded[place][k])
        else:
            value = self.load(self.cells(place, now.src)[k])
        if now.type in STORING:
            targets = self.cells(place, now.dst)
            if now.type in LOADING:
                sources = self.cells(place, now.src)
                if sources != targets and set(sources) & set(targets):
                    raise RunError("source and destination overlap")
            self.memory[targets[k]] = value
        if now.type in SENDING:
            self.queues[self.owner[place, "send"]].append((value, k, now.count))
        self.passed[place] += 1
        if self.passed[place] == now.count:
            self.finish(place, now)

    def finish(self, place, now):
        if now.flag is not None:
            self.flags[place] = now.loop, now.flag
        self.at[place] += 1
        self.passed[place] = 0
        self.loaded.pop(place, None)

    def run(self, rng, held=()):
        """Run events, in an order that ``rng`` chooses, until none is possible. Transmissions in ``held`` never run.

        Half of the orders are random. In the other half the threadblocks have fixed priorities.
        """
        rank = {place: rng.random() for place in self.programs}
        fair = rng.random() < 0.5
        while True:
            able = [
                (place, event)
                for place in self.programs
                if (place, self.at[place]) not in held
                for event in self.events(place)
            ]
            if not able:
                return
            chosen = rng.choice(able) if fair else max(able, key=lambda entry: (rank[entry[0]], rng.random()))
            self.do(*chosen)

    def check(self):
        """Raise RunError unless all transmissions are done, all messages are received and every output is right."""
        for place, program in self.programs.items():
            if self.at[place] < len(program):
                raise RunError("stuck")
        if any(self.queues.values()):
            raise RunError("messages are left")
        for rank in range(self.n):
            for chunk in range(self.part if self.coll == "reducescatter" else self.chunks):
                for loop in range(self.loops):
                    expected = self.expected(rank, chunk, loop)
                    if expected is not None and self.memory.get(self.address(rank, "o", chunk, loop)) != expected:
                        raise RunError(f"rank {rank}, chunk {chunk}, slice {loop}")

    def expected(self, rank, chunk, loop):
        """Return the right result in a chunk of a rank's output, or ``None`` if any value is right there."""
        everyone = range(self.n)
        if self.coll == "allreduce" or (self.coll == "reduce" and rank == self.root):
            return sum(self.number(r, chunk, loop) for r in everyone)
        if self.coll == "reducescatter":
            return sum(self.number(r, rank * self.part + chunk, loop) for r in everyone)
        if self.coll == "broadcast":
            return self.number(self.root, chunk, loop)
        if self.coll == "allgather":
            return self.number(chunk // self.part, chunk % self.part, loop)
        if self.coll == "alltoall":
            return self.number(chunk // self.part, rank * self.part + chunk % self.part, loop)
        return None


def modes(text):
    """Return a list of the modes that a file supports: True for calls in place, False for calls out of place."""
    top = ET.fromstring(text)
    inplace = top.get("inplace") == "1"
    outofplace = top.get("outofplace", "0" if inplace else "1") == "1"
    return [True] * inplace + [False] * outofplace


def fault(text, seed, tries, *, root=0, slots=10**9, loops=1):
    """Return the fault of a file in one of several random executions, or ``None``."""
    rng = random.Random(seed)
    for _ in range(tries):
        for inplace in modes(text):
            try:
                machine = Machine(text, inplace, root=root, slots=slots, loops=loops)
                machine.run(rng)
                machine.check()
            except RunError as error:
                return str(error)
    return None
