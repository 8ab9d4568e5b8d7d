"""``crossreduce top``: the straggler, states of ranks, what cannot be read, and that no group notices it."""

import json
import mmap
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from members import Resources, member, memory, starter
from ranks import Died, SocketTransport, ranks

from crossreduce import kernels
from crossreduce.cli.top import group_rates as rates
from crossreduce.cli.top.command import _print
from crossreduce.errors import PeerLostError
from crossreduce.observe.counters import CollectiveStats, WaitStats
from crossreduce.observe.flight_recorder import Op
from crossreduce.ops import ReduceOp
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.observer import GroupView, Observer, RankView


def top(*args, **options):
    """Run ``crossreduce top --once`` in a new process; return its exit code, stdout and stderr."""
    command = [sys.executable, "-m", "crossreduce", "top", "--once", *args]
    environment = os.environ | {"COLUMNS": "140"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False, **options)
    return done.returncode, done.stdout, done.stderr


def group_of(name):
    """Return the group of a name in the JSON of ``top``."""
    code, out, error = top("--json", "--group", name, "--interval", "0.5")
    assert (code, error) == (0, ""), error
    (found,) = json.loads(out)["groups"]
    return found


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

            found = ranks(n, function, started, end, *args, begun=begun, timeout_s=60, **options)
    finally:
        os.close(end)
        os.close(write)
    return found, seen[0]


def has_ended(end):
    return bool(select.select([end], [], [], 0)[0])


def busy(rendezvous, started, end, name, slow):
    """Make calls, before which rank ``slow`` sleeps, and check their results; rank 0 decides when to end."""
    comm = member(rendezvous, 30, name)
    started.ready()
    x = np.empty(1000, np.int64)
    done = np.zeros(1, np.uint8)
    while not done[0]:
        if comm.rank == slow:
            time.sleep(0.01)
        x[:] = comm.rank + 1
        comm.all_reduce(ReduceOp.SUM, memory(x), memory(x))
        assert (x == comm.size * (comm.size + 1) // 2).all()
        done[0] = has_ended(end)
        comm.broadcast(memory(done), 0)
    calls = comm.stats().total.calls
    comm.close()
    return calls


def test_the_straggler_is_named():
    """The view names the slow rank, for which the others wait most of the time, and has calls and bytes per second."""

    def watch(pids):
        time.sleep(0.3)
        return group_of("slow"), top("--group", "slow"), pids

    _, (found, (code, out, error), pids) = watched(4, busy, "slow", 2, watch=watch)
    assert (found["group"], found["size"], found["hosts"], found["cause"]) == ("slow", 4, 1, None)
    assert found["straggler"]["rank"] == 2
    assert 0.5 < found["straggler"]["share"] <= 1
    assert [one["pid"] for one in found["ranks"]] == pids
    for one in found["ranks"]:
        each = one["rates"]
        assert 0 < each["calls_per_s"] < 250
        assert each["bytes_per_s"] == pytest.approx(each["calls_per_s"] * (8000 + 1) / 2, rel=0.2)
        assert one["op"]["text"] in ("all_reduce sum int64[1000]", "broadcast root 0 uint8[1]")
        if one["rank"] != 2:
            assert (each["waiting_for"], each["waiting"] > 0.5) == (2, True)
    assert (code, error) == (0, "")
    assert re.search(r'^group "slow", 4 ranks, op \d+$', out, re.MULTILINE)
    assert re.search(r"^rank 2 keeps the others waiting: \d+ % of their time$", out, re.MULTILINE)
    assert re.search(rf"│ +0 │ +{pids[0]} │ .* │ +\d+ % │ +2 │$", out, re.MULTILINE), out


def test_nobody_is_named_without_cause():
    """A group whose ranks do nothing has no straggler."""

    def watch(pids):
        return group_of("quiet")

    _, found = watched(2, quiet, "quiet", watch=watch)
    assert found["straggler"] is None
    assert [one["state"] for one in found["ranks"]] == ["idle", "idle"]
    assert [one["rates"]["calls_per_s"] for one in found["ranks"]] == [0, 0]


def quiet(rendezvous, started, end, name):
    comm = member(rendezvous, 30, name)
    comm.barrier()
    started.ready()
    os.read(end, 1)
    comm.close()


def test_a_stopped_rank_is_named():
    """A rank that a signal has stopped is shown as stopped, and as the one for which the others wait."""

    def watch(pids):
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.3)
        return group_of("stopped"), top("--group", "stopped")[1]

    _, (found, text) = watched(3, busy, "stopped", None, watch=watch)
    assert [one["state"] for one in found["ranks"]] == ["waiting", "stopped", "waiting"]
    assert [one["late"] for one in found["ranks"]] == [[1], [], [1]]
    assert found["straggler"]["rank"] == 1
    assert found["straggler"]["share"] > 0.8
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


