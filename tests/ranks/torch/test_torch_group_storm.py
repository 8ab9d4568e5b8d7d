"""Random sequences of groups, sub-groups and split groups, while one rank fails at a random moment of making one."""

import gc
import json
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import namespaces
import pytest
import torch
import torch.distributed as dist
from budget import count
from free_port import free_port
from ranks import ranks

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce import CollectiveTimeout, PeerLostError
from crossreduce.observe.liveness import is_stopped

TIMEOUT_S = 3.0
LONG_S = 60.0  # the timeout of groups that must be made
LATE_S = 10.0  # how much longer than the timeout an error may take on a busy machine; between hosts, 5 s more
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT, "pause": signal.SIGSTOP}
KINDS = ("new", "split")


def drawn(seed, hosts=1, transport="tcp"):
    """Return a random case. ``hosts``: 1, or the number of network namespaces."""
    draw = random.Random(f"{seed} {hosts} {transport}")
    size = draw.randint(max(2, hosts), 6)
    if hosts == 1:
        places = [draw.choice(draw.choice(["a", "aab"])) for _ in range(size)]
    else:
        places = [*range(hosts), *(draw.randrange(hosts) for _ in range(size - hosts))]
        draw.shuffle(places)
    victim, number = draw.randrange(size), draw.randint(2, 6)
    chosen = [sorted(draw.sample(range(size), draw.randint(2, size))) for _ in range(3)]  # several groups of some ranks
    groups = [[draw.choice(KINDS), draw.choice(chosen), draw.random() < 0.6] for _ in range(number)]
    with_victim = [-1, *(k for k, (_, members, _) in enumerate(groups) if victim in members)]
    how, at = draw.choice(list(SIGNALS)), draw.choice(with_victim[-2:])
    if victim == 0 and at < 0 and how == "stop":  # torch's client would wait for its store without a limit
        how = "kill"
    return {
        "seed": seed, "hosts": hosts, "transport": transport, "size": size, "places": places, "victim": victim,
        "groups": groups, "how": how, "at": at,
        "calls": int(10 ** (draw.random() * 3.3)) if draw.random() < 0.6 else 0,
        "delay_s": 10 ** draw.uniform(-4.5, -1.5), "pause_s": draw.uniform(0.05, 0.8),
        "store": draw.choice(["rank 0", "rank 0", "other"]) if hosts == 1 else "rank 0",
    }  # fmt: skip


def fail_soon(case):
    """Let this rank fail after some calls and returns in functions of the library, or after some time."""
    number = SIGNALS[case["how"]]
    if not case["calls"]:
        threading.Timer(case["delay_s"], os.kill, (os.getpid(), number)).start()
        return
    left = case["calls"]

    def counted(frame, event, function):
        nonlocal left
        if event == "c_call" and function.__name__ == "__exit__":
            return  # no signal is handled between a with block and its end: an error here would leave a lock taken
        if event in ("call", "c_call", "c_return") and "crossreduce" in frame.f_code.co_filename:
            left -= 1
            if left <= 0:
                sys.setprofile(None)
                os.kill(os.getpid(), number)

    sys.setprofile(counted)


def wait_until(condition):
    """Wait for at most 60 s. Return whether the condition is true."""
    until = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def open_things():
    """Return how many descriptors and threads this process has."""
    gc.collect()
    return [len(list(Path("/proc/self", each).iterdir())) for each in ("fd", "task")]


def made(kind, members, timeout):
    """Return a group of ``members``. Split groups of the same members have the same name."""
    if kind == "split":
        return dist.group.WORLD.split_group(members, timeout, group_name=f"split {members}")
    return dist.new_group(members, timeout, backend="crossreduce")


def ended(group):
    """Destroy a group. torch has no tables of split groups."""
    if group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
    else:
        group.shutdown()


