"""Topologies in NCCL's and RCCL's XML."""

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import damaged

from crossreduce import ArgumentError, Topology
from crossreduce.topology.formats import nccl_xml, nvidia_smi

machine, load = Topology.machine, Topology.load
INTEL = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"'


def read_nccl_xml(text):
    return Topology(*nccl_xml.read_nccl_xml(text))


def read_nvidia_smi(text, **options):
    return Topology(*nvidia_smi.read_nvidia_smi(text, nvidia_smi.TableOptions(**options)))


def bus(k):
    return f"0000:{k + 16:02x}:00.0"


def pci(k, inside="", speed="8.0 GT/s PCIe", width=16, more=""):
    return f'<pci busid="{bus(k)}" link_speed="{speed}" link_width="{width}" {more}>{inside}</pci>'


def gpu(k, links="", chip='sm="70"', **slot):
    return pci(k, f'<gpu dev="{k}" {chip} rank="{k}" gdr="1">{links}</gpu>', more='class="0x030200"', **slot)


def entries(peers, tag="nvlink", tclass="0x030200"):
    """Return the elements of a GPU's links, given the number of links to each peer."""
    return "".join(f'<{tag} target="{bus(peer)}" count="{n}" tclass="{tclass}"/>' for peer, n in peers.items())


def system(*cpus, version=1, about=INTEL):
    """Return the XML of a machine whose k-th CPU has the given devices."""
    nodes = (f'<cpu numaid="{k}" {about}>\n{inside}\n</cpu>' for k, inside in enumerate(cpus))
    return f'<system version="{version}">\n' + "\n".join(nodes) + "\n</system>\n"


def counts(topology, one):
    """Return for each device the number of links to each neighbour, if a single link has the bandwidth ``one``."""
    peers = {k: {} for k in range(len(topology.devices))}
    for src, dst, bandwidth, _ in topology.links:
        peers[int(src.split(":")[1])][int(dst.split(":")[1])] = int(bandwidth / one)
    return peers


# NCCL's XML.


