"""``crossreduce top``: the straggler, states of ranks, what cannot be read, and that no group notices it."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from command_line import forked
from members import Resources, member, memory, starter
from ranks import Died, SocketTransport, ranks

from crossreduce.errors import PeerLostError
from crossreduce.observe.observer import Observer
from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import Communicator


@pytest.fixture
def top(crossreduce, monkeypatch):
    """Return a function that runs ``crossreduce top --once`` here, and returns its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "140")
    return lambda *args: crossreduce("top", "--once", *args)


@pytest.fixture
def group_of(top):
    """Return a function that returns the group of a name in the JSON of ``top``."""

    def only(name):
        code, out, error = top("--json", "--group", name, "--interval", "0.5")
        assert (code, error) == (0, ""), error
        (found,) = json.loads(out)["groups"]
        return found

    return only


def watched(n, function, *args, watch, **options):
    """Run ranks that end when ``watch(pids)`` has returned; return what the ranks and ``watch`` returned."""
    seen = []
    end, write = os.pipe()
    try:
        with starter(n) as started:

            def begun(pids):
                try:
                    started.wait()
                    seen.append(watch(pids))
                finally:
                    for pid in pids:  # a rank that is still stopped would not end
                        os.kill(pid, signal.SIGCONT)
                    os.write(write, b"e" * n)

            found = ranks(n, function, started, end, *args, begun=begun, **options)
    finally:
        os.close(end)
        os.close(write)
    return found, seen[0]


