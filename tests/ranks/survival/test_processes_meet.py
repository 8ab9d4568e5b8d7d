"""How ranks of crossreduce.processes meet: launchers, arguments, keys, and missing, late or duplicate ranks."""

import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from free_port import free_port
from kinds_of_groups import die, summed, wait_until
from ranks import Died, ranks

from crossreduce import processes
from crossreduce.errors import ArgumentError, CollectiveTimeout, ContextError, MismatchError, PeerLostError, encoded
from crossreduce.processes import meeting, rank_group
from crossreduce.ranks.agreement import agreement
from crossreduce.ranks.connections.rendezvous import MET, StoreRendezvous
from crossreduce.ranks.connections.store import StoreClient, StorePart
from crossreduce.ranks.survival import joiner
from crossreduce.ranks.survival.formation import GroupKind
from crossreduce.torch import elastic

LONG_S = 1800.0
PROGRAM = """
import sys
import numpy as np
import crossreduce.processes
with crossreduce.processes.join() as group:
    sys.stdout.write(f"{group.rank} {group.size} {int(group.all_reduce(np.array(group.rank + 1)))}\\n")  # in one piece
    sys.stdout.flush()
    group, _ = group.committed(lambda group: group.barrier())
    group = group.shrink()
assert not {"torch", "mpi4py", "jax"} & {*sys.modules}
"""


def test_ranks_find_each_other_by_the_variables_of_launchers(address):
    """Programs that a launcher starts with RANK and the other variables need no arguments, and load no framework."""
    host, port = address.split(":")
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": host, "MASTER_PORT": port, "CROSSREDUCE_KEY": "a secret"}
    command, environment = [sys.executable, "-c", PROGRAM], {**os.environ, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipes) for rank in range(3)]
    output = [process.communicate(timeout=200)[0] for process in started]
    assert output == [f"{rank} 3 6\n" for rank in range(3)]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((), {}, r"rank was not given, and RANK is not set.*\n.*rank=None\n.*torchrun"),
        ((0,), {}, "size was not given, and WORLD_SIZE is not set"),
        ((), {"RANK": "one", "WORLD_SIZE": "2"}, r"RANK must be an integer.*\n.*'one'"),
        ((1.5, 2), {}, "rank must be an integer"),
        ((2, 2), {}, r"at least 0 and less than the size.*\n.*rank 2, size 2"),
        ((-1, 2), {}, "at least 0 and less than the size"),
        ((0, 0), {}, "at least 0 and less than the size"),
        ((0, 2), {}, r"address was not given.*\n.*MASTER_ADDR=None, MASTER_PORT=None"),
        ((0, 2), {"MASTER_ADDR": "node0"}, "MASTER_ADDR=node0, MASTER_PORT=None"),
        ((0, 2), {"MASTER_ADDR": "node0", "MASTER_PORT": "ssh"}, r"not an address.*\n.*'node0:ssh'.*\n.*node0:29500"),
        ((0, 2, "node0"), {}, "not an address"),
        ((0, 2, "node0:65536"), {}, "not an address"),
        ((0, 2, "node0:0"), {}, "not an address"),
        ((0, 2, ("node0", 1)), {}, "not an address"),
        ((0, 2, ":29500"), {}, "not an address"),
        ((1, 2, "a..b:29500"), {}, "not an address"),
        ((1, 2, f"{'a' * 300}:29500"), {}, "not an address"),
        ((1, 2, "node 0:29500"), {}, "not an address"),
        ((0, 1 << 17, "node0:29500"), {}, r"size, which is at most 65536\.\n.*size 131072"),
        ((True, 2), {}, r"rank must be an integer.*\n.*True"),
    ],
)
def test_invalid_arguments_and_variables(monkeypatch, arguments, variables, message):
    """A missing or invalid argument raises an error that names it, its value and a remedy."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=message):
        processes.join(*arguments)


def test_invalid_options():
    """An invalid key, timeout or name is an ArgumentError, whose text does not contain the key."""
    for options, message in (
        ({"key": b"a secret"}, r"key must be a str.*\n.*bytes"),
        ({"timeout_s": "10"}, "timeout_s must be a number"),
        ({"name": 5}, r"name must be a str.*\n.*5"),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            processes.join(0, 1, **options)
        assert "a secret" not in str(caught.value)
    processes.join(0, 1, key="\ud800").close()  # as in an environment variable that is not UTF-8


def at_once(functions):
    """Run functions in threads, and return the errors that they raise."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.exception(60) for future in [pool.submit(function) for function in functions]]


