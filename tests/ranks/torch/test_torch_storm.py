"""Ranks of the torch backend fail: inside a collective, while others wait for a message, and at random moments."""

import itertools
import json
import os
import random
import re
import signal
import sys
import time
import warnings
from datetime import timedelta
from types import SimpleNamespace

import namespaces
import pytest
import torch
import torch.distributed as dist
from budget import count
from free_port import free_port
from kinds_of_groups import wait_until
from ranks import Died, Moment, ranks

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce import ArgumentError, CollectiveTimeout, PeerLostError
from crossreduce.errors import encoded

TIMEOUT_S = 3.0
STOPPED_S = 1.5  # the timeout if a rank is stopped inside a collective
# The signals that make a rank fail. For SIGUSR1 see ``begin``.
FAILURES = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
FAILURES |= {"exit": signal.SIGUSR1, "exception": signal.SIGUSR1}
SIZES = (1, 300, 20_000, 600_000)
SYSTEM = pytest.mark.system


def begin(rendezvous, where, how, timeout_s):
    """Make the default group. On SIGUSR1 this rank will exit (``how`` is "exit") or raise an error."""

    def fail(*_):
        if how == "exit":
            sys.exit(5)
        raise ArithmeticError("a failure of the program")

    signal.signal(signal.SIGUSR1, fail)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's warnings about functions that have newer names
    rank, size, timeout = rendezvous.rank, rendezvous.size, timedelta(seconds=timeout_s)
    dist.init_process_group("crossreduce", where, rank=rank, world_size=size, timeout=timeout)


def kill_when_raised(folder, victim, others):
    """Return a function that kills the stopped rank ``victim`` when the others have raised their errors."""

    def kill(pids):
        wait_until(lambda: all((folder / f"raised{rank}").exists() for rank in others))
        os.kill(pids[victim], signal.SIGKILL)

    return kill


def fails_inside(rendezvous, folder, how, carrier):
    """Make a collective in which rank 2, alone on its host, fails. Return class, text and ranks of the error, and the
    seconds until it was raised. ``carrier``: "gloo" or "crossreduce", which executes the collective."""
    rank, size = rendezvous.rank, rendezvous.size
    begin(rendezvous, f"file://{folder}/store", how, STOPPED_S if how == "stop" else 20)
    group = dist.group.WORLD

    def fail(*_):
        signal.raise_signal(FAILURES[how])
        time.sleep(20)  # this process ends

    parts = [torch.ones(10) for _ in range(size)]
    dist.all_gather(parts, parts[rank])
    if carrier == "gloo":
        dist.all_reduce(torch.ones(10).to_sparse())  # makes gloo's group
    if rank == 2 and carrier == "gloo":
        group._collectives._gloo = SimpleNamespace(allreduce=fail, size=lambda: 1)
    elif rank == 2:
        group.communicator.transport._transport.send = fail
    began = Moment()
    try:
        if carrier == "gloo":  # the library has no sums of sparse tensors
            dist.all_reduce(torch.ones(10).to_sparse())
        else:
            dist.all_reduce(torch.ones(1 << 20))  # it is exact, since compiled calls would not call ``fail``
    except (CollectiveTimeout, PeerLostError) as error:
        took = Moment().seconds_since(began)
        with pytest.raises(type(error), match=re.escape(str(error))):
            dist.barrier()
        (folder / f"raised{rank}").touch()
        return type(error), str(error), error.ranks, took


QUICK = ("kill", "crossreduce"), ("stop", "crossreduce"), ("kill", "gloo")