def test_a_dead_rank_is_named():
    """After a rank has died, the view shows that, and the error that the others raised."""

    def watch(pids):
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(1)
        return group_of("dead"), top("--group", "dead")[1]

    ends, (found, text) = watched(3, mourning, watch=watch, check=False)
    assert isinstance(ends[1], Died)
    assert [one["state"] for one in found["ranks"]][1] == "dead"
    assert found["ranks"][1]["pid"] is None
    assert found["cause"].startswith("rank 1 died during op 1, barrier,")
    assert re.search(r'^broken: rank 1 died during op 1, barrier, of group "dead"', text, re.MULTILINE)


def two_hosts(rendezvous, started, end):
    comm = Communicator(rendezvous, SocketTransport(rendezvous), name="hosts", timeout_s=20)
    started.ready()
    x, done = np.ones(1000, np.float32), np.zeros(1, np.uint8)
    while not done[0]:
        if comm.rank == 3:
            time.sleep(0.02)
        comm.all_reduce(ReduceOp.MAX, memory(x), memory(x))
        done[0] = has_ended(end)
        comm.broadcast(memory(done), 0)
    comm.close()


def test_another_host_is_named():
    """If a rank of another host is slow, the view of this host shows that it waits for other hosts."""

    def watch(pids):
        time.sleep(0.3)
        code, out, error = top("--json", "--group", "hosts")
        assert (code, error) == (0, "")
        return json.loads(out)["groups"], top("--group", "hosts")[1]

    environment = [{"CROSSREDUCE_HOST": name} for name in "aabb"]
    _, (groups, text) = watched(4, two_hosts, watch=watch, environment=environment)
    fast, slow = sorted(groups, key=lambda group: group["ranks"][0]["rank"])
    assert [one["rank"] for one in fast["ranks"]] == [0, 1]
    assert (fast["straggler"]["rank"] in (0, 1), fast["straggler"]["hosts"]) == (True, True)
    assert fast["straggler"]["share"] > 0.5
    assert slow["straggler"]["rank"] == 3
    assert slow["straggler"]["hosts"] is False
    assert "2 of 4 ranks are on this host, one of 2" in text
    due = r"^exchanges with other hosts, and waits for them, take \d+ % of the time of rank [01]$"
    assert re.search(due, text, re.MULTILINE), text
    assert "between hosts" in text


def test_no_group():
    """Without a group the view says so, and ``--once`` has the exit code 1."""
    code, out, error = top("--interval", "0.1", "--group", "no such\x1b group")
    assert (code, error) == (1, "")
    assert out.startswith('No group of ranks of the name "no such? group" runs in your processes on this machine.\n')
    code, out, _ = top("--interval", "0.1", "--group", "no such group", "--json")
    assert (code, json.loads(out)["groups"]) == (1, [])


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_invalid_intervals(interval):
    """Intervals that are not 0.1 to 3600 s are refused."""
    code, _, error = top("--interval", interval)
    assert code == 2
    assert error.startswith("crossreduce: --interval must be a number of seconds.")


