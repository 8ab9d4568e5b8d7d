"""An interpreter of MSCCL++ execution plans, which runs them on numbers in random orders that the plans allow.

It shares no code with the library, and reads a plan as MSCCL++'s execution_plan.cc and executor.cc do: rank a's k-th
channel to rank b and b's k-th channel to a are the two ends of one channel, and operations refer to channels and remote
buffers by their positions in the lists of their threadblock.
"""

import json
import random
from collections import defaultdict

DATA = ("put", "re", "copy")


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
        peers = [peer for channel in gpu["channels"] for peer in channel["connected_to"]]
        assert {channel["channel_type"] for channel in gpu["channels"]} <= {"memory"}
        assert rank not in peers
        for number, block in enumerate(gpu["threadblocks"]):
            assert block["id"] == number
            assert 0 < len(block["ops"]) <= 64
            channels = [k for used in block["channels"] for k in used["channel_ids"]]
            buffers = [k for used in block["remote_buffer_refs"] for k in used["remote_buffer_ids"]]
            assert len(channels) <= 16
            assert len(buffers) <= 16
            assert all(k < len(peers) for k in channels)
            assert all(k < len(gpu["remote_buffers"]) for k in buffers)
            check_threads(block["ops"])
            for op in block["ops"]:
                assert op["name"] in (*DATA, "signal", "wait", "nop")
                if op["name"] in ("signal", "wait"):
                    assert op["channel_type"] == "memory"
                    assert len(set(op["channel_ids"])) == len(op["channel_ids"]) <= 8
                    assert all(k < len(channels) for k in op["channel_ids"])
                if op["name"] == "put":
                    assert op["channel_type"] == "memory"
                    assert len(op["src_buff"]) == len(op["dst_buff"]) <= 8
                    assert len({span["type"] for span in op["src_buff"]}) == 1  # the executor uses the first type
                    assert all(span["buffer_id"] < len(buffers) for span in op["dst_buff"])
                if op["name"] in ("re", "copy"):
                    assert len(op["dst_buff"]) == 1
                    assert len(op["src_buff"]) <= 10
                    assert len({span["size"] for span in op["src_buff"] + op["dst_buff"]}) == 1


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
        elif waited or (dirty and (dirty, kind) != ("put", "put")):
            raise RunError("threads use data before all of them may")
        else:
            dirty = kind


