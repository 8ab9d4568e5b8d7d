"""The exchange between hosts: any verified schedule, any number of pieces, whatever arrives when."""

import ctypes
import random
import threading
import time
from fractions import Fraction

import numpy as np
import oracle
import pytest

from crossreduce.errors import PlanError, ScheduleError
from crossreduce.planning import PLANNERS, plan, planned
from crossreduce.ranks.exchange import Exchange, Late, Lost, alike, cut, part, work
from crossreduce.ranks.programs import Numbers
from crossreduce.schedule import Chunk, Schedule, Step, completing
from crossreduce.topology import Topology


class Post:
    """Messages between threads that stand for hosts, each held up for a random while; ``Wire``'s contract, no more."""

    def __init__(self, seed=0, most_s=0.0):
        self.lock, self.draw, self.most_s = threading.Lock(), random.Random(seed), most_s
        self.sent, self.wanted, self.dead = {}, {}, set()
        self.messages = []

    def at(self, rank):
        return _End(self, rank)

    def match(self, key):
        sent, wanted = self.sent.setdefault(key, []), self.wanted.setdefault(key, [])
        while sent and wanted:
            (source, nbytes, done), (target, room, filled) = sent.pop(0), wanted.pop(0)
            assert nbytes == room, f"{nbytes} bytes were sent from {key}, {room} expected"
            if self.most_s:
                time.sleep(self.draw.random() * self.most_s)
            ctypes.memmove(target, source, nbytes)
            done.set()
            filled.set()


class _End:
    def __init__(self, post, rank):
        self.post, self.rank = post, rank

    def send(self, address, nbytes, dst, tag):
        event = threading.Event()
        with self.post.lock:
            self.post.messages.append((self.rank, dst, nbytes))
            self.post.sent.setdefault((self.rank, dst, tag), []).append((address, nbytes, event))
            self.post.match((self.rank, dst, tag))
        return _Mail(self.post, dst, event)

    def receive(self, address, nbytes, src, tag):
        event = threading.Event()
        with self.post.lock:
            self.post.wanted.setdefault((src, self.rank, tag), []).append((address, nbytes, event))
            self.post.match((src, self.rank, tag))
        return _Mail(self.post, src, event)

    def abort(self):
        self.post.dead.add(self.rank)


class _Mail:
    def __init__(self, post, other, event):
        self.post, self.other, self.event = post, other, event

    def wait(self, timeout_s):
        until = time.monotonic() + timeout_s
        while not self.event.wait(0.01):
            if self.other in self.post.dead:
                raise ConnectionError("hung up")
            if time.monotonic() > until:
                raise TimeoutError("nothing came")


def together(count, function, timeout_s=30):
    """Run ``function(k)`` in threads and return what each returned; raise what one raised."""
    results = [None] * count

    def run(k):
        try:
            results[k] = function(k)
        except BaseException as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
        assert not thread.is_alive(), "a host hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def exchange(schedule, inputs, numbers, sizes, post=None, peers=None, timeout_s=20):
    """Run an exchange, a host a thread, and return what each host took, or ``None`` for hosts that want nothing."""
    post = post or Post()
    count = len(schedule.devices)
    peers = peers or tuple(range(count))
    starts = np.cumsum([0, *sizes])

    def host(k):
        due = work(schedule, k, peers, sizes, numbers)
        made = Exchange(due, post.at(peers[k]), 7, timeout_s)
        out = np.zeros(sum(sizes), oracle.dtype_of(numbers.result))
        for tick in range(len(sizes) + due.delay):
            if tick < len(sizes) and inputs[k] is not None:
                piece = np.ascontiguousarray(inputs[k][starts[tick] : starts[tick + 1]])
                ctypes.memmove(made.partial(tick), piece.ctypes.data, piece.nbytes)
            made.tick(tick)
            whole = tick - due.delay
            if whole >= 0:
                made.take(whole, out.ctypes.data + int(starts[whole]) * out.itemsize)
        made.close()
        return out if part(schedule, k).wanted else None

    return together(count, host)


def walked(schedule, inputs, numbers, size):
    """What each host should hold: round by round, operand by operand, with NumPy on whole arrays."""
    flags = completing(schedule)
    accumulator, result = oracle.dtype_of(numbers.accumulator), oracle.dtype_of(numbers.result)
    step = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[numbers.op]
    cells = {
        (c, s): inputs[s][slice(*schedule.spans(size)[c])]
        for c, chunk in enumerate(schedule.chunks)
        for s in chunk.sources
    }
    for steps, wholes in zip(schedule.rounds, flags, strict=True):
        before = dict(cells)
        for (c, dst, srcs), whole in zip(steps, wholes, strict=True):
            value = before[c, srcs[0]]
            for src in srcs[1:]:
                value = step(value, before[c, src])
            if whole:
                value = (value / accumulator.type(numbers.divisor) if numbers.divisor != 1 else value).astype(result)
            cells[c, dst] = value
    chunks = range(len(schedule.chunks))
    destinations = schedule.chunks[0].destinations
    return [
        np.concatenate([cells[c, host] for c in chunks]) if host in destinations else None
        for host in range(len(schedule.devices))
    ]


