"""Every call about messages, on three hosts; storms of messages in which a rank is lost; and a host that vanishes."""

import itertools
import os
import random
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta

import namespaces
import pytest
import torch
import torch.distributed as dist
from budget import count
from kinds_of_groups import wait_until, wait_until_stopped
from ranks import Died, ranks

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce import ArgumentError, CollectiveTimeout, MismatchError, PeerLostError
from crossreduce.ranks.transports import tcp

SYSTEM = pytest.mark.system
SIZES = (0, 1, 100, 3000, 20_000, 300_000)
UCX = {"CROSSREDUCE_TRANSPORT": "ucx", "UCX_TLS": "tcp"}
NEEDS_HOSTS = pytest.mark.skipif(
    namespaces.available() is not None, reason=f"network namespaces: {namespaces.available()}"
)


def begin(rendezvous, where, timeout_s=30):
    torch.set_num_threads(1)
    rank, size, timeout = rendezvous.rank, rendezvous.size, timedelta(seconds=timeout_s)
    dist.init_process_group("crossreduce", where, rank=rank, world_size=size, timeout=timeout)
    return rank, size


def filled(size, rank, number):
    return torch.arange(size, dtype=torch.int32).add_(1000 * rank + number)


def every_call(rendezvous, where, holders):
    namespaces.enter(holders[rendezvous.rank])
    rank, n = begin(rendezvous, where)
    others, ordered = [peer for peer in range(n) if peer != rank], torch.empty(0)
    for number, size in enumerate(SIZES):
        # Tags in reverse order, and both directions at once.
        works = [dist.isend(filled(size, rank, tag), peer, tag=tag) for peer in others for tag in range(3)]
        for peer in others:
            for tag in (2, 0, 1):
                got = torch.zeros(size, dtype=torch.int32)
                assert dist.recv(got, peer, tag=tag) == peer
                assert torch.equal(got, filled(size, peer, tag))
        for work in works:
            assert work.wait()
        # From any rank, of this host and of others. A rank's messages come in their order.
        works = [dist.isend(filled(size, rank, k), peer, tag=9) for peer in others for k in range(2)]
        following = dict.fromkeys(others, 0)
        for _ in range(2 * len(others)):
            got = torch.zeros(size, dtype=torch.int32)
            src = dist.recv(got, tag=9)
            assert torch.equal(got, filled(size, src, following[src]))
            following[src] += 1
        for work in works:
            work.wait()
        ops = [dist.P2POp(dist.isend, filled(size, rank, number), peer) for peer in others]
        parts = [torch.zeros(size, dtype=torch.int32) for _ in others]
        for work in dist.batch_isend_irecv(
            ops + [dist.P2POp(dist.irecv, *pair) for pair in zip(parts, others, strict=True)]
        ):
            work.wait()
        assert all(torch.equal(part, filled(size, peer, number)) for part, peer in zip(parts, others, strict=True))
        # Ranks send different numbers of elements, and some none: gathers, and an all-to-all.
        lengths = [size * (peer % 2) + peer for peer in range(n)]
        ordered = [torch.zeros(each, dtype=torch.int32) for each in lengths]
        dist.all_gather(ordered, filled(lengths[rank], rank, number))
        assert all(torch.equal(part, filled(lengths[peer], peer, number)) for peer, part in enumerate(ordered))
        sent = [size if (rank, peer) in ((0, n - 1), (2, 1)) else 1 for peer in range(n)]
        received = [size if (peer, rank) in ((0, n - 1), (2, 1)) else 1 for peer in range(n)]
        result = torch.zeros(sum(received), dtype=torch.int32)
        dist.all_to_all_single(
            result, torch.cat([filled(each, rank, peer) for peer, each in enumerate(sent)]), received, sent
        )
        assert torch.equal(result, torch.cat([filled(each, peer, rank) for peer, each in enumerate(received)]))
    if rank == 0:
        dist.send_object_list([rank, "x" * 50_000], n - 1)
    elif rank == n - 1:
        objects = [None, None]
        dist.recv_object_list(objects, 0)
        assert objects == [0, "x" * 50_000]
    for size in (10, 100_000):
        if rank == 0:
            dist.send(torch.ones(size), n - 1, tag=5)
        elif rank == n - 1:
            with pytest.raises(MismatchError, match=r"rank 0 of group .* another size"):
                dist.recv(torch.ones(size + 1), 0, tag=5)
    with pytest.raises(ArgumentError, match="to itself"):
        dist.group.WORLD.send([torch.ones(1)], rank, 0)
    dist.barrier()
    assert dist.group.WORLD._collectives._gloo is None
    dist.send(torch.tensor([rank]), (rank + 1) % n, tag=6)  # arrives, although this rank leaves
    if rank % 2:
        time.sleep(0.5)
    got = torch.zeros(1, dtype=torch.int64)
    dist.recv(got, (rank - 1) % n, tag=6)
    assert got.item() == (rank - 1) % n
    return "done"


