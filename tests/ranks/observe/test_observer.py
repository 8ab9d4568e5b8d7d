"""An observer reads a group's memory, and refuses memory that does not belong to a group of this version."""

import contextlib
import fcntl
import io
import json
import mmap
import os
import socket
from pathlib import Path

import pytest
from ranks import ranks

from crossreduce import kernels
from crossreduce.cli import main
from crossreduce.errors import decoded
from crossreduce.observe.liveness import is_stopped
from crossreduce.observe.observer import Observer


def observed(fd, look):
    """Call ``look`` in another process, after closing ``fd`` there, and return its result."""

    def rank(_):
        os.close(fd)
        return look()

    return ranks(1, rank)[0]


def groups():
    """Return the names and ranks of all groups, as an observer in this process reads them, and its problems."""
    observer = Observer()
    observer.search()
    return [(view.name, [one.rank for one in view.ranks]) for view in observer.snapshots()], [*observer.problems]


def top(*args):
    """Return what ``crossreduce top`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(["top", "--once", "--interval", "0.1", *args])
    return out.getvalue()


def own(problems):
    """Return the problem with the group of this process. (Tests that run at the same time have groups, too.)"""
    (problem,) = (one for one in problems if f" {os.getpid()} " in one)
    return problem


CURRENT_LAYOUT = 0x6372726564000001  # the number of this version's layout


@pytest.fixture
def described():
    """Return a descriptor of memory like that of a group of one rank, and the offset of its layout number."""
    native = kernels.native()
    fd = os.memfd_create("crossreduce-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, native.SharedMemory.nbytes(1, 8192))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    shared = native.SharedMemory(fd, 0, 1, 8192, 0.0, 1)
    shared.describe([7], b'{"name": "one"}')
    with mmap.mmap(fd, 0) as mapped:
        offset = mapped.find(CURRENT_LAYOUT.to_bytes(8, "little"))
    assert offset > 0
    yield fd, offset
    shared.close()
    os.close(fd)


def test_other_memory_is_refused(described, tmp_path):
    """Memory of another layout, or with an impossible number of ranks, is refused before anything else is read. So are
    descriptors that are closed, too small or not of memory."""
    fd, offset = described
    for layout, rank_count, error in (
        (0, 1, "temporarily unavailable"),  # not described yet
        (CURRENT_LAYOUT + 1, 1, "Protocol error"),  # another version
        (0x1234, 1, "Invalid argument"),  # not memory of a group
        (CURRENT_LAYOUT, 0, "Invalid argument"),
        (CURRENT_LAYOUT, 2000, "Invalid argument"),  # more ranks than the memory has room for
        (CURRENT_LAYOUT, 2**32 - 1, "Invalid argument"),
    ):
        os.pwrite(fd, layout.to_bytes(8, "little") + rank_count.to_bytes(4, "little"), offset)
        with pytest.raises(OSError, match=error):
            kernels.native().Observer(fd)
    empty, folder = os.memfd_create("test"), os.open(tmp_path, os.O_RDONLY)
    for bad in (empty, folder, -1, 1 << 20):
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor|No such device"):
            kernels.native().Observer(bad)
    os.close(empty)
    os.close(folder)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(unsealed, os.pread(fd, 1 << 20, 0))
    with pytest.raises(OSError, match="temporarily unavailable"):  # its owner could truncate it while it is read
        kernels.native().Observer(unsealed)
    os.close(unsealed)


def test_a_cause_is_not_longer_than_its_memory(described):
    """The length of an abort's cause in shared memory may be any number; nothing beyond the cause's memory is read."""
    fd, _ = described
    # 1: the group was aborted. Then come the length of the cause, and the cause.
    os.pwrite(fd, (1).to_bytes(4, "little") + b"\xff" * 4 + b"the cause", 0)
    cause = kernels.native().Observer(fd).cause()
    assert cause.rstrip(b"\0") == b"the cause"


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (b"[" * 2000, "a rank has ended the group without a valid reason."),
        (b'["PeerLostError", [3], ""]', ""),
        (b'["PeerLostError", [3], "\\u001b[2Jlost\\u009b1m\\nall is well"]', "?[2Jlost?1m"),
    ],
)
def test_any_cause_is_shown(described, cause, line):
    """If a group's memory has a cause that no rank can have written, an empty one, or one with control characters, the
    view of the group has one line about it, without control characters."""
    fd, offset = described
    os.pwrite(fd, len(text := b'{"name": "hostile"}').to_bytes(4, "little") + text, offset + 12)
    os.pwrite(fd, (1).to_bytes(4, "little") + len(cause).to_bytes(4, "little") + cause, 0)
    shown = [each for each in observed(fd, lambda: top("--group", "hostile")).splitlines() if "broken" in each]
    assert [each.rstrip() for each in shown] == [f"all ranks have ended; broken: {line}".rstrip()]


@pytest.mark.parametrize("cause", [
    b"junk", b"\xff\xfe", b"[[], 7, {}]", b'["Nope", [], "x"]', b'["json", [], "x"]', b'["Self", [], "x"]',
    b'["PeerLostError", 7, 9]', b'["PeerLostError", ["a"], "x"]', b'["PeerLostError", [1], [1]]',
])  # fmt: skip
def test_an_invalid_cause_is_an_error_of_the_library(cause):
    """A cause that no rank can have written becomes an error that says so, in ranks and in observers."""
    assert str(decoded(cause)).startswith("a rank has ended the group without a valid reason.\n  given: b")


def test_a_descriptor_that_is_no_memory_any_more_is_no_problem(monkeypatch):
    """If a process has closed its group's memory while it was searched, and opened a socket, that is no problem."""
    with socket.socket() as opened:
        link = Path(f"/proc/self/fd/{opened.fileno()}")
        monkeypatch.setattr("crossreduce.observe.observer._descriptors", lambda: ({(0, 0): link}, 0))
        assert groups() == ([], [])