def busy(rendezvous, started, end, name, slow, hosts=1):
    """Make calls, before which rank ``slow`` sleeps, and check their results until rank 0 can read from ``end``."""
    several = hosts > 1
    transport = SocketTransport(rendezvous) if several else None
    comm = Communicator(rendezvous, transport, name=name, timeout_s=30) if several else member(rendezvous, 30, name)
    started.ready()
    x = np.empty(1000, np.int64)
    done = np.zeros(1, np.uint8)
    while not done[0]:
        if comm.rank == slow:
            time.sleep(0.03 * hosts)
        x[:] = comm.rank + 1
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
        assert (x == comm.size * (comm.size + 1) // 2).all()
        done[0] = bool(select.select([end], [], [], 0)[0])
        comm.broadcast(memory(done), 0)
    calls = comm.stats().total.calls
    comm.close()
    return calls


def test_the_straggler_is_named(top, group_of):
    """The view names the slow rank, for which the others wait, and has the calls and bytes per second of each rank."""

    def watch(pids):
        time.sleep(0.3)
        return group_of("slow"), top("--group", "slow"), pids

    _, (found, (code, out, error), pids) = watched(4, busy, "slow", 2, watch=watch)
    assert (found["group"], found["size"], found["hosts"], found["cause"]) == ("slow", 4, 1, None)
    assert found["straggler"]["rank"] == 2
    assert 0.5 < found["straggler"]["share"] <= 1
    assert [one["pid"] for one in found["ranks"]] == pids
    for one in found["ranks"]:
        rates = one["rates"]
        assert 0 < rates["calls_per_s"] < 250
        mean_nbytes = (8000 + 1) / 2  # of the two calls in turn
        assert rates["bytes_per_s"] == pytest.approx(rates["calls_per_s"] * mean_nbytes, rel=0.2)
        assert one["op"]["text"] in ("all_reduce sum int64[1000]", "broadcast root 0 uint8[1]")
        if one["rank"] != 2:
            assert (rates["waiting_for"], rates["waiting"] > 0.5) == (2, True)
    assert (code, error) == (0, "")
    assert re.search(r'^group "slow" of \S+( -c)? \(pid \d+\), 4 ranks, op \d+$', out, re.MULTILINE)
    assert re.search(r"^rank 2 keeps the others waiting: \d+ % of their time$", out, re.MULTILINE)
    assert re.search(rf"│ +0 │ +{pids[0]} │ .* │ +\d+ % │ +2 │$", out, re.MULTILINE), out


def quiet(rendezvous, started, end, name):
    comm = member(rendezvous, 30, name)
    comm.barrier()
    started.ready()
    os.read(end, 1)
    comm.close()


def hidden_groups(_):
    """As another user, print the number of groups that an observer finds, that of hidden processes, and problems."""
    os.setgid(65534)
    os.setuid(65534)
    observer = Observer()
    observer.search()
    print(json.dumps([len(observer.snapshots()), observer.hidden, observer.problems]))


def observed(_):
    """Print the names and processes of the groups that an observer finds, the rights with which it maps their memory,
    and whether it releases everything. No other thread of this process opens or closes anything meanwhile."""
    before, observer = Resources(), Observer()
    for _ in range(3):
        observer.search()
    views = [(view.name, [one.pid for one in view.ranks]) for view in observer.snapshots()]
    rights = re.findall(r"^\S+ (\S+) .*/memfd:crossreduce", Path("/proc/self/maps").read_text(), re.MULTILINE)
    observer.close()
    print(json.dumps([views, sorted({*rights}), Resources() == before]))


def test_a_quiet_group(group_of):
    """A group whose ranks do nothing has no straggler. An observer maps the group's memory without the right to write,
    and releases it. A group may have a long name, of characters that JSON escapes or that have many bytes. Processes of
    another user are counted, and not searched."""
    name = "\N{GRINNING FACE}" * 50 + "\x01" * 50

    def watch(pids):
        views, rights, released = json.loads(forked(observed).out)
        assert ([view for view, of in views if {*of} == {*pids}], rights, released) == ([name], ["r--s"], True)
        return group_of(name), json.loads(forked(hidden_groups).out if os.getuid() == 0 else "[0, 2, []]")

    _, (found, (count, hidden, problems)) = watched(2, quiet, name, watch=watch)
    assert found["straggler"] is None
    assert [(one["state"], one["rates"]["calls_per_s"]) for one in found["ranks"]] == [("idle", 0)] * 2
    assert (count, problems, hidden >= 2) == (0, [], True)


@pytest.mark.system
def test_a_stopped_rank_is_named(top, group_of):
    """A rank that a signal has stopped is shown as stopped, and as the rank for which the others wait."""

    def watch(pids):
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.3)
        return group_of("stopped"), top("--group", "stopped")[1]

    _, (found, text) = watched(3, busy, "stopped", None, watch=watch)
    states = [(one["state"], one["late"]) for one in found["ranks"]]
    assert states == [("waiting", [1]), ("stopped", []), ("waiting", [1])]
    assert (found["straggler"]["rank"], found["straggler"]["share"] > 0.8) == (1, True)
    assert re.search(r"^rank 1 keeps the others waiting: \d+ % of their time; it is stopped$", text, re.MULTILINE)


def mourning(rendezvous, started, end):
    comm = member(rendezvous, 30, "dead")
    started.ready()
    if comm.rank == 1:
        os.read(end, 1)
        os._exit(3)
    with pytest.raises(PeerLostError, match="rank 1 died"):
        comm.barrier()
    os.read(end, 1)


def test_a_dead_rank_is_named(top, group_of):
    """After a rank has died, the view shows that, and the error that the others raised."""

    def watch(pids):
        os.kill(pids[1], signal.SIGKILL)
        while (found := group_of("dead"))["cause"] is None:
            pass
        return found, top("--group", "dead")[1]

    ends, (found, text) = watched(3, mourning, watch=watch, check=False)
    assert isinstance(ends[1], Died)
    assert [one["state"] for one in found["ranks"]][1] == "dead"
    assert found["ranks"][1]["pid"] is None
    assert found["cause"].startswith("rank 1 died during op 1, barrier,")
    assert re.search(r'^broken: rank 1 died during op 1, barrier, of group "dead"', text, re.MULTILINE)