def meets(address, *numbers, timeout_s=600.0):
    """Let threads, as processes, join at the same time. ``numbers``: their ranks and sizes. Return their errors."""
    return at_once([lambda pair=pair: processes.join(*pair, address, timeout_s=timeout_s) for pair in numbers])


def test_sizes_that_differ(address):
    """If ranks have different sizes, all of them raise a MismatchError at once. It names two sizes and their ranks."""
    errors = meets(address, (0, 3), (1, 3), (2, 4))
    assert {type(error) for error in errors} == {MismatchError}
    for error in errors:
        assert re.search(r"size is \d on rank \d and \d on rank \d\.\n.*same size", str(error)), error


def test_a_rank_that_is_there_twice(address):
    """If two processes have the same rank, all waiting processes raise an error that names this rank at once. A process
    that comes later raises it, too."""
    raised = threading.Event()

    def join(rank):
        if rank == 2:
            raised.wait(60)
        try:
            processes.join(rank, 3, address, timeout_s=20)
        finally:
            raised.set()

    errors = at_once([partial(join, rank) for rank in (0, 1, 1, 2)])
    assert [type(error) for error in errors] == [ArgumentError] * 4, errors
    assert all("two processes have joined as rank 1" in str(error) for error in errors)


class Interrupted(StorePart):
    """A part of a store that calls ``before``, in place of another process, before each ``compare_set``."""

    def compare_set(self, *arguments):
        self.before()
        return super().compare_set(*arguments)


def test_ranks_meet_either_all_or_not_at_all():
    """When all ranks have come, an error may be published. If no rank has noticed before that all have come, all ranks
    raise the error. If one has noticed it, none raises the error."""
    for fails in (True, False):
        served = StoreClient(b"key")
        parts = [Interrupted(served, "meet/") for _ in range(2)]
        first, second = (StoreRendezvous(part, rank, 2, 5) for rank, part in enumerate(parts))
        third = StoreRendezvous(StorePart(served, "meet/"), 1, 2, 5)
        error = ArgumentError("two processes have joined as rank 1.")
        parts[0].before = partial(third.publish_abort, encoded(error)) if fails else lambda: None
        parts[1].before = lambda: None
        parts[1].set("1/1", b".")  # the second rank has come
        if fails:
            for rendezvous in (first, second):
                with pytest.raises(ArgumentError, match="two processes"):
                    rendezvous.meet()
        else:
            first.meet()
            assert third.publish_abort(encoded(error)) == MET
            second.meet()
        served.close()


def late(rendezvous, address, folder):
    if rendezvous.rank < 2:
        group = processes.join(rendezvous.rank, 2, address, timeout_s=LONG_S)
        found = summed(group)
        Path(folder, f"made{group.rank}").touch()
        while not group.all_reduce(np.array(Path(folder, "refused").exists()), "max"):
            found = summed(group)
        group.close()
        return found
    wait_until(lambda: all(Path(folder, f"made{rank}").exists() for rank in range(2)))
    errors = (1, 2, ArgumentError, "joined as rank 1"), (1, 3, MismatchError, "size is 3 on rank 1 and 2 on rank")
    for rank, size, kind, message in errors:
        with pytest.raises(kind, match=message) as caught:
            processes.join(rank, size, address, timeout_s=LONG_S)
        assert "join_invited" in str(caught.value)
    Path(folder, "refused").touch()
    return None


def test_a_process_that_comes_too_late_does_not_end_the_group(address, tmp_path):
    """A process that joins as a rank of a complete group gets an error, and the group continues."""
    assert ranks(3, late, address, tmp_path) == [30, 30, None]


