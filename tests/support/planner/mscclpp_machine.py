"""An interpreter of MSCCL++ execution plans, which runs them on numbers in random orders that the plans allow.

It shares no code with the library, and reads a plan as MSCCL++'s execution_plan.cc and executor.cc do: rank a's k-th
channel to rank b and b's k-th channel to a are the two ends of one channel, and operations refer to channels and remote
buffers by their positions in the lists of their threadblock.

A chunk consists of ``cells`` cells of 16 bytes, of which a pipeline processes ``unit_size`` bytes in each iteration. A
port channel makes its transfers and signals in the order in which they were posted, at any later time.
"""

import json
import random
from collections import defaultdict

DATA = ("put", "re", "copy", "res", "glres")
ON_CHANNELS = ("signal", "wait")
CELL = 16  # bytes


class RunError(Exception):
    """A fault of a plan: an invalid access, a missing nop, a wrong result, an unused signal, or a deadlock."""


def check_form(content):
    """Assert that a plan has the fields that the executor reads, within the executor's limits."""
    assert set(content) == {
        "name",
        "collective",
        "protocol",
        "inplace",
        "reuse_resources",
        "gpus",
        "num_threads_per_block",
        "use_double_scratch_buffer",
        "buffer_alignment",
        "min_message_size",
        "max_message_size",
    }
    assert content["protocol"] == "Simple"
    for rank, gpu in enumerate(content["gpus"]):
        assert gpu["id"] == rank
        assert gpu["input_chunks"] > 0
        assert gpu["output_chunks"] > 0
        assert gpu["threadblocks"]
        peers = {kind: [] for kind in ("memory", "port", "switch")}
        for channel in gpu["channels"]:
            peers[channel["channel_type"]] += channel.get("connected_to", channel.get("rank_groups"))
        assert rank not in peers["memory"] + peers["port"]
        for number, block in enumerate(gpu["threadblocks"]):
            assert block["id"] == number
            check_block(block, gpu, peers)


def check_block(block, gpu, peers):
    """Assert that a threadblock refers to channels and buffers that exist, within the executor's limits."""
    flat = [inner for op in block["ops"] for inner in (op, *op.get("ops", ()))]
    assert 0 < len(flat) <= 64
    channels = {kind: numbers_of(block, "channels", "channel_type", "channel_ids", kind) for kind in peers}
    buffers = {
        kind: numbers_of(block, "remote_buffer_refs", "access_channel_type", "remote_buffer_ids", kind)
        for kind in peers
    }
    for kind in peers:
        assert len(channels[kind]) <= 16
        assert len(buffers[kind]) <= 16
        assert all(k < len(peers[kind]) for k in channels[kind])
        assert all(kind in gpu["remote_buffers"][k]["access_channel_types"] for k in buffers[kind])
    check_threads(unrolled(block["ops"], lambda op: 2))
    for op in flat:
        assert op["name"] in (*DATA, *ON_CHANNELS, "nop", "pws", "pipeline")
        kind = op.get("channel_type", "none")
        if op["name"] in ON_CHANNELS or kind == "port":
            assert kind in ("memory", "port")
            assert len(set(op["channel_ids"])) == len(op["channel_ids"]) <= 8
            assert all(k < len(channels[kind]) for k in op["channel_ids"])
        if op["name"] in ("put", "pws"):
            assert len(op["src_buff"]) == len(op["dst_buff"]) <= 8
            assert len({span["type"] for span in op["src_buff"]}) == 1 or kind == "port"  # it uses the first type
            assert all(span["buffer_id"] < len(buffers[kind]) for span in op["dst_buff"])
        if op["name"] in ("re", "copy", "res"):
            assert len(op["dst_buff"]) == 1 or (op["name"] == "res" and 2 <= len(op["dst_buff"]) <= 9)
            assert all(span["buffer_id"] < len(buffers["memory"]) for span in op["dst_buff"][1:])
            assert len(op["src_buff"]) <= 10
            assert len({span["size"] for span in op["src_buff"] + op["dst_buff"]}) == 1
        if op["name"] == "pipeline":
            sizes = {span["size"] for inner in op["ops"] for span in inner.get("src_buff", [])}
            assert sizes <= {op["iter_context"]["num_chunks"]}
            assert len(op["ops"]) <= 16


