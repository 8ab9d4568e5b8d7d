"""The exchange between hosts, for verified schedules, any number of pieces and any delay of messages."""

import ctypes
import itertools
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import oracle
import pytest
from planned import planned

from crossreduce.lowering import lower
from crossreduce.ops import Numbers, ReduceOp
from crossreduce.planning import PLANNERS, one_shot, plan
from crossreduce.ranks.failures.peer_errors import PeerDisconnected, PeerTimeout
from crossreduce.ranks.inter_host.call_comparison import exchange_digests
from crossreduce.ranks.inter_host.compiled_calls import piece_stages
from crossreduce.ranks.inter_host.exchange import (
    Exchange,
    exchange_program,
    first_data,
    piece_sizes,
    run_stage,
    take_first,
)
from crossreduce.ranks.inter_host.two_level import can_use_arrays, host_parts
from crossreduce.ranks.intra_host.instructions import HostMessages, kernel
from crossreduce.schedule import Chunk, Schedule, Step
from crossreduce.topology import Topology

SUM = Numbers(ReduceOp.SUM, "float32", "float32", "float32", 1)


class ThreadTransport:
    """Transports between threads that stand for hosts. Each message is delayed for up to ``most_s`` seconds."""

    def __init__(self, seed=0, most_s=0.0):
        self.lock, self.draw, self.most_s = threading.Lock(), random.Random(seed), most_s
        self.waiting, self.dead, self.messages = defaultdict(lambda: ([], [])), set(), []

    def at(self, rank):
        return _Endpoint(self, rank)

    def post(self, key, kind, address, nbytes):
        """Add a send (``kind`` 0) or a receive (``kind`` 1), and copy the messages for which both are there."""
        event = threading.Event()
        with self.lock:
            sent, wanted = self.waiting[key]
            (sent, wanted)[kind].append((address, nbytes, event))
            while sent and wanted:
                (source, nbytes, done), (target, room, filled) = sent.pop(0), wanted.pop(0)
                assert nbytes <= room, f"{nbytes} bytes were sent from {key}, {room} expected"
                if self.most_s:
                    time.sleep(self.draw.random() * self.most_s)
                ctypes.memmove(target, source, nbytes)
                done.set()
                filled.set()
        return event


class _Endpoint:
    def __init__(self, shared, rank):
        self.shared, self.rank = shared, rank

    def send(self, address, nbytes, dst, tag):
        self.shared.messages.append((self.rank, dst, nbytes))
        return _Message(self.shared, dst, self.shared.post((self.rank, dst, tag), 0, address, nbytes))

    def receive(self, address, nbytes, src, tag):
        return _Message(self.shared, src, self.shared.post((src, self.rank, tag), 1, address, nbytes))

    def abort(self):
        self.shared.dead.add(self.rank)


class _Message:
    def __init__(self, shared, other, event):
        self.shared, self.other, self.event = shared, other, event

    def wait(self, timeout_s):
        until = time.monotonic() + timeout_s
        while not self.event.wait(0.01):
            if self.other in self.shared.dead:
                raise ConnectionError("connection closed")
            if time.monotonic() > until:
                raise TimeoutError("no message")


def together(count, function, timeout_s=100):
    """Call ``function(k)`` in ``count`` threads, and return the results or raise the first error."""
    pool = ThreadPoolExecutor(count)
    try:
        return list(pool.map(function, range(count), timeout=timeout_s))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_pieces(made, program, sizes, put, others, transport, dtype):
    """Run the exchange ``made`` on one host, close it, and return the result. ``put(stage)`` provides a piece."""
    starts, out = np.cumsum([0, *sizes]), np.zeros(sum(sizes), dtype)
    for stage in range(len(sizes) + program.delay):
        if stage < len(sizes):
            put(stage)
        if stage == 0:
            take_first([made], exchange_digests(b"call", first_data([made]), others, transport, tag=7, timeout_s=100))
        run_stage([made], stage)
        piece = stage - program.delay  # the piece whose result is complete
        if piece >= 0:
            to = out.ctypes.data + int(starts[piece]) * out.itemsize
            ctypes.memmove(to, made.base + program.results_at(piece), sizes[piece] * out.itemsize)
    made.close()
    return out