def test_missing_ranks_are_named(address):
    """After the timeout, the waiting ranks raise a CollectiveTimeout that names the ranks that have not come."""
    for error in meets(address, (0, 4), (2, 4), timeout_s=1):
        assert isinstance(error, CollectiveTimeout), error
        assert error.ranks == (1, 3)
        assert "ranks 1, 3 did not reach the rendezvous within 1 s" in str(error)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_at_which_nothing_listens(host):
    """If rank 0 does not start, or its host has no address, the error after the timeout has the address and why."""
    port = free_port()
    with pytest.raises(CollectiveTimeout, match=f"rank 1 did not reach rank 0 at {host}:{port} within 0.5 s") as caught:
        processes.join(1, 2, f"{host}:{port}", timeout_s=0.5)
    assert caught.value.ranks == (0,)
    assert re.search("given: .*(refused|known|resol)", str(caught.value))


def test_a_port_at_which_another_program_listens(monkeypatch):
    """Rank 0 raises an error if its port is taken. Other ranks raise a CollectiveTimeout if the program that listens
    there sends nothing, and an ArgumentError if it answers wrongly."""
    monkeypatch.setattr(meeting, "_REFUSED_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"rank 0 cannot listen at port {port}\.\n.*in use"):
            processes.join(0, 2, f"127.0.0.1:{port}")
        silent = rf"the program that listens at 127.0.0.1:{port} did not answer rank 1"
        with pytest.raises(CollectiveTimeout, match=silent) as caught:
            processes.join(1, 2, f"127.0.0.1:{port}", timeout_s=0.5)
        assert caught.value.ranks == (0,)

        def hang_up():
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        refused = rf"listens at 127.0.0.1:{port} does not accept rank 1\.\n.*\n.*same key"
        with pytest.raises(ArgumentError, match=refused):
            processes.join(1, 2, f"127.0.0.1:{port}")
        listener.shutdown(socket.SHUT_RDWR)


def with_key(rendezvous, address):
    with processes.join(rendezvous.rank, 2, address, key="a secret") as group:
        return summed(group)


def test_ranks_with_another_key_are_refused(address, monkeypatch):
    """A rank with another key than rank 0 gets an error, and the error of rank 0 mentions the key. The argument ``key``
    takes precedence over the environment variable."""
    monkeypatch.setattr(meeting, "_REFUSED_S", 0.3)
    monkeypatch.setenv("CROSSREDUCE_KEY", "of the environment")
    join_0 = partial(processes.join, 0, 2, address, key="of rank 0", timeout_s=3)
    first, second = at_once([join_0, partial(processes.join, 1, 2, address, timeout_s=3)])
    assert isinstance(first, CollectiveTimeout)
    assert first.ranks == (1,)
    assert re.search(r"try:.*the same key on all ranks: \d+ connections to this rank did not prove", str(first))
    assert isinstance(second, ArgumentError)
    assert "does not accept rank 1" in str(second)
    assert ranks(2, with_key, f"127.0.0.1:{free_port()}") == [30, 30]


def at_localhost(rendezvous, name, port):
    resolve = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *rest: resolve("127.0.0.9" if host == name else host, *rest)
    with processes.join(rendezvous.rank, 2, f"{name}:{port}", timeout_s=20) as group:
        return summed(group)


@pytest.mark.parametrize("name", ["localhost", "LocalHost.", "a.localhost"])
def test_ranks_connect_to_the_address_of_localhost_at_which_rank_0_listens(name):
    """If "localhost" has another address, too, such as ::1, no rank connects to a program that listens there."""
    port = free_port()
    with socket.create_server(("127.0.0.9", port)) as stranger:
        assert ranks(2, at_localhost, name, port) == [30, 30]
        assert select.select([stranger], [], [], 0)[0] == []


def loses_the_first(rendezvous, address):
    if rendezvous.rank == 0:
        threading.Timer(0.5, die).start()
    with pytest.raises(PeerLostError, match="cannot be reached; rank 0, which runs it, has probably ended") as caught:
        processes.join(rendezvous.rank, rendezvous.size + 1, address, timeout_s=20)
    return caught.value.ranks


def test_rank_0_dies_while_others_wait_for_it(address):
    """If rank 0 dies before all ranks have come, the waiting ranks raise a PeerLostError that names it at once."""
    lost, *found = ranks(3, loses_the_first, address, check=False)
    assert isinstance(lost, Died)
    assert found == [(0,), (0,)]


# Processes with an invitation


PLACE = '[["127.0.0.1"], 1, "0123456789abcdef0123456789abcdef", "machine"]'
DAMAGED_PLACES = [
    PLACE.replace(*change)
    for change in [
        ('"127.0.0.1"', "7"), ('["127.0.0.1"]', '"127.0.0.1"'), ("1, ", "99999999, "), ("1, ", "1e400, "),
        ("1, ", "true, "), ("1, ", "0, "), ("0123", "xxxx"), ("0123", ""), ('"0123', '7, "0123'), ('"machine"', "7"),
    ]
]  # fmt: skip


def test_invitations_that_cannot_be_used():
    """An invitation to a group of torch, and a text with any damage, raise an ArgumentError that does not contain the
    keys. A closed group makes no invitation, and its earlier ones raise a PeerLostError."""
    with processes.join(0, 1) as group:
        text = group.invitation()
    with pytest.raises(ContextError, match='group "world" is closed'):
        group.invitation()
    with pytest.raises(ArgumentError, match=f"not an invitation.*\n.*a str of {len(text) - 5} characters") as caught:
        processes.join_invited(text[:-5])
    assert text[-40:-5] not in str(caught.value)
    damaged = [7, "[" * 100_000, '["NumPy ranks", "token", []]', f'["NumPy ranks", 7, [{PLACE}]]']
    damaged += [f'[7, "token", [{PLACE}]]', *(f'["NumPy ranks", "token", [{each}]]' for each in DAMAGED_PLACES)]
    for each in damaged:
        with pytest.raises(ArgumentError, match="this is not an invitation"):
            processes.join_invited(each)
    other = text.replace('"NumPy ranks"', f'"{elastic.KIND}"')
    assert other != text
    with pytest.raises(ArgumentError, match=r"of another kind.*\n.*a group of torch"):
        processes.join_invited(other)
    with pytest.raises(PeerLostError, match="all ranks of the group that this process knows have ended, or have left"):
        processes.join_invited(text, timeout_s=5)


def forms_slowly(rendezvous, address, folder):
    invited = Path(folder, "invitation")
    if rendezvous.rank == 1:
        joiner._FORMING_S = 0.5
        wait_until(invited.exists)
        with pytest.raises(CollectiveTimeout, match="did not let this process join"):
            processes.join_invited(invited.read_text(), timeout_s=1)
        Path(folder, "left").touch()
        return None

    def slow(*arguments):
        wait_until(Path(folder, "left").exists)
        return rank_group.make_group(*arguments)

    group = processes.join(0, 1, timeout_s=LONG_S)
    kind, rank_group.KIND = rank_group.KIND, GroupKind("NumPy ranks", StoreClient, slow)
    Path(folder, "partial").write_text(group.invitation())
    Path(folder, "partial").rename(invited)
    wait_until(group.communicator.agreements.joiners)
    made = group.grow(50)
    rank_group.KIND = kind
    return made, summed(group)


def test_a_process_that_joins_waits_for_a_limited_time(address, tmp_path):
    """join_invited raises an error after its timeout and the time for forming the group, although the timeout of the
    group is longer. The ranks then continue without that process."""
    assert ranks(2, forms_slowly, address, tmp_path) == [(None, 10), None]


def test_processes_that_do_not_ask_again_are_forgotten(monkeypatch):
    """A rank forgets the request of a process to join if the process does not repeat it in time."""
    monkeypatch.setattr(agreement, "JOINER_S", 0.05)
    with processes.join(0, 1) as group:
        agreements = group.communicator.agreements
        for token in ("first", "second"):
            agreements.answer({"what": "join", "token": token, "place": []})
            time.sleep(0.1)
        assert [*agreements.waiting] == ["second"]
        assert agreements.joiners() == {}
        assert agreements.waiting == {}
