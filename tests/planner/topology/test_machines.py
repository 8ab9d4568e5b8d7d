"""The machines of the library: their files, links and networks; test_bounds.py has the bounds that follow from them."""

import itertools
from fractions import Fraction

import pytest

from crossreduce import ArgumentError, Topology
from crossreduce.topology.link_kinds import read_data
from crossreduce.topology.machines import machine_names
from crossreduce.topology.routes import is_connected

machine = Topology.machine

NAMES = [name for name, _ in machine_names()]
FILES = {file: content for file, content in read_data().items() if file not in ("links.json", "gpus.json")}
KINDS = read_data()["links.json"]["kinds"]


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
    used = {line[3] for part in (content, *networks.values()) for line in part.get("links", ())}
    assert used | set(content.get("matrix", ())) | set(content.get("torus", ())) <= set(KINDS)


def test_a_kind_of_link_is_never_quicker_in_use_than_built():
    """Effective speeds are at most the specified ones. Every kind of link has a source and a latency."""
    needed = {"raw", "effective", "latency_us", "source"}
    for name, entry in KINDS.items():
        assert needed <= set(entry) <= needed | {"messages_per_s"}, name
        assert 0 < entry["effective"] <= entry["raw"], name
        assert 0 < entry["latency_us"] <= 10, name
        assert any(word in entry["source"] for word in ("topo.h", "raw", "effective")), name


def test_names_are_unambiguous():
    """Well-known machines are in the library, under any spelling. Names and aliases differ in more than spelling."""
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
    """The links of a machine are equal in both directions, have latencies, and join all devices. Effective speeds are
    at most the raw ones. The machine can be written as JSON and read again."""
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
    """Every network joins all hosts. Each host has the links of a single machine, and all hosts have equal links."""
    one, three = machine(name), machine(name, 3, nics=nics)
    assert three.devices == tuple(f"host{h}/{device}" for h in range(3) for device in one.devices)
    assert is_connected(three.devices, three.links)
    for link, h in itertools.product(one.links, range(3)):
        assert three.link(f"host{h}/{link.src}", f"host{h}/{link.dst}")[2:] == link[2:]
    first, *others = [  # for each host, the ends of the links out of its nodes, without the name of the host
        {tuple(part.replace(f"host{h}/", "") for part in link[:2]) for link in three.links if f"host{h}/" in link.src}
        for h in range(3)
    ]
    assert others == [first, first]


def test_speeds():
    """Raw speeds are as specified. Effective speeds are the constant of NCCL or RCCL times the number of links."""
    for name, speeds, src, dst, gb_per_s in (
        ("dgx-1v", "effective", "cuda:0", "cuda:3", 40),
        ("hgx-h100", "effective", "cuda:3", "nvswitch", Fraction("370.8")),
        ("mi250", "effective", "cuda:0", "cuda:1", 144),
        ("nvlink-pairs-4", "raw", "cuda:2", "cuda:3", Fraction("56.25")),
        ("ncv4", "raw", "cuda:2", "cuda:3", 300),
        ("pcie-8", "raw", "cuda:2", "plx1", Fraction("15.75")),
        ("pcie-8", "effective", "cpu0", "cpu1", 10),
        ("mi100", "effective", "cpu0", "cpu1", 16),
        ("epyc-numa-8", "effective", "cpu:3", "cpu:7", 16),
    ):
        assert machine(name, speeds=speeds).link(src, dst).bandwidth == gb_per_s, name


def test_network_cards():
    """A card that devices share is a switch of its host. The card of one device is a link to its network or rail."""
    for name, nics, card, switch, shared_by in (
        ("dgx-1v", None, Fraction("12.5"), "ib", 2),
        ("p3.16xlarge", None, Fraction("3.125"), "net", 8),
        ("p3.16xlarge", "edr", Fraction("12.5"), "ib", 2),
        ("mi250", "25-per-pair", 25, "ib", 2),
    ):
        topology = machine(name, 2, nics=nics)
        assert topology.link("host1/nic0", switch).bandwidth == card, name
        assert sum(link.dst in topology.devices for link in topology.out_links("host1/nic0")) == shared_by, name
    for name, nics, k, switch, gb_per_s in (
        ("dgx-a100", None, 4, "rail4", 25),
        ("ndv4", "hdr", 4, "ib0", 25),
        ("p4d", "hdr", 5, "ib1", 25),
        ("hgx-h100", None, 5, "rail5", 50),
        ("gb200-nvl72", None, 70, "rail2", 50),
        ("gb200-nvl72", "xdr", 71, "rail3", 100),
        ("mi250", None, 15, "ib", 16),
    ):
        links = machine(name, 2, nics=nics).out_links(f"host1/cuda:{k}")
        assert [link[1:3] for link in links if "/" not in link.dst] == [(switch, gb_per_s)], name


def test_in_network():
    """With in_network, NVSwitches of H100 and later and InfiniBand switches reduce, and no others."""

    def able(name, hosts=1, **options):
        return {switch.name for switch in machine(name, hosts, in_network=True, **options).switches if switch.reduces}

    assert able("hgx-h100") == able("hgx-b200") == able("gb200-nvl72") == {"nvswitch"}
    assert able("dgx-2") == able("dgx-a100") == able("pcie-8") == able("dgx-1v") == set()
    assert able("dgx-1v", 2) == able("mi100", 2) == {"ib"}
    assert able("dgx-a100", 2) == {f"rail{k}" for k in range(8)}
    assert able("dgx-a100", 2, nics="hdr") == {"ib0", "ib1"}
    assert able("p4d", 2) == able("p3.16xlarge", 2) == set()
    assert able("p5.48xlarge", 2) == {"host0/nvswitch", "host1/nvswitch"}
    assert able("hgx-h200", 2) == {"host0/nvswitch", "host1/nvswitch", *(f"rail{k}" for k in range(8))}


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("dgx-1w",), {}, r"no machine of this name[\s\S]*'dgx-1w'[\s\S]*dgx-1v"),
        (("h100",), {}, r"no machine of this name[\s\S]*hgx-h100"),
        (("",), {}, r"no machine of this name[\s\S]*dgx-1p[\s\S]*tpu-v4"),
        ((["dgx-1v"],), {}, r"no machine of this name[\s\S]*list"),
        (("links",), {}, "no machine of this name"),
        *(
            (("dgx-1v", n), {}, f"hosts must be an int[\\s\\S]*{n!r}")
            for n in (0, -1, True, 2.0, "2", None, 4097, 10**22)
        ),
        (("dgx-1v",), {"speeds": "measured"}, r"raw or effective[\s\S]*'measured'"),
        (
            ("dgx-1v", 2),
            {"nics": "hdr"},
            r"dgx-1v has no such network[\s\S]*'hdr'[\s\S]*\"edr\" or \"edr-1\" or \"25gbe\"",
        ),
        (("dgx-1v", 2), {"nics": 3}, r"dgx-1v has no such network[\s\S]*3 \(int\)"),
        (("pcie-8", 1), {"nics": "ib"}, r"pcie-8 has no such network[\s\S]*omit nics"),
        (("pcie-8", 2), {}, r"pcie-8 does not have a network that joins[\s\S]*hosts=2[\s\S]*hosts=1"),
    ],
)
def test_bad_arguments(arguments, options, text):
    """Invalid arguments are ArgumentErrors with the given value and the valid ones."""
    with pytest.raises(ArgumentError, match=text):
        machine(*arguments, **options)
