"""If a group of the torch backend cannot be formed, all ranks soon raise an error that names the faulty rank."""

import errno
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from budget import count
from free_port import free_port
from kinds_of_groups import wait_until
from members import starter
from ranks import Died, Moment, ranks
from torch._C import _distributed_c10d as c10d

from crossreduce import kernels
from crossreduce.errors import (
    ArgumentError,
    BackendError,
    CollectiveTimeout,
    MismatchError,
    PeerLostError,
    ReductionError,
)
from crossreduce.ranks.intra_host import board, bootstrap, votes
from crossreduce.ranks.intra_host.board import Board
from crossreduce.ranks.transports import gloo, tcp
from crossreduce.torch import rendezvous
from crossreduce.torch.rendezvous import _WAIT, TorchRendezvous, _SharedStore

TIMEOUT_S = 2.0


@pytest.fixture
def place(request, tmp_path):
    """Yield the place of a store: a file, the port of a store in the test's process, or a negative port (rank 0)."""
    if request.param == "file":
        yield str(tmp_path / "store")
        return
    if request.param == "tcp of rank 0":
        yield -free_port()
        return
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    yield store.port


def store_at(place, rank, size, timeout_s):
    """Return the store at a place. If the port is negative, rank 0 runs it, and waits for all ranks (like env://)."""
    if isinstance(place, str):
        return dist.FileStore(place, size)
    timeout, own = timedelta(seconds=timeout_s), place < 0 and rank == 0
    return dist.TCPStore("127.0.0.1", abs(place), size, own, timeout, wait_for_workers=place < 0)


def begin(rendezvous, place, timeout_s=TIMEOUT_S):
    rank, size = rendezvous.rank, rendezvous.size
    store, timeout = store_at(place, rank, size, timeout_s), timedelta(seconds=timeout_s)
    dist.init_process_group("crossreduce", store=store, rank=rank, world_size=size, timeout=timeout)


def failure(rendezvous, place, before=None, timeout_s=TIMEOUT_S):
    """Call ``before(rank)``, make the default group, and return the error's class, text and ranks, and two moments."""
    if before is not None:
        before(rendezvous.rank)
    begun = Moment()
    try:
        begin(rendezvous, place, timeout_s)
    except ReductionError as error:
        return type(error), str(error), getattr(error, "ranks", None), begun, Moment()
    return None


def same(found):
    """Return the class, text and ranks of the error that all surviving ranks have raised. Fail if they differ."""
    errors = [one[:3] for one in found if not isinstance(one, Died)]
    assert len(set(errors)) == 1, found
    assert errors[0] is not None
    return errors[0]


def dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def dies_at_connections(rank):
    """Let rank 1 die when it begins to connect to other hosts."""
    if rank == 1:
        tcp.connect = lambda *_args, **_options: dies(1)