def test_processes_of_other_users():
    """Processes of another user are counted, not searched, and their groups are not shown."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")

    def watch(pids):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                observer = Observer()
                observer.search()
                os.write(writer, json.dumps([len(observer.snapshots()), observer.hidden, observer.problems]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            found = json.load(file)
        os.waitpid(pid, 0)
        return found

    _, (count, hidden, problems) = watched(2, quiet, "private", watch=watch)
    assert (count, problems) == (0, [])
    assert hidden >= 2


# The group does not notice


def test_a_group_is_not_disturbed():
    """A group gives right results while two views read it every 0.1 s, one of which is killed again and again; it makes
    calls at least half as fast as before, and its memory is mapped without the right to write."""

    def watch(pids):
        views = []
        command = [sys.executable, "-m", "crossreduce", "top", "--json", "--interval", "0.1", "--group", "calm"]
        views.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        lines = [json.loads(views[0].stdout.readline()) for _ in range(5)]
        maps = Path(f"/proc/{views[0].pid}/maps").read_text()
        for _ in range(3):
            other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            other.stdout.readline()
            other.stdout.readline()
            other.kill()
            other.communicate()
        views[0].kill()
        views[0].communicate()
        time.sleep(0.3)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        return lines, maps

    found, (lines, maps) = watched(2, busy, "calm", None, watch=watch)
    assert found[0] == found[1] > 100
    assert len([line for line in lines if line["groups"]]) == 5
    rights = [line.split()[1] for line in maps.splitlines() if "/memfd:crossreduce" in line]
    assert set(rights) == {"r--s"}  # tests that run at the same time have groups, too


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


def test_an_observer_releases_everything():
    """After an observer is closed, or its groups have ended, no descriptor and no mapping is left."""

    def watch(pids):
        before, observer = Resources(), Observer()
        for _ in range(3):
            observer.search()
        names = {view.name for view in observer.snapshots()}
        during = Resources()
        observer.close()
        return names, during == before, Resources() == before

    _, (names, same, after) = watched(2, quiet, "released", watch=watch)
    assert "released" in names
    assert (same, after) == (False, True)


# Narrow terminals


def rows_of(text):
    """Return the cells of each row of a printed table; the first row is the head."""
    lines = [line for line in text.splitlines() if line[0] in "┃│"]
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]


def printed_at(monkeypatch, capsys, width, hosts):
    """Return what ``top`` prints at a width about a group of 3 ranks with large numbers, of which rank 2 is late."""
    op = Op(1234567, "all_reduce sum float32[100000]", 1.0, None)
    waits = [[0, 0, 0.97], [0, 0, 0.97], [0.03, 0, 0]]
    views = []
    for now_s, calls in ((10.0, 0), (11.0, 23_456)):
        seen = view(now_s, "waiting", "waiting", "idle", waits=waits if calls else NO_WAITS, calls=calls)
        each = [one._replace(pid=4_000_000 + one.rank, op=op, late=(2,) if one.rank < 2 else ()) for one in seen.ranks]
        each = [one._replace(total=one.total._replace(nbytes=calls * 10**6)) for one in each]
        views.append(seen._replace(hosts=hosts, ranks=tuple(each)))
    monkeypatch.setenv("COLUMNS", str(width))
    observer = SimpleNamespace(problems=(), hidden=0)
    _print(observer, views[1:], [rates.compare(*views)], None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("width", "hosts", "titles"),
    [
        (160, 1, "rank pid state op call calls/s GB/s waiting for"),
        (115, 1, "rank pid state op call calls/s GB/s waiting for"),
        (100, 1, "rank state op call calls/s GB/s waiting for"),
        (80, 1, "rank state op calls/s GB/s waiting for"),
        (100, 2, "rank state op calls/s GB/s waiting for between hosts"),
        (80, 2, "rank state op calls/s GB/s waiting for between hosts"),
        (50, 2, "rank state GB/s waiting for"),
    ],
)
def test_a_narrow_view_has_whole_numbers(monkeypatch, capsys, width, hosts, titles):
    """A narrow view shortens calls, then leaves out columns; it is never wider than the terminal, and every number in
    it is complete."""
    out = printed_at(monkeypatch, capsys, width, hosts)
    assert all(len(line) <= width for line in out.splitlines()), out
    table = rows_of(out)
    heads, cells = table[:-3], table[-3:]
    assert " ".join(" ".join(" ".join(title).split()) for title in zip(*heads, strict=True)) == titles
    columns = dict(zip(heads[0], zip(*cells, strict=True), strict=True))
    due = {
        "rank": ("0", "1", "2"),
        "pid": ("4000000", "4000001", "4000002"),
        "op": ("1234567",) * 3,
        "calls/s": ("23,456.0",) * 3,
        "GB/s": ("23.456",) * 3,
        "waiting": ("97 %", "97 %", "3 %"),
        "for": ("2", "2", "0"),
    }
    assert {name: columns[name] for name in due if name in columns} == {
        name: cells for name, cells in due.items() if name in columns
    }
    assert columns["state"] in (("waits for rank 2", "waits for rank 2", "idle"), ("waiting", "waiting", "idle"))
    call = "all_reduce sum float32[100000]"
    for text in columns.get("call", ()):
        assert text == call if width >= 160 else call.startswith(text.rstrip("…")) and len(text) >= 12, text
        assert {*re.findall(r"\d+", text)} <= {"32", "100000"}, text


@pytest.mark.parametrize("cause", [None, "rank 1 died."])
def test_a_group_whose_ranks_have_ended(monkeypatch, capsys, cause):
    """A group of which another process keeps the memory, and whose ranks have all ended, is described so."""
    views = [view(now_s, "dead", "left", "dead", waits=NO_WAITS)._replace(cause=cause) for now_s in (1.0, 2.0)]
    _print(SimpleNamespace(problems=(), hidden=0), views[1:], [rates.compare(*views)], None)
    out = capsys.readouterr().out.splitlines()
    assert out[1] == ("all ranks have ended" if cause is None else "all ranks have ended; broken: rank 1 died.")
    alive = [view(now_s, "dead", "idle", "dead", waits=NO_WAITS) for now_s in (1.0, 2.0)]
    _print(SimpleNamespace(problems=(), hidden=0), alive[1:], [rates.compare(*alive)], None)
    assert "ended" not in capsys.readouterr().out


# Memory that is not that of a group of this version


@pytest.fixture
def described():
    """Return a descriptor of memory that looks like that of a group of one rank, and its offset of the layout."""
    native = kernels.native()
    fd = os.memfd_create("crossreduce-test")
    os.ftruncate(fd, native.SharedMemory.nbytes(1, 8192))
    shared = native.SharedMemory(fd, 0, 1, 8192, 0.0, 1)
    shared.describe([7], b'{"name": "one"}')
    with mmap.mmap(fd, 0) as mapped:
        offset = mapped.find((0x6372726564000001).to_bytes(8, "little"))
    assert offset > 0
    yield fd, offset
    shared.close()
    os.close(fd)


def test_what_an_observer_reads(described):
    """The compiled observer returns the description, the ranks, their calls and counters."""
    fd, _ = described
    one = kernels.native().Observer(fd)
    assert json.loads(one.about()) == {"name": "one"}
    assert one.ranks() == [(7, os.getpid(), 0, 0)]
    assert (one.cause(), one.ops(0)) == (b"", [])
    assert one.counts(0) == ([(0, 0, 0, 0, 0)] * 10, [(0, 0)])
    for rank in (-1, 1):
        with pytest.raises(ValueError, match="the rank is out of range"):
            one.ops(rank)
    one.close()
    with pytest.raises(ValueError, match="the observer is closed"):
        one.ranks()


@pytest.mark.parametrize(
    ("layout", "count", "error"),
    [
        (0, 1, BlockingIOError),  # not described yet: EAGAIN
        (0x6372726564000002, 1, "Protocol error"),  # another version
        (0x1234, 1, "Invalid argument"),  # something else
        (0x6372726564000001, 0, "Invalid argument"),
        (0x6372726564000001, 2000, "Invalid argument"),  # more ranks than the memory has room for
        (0x6372726564000001, 2**32 - 1, "Invalid argument"),
    ],
)
def test_other_memory_is_refused(described, layout, count, error):
    """Memory of another layout, with impossible fields or too small is refused before anything else is read."""
    fd, offset = described
    with mmap.mmap(fd, 0) as mapped:
        mapped[offset : offset + 8] = layout.to_bytes(8, "little")
        mapped[offset + 8 : offset + 12] = count.to_bytes(4, "little")
    if isinstance(error, str):
        with pytest.raises(OSError, match=error):
            kernels.native().Observer(fd)
    else:
        with pytest.raises(error, match="temporarily unavailable"):
            kernels.native().Observer(fd)


def test_descriptors_that_are_not_memory(tmp_path):
    """Descriptors that are closed, too small or not memory are refused."""
    empty = os.memfd_create("test")
    folder = os.open(tmp_path, os.O_RDONLY)
    for fd in (empty, folder, -1, 1 << 20):
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor|No such device"):
            kernels.native().Observer(fd)
    os.close(empty)
    os.close(folder)


def test_a_group_of_another_version_is_reported(described, tmp_path):
    """The view says which process has a group of another version, and what to do."""
    fd, offset = described
    with mmap.mmap(fd, 0) as mapped:
        mapped[offset] = 9
    assert tmp_path.exists()
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[fd])
    try:
        _, out, _ = top("--interval", "0.1")
        _, report, _ = top("--interval", "0.1", "--json")
    finally:
        holder.communicate(b"\n", timeout=20)
    own = rf" ({holder.pid}|{os.getpid()}) "
    (problem,) = (one for one in json.loads(report)["problems"] if re.search(own, one))
    assert re.search(rf"a group of process ({holder.pid}|{os.getpid()}) has memory of another version", problem)
    assert "try: crossreduce top in the environment of that process" in " ".join(out.split())


@pytest.mark.parametrize("text", [b'{"name": "on', b"[" * 1000, b"[]", b'{"size": "2"}', b"\xff\xfe", b"1e999"])
def test_a_malformed_description_is_reported(described, text):
    """A description that no rank has written is reported as such, and not as another version's."""
    fd, offset = described
    os.pwrite(fd, len(text).to_bytes(4, "little") + text, offset + 12)
    _, report, error = top("--interval", "0.1", "--json")
    (problem,) = (one for one in json.loads(report)["problems"] if f" {os.getpid()} " in one)
    assert problem.startswith(f"a group of process {os.getpid()} has a malformed description, and cannot be shown: ")
    assert error == ""