def numbers_of(block, lists, key, ids, kind):
    """Return the numbers of a threadblock's channels or remote buffers of one kind."""
    return [k for used in block[lists] if used[key] == kind for k in used[ids]]


def unrolled(ops, count):
    """Return operations with those of pipelines repeated, ``count`` times each."""
    flat = []
    for op in ops:
        flat += [op] if op["name"] != "pipeline" else op["ops"] * count(op)
    return flat


def check_threads(ops):
    """Require a nop, which synchronises threads, between waits, accesses to data (but not two puts) and signals."""
    waited = dirty = ""
    for op in ops:
        kind = op["name"]
        if kind == "nop":
            waited = dirty = ""
        elif kind == "wait":
            waited = kind
        elif kind == "signal":
            if dirty:
                raise RunError("a signal is sent before all threads are done")
        elif op.get("channel_type") == "port":
            if waited or dirty:
                raise RunError("a thread posts data before all threads are done")
            dirty = kind if kind == "put" else ""
        elif waited or (dirty and (dirty, kind) != ("put", "put")):
            raise RunError("threads use data before all of them may")
        else:
            dirty = kind


class Machine:
    """Several calls of a plan, one after the other on each rank. A rank may be one call ahead of another.

    A rank writes a call's own input into its buffers when the call begins; outputs are checked when it ends.
    """

    def __init__(self, text, calls=2, *, root=0, value=None, combine=lambda a, b: a + b, cells=1):
        self.plan = json.loads(text)
        self.gpus, self.coll, self.inplace = self.plan["gpus"], self.plan["collective"], self.plan["inplace"]
        self.n, self.root, self.calls, self.combine = len(self.gpus), root, calls, combine
        self.value = value or (lambda call, rank, chunk: hash((call, rank, chunk)))
        self.memory = [{} for _ in self.gpus]
        self.size = cells  # of a chunk
        self.counts = defaultdict(int)  # signals that each end of each channel received and no wait consumed yet
        which = "input_chunks" if self.coll == "allgather" else "output_chunks"
        self.part = self.gpus[0][which] * self.size
        self.posted = defaultdict(list)  # by end of a port channel: transfers and signals that it has not yet made
        self.lists = [[self.operations(block["ops"]) for block in gpu["threadblocks"]] for gpu in self.gpus]
        self.pairs = {}
        for rank, gpu in enumerate(self.gpus):
            for kind in ("memory", "port"):
                seen = defaultdict(int)
                listed = [channel for channel in gpu["channels"] if channel["channel_type"] == kind]
                for number, peer in enumerate(p for channel in listed for p in channel["connected_to"]):
                    self.pairs[rank, kind, number] = peer, seen[peer]
                    seen[peer] += 1
        self.ends = {(rank, kind, *pair): number for (rank, kind, number), pair in self.pairs.items()}
        self.call = [-1] * self.n
        self.at = [[len(ops) for ops in lists] for lists in self.lists]
        self.part_of_op = [[0] * len(gpu["threadblocks"]) for gpu in self.gpus]

    def operations(self, ops):
        """Return operations with the cells, from the first to the last of a chunk's, that each of them processes."""
        flat = []
        for op in ops:
            if op["name"] != "pipeline":
                flat.append((op, 0, None))
                continue
            unit, total = op["iter_context"]["unit_size"], op["iter_context"]["num_chunks"] * self.size * CELL
            for k in range(-(-total // unit)):
                flat += [(inner, k * unit // CELL, unit // CELL) for inner in op["ops"]]
        return flat

    def address(self, rank, buffer, index):
        if self.inplace and buffer in "io":
            shift = rank * self.part
            if self.coll == "allgather":
                return "io", index + shift if buffer == "i" else index
            return "io", index + (shift if buffer == "o" and self.coll == "reducescatter" else 0)
        return buffer, index

    def cells(self, rank, span, buffer, start, unit):
        size = self.gpus[rank][{"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}[buffer]]
        if span["index"] + span["size"] > size or span["index"] < 0:
            raise RunError("out of bounds")
        count = span["size"] * self.size
        if start >= count:
            raise RunError("an iteration beyond the end of the data")
        stop = count if unit is None else min(count, start + unit)
        return [self.address(rank, buffer, span["index"] * self.size + k) for k in range(start, stop)]

    def load(self, rank, span, start, unit):
        memory = self.memory[rank]
        cells = self.cells(rank, span, span["type"], start, unit)
        if any(cell not in memory for cell in cells):
            raise RunError("a read of memory that was never written")
        return [memory[cell] for cell in cells]

    def store(self, rank, span, buffer, values, start, unit):
        self.memory[rank].update(zip(self.cells(rank, span, buffer, start, unit), values, strict=True))

    def begin(self, rank):
        """Check the output of a rank's last call and write the input of its next one."""
        if self.call[rank] >= 0:
            self.check(rank)
        self.call[rank] += 1
        if self.call[rank] == self.calls:
            return
        self.at[rank] = [0] * len(self.at[rank])
        for buffer, size in (("o", "output_chunks"), ("i", "input_chunks")):
            for k in range(self.gpus[rank][size] * self.size):
                given = buffer == "i" and (self.coll != "broadcast" or rank == self.root)
                self.memory[rank].pop(self.address(rank, buffer, k), None)
                if given:
                    self.memory[rank][self.address(rank, buffer, k)] = self.value(self.call[rank], rank, k)

    def check(self, rank):
        call = self.call[rank]
        for k in range(self.gpus[rank]["output_chunks"] * self.size):
            if self.coll in ("allreduce", "reduce", "reducescatter"):
                at = rank * self.part + k if self.coll == "reducescatter" else k
                due = sum(self.value(call, r, at) for r in range(self.n))
            elif self.coll == "broadcast":
                due = self.value(call, self.root, k)
            else:
                due = self.value(call, k // self.part, k % self.part)
            if self.coll == "reduce" and rank != self.root:
                continue
            if self.memory[rank].get(self.address(rank, "o", k)) != due:
                raise RunError(f"call {call}, rank {rank}, chunk {k}")

    def able(self, rank):
        """Return the threadblocks of a rank that can run an operation, or -1 if the rank can begin its next call."""
        if self.call[rank] == self.calls:
            return []
        if all(at == len(ops) for at, ops in zip(self.at[rank], self.lists[rank], strict=True)):
            return [-1]
        found = []
        for t, ops in enumerate(self.lists[rank]):
            if self.at[rank][t] < len(ops):
                op = ops[self.at[rank][t]][0]
                if op["name"] != "wait" or all(self.counts[end] for end in self.channels(rank, t, op)):
                    found.append(t)
        return found

    def channels(self, rank, t, op):
        """Return the ends of channels that an operation uses: the rank, the kind and the number."""
        kind = op["channel_type"]
        block = self.gpus[rank]["threadblocks"][t]
        used = numbers_of(block, "channels", "channel_type", "channel_ids", kind)
        return [(rank, kind, used[k]) for k in op["channel_ids"]]

    def target(self, rank, t, op, span):
        """Return the remote buffer that an operation writes."""
        block = self.gpus[rank]["threadblocks"][t]
        kind = op["channel_type"]
        used = numbers_of(block, "remote_buffer_refs", "access_channel_type", "remote_buffer_ids", kind)
        return self.gpus[rank]["remote_buffers"][used[span["buffer_id"]]]

    def send_signal(self, end):
        rank, kind, _ = end
        peer, which = self.pairs[end]
        self.counts[peer, kind, self.ends[peer, kind, rank, which]] += 1

    def make_post(self, end):
        """Let a port channel make the transfer or signal that was posted first."""
        post = self.posted[end].pop(0)
        if post is None:
            self.send_signal(end)
        else:
            src, target, dst, where = post
            self.store(target["rank"], dst, target["type"], self.load(end[0], src, *where), *where)

    def do(self, rank, t):
        if t < 0:
            self.begin(rank)
            return
        op, *where = self.lists[rank][t][self.at[rank][t]]
        name = op["name"]
        kind = op.get("channel_type")
        if name == "wait":
            for end in self.channels(rank, t, op):
                self.counts[end] -= 1
        elif name == "signal":
            for end in self.channels(rank, t, op):
                if kind == "port":
                    self.posted[end].append(None)
                else:
                    self.send_signal(end)
        elif kind == "port":
            ends = self.channels(rank, t, op)
            for end, src, dst in zip(ends, op["src_buff"], op["dst_buff"], strict=True):
                self.posted[end].append((src, self.target(rank, t, op, dst), dst, where))
                self.posted[end] += [None] if name == "pws" else []
        elif name == "copy":
            self.store(
                rank, op["dst_buff"][0], op["dst_buff"][0]["type"], self.load(rank, op["src_buff"][0], *where), *where
            )
        elif name in ("re", "res"):
            total = self.load(rank, op["src_buff"][0], *where)
            for span in op["src_buff"][1:]:
                total = [self.combine(a, b) for a, b in zip(total, self.load(rank, span, *where), strict=True)]
            self.store(rank, op["dst_buff"][0], op["dst_buff"][0]["type"], total, *where)
            for span in op["dst_buff"][1:]:
                target = self.target(rank, t, op, span)
                self.store(target["rank"], span, target["type"], total, *where)
        elif name == "glres":
            self.switch(rank, t, op, where)
        elif name == "put":  # one source per call, so that other operations may run in between
            k = self.part_of_op[rank][t]
            target = self.target(rank, t, op, op["dst_buff"][k])
            values = self.load(rank, op["src_buff"][k], *where)
            self.store(target["rank"], op["dst_buff"][k], target["type"], values, *where)
            self.part_of_op[rank][t] = (k + 1) % len(op["src_buff"])
            if self.part_of_op[rank][t]:
                return
        self.at[rank][t] += 1

    def switch(self, rank, t, op, where):
        """Add the blocks of all ranks of a group, and store the sum on all of them."""
        block = self.gpus[rank]["threadblocks"][t]
        used = numbers_of(block, "channels", "channel_type", "channel_ids", "switch")
        groups = [
            (channel["buffer_type"], group["ranks"])
            for channel in self.gpus[rank]["channels"]
            if channel["channel_type"] == "switch"
            for group in channel["rank_groups"]
        ]
        (src, dst), total = (op["src_buff"][0], op["dst_buff"][0]), None
        buffer, ranks = groups[used[src["switch_channel_id"]]]
        for other in ranks:
            values = self.load(other, {"type": buffer, **src}, *where)
            total = values if total is None else [self.combine(a, b) for a, b in zip(total, values, strict=True)]
        buffer, ranks = groups[used[dst["switch_channel_id"]]]
        for other in ranks:
            self.store(other, dst, buffer, total, *where)

    def run(self, rng):
        order = {(rank, t): rng.random() for rank in range(self.n) for t in range(-1, len(self.at[rank]))}
        fair = rng.random() < 0.5
        eager = rng.choice([0.05, 0.3, 0.9])  # how soon port channels make their transfers
        while True:
            able = [(rank, t) for rank in range(self.n) for t in self.able(rank)]
            posted = [end for end, posts in self.posted.items() if posts]
            if posted and (not able or rng.random() < eager):
                self.make_post(rng.choice(posted))
                continue
            if not able:
                break
            self.do(*(rng.choice(able) if fair else max(able, key=order.__getitem__)))
        if any(call < self.calls for call in self.call):
            raise RunError("stuck")
        if any(self.counts.values()):
            raise RunError("a signal without a wait")


def fault(text, seed, tries, root=0, cells=1):
    """Return the fault of a plan in one of several random executions, or ``None``."""
    rng = random.Random(seed)
    try:
        check_form(json.loads(text))
        for _ in range(tries):
            Machine(text, root=root, cells=cells).run(rng)
    except RunError as error:
        return str(error)
    return None
