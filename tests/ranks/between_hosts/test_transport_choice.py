"""Which transport a group takes: by argument, by variable, by what the hosts have; plug-ins; errors."""

import itertools
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from free_port import free_port
from paths import ROOT
from ranks import ranks

from crossreduce.errors import ArgumentError, BackendError, MismatchError, ReductionError
from crossreduce.ranks.transports import addresses, choice, ucx
from crossreduce.ranks.transports.choice import Offer, agreed, offer, transport_name
from crossreduce.ranks.transports.tcp import TcpTransport

VERSION = "ucx " + ".".join(ucx.version().split(".")[:2])
AUTO, WITH_UCX, TCP, UCX = (
    Offer("auto", "tcp", ""),
    Offer("auto", VERSION, ""),
    Offer("tcp", "tcp", ""),
    Offer("ucx", VERSION, ""),
)


def test_the_ranks_agree_on_one_transport():
    """UCX, of one version, is taken if all ranks want it, or if all of them may choose and have an RDMA device."""
    assert [agreed([each, each], range(2)) for each in (AUTO, WITH_UCX, TCP, UCX)] == ["tcp", "ucx", "tcp", "ucx"]
    assert agreed([AUTO, WITH_UCX], range(2)) == agreed([WITH_UCX, AUTO], range(2)) == "tcp"
    older = "ucx 1.13"
    assert agreed([WITH_UCX, WITH_UCX._replace(usable=older)], range(2)) == "tcp"
    with pytest.raises(MismatchError, match=f"versions of UCX(?s:.*){VERSION} on ranks 3, 4; {older} on rank 5"):
        agreed([UCX, UCX, UCX._replace(usable=older)], (3, 4, 5))
    for one, other in itertools.permutations([AUTO, TCP, UCX], 2):
        with pytest.raises(MismatchError, match=f"{one.wanted} on rank 5; {other.wanted} on ranks 6, 7"):
            agreed([one, other, other._replace(usable="other")], (5, 6, 7))
    with pytest.raises(BackendError, match=r"(?s)rank 9 cannot use the transport ucx.*too old"):
        agreed([UCX, UCX._replace(problem="it is too old")], (8, 9))


def test_names_of_transports(monkeypatch):
    """An argument comes before the variable. A wrong name raises an error that lists the names."""
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert (transport_name(None), transport_name("ucx")) == ("auto", "ucx")
    monkeypatch.setenv(choice.VARIABLE, "tcp")
    assert (transport_name(None), transport_name("auto")) == ("tcp", "auto")
    for wrong in ("", "TCP", 3, b"tcp"):
        with pytest.raises(ArgumentError, match=r"(?s)transport is not the name.*one of auto, tcp, ucx"):
            transport_name(wrong)
    monkeypatch.setenv(choice.VARIABLE, "rdma")
    with pytest.raises(ArgumentError, match=r"(?s)CROSSREDUCE_TRANSPORT is not the name of a transport.*rdma"):
        transport_name(None)


def test_ucx_is_chosen_where_an_rdma_device_is_active(monkeypatch, tmp_path):
    """A device without an active port does not count. Without a library, or with an old one, TCP is taken."""
    monkeypatch.setattr(ucx, "_DEVICES", tmp_path)
    monkeypatch.delenv("CROSSREDUCE_SOCKETS", raising=False)
    assert not ucx.has_device()
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("1: DOWN\n")
    assert offer("auto") == AUTO
    state.write_text("4: ACTIVE\n")
    assert (offer("auto"), offer("ucx"), offer("tcp")) == (WITH_UCX, UCX, TCP)
    monkeypatch.setattr(ucx.importlib.util, "find_spec", lambda _: None)
    for library, reason in (
        ("libno.so.0", "cannot open shared object file"),
        ("libm.so.6", "too old: it lacks ucp_get"),
    ):
        ucx._library.cache_clear()
        monkeypatch.setattr(ucx, "_LIBRARY", library)
        assert offer("auto") == AUTO
        assert reason in offer("ucx").problem
        assert "pip install libucx-cu12" in offer("ucx").problem
    ucx._library.cache_clear()


def test_the_layout_is_that_of_ucx():
    """What the library passes to UCX has the layout that the headers of UCX define."""
    headers = Path(next(iter(ucx.importlib.util.find_spec("libucx").submodule_search_locations)), "include")
    source, own = ROOT / "tests/support/native/ucx_layout.cpp", ROOT / "src/crossreduce/native/ucx"
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", f"-I{own}", f"-I{headers}", source], check=True)