def test_impossible_numbers_of_ops_and_ranks(described):
    """Whatever numbers the memory has, the view ends and shows the group."""
    fd, offset = described
    state = (offset + 16 + 1000 + 63) // 64 * 64  # of the rank; its second cache line begins with the op's number
    assert kernels.native().Observer(fd).ranks()[0][3] == 0
    os.pwrite(fd, (2**64 - 1).to_bytes(8, "little"), state + 64)
    os.pwrite(fd, (-5).to_bytes(8, "little", signed=True), state + 64 + 24)
    name = f"impossible {os.getpid()}"  # tests that run at the same time have groups, too
    text = json.dumps({"name": name}).encode()
    os.pwrite(fd, len(text).to_bytes(4, "little") + text, offset + 12)
    code, report, error = top("--interval", "0.1", "--json", "--group", name)
    assert (code, error) == (0, "")
    (found,) = json.loads(report)["groups"]
    assert [one["rank"] for one in found["ranks"]] == [-5]


def test_the_first_rank_describes_all():
    """Once an observer can read the memory, all ranks have their numbers: the first rank writes them."""
    native = kernels.native()
    fd = os.memfd_create("test")
    os.ftruncate(fd, native.SharedMemory.nbytes(3, 8192))
    shared = [native.SharedMemory(fd, rank, 3, 8192, 0.0, 1) for rank in range(3)]
    for rank in (1, 2):
        shared[rank].describe([4, 6, 9], b"{}")
        with pytest.raises(BlockingIOError, match="temporarily unavailable"):
            native.Observer(fd)
    shared[0].describe([4, 6, 9], b"{}")
    assert [rank for rank, *_ in native.Observer(fd).ranks()] == [4, 6, 9]
    with pytest.raises(ValueError, match="the number of each rank of the host"):
        shared[0].describe([4, 6], b"{}")
    with pytest.raises(OverflowError, match="too"):
        shared[0].describe([4, 6, 1 << 63], b"{}")
    for one in shared:
        one.close()
    os.close(fd)


