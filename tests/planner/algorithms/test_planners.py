"""Planners for lists of devices: every schedule verifies, with the rounds and bytes that the algorithm promises."""

import itertools
from collections import Counter
from fractions import Fraction

import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from planned import planned
from running import run_on
from strategies import ALGORITHMS, NAMED, names, plan, requests

from crossreduce import ArgumentError, PlanError, Step, options, verify
from crossreduce.frameworks.null import NullFramework
from crossreduce.lowering import lower
from crossreduce.planning import NAMES, PLANNERS, REGISTRY, Request, direct, hierarchical_copy, one_device, schedule_for
from crossreduce.schedule import live_rounds


def counts(schedule, size, dtype="float32"):
    """Return the counts of the null framework after a sum of ``size`` elements per device."""
    null = NullFramework()
    flats = [null.zeros((size,), dtype, schedule.devices[source]) for source in schedule.chunks[0].sources]
    run_on(null, schedule, "sum", flats, size, dtype)
    return null.counts


def test_every_planner_is_in_the_tables():
    """The tables of these tests, ``PLANNERS`` and ``NAMES`` have the names of the registry, in its order."""
    assert tuple(PLANNERS) == ALGORITHMS
    assert tuple(REGISTRY) == NAMED
    assert (*NAMED, "nccl", "auto") == NAMES == options.ALGORITHMS
    assert all(PLANNERS[name] is REGISTRY[name].planner for name in PLANNERS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(ask=requests(most_packs=5))
def test_every_request_gives_a_right_schedule(algorithm, ask):
    """For any request the schedule is correct and cached, and all destinations receive the same bits."""
    schedule = plan(algorithm, ask)
    assert schedule == plan(algorithm, ask)
    request = (algorithm, ask.sources, ask.destinations, ask.packs, ask.first)
    assert planned(*request) is planned(*request)
    verify(schedule)
    assert oracle.right(schedule)
    assert schedule.devices == ask.devices
    assert schedule.algorithm == algorithm
    assert len(schedule.chunks) % ask.packs == 0
    for chunk in schedule.chunks:
        assert tuple(schedule.devices[source] for source in chunk.sources) == ask.sources
        assert tuple(schedule.devices[dst] for dst in chunk.destinations) == ask.destinations
        assert chunk.share == Fraction(1, len(schedule.chunks))
    assert all(schedule.rounds)  # no empty round
    assert live_rounds(schedule) == [list(steps) for steps in schedule.rounds]  # each step has an effect
    if (ask.sources, ask.destinations) == (ask.devices, ask.devices):
        assert schedule.collective == "all_reduce"
    cells = expressions(schedule)
    for c, chunk in enumerate(schedule.chunks):  # all destinations receive the same bits
        assert len({cells[c, dst] for dst in chunk.destinations}) == 1


@pytest.mark.parametrize("algorithm", ["one_device", "hierarchical_copy"])
@pytest.mark.parametrize("n", range(2, 10))
def test_roots_rotate(algorithm, n):
    """The root of pack p is device first + p (mod n), so over n packs each device is the root once."""
    for first in (0, 1, n + 2):
        schedule = PLANNERS[algorithm](names(n), packs=n, first=first)
        roots = []
        for chunk in range(n):
            of_chunk = [step for steps in schedule.rounds for step in steps if step.chunk == chunk]
            roots += set(range(n)) - {step.dst for step in of_chunk if len(step.srcs) == 1}  # only the root gets none
        assert roots == [(first + pack) % n for pack in range(n)]


def power(n):
    """Return the greatest power of two that is at most n, and its logarithm to base 2."""
    return 1 << (n.bit_length() - 1), n.bit_length() - 1


def doubling_bytes(n, nbytes, halving):
    """Return the bytes by (src, dst) in halving_doubling, or recursive_doubling if not ``halving``.

    Devices at the distances 1, 2, 4, ... exchange parts that halve each time, or the complete buffer. Devices beyond a
    power of two exchange their buffers with a partner.
    """
    width, log = power(n)
    sent = {(i, i ^ 1 << level): nbytes * (1 << level) * 2 // width if halving else nbytes
            for i in range(width) for level in range(log)}  # fmt: skip
    sent |= {(k, width + k)[::way]: nbytes for k in range(n - width) for way in (1, -1)}
    return Counter(sent)


def star_bytes(n, nbytes):
    """Return the bytes by (src, dst) if all devices exchange their buffers with device 0."""
    return {pair[::way]: nbytes for k in range(1, n) for pair in [(0, k)] for way in (1, -1)}


# By algorithm, functions of the number of devices: rounds, bytes by (src, dst), and additions per element. Sizes are
# multiples of 12 n and of powers of two up to n.
COSTS = {
    "ring": (
        lambda n: 2 * (n - 1),
        lambda n, nbytes: {(k, (k + 1) % n): 2 * (n - 1) * nbytes // n for k in range(n)},
        lambda n: n - 1,
    ),
    "direct": (
        lambda n: 2,
        lambda n, nbytes: dict.fromkeys(itertools.permutations(range(n), 2), 2 * nbytes // n),
        lambda n: n - 1,
    ),
    "one_device": (lambda n: 2, star_bytes, lambda n: n - 1),
    "halving_doubling": (
        lambda n: 2 * power(n)[1] + 2 * (n > power(n)[0]),
        lambda n, nbytes: doubling_bytes(n, nbytes, halving=True),
        lambda n: n - 1,
    ),
    "recursive_doubling": (
        lambda n: power(n)[1] + 2 * (n > power(n)[0]),
        lambda n, nbytes: doubling_bytes(n, nbytes, halving=False),
        lambda n: power(n)[0] * power(n)[1] + n - power(n)[0],
    ),
    "one_shot": (
        lambda n: 1,
        lambda n, nbytes: dict.fromkeys(itertools.permutations(range(n), 2), nbytes),
        lambda n: n * (n - 1),
    ),
}


@pytest.mark.parametrize("algorithm", COSTS)
def test_costs(algorithm):
    """On 2 to 17 devices an algorithm has the published numbers of rounds, bytes per pair of devices and additions."""
    rounds_of, bytes_of, additions_of = COSTS[algorithm]
    for n in range(2, 18):
        schedule = PLANNERS[algorithm](names(n))
        assert len(schedule.rounds) == rounds_of(n)
        size = 3 * n << n.bit_length()
        done = counts(schedule, size)
        assert done.bytes == {(f"cpu:{a}", f"cpu:{b}"): sent for (a, b), sent in bytes_of(n, 4 * size).items()}
        assert done.additions == additions_of(n) * size


def expressions(schedule):
    """Return, by chunk and device, a number for the value. Sums of the same operands in the same order are equal."""
    numbers = {}
    inputs = [(c, source) for c, chunk in enumerate(schedule.chunks) for source in chunk.sources]
    cells = {key: numbers.setdefault(key, len(numbers)) for key in inputs}
    for steps in schedule.rounds:
        made = {}
        for chunk, dst, srcs in steps:
            read = tuple(cells[chunk, src] for src in srcs)
            made[chunk, dst] = read[0] if len(read) == 1 else numbers.setdefault((chunk, *read, "+"), len(numbers))
        cells |= made
    return cells


@given(requests(most_packs=3), st.data())
def test_direct_with_owners(ask, data):
    """With n owners, owner (first + p + s) mod n reduces share s of pack p and sends it to the destinations."""
    owners = data.draw(st.lists(st.sampled_from(ask.devices), min_size=1, unique=True))
    schedule = direct(
        ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first, owners=[d.upper() for d in owners]
    )
    verify(schedule)
    assert oracle.right(schedule)
    assert len(schedule.chunks) == ask.packs * len(owners)
    assert len(schedule.rounds) <= 2
    for number in range(len(schedule.chunks)) if len(ask.sources) > 1 else ():
        pack, share = divmod(number, len(owners))
        owner = owners[(ask.first + pack + share) % len(owners)]
        assert [schedule.devices[step.dst] for step in schedule.rounds[0] if step.chunk == number] == [owner]
    assert live_rounds(schedule) == [list(steps) for steps in schedule.rounds]


def test_one_device_with_a_root():
    """The root of one_device may be neither a source nor a destination."""
    schedule = one_device(names(4), names(4)[:2], names(4)[2:3], root="cpu:3", packs=2)
    assert schedule.rounds == ((Step(0, 3, (0, 1)), Step(1, 3, (0, 1))), (Step(0, 2, (3,)), Step(1, 2, (3,))))
    assert planned("one_device", names(2), names(2), root="cuda:1").devices == ("cpu:0", "cpu:1", "cuda:1")


BAD = [
    ({"devices": []}, PlanError, "at least one device"),
    ({"sources": ["cpu:7"]}, PlanError, r"the sources must be among the devices[\s\S]*cpu:7[\s\S]*one of cpu:0, cpu:1"),
    ({"destinations": ["cpu:0", "cuda:0"]}, PlanError, r"the destinations must be among the devices[\s\S]*cuda:0"),
    ({"sources": []}, PlanError, "the sources must be at least one device"),
    ({"destinations": []}, PlanError, "the destinations must be at least one device"),
    ({"packs": -2}, PlanError, r"packs must be an int > 0[\s\S]*packs=-2\n"),
    ({"packs": 1.5}, PlanError, r"packs must be an int > 0[\s\S]*packs=1.5\n"),
    ({"first": 1.5}, PlanError, r"first must be an int[\s\S]*first=1.5\n"),
    ({"devices": ["cpu:0", "CPU:0"]}, ArgumentError, "cpu:0 is listed more than once"),
    ({"devices": "cpu:0"}, ArgumentError, "devices must be a list of names"),
    ({"devices": ["foo"]}, ArgumentError, "this device name cannot be parsed"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_requests_are_refused(changes, error, text):
    """An invalid request raises an error that states the problem."""
    for planner in PLANNERS.values():
        with pytest.raises(error, match=text):
            planner(**({"devices": names(3)} | changes))


def test_bad_roots_and_groups_are_refused():
    """A root or owner that is not a device, and groups that lack a device or list one twice, raise a PlanError."""
    with pytest.raises(PlanError, match=r"the root must be among the devices[\s\S]*cpu:9"):
        one_device(names(3), root="cpu:9")
    with pytest.raises(PlanError, match=r"the owners must be among the devices[\s\S]*cpu:7"):
        direct(names(3), owners=["cpu:7"])
    with pytest.raises(PlanError, match="the owners must be at least one device"):
        direct(names(3), owners=[])
    for groups in ([names(2)], [names(3), names(1)], [["cpu:0", "cpu:0"], ["cpu:1", "cpu:2"]], []):
        with pytest.raises(PlanError, match="each device must be in exactly one group"):
            hierarchical_copy(names(3), groups=groups)
    with pytest.raises(PlanError, match="a group's member must be among the devices"):
        hierarchical_copy(names(3), groups=[names(3), ["cpu:5"]])


def test_a_given_root_reduces():
    """An algorithm that needs a root uses the requested one. Without a topology, this root must be a participant."""
    members = names(4)
    for name in ("one_device", "hierarchical_copy"):
        schedule = schedule_for(Request("all_reduce", members, members, name, root=members[3], packs=2))
        lowered = lower(schedule)
        for chunk in lowered.chunks:
            assert [lowered.devices[one.device] for one in chunk.instructions if one.final] == [members[3]]
    request = Request("all_reduce", members[:2], members[:2], "hierarchical_copy", root="cpu:3")
    with pytest.raises(PlanError, match="the root must be a source or a destination"):
        schedule_for(request)