def test_the_name_of_a_process_may_be_no_text():
    """The state of a process is found also if its name is cut within a character, as Linux does after 15 bytes."""

    def rank(_):
        Path("/proc/self/comm").write_bytes("fünfzehn Zeicü".encode()[:15])
        return is_stopped(os.getpid())

    assert ranks(1, rank) == [False]


def test_a_group_of_another_version_is_reported(described):
    """``crossreduce top`` reports which process has a group of another version, and what to do."""
    fd, offset = described
    os.pwrite(fd, bytes([9]), offset)  # another layout number
    problem = own(json.loads(observed(fd, lambda: top("--json")))["problems"])
    assert f"a group of process {os.getpid()} has memory of another version" in problem
    assert "try: crossreduce top in the environment of that process" in " ".join(observed(fd, top).split())


def test_a_malformed_description_is_reported(described):
    """A description that no rank can have written is reported as malformed, and not as memory of another version."""
    fd, offset = described
    for text in (b'{"name": "on', b"[" * 1000, b"[]", b'{"size": "2"}', b"\xff\xfe", b"1e999"):
        os.pwrite(fd, len(text).to_bytes(4, "little") + text, offset + 12)
        problem = own(observed(fd, groups)[1])
        begin = f"a group of process {os.getpid()} has a malformed description, and cannot be shown: "
        assert problem.startswith(begin)


def test_impossible_numbers_of_ops_and_ranks(described):
    """If the memory contains impossible numbers, a snapshot still ends, and shows the group."""
    fd, offset = described
    # The second cache line of the rank's state begins with the number of its op.
    second_line = (offset + 16 + 1000 + 63) // 64 * 64 + 64
    os.pwrite(fd, (2**64 - 1).to_bytes(8, "little"), second_line)
    os.pwrite(fd, (-5).to_bytes(8, "little", signed=True), second_line + 24)  # the rank's number
    name = f"impossible {os.getpid()}"
    text = json.dumps({"name": name}).encode()
    os.pwrite(fd, len(text).to_bytes(4, "little") + text, offset + 12)
    assert (name, [-5]) in observed(fd, groups)[0]
