"""Planners for lists of devices: every schedule verifies, with the rounds and bytes that the algorithm promises."""

import itertools
from collections import Counter
from fractions import Fraction

import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairs
from planned import planned
from running import run_on
from strategies import ALGORITHMS, NAMED, algorithms, names, requests

from crossreduce import (
    ArgumentError,
    PlanError,
    Step,
    options,
    verify,
)
from crossreduce.frameworks.null import NullFramework
from crossreduce.lowering import lower
from crossreduce.planning import (
    NAMES,
    PLANNERS,
    REGISTRY,
    Request,
    direct,
    halving_doubling,
    hierarchical_copy,
    one_device,
    one_shot,
    recursive_doubling,
    ring,
    schedule_for,
)
from crossreduce.schedule import live_rounds


def counts(schedule, size, dtype="float32"):
    """Run a sum of ``size`` elements per device on the null framework, and return its counts."""
    null = NullFramework()
    flats = [null.zeros((size,), dtype, schedule.devices[source]) for source in schedule.chunks[0].sources]
    run_on(null, schedule, "sum", flats, size, dtype)
    return null.counts


def plan(algorithm, ask):
    return PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)


def test_every_planner_is_in_the_tables():
    """The tables of these tests have the registry's names, in its order; ``NAMES`` and ``options.ALGORITHMS`` have
    these names, "nccl" and "auto"."""
    assert tuple(PLANNERS) == ALGORITHMS
    assert tuple(REGISTRY) == NAMED
    assert (*NAMED, "nccl", "auto") == NAMES == options.ALGORITHMS
    assert all(PLANNERS[name] is REGISTRY[name].planner for name in PLANNERS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(ask=requests(most_packs=5))
def test_every_request_gives_a_right_schedule(algorithm, ask):
    """For any devices, sources and destinations (some, one, disjoint, permuted), packs and first root, the schedule
    verifies, its sums are right, and it has the requested sources and destinations."""
    schedule = plan(algorithm, ask)
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", range(1, 18))
def test_all_reduce_of_any_count(algorithm, n):
    """With 1 to 17 devices and 1 to 3 packs the contribution of every device arrives everywhere, odd numbers
    included."""
    for packs, first in ((1, 0), (2, 1), (3, 16)):
        schedule = PLANNERS[algorithm](names(n), packs=packs, first=first)
        verify(schedule)
        assert oracle.right(schedule)
        assert schedule.collective == "all_reduce"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_number_of_packs(algorithm):
    """A schedule of p packs has the rounds of one pack, and p times as many chunks and steps."""
    one = PLANNERS[algorithm](names(6))
    for packs in (1, 2, 3, 5, 8, 13, 20):
        schedule = PLANNERS[algorithm](names(6), packs=packs)
        verify(schedule)
        assert len(schedule.chunks) == packs * len(one.chunks)
        assert len(schedule.rounds) == len(one.rounds)
        assert schedule.steps == packs * one.steps


def test_unknown_planners_are_refused():
    """An unknown name raises a PlanError that lists the algorithms."""
    with pytest.raises(
        PlanError, match=r"no such algorithm[\s\S]*'best'[\s\S]*one of one_device, hierarchical_copy, ring"
    ):
        planned("best", names(2), names(2))


@given(algorithms, requests(most_packs=3))
def test_the_same_request_gives_the_same_schedule(algorithm, ask):
    """Equal requests give equal schedules, and ``schedule_for`` returns the identical object."""
    assert plan(algorithm, ask) == plan(algorithm, ask)
    request = (algorithm, ask.sources, ask.destinations, ask.packs, ask.first)
    assert planned(*request) is planned(*request)


@pytest.mark.parametrize("algorithm", ["one_device", "hierarchical_copy"])
@pytest.mark.parametrize("n", range(2, 10))
def test_roots_rotate(algorithm, n):
    """Over n packs each device is the root once; ``first`` is the first root."""
    for first in (0, 1, n + 2):
        schedule = PLANNERS[algorithm](names(n), packs=n, first=first)
        roots = []
        for chunk in range(n):
            copied = {
                step.dst for steps in schedule.rounds for step in steps if step.chunk == chunk and len(step.srcs) == 1
            }
            roots += set(range(n)) - copied
        assert roots == [(first + pack) % n for pack in range(n)]


@pytest.mark.parametrize("n", range(2, 10))
def test_shares_rotate(n):
    """The ring of chunk c of pack p starts at device (first + p + c) mod n, which owns the chunk in "direct"; so the
    first chunks of the packs are on different devices."""
    for first in (0, 3):
        way = ring(names(n), packs=n, first=first).rounds[0]
        assert [step.srcs[0] for step in way] == [(first + p + c) % n for p in range(n) for c in range(n)]
        assert [step.dst for step in way] == [(first + p + c + 1) % n for p in range(n) for c in range(n)]
        owners = direct(names(n), packs=n, first=first).rounds[0]
        assert [step.dst for step in owners] == [(first + p + c) % n for p in range(n) for c in range(n)]


@pytest.mark.parametrize("n", range(2, 10))
def test_packs_spread_the_load(n):
    """With one pack per device, each device receives and sends the same number of bytes, for every planner whose
    algorithm treats all n devices alike."""
    for algorithm in ALGORITHMS:
        if algorithm in ("halving_doubling", "recursive_doubling") and n & (n - 1):
            continue  # partners of devices beyond the power of two send and receive more
        if algorithm == "hierarchical_copy" and n % 2:
            continue  # its two groups of devices differ in size
        moved = counts(PLANNERS[algorithm](names(n), packs=n), n * n * 4).bytes
        for end in (0, 1):
            sums = Counter()
            for pair, nbytes in moved.items():
                sums[pair[end]] += nbytes
            assert len(set(sums.values())) == 1, algorithm


@pytest.mark.parametrize("n", range(2, 18))
def test_ring_costs(n):
    """A ring has 2(n-1) rounds; each device sends 2(n-1)/n of the buffer, and only to the next device."""
    schedule = ring(names(n))
    assert len(schedule.rounds) == 2 * (n - 1)
    assert all(len(steps) == n for steps in schedule.rounds)
    nbytes = 12 * n
    done = counts(schedule, nbytes // 4)
    assert done.bytes == {(f"cpu:{k}", f"cpu:{(k + 1) % n}"): 2 * (n - 1) * nbytes // n for k in range(n)}
    assert done.copies == 2 * n * (n - 1)
    assert done.additions == (n - 1) * nbytes // 4


@pytest.mark.parametrize("n", range(2, 18))
def test_direct_costs(n):
    """direct has 2 rounds; each device sends 2/n of the buffer to each other device, 2(n-1)/n in total."""
    schedule = direct(names(n))
    assert len(schedule.rounds) == 2
    nbytes = 12 * n
    done = counts(schedule, nbytes // 4)
    assert done.bytes == dict.fromkeys(itertools.permutations(names(n), 2), 2 * nbytes // n)
    assert done.copies == 2 * n * (n - 1)
    assert done.additions == (n - 1) * nbytes // 4


@pytest.mark.parametrize("n", range(2, 18))
def test_one_device_costs(n):
    """The algorithm one_device has 2 rounds; the root receives n-1 buffers and sends n-1."""
    for root in (0, n - 1):
        schedule = one_device(names(n), first=root)
        assert len(schedule.rounds) == 2
        assert schedule.steps == n
        done = counts(schedule, 12)
        others = [f"cpu:{k}" for k in range(n) if k != root]
        assert done.bytes == {(k, f"cpu:{root}"): 48 for k in others} | {(f"cpu:{root}", k): 48 for k in others}
        assert done.copies == 2 * (n - 1)
        assert done.additions == (n - 1) * 12


@pytest.mark.parametrize("n", range(2, 18))
def test_halving_doubling_costs(n):
    """halving_doubling takes 2 log2 n rounds if n is a power of two, and each device sends 2(n-1)/n of the buffer; for
    other n it takes 2 rounds more than for the next lower power."""
    schedule = halving_doubling(names(n))
    width = 1 << (n.bit_length() - 1)
    log = width.bit_length() - 1
    assert len(schedule.rounds) == 2 * log + (2 if n > width else 0)
    size = 12 * width
    done = counts(schedule, size)
    sent = Counter()
    for (src, _), nbytes in done.bytes.items():
        sent[src] += nbytes
    core = 2 * (width - 1) * size * 4 // width
    partners = n - width
    wanted = {f"cpu:{k}": core + (size * 4 if k < partners else 0) for k in range(width)}
    wanted |= {f"cpu:{k}": size * 4 for k in range(width, n)}
    assert sent == wanted
    assert done.additions == (n - 1) * size


@pytest.mark.parametrize("n", range(2, 18))
def test_recursive_doubling_costs(n):
    """recursive_doubling takes log2 n rounds if n is a power of two; every device sends its whole buffer in each;
    for other n it takes 2 rounds more than for the next lower power."""
    schedule = recursive_doubling(names(n))
    width = 1 << (n.bit_length() - 1)
    log = width.bit_length() - 1
    assert len(schedule.rounds) == log + (2 if n > width else 0)
    done = counts(schedule, 12)
    pairs = {(i, i ^ 1 << level) for i in range(width) for level in range(log)}
    extras = [(k, width + k)[::way] for k in range(n - width) for way in (1, -1)]
    assert done.bytes == {(f"cpu:{a}", f"cpu:{b}"): 48 for a, b in [*pairs, *extras]}


@pytest.mark.parametrize("n", range(2, 18))
def test_recursive_doubling_to_or_from_one_device_is_a_binomial_tree(n):
    """A reduce and a broadcast of 2**k devices take k rounds, in which a device sends and receives at most once, and
    n - 1 transfers; a reduce of other n folds its extra sources into their partners first."""
    rounds = (n - 1).bit_length()
    spread = recursive_doubling(names(n), names(n)[:1])
    assert [len(steps) for steps in spread.rounds] == [min(1 << r, n - (1 << r)) for r in range(rounds)]
    folded = n & (n - 1) != 0
    gathered = recursive_doubling(names(n), None, names(n)[:1])
    assert len(gathered.rounds) == rounds
    assert len(recursive_doubling(names(n), None, names(n)[-1:]).rounds) == rounds + folded
    for schedule in (spread, gathered):
        assert counts(schedule, 12).copies == n - 1
        for steps in schedule.rounds:
            sent = [src for step in steps for src in step.srcs if src != step.dst]
            assert len(sent) == len(set(sent)) == len({step.dst for step in steps})


@pytest.mark.parametrize("n", range(2, 18))
def test_one_shot_costs(n):
    """one_shot takes one round, in which each device sends its whole buffer to each other device."""
    schedule = one_shot(names(n))
    assert len(schedule.rounds) == 1
    done = counts(schedule, 12)
    assert done.bytes == dict.fromkeys(itertools.permutations(names(n), 2), 48)
    assert done.copies == n * (n - 1)


@pytest.mark.parametrize("n", range(2, 18))
def test_hierarchical_copy_costs(n):
    """hierarchical_copy takes at most 4 rounds and 2(n-1) copies; on 8 devices these are 6 to the roots of two groups,
    1 from root to root, 1 back, and 6 to the other devices."""
    schedule = hierarchical_copy(names(n))
    assert len(schedule.rounds) == (2 if n == 2 else 4)
    done = counts(schedule, 10)
    assert done.copies == 2 * (n - 1)
    assert done.additions == (n - 1) * 10
    if n == 8:
        into, out = [
            {(f"cpu:{k}", f"cpu:{k // 4 * 4}")[:: 1 - 2 * back] for k in (1, 2, 3, 5, 6, 7)} for back in (0, 1)
        ]
        assert set(done.bytes) == into | out | {("cpu:4", "cpu:0"), ("cpu:0", "cpu:4")}


@pytest.mark.parametrize(("algorithm", "size", "n"), pairs(ALGORITHMS, [0, 1, 2, 3, 7, 8, 9, 100], [1, 2, 3, 5, 8]))
def test_additions_are_the_least(algorithm, size, n):
    """An all-reduce combines each element n - 1 times, whatever the size. one_shot and recursive_doubling combine more
    often to save rounds: n - 1 times on every device, and once per round on every paired device."""
    width = 1 << (n.bit_length() - 1)
    due = {"one_shot": n * (n - 1), "recursive_doubling": width * (width.bit_length() - 1) + n - width}
    for packs in (1, 3):
        done = counts(PLANNERS[algorithm](names(n), packs=packs), size)
        assert done.additions == due.get(algorithm, n - 1) * size


def test_direct_and_one_shot_combine_in_the_order_of_devices():
    """direct, one_shot and one_device combine in the order of the devices, so they give the same bits."""
    for schedule in (direct(names(5)), one_shot(names(5)), one_device(names(5), packs=5)):
        assert len(schedule.rounds[0]) == 5
        for step in schedule.rounds[0]:
            assert step.srcs == (0, 1, 2, 3, 4)


def expressions(schedule):
    """Return for each chunk and device the expression that it stores at the end, as a number: equal expressions, which
    combine the same values in the same order, have equal numbers."""
    numbers = {}
    cells = {
        (c, s): numbers.setdefault((c, s), len(numbers)) for c, ch in enumerate(schedule.chunks) for s in ch.sources
    }
    for steps in schedule.rounds:
        made = {}
        for chunk, dst, srcs in steps:
            read = tuple(cells[chunk, src] for src in srcs)
            made[chunk, dst] = read[0] if len(read) == 1 else numbers.setdefault((chunk, *read, "+"), len(numbers))
        cells |= made
    return cells


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(ask=requests(most_packs=3))
def test_every_destination_receives_the_same_bits(algorithm, ask):
    """All destinations end with the same expression: the same sources combined in the same order."""
    schedule = plan(algorithm, ask)
    cells = expressions(schedule)
    for c, chunk in enumerate(schedule.chunks):
        assert len({cells[c, dst] for dst in chunk.destinations}) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(ask=requests(most_packs=3))
def test_no_step_is_dead(algorithm, ask):
    """Each step of a planned schedule contributes to the result of at least one destination."""
    schedule = plan(algorithm, ask)
    assert live_rounds(schedule) == [list(steps) for steps in schedule.rounds]


@given(requests(most_packs=3), st.data())
def test_direct_with_owners(ask, data):
    """Of n owners, number (first + p + s) mod n reduces share s of pack p and sends it to the destinations; owners need
    be neither sources nor destinations."""
    owners = data.draw(st.lists(st.sampled_from(ask.devices), min_size=1, unique=True))
    schedule = direct(
        ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first, owners=[d.upper() for d in owners]
    )
    verify(schedule)
    assert oracle.right(schedule)
    assert len(schedule.chunks) == ask.packs * len(owners)
    assert len(schedule.rounds) <= 2
    for number, (_, sources, _) in enumerate(schedule.chunks):
        pack, share = divmod(number, len(owners))
        owner = owners[(ask.first + pack + share) % len(owners)]
        reducing = (
            [schedule.devices[step.dst] for step in schedule.rounds[0] if step.chunk == number]
            if schedule.rounds
            else []
        )
        if len(sources) > 1:
            assert reducing == [owner]
    assert live_rounds(schedule) == [list(steps) for steps in schedule.rounds]


def test_a_reduce_to_one_root_is_shared_by_all_owners():
    """With all devices as owners, each device sends one share to each other device, and two to the root,
    instead of its whole buffer to the root."""
    schedule = direct(names(4), None, names(4)[:1], owners=names(4))
    done = counts(schedule, 16)
    others = dict.fromkeys(itertools.permutations(names(4), 2), 16)
    assert done.bytes == others | {(d, names(4)[0]): 32 for d in names(4)[1:]}
    assert direct(names(4), owners=names(4)) == direct(names(4))


def test_bad_owners_are_refused():
    """Owners that are not devices of the plan, and an empty list of owners, are PlanErrors."""
    with pytest.raises(PlanError, match=r"the owners must be among the devices[\s\S]*cpu:7"):
        direct(names(3), owners=["cpu:7"])
    with pytest.raises(PlanError, match="the owners must be at least one device"):
        direct(names(3), owners=[])


def test_one_device_with_a_root():
    """The root of one_device may be neither a source nor a destination."""
    schedule = one_device(names(4), names(4)[:2], names(4)[2:3], root="cpu:3", packs=2)
    assert schedule.rounds == (
        (Step(0, 3, (0, 1)), Step(1, 3, (0, 1))),
        (Step(0, 2, (3,)), Step(1, 2, (3,))),
    )
    assert planned("one_device", names(2), names(2), root="cuda:1").devices == ("cpu:0", "cpu:1", "cuda:1")


BAD = [
    ({"devices": []}, PlanError, "at least one device"),
    (
        {"sources": ["cpu:7"]},
        PlanError,
        r"the sources must be among the devices[\s\S]*cpu:7[\s\S]*one of cpu:0, cpu:1, cpu:2",
    ),
    ({"destinations": ["cpu:0", "cuda:0"]}, PlanError, r"the destinations must be among the devices[\s\S]*cuda:0"),
    ({"sources": []}, PlanError, "the sources must be at least one device"),
    ({"destinations": []}, PlanError, "the destinations must be at least one device"),
    ({"packs": 0}, PlanError, r"packs must be an int > 0[\s\S]*packs=0\n"),
    ({"packs": -2}, PlanError, r"packs must be an int > 0[\s\S]*packs=-2\n"),
    ({"packs": 1.5}, PlanError, r"packs must be an int > 0[\s\S]*packs=1.5\n"),
    ({"first": 1.5}, PlanError, r"first must be an int[\s\S]*first=1.5\n"),
    ({"devices": ["cpu:0", "CPU:0"]}, ArgumentError, "cpu:0 is listed more than once"),
    ({"sources": ["cpu:0", "cpu:0"]}, ArgumentError, "cpu:0 is listed more than once"),
    ({"devices": "cpu:0"}, ArgumentError, "devices must be a list of names"),
    ({"devices": ["foo"]}, ArgumentError, "this device name cannot be parsed"),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_requests_are_refused(algorithm, changes, error, text):
    """An impossible request raises an error that states the problem."""
    with pytest.raises(error, match=text):
        PLANNERS[algorithm](**({"devices": names(3)} | changes))


def test_bad_roots_and_groups_are_refused():
    """A root that is not a device, and groups that miss a device or name one twice, are PlanErrors."""
    with pytest.raises(PlanError, match=r"the root must be among the devices[\s\S]*cpu:9"):
        one_device(names(3), root="cpu:9")
    for groups in ([names(2)], [names(3), names(1)], [["cpu:0", "cpu:0"], ["cpu:1", "cpu:2"]], []):
        with pytest.raises(PlanError, match="the groups must have each device once"):
            hierarchical_copy(names(3), groups=groups)
    with pytest.raises(PlanError, match="a group's member must be among the devices"):
        hierarchical_copy(names(3), groups=[names(3), ["cpu:5"]])


def test_a_given_root_reduces():
    """A request's root is the root of each algorithm that has one; without a topology hierarchical_copy requires a root
    that is a source or a destination."""
    members = names(4)
    for name in ("one_device", "hierarchical_copy"):
        schedule = schedule_for(Request("all_reduce", members, members, name, root=members[3], packs=2))
        lowered = lower(schedule)
        for chunk in lowered.chunks:
            assert [lowered.devices[one.device] for one in chunk.instructions if one.final] == [members[3]]
    request = Request("all_reduce", members[:2], members[:2], "hierarchical_copy", root="cpu:3")
    with pytest.raises(PlanError, match="the root must be a source or a destination"):
        schedule_for(request)
