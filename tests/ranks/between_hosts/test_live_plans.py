"""Groups on several hosts, some of which have no link to each other, and plans that depend on the measured links."""

import itertools
import random
import threading
import time
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from host_checks import CASES, check_cases, draw_parts, on
from members import Warnings, memory, summed
from ranks import connected, ranks

from crossreduce import Topology, plan, simulate
from crossreduce.errors import MismatchError, ReductionError, UnsupportedError
from crossreduce.lowering import forward_through_devices, lower
from crossreduce.ops import ReduceOp
from crossreduce.planning import COLLECTIVES
from crossreduce.ranks.communicator import ArrayView, Communicator
from crossreduce.ranks.inter_host import host_links, multi_host, two_level
from crossreduce.ranks.inter_host.two_level import distances, equal_links, host_names, host_schedule
from crossreduce.ranks.measurement import measure
from crossreduce.ranks.transports import tcp
from crossreduce.ranks.transports.choice import open_transport
from crossreduce.ranks.transports.tcp import TcpTransport
from crossreduce.ranks.transports.ucx import UcxTransport

EVERY = (*COLLECTIVES, "gather", "scatter", "all_to_all")


def contributions(program):
    """Return for each chunk the destinations, each with the set of the inputs that its result contains.

    Check that each operand was made in an earlier round, and that no contribution occurs twice.
    """
    found = []
    for chunk in program.chunks:
        values = [({k}, -1) for k in range(len(chunk.sources))]
        for instruction in chunk.instructions:
            operands = [values[operand] for operand in instruction.operands]
            assert all(made < instruction.round for _, made in operands)
            whole = set().union(*(inputs for inputs, _ in operands))
            assert len(whole) == sum(len(inputs) for inputs, _ in operands)
            values.append((whole, instruction.round))
        found.append([(chunk.devices[result], values[result][0]) for result in chunk.results])
    return found


def test_forwarded_programs_use_only_links():
    """If random pairs of hosts have no link, every collective moves data only over links, forwards a value only after
    it was received, and gives results that have every contribution once."""
    draw = random.Random(1)
    for case in range(24):
        count = draw.randint(3, 6)
        hosts = tuple((2 * k, 2 * k + 1) for k in range(count))
        lost = None
        while lost is None or min(map(min, distances(count, lost))) < 0:  # all hosts must stay connected
            pairs = [*itertools.combinations(range(count), 2)]
            lost = tuple(sorted(draw.sample(pairs, draw.randrange(len(pairs)))))
        collective = EVERY[case % len(EVERY)]
        root = draw.randrange(2 * count) if collective in ("reduce", "broadcast", "gather", "scatter") else None
        schedule = host_schedule(None, hosts, collective, draw.choice((64, 1 << 24)), root, lost=lost)
        wiring, program = equal_links(count, lost), lower(schedule)
        made = forward_through_devices(program, wiring)
        for _, src, dst, through, _ in itertools.chain(*made.transfers):
            assert wiring.link(made.devices[src], made.devices[dst]) is not None, (collective, lost)
            assert through is None
        assert contributions(made) == contributions(program)
        for chunk, old in zip(made.chunks, program.chunks, strict=True):
            assert any(x.final for x in chunk.instructions) == any(x.final for x in old.instructions)
        assert lost or made is program  # without lost links, nothing changes


def without(rendezvous, lost, timeout_s=100):
    """Join a group in which the pairs of ranks ``lost`` have no connection."""
    meeting = type(rendezvous)(rendezvous.path, rendezvous.rank, rendezvous.size, f"addresses of {rendezvous.name}")

    def reached(cancelled, *_):
        sockets = connected(meeting, cancelled, interfaces=["lo"]).sockets
        far = [peer for peer in sockets if {peer, rendezvous.rank} in [set(pair) for pair in lost]]
        for peer in far:
            sockets.pop(peer).close()
        return TcpTransport(sockets, far)

    return Communicator(rendezvous, reached, name="world", timeout_s=timeout_s)


def every_collective(rendezvous, lost, measured):
    warned = Warnings()
    comm = without(rendezvous, lost)
    if measured:
        measure(comm, 0.05)
    check_cases(comm, CASES[::3])
    with pytest.raises(MismatchError, match="rank 0 differs"):
        comm.require_same("a" if comm.rank else "b")
    with pytest.raises(UnsupportedError, match=r"every two hosts[\s\S]*no connection between host 0"):
        comm.delegate("all_reduce band int32[3]", lambda: pytest.fail("it must not begin"))
    for host, peers in enumerate(comm.hosts):
        if (comm.hosts.index(comm.host), host) in comm.links:
            comm.links.require("send", peers[-1])
        else:
            with pytest.raises(UnsupportedError, match="a send needs a connection"):
                comm.links.require("send", peers[-1])
    comm.barrier()
    comm.close()
    return comm.links.lost, warned.texts, comm.host_topology