def dies_with_the_memory(rank):
    """Let rank 1 make the memory of its host, and die when it has to send it."""
    if rank == 1:
        bootstrap._send = lambda *_: dies(1)
    else:
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("before", "hosts", "place"),
    [(dies, "aaa", "tcp"), (dies_at_connections, "aab", "file"), (dies_with_the_memory, "aaa", "tcp")],
    indirect=["place"],
)
def test_a_rank_that_dies_while_the_group_is_made(place, before, hosts):
    """If a rank dies before it joins, or while the ranks connect, all others raise the same CollectiveTimeout. They do
    so soon after the timeout, and it names that rank."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    found = ranks(3, failure, place, before, environment=environment, check=False)
    assert isinstance(found[1], Died)
    kind, text, lost = same(found)
    assert (kind, lost) == (CollectiveTimeout, (1,))
    assert text.startswith("rank 1 did not reach the rendezvous within 2 s.")
    for rank in (0, 2):
        *_, begun, raised = found[rank]
        assert raised.seconds_since(begun) < TIMEOUT_S + 3


def stops_with_the_memory(rank):
    """Let rank 1 make the memory of its host, and stop when it has to send it."""
    if rank == 1:
        bootstrap._send = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(0.3)


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_a_rank_that_is_stopped_when_it_has_to_send_the_memory(place):
    """If a rank is stopped when it has to send the memory of its host, all others raise the same CollectiveTimeout soon
    after the timeout. It names that rank."""

    def end(pids):
        wait_until(lambda: all(not Path(f"/proc/{pids[rank]}/cmdline").read_bytes() for rank in (0, 2)))  # have ended
        os.kill(pids[1], signal.SIGKILL)

    environment = [{"CROSSREDUCE_HOST": host} for host in "aab"]
    found = ranks(3, failure, place, stops_with_the_memory, environment=environment, check=False, begun=end)
    assert same(found)[::2] == (CollectiveTimeout, (1,))
    for rank in (0, 2):
        *_, begun, raised = found[rank]
        assert raised.seconds_since(begun) < TIMEOUT_S + 3


def killed_at_random(rendezvous, started, place, pauses):
    rank, size, timeout = rendezvous.rank, rendezvous.size, timedelta(seconds=TIMEOUT_S)
    store = store_at(place, rank, size, TIMEOUT_S)
    started.ready()
    time.sleep(pauses[rank])
    try:
        dist.init_process_group("crossreduce", store=store, rank=rank, world_size=size, timeout=timeout)
        while True:
            dist.barrier()
    except ReductionError as error:
        return str(error), error.ranks, Moment()


@pytest.mark.parametrize("seed", range(count(5, least=1)))
@pytest.mark.parametrize("place", ["tcp", "tcp of rank 0"], indirect=True)
def test_a_rank_that_is_killed_at_a_random_moment_is_named(place, seed):
    """At whatever moment a rank is killed while a group is formed or used, all others raise an error that names it, at
    the latest soon after the timeout."""
    draw = random.Random(f"{seed} {place}")
    n, killed = draw.randint(2, 4), []
    victim, pauses = draw.randrange(n), [draw.random() * 0.05 for _ in range(n)]
    environment = [{"CROSSREDUCE_HOST": draw.choice("aab")} for _ in range(n)]
    with starter(n) as started:

        def kill(pids):
            started.wait()
            time.sleep(draw.random() * 0.2)
            os.kill(pids[victim], signal.SIGKILL)
            killed.append(Moment())

        options = {"environment": environment, "check": False, "begun": kill}
        found = ranks(n, killed_at_random, started, place, pauses, **options)
    for text, lost, at in (one for rank, one in enumerate(found) if rank != victim):
        assert lost == (victim,), text
        assert f"rank {victim}" in text
        assert at.seconds_since(killed[0]) < TIMEOUT_S + 3


class Store(dist.Store):
    """A store that is written in Python, with the methods that a rendezvous calls."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def set(self, key, value):
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


def test_a_store_that_is_written_in_python():
    """A store that cannot be cloned, such as one written in Python, works: the rendezvous uses it directly."""
    store, found = Store({}), [None, None]

    def meet(rank):
        rendezvous = TorchRendezvous(dist.PrefixStore("group/", store), rank, 2, 5.0)
        found[rank] = rendezvous.first("key", b"%d" % rank), rendezvous.all_gather(b"%d" % rank)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, range(2)))
    assert found == [(b"0", [b"0", b"1"])] * 2


class Forwarding(Store):
    """Forwards the methods to another store."""

    def add(self, key, number):
        return self.values.add(key, number)

    def set(self, key, value):
        self.values.set(key, value)

    def get(self, key):
        return self.values.get(key)

    def check(self, keys):
        return self.values.check(keys)


def makes_a_further_group(rendezvous, place):
    store, timeout = Forwarding(store_at(place, rendezvous.rank, rendezvous.size, 60)), timedelta(seconds=60)
    where = {"store": store, "rank": rendezvous.rank, "world_size": rendezvous.size}
    dist.init_process_group("crossreduce", timeout=timeout, **where)
    group, x = dist.group.WORLD.split_group([1, 0]), torch.tensor([2**rendezvous.rank])
    group.allreduce([x]).wait()
    rendezvous.all_gather(b"")
    return x.item()


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_a_further_group_at_a_store_that_is_written_in_python(place):
    assert ranks(2, makes_a_further_group, place) == [3, 3]