def exchange(schedule, inputs, numbers, sizes, shared=None):
    """Run an exchange with one thread per host. Return the result of each host, or ``None`` if it needs none."""
    shared = shared or ThreadTransport()
    peers = tuple(range(len(schedule.devices)))
    starts = np.cumsum([0, *sizes])

    def host(k):
        eager = len(sizes) == 1 and sizes[0] < 64  # the rounds of larger pieces have messages of their own
        program = exchange_program(lower(schedule), k, peers, sizes, numbers, eager)
        made = Exchange(program, shared.at(k), tag=7, timeout_s=100)

        def put(stage):
            if inputs[k] is not None:
                piece = np.ascontiguousarray(inputs[k][starts[stage] : starts[stage + 1]])
                ctypes.memmove(made.base + program.partial_at(stage), piece.ctypes.data, piece.nbytes)

        others, dtype = [peer for peer in peers if peer != k], oracle.dtype_of(numbers.result)
        out = run_pieces(made, program, sizes, put, others, shared.at(k), dtype)
        return out if k in schedule.chunks[0].destinations else None

    return together(len(peers), host)


def evaluated(schedule, inputs, numbers, size):
    """Return the right result of each host, or ``None``. NumPy executes the schedule on whole arrays."""
    accumulator, result = oracle.dtype_of(numbers.accumulator), oracle.dtype_of(numbers.result)
    step = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[numbers.op.value]
    spans = [slice(*span) for span in schedule.spans(size)]
    cells = {(c, s): inputs[s][spans[c]] for c, chunk in enumerate(schedule.chunks) for s in chunk.sources}
    contained = {cell: {cell[1]} for cell in cells}  # the hosts whose contributions a value contains
    for steps in schedule.rounds:
        before, contained_before = dict(cells), dict(contained)
        for c, dst, srcs in steps:
            value = before[c, srcs[0]]
            for src in srcs[1:]:
                value = step(value, before[c, src])
            contained[c, dst] = set().union(*(contained_before[c, src] for src in srcs))
            if len(srcs) > 1 and contained[c, dst] == set(schedule.chunks[c].sources):
                value = (value / accumulator.type(numbers.divisor) if numbers.divisor != 1 else value).astype(result)
            cells[c, dst] = value
    chunks = range(len(schedule.chunks))
    destinations = schedule.chunks[0].destinations
    return [
        np.concatenate([cells[c, host] for c in chunks]) if host in destinations else None
        for host in range(len(schedule.devices))
    ]


def evaluated_pieces(schedule, inputs, numbers, sizes):
    """Return the right results, as ``evaluated``, for arrays that are exchanged in pieces."""
    ends = np.cumsum(sizes)
    spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    pieces = [
        evaluated(schedule, [x if x is None else x[span] for x in inputs], numbers, span.stop - span.start)
        for span in spans
    ]
    return [None if each[0] is None else np.concatenate(each) for each in zip(*pieces, strict=True)]


def schedules():
    for count in (2, 3, 4, 5):
        names = tuple(f"cpu:{k}" for k in range(count))
        for name in (*PLANNERS, "forest"):
            yield pytest.param(planned(name, names, names), id=f"{name}-{count}")
    slow = Topology.from_matrix([[0, 5, 1], [5, 0, 5], [1, 5, 0]], latency_s=1e-4)
    yield pytest.param(plan(slow, nbytes=1 << 25).schedule, id="slow link")
    for collective in ("reduce", "broadcast"):
        for root, algorithm in (("cpu:0", "auto"), ("cpu:2", "ring"), ("cpu:2", "hierarchical_copy")):
            made = plan(slow, collective, 1 << 20, algorithm, root=root).schedule
            yield pytest.param(made, id=f"{collective} {root} {algorithm}")


ALL = list(schedules())


@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_gives_the_bits_of_its_steps(schedule):
    """For any number and size of pieces, with empty chunks, too, results equal NumPy's evaluation of the schedule."""
    draw = np.random.default_rng(5)
    count, sources = len(schedule.devices), schedule.chunks[0].sources
    for sizes in ((64,), (1,), (0,), (3, 4, 3, 4, 4, 4, 4), (101, 100), (2, 1, 0, 1, 2)):
        inputs = [draw.standard_normal(sum(sizes)).astype("float32") if k in sources else None for k in range(count)]
        got = exchange(schedule, inputs, SUM, sizes, ThreadTransport(count, 1e-4))
        for host, due in enumerate(evaluated_pieces(schedule, inputs, SUM, sizes)):
            assert (got[host] is None) == (due is None)
            assert due is None or got[host].tobytes() == due.tobytes(), (host, sizes)