def schedules():
    for count in (2, 3, 4, 5):
        names = tuple(f"cpu:{k}" for k in range(count))
        for name in PLANNERS:
            yield pytest.param(planned(name, names, names), id=f"{name}-{count}")
        yield pytest.param(planned("forest", names, names), id=f"forest-{count}")
    slow = Topology.from_matrix([[0, 5, 1], [5, 0, 5], [1, 5, 0]], latency_s=1e-4)
    yield pytest.param(plan(slow, nbytes=1 << 25).schedule, id="slow link")
    for root in ("cpu:0", "cpu:2"):
        for collective in ("reduce", "broadcast"):
            for algorithm in ("auto", "one_device", "ring", "hierarchical_copy"):
                try:
                    made = plan(slow, collective, 1 << 20, algorithm, root=root).schedule
                except PlanError:
                    continue
                yield pytest.param(made, id=f"{collective} {root} {algorithm}")


ALL = list(schedules())


@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_gives_what_its_steps_say(schedule):
    """Pieces of any number and size, empty chunks included, come out as the schedule walked by NumPy, to the bit."""
    draw = np.random.default_rng(5)
    count, sources = len(schedule.devices), schedule.chunks[0].sources
    numbers = Numbers("sum", "float32", "float32", "float32", 1)
    for sizes in ((64,), (1,), (0,), (3, 4, 3, 4, 4, 4, 4), (101, 100), (2, 1, 0, 1, 2)):
        inputs = [draw.standard_normal(sum(sizes)).astype("float32") if k in sources else None for k in range(count)]
        got = exchange(schedule, inputs, numbers, sizes, Post(count, 1e-4))
        starts = np.cumsum([0, *sizes])
        for k, (a, size) in enumerate(zip(starts, sizes, strict=False)):
            cutout = [x if x is None else x[a : a + size] for x in inputs]
            for host, due in enumerate(walked(schedule, cutout, numbers, size)):
                if due is None:
                    assert got[host] is None
                else:
                    assert got[host][a : a + size].tobytes() == due.tobytes(), (host, k)


@pytest.mark.parametrize("schedule", [p for p in ALL if "3" in p.id or "slow" in p.id])
def test_no_contribution_is_lost_doubled_or_misplaced(schedule):
    """Digits of base n + 1 and places that tell where they were: each host's result is the exact sum."""
    count, sources = len(schedule.devices), schedule.chunks[0].sources
    sizes = (7, 7, 6)
    inputs = [
        np.array([(count + 1) ** k * 1000 + p for p in range(20)], "int64") if k in sources else None
        for k in range(count)
    ]
    due = sum(x for x in inputs if x is not None)
    for got in exchange(schedule, inputs, Numbers("sum", "int64", "int64", "int64", 1), sizes):
        if got is not None:
            assert got.tolist() == due.tolist()


@pytest.mark.parametrize(
    ("op", "accumulator", "result", "divisor"),
    [
        ("sum", "float32", "bfloat16", 1),
        ("sum", "float32", "float16", 6),
        ("sum", "float64", "float64", 5),
        ("product", "complex64", "complex64", 1),
        ("max", "bfloat16", "bfloat16", 1),
        ("min", "int8", "int8", 1),
        ("max", "bool", "bool", 1),
    ],
)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "one_device"])
def test_half_types_travel_as_they_are_accumulated_and_are_rounded_once(op, accumulator, result, divisor, algorithm):
    """Partial results keep the accumulator's dtype; where they become whole a mean is divided, and a half rounded."""
    names = tuple(f"cpu:{k}" for k in range(3))
    schedule = planned(algorithm, names, names)
    draw = np.random.default_rng(9)
    inputs = [oracle.dtype_of(accumulator).type(3) * draw.standard_normal(33) for _ in names]
    inputs = [(x > 0 if accumulator == "bool" else x).astype(oracle.dtype_of(accumulator)) for x in inputs]
    numbers = Numbers(op, accumulator, accumulator, result, divisor)
    got = exchange(schedule, inputs, numbers, (20, 13))
    first, second = (
        walked(schedule, [x[s] for x in inputs], numbers, n) for s, n in ((slice(20), 20), (slice(20, 33), 13))
    )
    for host in range(3):
        if op == "product":  # NumPy's complex product may round in another way
            np.testing.assert_allclose(got[host], np.concatenate([first[host], second[host]]), rtol=1e-6)
        else:
            assert got[host].tobytes() == first[host].tobytes() + second[host].tobytes()
        assert got[host].tobytes() == got[0].tobytes()


