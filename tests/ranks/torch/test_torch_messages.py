"""Messages on one host and between hosts: order, tags, sizes, threads, and ranks that compute, end or are late."""

import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kinds_of_groups import PLACES, ranks_at, wait_until
from ranks import Moment

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce import ArgumentError, CollectiveTimeout, MismatchError, PeerLostError
from crossreduce.errors import ContextError
from crossreduce.ranks.intra_host import shared_memory

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex128, torch.uint8)
SIZES = (0, 1, 3, 64, 1000, 5000, 30_001, 1 << 17)
TAGS = 3
EVERYWHERE = pytest.mark.parametrize("place", PLACES)
OF_TWO = pytest.mark.parametrize("place", [place for place in PLACES if place != "three_hosts"])


def ways(place, count):
    """Return values of ``reads`` (see ``join``): both if two of the first ``count`` ranks are on one host."""
    hosts = PLACES[place][0][:count]
    return (True, False) if len({*hosts}) < count else (True,)


def join(rendezvous, store, reads=True, timeout_s=60):
    """Make the group of all ranks. ``reads``: whether receivers read large messages from the sender's process."""
    shared_memory.READS_PEERS = reads
    torch.set_num_threads(1)  # a forked process has no other threads of torch's pool
    rank, size, timeout = rendezvous.rank, rendezvous.size, timedelta(seconds=timeout_s)
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    return dist.group.WORLD


def message(src, dst, number):
    """Return message ``number`` from one rank to another, the same on both, with any dtype, size and strides."""
    draw = random.Random(src * 1000 + dst * 100 + number)
    size, dtype = draw.choice(SIZES), draw.choice(DTYPES)
    made = torch.arange(2 * size).mul(7 + number).add(31 * src + dst).remainder(251).to(dtype).reshape(2, size)
    return draw.choice([lambda: made[0], lambda: made.T, lambda: made[:, ::3], lambda: made.clone()])()


def like(tensor, draw):
    """Return a tensor that can receive a message like ``tensor``. It may have other strides."""
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0] if draw.random() < 0.4 else made