def in_two_jobs(rendezvous, ports):
    """Make a group of ranks 1 and 2 of a job of three ranks, and the only rank of another job. Split it."""
    rank, timeout = rendezvous.rank, timedelta(seconds=60)
    job = {"rank": rank % 3, "world_size": 3 if rank < 3 else 1}
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for port in ports]
    dist.init_process_group("crossreduce", store=dist.PrefixStore(f"{rank // 3}", stores[0]), timeout=timeout, **job)
    if rank == 0:
        return None
    made = dist.distributed_c10d._new_process_group_helper
    group, _ = made(3, rank - 1, [], "crossreduce", stores[1], group_name="of two jobs", timeout=timeout)
    found = []
    for each in (group, group.split_group([0, 1]), group.split_group([1, 2])):
        x = torch.tensor([2**rank])
        if each is not None:
            each.allreduce([x]).wait()
            found.append(x.item())
    rendezvous.query("put", [("done", rank)], True)
    rendezvous.query("get", [("done", each) for each in (1, 2, 3)], timeout=60)
    return found


def test_a_group_of_ranks_of_two_jobs():
    """Ranks that have different default groups make a group, and parts of it, as a trainer and its samplers do."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    found = ranks(4, in_two_jobs, [store.port for store in stores])
    assert found == [None, [14, 6], [14, 6, 12], [14, 12]]


@pytest.mark.parametrize("place", ["tcp of rank 0"], indirect=True)
def test_the_rank_that_runs_the_store_is_named(place):
    """If rank 0 runs the store and dies, all others raise a PeerLostError that names it."""

    def before(rank):
        all_gather = TorchRendezvous.all_gather

        def dying_all_gather(self, *arguments):
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return all_gather(self, *arguments)

        TorchRendezvous.all_gather = dying_all_gather

    found = ranks(3, failure, place, before, check=False)
    for rank in (1, 2):
        kind, text, lost, *_ = found[rank]
        assert (kind, lost) == (PeerLostError, (0,))
        assert "cannot be reached; rank 0, which runs it, has probably ended." in text


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_errors_of_subgroups_have_the_numbers_of_the_world(place):
    """Errors about a group of some ranks name a missing rank by its number in the world, not by that in the group."""

    def run(rendezvous):
        begin(rendezvous, place)
        if rendezvous.rank != 1:
            return None
        text = r"^rank 2 did not reach the rendezvous.*\n.*rank 1 waited"
        with pytest.raises(CollectiveTimeout, match=text) as error:
            dist.new_group([1, 2], timeout=timedelta(seconds=1))
        return error.value.ranks

    assert ranks(3, run) == [None, (2,), None]


def makes_further_groups(rendezvous, place, missing, is_near):
    """Make groups of all and of some ranks. On the ranks ``missing``, the memory of the first group gives no values.
    Return whether this rank has waited at the store. ``is_near``: whether ranks may read each other's memory."""
    begin(rendezvous, place, 60)
    assert dist.group.WORLD.communicator.memory.reads_peers
    dist.group.WORLD.communicator.memory.reads_peers = is_near
    asked, run, exchange = [], _SharedStore._run, Board.exchange
    board._PATIENCE_S = 60
    if rendezvous.rank in missing:
        Board.exchange = lambda *arguments: exchange(*arguments) and None
    _SharedStore._run = lambda self, kind, *arguments, **answer: (
        asked.append(kind) or run(self, kind, *arguments, **answer)
    )
    for members in ([0, 1, 2], [1, 2], [1, 2]):  # the last two have the same name
        group = dist.group.WORLD.split_group(members, group_name=str(members))
        if rendezvous.rank in members:
            x = torch.tensor([2**rendezvous.rank])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(2**rank for rank in members)
            group.shutdown()
    waited = _WAIT in asked
    rendezvous.all_gather(b"")  # rank 0 may run the store
    return waited


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
@pytest.mark.parametrize(("missing", "is_near"), [((), True), ((), False), ((0,), True), ((1, 2), False)])
def test_a_further_group_on_one_host_is_made_in_memory(place, missing, is_near):
    """Ranks that share the memory of the default group do not wait at the store to make a further group. If some ranks
    find no values in the memory, only they do."""
    found = ranks(3, makes_further_groups, place, missing, is_near)
    assert found == [rank in missing for rank in range(3)]


def of_one_name(rendezvous, place):
    begin(rendezvous, place, 60)
    found = []
    for members in ([1, 2], [0, 1], [1, 2]):
        if (group := dist.group.WORLD.split_group(members, group_name="one name")) is not None:
            x = torch.tensor([2**rendezvous.rank])
            group.allreduce([x]).wait()
            found.append(x.item())
    rendezvous.all_gather(b"")
    return found