def joined(rendezvous, port):
    """Join a group of two hosts. Return the error, and how many groups of this process remain half-made."""
    from crossreduce import processes

    try:
        with processes.join(rendezvous.rank, rendezvous.size, f"127.0.0.1:{port}", timeout_s=100) as group:
            return group.all_reduce(np.ones(2)).tolist()
    except ReductionError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            {"CROSSREDUCE_TRANSPORT": "auto"},
            {"CROSSREDUCE_TRANSPORT": "ucx"},
            "MismatchError: the ranks want different .* auto on rank 0; ucx on rank 1",
        ),
        (
            {"CROSSREDUCE_TRANSPORT": "ucx"},
            {"CROSSREDUCE_TRANSPORT": "ucx", "UCX_NET_DEVICES": "none9"},
            "rank 1.*UCX cannot",
        ),
        ({"CROSSREDUCE_TRANSPORT": "ucx"}, {"CROSSREDUCE_TRANSPORT": "ucx", "UCX_TLS": "rc"}, "rank 1.*UCX cannot"),
        (
            {"CROSSREDUCE_SOCKETS": "2"},
            {"CROSSREDUCE_SOCKETS": ""},
            "MismatchError: the ranks want different numbers of connections .* 2 on rank 0; unset on rank 1",
        ),
        *(
            ({}, {"CROSSREDUCE_SOCKETS": each}, f"rank 1: CROSSREDUCE_SOCKETS is not a number .*'{each}'.* 1 to 64")
            for each in ("65", "-1", "four", "1.0", "\u0664")
        ),
    ],
)
def test_ranks_that_cannot_use_the_same_transport_raise_one_error(first, second, text):
    """While the group is made, all ranks raise the same error, which names the rank, the cause and the remedy."""
    environment = [first | {"CROSSREDUCE_HOST": "a"}, second | {"CROSSREDUCE_HOST": "b"}]
    one, other = ranks(2, joined, free_port(), environment=environment)
    assert one == other
    assert re.search(text, one, re.DOTALL), one
    assert next(iter(second or first)) in one


def with_fork(rendezvous, port):
    """Return why this process, and one that it forks while it has a group, cannot use UCX."""
    from crossreduce import processes

    with processes.join(rendezvous.rank, rendezvous.size, f"127.0.0.1:{port}", timeout_s=100):
        read, write = os.pipe()
        if not (child := os.fork()):
            os.write(write, ucx.unusable().encode())
            os._exit(0)
        os.waitpid(child, 0)
        return ucx.unusable(), os.read(read, 1000).decode()


def test_a_forked_process_does_not_use_ucx():
    """UCX does not work in a process that was forked while it was in use; there, "auto" takes TCP, and "ucx" fails."""
    environment = [{"CROSSREDUCE_TRANSPORT": "ucx", "CROSSREDUCE_HOST": host} for host in "ab"]
    for own, forked in ranks(2, with_fork, free_port(), environment=environment):
        assert own == ""
        assert "UCX was in use when process" in forked


class Plugin:
    """A transport of another package, which uses TCP, and counts its messages."""

    problem, sent = "", 0

    def unusable(self):
        return self.problem

    def connect(self, links):
        texts = links.exchanged(f"from {links.rank}".encode())
        assert texts == {rank: f"from {rank}".encode() for rank in links.sockets}
        assert not any(map(links.has_ended, links.sockets))
        inner = TcpTransport({rank: each.dup() for rank, each in links.sockets.items()})

        def send(*message):
            self.sent += 1
            return inner.send(*message)

        return SimpleNamespace(send=send, receive=inner.receive, abort=inner.abort, close=inner.close)


def with_plugin(rendezvous, port, problem):
    plugin = Plugin()
    plugin.problem = problem if rendezvous.rank == 2 else None
    if problem == "nonsense" and rendezvous.rank == 2:
        plugin.problem, plugin.connect = "", lambda _: None
    choice._others = lambda: {"fabric": SimpleNamespace(load=lambda: plugin)}
    return joined(rendezvous, port), plugin.sent