class Machine:
    """Several calls of a plan, one after the other on each rank. A rank may be one call ahead of another.

    A rank writes a call's own input into its buffers when the call begins; outputs are checked when it ends.
    """

    def __init__(self, text, calls=2, *, root=0, value=None, combine=lambda a, b: a + b):
        self.plan = json.loads(text)
        self.gpus, self.coll, self.inplace = self.plan["gpus"], self.plan["collective"], self.plan["inplace"]
        self.n, self.root, self.calls, self.combine = len(self.gpus), root, calls, combine
        self.value = value or (lambda call, rank, chunk: hash((call, rank, chunk)))
        self.memory = [{} for _ in self.gpus]
        self.counts = defaultdict(int)  # signals that each end of each channel received and no wait consumed yet
        self.part = self.gpus[0]["input_chunks"] if self.coll == "allgather" else self.gpus[0]["output_chunks"]
        self.pairs = {}
        for rank, gpu in enumerate(self.gpus):
            seen = defaultdict(int)
            for number, peer in enumerate(p for channel in gpu["channels"] for p in channel["connected_to"]):
                self.pairs[rank, number] = peer, seen[peer]
                seen[peer] += 1
        self.ends = {(rank, *pair): number for (rank, number), pair in self.pairs.items()}
        self.call = [-1] * self.n
        self.at = [[len(block["ops"]) for block in gpu["threadblocks"]] for gpu in self.gpus]
        self.part_of_op = [[0] * len(gpu["threadblocks"]) for gpu in self.gpus]

    def address(self, rank, buffer, index):
        if self.inplace and buffer in "io":
            shift = rank * self.part
            if self.coll == "allgather":
                return "io", index + shift if buffer == "i" else index
            return "io", index + (shift if buffer == "o" and self.coll == "reducescatter" else 0)
        return buffer, index

    def cells(self, rank, span, buffer):
        size = self.gpus[rank][{"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}[buffer]]
        if span["index"] + span["size"] > size or span["index"] < 0:
            raise RunError("out of bounds")
        return [self.address(rank, buffer, span["index"] + k) for k in range(span["size"])]

    def load(self, rank, span):
        memory = self.memory[rank]
        if any(cell not in memory for cell in self.cells(rank, span, span["type"])):
            raise RunError("a read of memory that was never written")
        return [memory[cell] for cell in self.cells(rank, span, span["type"])]

    def store(self, rank, span, buffer, values):
        self.memory[rank].update(zip(self.cells(rank, span, buffer), values, strict=True))

    def begin(self, rank):
        """Check the output of a rank's last call and write the input of its next one."""
        if self.call[rank] >= 0:
            self.check(rank)
        self.call[rank] += 1
        if self.call[rank] == self.calls:
            return
        self.at[rank] = [0] * len(self.at[rank])
        for buffer, size in (("o", "output_chunks"), ("i", "input_chunks")):
            for k in range(self.gpus[rank][size]):
                given = buffer == "i" and (self.coll != "broadcast" or rank == self.root)
                self.memory[rank].pop(self.address(rank, buffer, k), None)
                if given:
                    self.memory[rank][self.address(rank, buffer, k)] = self.value(self.call[rank], rank, k)

    def check(self, rank):
        call = self.call[rank]
        for k in range(self.gpus[rank]["output_chunks"]):
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
        blocks = self.gpus[rank]["threadblocks"]
        if all(at == len(block["ops"]) for at, block in zip(self.at[rank], blocks, strict=True)):
            return [-1]
        found = []
        for t, block in enumerate(blocks):
            if self.at[rank][t] < len(block["ops"]):
                op = block["ops"][self.at[rank][t]]
                if op["name"] != "wait" or all(self.counts[rank, k] for k in self.channels(rank, t, op)):
                    found.append(t)
        return found

    def channels(self, rank, t, op):
        used = self.gpus[rank]["threadblocks"][t]["channels"][0]["channel_ids"]
        return [used[k] for k in op["channel_ids"]]

    def do(self, rank, t):
        if t < 0:
            self.begin(rank)
            return
        block = self.gpus[rank]["threadblocks"][t]
        op = block["ops"][self.at[rank][t]]
        name = op["name"]
        if name == "wait":
            for k in self.channels(rank, t, op):
                self.counts[rank, k] -= 1
        elif name == "signal":
            for k in self.channels(rank, t, op):
                peer, which = self.pairs[rank, k]
                self.counts[peer, self.ends[peer, rank, which]] += 1
        elif name == "copy":
            self.store(rank, op["dst_buff"][0], op["dst_buff"][0]["type"], self.load(rank, op["src_buff"][0]))
        elif name == "re":
            total = self.load(rank, op["src_buff"][0])
            for span in op["src_buff"][1:]:
                total = [self.combine(a, b) for a, b in zip(total, self.load(rank, span), strict=True)]
            self.store(rank, op["dst_buff"][0], op["dst_buff"][0]["type"], total)
        elif name == "put":  # one source per call, so that other operations may run in between
            k = self.part_of_op[rank][t]
            remote = block["remote_buffer_refs"][0]["remote_buffer_ids"][op["dst_buff"][k]["buffer_id"]]
            target = self.gpus[rank]["remote_buffers"][remote]
            self.store(target["rank"], op["dst_buff"][k], target["type"], self.load(rank, op["src_buff"][k]))
            self.part_of_op[rank][t] = (k + 1) % len(op["src_buff"])
            if self.part_of_op[rank][t]:
                return
        self.at[rank][t] += 1

    def run(self, rng):
        order = {(rank, t): rng.random() for rank in range(self.n) for t in range(-1, len(self.at[rank]))}
        fair = rng.random() < 0.5
        while True:
            able = [(rank, t) for rank in range(self.n) for t in self.able(rank)]
            if not able:
                break
            self.do(*(rng.choice(able) if fair else max(able, key=order.__getitem__)))
        if any(call < self.calls for call in self.call):
            raise RunError("stuck")
        if any(self.counts.values()):
            raise RunError("a signal without a wait")


def fault(text, seed, tries, root=0):
    """Return the fault of a plan in one of several random executions, or ``None``."""
    rng = random.Random(seed)
    try:
        check_form(json.loads(text))
        for _ in range(tries):
            Machine(text, root=root).run(rng)
    except RunError as error:
        return str(error)
    return None