@pytest.mark.parametrize(
    ("names", "lost", "pairs", "measured"),
    [
        ("abcd", [(0, 2), (0, 3), (1, 3)], ((0, 2), (0, 3), (1, 3)), False),
        ("abbcc", [(0, 3)], ((0, 2),), True),
    ],
)
def test_every_collective_without_some_links(names, lost, pairs, measured):
    """If the ranks ``lost`` could not connect, so that the hosts ``pairs`` have no link, every collective is correct,
    also on measured links. Calls that differ or that need all connections raise errors. One rank warns of the hosts."""
    draw_parts(len(names), CASES[::3])
    found = ranks(len(names), every_collective, lost, measured, environment=on(*names))
    ((warning,), *others) = (texts for _, texts, _ in found)
    assert warning.startswith('group "world": no connection between host 0 (rank')
    assert warning.endswith("Collectives pass through other hosts.")
    assert not any(others)
    assert {lost for lost, *_ in found} == {pairs}
    topologies = {topology for *_, topology in found}
    if not measured:
        assert topologies == {None}
        return
    (topology,) = topologies
    linked = {frozenset((link.src[:5], link.dst[:5])) for link in topology.links}
    for a, b in itertools.combinations(range(len(set(names))), 2):
        assert (frozenset((f"host{a}", f"host{b}")) in linked) == ((a, b) not in pairs)


def whole_arrays(rendezvous, transport):
    """Make all calls, also on links of different speeds, and one in which the ranks' arrays differ in size."""
    meeting = type(rendezvous)(rendezvous.path, rendezvous.rank, rendezvous.size, "addresses")

    def reached(cancelled, *_):
        return open_transport(transport, connected(meeting, cancelled, interfaces=["lo"]))

    comm = Communicator(rendezvous, reached, name="world", timeout_s=100, wanted=transport)
    check_cases(comm, CASES)
    count = comm.size
    speeds = [[0 if a == b else 1 if {a, b} == {0, 2} else 5 for b in range(count)] for a in range(count)]
    comm.plan_on(Topology.from_matrix(speeds, host_names(count), latency_s=1e-4))
    check_cases(comm, CASES[::2])
    x = np.full(100_000 + comm.rank, comm.rank, "float32")
    with pytest.raises(MismatchError, match="all_reduce"):
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    assert (x == comm.rank).all()
    summed(comm, 100_000)
    with mock.patch.object(multi_host.MultiHostEngine, "_exchange_stage", side_effect=AssertionError("in Python")):
        summed(comm, 200_000)
    comm.close()