def life(rendezvous, case, place):
    """Make the groups of a case, and reduce in each. Return for each group the outcome and the seconds that it took."""
    me, size, victim, folder = rendezvous.rank, case["size"], case["victim"], Path(case["folder"])
    torch.set_num_threads(1)
    if case["hosts"] > 1:
        namespaces.enter(case["holders"][case["places"][me]])
    outcomes, kept, before = [], [], None
    survivors = [rank for rank in range(size) if rank != victim or case["how"] == "pause"]

    def has_failed(number, members):
        """Wait until all survivors are here, since some have waited for the victim. Return whether one has lost it, and
        it is among ``members``, or one has no default group."""
        rendezvous.query("put", [("at", number, me)], True)
        if number >= case["at"]:
            rendezvous.query("get", [("at", number, rank) for rank in survivors], timeout=60)
        lost, lacks = rendezvous.query("get", [("lost",), ("lacks",)])
        return lacks or (lost and victim in members)

    def tried(number, function):
        began = time.monotonic()
        if me == victim and case["at"] == number:
            fail_soon(case)
        try:
            function()
        except (CollectiveTimeout, PeerLostError) as error:
            rendezvous.query("put", [("lost",)], True)
            outcomes.append([number, type(error).__name__, list(error.ranks), time.monotonic() - began, str(error)])
        else:
            outcomes.append([number, "ok", [], time.monotonic() - began, ""])

    timeout = timedelta(seconds=TIMEOUT_S if case["at"] < 0 else LONG_S)
    store = dist.TCPStore(*place, size, me == 0 and case["store"] == "rank 0", timeout, wait_for_workers=False)
    rendezvous.all_gather(b"")

    def begin():
        where = {"store": store, "rank": me, "world_size": size}
        dist.init_process_group("crossreduce", timeout=timeout, **where)
        used(dist.group.WORLD, range(size))

    def used(group, members):
        x = torch.tensor([2**me])
        group.allreduce(
            [x]
        ).wait()  # with a split group, torch's dist.all_reduce replaces an error by one of its tables
        assert x.item() == sum(2**rank for rank in members)

    def make(kind, members, stays, timeout_s):
        group = made(kind, members, timedelta(seconds=timeout_s))
        kept.append(group)
        used(group, members)
        if not stays:
            ended(kept.pop())

    try:
        tried(-1, begin)
        if dist.is_initialized():
            before = open_things()
        else:
            rendezvous.query("put", [("lacks",)], True)
        for number, (kind, members, stays) in enumerate(case["groups"]):
            joins = not has_failed(number, members) and me in members
            dist.distributed_c10d._world.group_count += kind == "new" and not joins
            limit_s = TIMEOUT_S if number >= case["at"] and victim in members else LONG_S
            tried(number, partial(make, kind, members, stays, limit_s) if joins else lambda: None)
        if me == victim and case["how"] != "pause":
            sys.setprofile(None)
            os.kill(os.getpid(), SIGNALS[case["how"]])
            time.sleep(60)
    except KeyboardInterrupt:
        sys.setprofile(None)
        if me != victim:
            raise
        if me == 0 and case["store"] == "rank 0":
            time.sleep(1.5)  # as in a program that cleans up: others read there why the group was aborted
        return "interrupted"
    (folder / f"done{me}").touch()
    began = time.monotonic()
    if me == 0:  # its process may run the store
        wait_until(lambda: all((folder / f"done{rank}").exists() for rank in survivors))
    for group in kept:
        ended(group)
    kept.clear()
    after = before and open_things()
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcomes, before, after, time.monotonic() - began


def watched(case):
    """Return a function that continues or ends the victim after it was stopped."""
    folder, victim = Path(case["folder"]), case["victim"]

    def watch(pids):
        others = [rank for rank in range(case["size"]) if rank != victim]
        if case["how"] == "pause":
            wait_until(lambda: is_stopped(pids[victim]) or (folder / f"done{victim}").exists())
            time.sleep(case["pause_s"])
            os.kill(pids[victim], signal.SIGCONT)
        elif case["how"] == "stop":
            wait_until(lambda: all((folder / f"done{rank}").exists() for rank in others))
            os.kill(pids[victim], signal.SIGKILL)

    return watch


