"""Random sequences of groups, sub-groups and split groups, while one rank fails at a random moment of making one."""

import gc
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import namespaces
import pytest
import torch
import torch.distributed as dist
from budget import count
from free_port import free_port
from ranks import Died, Moment, ranks

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce import CollectiveTimeout, PeerLostError
from crossreduce.observe.liveness import is_stopped

TIMEOUT_S = 2.0
LATE_S = 4.0  # how much longer than the timeout an error may take; between hosts, 5 s of waiting for connections more
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
    victim, groups = draw.randrange(size), []
    chosen = [sorted(draw.sample(range(size), draw.randint(2, size))) for _ in range(3)]  # several groups of some ranks
    for _ in range(draw.randint(2, 6)):
        groups.append([draw.choice(KINDS), draw.choice(chosen), draw.random() < 0.6])
    with_victim = [-1, *(k for k, (_, members, _) in enumerate(groups) if victim in members)]
    return {
        "seed": seed, "hosts": hosts, "transport": transport, "size": size, "places": places, "victim": victim,
        "groups": groups, "how": draw.choice(list(SIGNALS)), "at": draw.choice(with_victim[-2:]),
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
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def made(kind, members, victim):
    """Return a group of ``members``. Split groups of the same members have the same name.

    Ranks may come late to groups without ``victim``, since they have waited for it in another group.
    """
    timeout = timedelta(seconds=TIMEOUT_S if victim in members else 60)
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
    outcomes, lost, kept, before = [], set(), [], None

    def tried(number, function):
        began = Moment()
        if me == victim and case["at"] == number:
            fail_soon(case)
        try:
            function()
        except (CollectiveTimeout, PeerLostError) as error:
            lost.update(error.ranks)
            outcomes.append([number, type(error).__name__, list(error.ranks), Moment().seconds_since(began), str(error)])
        else:
            outcomes.append([number, "ok", [], Moment().seconds_since(began), ""])

    def begin():
        timeout = timedelta(seconds=TIMEOUT_S)
        where = {"init_method": place, "rank": me, "world_size": size}
        if isinstance(place, int):
            store = dist.TCPStore("127.0.0.1", place, size, False, timeout, wait_for_workers=False)
            where = {"store": store, "rank": me, "world_size": size}
        dist.init_process_group("crossreduce", timeout=timeout, **where)
        used(dist.group.WORLD, range(size))

    def used(group, members):
        x = torch.tensor([2**me])
        dist.all_reduce(x, group=group)
        assert x.item() == sum(2**rank for rank in members)

    def make(kind, members, stays):
        group = made(kind, members, victim)
        kept.append(group)
        used(group, members)
        if not stays:
            ended(kept.pop())

    try:
        tried(-1, begin)
        if not lost:
            before = open_things()
            for number, (kind, members, stays) in enumerate(case["groups"]):
                if me not in members:
                    dist.distributed_c10d._world.group_count += kind == "new"
                elif lost & set(members):
                    outcomes.append([number, "skipped", [], 0.0, ""])
                    dist.distributed_c10d._world.group_count += kind == "new"
                else:
                    tried(number, partial(make, kind, members, stays))
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
    began = Moment()
    survivors = [rank for rank in range(size) if rank != victim or case["how"] == "pause"]
    if me == 0:  # its process may run the store
        wait_until(lambda: all((folder / f"done{rank}").exists() for rank in survivors))
    for group in kept:
        ended(group)
    kept.clear()
    after = before and open_things()
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcomes, before, after, Moment().seconds_since(began)


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
            if kind not in ("ok", "skipped"):
                if how == "pause" or number < case["at"] or (victim not in members and not owns):
                    wrong.append(f"rank {rank}, group {number}: fails without a reason: {text}")
                elif named != [victim]:
                    wrong.append(f"rank {rank}, group {number}: names {named}: {text}")
            if took > limit_s and (victim in members or kind != "ok"):
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
    store, place = None, f"tcp://127.0.0.1:{free_port()}"
    if bed is not None:
        case["holders"] = [holder.pid for holder in bed.holders]
        place = f"tcp://{bed.addresses[case['places'][0]]}:{29500 + case['seed'] % 1000}"
        for each in environment:
            each["GLOO_SOCKET_IFNAME"] = bed.interface
    else:
        for each, host in zip(environment, case["places"], strict=True):
            each["CROSSREDUCE_HOST"] = host
        if case["store"] == "other":
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
            place = store.port
    found = ranks(case["size"], life, case, place, environment=environment, check=False, begun=watched(case), timeout_s=90)
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