@pytest.mark.parametrize("algorithm", ["direct", "ring", "one_device"])
def test_partial_results_keep_the_accumulator_and_are_rounded_once(algorithm):
    """Partial results have the accumulator's dtype. Only final values are divided and rounded."""
    names, draw = tuple(f"cpu:{k}" for k in range(3)), np.random.default_rng(9)
    schedule = planned(algorithm, names, names)
    for op, accumulator, result, divisor in (
        ("sum", "float32", "bfloat16", 1),
        ("sum", "float32", "float16", 6),
        ("sum", "float64", "float64", 5),
        ("product", "complex64", "complex64", 1),
        ("max", "bfloat16", "bfloat16", 1),
        ("min", "int8", "int8", 1),
        ("max", "bool", "bool", 1),
    ):
        inputs = [3 * draw.standard_normal(33) for _ in names]
        inputs = [(x > 0 if accumulator == "bool" else x).astype(oracle.dtype_of(accumulator)) for x in inputs]
        numbers = Numbers(ReduceOp(op), accumulator, accumulator, result, divisor)
        got = exchange(schedule, inputs, numbers, (20, 13))
        for found, due in zip(got, evaluated_pieces(schedule, inputs, numbers, (20, 13)), strict=True):
            if op == "product":  # NumPy may round complex products differently
                np.testing.assert_allclose(found, due, rtol=1e-6)
            else:
                assert found.tobytes() == due.tobytes()
            assert found.tobytes() == got[0].tobytes()


def test_hosts_send_only_the_bytes_of_the_schedule():
    """Each of two hosts sends the least possible number of bytes: half an array of partial results, and half an array
    of results, in the dtype of the results. The memory of the exchange does not depend on the number of pieces."""
    names = ("cpu:0", "cpu:1")
    schedule = planned("direct", names, names)
    for result, nbytes in (("float32", 4), ("bfloat16", 3)):  # bytes per element, the mean of both halves
        shared, numbers = ThreadTransport(), Numbers(ReduceOp.SUM, "float32", "float32", result, 1)
        exchange(schedule, [np.arange(1000, dtype="float32")] * 2, numbers, (250,) * 4, shared)
        for host in range(2):
            assert sum(size for src, _, size in shared.messages if src == host) == len(b"call") + 1000 * nbytes
    few, many = (exchange_program(lower(schedule), 0, (0, 1), (1000,) * count, SUM).nbytes for count in (10, 1000))
    assert few == many <= 5 * 2.6 * 4000  # a piece has 4000 bytes


def in_arrays(schedule, inputs, sizes, in_place, copies=False):
    """Execute the program of an exchange that uses the arrays of its callers, as compiled code does, but the messages
    of host 0 are read from memory some time after they were begun. Return the arrays, and the memory of each host.
    ``copies``: whether messages use copies of the arrays."""
    shared, peers = ThreadTransport(), tuple(range(len(schedule.devices)))

    def host(k):
        x = np.zeros(sum(sizes), "float32") if inputs[k] is None else inputs[k].copy()
        out = x if in_place else np.zeros_like(x)
        program = exchange_program(lower(schedule), k, peers, sizes, SUM, arrays=(0, 1), copies=copies)
        buffers = (x, out, np.zeros(program.nbytes, "uint8"))
        end, late, sends, receives = shared.at(k), ThreadPoolExecutor(1), [], []

        def address(place):
            return buffers[~place.region].ctypes.data + place.offset

        def send(each):
            time.sleep(0.005 * (k == 0))
            return end.send(address(each.at), each.nbytes, each.rank, 7)

        for each in itertools.chain(*piece_stages([program], 2, HostMessages((), (), (), b"", 0))):
            if isinstance(each, HostMessages):
                assert not copies or {~one.at.region for one in (*each.sends, *each.receives)} <= {2}
                receives += [end.receive(address(one.at), one.nbytes, one.rank, 7) for one in each.receives]
                sends += [late.submit(send, one) for one in each.sends]
                for message in receives[: each.received if each.received >= 0 else None]:
                    message.wait(20)
                for message in sends[: each.sent if each.sent >= 0 else None]:
                    message.result(20).wait(20)
            else:
                run = kernel(each.numbers, each.size, len(each.operands), 1).run
                run([[*map(address, each.operands)]], [[*map(address, each.results)]], 1, False, False)
        return out, program.nbytes

    return together(len(peers), host)


@pytest.mark.parametrize("count", [2, 3])
def test_an_exchange_may_use_the_arrays_of_the_caller(count):
    """An exchange sends from the caller's arrays and receives into them, and needs no memory for what it only moves.
    In a reduction in place, no part of an array is overwritten before it was sent."""
    names, sizes = tuple(f"cpu:{k}" for k in range(count)), (300, 1, 0, 500, 200)
    draw = np.random.default_rng(count)
    for algorithm in ("auto", "ring", "hierarchical_copy"):
        inputs = [draw.standard_normal(1001).astype("float32") if k == 0 else None for k in range(count)]
        mesh = Topology.full_mesh(names, gb_per_s=1, latency_s=1e-4)
        schedule = plan(mesh, "broadcast", 1 << 20, algorithm, root="cpu:0").schedule
        for copies in (False, True):
            for out, nbytes in in_arrays(schedule, inputs, sizes, True, copies):
                assert np.array_equal(out, inputs[0])
                assert copies or nbytes == 0 or count > 2  # the root may get back what it has sent
    inputs, parts = [draw.integers(0, 9, 1001).astype("float32") for _ in names], all_reduced(count)
    schedules = [one_shot(names, names, names), *(planned(name, names, names) for name in ("direct", "ring"))]
    for schedule, in_place, copies in itertools.product(schedules, (False, True), (False, True)):
        assert can_use_arrays(parts, lower(schedule), SUM)
        for out, _ in in_arrays(schedule, inputs, sizes, in_place, copies):
            assert np.array_equal(out, sum(inputs))