@pytest.mark.parametrize("place", ["tcp", "file"], indirect=True)
def test_split_groups_of_one_name_and_different_ranks(place):
    assert ranks(3, of_one_name, place) == [[3], [6, 3, 6], [6, 6]]


def chooses_another_host(rendezvous, place):
    begin(rendezvous, place, 60)
    if rendezvous.rank == 1:
        os.environ["CROSSREDUCE_HOST"] = "another"
    group, x = dist.group.WORLD.split_group([0, 1, 2]), torch.tensor([2**rendezvous.rank])
    group.allreduce([x]).wait()
    rendezvous.all_gather(b"")
    return group.communicator.hosts, x.item()


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_ranks_of_a_further_group_may_choose_another_host(place):
    """A further group follows ``CROSSREDUCE_HOST`` as it is when the group is made."""
    assert ranks(3, chooses_another_host, place) == [(((0, 2), (1,)), 7)] * 3


def lost_in_a_further_group(rendezvous, place, number):
    """Lose rank 0, by a signal, when it has made the memory of a further group. Return the error's class and ranks."""
    begin(rendezvous, place, 60)
    opened = bootstrap._opened
    if rendezvous.rank == 0:
        votes.vote = lambda *_: os.kill(os.getpid(), number)
    elif number == signal.SIGKILL:
        bootstrap._opened = lambda *arguments: time.sleep(0.5) or opened(*arguments)
    if rendezvous.rank == 1:
        return None
    with pytest.raises(CollectiveTimeout) as caught:
        dist.new_group([0, 2, 3], timeout=timedelta(seconds=TIMEOUT_S))
    return caught.value.ranks


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_with_the_memory_of_a_further_group_is_named(place, number):
    """If the rank that has made the memory of a further group is killed or stopped, all others name it."""

    def end(pids):
        wait_until(lambda: all(not Path(f"/proc/{pids[rank]}/cmdline").read_bytes() for rank in (2, 3)))  # have ended
        os.kill(pids[0], signal.SIGKILL)

    found = ranks(4, lost_in_a_further_group, place, number, check=False, begun=end)
    assert found[2:] == [(0,)] * 2


def bad_threads():
    os.environ["CROSSREDUCE_NUM_THREADS"] = "many"


def bad_exactness():
    os.environ["CROSSREDUCE_EXACT"] = "yes"


def no_kernels():
    kernels.instruction_set.cache_clear()
    os.environ["CROSSREDUCE_KERNELS"] = "numpy"


def small_files():
    os.environ["CROSSREDUCE_HOST"] = "own"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def few_files():
    def fails(_name):
        raise OSError(24, "Too many open files")

    bootstrap._sender = fails


def few_threads():
    def fails(*_args, **_options):
        raise RuntimeError(os.strerror(errno.EAGAIN))  # this is what std::thread raises

    dist.ProcessGroupGloo = fails


def other_interface():
    os.environ["CROSSREDUCE_IFNAME"] = "missing0"


def no_interface():
    os.environ["CROSSREDUCE_HOST"] = "own"
    os.environ["GLOO_SOCKET_IFNAME"] = "missing0"


def little_space():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