@SYSTEM
@NEEDS_HOSTS
@pytest.mark.parametrize("variables", [{}, UCX], ids=["tcp", "ucx"])
def test_every_message_call_on_three_hosts(tmp_path, monkeypatch, variables):
    """All calls about messages, of ranks of one host and of others, give what they give on one host, without gloo."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with namespaces.hosts(3) as bed:
        holders = [bed.holders[host].pid for host in (0, 0, 1, 2)]
        hosts = [{"CROSSREDUCE_HOST": host, "CROSSREDUCE_IFNAME": "link"} for host in "aabc"]
        where = f"file://{tmp_path}/store"
        assert ranks(4, every_call, where, holders, environment=hosts, timeout_s=100) == ["done"] * 4


def exchange_at_random(rank, n, draw):
    for step in itertools.count():
        size, shift, any_source, kind = draw.choice(SIZES), draw.randrange(1, n), draw.random() < 0.3, draw.random()
        to, source = (rank + shift) % n, (rank - shift) % n
        if kind < 0.1:  # parts of very different sizes
            sent, received = (
                [30_000 * (peer == to) for peer in range(n)],
                [30_000 * (peer == source) for peer in range(n)],
            )
            result = torch.zeros(30_000, dtype=torch.int32)
            dist.all_to_all_single(result, filled(30_000, rank, step), received, sent)
            assert torch.equal(result, filled(30_000, source, step))
            continue
        burst = 20 if kind < 0.3 and size < 3000 else 1
        works = [dist.isend(filled(size, rank, step), to, tag=step) for _ in range(burst)]
        for _ in range(burst):
            got = torch.zeros(size, dtype=torch.int32)
            assert dist.recv(got, None if any_source else source, tag=step) == source
            assert torch.equal(got, filled(size, source, step))
        for work in works:
            work.wait()


def exchange_parts(rank, n, draw):
    """Make all-to-alls of unequal parts: small and padded ones, and very unequal ones, which are messages."""
    for step in itertools.count():
        most, few = draw.choice([10, 3000, 40_000]), draw.random() < 0.5
        rows = [[draw.choice([0, 1, 1 if few else most, most]) for _ in range(n)] for _ in range(n)]
        received, total = [row[rank] for row in rows], sum(rows[rank])
        result = torch.zeros(sum(received), dtype=torch.int32)
        dist.all_to_all_single(result, filled(total, rank, step), received, rows[rank])
        starts = [sum(row[:rank]) for row in rows]
        parts = [
            filled(sum(row), peer, step)[at : at + row[rank]]
            for peer, (row, at) in enumerate(zip(rows, starts, strict=True))
        ]
        assert torch.equal(result, torch.cat(parts))


def storm(rendezvous, folder, seed, exchange):
    """Exchange data until another rank is lost. Return the error's ranks and text."""
    rank, n = begin(rendezvous, f"file://{folder}/store", timeout_s=40)
    (folder / f"ready{rank}").touch()
    with pytest.raises(PeerLostError) as caught:
        exchange(rank, n, random.Random(seed))
    (folder / f"raised{rank}").touch()
    if exchange is exchange_parts:  # a rank that ends would be lost, too
        wait_until(lambda: all((folder / f"raised{other}").exists() for other in range(n)))
    return caught.value.ranks, str(caught.value)


def lost_in_a_storm(folder, seed, exchange, variables, longest_s):
    """Kill a rank at a random moment. Return its number, and what the others return."""
    draw = random.Random(seed)
    hosts = draw.choice(["aab", "abb", "abc", "aabb", "abcd"])
    n, victim = len(hosts), draw.randrange(len(hosts))

    def fail(pids):
        wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in range(n)))
        time.sleep(longest_s * draw.random())
        os.kill(pids[victim], signal.SIGKILL)
        (folder / f"raised{victim}").touch()

    environment = [{"CROSSREDUCE_HOST": host, **variables} for host in hosts]
    found = ranks(n, storm, folder, seed, exchange, environment=environment, check=False, begun=fail)
    assert isinstance(found[victim], Died)
    errors = [one for rank, one in enumerate(found) if rank != victim]
    assert all(isinstance(one, tuple) for one in errors), (seed, hosts, victim, errors)
    return victim, errors


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[SYSTEM] * (k > 1)) for k in range(count(20))])
def test_a_rank_is_lost_in_a_storm_of_messages(tmp_path, seed):
    """If a rank is killed while all ranks exchange messages, the others raise an error, none by its timeout. An error
    names the lost rank, or a rank that has raised its error, and then left. No message has wrong contents."""
    victim, errors = lost_in_a_storm(tmp_path, seed, exchange_at_random, UCX if seed % 2 else {}, 1.0)
    assert any(victim in lost for lost, _ in errors), (seed, errors)


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[SYSTEM] * (k > 1)) for k in range(count(20))])
def test_a_rank_is_lost_in_unequal_all_to_alls(tmp_path, seed):
    """If a rank is killed, also at the first call, all others raise an error that names it, long before the timeout."""
    victim, errors = lost_in_a_storm(tmp_path, seed, exchange_parts, UCX if seed % 2 else {}, 0.1)
    assert [lost for lost, _ in errors] == [(victim,)] * len(errors), (seed, errors)


