"""What an observer reads of a group's memory, and how memory that is not that of a group of this version is refused."""

import contextlib
import fcntl
import io
import json
import mmap
import os

import pytest
from ranks import ranks

from crossreduce import kernels
from crossreduce.cli import main
from crossreduce.observe.observer import Observer


def observed(fd, look):
    """Return what a function returns in another process, which closes the descriptor of the group's memory."""

    def rank(_):
        os.close(fd)
        return look()

    return ranks(1, rank)[0]


def groups():
    """Return the names and ranks of the groups that this process sees, and the observer's problems."""
    observer = Observer()
    observer.search()
    return [(view.name, [one.rank for one in view.ranks]) for view in observer.snapshots()], [*observer.problems]


def top(*args):
    """Return what ``crossreduce top`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(["top", "--once", "--interval", "0.1", *args])
    return out.getvalue()


def own(problems):
    """Return the problem with the group of this process; tests that run at the same time have groups, too."""
    (problem,) = (one for one in problems if f" {os.getpid()} " in one)
    return problem


@pytest.fixture
def described():
    """Return a descriptor of memory that looks like that of a group of one rank, and its offset of the layout."""
    native = kernels.native()
    fd = os.memfd_create("crossreduce-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, native.SharedMemory.nbytes(1, 8192))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    shared = native.SharedMemory(fd, 0, 1, 8192, 0.0, 1)
    shared.describe([7], b'{"name": "one"}')
    with mmap.mmap(fd, 0) as mapped:
        offset = mapped.find((0x6372726564000001).to_bytes(8, "little"))
    assert offset > 0
    yield fd, offset
    shared.close()
    os.close(fd)


def test_other_memory_is_refused(described, tmp_path):
    """Memory of another layout, with impossible fields or too small is refused before anything else is read; and so are
    descriptors that are closed, too small or not memory."""
    fd, offset = described
    current = 0x6372726564000001
    for layout, count, error in (
        (0, 1, "temporarily unavailable"),  # not described yet
        (current + 1, 1, "Protocol error"),  # another version
        (0x1234, 1, "Invalid argument"),  # something else
        (current, 0, "Invalid argument"),
        (current, 2000, "Invalid argument"),  # more ranks than the memory has room for
        (current, 2**32 - 1, "Invalid argument"),
    ):
        os.pwrite(fd, layout.to_bytes(8, "little") + count.to_bytes(4, "little"), offset)
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


def test_a_group_of_another_version_is_reported(described):
    """The view says which process has a group of another version, and what to do."""
    fd, offset = described
    os.pwrite(fd, bytes([9]), offset)
    problem = own(json.loads(observed(fd, lambda: top("--json")))["problems"])
    assert f"a group of process {os.getpid()} has memory of another version" in problem
    assert "try: crossreduce top in the environment of that process" in " ".join(observed(fd, top).split())


def test_a_malformed_description_is_reported(described):
    """A description that no rank has written is reported as such, and not as another version's."""
    fd, offset = described
    for text in (b'{"name": "on', b"[" * 1000, b"[]", b'{"size": "2"}', b"\xff\xfe", b"1e999"):
        os.pwrite(fd, len(text).to_bytes(4, "little") + text, offset + 12)
        problem = own(observed(fd, groups)[1])
        assert problem.startswith(
            f"a group of process {os.getpid()} has a malformed description, and cannot be shown: "
        )


def test_impossible_numbers_of_ops_and_ranks(described):
    """Whatever numbers the memory has, the view ends and shows the group."""
    fd, offset = described
    second_line = (offset + 16 + 1000 + 63) // 64 * 64 + 64  # of the rank's state: it begins with the op's number
    os.pwrite(fd, (2**64 - 1).to_bytes(8, "little"), second_line)
    os.pwrite(fd, (-5).to_bytes(8, "little", signed=True), second_line + 24)
    name = f"impossible {os.getpid()}"
    text = json.dumps({"name": name}).encode()
    os.pwrite(fd, len(text).to_bytes(4, "little") + text, offset + 12)
    assert (name, [-5]) in observed(fd, groups)[0]