def exchanges(rendezvous, store, reads):
    group = join(rendezvous, store, reads)
    rank, size, draw = rendezvous.rank, rendezvous.size, random.Random(rendezvous.rank)
    others, count = [peer for peer in range(size) if peer != rank], 30
    # The messages of each pair and tag are begun in their order. The order is random otherwise, also that of waits.
    kinds = itertools.product(others, range(TAGS), (True, False))
    queues = [[(peer, k, sends) for k in range(tag, count, TAGS)] for peer, tag, sends in kinds]
    works = []
    while queues := [each for each in queues if each]:
        peer, k, sends = draw.choice(queues).pop(0)
        want = message(rank, peer, k) if sends else message(peer, rank, k)
        got = None if sends else like(want, draw)
        work = dist.isend(want, peer, tag=k % TAGS) if sends else dist.irecv(got, peer, tag=k % TAGS)
        works.append((work, got, want))
        if draw.random() < 0.3:
            works[draw.randrange(len(works))][0].is_completed()
    draw.shuffle(works)
    for work, got, want in works:
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert got is None or torch.equal(got, want)

    # Blocking calls in one thread per pair and direction, at the same time as receives from any rank.
    def send_all(peer):
        for k in range(count):
            dist.send(message(rank, peer, k), peer, tag=10)
            dist.send(torch.tensor([rank, k]), peer, tag=11)

    def receive_all(peer):
        for k in range(count):
            want = message(peer, rank, k)
            got = torch.zeros(want.shape, dtype=want.dtype)
            assert dist.recv(got, peer, tag=10) == peer
            assert torch.equal(got, want)

    def receive_any():
        following = dict.fromkeys(others, 0)
        for _ in range(count * len(others)):
            got = torch.zeros(2, dtype=torch.int64)
            src = dist.recv(got, tag=11)
            assert got.tolist() == [src, following[src]]
            following[src] += 1

    with ThreadPoolExecutor(2 * size) as pool:
        futures = [pool.submit(each, peer) for each in (send_all, receive_all) for peer in others]
        for future in [*futures, pool.submit(receive_any)]:
            future.result()
    large = torch.arange(1 << 22, dtype=torch.int32)  # 16 MiB, both ways at once
    if rank < 2:
        got = torch.zeros_like(large)
        ops = [dist.P2POp(dist.isend, large, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(got, large)
    assert group._collectives._gloo is None
    dist.destroy_process_group()


@pytest.mark.parametrize(("place", "reads"), [*((place, True) for place in PLACES), ("one_host", False)])
def test_messages_are_received_in_order_by_tag_and_source(tmp_path, place, reads):
    """The messages of each pair of ranks and tag are received in their order; others may be received in any order. They
    may have any size, dtype and strides, in any thread, whether or not ranks may read each other's memory."""
    ranks_at(place, 3, exchanges, tmp_path / "store", reads)


def without_waits(rendezvous, store):
    rank, other = rendezvous.rank, 1 - rendezvous.rank
    join(rendezvous, store)
    for reads in (True, False):
        shared_memory.READS_PEERS = reads
        group = dist.new_group()
        big, got = torch.full((1 << 20,), 2.0 + rank), torch.zeros(1 << 20)
        # A send completes while the receiver, which has begun its receive, is in a collective.
        if rank:
            work = dist.irecv(got, 0, group)
            dist.barrier(group)
            work.wait()
            assert torch.equal(got, big - 1)
        else:
            dist.send(big, 1, group)
            dist.barrier(group)
        # More messages than a ring contains, to a rank that receives them later.
        parts = [torch.full((100,), float(k)) for k in range(1500)]
        if rank:
            works = [dist.isend(part, 0, group) for part in parts]
            dist.barrier(group)
            dist.barrier(group)
            assert all(work.is_completed() for work in works)
        else:
            dist.barrier(group)
            for k, part in enumerate(parts):
                dist.recv(got[:100], 1, group)
                assert torch.equal(got[:100], part), k
            dist.barrier(group)
        # Polling alone completes messages.
        works = [dist.isend(big, other, group), dist.irecv(got, other, group)]
        wait_until(lambda works=works: all([work.is_completed() for work in works]))  # noqa: C419 - each makes progress
        assert torch.equal(got, torch.full_like(got, 2.0 + other))
        # A message arrives even if its work was dropped. Then its memory is released.
        dropped = torch.full((1 << 20,), 5.0 + rank)
        alive = weakref.ref(dropped)
        dist.isend(dropped, other, group)
        del dropped
        gc.collect()
        dist.barrier(group)
        assert alive() is not None
        dist.recv(got, other, group)
        assert torch.equal(got, torch.full_like(got, 5.0 + other))
        dist.barrier(group)
        later = dist.irecv(got, other, group, tag=5)
        while alive() is not None:  # any later call about messages releases it
            assert not later.is_completed()
        dist.barrier(group)
        dist.destroy_process_group(group)
    dist.destroy_process_group()


@OF_TWO
def test_messages_need_no_wait_of_the_other_rank(tmp_path, place):
    """When both ranks have begun a message, it completes although the other rank is in a collective or only polls. A
    send completes even if its work was dropped."""
    ranks_at(place, 2, without_waits, tmp_path / "store")


def refused(rendezvous, store):
    rank = rendezvous.rank
    group = join(rendezvous, store)
    for size in (3, 100_000):
        x = torch.zeros(size)
        if rank:
            dist.send(torch.ones(size), 0)
            dist.send(torch.full((size,), 2.0), 0)
        else:
            for wrong in (size - 1, size + 1):
                y = torch.zeros(wrong)
                work = dist.irecv(y, *([1] if wrong < size else []))
                given = rf"rank 1 of group .* another size[\s\S]*of {4 * size} bytes for a tensor of {4 * wrong} bytes"
                for _ in range(2):
                    with pytest.raises(MismatchError, match=given):
                        work.wait()
                assert work.is_completed()
                assert not work.is_success()
                assert isinstance(work.exception(), MismatchError)
                assert not y.any()
        dist.barrier()
        if rank:
            dist.send(torch.full((size,), 3.0), 0)
        else:
            assert dist.recv(x, 1) == 1
            assert torch.equal(x, torch.full((size,), 3.0))
    with pytest.raises(ArgumentError, match="to itself"):
        group.send([torch.ones(1)], rank, 0)
    with pytest.raises(ArgumentError, match="single tensor"):
        group.send([torch.ones(1)] * 2, 1 - rank, 0)
    with pytest.raises(ArgumentError, match="at least 0"):
        group.recv([torch.ones(1)], 1 - rank, -1)
    works = [dist.irecv(torch.zeros(3), 1 - rank, tag=8), dist.isend(torch.zeros(1 << 20), 1 - rank, tag=9)]
    late = dist.irecv(torch.zeros(3), 1 - rank, tag=10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(late.wait)
        time.sleep(0.2)
        dist.barrier()
        dist.destroy_process_group()
        assert isinstance(waiting.exception(100), (ContextError, PeerLostError))
    for work in works:
        with pytest.raises(ContextError, match="destroyed"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()


@OF_TWO
def test_messages_that_cannot_be_received_raise(tmp_path, place):
    """A message of another size than the tensor raises a MismatchError and is dropped; the next message is received.
    Messages to oneself and of several tensors raise errors. Pending messages of a destroyed group fail."""
    ranks_at(place, 2, refused, tmp_path / "store")


def ends(rendezvous, store, reads):
    rank = rendezvous.rank
    join(rendezvous, store, reads)
    x = torch.arange(1 << 22, dtype=torch.float32)
    if rank == 1:
        dist.send(torch.tensor([5.0]), 0, tag=1)
        dist.isend(x, 0)
        dist.isend(x, 2)
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGKILL)
    got = torch.zeros(1 << 22)
    for _ in range(40):  # the sender dies during one of these, or before it
        try:
            dist.recv(got, 1)
        except PeerLostError as error:
            assert error.ranks == (1,)  # noqa: PT017 - instead of an error, the message may arrive
            break
        assert torch.equal(got, x)
        got.zero_()
    small = torch.zeros(1)
    if rank == 0:
        assert dist.recv(small, 1, tag=1) == 1  # it was sent before the rank died
        assert small.item() == 5
    begun = Moment()
    with pytest.raises(PeerLostError, match=r"rank 1 died; rank \d was in send to rank 1") as error:
        dist.send(small, 1)
    assert error.value.ranks == (1,)
    assert Moment().seconds_since(begun) < 2
    dist.send(small, 2 - rank, tag=7)
    pair = torch.zeros(10)  # the others can still exchange messages
    work = dist.isend(torch.full((10,), float(rank)), 2 - rank)
    dist.recv(pair, 2 - rank)
    work.wait()
    assert torch.equal(pair, torch.full((10,), 2.0 - rank))
    assert dist.recv(small, tag=7) == 2 - rank  # also from any rank, if they have arrived
    for _ in range(2):  # else the message of any rank may be that of the dead one
        with pytest.raises(PeerLostError, match=r"rank 1 died; rank \d was in recv from any rank") as error:
            dist.recv(small)
        assert error.value.ranks == (1,)
    dist.destroy_process_group()  # a plug-in loses what it has not yet passed on if a process exits without leaving
    return "done"


@EVERYWHERE
def test_a_death_loses_only_messages_that_were_not_read(tmp_path, place):
    """A small message arrives even if its sender has died after sending it. Other messages from and to that rank raise
    a PeerLostError that names it. Messages between other ranks are not affected."""
    for reads in ways(place, 3):
        found = ranks_at(place, 3, ends, tmp_path / f"store{reads}", reads, check=False)
        assert [found[0], found[2]] == ["done"] * 2, found


def leaves(rendezvous, folder):
    rank = rendezvous.rank
    join(rendezvous, folder / "store")
    x = torch.zeros(1)
    if rank:
        if rank == 2:
            wait_until((folder / "waits").exists)
            time.sleep(0.3)
            dist.send(x, 0)
        dist.destroy_process_group()
        return
    work = dist.irecv(x)
    assert not work.is_completed()
    (folder / "waits").touch()
    work.wait()
    with pytest.raises(PeerLostError, match=r"rank [12] left; rank 0 was in recv from any rank"):
        dist.recv(x)


@EVERYWHERE
def test_a_receive_from_any_rank_waits_for_ranks_that_are_left(tmp_path, place):
    """If a rank has left the group, a receive from any rank waits for the others. If all have left, it fails."""
    ranks_at(place, 3, leaves, tmp_path, timeout_s=60)


def full_rings(rendezvous, store):
    rank = rendezvous.rank
    join(rendezvous, store)
    for size in (1 << 20, 100):  # of the receiver's tensor; the message has 1 << 20 elements
        for stays in (True, False):
            group = dist.new_group()
            if rank == 0:
                work = dist.isend(torch.ones(1 << 20), 1, group, tag=9)
                time.sleep(0.3)
                assert work.wait()
            else:
                time.sleep(0.1)
                for _ in range(16):  # fill the ring, so that it has no room for the reply that the message was read
                    dist.send(torch.ones(4064, dtype=torch.uint8), 0, group)
                got = torch.zeros(size)
                with nullcontext() if size == 1 << 20 else pytest.raises(MismatchError, match="bytes"):
                    dist.recv(got, 0, group, tag=9)
                assert got.eq(1).all() == (size == 1 << 20)
            if stays:
                dist.barrier(group)
            dist.destroy_process_group(group)
    dist.destroy_process_group()


@OF_TWO
def test_a_full_ring_does_not_hold_back_the_end_of_a_message(tmp_path, place):
    """A send completes even if the receiver's ring to the sender is full, and the receiver then is in a collective or
    leaves. This holds for messages of the right and of another size."""
    ranks_at(place, 2, full_rings, tmp_path / "store")


def modified(rendezvous, store, reads):
    rank = rendezvous.rank
    join(rendezvous, store, reads)

    def interrupt(*_):
        raise KeyboardInterrupt("by the test")

    signal.signal(signal.SIGALRM, interrupt)
    for interrupted in (True, False):
        group = dist.new_group()
        x, got = torch.ones(1 << 20), torch.zeros(1 << 20)
        if rank == 0:
            if interrupted:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(KeyboardInterrupt, match="by the test"):
                    dist.send(x, 1, group)
            else:
                with pytest.raises(CollectiveTimeout, match="within its timeout"):
                    dist.isend(x, 1, group).wait(timedelta(seconds=0.2))
            x.fill_(7)
        dist.barrier()
        begun = Moment()
        if rank:
            # The native receive, which does not check the group, must not read the failed message either.
            native = group._messages._native
            number = native.receive(0, 0, got.data_ptr(), got.nbytes, got)
            assert native.wait(number, 0.3) == -1
            with pytest.raises(PeerLostError, match="rank 0"):
                dist.recv(got, 0, group)
            dist.barrier()
        else:
            error = PeerLostError if interrupted else CollectiveTimeout
            for peer in (1, None):
                with pytest.raises(error, match="group "):
                    dist.recv(got, peer, group)
            assert Moment().seconds_since(begun) < 2
            dist.barrier()  # the sender's memory is valid until here
    dist.destroy_process_group()


@OF_TWO
def test_a_tensor_is_not_received_after_its_send_failed(tmp_path, place):
    """If a send ended by Ctrl-C or a timeout, so that its caller may change the tensor, a receive that begins later
    raises a PeerLostError. All receives of the sender, also those from any rank, fail at once."""
    for reads in ways(place, 2):
        ranks_at(place, 2, modified, tmp_path / f"store{reads}", reads)


def releases(rendezvous, store):
    rank, other = rendezvous.rank, 1 - rendezvous.rank
    group = join(rendezvous, store)
    gc.disable()  # the works and errors are in no cycle
    for size in (4, 100_000):  # of messages of another size
        if rank:
            dist.send(torch.ones(size), 0)
        else:
            wrong = torch.zeros(size + 1)
            alive = weakref.ref(wrong)
            with pytest.raises(MismatchError, match="message"):
                dist.irecv(wrong, 1).wait()
            del wrong
            assert alive() is None
    received = dist.irecv(torch.zeros(1), other, tag=5)
    # Fork a process while a thread holds the lock under which a message is finished.
    dist.send(torch.ones(1), other, tag=5)
    held, over = threading.Event(), threading.Event()

    def hold():
        with received._finishing:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        try:
            received.wait()
        except ContextError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    over.set()
    thread.join()
    assert received.wait()
    dist.barrier()
    messages = group._messages
    dist.destroy_process_group()
    messages.forget(1)  # does nothing, without an error


@OF_TWO
def test_tensors_of_ended_messages_are_released(tmp_path, place):
    """After a message of another size, the receiver's tensor is released. In a forked process, ``wait`` raises an error
    instead of waiting for a lock of the parent's threads."""
    ranks_at(place, 2, releases, tmp_path / "store")


def after_a_timeout(rendezvous, store):
    rank = rendezvous.rank
    join(rendezvous, store, timeout_s=60)
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match="within its timeout"):
            dist.irecv(torch.zeros(1), 1, tag=3).wait(timedelta(seconds=0.2))
    sent, received = ([0, 40_000], [0, 0]) if rank == 0 else ([0, 0], [40_000, 0])
    begun = Moment()
    with pytest.raises((CollectiveTimeout, PeerLostError), match="all_to_all"):
        dist.all_to_all_single(torch.zeros(sum(received)), torch.ones(sum(sent)), received, sent)
    assert Moment().seconds_since(begun) < 20


@pytest.mark.parametrize("place", ["two_hosts", "ucx"])
def test_a_collective_of_messages_fails_on_all_ranks(tmp_path, place):
    """If a rank can exchange no more messages, an all-to-all of very unequal parts raises an error on all ranks at
    once, long before the timeout."""
    ranks_at(place, 2, after_a_timeout, tmp_path / "store")