def test_another_host_is_named(top):
    """If a rank of one host is slow, the view of the other host shows that this one waits for other hosts."""

    def watch(pids):
        time.sleep(0.3)
        return json.loads(top("--json", "--group", "hosts")[1])["groups"], top("--group", "hosts")[1]

    environment = [{"CROSSREDUCE_HOST": name} for name in "aabb"]
    _, (groups, text) = watched(4, busy, "hosts", 3, 2, watch=watch, environment=environment)
    fast, slow = sorted(groups, key=lambda group: group["ranks"][0]["rank"])
    assert [one["rank"] for one in fast["ranks"]] == [0, 1]
    assert (fast["straggler"]["rank"] in (0, 1), fast["straggler"]["hosts"]) == (True, True)
    assert fast["straggler"]["share"] > 0.5
    assert (slow["straggler"]["rank"], slow["straggler"]["hosts"]) == (3, False)
    assert "2 of 4 ranks are on this host, one of 2" in text
    due = r"^exchanges with other hosts, and waits for them, take \d+ % of the time of rank [01]$"
    assert re.search(due, text, re.MULTILINE), text
    assert "between hosts" in text


def test_no_group(top):
    """Without a group the view says so, and ``--once`` exits with 1. Intervals other than 0.1 to 3600 s are refused."""
    code, out, error = top("--interval", "0.1", "--group", "no such\x1b group")
    assert (code, error) == (1, "")
    assert out.startswith('No group of ranks of the name "no such? group" runs in your processes on this machine.\n')
    for interval in ("0", "-1", "nan", "1e9"):
        code, _, error = top("--interval", interval)
        assert code == 2
        assert error.startswith("crossreduce: --interval must be a number of seconds.")


def watches_itself(rendezvous, started, end):
    comm = member(rendezvous, 10, "own")
    comm.barrier()
    observer = Observer()
    observer.search()
    names = [view.name for view in observer.snapshots()]
    observer.close()
    comm.barrier()
    alive = [comm.memory.alive(rank) for rank in range(comm.size)]
    started.ready()
    os.read(end, 1)
    comm.close()
    return "own" in names, alive


def test_the_groups_of_the_own_process_are_left_out():
    """A rank that watches groups does not open its own group's memory: closing it would release the rank's lock, and
    the others would take the rank for dead."""
    found, _ = watched(2, watches_itself, watch=lambda _: None)
    assert found == [(False, [True, True])] * 2


def test_a_group_ends_with_its_ranks_also_if_it_is_still_watched():
    """Memory that only observers have open is not a group: two views do not keep ended groups in each other's lists."""
    observer = Observer()
    watched(2, busy, "watched", None, watch=lambda _: observer.search())
    assert "watched" in {view.name for view in observer.snapshots()}
    command = [sys.executable, "-m", "crossreduce", "top", "--once", "--interval", "0.1", "--group", "watched"]
    ended = subprocess.run(command, capture_output=True, text=True)
    observer.close()
    assert (ended.returncode, ended.stdout.count("runs in your processes")) == (1, 1), ended.stdout


def test_the_live_view_ends_with_q():
    """On a terminal the view is updated until q is pressed; other keys do nothing."""

    def watch(pids):
        ours, theirs = pty.openpty()
        environment = os.environ | {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        command = [sys.executable, "-m", "crossreduce", "top", "--interval", "0.1", "--group", "live"]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment)
        os.close(theirs)
        out, keys = b"", [(1, b"x"), (3, b"q")]  # each key is pressed after this number of updates
        try:
            with suppress(OSError):  # Linux reports the end of a terminal as an error
                while select.select([ours], [], [], 40)[0]:
                    out += os.read(ours, 1 << 16)
                    if keys and out.count(b"keeps the others waiting") >= keys[0][0]:
                        os.write(ours, keys.pop(0)[1])
            return process.wait(100), out.decode()
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    _, (code, out) = watched(3, busy, "live", 1, watch=watch)
    assert code == 0
    assert out.count("rank 1 keeps the others waiting: ") >= 3
    assert out.startswith("\x1b[?1049h")  # another screen, which is left at the end
    assert "\x1b[?1049l" in out