@pytest.mark.parametrize("name", ["\N{GRINNING FACE}" * 100, "\x01" * 100])
def test_names_that_json_makes_longer(name):
    """Groups with long names of characters that JSON escapes, or that have many bytes, are shown."""

    def watch(pids):
        observer = Observer()
        observer.search()
        found = [view.name for view in observer.snapshots() if {one.pid for one in view.ranks} == {*pids}]
        observer.close()
        return found

    _, names = watched(2, quiet, name, watch=watch)
    assert names == [name]


# The live view


def test_the_live_view_ends_with_q():
    """On a terminal the view is updated until q is pressed; other keys do nothing."""

    def watch(pids):
        ours, theirs = pty.openpty()
        environment = os.environ | {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        command = [sys.executable, "-m", "crossreduce", "top", "--interval", "0.2", "--group", "live"]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment)
        os.close(theirs)
        out, deadline, typed = b"", time.monotonic() + 40, []
        try:
            while time.monotonic() < deadline:
                if not select.select([ours], [], [], 0.5)[0]:
                    continue
                try:
                    out += os.read(ours, 1 << 16)
                except OSError:  # Linux reports the end of a terminal as an error
                    break
                frames = out.count(b"keeps the others waiting")
                for key, after in ((b"x", 1), (b"q", 3)):
                    if frames >= after and key not in typed:
                        os.write(ours, key)
                        typed.append(key)
            return process.wait(20), typed, out.decode()
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    _, (code, typed, out) = watched(3, busy, "live", 1, watch=watch)
    assert (code, typed) == (0, [b"x", b"q"])
    assert "rank 1 keeps the others waiting: " in out
    assert out.startswith("\x1b[?1049h")  # another screen, which is left at the end
    assert "\x1b[?1049l" in out