@pytest.mark.parametrize(
    ("name", "tag", "chip", "one"),  # the last: GB/s of one link
    [
        ("dgx-1p", "nvlink", 'sm="60"', 20),
        ("dgx-1v", "nvlink", 'sm="70"', 25),
        ("mi250", "xgmi", 'sm="90" gcn="910"', 50),
        ("mi250", "xgmi", 'sm="90" gcn="gfx90a"', 50),
        ("mi300x", "xgmi", 'sm="94" gcn="gfx942"', 64),
    ],
)
def test_a_mesh(name, tag, chip, one):
    """The XML of GPUs that NVLink or xGMI joins gives the library's machine, without PCIe."""
    there = machine(name)
    n = len(there.devices)
    peers = counts(there, one)
    text = system(
        *("".join(gpu(k, entries(peers[k], tag), chip) for k in half) for half in (range(n // 2), range(n // 2, n))),
        version=2 if tag == "xgmi" else 1,
    )
    assert read_nccl_xml(text) == there


@pytest.mark.parametrize(("name", "sm", "count"), [("dgx-a100", 80, 2), ("hgx-h100", 90, 3), ("hgx-b200", 100, 3)])
def test_nvswitches(name, sm, count):
    """All NVSwitches are one switch, regardless of their bus numbers, and the links to them add up."""
    ends = [bus(100 + k) for k in range(5)] + ["fffffff:ffff:ff"]  # the last is the bus id in a virtual machine
    links = "".join(f'<nvlink target="{end}" count="{count}" tclass="0x068000"/>' for end in ends)
    assert read_nccl_xml(system("".join(gpu(k, links, f'sm="{sm}"') for k in range(8)))) == machine(name)


def test_a_pcie_machine():
    """Without NVLink, the topology has PCIe switches and CPUs. The speed between CPUs is the one that NCCL assumes."""
    halves = [pci(91, gpu(0) + gpu(1)) + pci(92, gpu(2) + gpu(3)), pci(93, gpu(4) + gpu(5)) + pci(94, gpu(6) + gpu(7))]
    text = system(*halves).replace('sm="70"', 'sm="61"')
    topology, same = read_nccl_xml(text), machine("pcie-8")
    to = {f"plx{k}": f"pci-{bus(91 + k).replace(':', '-')}" for k in range(4)}
    assert topology.devices == same.devices
    assert {switch.name for switch in topology.switches} == {"cpu0", "cpu1", *to.values()}
    assert topology.link("cpu0", "cpu1").bandwidth == 10
    links = {(to.get(a, a), to.get(b, b), *rest) for a, b, *rest in same.without_link("cpu0", "cpu1").links}
    assert {tuple(link) for link in topology.without_link("cpu0", "cpu1").links} == links


def test_nvlink_bridges_on_pcie():
    """If NVLink joins GPUs only in pairs, the topology has PCIe links, too."""
    bridge = ({1: 4}, {0: 4}, {3: 4}, {2: 4})
    cards = (gpu(k, entries(bridge[k]), 'sm="86"', speed="16.0 GT/s PCIe") for k in range(4))
    assert read_nccl_xml(system("".join(cards))) == machine("nvlink-pairs-4")


def test_bridges_of_one_branch_are_part_of_the_link():
    """A bridge above a single GPU is not a switch but a part of the GPU's link, whose narrowest part counts."""
    nic = pci(80, '<nic><net name="mlx5_0" dev="0" speed="200000"/></nic>', more='class="0x020700"')
    narrow = pci(90, pci(91, gpu(0, width=16), width=4) + nic)
    text = system(narrow + gpu(1) + "<nic><net/></nic>").replace('sm="70"', 'sm="61"')
    topology = read_nccl_xml(text)
    assert {switch.name for switch in topology.switches} == {"cpu0"}
    assert topology.link("cuda:0", "cpu0").bandwidth == Fraction("15.75") / 4
    assert topology.link("cpu0", "cuda:1").bandwidth == Fraction("15.75")


def test_pcie_speeds():
    """The bandwidth of PCIe is the product of rate and width, or NCCL's default if the system does not report them."""
    lanes = Fraction("15.75")
    for speed, width, gb_per_s in (
        ("2.5 GT/s", "16", 4),
        ("5.0 GT/s PCIe", "8", 4),
        ("8.0 GT/s PCIe", "4", lanes / 4),
        ("16 GT/s", "16", 2 * lanes),
        ("32.0 GT/s PCIe", "16", 63),
        ("64.0 GT/s PCIe", "16", 121),
        *((speed, width, lanes) for speed, width in (("", "0"), ("", ""), ("Undefined", "16"))),
        *(("Unknown speed", width, lanes) for width in ("255", "-1")),
    ):
        text = system(gpu(0, chip='sm="61"', speed=speed, width=width) + gpu(1, chip='sm="61"'))
        assert read_nccl_xml(text).link("cuda:0", "cpu0").bandwidth == gb_per_s, speed


def test_cpus():
    """Links between CPUs have the speed that NCCL assumes for their vendor and model."""
    x86 = 'arch="x86_64" vendor="{}" familyid="{}" modelid="{}"'
    for about, gb_per_s in (
        (INTEL, 10),
        (x86.format("GenuineIntel", 6, 79), 6),
        (x86.format("GenuineIntel", 6, 143), 22),
        (x86.format("GenuineIntel", 6, 207), 40),
        (x86.format("AuthenticAMD", 23, 49), 16),
        (x86.format("AuthenticAMD", 175, 1), 24),
        (x86.format("AuthenticAMD", 26, 2), 32),
        (x86.format("CentaurHauls", 7, 91), 9),
        (x86.format("  Shanghai  ", 7, 59), 6),
        ('arch="arm64"', 6),
        ('arch="ppc64"', 32),
    ):
        topology = read_nccl_xml(system(gpu(0, chip='sm="61"'), gpu(1, chip='sm="61"'), about=about))
        assert topology.link("cpu0", "cpu1").bandwidth == topology.link("cpu1", "cpu0").bandwidth == gb_per_s, about
        assert topology.route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cpu1", "cuda:1")


def test_gpus_are_called_by_their_number():
    """Devices are in the order of ``dev``, not of the file. Bus numbers may have any spelling."""
    # Each of the two GPUs has two NVLinks to the other one.
    links = {k: f'<nvlink target="00000000:{1 - k + 0xAA:X}:00.0" count="2" tclass="0x030200"/>' for k in (0, 1)}
    text = "".join(
        f'<pci busid="0000:{k + 0xAA:x}:00.0"><gpu dev="{7 - k}" sm="70">{links[k]}</gpu></pci>' for k in (0, 1)
    )
    assert read_nccl_xml(system(text)) == Topology.full_mesh(["cuda:6", "cuda:7"], 50, Fraction(7, 10**7))


def test_a_gpu_that_is_not_in_the_file():
    """Links to a GPU that is not in the file are left out. A machine with one GPU has no links."""
    text = system("".join(gpu(k, entries({j: 1 for j in range(4) if j != k})) for k in range(3)))
    assert read_nccl_xml(text) == Topology.full_mesh(["cuda:0", "cuda:1", "cuda:2"], 25, Fraction(7, 10**7))
    assert read_nccl_xml(system(gpu(0))) == Topology(("cuda:0",), ())


def test_several_hosts_in_one_file():
    """In a file of several hosts, all names start with the host except those of NVSwitches, which alone join hosts."""
    link = '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>'
    cpu = '<cpu numaid="{}" host_hash="0x{}" arch="arm64">{}</cpu>'
    inside = "".join(gpu(k, link, 'sm="100"') for k in range(4))
    topology = read_nccl_xml(f'<system version="1">{cpu.format(0, "b", inside)}{cpu.format(0, "a", inside)}</system>')
    assert topology.devices == tuple(f"host{h}/cuda:{k}" for h in range(2) for k in range(4))
    assert topology.route("host0/cuda:1", "host1/cuda:1") == ("host0/cuda:1", "nvswitch", "host1/cuda:1")
    assert {link.bandwidth for link in topology.links} == {900}
    nodes = [cpu.format(n, host, gpu(n, chip='sm="61"')) for host in "ab" for n in (0, 1)]
    topology = read_nccl_xml(f'<system version="1">{"".join(nodes)}</system>')
    assert topology.link("host1/cpu0", "host1/cpu1").bandwidth == 6
    assert topology.route("host0/cuda:0", "host1/cuda:0") is None


def test_comments():
    """Comments are skipped, also malformed ones like those at the start of RCCL's files. Errors keep line numbers."""
    text = "<!------\n - (c) <gpu> & more\n------->\n" + system(gpu(0) + "<!-- a - b -- c -->")
    assert read_nccl_xml(text).devices == ("cuda:0",)
    with pytest.raises(ArgumentError, match="line 8"):
        read_nccl_xml(text.replace("</system>", "</sys>"))


WITHOUT_GPU = system(f'<pci busid="{bus(1)}" class="0x030200" link_speed="16 GT/s" link_width="16"/>')
COUNT = '<nvlink target="0000:11:00.0" {} tclass="0x03"/>'
PAIR = [gpu(k, chip='sm="61"') for k in (0, 1)]


def refuse(text, words):
    """Check that the text raises an ArgumentError with each of these words."""
    with pytest.raises(ArgumentError, match="".join(rf"(?=[\s\S]*{re.escape(word)})" for word in words)):
        read_nccl_xml(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Parts that NCCL reads from the driver if the file lacks them.
        (WITHOUT_GPU, ["no <gpu>", "1 of its PCI devices", "line 1", "NCCL_TOPO_DUMP_FILE"]),
        (system(), ["no <gpu>", "0 of its PCI devices"]),
        (system('<gpu dev="0" sm="80"/>'), ["<gpu> must be in a <pci>", "line 3", 'dev="0"']),
        (system(gpu(0) + '<nic><gpu dev="7"/></nic>'), ["<gpu> must be in a <pci>", 'dev="7"']),
        (system(gpu(0)).replace("</system>", gpu(7) + "</system>"), ["which is in a <cpu>", 'dev="7"']),
        (
            system(gpu(0, entries({0: 12}), 'sm="80"') + gpu(1, entries({1: 12}), 'sm="80"')),
            ["links of cuda:0 lead to itself", "line 3", 'count="12"', "NCCL_TOPO_DUMP_FILE"],
        ),
        (system(gpu(0, chip='sm="90"') + gpu(1, chip='sm="90"')), ["joined by NVLink or xGMI", 'sm="90"', "line 3"]),
        (system(PAIR[0] + PAIR[1].replace("class", 'device="0x20b0" class')), ["joined by NVLink", 'dev="1"']),
        (system(*PAIR, about=""), ["the link between CPUs", 'numaid="0"']),
        (system(gpu(0, entries({1: 1}), "") + gpu(1)), ["a GPU must have its model"]),
        *(
            (system(gpu(0, COUNT.format(count)) + gpu(1)), ["the number of its links"])
            for count in ("", 'count="2.5"', 'count="99999999999999"')
        ),
        (system(gpu(0, '<nvlink count="2" tclass="0x030200"/>') + gpu(1)), ["the target of its links"]),
        # Inconsistent files.
        (system(gpu(0) + gpu(0)), ["two GPUs are called cuda:0"]),
        (system(gpu(0), gpu(1)).replace('numaid="1"', 'numaid="0"'), ["NUMA node appears twice in the file"]),
        (system(gpu(0)).replace('numaid="0"', ""), ["number of its NUMA node"]),
        # Files of another kind.
        ("", ["this is not XML", "line 1"]),
        (system(gpu(0))[:-12], ["this is not XML", "line 4"]),
        (system(gpu(0)) + "<system/>", ["this is not XML", "line 6: <system/>"]),
        (system(gpu(0)).replace('dev="0"', "dev=0"), ["this is not XML", "line 3"]),
        ('<graphs version="1"/>', ["starts with <system", "<graphs", "line 1"]),
        (system(gpu(0), version=3), ["starts with <system", 'version="3"']),
        ("<system/>", ["starts with <system"]),
        (system("&unknown;"), ["this is not XML", "undefined entity"]),
        (None, ["topology must be text"]),
    ],
)
def test_invalid_xml(text, words):
    """An incomplete or invalid file, or one that is not text, raises an ArgumentError that states the fault."""
    refuse(text, words)


LAUGHS = "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in itertools.pairwise("abcdefghijk"))
TYPES = [
    f"<!DOCTYPE l [<!ENTITY a 'ha'>{LAUGHS}]><system version='1'>&k;</system>",
    '<!DOCTYPE s SYSTEM "file:///etc/passwd"><system version="1"/>',
]


def test_hostile_xml():
    """Files with entities, or with too much depth, length, tags or CPUs, are refused before they are evaluated."""
    for text in TYPES:
        refuse(text, ["a document type is not allowed", "line 1"])
    hwloc = '<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology/>'
    refuse(hwloc, ["a document type is not allowed", "line 2"])
    refuse(f'<system version="1">{"<pci>" * 5000}', ["levels of elements"])
    refuse(" " * nccl_xml.LONGEST + "<system/>", ["at most", "characters"])
    refuse("<pci/>" * nccl_xml.MOST_TAGS * 2, ["at most", "tags"])
    refuse("<!--" * nccl_xml.MOST_TAGS, ["this is not XML"])
    refuse(system(*[""] * 300), ["at most 256 CPUs"])
    refuse("\ud800\x00", ["this is not XML"])


SAMPLES = [
    system(
        gpu(0, entries({1: 2}) + '<nvlink target="x" count="1" tclass="0x068000"/>') + pci(9, gpu(1) + gpu(2)), gpu(3)
    ),
    system(
        pci(8, gpu(0, entries({1: 1}, "xgmi"), 'gcn="908"') + gpu(1, entries({0: 1}, "xgmi"), 'gcn="908"')), version=2
    ),
]


@given(st.sampled_from(SAMPLES).flatmap(damaged))
def test_damaged_xml(text):
    """Reading a truncated or changed file gives a topology or an ArgumentError, never another error."""
    try:
        topology = read_nccl_xml(text)
    except ArgumentError as error:
        assert "given" in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert topology.devices