def test_a_transport_of_another_package():
    """The messages of a group go by the plug-in that its name selects. If it cannot be used on one rank, all say so."""
    environment = [{"CROSSREDUCE_TRANSPORT": "fabric", "CROSSREDUCE_HOST": host} for host in "abc"]
    for result, sent in ranks(3, with_plugin, free_port(), "", environment=environment):
        assert result == [3.0, 3.0]
        assert sent > 0
    for problem, text in (
        ("no licence", "BackendError: rank 2 cannot use the transport fabric.*no licence"),
        ("nonsense", "rank 2: BackendError: the transport fabric cannot connect this rank.*no attribute 'send'"),
    ):
        (found,) = {text for text, _ in ranks(3, with_plugin, free_port(), problem, environment=environment)}
        assert re.search(text, found, re.DOTALL), found


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        ("eth", ["eth0", "eth10"]), ("=eth1", ["eth1"]), ("ib,eth1", ["ib0", "eth1", "eth10"]), ("^eth,doc", ["ib0"]),
        ("^=eth1", ["eth0", "eth10", "ib0", "docker0"]), ("=eth10,eth0", ["eth10", "eth0"]), ("=eth", None),
        ("^", ["eth0", "eth1", "eth10", "ib0", "docker0"]), ("lo", ["lo"]), (",", None), ("wl", None),
    ],
)  # fmt: skip
def test_interfaces_are_chosen_by_the_rules_of_nccl(monkeypatch, rule, chosen):
    """Prefixes, exact names with "=", and exclusions with "^". A rule that selects nothing raises an error."""
    names = ["lo", "eth0", "eth1", "eth10", "ib0", "docker0", "down0"]
    monkeypatch.setattr(addresses.socket, "if_nameindex", lambda: [*enumerate(names, 1)])
    down = ("down0", "eth1" if rule == "eth" else "")
    monkeypatch.setattr(addresses, "_addresses_of", lambda name: [] if name in down else ["10.0.0.1"])
    if chosen is None:
        with pytest.raises(ArgumentError, match=r"(?s)CROSSREDUCE_IFNAME selects no interface.*one of lo, eth0"):
            addresses.chosen_interfaces(rule)
    else:
        assert addresses.chosen_interfaces(rule) == chosen


@pytest.mark.parametrize(
    ("named", "cpus", "place", "chosen"),
    [
        ([], {0, 1, 4}, 0, ["eth0", "eth1"]),  # as fast as that of the default route
        ([], {0, 1, 4}, 1, ["eth1", "eth0"]),
        ([], {0, 1}, 1, ["eth0"]),  # the rail of NUMA node 0
        ([], {5}, 0, ["eth1"]),
        (["docker0"], {0}, 0, ["docker0"]),  # no interface of those that are named is on a known node
        (["eth2", "eth1", "down0"], {0, 1, 4}, 3, ["eth1", "eth2"]),
        (["eth0", "eth1", "eth2"], {4}, 1, ["eth2", "eth1"]),
    ],
)
def test_connections_are_spread_over_equal_interfaces_of_the_numa_node(
    monkeypatch, tmp_path, named, cpus, place, chosen
):
    """The order of the interfaces over which a rank spreads its connections."""
    names = {"lo": None, "eth0": (100, 0), "eth1": (100, 1), "eth2": (10, 1), "docker0": None, "down0": (100, 1)}
    for name, about in names.items():
        device = tmp_path / "net" / name / "device"
        device.mkdir(parents=True) if about else device.parent.mkdir(parents=True)
        device.with_name("speed").write_text(f"{about[0] if about else 100}\n")
        if about:
            (device / "numa_node").write_text(f"{about[1]}\n")
    for node, text in enumerate(("0-3", "4-5,7")):
        path = tmp_path / "node" / f"node{node}" / "cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(addresses, "_INTERFACES", tmp_path / "net")
    monkeypatch.setattr(addresses, "_NODES", tmp_path / "node")
    monkeypatch.setattr(addresses.socket, "if_nameindex", lambda: [*enumerate(names, 1)])
    monkeypatch.setattr(addresses.os, "sched_getaffinity", lambda _: cpus)
    monkeypatch.setattr(addresses, "_addresses_of", lambda name: [name] if name != "down0" else [])
    monkeypatch.setattr(addresses, "addresses", lambda: ["eth0", "eth2", "lo"])
    assert addresses.rails(named, place) == [[each] for each in chosen]