# Rates


def view(now_s, *states, waits, calls=10, between=(0.0, 0.0, 0.0)):
    every = tuple(
        RankView(rank, 100 + rank, state, None, (), CollectiveStats(calls, calls * 1000, 1, sum(w), between[rank]),
                 {other: WaitStats(1, seconds) for other, seconds in enumerate(w) if seconds})
        for rank, (state, w) in enumerate(zip(states, waits, strict=True))
    )  # fmt: skip
    return GroupView((1, 2), "g", "t", "v", 3, 1, now_s, None, every)


STATES = ("running", "running", "running")
NO_WAITS = [[0, 0, 0]] * 3


def test_rates_between_two_snapshots():
    """Rates are differences over the time between snapshots; the straggler's share is that of the others' time."""
    before = view(10.0, *STATES, waits=NO_WAITS)
    after = view(12.0, *STATES, waits=[[0, 0, 1.5], [0.1, 0, 1.3], [0.2, 0, 0]], calls=30)
    found = rates.compare(before, after)
    assert found.ranks[0] == rates.RankRates(10.0, 10_000.0, 0.75, 2, 0.0)
    assert found.ranks[1][2:4] == (pytest.approx(0.7), 2)
    assert found.straggler == rates.Straggler(2, pytest.approx(2.8 / 4), False)
    assert rates.compare(None, after) == rates.GroupRates((None,) * 3, None)
    assert rates.compare(after, after).straggler is None
    assert rates.compare(before, view(12.0, *STATES, waits=[[0, 0, 0.3], [0, 0, 0], [0, 0, 0]])).straggler is None


def test_a_group_with_other_ranks_is_new():
    """If a group's memory has other ranks than before, there is nothing to compare."""
    after = view(12.0, *STATES, waits=NO_WAITS)
    other = after._replace(now_s=10.0, ranks=(*after.ranks[:2], after.ranks[2]._replace(rank=0)))
    assert rates.compare(other, after) == rates.GroupRates((None,) * 3, None)
    assert rates.compare(after._replace(now_s=10.0, ranks=after.ranks[:2]), after).ranks == (None,) * 3
    assert rates.compare(other, other._replace(now_s=12.0)).ranks[2] == rates.RankRates(0.0, 0.0, 0.0, None, 0.0)


def test_ranks_that_ended_do_not_lower_the_share():
    """Ranks that are dead or have left cannot wait: the share is that of the others."""
    before = view(10.0, *STATES, waits=NO_WAITS)
    after = view(11.0, "waiting", "dead", "stopped", waits=[[0, 0, 0.9], [0, 0, 0], [0, 0, 0]])
    assert rates.compare(before, after).straggler == rates.Straggler(2, pytest.approx(0.9), False)


def test_waits_for_other_hosts():
    """A rank that is late because it exchanges data with other hosts is not blamed itself."""
    before = view(10.0, *STATES, waits=NO_WAITS)
    after = view(11.0, *STATES, waits=[[0, 0, 0], [0.9, 0, 0], [0.9, 0, 0]], between=(0.8, 0, 0))
    found = rates.compare(before, after)
    assert found.straggler == rates.Straggler(0, pytest.approx(0.8), True)
    assert found.sentence == "exchanges with other hosts, and waits for them, take 80 % of the time of rank 0"
    nobody = view(11.0, *STATES, waits=NO_WAITS, between=(0.1, 0.7, 0.2))
    assert rates.compare(before, nobody).straggler == rates.Straggler(1, pytest.approx(0.7), True)
    other = view(11.0, *STATES, waits=[[0, 0, 0.6], [0, 0, 0.9], [0, 0, 0]], between=(0.3, 0, 0))
    assert rates.compare(before, other).straggler == rates.Straggler(2, pytest.approx(0.75), False)