@pytest.mark.parametrize(
    ("how", "carrier"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [SYSTEM])
        for case in itertools.product(FAILURES, ("crossreduce", "gloo"))
    ],
)
def test_a_rank_that_fails_inside_a_collective_is_named(tmp_path, how, carrier):
    """If a rank fails inside a collective between hosts, in any way and with any carrier, all others raise the same
    error, which names the rank. After its death they do so at once, and after a stop soon after the timeout.

    A process that exits by itself, or by an exception, dies some time later.
    """
    environment = [{"CROSSREDUCE_HOST": host, "CROSSREDUCE_EXACT": str(int(carrier != "gloo"))} for host in "aab"]
    stopped = how == "stop"
    begun = kill_when_raised(tmp_path, 2, (0, 1)) if stopped else None
    found = ranks(3, fails_inside, tmp_path, how, carrier, environment=environment, check=False, begun=begun)
    assert isinstance(found[2], {"exit": SystemExit, "exception": ArithmeticError}.get(how, Died)), found[2]
    (kind, text, lost, *_), _, _ = found
    assert [one[:3] for one in found[:2]] == [(kind, text, lost)] * 2
    assert (kind, lost) == (CollectiveTimeout if stopped else PeerLostError, (2,)), text
    begins = "rank 2 did not complete op " if stopped else "rank 2 (died|was interrupted) during op "
    assert re.match(begins, text), text
    limit_s = {"stop": STOPPED_S + 4, "exit": 10, "exception": 10}.get(how, 4)
    assert max(one[3] for one in found[:2]) < limit_s, [one[3] for one in found[:2]]