FAULTS = [
    (bad_threads, "file", ArgumentError, r"rank {}: CROSSREDUCE_NUM_THREADS must be an integer from 1 to 4096\."),
    (bad_exactness, "tcp", ArgumentError, r"rank {}: CROSSREDUCE_EXACT must be 0 or 1\.\n  given: 'yes'"),
    (other_interface, "tcp", ArgumentError, r"rank {}: CROSSREDUCE_IFNAME selects no interface of this host\."),
    (no_kernels, "file", BackendError, r"rank {}: ranks need the compiled kernels\."),
    (small_files, "tcp", ReductionError, r"rank {}: memory could not be allocated\."),
    (little_space, "tcp", ReductionError, r"rank {}: memory could not .*File too large\n  try:   ulimit -f unlimited"),
    (few_files, "file", ReductionError, r"rank {} cannot join the group\.\n.* OSError: .*\n  try:   more open"),
    (few_threads, "tcp", ReductionError, r"rank {} cannot join the group\.\n.* Runtime.* unav.*\n  try:   more open"),
    (no_interface, "tcp", ReductionError, r"the ranks could not connect to.*: rank {}: .*\n  try:   a net"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "place", "kind", "start"),
    [(cause, "file" if place == "file" else "tcp of rank 0", *rest) for cause, place, *rest in FAULTS],
    indirect=["place"],
    ids=[cause.__name__ for cause, *_ in FAULTS],
)
def test_a_fault_of_one_rank_is_raised_on_all(place, cause, kind, start):
    """If one rank cannot join, all ranks raise the same error, with the reason and the rank, long before the timeout,
    even if that rank runs the store and then ends, if it must allocate its host's memory, or if others come later."""

    def before(rank):
        time.sleep(0.3 * rank)
        if rank == faulty:
            cause()
        elif cause is little_space:  # the first rank of a host makes its memory: let this be the faulty one
            first = TorchRendezvous.first
            TorchRendezvous.first = lambda *arguments: time.sleep(1) or first(*arguments)

    faulty = 1 if isinstance(place, str) else 0
    found = ranks(3, failure, place, before, 60.0)
    raised_kind, text, _ = same(found)
    assert raised_kind is kind
    assert re.match(start.format(faulty), text, re.DOTALL), text
    assert all(raised.seconds_since(begun) < 30 for *_, begun, raised in found)


