"""The machines of the library: their links, and the bounds that follow from them."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

from crossreduce import ArgumentError, Switch, Topology
from crossreduce.topology.link_kinds import read_data
from crossreduce.topology.machines import machine_names
from crossreduce.topology.routes import is_connected

machine = Topology.machine

NAMES = [name for name, _ in machine_names()]
FILES = {file: content for file, content in read_data().items() if file != "links.json"}
KINDS = read_data()["links.json"]["kinds"]


def flow(topology, roots, sink, rate):
    """Return the greatest flow in GB/s to a device from a source that feeds each root at a rate."""
    index = {node: number for number, node in enumerate(topology.nodes)}
    unit = math.lcm(*(Fraction(x).denominator for x in (rate, *(link.bandwidth for link in topology.links))))
    arcs = [(index[link.src], index[link.dst], int(link.bandwidth * unit)) for link in topology.links]
    arcs += [(len(index), index[root], int(rate * unit)) for root in roots]
    src, dst, capacity = np.array(arcs, np.int32).T
    graph = coo_array((capacity, (src, dst)), (len(index) + 1, len(index) + 1)).tocsr()
    return Fraction(int(maximum_flow(graph, len(index), index[sink]).flow_value), unit)


# Machine, hosts, speeds, network, the nodes outside of a tightest set (the starts of their names), and the bounds of
# all-gather and broadcast in GB/s.
BOUNDS = [
    ("dgx-1p", 1, "raw", None, "cuda:0", Fraction(640, 7), 80),
    ("dgx-1v", 1, "raw", None, "cuda:0", Fraction(1200, 7), 150),
    ("dgx-2", 1, "raw", None, "cuda:15", Fraction(160), 150),
    ("dgx-a100", 1, "raw", None, "cuda:0", Fraction(2400, 7), 300),
    ("hgx-h100", 1, "raw", None, "cuda:0", Fraction(3600, 7), 450),
    ("hgx-h200", 1, "raw", None, "cuda:0", Fraction(3600, 7), 450),
    ("hgx-b200", 1, "raw", None, "cuda:0", Fraction(7200, 7), 900),
    ("gb200-nvl72", 1, "raw", None, "cuda:71", Fraction(64800, 71), 900),
    ("mi250", 1, "raw", None, "cuda:4 cuda:5", Fraction(2400, 7), 300),
    ("mi300x", 1, "raw", None, "cuda:0", Fraction(512), 448),
    ("pcie-8", 1, "effective", None, "cuda:0", Fraction(96, 7), 10),
    ("nvlink-pairs-4", 1, "effective", None, "cuda:0 cuda:1", Fraction(96), 48),
    ("tpu-v4", 1, "raw", None, "tpu:63", Fraction(6400, 21), 300),
    ("ndv2", 2, "raw", None, "host0", Fraction(25), Fraction(25, 2)),
    ("dgx-a100", 2, "raw", None, "host0/cuda:0", Fraction(1040, 3), 200),
    ("ndv4", 4, "raw", "hdr", "host0", Fraction(800, 3), 200),
    ("hgx-h100", 2, "raw", None, "host0/cuda:0", Fraction(1600, 3), 400),
    ("hgx-h100", 4, "raw", None, "host0/cuda:0", Fraction(16000, 31), 400),
    ("hgx-h100", 16, "raw", None, "host0/", Fraction(1280, 3), 400),
    ("hgx-h100", 32, "raw", None, "host0/", Fraction(12800, 31), 400),
    ("hgx-h100", 128, "raw", None, "host0/", Fraction(51200, 127), 400),
    ("mi250", 2, "raw", "16-per-gcd", "host0/cuda:4 host0/cuda:5", Fraction(5312, 15), 256),
]
IDS = [f"{row[0]}-{row[1]}" for row in BOUNDS]


@pytest.mark.parametrize(("name", "hosts", "speeds", "nics", "out", "gather", "broadcast"), BOUNDS, ids=IDS)
def test_bounds(name, hosts, speeds, nics, out, gather, broadcast):
    """N devices, of which S have d(S), gather at most at N B(S) / d(S), where B(S) is the bandwidth out of S. The given
    set S has the expected number, and a flow of that rate reaches every device, so no set has a smaller one. The bound
    of a broadcast is the least maximum flow from the first device. On large machines, some equal devices are tried."""
    topology = machine(name, hosts, speeds=speeds, nics=nics)
    devices, n = topology.devices, len(topology.devices)
    inside = {node for node in topology.nodes if not node.startswith(tuple(out.split()))}
    leaving = sum(link.bandwidth for link in topology.links if link.src in inside and link.dst not in inside)
    assert n * leaving / len(inside.intersection(devices)) == gather
    sinks = devices if hosts <= 4 else devices[: n // hosts]
    for sink in sinks if hosts < 128 else sinks[:2]:
        assert flow(topology, devices, sink, gather / n) == gather
    others = devices[1:] if n <= 72 else (devices[1], devices[-1])
    assert min(flow(topology, [devices[0]], other, Fraction(10**4)) for other in others) == broadcast


# The JSON files of the machines.


@pytest.mark.parametrize("file", FILES)
def test_a_file_says_what_it_must(file):
    """The file of a machine has its name, a description of one line, devices, links of known kinds, and sources."""
    content = FILES[file]
    needed = {"name", "aliases", "description", "devices", "sources"}
    assert needed <= set(content) <= needed | {"reduces", "links", "matrix", "torus", "networks", "memory_gb_per_s"}
    assert file == f"{content['name']}.json"
    assert "\n" not in content["description"]
    assert all(isinstance(source, str) and len(source) > 20 for source in content["sources"])
    assert content["sources"]
    networks = content.get("networks", {})
    assert {network for network in content["aliases"].values() if network} <= set(networks)
    assert all(set(network) <= {"reduces", "links"} for network in networks.values())
    for rows in content.get("matrix", {}).values():
        assert [row[i] for i, row in enumerate(rows)] == ["0"] * content["devices"][1]
        assert ["".join(column) for column in zip(*rows, strict=True)] == rows, "as many links there as back"
    used = {line[3] for part in (content, *networks.values()) for line in part.get("links", ())}
    assert used | set(content.get("matrix", ())) | set(content.get("torus", ())) <= set(KINDS)


def test_a_kind_of_link_is_never_quicker_in_use_than_built():
    """Effective speeds are at most the specified ones; every kind has a source and a latency."""
    needed = {"raw", "effective", "latency_us", "source"}
    for name, entry in KINDS.items():
        assert needed <= set(entry) <= needed | {"messages_per_s"}, name
        assert 0 < entry["effective"] <= entry["raw"], name
        assert 0 < entry["latency_us"] <= 10, name
        assert any(word in entry["source"] for word in ("topo.h", "raw", "effective")), name


def test_names_are_unambiguous():
    """The machines that the literature on collectives measures are in the library. No two machines have a name or alias
    that differs only in capitals and punctuation; aliases of a machine differ only in their network."""
    wanted = "dgx-1p dgx-1v p3.16xlarge ndv2 dgx-2 dgx-a100 ndv4 p4d p4de hgx-h100 ndv5 hgx-h200 hgx-b200 gb200-nvl72"
    wanted += " mi250 mi300x mi100 pcie-8 nvlink-pairs-4 ncv4 epyc-numa-4 epyc-numa-8 tpu-v4"
    assert all(machine(name).devices for name in wanted.split())
    assert all(description for _, description in machine_names())
    spellings = [spelling for content in FILES.values() for spelling in (content["name"], *content["aliases"])]
    plain = ["".join(letter for letter in spelling.lower() if letter.isalnum()) for spelling in spellings]
    assert len(set(plain)) == len(plain)
    for spelling in ("DGX-1V", "dgx1v", "DGX_1V", " dgx 1v ", "dgx-1", "P3.16xLarge", "ndv2"):
        assert machine(spelling) == machine("dgx-1v")


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_is_whole(name):
    """Links are equal in both directions, have a latency, join all devices, and are at most as fast as specified. The
    JSON of a machine, read again, is the machine."""
    kind, number = FILES[f"{name}.json"]["devices"]
    raw = machine(name)
    for topology in (raw, machine(name, speeds="effective")):
        assert topology.devices == tuple(f"{kind}:{k}" for k in range(number))
        assert is_connected(topology.devices, topology.links)
        assert not any(switch.reduces for switch in topology.switches)
        for link in topology.links:
            back = topology.link(link.dst, link.src)
            assert (back.bandwidth, back.latency_s) == (link.bandwidth, link.latency_s)
            assert link.latency_s > 0
            assert link.bandwidth <= raw.link(link.src, link.dst).bandwidth
        assert Topology.from_json(topology.to_json()) == topology


NETWORKS = [(name, network) for name in NAMES for network in FILES[f"{name}.json"].get("networks", ())]


@pytest.mark.parametrize(("name", "nics"), NETWORKS)
def test_hosts_are_joined(name, nics):
    """Every network joins all hosts; each host has the links of a machine of one host, and the hosts are equal."""
    one, three = machine(name), machine(name, 3, nics=nics)
    assert three.devices == tuple(f"host{h}/{device}" for h in range(3) for device in one.devices)
    assert is_connected(three.devices, three.links)
    for link, h in itertools.product(one.links, range(3)):
        assert three.link(f"host{h}/{link.src}", f"host{h}/{link.dst}")[2:] == link[2:]
    first, *others = [
        {tuple(part.replace(f"host{h}/", "") for part in link[:2]) for link in three.links if f"host{h}/" in link.src}
        for h in range(3)
    ]
    assert others == [first, first]


# BRICKS: msccl-tools' numbers of NVLinks between the GPUs of a DGX-1V. ORDER: nvidia-smi's numbers of these GPUs.


def test_speeds():
    """Raw speeds are the specified ones; effective speeds are NCCL's or RCCL's constant times the number of links."""
    for name, speeds, src, dst, gb_per_s in (
        ("dgx-1v", "effective", "cuda:0", "cuda:3", 40),
        ("dgx-2", "effective", "cuda:3", "nvswitch", 120),
        ("hgx-h100", "effective", "cuda:3", "nvswitch", Fraction("370.8")),
        ("hgx-b200", "effective", "cuda:3", "nvswitch", Fraction("721.8")),
        ("mi250", "effective", "cuda:0", "cuda:1", 144),
        ("mi300x", "effective", "cuda:0", "cuda:7", 48),
        ("nvlink-pairs-4", "raw", "cuda:2", "cuda:3", Fraction("56.25")),
        ("ncv4", "raw", "cuda:2", "cuda:3", 300),
        ("pcie-8", "raw", "cuda:2", "plx1", Fraction("15.75")),
        ("pcie-8", "effective", "cpu0", "cpu1", 10),
        ("mi100", "effective", "cpu0", "cpu1", 16),
        ("epyc-numa-8", "effective", "cpu:3", "cpu:7", 16),
    ):
        assert machine(name, speeds=speeds).link(src, dst).bandwidth == gb_per_s, name


def test_network_cards():
    """A network card that several devices share is a switch of their host, with a link of its speed to the network. A
    card of a single device is a link of the device to its network, or to its rail, and to no other."""
    for name, nics, card, switch, shared_by in (
        ("dgx-1v", None, Fraction("12.5"), "ib", 2),
        ("ndv2", None, Fraction("12.5"), "ib", 4),
        ("p3.16xlarge", None, Fraction("3.125"), "net", 8),
        ("p3.16xlarge", "edr", Fraction("12.5"), "ib", 2),
        ("dgx-2", None, Fraction("12.5"), "ib", 2),
        ("p4d", None, Fraction("12.5"), "net", 2),
        ("mi250", "25-per-pair", 25, "ib", 2),
    ):
        topology = machine(name, 2, nics=nics)
        assert topology.link("host1/nic0", switch).bandwidth == card, name
        assert sum(link.dst in topology.devices for link in topology.out_links("host1/nic0")) == shared_by, name
    for name, nics, k, switch, gb_per_s in (
        ("dgx-a100", None, 4, "ib0", 25),
        ("ndv4", None, 5, "ib1", 25),
        ("p4d", "hdr", 5, "ib1", 25),
        ("hgx-h100", None, 5, "rail5", 50),
        ("p5.48xlarge", None, 5, "net", 50),
        ("mi300x", None, 5, "rail5", 50),
        ("gb200-nvl72", None, 70, "rail2", 50),
        ("gb200-nvl72", "xdr", 71, "rail3", 100),
        ("mi250", None, 15, "ib", 16),
    ):
        links = machine(name, 2, nics=nics).out_links(f"host1/cuda:{k}")
        assert [link[1:3] for link in links if "/" not in link.dst] == [(switch, gb_per_s)], name


def test_in_network():
    """With in_network, NVSwitches since H100 and InfiniBand switches reduce; older NVSwitches, Ethernet, network cards
    and CPUs do not."""

    def able(name, hosts=1, **options):
        return {switch.name for switch in machine(name, hosts, in_network=True, **options).switches if switch.reduces}

    assert able("hgx-h100") == able("hgx-b200") == able("gb200-nvl72") == {"nvswitch"}
    assert able("dgx-2") == able("dgx-a100") == able("pcie-8") == able("dgx-1v") == set()
    assert able("dgx-1v", 2) == able("mi100", 2) == {"ib"}
    assert able("dgx-a100", 2) == {"ib0", "ib1"}
    assert able("p4d", 2) == able("p3.16xlarge", 2) == set()
    assert able("p5.48xlarge", 2) == {"host0/nvswitch", "host1/nvswitch"}
    assert able("hgx-h200", 2) == {"host0/nvswitch", "host1/nvswitch", *(f"rail{k}" for k in range(8))}


def test_latencies_of_paths():
    """The latency of a path is the sum of those of its links, such as 0.7 us over NVLink or the NVSwitches of a DGX-2,
    and 1.7 us over InfiniBand."""
    for name, hosts, src, dst, micros in (
        ("dgx-1v", 1, "cuda:0", "cuda:4", "0.7"),
        ("dgx-2", 1, "cuda:0", "cuda:15", "0.7"),
        ("hgx-h100", 1, "cuda:0", "cuda:1", "1.8725"),
        ("dgx-a100", 2, "host0/cuda:1", "host1/cuda:3", "1.7"),
        ("ndv2", 2, "host0/cuda:1", "host1/cuda:3", "2.7"),
    ):
        topology = machine(name, hosts)
        links = itertools.pairwise(topology.route(src, dst))
        assert sum(topology.link(*pair).latency_s for pair in links) * 10**6 == Fraction(micros), name


def test_topology_machine_is_the_same():
    """Each option of ``Topology.machine`` has an effect."""
    options = {"speeds": "effective", "nics": "hdr", "in_network": True}
    for name in options:
        assert machine("p4d", 2, **options) != machine("p4d", 2, **{k: v for k, v in options.items() if k != name})
    assert Switch("ib1", True) in machine("p4d", 2, **options).switches


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("dgx-1w",), {}, r"no machine of this name[\s\S]*'dgx-1w'[\s\S]*dgx-1v"),
        (("h100",), {}, r"no machine of this name[\s\S]*hgx-h100"),
        (("",), {}, r"no machine of this name[\s\S]*dgx-1p[\s\S]*tpu-v4"),
        (("!?",), {}, r"no machine of this name[\s\S]*dgx-1p"),
        ((None,), {}, r"no machine of this name[\s\S]*None[\s\S]*dgx-1p"),
        ((["dgx-1v"],), {}, r"no machine of this name[\s\S]*list"),
        (("links",), {}, "no machine of this name"),
        *((("dgx-1v", n), {}, f"hosts must be an int[\\s\\S]*{n!r}") for n in (0, -1, True, 2.0, "2", None)),
        (("dgx-1v",), {"speeds": "measured"}, r"raw or effective[\s\S]*'measured'"),
        (("dgx-1v",), {"speeds": None}, r"raw or effective[\s\S]*None"),
        (
            ("dgx-1v", 2),
            {"nics": "hdr"},
            r"dgx-1v has no such network[\s\S]*'hdr'[\s\S]*\"edr\" or \"edr-1\" or \"25gbe\"",
        ),
        (("ndv2", 1), {"nics": "hdr"}, "dgx-1v has no such network"),
        (("dgx-1v", 2), {"nics": 3}, r"dgx-1v has no such network[\s\S]*3 \(int\)"),
        (("pcie-8", 1), {"nics": "ib"}, r"pcie-8 has no such network[\s\S]*omit nics"),
        (("pcie-8", 2), {}, r"pcie-8 does not have a network that joins[\s\S]*hosts=2[\s\S]*hosts=1"),
        (("tpu-v4", 2), {}, "tpu-v4 does not have a network"),
    ],
)
def test_bad_arguments(arguments, options, text):
    """Invalid arguments are ArgumentErrors with the given value and the valid ones."""
    with pytest.raises(ArgumentError, match=text):
        machine(*arguments, **options)