def leaves(rendezvous, place, victim):
    """Make two all-reduces. The rank ``victim`` destroys its group before the second one. Return the ranks of the
    error, and how it states that the rank was lost."""
    rank, size = rendezvous.rank, rendezvous.size
    dist.init_process_group("crossreduce", place, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    x = torch.ones(10)
    dist.all_reduce(x)
    if rank == victim:
        time.sleep(0.3)  # the others wait for this rank
        dist.destroy_process_group()
        return None
    with pytest.raises(PeerLostError, match=f"rank {victim} ") as error:
        dist.all_reduce(x)
    return error.value.ranks, re.match("rank [0-9] (.*) during op 2", str(error.value))[1]


@pytest.mark.parametrize(
    ("store", "victim"), [("tcp", 0), *(pytest.param("file", each, marks=SYSTEM) for each in (0, 2))]
)
def test_a_rank_that_leaves_is_not_said_to_have_died(tmp_path, store, victim):
    """If a rank destroys its group while others wait for it, the errors on all hosts state that it left, even if the
    store has ended with it."""
    place = f"file://{tmp_path}/store" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
    environment = [{"CROSSREDUCE_HOST": host} for host in "aab"]
    found = ranks(3, leaves, place, victim, environment=environment)
    expected = [((victim,), "left")] * 3
    expected[victim] = None
    assert found == expected


def lost_in_a_message(rendezvous, store, how):
    """Lose rank 2 in a group of ranks 1 and 2. Return the class, ranks and first line of rank 1's errors."""
    rank, size = rendezvous.rank, rendezvous.size
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=size)
    group = dist.new_group([1, 2], timeout=timedelta(seconds=1 if how == "late" else 20))
    if rank == 2:
        time.sleep(0.3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "leave":
            dist.destroy_process_group()
        elif how == "interrupt":
            group.communicator.interrupt()
        else:  # rank 1 closes its connections after its timeout, so that other ranks may take it for dead
            group.communicator.rendezvous.publish_abort(encoded(PeerLostError("rank 1 died.", [1])))
        time.sleep(3)
    if rank != 1:
        return None
    x, found = torch.empty(1 << 22), []  # torch.ones would use threads, which crash in a forked process
    for wait in (
        lambda: dist.recv(x, 2, group),
        dist.isend(x, 2, group).wait,
        lambda: dist.send(x, 2, group),
        dist.irecv(x, group=group).wait if how == "late" else dist.irecv(x, 2, group).wait,
    ):
        with pytest.raises((CollectiveTimeout, PeerLostError), match=r"rank 2|any rank") as error:
            wait()
        assert isinstance(error.value, RuntimeError)
        found.append((type(error.value), error.value.ranks, str(error.value).split("\n")[0]))
    with pytest.raises(ArgumentError, match="tag of a message"):
        dist.send(x, 2, group, tag=-1)
    with pytest.raises(ArgumentError, match=r"of a send is not a rank of the group[\s\S]*given: 7"):
        dist.send(x, 7)
    return found


@pytest.mark.parametrize(
    ("how", "hosts"),
    [("kill", "aaa"), ("late", "aab"), ("interrupt", "aaa"), ("leave", "aab")]
    + [pytest.param(how, "aab", marks=SYSTEM) for how in ("kill", "interrupt")]
    + [pytest.param(how, "aaa", marks=SYSTEM) for how in ("late", "leave")],
)
def test_a_message_to_or_from_a_lost_rank_names_it(tmp_path, hosts, how):
    """If the other rank was lost, send, recv, isend and irecv raise a PeerLostError with its number in the world. If it
    is late, they raise a CollectiveTimeout. Both are RuntimeErrors, like gloo's errors."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    _, found, _ = ranks(3, lost_in_a_message, tmp_path / "store", how, environment=environment, check=False)
    if how == "late":
        late = "did not complete within its timeout."
        assert [one[:2] for one in found] == [(CollectiveTimeout, (2,)), *[(CollectiveTimeout, ())] * 3]
        assert re.match(f'recv from rank 2, of group ".*", {late}', found[0][2])
        assert re.match('send to rank 2, of group ".*", failed, since an earlier message timed out.', found[2][2])
        text = "failed, since an earlier message timed out."
        assert re.match(f'recv from any rank, of group ".*", {text}', found[3][2])
        return
    words = {"leave": "left", "interrupt": "was interrupted while it waited for a message of", "kill": "died"}
    assert [one[:2] for one in found] == [(PeerLostError, (2,))] * 4
    for (*_, text), call in zip(found, ["recv from", "send to", "send to", "recv from"], strict=True):
        during = "" if how == "interrupt" else f"; rank 1 was in {call} rank 2, of"
        assert re.match(f'rank 2 {words[how]}{during} group ".*"', text), text


def random_call(draw, rank, n):
    """Make one random collective, the same on all ranks."""
    size, root, asynchronous = draw.choice(SIZES), draw.randrange(n), draw.random() < 0.3
    x, parts = torch.ones(size), [torch.ones(size) for _ in range(n)]
    whole, band, sparse = torch.ones(n * size), torch.ones(size, dtype=torch.int32), torch.ones(size).to_sparse()
    mine = root == rank
    calls = [
        lambda **how: dist.all_reduce(x, **how),
        lambda **how: dist.reduce(x, root, **how),
        lambda **how: dist.broadcast(x, root, **how),
        lambda **how: dist.barrier(**how),
        lambda **how: dist.all_reduce(band, dist.ReduceOp.BAND, **how),
        lambda **how: dist.all_reduce(sparse, **how),
        lambda **how: dist.all_gather(parts, x, **how),
        lambda **how: dist.all_gather_into_tensor(whole, x, **how),
        lambda **how: dist.reduce_scatter_tensor(x, whole, **how),
        lambda **how: dist.gather(x, parts if mine else None, root, **how),
        lambda **how: dist.scatter(x, parts if mine else None, root, **how),
        lambda **how: dist.all_to_all_single(torch.empty_like(whole), whole, **how),
        lambda **how: dist.all_to_all([torch.empty_like(part) for part in parts], parts, **how),
        lambda **how: dist.all_gather_object([None] * n, root) if not how else dist.barrier(),
    ]
    work = draw.choice(calls)(**({"async_op": True} if asynchronous else {}))
    if work is not None:
        work.wait()


def storm(rendezvous, folder, case):
    """Make random collectives until another rank is lost. Return the error's class, text and ranks, and its time."""
    rank, n = rendezvous.rank, rendezvous.size
    if case["namespaces"]:
        namespaces.enter(case["namespaces"][rank // 2])
    begin(rendezvous, case["where"], case["how"], TIMEOUT_S)
    (folder / f"ready{rank}").touch()
    draw = random.Random(case["seed"])
    try:
        while True:
            random_call(draw, rank, n)
    except (CollectiveTimeout, PeerLostError) as error:
        at = time.monotonic()
        (folder / f"raised{rank}").touch()
        return type(error), str(error), error.ranks, at


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[SYSTEM] * (k > 0)) for k in range(count(40))])
def test_a_lost_rank_is_named_by_all(tmp_path, seed):
    """If any rank is lost at any moment, in any way and collective, on one host or several, all others soon raise the
    same error. It names that rank and no other one.

    If the lost rank ran the store, the texts of different hosts may name different calls, or the timeout as the cause.
    """
    draw = random.Random(seed)
    how = list(FAILURES)[seed % len(FAILURES)]
    hosts = draw.choice(["aaa", "aab", "ab", "aabb", "abc", "abcc"])
    n, stops = len(hosts), how == "stop"
    victim = draw.randrange(n)
    others = [rank for rank in range(n) if rank != victim]
    port = free_port() if draw.random() < 0.5 else None
    where = f"file://{tmp_path}/store" if port is None else f"tcp://127.0.0.1:{port}"
    case = {"how": how, "where": where, "seed": seed, "namespaces": None}
    note, failed_at = json.dumps(case | {"victim": victim, "hosts": hosts}), []

    def fail(pids):
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(n)))
        time.sleep(draw.random() * 1.0)
        failed_at.append(time.monotonic())
        os.kill(pids[victim], FAILURES[how])
        if stops:
            kill_when_raised(tmp_path, victim, others)(pids)

    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    found = ranks(n, storm, tmp_path, case, environment=environment, check=False, begun=fail)
    assert isinstance(found[victim], {"exit": SystemExit, "exception": ArithmeticError}.get(how, Died)), note
    errors = [found[rank] for rank in others]
    assert all(isinstance(one, tuple) for one in errors), (note, errors)
    texts = {text for _, text, *_ in errors}
    if victim or port is None:
        assert len(texts) == 1, (note, texts)
        assert {kind for kind, *_ in errors} == {CollectiveTimeout if stops else PeerLostError}, (note, texts)
    assert all(lost == (victim,) for _, _, lost, _ in errors), (note, texts)
    assert max(at for *_, at in errors) - failed_at[0] < (TIMEOUT_S if stops else 0) + 6, note


