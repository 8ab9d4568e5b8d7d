"""An interpreter of the MSCCL++ plans that the exporter writes: it runs their operations on values, in random orders.

It shares no code with the library, and does not search for races: ``verify_mscclpp_json`` proves that the accesses of a
plan are ordered, so all orders of its threadblocks give the same result. Each cell of 16 bytes has one value.
"""

import json
import random
from collections import Counter

BUFFERS = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}


class Interpreter:
    """One call of a plan whose chunks have ``cells`` cells. ``value(rank, cell)`` returns the input."""

    def __init__(self, text, cells=1, root=0, *, value=None, combine=int.__add__):
        self.plan, self.cells, self.root, self.combine = json.loads(text), cells, root or 0, combine
        self.gpus, self.coll = self.plan["gpus"], self.plan["collective"]
        self.n, self.memory, self.signals = len(self.gpus), {}, Counter()
        self.value = value or (lambda rank, cell: (self.n + 2) ** rank * (1 + cell))
        for rank, gpu in enumerate(self.gpus):
            if self.coll != "broadcast" or rank == self.root:
                for k, place in enumerate(self.places(rank, "i", 0, gpu["input_chunks"] * cells)):
                    self.memory[place] = self.value(rank, k)

    def places(self, rank, buffer, start, count, part=None):
        """Return the addresses of cells. In place, they are in the part of the larger buffer of rank ``part``."""
        if self.plan["inplace"] and buffer != "s":
            if (self.coll, buffer) in (("allgather", "i"), ("reducescatter", "o")):
                start += (rank if part is None else part) * self.gpus[rank][BUFFERS[buffer]] * self.cells
            buffer = "io"
        return [(rank, buffer, start + k) for k in range(count)]

    def run(self, seed=0):
        """Run all threadblocks in a random order. Return whether all of them end and no signal is left."""
        rng, waiting = random.Random(seed), []
        running = [self.threadblock(r, block) for r, gpu in enumerate(self.gpus) for block in gpu["threadblocks"]]
        while running:
            thread = running.pop(rng.randrange(len(running)))
            state = next(thread, "end")
            if state == "waits":
                waiting.append(thread)
            else:
                running += waiting + [thread] * (state == "moved")
                waiting = []
        return not waiting and not any(self.signals.values())

    def threadblock(self, rank, block):
        """Run a threadblock. Yield "moved" after each operation, and "waits" while a signal is missing."""
        channels = {used["channel_type"]: used["channel_ids"] for used in block["channels"]}
        buffers = {used["access_channel_type"]: used["remote_buffer_ids"] for used in block["remote_buffer_refs"]}
        for op in block["ops"]:
            unit = op["iter_context"]["unit_size"] // 16 if op["name"] == "pipeline" else 0
            for k in range(-(-op["iter_context"]["num_chunks"] * self.cells // unit) if unit else 1):
                for inner in op["ops"] if unit else [op]:
                    yield from self.operation(rank, channels, buffers, inner, k * unit, unit or 1 << 32)

    def operation(self, rank, channels, buffers, op, offset, unit):
        name, kind = op["name"], op.get("channel_type", "none")
        used = [channels[kind][k] for k in op["channel_ids"]] if "channel_ids" in op else []
        if name == "wait":
            for number in used:
                end = self.ends(rank, kind, number)[1]
                while not self.signals[end]:
                    yield "waits"
                self.signals[end] -= 1
            yield "moved"
            return

        def span(entry):
            """Return the addresses of a source or destination: a list for each rank that has it."""
            start, count = entry["index"] * self.cells + offset, min(entry["size"] * self.cells - offset, unit)
            if "switch_channel_id" in entry:
                switches = [c for c in self.gpus[rank]["channels"] if c["channel_type"] == "switch"]
                switch = switches[entry["switch_channel_id"]]
                ranks = switch["rank_groups"][0]["ranks"]
                return [self.places(r, switch["buffer_type"], start, count, rank) for r in ranks]
            if "buffer_id" in entry:
                target = self.gpus[rank]["remote_buffers"][buffers[kind][entry["buffer_id"]]]
                return [self.places(target["rank"], target["type"], start, count, rank)]
            return [self.places(rank, entry["type"], start, count, 0 if kind == "port" else None)]

        srcs, dsts = ([span(entry) for entry in op.get(key, ())] for key in ("src_buff", "dst_buff"))
        if name in ("put", "pws"):
            for src, dst in zip(srcs, dsts, strict=True):
                self.move(src, dst)
        elif name in ("re", "rre", "res", "copy", "glres"):
            self.move([places for found in srcs for places in found], [places for found in dsts for places in found])
        else:
            assert name in ("nop", "signal"), name
        for number in used if name in ("signal", "pws") else ():
            self.signals[self.ends(rank, kind, number)[0]] += 1
        yield "moved"

    def move(self, srcs, dsts):
        """Combine cell k of all sources, for each k, and write the result into cell k of all destinations."""
        for k, (first, *others) in enumerate(zip(*srcs, strict=True)):
            total = self.memory[first]
            for place in others:
                total = self.combine(total, self.memory[place])
            self.memory.update(dict.fromkeys((places[k] for places in dsts), total))

    def ends(self, rank, kind, number):
        """Return the keys in ``signals`` of the two directions of a rank's channel: from this rank, and to it."""
        peers = [p for c in self.gpus[rank]["channels"] if c["channel_type"] == kind for p in c["connected_to"]]
        which, peer = peers[:number].count(peers[number]), peers[number]
        return (kind, rank, peer, which), (kind, peer, rank, which)

    def output(self, rank):
        """Return the values in the output of a rank."""
        count = self.gpus[rank]["output_chunks"] * self.cells
        return [self.memory.get(place) for place in self.places(rank, "o", 0, count)]

    def due(self, rank):
        """Return the right values in the output of a rank."""
        count = self.gpus[rank]["output_chunks"] * self.cells
        part = self.gpus[0]["input_chunks" if self.coll == "allgather" else "output_chunks"] * self.cells
        if self.coll == "allgather":
            return [self.value(k // part, k % part) for k in range(count)]
        if self.coll == "broadcast":
            return [self.value(self.root, k) for k in range(count)]
        if self.coll == "alltoall":
            size = count // self.n
            return [self.value(k // size, rank * size + k % size) for k in range(count)]
        start = rank * part if self.coll == "reducescatter" else 0
        return [sum(self.value(r, start + k) for r in range(self.n)) for k in range(count)]


def fault(text, seed=0, cells=1, root=0):
    """Return the fault of one call of a plan as text, or ``None``."""
    run = Interpreter(text, cells, root)
    if not run.run(seed):
        return "the plan does not end, or leaves signals"
    for rank in range(run.n):
        if (run.coll != "reduce" or rank == run.root) and run.output(rank) != run.due(rank):
            return f"wrong values in the output of rank {rank}"
    return None


def operations(content):
    """Return (list that contains it, position) of each operation of a plan, also of operations in pipelines."""
    blocks = [block["ops"] for gpu in content["gpus"] for block in gpu["threadblocks"]]
    lists = [ops for block in blocks for ops in (block, *(op["ops"] for op in block if op["name"] == "pipeline"))]
    return [(ops, k) for ops in lists for k in range(len(ops))]