def end_while_sending(rendezvous, folder):
    """Rank 1 offers a large message, and stops. Rank 0 receives it from any rank, and ends rank 1 meanwhile."""
    rank, _ = begin(rendezvous, f"file://{folder}/store", timeout_s=15)
    process = torch.tensor([os.getpid()])
    if rank == 1:
        dist.send(process, 0)
        dist.isend(torch.ones(1 << 20), 0, tag=1)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.recv(process, 1)
    wait_until_stopped(process.item())
    threading.Timer(0.5, os.kill, (process.item(), signal.SIGKILL)).start()
    with pytest.raises(PeerLostError) as caught:
        dist.recv(torch.zeros(1 << 20), tag=1)
    return caught.value.ranks


def test_a_receive_from_any_rank_notices_the_end_of_the_rank_that_has_begun_to_send(tmp_path):
    """It raises the same error as a receive from this rank, not that of the timeout."""
    environment = [{"CROSSREDUCE_HOST": host} for host in "ab"]
    found = ranks(2, end_while_sending, tmp_path, environment=environment, check=False)
    assert isinstance(found[1], Died)
    assert found[0] == (1,)


def records_at_once(rendezvous, folder):
    """Rank 1 is stopped until a small message and the offer of a large one have arrived. Then it waits for neither
    until rank 0 has sent both. Return how long rank 0 waits for this."""
    rank, _ = begin(rendezvous, f"file://{folder}/store")
    process, took = torch.tensor([os.getpid()]), []
    dist.send(process, 0) if rank == 1 else dist.recv(process, 1)
    for k in range(4):
        parts = [torch.zeros(10), torch.zeros(300_000)]
        dist.barrier()
        if rank == 1:
            works = [dist.irecv(part, 0, tag=tag) for tag, part in enumerate(parts)]
            wait_until((folder / f"sent{k}").exists)
            for work in works:
                work.wait()
            assert all((part == 1).all() for part in parts)
            continue
        time.sleep(0.2)  # rank 1's helper sleeps at its sockets
        os.kill(process.item(), signal.SIGSTOP)
        wait_until_stopped(process.item())
        works = [dist.isend(part + 1, 1, tag=tag) for tag, part in enumerate(parts)]
        time.sleep(0.05)
        began = time.monotonic()
        os.kill(process.item(), signal.SIGCONT)
        for work in works:
            work.wait()
        took.append(time.monotonic() - began)
        (folder / f"sent{k}").touch()
    return took


def test_records_that_were_read_together_are_all_handled(tmp_path):
    """A rank that computes handles all records that have arrived, also if no socket has more to read. Otherwise it
    handles the second one only after the longest sleep of its helper, 1 s."""
    found = ranks(2, records_at_once, tmp_path, environment=[{"CROSSREDUCE_HOST": host} for host in "ab"])
    assert min(found[0]) < 0.9


def send_forever(x):
    while True:
        dist.send(x, 1)
        time.sleep(0.01)


def beside_a_silent_host(rendezvous, where, bed):
    namespaces.enter(bed.holders[rendezvous.rank].pid)
    tcp._SILENT_S = 3.0
    rank, _ = begin(rendezvous, where, timeout_s=60)
    x = torch.ones(1000)
    if rank == 1:
        dist.recv(x, 0)
        with suppress(CollectiveTimeout, PeerLostError):
            dist.recv(x, 0, tag=7)
        return None
    dist.send(x, 1)
    bed.isolate(1)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="its host has not answered for 3 s") as error:
        send_forever(x)
    return error.value.ranks, time.monotonic() - began < 30


@SYSTEM
@NEEDS_HOSTS
def test_messages_notice_that_a_host_vanishes(tmp_path):
    """If a host does not answer any more, a send to it raises a PeerLostError long before the timeout."""
    with namespaces.hosts(2) as bed:
        found = ranks(2, beside_a_silent_host, f"file://{tmp_path}/store", bed, check=False, timeout_s=100)
    assert found[0] == ((1,), True)
