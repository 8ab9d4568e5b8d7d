"""Random failures of ranks in random collectives of the torch backend.

CROSSREDUCE_STORM=60 in the environment runs 60 failures instead of a few.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import namespaces
import pytest
import torch
import torch.distributed as dist
from free_port import free_port
from ranks import Died, Moment, ranks
from torch_running import HERE, finish, start
from torch_storm import fail_on_signal

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce import ArgumentError, CollectiveTimeout, PeerLostError
from crossreduce.errors import encoded

PROGRAM = HERE / "torch_storm.py"
TIMEOUT_S = 3.0
STOPPED_S = 1.5  # the timeout if a rank is stopped inside a collective
FAILURES = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "exit": signal.SIGUSR1,
    "exception": signal.SIGUSR1,
}
SYSTEM = pytest.mark.system
SEEDS = [pytest.param(k, marks=[SYSTEM] * (k > 0)) for k in range(int(os.environ.get("CROSSREDUCE_STORM", "8")))]


def wait_for(paths, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the ranks did not begin"
        time.sleep(0.01)


def fails_inside(rendezvous, store, how, carrier):
    """Make a collective; rank 2, alone on its host, fails inside it. Return the error, and how long it took."""
    rank, size = rendezvous.rank, rendezvous.size
    fail_on_signal(how)
    timeout = timedelta(seconds=STOPPED_S if how == "stop" else 20)
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    group = dist.group.WORLD

    def fail(*_):
        signal.raise_signal(FAILURES[how])
        time.sleep(20)  # this process ends

    parts = [torch.ones(10) for _ in range(size)]
    dist.all_gather(parts, parts[rank])
    if rank == 2 and carrier == "gloo":
        group._collectives._gloo = SimpleNamespace(allreduce=fail)
    elif rank == 2:
        group.communicator.transport._transport.send = fail
    began = Moment()
    try:
        if carrier == "gloo":  # the library has no bitwise reductions
            dist.all_reduce(torch.ones(10, dtype=torch.int64), op=dist.ReduceOp.BXOR)
        else:
            dist.all_reduce(parts[0])
    except (CollectiveTimeout, PeerLostError) as error:
        took = Moment().seconds_since(began)
        with pytest.raises(type(error), match=re.escape(str(error))):
            dist.barrier()
        return type(error), str(error), error.ranks, took


@pytest.mark.parametrize("carrier", ["crossreduce", pytest.param("gloo", marks=SYSTEM)])
@pytest.mark.parametrize("how", [pytest.param(how, marks=[SYSTEM] * (how not in ("kill", "stop"))) for how in FAILURES])
def test_a_rank_that_fails_inside_a_collective_is_named(tmp_path, how, carrier):
    """However a rank fails inside a collective between hosts, and whatever carries it, all others raise the same error,
    which names the rank; after its death within a second, after a stop within a second of the timeout.

    A process that exits by itself, or by an exception, dies some time later.
    """
    environment = [{"CROSSREDUCE_HOST": host} for host in "aab"]
    stopped = how == "stop"
    begun = (lambda pids: (time.sleep(4), os.kill(pids[2], signal.SIGKILL))) if stopped else None
    found = ranks(3, fails_inside, tmp_path / "store", how, carrier, environment=environment, check=False, begun=begun)
    assert isinstance(found[2], {"exit": SystemExit, "exception": ArithmeticError}.get(how, Died)), found[2]
    (kind, text, lost, *_), _, _ = found
    assert [one[:3] for one in found[:2]] == [(kind, text, lost)] * 2
    assert (kind, lost) == (CollectiveTimeout if stopped else PeerLostError, (2,)), text
    assert re.match("rank 2 did not complete op " if stopped else "rank 2 (died|was interrupted) during op ", text), (
        text
    )
    limit_s = {"stop": STOPPED_S + 4, "exit": 10, "exception": 10}.get(how, 4)
    assert max(one[3] for one in found[:2]) < limit_s, [one[3] for one in found[:2]]


def leaves(rendezvous, place, victim):
    """Make a collective; one rank destroys its group instead. Return the ranks of the error, and its first words."""
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
    """If a rank destroys its group while others wait for it, the ranks of all hosts raise that it left, even if the
    store ends with it."""
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
    with pytest.raises(RuntimeError, match=r"(?i)tag"):  # gloo's own errors of wrong arguments
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
    """send, recv, isend and irecv raise a PeerLostError that names the other rank if it was lost, by its number in the
    world, and a CollectiveTimeout if it is late. Code that catches gloo's RuntimeError catches both."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    _, found, _ = ranks(3, lost_in_a_message, tmp_path / "store", how, environment=environment, check=False)
    if how == "late":
        late = "did not complete within its timeout."
        assert [one[:2] for one in found] == [(CollectiveTimeout, (2,)), *[(CollectiveTimeout, ())] * 3]
        assert re.match(f'recv from rank 2, of group ".*", {late}', found[0][2])
        assert re.match('send to rank 2, of group ".*", failed, since an earlier message timed out.', found[2][2])
        text = "failed, since an earlier message timed out." if hosts == "aaa" else late
        assert re.match(f'recv from any rank, of group ".*", {text}', found[3][2])
        return
    words = {"leave": "left", "interrupt": "was interrupted while it waited for a message of"}
    words["kill"] = "died" if hosts == "aaa" else "closed its connection"
    assert [one[:2] for one in found] == [(PeerLostError, (2,))] * 4
    for (*_, text), call in zip(found, ["recv from", "send to", "send to", "recv from"], strict=True):
        during = "" if how == "interrupt" else f"; rank 1 was in {call} rank 2, of"
        assert re.match(f'rank 2 {words[how]}{during} group ".*"', text), text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_rank_is_named_by_all(tmp_path, monkeypatch, seed):
    """Whichever rank is lost, whenever and however, in any collective, on one host or several: all others raise the
    same error in time, which names that rank and no other.

    If the lost rank ran the store, each host may name another call in its text, or the timeout as the cause.
    """
    draw = random.Random(seed)
    how = list(FAILURES)[seed % len(FAILURES)]
    hosts = draw.choice(["aaa", "aab", "ab", "aabb", "abc", "abcc"])
    n = len(hosts)
    victim = draw.randrange(n)
    port = free_port() if draw.random() < 0.5 else None
    case = {"how": how, "port": port, "timeout_s": TIMEOUT_S, "seed": seed}
    note = f"seed {seed}: {how} rank {victim} of hosts {hosts}, port {port}"
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))
    running = start([PROGRAM, tmp_path, json.dumps(case)], n, lambda rank: {"CROSSREDUCE_HOST": hosts[rank]})
    try:
        wait_for([tmp_path / f"ready{rank}" for rank in range(n)], 60)
        time.sleep(draw.random() * 1.0)
        failed_at = time.monotonic()
        os.kill(running[victim].pid, FAILURES[how])
        if how == "stop":
            wait_for([tmp_path / f"rank{rank}.json" for rank in range(n) if rank != victim], 30)
    except AssertionError:
        for process in running:
            process.send_signal(signal.SIGABRT)  # prints the stacks of its threads
        raise AssertionError(note, finish(running, 5)) from None
    finally:
        if how == "stop":
            os.kill(running[victim].pid, signal.SIGKILL)
        outputs = finish(running, 30)
    found = []
    for rank, (status, text) in enumerate(outputs):
        if rank != victim:
            path = Path(tmp_path, f"rank{rank}.json")
            assert status == 0, f"{note}; rank {rank} ended with {status}:\n{text}"
            assert path.exists(), f"{note}; rank {rank}:\n{text}"
            found.append(json.loads(path.read_text()))
        assert "Exception ignored" not in text, f"{note}; rank {rank}:\n{text}"
        assert "terminate called" not in text, f"{note}; rank {rank}:\n{text}"
    texts = {one["text"] for one in found}
    if victim or port is None:
        assert len(texts) == 1, "\n".join([note, *texts])
        kind = "CollectiveTimeout" if how == "stop" else "PeerLostError"
        assert {one["kind"] for one in found} == {kind}, "\n".join([note, *texts])
    assert all(one["ranks"] == [victim] for one in found), "\n".join([note, *texts])
    assert max(one["at"] for one in found) - failed_at < (TIMEOUT_S if how == "stop" else 0) + 6, note