def interrupted_early(rendezvous, place):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["CROSSREDUCE_HOST"] = "aab"[rendezvous.rank]
    if rendezvous.rank == 1:
        tcp.connect = lambda *_args, **_options: time.sleep(600)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        begin(rendezvous, place, 600.0)
    except (KeyboardInterrupt, PeerLostError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_an_interrupt_while_ranks_connect(place):
    """Ctrl-C ends a rank's wait for its connections at once. All others raise a PeerLostError that names it."""
    found = ranks(3, interrupted_early, place)
    assert [kind for kind, _ in found] == [PeerLostError, KeyboardInterrupt, PeerLostError]
    assert found[0][1] == found[2][1]
    assert found[0][1].startswith('rank 1 was interrupted while group "0" was made.')


def many_groups(member, port, name):
    if name:
        socket.gethostname = lambda: name
        gloo._address_of_name.cache_clear()  # of the process that has started this one
    begin(member, port, 60.0)
    dist.all_reduce(torch.ones(4).to_sparse())
    hosts, real = [], c10d.ProcessGroupGloo
    device = lambda **place: hosts.append(place["hostname"]) or real.create_device(**place)  # noqa: E731
    gloo.c10d = SimpleNamespace(ProcessGroupGloo=SimpleNamespace(_Options=real._Options, create_device=device))
    socket.getaddrinfo = socket.create_connection = None
    for _ in range(3):
        x, group = torch.ones(4), dist.new_group()
        dist.all_reduce(x, group=group)
        assert x[0] == 2
        dist.all_reduce(x.to_sparse(), group=group)  # makes gloo's group
    return hosts


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
@pytest.mark.parametrize("name", ["", "a" * 64])
def test_names_are_resolved_only_for_the_first_group(place, name):
    """Later groups of a process use its connection to the store and the address of its host. They connect to nothing by
    a name: if no name server answers, each look-up takes seconds, while the other ranks wait. A host may have a name of
    64 bytes, which Python cannot look up."""
    for hosts in ranks(2, many_groups, place, name):
        assert len(hosts) == 3
        assert all(ip_address(host) for host in hosts)


@pytest.fixture
def tcp_store():
    """A store. If no name server answers, it needs seconds to accept a connection: it looks up the client's name."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_requests_are_those_of_torch(tcp_store):
    """The library's own connection to torch's store reads and writes the values that torch's client does."""
    own = rendezvous._SharedStore(rendezvous._connection(tcp_store, 60.0), "group/", 60.0)
    theirs, large = dist.PrefixStore("group", tcp_store), os.urandom(1 << 20)
    own.set("a", large)
    theirs.set("b", b"1")
    assert theirs.check(["b"])  # stored, also for other connections
    assert [theirs.get(key) for key in ("a", "b")] == [large, b"1"]
    assert own.multi_get(["a", "b"]) == [large, own.get("b")] == [large, b"1"]
    assert [own.check(["a", "b"]), own.check(["a", "c"])] == [True, False]
    assert [own.compare_set("c", *each) for each in ((b"x", b"y"), (b"", b"z"), (b"", b"y"))] == [b"x", b"z", b"z"]
    assert theirs.get("c") == b"z"
    assert [own.delete_key("c"), own.delete_key("c"), theirs.check(["c"])] == [True, False, False]


def test_a_wait_for_values(tcp_store):
    """A wait for values of torch's store ends when they are stored, or after a time. Later answers are not confused."""
    own = rendezvous._SharedStore(rendezvous._connection(tcp_store, 60.0), "group/", 60.0)
    other = rendezvous._SharedStore(rendezvous._Connection(("127.0.0.1", tcp_store.port), 60.0), "group/", 60.0)
    own.set("a", b"1")
    assert own.have_arrived(["a"], 60.0)
    assert not own.have_arrived(["a", "b"], 0.01)
    threading.Timer(0.2, other.set, ("b", b"2")).start()
    assert own.have_arrived(["a", "b"], 60.0)
    for number in range(300):  # some are stored just when their wait is cancelled
        threading.Thread(target=other.set, args=(str(number), b"3")).start()
        own.have_arrived([str(number)], 0.0001 * (number % 10))
        assert own.multi_get(["a", "b"]) == [b"1", b"2"]


def test_an_interrupted_query_does_not_change_the_next_answer(tcp_store, monkeypatch):
    """After Ctrl-C during a query of torch's store, its answer is not taken for that to the next query."""
    own = rendezvous._SharedStore(rendezvous._connection(tcp_store, 60.0), "group/", 60.0)
    own.set("a", b"1")
    own.set("b", b"2")
    monkeypatch.setattr(own.connection, "_read", mock.Mock(side_effect=KeyboardInterrupt("Ctrl-C")))
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        own.get("a")
    monkeypatch.undo()
    assert own.get("b") == b"2"


def test_a_query_within_a_query_gets_its_own_answer(tcp_store, monkeypatch):
    """A signal handler may close or abort a group, which asks the store, while another query waits for its answer."""
    own = rendezvous._SharedStore(rendezvous._connection(tcp_store, 60.0), "group/", 60.0)
    own.set("a", b"1")
    own.set("b", b"2")
    read, within = own.connection._read, []

    def interrupted(nbytes):
        if not within:
            within.append(None)
            within[0] = own.get("b")
        return read(nbytes)

    monkeypatch.setattr(own.connection, "_read", interrupted)
    assert [own.get("a"), own.get("b"), within] == [b"1", b"2", [b"2"]]


def test_a_late_answer_ends_the_errors_of_all_groups(tcp_store):
    """A query of one group may time out. When its late answer has arrived, other groups can ask the store again."""
    own = rendezvous._SharedStore(rendezvous._connection(tcp_store, 60.0), "group/", 60.0)
    own.set("a", b"1")
    own.set("b", b"2")
    own.connection._error = "Timeout"
    with pytest.raises(RuntimeError, match="Timeout"):
        own.get("b")
    own.connection._socket.sendall(rendezvous._request(rendezvous._GET, [b"/group/a"], counts=False))
    wait_until(own.connection._unread)
    assert own.get("b") == b"2"


def test_a_store_with_other_requests_is_used_over_the_connection_of_torch(tcp_store, monkeypatch):
    """If torch's store does not understand the requests, as that of a later version might, torch's client is used."""
    monkeypatch.setattr(rendezvous, "_CHECK", 99)
    assert TorchRendezvous(dist.PrefixStore("group", tcp_store), 0, 1, 60.0).all_gather(b"1") == [b"1"]
    assert rendezvous._key(tcp_store) not in rendezvous._CONNECTIONS


def test_a_broken_connection_to_the_store_is_replaced(tcp_store):
    """The groups of a process share a connection to the store. If it fails, later calls on it fail, since an answer
    could be that to another call; the next group makes a new connection. The last group closes it."""
    shared = rendezvous._connection(tcp_store, 60.0)
    assert rendezvous._connection(tcp_store, 60.0) is shared
    shared._socket.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed at the other end"):
            rendezvous._SharedStore(shared, "", 60.0).check(["key"])
    other = rendezvous._connection(tcp_store, 60.0)
    assert rendezvous._SharedStore(other, "", 60.0).check(["key"]) is False
    opened = other._socket
    del other
    assert opened.fileno() < 0


def of_another_kind(rendezvous, place, sizes, backends):
    """Make the default group with this rank's own size and backend. Return the class and text of the error."""
    rank = rendezvous.rank
    store = store_at(place, rank, sizes[rank], 100)
    options = {
        "rank": rank,
        "world_size": sizes[rank],
        "timeout": timedelta(seconds=2 if backends[rank] == "gloo" else 60),
    }
    begun = Moment()
    try:
        dist.init_process_group(backends[rank], store=store, **options)
    except (ReductionError, RuntimeError) as error:
        return type(error), str(error), Moment().seconds_since(begun)


@pytest.mark.parametrize(
    ("sizes", "place"), [((2, 3), "file"), ((3, 2), "tcp"), ((3, 4, 3), "file"), ((3, 4, 3), "tcp")], indirect=["place"]
)
def test_ranks_with_different_sizes_learn_it_at_once(place, sizes):
    """If ranks have different world sizes, all of them soon raise a MismatchError that names two of them. Without it,
    the timeout would name ranks that do not exist."""
    found = ranks(len(sizes), of_another_kind, place, sizes, ["crossreduce"] * 3)
    assert len({(kind, text) for kind, text, _ in found}) == 1, found
    assert found[0][0] is MismatchError
    assert re.match(r"the group has [234] ranks on rank \d and [234] on rank \d\.\n", found[0][1])
    assert max(seconds for *_, seconds in found) < 10


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_a_rank_with_another_backend_is_named_at_once(place):
    """If a rank makes the group with gloo, the others soon raise a MismatchError that names it."""
    found = ranks(3, of_another_kind, place, (3, 3, 3), ("crossreduce", "gloo", "crossreduce"))
    for kind, text, seconds in (found[0], found[2]):
        assert kind is MismatchError
        assert text.startswith("not all ranks make the group with the same backend: gloo on rank 1.\n")
        assert seconds < 10


def test_a_rank_that_is_not_below_the_world_size():
    """torch does not check this: the others would wait for a rank that does not exist."""
    with pytest.raises(ArgumentError, match=r"must be below the world size\.\n.*rank 2, world size 2"):
        dist.init_process_group("crossreduce", store=dist.HashStore(), rank=2, world_size=2)


def other_members(rendezvous, place):
    begin(rendezvous, place, 60)
    own = rendezvous.rank
    raises = nullcontext() if own == 1 else pytest.raises(MismatchError, match="the group has other ranks on rank")
    with raises:
        dist.new_group([0, 1] if own == 0 else [0, 2])


@pytest.mark.parametrize("place", ["file", "tcp"], indirect=True)
def test_a_group_of_other_ranks_is_noticed(place):
    """If two ranks make groups of different ranks, both raise a MismatchError. Without it, they would be one group."""
    ranks(3, other_members, place)


def gloo_before(rendezvous, place):
    for backend in ("gloo", "crossreduce"):
        store = store_at(place, rendezvous.rank, 2, 100)
        time.sleep(1.5 * (backend == "crossreduce" and rendezvous.rank == 1))  # while rank 0 looks
        dist.init_process_group(backend, store=store, rank=rendezvous.rank, world_size=2)
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
    return x.item()


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_an_earlier_group_with_gloo_is_no_other_backend(place):
    """What an earlier group of the same name has left in the store is not mistaken for a rank with gloo."""
    assert ranks(2, gloo_before, place) == [2, 2]


def loses_the_store(member, place):
    begin(member, place, 30.0)
    dist.all_reduce(torch.ones(4))
    if member.rank == 0:
        time.sleep(0.2)
        dies(1)
    for call in (lambda: dist.all_reduce(torch.ones(4)), dist.new_group):
        with pytest.raises(PeerLostError, match="rank 0") as caught:
            call()
        assert caught.value.ranks == (0,)


@pytest.mark.parametrize("place", ["tcp of rank 0"], indirect=True)
@pytest.mark.parametrize("hosts", ["aaa", "abb"])
def test_no_stacks_are_printed_when_the_store_ends(place, hosts, capfd):
    """If the process that runs the store dies, the other ranks raise errors that name it, and do not use the store any
    more: torch would print the stacks of its C++ functions."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    found = ranks(3, loses_the_store, place, environment=environment, check=False)
    assert isinstance(found[0], Died)
    assert found[1:] == [None, None]
    assert "frame #" not in capfd.readouterr().err