def problems(case, found):
    """Return what is wrong in the results of a case."""
    victim, how, wrong = case["victim"], case["how"], []
    survivors = [rank for rank in range(case["size"]) if rank != victim or how == "pause"]
    owns = victim == 0 and case["store"] == "rank 0"
    limit_s = TIMEOUT_S + LATE_S + 5 * (len(set(case["places"])) > 1)
    for rank in survivors:
        if not isinstance(found[rank], tuple):
            wrong.append(f"rank {rank}: {found[rank]!r} {getattr(found[rank], '__notes__', '')}")
            continue
        outcomes, before, after, ended_s = found[rank]
        for number, kind, named, took, text in outcomes:
            members = range(case["size"]) if number < 0 else case["groups"][number][1]
            if kind != "ok":
                if how == "pause" or number < case["at"] or (victim not in members and not owns):
                    wrong.append(f"rank {rank}, group {number}: fails without a reason: {text}")
                elif named != [victim]:
                    wrong.append(f"rank {rank}, group {number}: names {named}: {text}")
            if took > limit_s and kind != "ok":
                wrong.append(f"rank {rank}, group {number}: {kind} after {took:.1f} s: {text}")
        if ended_s > 15:
            wrong.append(f"rank {rank}: its end takes {ended_s:.1f} s")
        if before and (after[0] > before[0] + 4 or after[1] > before[1] + 4):
            wrong.append(f"rank {rank}: descriptors and threads {before} before, {after} after")
    return wrong


def run(case, folder, bed=None):
    """Run a case. Return what is wrong, and the results."""
    case["folder"] = str(folder)
    environment = [{"CROSSREDUCE_TRANSPORT": case["transport"], "UCX_TLS": "tcp"} for _ in range(case["size"])]
    store, place = None, ("127.0.0.1", free_port())
    if bed is not None:
        case["holders"] = [holder.pid for holder in bed.holders]
        place = bed.addresses[case["places"][0]], 29500 + case["seed"] % 1000
        for each in environment:
            each["GLOO_SOCKET_IFNAME"] = bed.interface
    else:
        for each, host in zip(environment, case["places"], strict=True):
            each["CROSSREDUCE_HOST"] = host
        if case["store"] == "other":
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
            place = "127.0.0.1", store.port
    found = ranks(
        case["size"], life, case, place, environment=environment, check=False, begun=watched(case), timeout_s=90
    )
    del store
    return problems(case, found), found


CASES = [*((1, "tcp", k) for k in range(count(40))), (1, "ucx", 0)]


@pytest.mark.parametrize(("hosts", "transport", "seed"), CASES)
def test_a_rank_that_fails_while_groups_are_made_is_named(tmp_path, hosts, transport, seed):
    """If a rank is killed, stopped or interrupted at any moment of making groups, all other ranks of a group with it
    raise an error that names it, in time. Groups without it are made. A rank that pauses is waited for."""
    case = drawn(seed, hosts, transport)
    wrong, _ = run(case, tmp_path)
    assert not wrong, "\n".join([*wrong, json.dumps(case)])


@pytest.mark.system
@pytest.mark.skipif(namespaces.available() is not None, reason=f"network namespaces: {namespaces.available()}")
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_the_same_between_hosts(tmp_path, hosts, transport):
    with namespaces.hosts(hosts, rate="") as bed:
        for seed in range(count(20)):
            folder = tmp_path / str(seed)
            folder.mkdir()
            case = drawn(seed, hosts, transport)
            wrong, _ = run(case, folder, bed)
            assert not wrong, "\n".join([*wrong, json.dumps(case)])