@SYSTEM
@pytest.mark.skipif(namespaces.available() is not None, reason=f"network namespaces: {namespaces.available()}")
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_link_that_fails(tmp_path, store):
    """If the link between two hosts fails, all ranks raise a CollectiveTimeout soon after the timeout. If all of them
    reach the store, their errors are equal and name no rank. If not, the errors name ranks of the other host."""
    failed_at = []
    with namespaces.hosts(2) as bed:
        where = f"file://{tmp_path}/store" if store == "file" else f"tcp://{bed.addresses[0]}:{free_port()}"
        case = {"how": "link", "where": where, "seed": 5, "namespaces": [holder.pid for holder in bed.holders]}

        def fail(_):
            wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(4)))
            time.sleep(0.5)
            failed_at.append(time.monotonic())
            bed.isolate(1)

        environment = [{"GLOO_SOCKET_IFNAME": bed.interface}] * 4
        found = ranks(4, storm, tmp_path, case, environment=environment, begun=fail)
    assert {kind for kind, *_ in found} == {CollectiveTimeout}
    if store == "file":
        ((text, lost),) = {(text, lost) for _, text, lost, _ in found}
        assert "although all ranks are alive" in text
        assert not lost
    else:
        for rank, (*_, lost, _) in enumerate(found):
            assert lost
            assert set(lost) <= ({2, 3} if rank < 2 else {0, 1})
    assert max(at for *_, at in found) - failed_at[0] < TIMEOUT_S + 5