def all_reduced(count):
    """Return the parts of an all-reduce of hosts that have one rank each."""
    return host_parts(tuple((k,) for k in range(count)), "all_reduce", None)


def test_an_array_is_not_used_if_it_may_be_overwritten_before_it_was_sent():
    """A host whose contribution two others read must not receive the result into the same memory: one of these may
    send the result before the other one has the contribution."""
    names, everyone, all_three = ("cpu:0", "cpu:1", "cpu:2"), (Fraction(1), (0, 1, 2), (0, 1, 2)), (0, 1, 2)
    both = (Step(0, 1, all_three), Step(0, 2, all_three))
    twice, once = (
        Schedule("all_reduce", "own", names, (Chunk(*everyone),), rounds)
        for rounds in ((both, (Step(0, 0, (1,)),)), (both[:1], (Step(0, 0, (1,)), Step(0, 2, (1,)))))
    )
    assert not can_use_arrays(all_reduced(3), lower(twice), SUM)
    assert can_use_arrays(all_reduced(3), lower(once), SUM)
    assert not can_use_arrays(all_reduced(3), lower(once), SUM._replace(accumulator="float64"))


def test_a_host_that_is_gone_or_late_is_named():
    """The error names the rank of the host whose connection is closed, or whose message is late."""
    schedule = planned("direct", ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"))
    program, shared = exchange_program(lower(schedule), 0, (0, 5), (100,) * 9, SUM), ThreadTransport()
    shared.at(5).abort()
    for transport, timeout_s, kind, text in (
        (shared, 20, PeerDisconnected, "rank 5: connection closed"),
        (ThreadTransport(), 0.05, PeerTimeout, "rank 5"),
    ):
        made = Exchange(program, transport.at(0), tag=7, timeout_s=timeout_s)
        with pytest.raises(kind, match=text) as error:
            [run_stage([made], stage) for stage in range(9)]
        assert error.value.rank == 5


@pytest.mark.parametrize("is_line", [False, True])
@pytest.mark.parametrize("count", [3, 5])
def test_hosts_whose_digests_differ_detect_it(count, is_line):
    """If the digest of any host differs, every host detects it. Hosts in a line need as many rounds as the line has
    links. If all digests are equal, each host gets the data of the hosts to which it has a link."""
    different = [[b"b" if k == odd else b"a" for k in range(count)] for odd in range(count)]
    for digests in ([b"a"] * count, [bytes([k]) for k in range(count)], *different):
        shared = ThreadTransport()

        def host(k, digests=digests, shared=shared):  # its rank is 4 + k
            near = [4 + other for other in range(count) if other != k and (not is_line or abs(other - k) == 1)]
            data, diameter = {rank: bytes([k, rank]) * k for rank in near}, count - 1 if is_line else 1
            return exchange_digests(digests[k], data, near, shared.at(4 + k), 3, 10, diameter)

        for k, found in enumerate(together(count, host)):
            assert (found is not None) == (len(set(digests)) == 1), (digests, k)
            for rank, data in (found or {}).items():
                assert data[: 2 * (rank - 4)] == bytes([rank - 4, 4 + k]) * (rank - 4)


def test_pieces_cover_the_array_within_their_limits():
    """Pieces cover the array and keep to the size limit. If there are more than 3, the first and the last are small.
    Only an empty array has an empty piece."""
    draw = random.Random(3)
    for _ in range(300):
        size, nbytes, least = draw.randint(0, 50_000), draw.choice((1, 2, 4, 8, 16)), draw.randint(1, 3000)
        most = least * draw.randint(1, 20)
        sizes = piece_sizes(size, nbytes, least, most, draw.randint(1, 9))
        assert sum(sizes) == size
        assert min(sizes) > 0 or sizes == (0,)
        assert max(sizes) * nbytes <= max(most, nbytes)
        assert len(sizes) <= 3 or max(sizes[0], sizes[-1]) * nbytes <= max(least, nbytes)
