"""Storms: random failures of ranks of the torch backend, and of NumPy ranks, after which the others continue.

The default set has a storm on one host, and one on three hosts of which two lose their link.
"""

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import namespaces
import pytest
from budget import count
from free_port import free_port
from kinds_of_groups import Numpy, Torch, lose
from ranks import Died, ranks
from survival_storm import FAILURES, MOST, Failure, lives, shared_counters

from crossreduce.errors import ExcludedError

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGUSR1, "exception": signal.SIGUSR2}
PLACES = ("any", "any", "any", "shrink", "agree", "grow", "join")
LIMIT_S = 60  # for a step of the test, on a machine with other work
KINDS = pytest.mark.parametrize("kind", [Numpy, pytest.param(Torch, marks=pytest.mark.system)])


def seeds(full, default):
    """Return the seeds of a test with ``full`` storms in the full budget. Seed ``default`` is in the default set."""
    marks = [[] if seed == default else [pytest.mark.system] for seed in range(count(full, default + 1))]
    return pytest.mark.parametrize("seed", [pytest.param(seed, marks=each) for seed, each in enumerate(marks)])


def state(pid):
    """Return the letter for the state of a process in /proc: "T" is stopped, "Z" and "X" have ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_down(pid):
    return state(pid) in "ZTX"


def has_ended(pid):
    """Return whether all threads of a process have ended, and so its files are closed."""
    return state(pid) in "ZX" and len(list(Path(f"/proc/{pid}/task").iterdir())) == 1


def wait_until(true, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def drawn(seed, folder):
    """Return a random storm. Each of its "failures" says who fails, how, and in which call ("where"): after how many
    such calls ("skip"), function calls ("after") and seconds ("delay_s")."""
    draw = random.Random(seed)
    size, joiners = draw.randint(2, 6), draw.choice([0, 0, 1, 2])
    victims = draw.sample(range(size), draw.randint(1, min(3, size - 1)))
    if seed % 4 == 0:
        victims = list(dict.fromkeys([0, *victims]))[: size - 1]  # the rank that serves the store is the first one
    failures = []
    for victim in victims:
        where = draw.choice(PLACES) if failures else draw.choice(["any", "any", "agree"])
        if where == "join" or (where == "grow" and not joiners):
            where = "any"
        failures.append({"who": victim, "where": where})
    falling = [size + joiner for joiner in range(joiners) if draw.random() < 0.3]
    failures += [{"who": joiner, "where": draw.choice(["join", "any"])} for joiner in falling]
    for each in failures:
        each |= {"how": draw.choice(FAILURES), "skip": draw.randrange(20) if each["where"] == "agree" else 0}
        each |= {"after": int(10 ** (draw.random() * 3.5)), "delay_s": draw.choice([0, draw.random() * 0.1])}
    stops = any(each["how"] == "stop" for each in failures)
    case = {"seed": seed, "folder": str(folder), "size": size, "joiners": joiners, "failures": failures}
    case |= {"join_after_s": draw.random() * 0.5, "timeout_s": 1.5 if stops else 1800, "wait_s": 10, "excluded": []}
    return case | {"address": "127.0.0.1", "port": free_port(), "namespaces": None}


def storm(case, shared, disturb=lambda: None):
    """Return a function of the processes' pids that calls ``disturb`` and makes the victims of a storm fail."""
    draw = random.Random(case["seed"])
    size, folder = case["size"], Path(case["folder"])
    total = size + case["joiners"]
    victims = {each["who"] for each in case["failures"]}
    others = [process for process in range(total) if process not in victims and process not in case["excluded"]]

    def begun(pids):
        try:
            storm_through(pids)
        except AssertionError as error:
            for pid in pids:
                if not is_down(pid):
                    os.kill(pid, signal.SIGQUIT)  # the process writes the stacks of its threads
            time.sleep(0.5)
            texts = [f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("output*"))]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError("\n".join([str(error), json.dumps(case), *texts])) from None

    def storm_through(pids):
        ready = [folder / f"ready{process}" for process in range(size)]
        wait_until(lambda: all(path.exists() for path in ready), "the ranks do not begin", 60)
        time.sleep(draw.random() * 0.3)
        disturb()
        for each in case["failures"]:
            if each["where"] == "any":
                if each["who"] >= size:  # when it joins
                    time.sleep(case["join_after_s"])
                time.sleep(each["delay_s"])
                os.kill(pids[each["who"]], SIGNALS[each["how"]])
        time.sleep(1)
        for each in case["failures"]:
            if not is_down(pids[each["who"]]):  # it was not in the call in which it was to fail
                os.kill(pids[each["who"]], SIGNALS[each["how"]])
        wait_until(lambda: all(is_down(pids[victim]) for victim in victims), "victims are alive")
        wait_until(lambda: all(is_down(pids[each]) for each in case["excluded"]), "ranks that are cut off continue")
        counts = [shared[process] for process in others]
        wait_until(
            lambda: all(shared[process] > count for process, count in zip(others, counts, strict=True)),
            f"the others do not continue: {counts}",
        )
        if go_on(pids):
            time.sleep(0.2)
        shared[MOST] = 1  # ends the storm
        wait_until(lambda: not go_on(pids) and all(state(pid) in "ZX" for pid in pids), "processes do not end")

    def go_on(pids):
        """Continue the processes that are stopped. One may then stop again, in the call in which it was to fail."""
        stopped = [victim for victim in victims if state(pids[victim]) == "T"]
        for victim in stopped:
            os.kill(pids[victim], signal.SIGCONT)
        return stopped

    return begun