@SYSTEM
@pytest.mark.skipif(namespaces.available() is not None, reason=f"network namespaces: {namespaces.available()}")
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_link_that_fails(tmp_path, store):
    """If the link between two hosts fails, all ranks raise a CollectiveTimeout soon after the timeout. If all reach the
    store, they raise the same one, which names no rank; if not, each host names ranks of the other one."""
    with namespaces.hosts(2) as bed:
        case = {"how": "link", "port": None, "timeout_s": TIMEOUT_S, "seed": 5}
        if store == "tcp":
            case |= {"port": free_port(), "host": bed.addresses[0]}
        running = []
        for rank in range(4):
            around = {"RANK": str(rank), "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
            around["CROSSREDUCE_DUMP_DIR"] = str(tmp_path / "dumps")
            command = [sys.executable, str(PROGRAM), str(tmp_path), json.dumps(case)]
            running.append(bed.run(rank // 2, command, around, stderr=subprocess.PIPE, text=True))
        wait_for([tmp_path / f"ready{rank}" for rank in range(4)], 60)
        time.sleep(0.5)
        failed_at = time.monotonic()
        bed._do(1, ["ip", "link", "set", "link0", "down"])
        texts = [process.communicate(timeout=30)[1] for process in running]
        assert [process.returncode for process in running] == [0] * 4, texts
    found = [json.loads(Path(tmp_path, f"rank{rank}.json").read_text()) for rank in range(4)]
    assert {one["kind"] for one in found} == {"CollectiveTimeout"}
    if store == "file":
        assert len({one["text"] for one in found}) == 1
        assert "although all ranks are alive" in found[0]["text"]
        assert found[0]["ranks"] == []
    else:
        for rank, one in enumerate(found):
            assert one["ranks"]
            assert set(one["ranks"]) <= ({2, 3} if rank < 2 else {0, 1})
    assert max(one["at"] for one in found) - failed_at < TIMEOUT_S + 5