def test_the_same_bits_whatever_arrives_first():
    """Delays of messages do not change a bit, and all hosts have the same."""
    names = tuple(f"cpu:{k}" for k in range(4))
    draw = np.random.default_rng(2)
    inputs = [draw.standard_normal(999).astype("float32") for _ in names]
    seen = set()
    for seed in range(5):
        got = exchange(
            planned("direct", names, names),
            inputs,
            Numbers("sum", "float32", "float32", "float32", 1),
            cut(999, 4, 400, 400, 3),
            Post(seed, 2e-4),
        )
        seen |= {one.tobytes() for one in got}
    assert len(seen) == 1


def test_no_byte_more_than_the_schedule_says_goes_over_the_wire():
    """Of two hosts each sends as many bytes as the array has, which is the least; whole halves travel as such."""
    names = ("cpu:0", "cpu:1")
    for accumulator, result, nbytes in (("float32", "float32", 4), ("float32", "bfloat16", 3)):
        post = Post()
        inputs = [np.arange(1000, dtype=accumulator)] * 2
        exchange(
            planned("direct", names, names),
            inputs,
            Numbers("sum", accumulator, accumulator, result, 1),
            (250,) * 4,
            post,
        )
        for host in range(2):
            assert sum(size for src, _, size in post.messages if src == host) == 1000 * nbytes


def test_memory_does_not_grow_with_the_number_of_pieces():
    """However many pieces an array has, the exchange works in the memory of a few of them."""
    schedule = planned("direct", ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"))
    few, many = (
        work(schedule, 0, (0, 1), (1000,) * count, Numbers("sum", "float32", "float32", "float32", 1))
        for count in (10, 1000)
    )
    assert few.window * few.room == many.window * many.room <= 5 * 2.6 * 4000


def test_needless_steps_are_left_out():
    """A step that no destination's result depends on costs no message, on either side."""
    whole = Chunk(Fraction(1), (0, 1, 2), (0,))
    rounds = ((Step(0, 2, (2, 1)), Step(0, 0, (0, 1, 2))), (Step(0, 1, (0,)),))
    with pytest.raises(ScheduleError):
        part(Schedule("reduce", "racing", ("cpu:0", "cpu:1", "cpu:2"), (whole,), rounds), 0)
    rounds = ((Step(0, 0, (0, 1, 2)),), (Step(0, 1, (0,)), Step(0, 2, (1,))))
    schedule = Schedule("reduce", "by hand", ("cpu:0", "cpu:1", "cpu:2"), (whole,), rounds)
    post = Post()
    inputs = [np.array([4.0**k], "float32") for k in range(3)]
    got = exchange(schedule, inputs, Numbers("sum", "float32", "float32", "float32", 1), (1,), post)
    assert got[0] == [21]
    assert got[1:] == [None, None]
    assert sorted(post.messages) == [(1, 0, 4), (2, 0, 4)]


def all_ticks(made):
    for tick in range(9):
        made.tick(tick)


def test_a_host_that_hangs_up_is_named():
    """When a host is gone the others say which rank it was; when it is only late, likewise."""
    schedule = planned("direct", ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"))
    due, post = work(schedule, 0, (0, 5), (100,) * 9, Numbers("sum", "float32", "float32", "float32", 1)), Post()

    def host(k):
        if k == 1:
            post.at(5).abort()
            return None
        made = Exchange(due, post.at(0), 7, 20)
        with pytest.raises(Lost, match="rank 5: hung up") as error:
            all_ticks(made)
        return error.value.rank

    assert together(2, host)[0] == 5
    late = Exchange(due, Post().at(0), 7, 0.05)
    with pytest.raises(Late, match="rank 5") as error:
        all_ticks(late)
    assert error.value.rank == 5


def test_hosts_that_are_about_to_do_different_things_find_out():
    """Only if all hosts say the same are they alike; and all find out, which could be told from any of them."""
    for said in ((b"aaaa",) * 3, (b"aaaa", b"aaaa", b"aaab"), (b"baaa", b"aaaa", b"aaaa"), (b"1111", b"2222", b"3333")):
        post = Post()
        found = together(3, lambda k: alike(said[k], (4, 9, 6), k, post.at((4, 9, 6)[k]), 3, 10))  # noqa: B023
        assert found == [len(set(said)) == 1] * 3


def test_pieces_cover_the_array_and_are_no_larger_than_allowed():
    """Pieces cover the array and fit, first and last ones are small where there are many; there is one of nothing."""
    draw = random.Random(3)
    for _ in range(300):
        size, nbytes = draw.randint(0, 50_000), draw.choice((1, 2, 4, 8, 16))
        least = draw.randint(1, 3000)
        most, deep = least * draw.randint(1, 20), draw.randint(1, 9)
        sizes = cut(size, nbytes, least, most, deep)
        assert sum(sizes) == size
        assert min(sizes) > 0 or sizes == (0,)
        assert max(sizes) * nbytes <= max(most, nbytes)
        if len(sizes) > 3:
            assert max(sizes[0], sizes[-1]) * nbytes <= max(least, nbytes)