def check(case, found):
    """Check that all survivors have continued, with the same results in each step. A record is the number of a step,
    the processes that took part (a bit mask), and the total of the masks so far."""
    note = json.dumps(case)
    victims = {each["who"]: each["how"] for each in case["failures"]}
    ends = {"exit": (SystemExit, Failure), "exception": (SystemExit, Failure), "kill": Died}
    steps = {}
    for process, one in enumerate(found):
        how = victims.get(process)
        assert isinstance(one, dict if process in case["excluded"] else ends.get(how, dict)), (
            note, process, one, getattr(one, "__notes__", ""),
        )  # fmt: skip
        if process in case["excluded"] or how is None:
            wanted = "excluded" if process in case["excluded"] else "done"
            assert one["end"].startswith(wanted), (note, process, one["end"])
        if isinstance(one, dict):
            numbers = [number for number, *_ in one["records"]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True, (note, process)
            for number, *result in one["records"]:
                steps.setdefault(number, {})[process] = result
    before = 0
    for number, results in sorted(steps.items()):
        assert len({tuple(result) for result in results.values()}) == 1, (note, number, results)
        mask, total = next(iter(results.values()))
        assert total == before + mask, (note, number, results)
        before = total
        assert all(mask >> process & 1 for process in results), (note, number, results)


def run(kind, case, disturb=lambda: None):
    """Run a storm, and check that all survivors have continued."""
    shared, total = shared_counters(), case["size"] + case["joiners"]
    environment = [{"GLOO_SOCKET_IFNAME": "link0"} if case["namespaces"] else {}] * total
    begun = storm(case, shared, disturb)
    found = ranks(total, lives, kind, case, shared, check=False, begun=begun, timeout_s=280, environment=environment)
    check(case, found)


@KINDS
@seeds(60, 0)
def test_the_others_go_on(tmp_path, kind, seed):
    """If random ranks die, stop or raise errors at random places, the others continue with the same results, and none
    hangs. A rank that was stopped is excluded, or still in the group."""
    run(kind, drawn(seed, tmp_path))


@pytest.fixture(scope="module")
def bed(request):
    """Return simulated hosts, each a network namespace. The parameter is their number."""
    if reason := namespaces.available():
        pytest.skip(f"network namespaces: {reason}")
    with namespaces.hosts(request.param) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def mended(request):
    """Restore the links between the hosts after a test."""
    yield
    if "bed" in request.fixturenames:
        hosts = request.getfixturevalue("bed")
        for a, b in itertools.combinations(range(len(hosts.addresses)), 2):
            hosts.mend(a, b)
            hosts.change_rate(a, b, "1gbit")


def hosts(least):
    """Return the parametrization of ``bed`` of a test that needs ``least`` hosts: so many, or one more."""
    more = pytest.param(least + 1, marks=pytest.mark.system)
    return pytest.mark.parametrize("bed", [least, more], indirect=True, scope="module")


def drawn_on_hosts(seed, folder, bed):
    """Return a random storm on hosts: some ranks are lost, or all ranks of a host, or the links of a host are cut."""
    draw = random.Random(seed)
    count = len(bed.addresses)
    hosts = [host for host in range(count) for _ in range(draw.randint(1, 2))]
    size, joiners = len(hosts), 0
    what, failures, excluded, cut = ("ranks", "host", "cut")[seed % 3], [], [], None
    if what == "ranks":
        victims = draw.sample(range(size), draw.randint(1, size - 1))
    elif what == "host":
        lost, joiners = draw.randrange(count), 1
        victims = [rank for rank in range(size) if hosts[rank] == lost]
        hosts.append(lost)  # the host comes back
    else:
        victims, cut = [], draw.randrange(count)
        behind = [rank for rank in range(size) if hosts[rank] == cut]
        has_quorum = 2 * len(behind) > size or (2 * len(behind) == size and cut == 0)
        excluded = [rank for rank in range(size) if (rank in behind) != has_quorum]
    for victim in victims:
        alone = all(hosts[rank] != hosts[victim] or rank in victims for rank in range(size) if rank != victim)
        # Ranks on other hosts cannot tell whether a host whose ranks are all stopped still lives.
        how = draw.choice(["kill", "exit", "exception", "kill" if alone else "stop"])
        where = draw.choice(["any", "any", "shrink", "agree"] if failures else ["any", "any", "agree"])
        failures.append({"who": victim, "where": where, "how": how, "skip": draw.randrange(10) * (where == "agree")})
        failures[-1] |= {"after": int(10 ** (draw.random() * 3.5)), "delay_s": draw.choice([0, draw.random() * 0.1])}
    stops = any(each["how"] == "stop" for each in failures) or cut is not None
    case = {"size": size, "joiners": joiners, "join_after_s": 0.5, "cut": cut, "slow": draw.random() < 0.3}
    case |= {"excluded": excluded, "timeout_s": 2 if stops else 1800, "wait_s": 3, "port": 29500 + seed}
    return on_hosts(seed, folder, bed, hosts, failures) | case


def on_hosts(seed, folder, bed, hosts, failures):
    """Return a storm of ranks on these hosts. No process joins or is excluded. ``hosts``: the host of each rank."""
    case = {"seed": seed, "folder": str(folder), "size": len(hosts), "joiners": 0, "failures": failures}
    case |= {"join_after_s": 0, "timeout_s": 2, "wait_s": 10, "excluded": [], "hosts": hosts, "cut": None}
    case |= {"slow": False, "address": bed.addresses[hosts[0]], "port": 29700 + seed}
    return case | {"namespaces": [bed.holders[host].pid for host in hosts]}


@pytest.mark.system
@hosts(2)
@KINDS
@seeds(30, 2)
def test_the_others_go_on_on_several_hosts(tmp_path, bed, kind, seed):
    """If random ranks or a random host are lost, the others continue. If a host loses its links, the side with most
    ranks, or with half of them and the lowest rank, continues, and the other side raises ExcludedError.

    A host that was lost comes back by an invitation.
    """
    case = drawn_on_hosts(seed, tmp_path, bed)
    pairs = list(itertools.combinations(range(len(bed.addresses)), 2))

    def disturb():
        for a, b in pairs:
            if case["slow"]:
                bed.change_rate(a, b, "50mbit")
            if case["cut"] in (a, b) and seed % 2:
                bed.lose(a, b)
        if case["cut"] is not None and not seed % 2:
            bed.isolate(case["cut"])

    run(kind, case, disturb)


def lost_link(seed, folder, bed, hosts, pair, victims):
    """Return a storm in which the hosts ``pair`` lose their link, and ``victims`` are killed 0.1 s later."""
    failures = [{"who": each, "where": "any", "how": "kill", "skip": 0, "after": 0, "delay_s": 0.1} for each in victims]
    # Ranks beyond the link notice the end of a rank only after the timeout of 2 s, so wait_s is greater.
    return on_hosts(seed, folder, bed, hosts, failures) | {"cut": pair}


@hosts(3)
@KINDS
@seeds(10, 0)
def test_nobody_is_excluded_for_a_lost_link(tmp_path, bed, kind, seed):
    """If two hosts lose the link between them, all ranks continue, except one that may be killed then: the two hosts
    reach each other through other hosts."""
    draw, count = random.Random(seed), len(bed.addresses)
    hosts = [host for host in range(count) for _ in range(draw.randint(1, 2))]
    pair = draw.sample(range(count), 2)
    several = [rank for rank, host in enumerate(hosts) if hosts.count(host) > 1]
    victims = [draw.choice(several)] if several and draw.random() < 0.3 else []
    run(kind, lost_link(seed, tmp_path, bed, hosts, pair, victims), lambda: bed.lose(*pair))


@pytest.mark.system
@hosts(3)
@KINDS
def test_two_parts_never_go_on_without_the_host_between_them(tmp_path, bed, kind):
    """If two hosts lose the link between them, and also the only host between them, the side with a quorum continues,
    and the other side is excluded. With a fourth host another path exists, and all ranks left continue."""
    count, pair = len(bed.addresses), (0, 2)
    case = lost_link(90, tmp_path, bed, [0, 0, 1, 2, 3][: count + 1], pair, [2])
    case["excluded"] = [3] if count == 3 else []
    run(kind, case, lambda: bed.lose(*pair))


def outlasted(rendezvous, kind, place, holders, folder):
    """All ranks go on without those that they do not reach, and end."""
    namespaces.enter(holders[rendezvous.rank])
    group = kind(rendezvous, place, timeout_s=2)
    group.total()
    Path(folder, f"ready{rendezvous.rank}").touch()
    lose(group)
    try:
        group.shrink()
    except ExcludedError:
        return "excluded"
    group.total()
    group.leave()
    return "done"


@pytest.mark.system
@hosts(2)
@KINDS
@pytest.mark.parametrize("how", ["lose", "isolate"])
def test_a_host_whose_link_returns_when_the_others_have_ended_is_excluded(tmp_path, bed, kind, how):
    """Two parts never do the same work, not even one after the other: if a host has lost its links, and they work again
    when the others have gone on and ended, its rank is excluded."""
    count = len(bed.addresses)

    def disturb(pids):
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(count)), "the ranks do not begin")
        bed.isolate(count - 1) if how == "isolate" else [bed.lose(host, count - 1) for host in range(count - 1)]
        wait_until(lambda: all(is_down(pid) for pid in pids[:-1]), "the others do not end")
        for host in range(count - 1):
            bed.mend(host, count - 1)

    place, holders = f"{bed.addresses[0]}:29890", [each.pid for each in bed.holders]
    environment = [{"GLOO_SOCKET_IFNAME": "link0"}] * count
    found = ranks(count, outlasted, kind, place, holders, tmp_path, begun=disturb, environment=environment)
    assert found == ["done"] * (count - 1) + ["excluded"]


@pytest.mark.system
@hosts(2)
@KINDS
def test_a_host_that_is_silent_after_its_ranks_have_ended_delays_nobody(tmp_path, bed, kind):
    """If the ranks of the first host end, and then it loses its power, the others know that its ranks have ended, and
    continue, although they are only half of the ranks."""
    count = len(bed.addresses)

    def disturb(pids):
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(count)), "the ranks do not begin")
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: has_ended(pids[0]), "rank 0 does not end")
        time.sleep(0.1)  # the ends of its connections arrive
        bed.isolate(0)

    place, holders = f"{bed.addresses[0]}:29891", [each.pid for each in bed.holders]
    environment = [{"GLOO_SOCKET_IFNAME": "link0"}] * count
    found = ranks(count, outlasted, kind, place, holders, tmp_path, begun=disturb, environment=environment, check=False)
    assert found[1:] == ["done"] * (count - 1)