@pytest.mark.parametrize(("names", "transport"), [("ab", "tcp"), ("abcd", "tcp"), ("abc", "ucx")])
def test_hosts_of_one_rank_exchange_the_arrays_of_the_caller(names, transport, monkeypatch):
    """Compiled code sends large arrays from the caller's memory and receives into it, in place or not. If the calls
    differ, nothing is written."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    for module, name, nbytes in (
        (multi_host, "PIECE_BYTES", 1 << 14),
        (multi_host, "SMALLEST_PIECE", 1 << 11),
        (two_level, "ARRAY_PIECE_BYTES", 1 << 13),
        (TcpTransport, "message_nbytes", 1 << 13),
        (UcxTransport, "message_nbytes", 1 << 13),
    ):
        monkeypatch.setattr(module, name, nbytes)
    draw_parts(len(names), CASES)
    ranks(len(names), whole_arrays, transport, environment=on(*names))


def stalls(rendezvous, lost, late, patience_s):
    """Connect while the pair ``lost`` gets no answer and rank ``late`` pauses. Return the ranks that were not reached,
    and the seconds it took."""
    tcp._RETRY_S = 0.05
    me, payloads, published = rendezvous.rank, [], {}
    try_to_connect = tcp._Meeting._try

    def unanswered(meeting, link, target):
        if {me, link[0]} != lost:
            try_to_connect(meeting, link, target)

    def stalled(missing):
        rendezvous.query("put", [("stalled", me)], list(missing))
        found = rendezvous.query("get", [("stalled", peer) for peer in missing])
        published.update(zip(missing, found, strict=True))
        return [peer for peer in missing if me in (published[peer] or [])]

    def publish(payload):
        payloads.extend(rendezvous.all_gather(payload))
        if me == late:
            time.sleep(6 * patience_s)

    tcp._Meeting._try = unanswered
    began = time.monotonic()
    read = payloads.__getitem__
    sockets = tcp.connect(me, range(3), publish, read, threading.Event(), ["lo"], stalled, patience_s=patience_s)
    took = time.monotonic() - began
    rendezvous.all_gather(b"")
    return sorted({*range(3)} - {me, *sockets}), took


def test_a_pair_that_gets_no_answer_is_given_up():
    """Two ranks give each other up if neither reaches the other for ``patience_s``, and keep all other connections. A
    rank that pauses while others connect is not given up, also after six times as long."""
    found = ranks(3, stalls, {0, 2}, None, 0.5)
    assert [one for one, _ in found] == [[2], [], [0]]
    assert all(took > 0.5 for _, took in (found[0], found[2]))
    for late in (0, 2):
        assert [one for one, _ in ranks(3, stalls, None, late, 0.2)] == [[], [], []]


def silence(comm, silent):
    """Drop the messages from the first rank of each pair in ``silent`` to the second one."""
    real = comm.transport.send

    def send(address, nbytes, dst, tag):
        return mock.Mock() if (comm.rank, dst) in silent else real(address, nbytes, dst, tag)

    comm.transport.send = send


def checks(rendezvous, apart, silent, late, patience_s):
    """Check the links twice. Ranks ``apart`` have no connection, and messages of ranks ``silent`` do not arrive."""
    host_links.PATIENCE_S = patience_s
    comm = without(rendezvous, apart)
    silence(comm, silent)
    if comm.rank == late:
        time.sleep(2)
    comm.check_links("a check")
    lost = comm.links.lost
    summed(comm, 10_000)
    comm.check_links("another one")
    assert comm.links.lost == lost
    with pytest.raises(MismatchError, match="rank 1 differs"):
        comm.barrier() if comm.rank == 1 else comm.check_links("a third one")
    comm.close()
    return lost


@pytest.mark.parametrize(
    ("hosts", "apart", "silent", "late", "patience_s"),
    [
        ("abc", [], [(0, 2)], None, 0.4),
        # Data passes through other hosts. A host that first waits in vain for two links forwards data late.
        ("abcde", [(1, 3)], [(2, 0), (4, 0)], None, 1.0),
        # A rank that waits for a late rank, of its own host or of another host, cannot send its next message, although
        # other hosts have begun the check.
        ("aabbcc", [], [], 5, 1.0),
        ("abc", [(0, 2)], [], 2, 1.0),
    ],
    ids=["lost_links", "hosts_that_give_up_others", "late_ranks_of_a_host", "late_ranks"],
)
def test_a_check_finds_lost_links(hosts, apart, silent, late, patience_s):
    """A check gives up a link over which no message arrives in one direction, but no link of ranks that are late or
    make another call. Later calls use the other links."""
    lost = tuple(sorted({tuple(sorted(pair)) for pair in (*apart, *silent)}))
    assert ranks(len(hosts), checks, apart, silent, late, patience_s, environment=on(*hosts)) == [lost] * len(hosts)


def no_route_left(rendezvous):
    """Join twice. The first time, host 2 has no connection. The second time, it loses all links later."""
    host_links.PATIENCE_S = 0.4
    with pytest.raises(ReductionError, match="could not connect to each other") as error:
        without(rendezvous, [(0, 2), (1, 2)])
    texts = [str(error.value)]
    comm = without(type(rendezvous)(rendezvous.path, rendezvous.rank, rendezvous.size, "again"), [])
    silence(comm, [(0, 2), (1, 2), (2, 0), (2, 1)])
    for _ in range(2):  # the second call raises the same error
        with pytest.raises(ReductionError, match=r"could not connect to each other[\s\S]*host 2 \(rank 2\)") as error:
            comm.check_links("a check")
        texts.append(str(error.value))
    comm.close()
    return texts


def test_a_host_that_has_lost_all_links():
    """If a host can connect to no other host, all ranks raise the same error, which names the pairs of hosts. If a host
    has lost all its links later, a check raises such an error on all ranks, and again in later calls."""
    found = ranks(3, no_route_left, environment=on(*"abc"))
    assert found[0] == found[1] == found[2]
    text, *later = found[0]
    assert later[0] == later[1]
    assert "no connection between host 0 (rank 0) and host 2 (rank 2); host 1 (rank 1) and host 2 (rank 2)" in text
    assert "CROSSREDUCE_IFNAME" in text


def mesh(speeds, latency_s=1e-4):
    """Return a topology of hosts. ``speeds``: GB/s of pairs of hosts, or 0 for no link. Other pairs have 1 GB/s."""
    count = max(b for _, b in speeds) + 1
    rows = [[speeds.get((min(a, b), max(a, b)), 1) if a != b else 0 for b in range(count)] for a in range(count)]
    return Topology.from_matrix(rows, host_names(count), latency_s=latency_s)


def replans(rendezvous):
    comm = without(rendezvous, [])
    changed, compiled, digests = [], [], []
    # Bandwidths that differ by a tenth at most, and latencies by a factor of 2, count as the same.
    for speed, latency_s in ((0.1, 1e-4), (0.109, 1.9e-4), (0.1, 2.1e-4), (0.12, 2.1e-4), (0.5, 2.1e-4), (0, 2.1e-4)):
        changed.append(comm.plan_on(mesh({(0, 2): speed}, latency_s)))
        summed(comm, 100_000)
        call = ArrayView(0, 100_000, "int64", (100_000,))
        compiled.append(id(comm.executable("all_reduce", ReduceOp.SUM, call, None, False)))
        digests.append(comm.plan_digest)
    comm.close()
    return changed, compiled[0] == compiled[1], digests


def test_nearly_the_same_links_keep_compiled_calls():
    """Another measurement with nearly the same speeds keeps the plan and the compiled calls. Other speeds replace them.
    All ranks have the digest of the same plan."""
    found = ranks(3, replans, environment=on(*"abc"))
    assert found[0] == found[1] == found[2]
    changed, same, digests = found[0]
    assert (changed, same) == ([True, False, True, True, True, True], True)
    assert digests[0] == digests[1]
    assert len(set(digests)) >= 3


def plans_differ(rendezvous):
    comm = without(rendezvous, [])
    with pytest.raises(MismatchError, match="plan between hosts") as first:
        comm.plan_on(mesh({(0, 2): 0.1 if comm.rank else 0.2}))
    assert comm.host_topology is None
    comm.plan_on(mesh({(0, 2): 0.1}))
    real, x = multi_host.host_schedule, np.ones(100_000, "float32")

    def planned(topology, *arguments, **named):
        """Plan as if rank 1 had another version of SciPy."""
        return real(mesh({(0, 1): 0.1, (0, 2): 1}) if comm.rank == 1 else topology, *arguments, **named)

    with (
        mock.patch.object(multi_host, "host_schedule", planned),
        pytest.raises(MismatchError, match="plan between hosts") as second,
    ):
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
    assert (x == 1).all()
    comm.barrier()
    comm.close()
    return str(first.value), str(second.value)


def test_ranks_with_different_plans_raise_the_same_error():
    """If the topologies or plans of ranks differ, all ranks raise an error that names the plan as the cause. Nothing
    is written, and the group can still be used."""
    found = ranks(3, plans_differ, environment=on(*"abc"))
    assert found[0] == found[1] == found[2]
    first, second = found[0]
    assert first.startswith("rank 0 differs from ranks 1, 2 in the plan between hosts at op 1")
    assert "rank 0: links between hosts planned as " in first
    assert second.startswith("rank 1 differs from ranks 0, 2 in the plan between hosts at op")
    assert "ranks 0, 2: all_reduce sum float32[100000] planned as " in second
    assert "the same versions of crossreduce, NumPy and SciPy" in second


def test_a_plan_avoids_a_slow_link():
    """With a lost and a slow link among four hosts, the plan of a large all-reduce sends nothing over the lost link and
    little over the slow one, and reaches at least 90 % of the bound."""
    speeds = {(0, 1): 0.025, (0, 3): 0.025, (1, 2): 0.025, (2, 3): 0.025, (0, 2): 0.0025, (1, 3): 0}
    topology = mesh(speeds)
    hosts = tuple((2 * k, 2 * k + 1) for k in range(4))
    schedule = host_schedule(topology, hosts, "all_reduce", 8 << 20, None, lost=((1, 3),))
    carried = simulate(schedule, topology, 8 << 20).bytes
    assert not any({src, dst} == {"host1/cpu:0", "host3/cpu:0"} for src, dst in carried)
    slow = sum(nbytes for (src, dst), nbytes in carried.items() if {src, dst} == {"host0/cpu:0", "host2/cpu:0"})
    assert slow <= 2 * (max(carried.values()) / 10 + 8)  # both directions; chunks are whole numbers of bytes
    found = plan(topology, nbytes=8 << 20)
    assert found.ratio >= Fraction(9, 10)
    found.bound.check()
