"""Files of topologies: this library's JSON, NCCL's and RCCL's XML, and the table of nvidia-smi."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossreduce import ArgumentError, Topology
from crossreduce.topology import nccl_xml, nvidia_smi
from crossreduce.topology.formats import LARGEST
from crossreduce.topology.kinds import joins
from crossreduce.topology.machines import machine_names

machine, load = Topology.machine, Topology.load
INTEL = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"'
AMD = 'arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="1"'


def read_nccl_xml(text, **options):
    return Topology(*nccl_xml.read_nccl_xml(text, **options))


def read_nvidia_smi(text, **options):
    return Topology(*nvidia_smi.read_nvidia_smi(text, **options))


def bus(k):
    return f"0000:{k + 16:02x}:00.0"


def pci(k, inside="", speed="8.0 GT/s PCIe", width=16, more=""):
    return f'<pci busid="{bus(k)}" link_speed="{speed}" link_width="{width}" {more}>{inside}</pci>'


def gpu(k, links="", chip='sm="70"', **slot):
    return pci(k, f'<gpu dev="{k}" {chip} rank="{k}" gdr="1">{links}</gpu>', more='class="0x030200"', **slot)


def entries(peers, tag="nvlink", tclass="0x030200"):
    """Return the entries of a GPU, given the number of links to each peer."""
    return "".join(f'<{tag} target="{bus(peer)}" count="{n}" tclass="{tclass}"/>' for peer, n in peers.items())


def system(*cpus, version=1, about=INTEL):
    """Return the XML of a machine whose k-th CPU has the given devices."""
    nodes = (f'<cpu numaid="{k}" {about}>\n{inside}\n</cpu>' for k, inside in enumerate(cpus))
    return f'<system version="{version}">\n' + "\n".join(nodes) + "\n</system>\n"


def counts(topology, one):
    """Return the number of links of a bandwidth between every two devices."""
    peers = {k: {} for k in range(len(topology.devices))}
    for src, dst, bandwidth, _ in topology.links:
        peers[int(src.split(":")[1])][int(dst.split(":")[1])] = int(bandwidth / one)
    return peers


# NCCL's XML.


@pytest.mark.parametrize(
    ("name", "tag", "chip", "one", "effective"),
    [
        ("dgx-1p", "nvlink", 'sm="60"', 20, 18),
        ("dgx-1v", "nvlink", 'sm="70"', 25, 20),
        ("mi250", "xgmi", 'sm="90" gcn="910"', 50, 36),
        ("mi250", "xgmi", 'sm="90" gcn="gfx90a"', 50, 36),
        ("mi300x", "xgmi", 'sm="94" gcn="gfx942"', 64, 48),
    ],
)
def test_a_mesh(name, tag, chip, one, effective):
    """GPUs that NVLink or xGMI joins give the machine of the library, without PCIe, at the requested speeds."""
    there = machine(name)
    n = len(there.devices)
    peers = counts(there, one)
    text = system(
        *("".join(gpu(k, entries(peers[k], tag), chip) for k in half) for half in (range(n // 2), range(n // 2, n))),
        version=2 if tag == "xgmi" else 1,
    )
    assert read_nccl_xml(text) == read_nccl_xml(text, speeds="raw") == there
    assert read_nccl_xml(text, speeds="effective") == machine(name, speeds="effective")
    assert counts(read_nccl_xml(text, speeds="effective"), effective) == peers


@pytest.mark.parametrize(("name", "sm", "count"), [("dgx-a100", 80, 2), ("hgx-h100", 90, 3), ("hgx-b200", 100, 3)])
def test_nvswitches(name, sm, count):
    """All NVSwitches are one switch, regardless of their bus numbers, and the links to them add up."""
    ends = [bus(100 + k) for k in range(5)] + ["fffffff:ffff:ff"]  # of a virtual machine
    links = "".join(f'<nvlink target="{end}" count="{count}" tclass="0x068000"/>' for end in ends)
    assert read_nccl_xml(system("".join(gpu(k, links, f'sm="{sm}"') for k in range(8)))) == machine(name)


def test_a_pcie_machine():
    """Without NVLink the topology has PCIe switches and CPUs, with NCCL's speed between CPUs."""
    halves = [
        pci(91, gpu(0) + gpu(1)) + pci(92, gpu(2) + gpu(3)),
        pci(93, gpu(4) + gpu(5)) + pci(94, gpu(6) + gpu(7)),
    ]
    text = system(*halves).replace('sm="70"', 'sm="61"')
    topology, same = read_nccl_xml(text, speeds="effective"), machine("pcie-8", speeds="effective")
    to = {f"plx{k}": f"pci-{bus(91 + k).replace(':', '-')}" for k in range(4)}
    assert topology.devices == same.devices
    assert {switch.name for switch in topology.switches} == {"cpu0", "cpu1", *to.values()}
    links = {(to.get(a, a), to.get(b, b), *rest) for a, b, *rest in same.links}
    assert {tuple(link) for link in topology.links} == links
    assert read_nccl_xml(text).link("cuda:0", to["plx0"]).bandwidth == Fraction("15.75")


def test_nvlink_bridges_on_pcie():
    """GPUs that NVLink joins in pairs only have PCIe links, too."""
    bridge = ({1: 4}, {0: 4}, {3: 4}, {2: 4})
    cards = (gpu(k, entries(bridge[k]), 'sm="86"', speed="16.0 GT/s PCIe") for k in range(4))
    assert read_nccl_xml(system("".join(cards))) == machine("nvlink-pairs-4")


def test_bridges_of_one_branch_are_part_of_the_link():
    """A PCI bridge with one branch is not a switch: its link has the least width of the path; network cards are not
    branches."""
    nic = pci(80, '<nic><net name="mlx5_0" dev="0" speed="200000"/></nic>', more='class="0x020700"')
    narrow = pci(90, pci(91, gpu(0, width=16), width=4) + nic)
    text = system(narrow + gpu(1) + "<nic><net/></nic>").replace('sm="70"', 'sm="61"')
    topology = read_nccl_xml(text)
    assert {switch.name for switch in topology.switches} == {"cpu0"}
    assert topology.link("cuda:0", "cpu0").bandwidth == Fraction("15.75") / 4
    assert topology.link("cpu0", "cuda:1").bandwidth == Fraction("15.75")


@pytest.mark.parametrize(
    ("speed", "width", "raw", "effective"),
    [
        ("2.5 GT/s", "16", 4, 3),
        ("5 GT/s", "16", 8, 6),
        ("5.0 GT/s PCIe", "8", 4, 3),
        ("8 GT/s", "16", Fraction("15.75"), 12),
        ("8.0 GT/s PCIe", "4", Fraction("15.75") / 4, 3),
        ("16 GT/s", "16", Fraction("31.5"), 24),
        ("16.0 GT/s PCIe", "16", Fraction("31.5"), 24),
        ("32.0 GT/s PCIe", "16", 63, 48),
        ("64.0 GT/s PCIe", "16", 121, 96),
        # NCCL's default if the system does not report a value.
        ("", "0", Fraction("15.75"), 12),
        ("", "", Fraction("15.75"), 12),
        ("Undefined", "16", Fraction("15.75"), 12),
        ("Unknown speed", "255", Fraction("15.75"), 12),
        ("Unknown", "-1", Fraction("15.75"), 12),
    ],
)
def test_pcie_speeds(speed, width, raw, effective):
    """The bandwidth of PCIe is the product of rate and width, or NCCL's default."""
    text = system(gpu(0, chip='sm="61"', speed=speed, width=width) + gpu(1, chip='sm="61"'))
    assert read_nccl_xml(text).link("cuda:0", "cpu0").bandwidth == raw
    assert read_nccl_xml(text, speeds="effective").link("cpu0", "cuda:0").bandwidth == effective


@pytest.mark.parametrize(
    ("about", "gb_per_s"),
    [
        (INTEL, 10),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="79"', 6),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"', 22),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"', 40),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="173"', 40),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49"', 16),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49"', 16),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1"', 24),
        (AMD, 24),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="26" modelid="2"', 32),
        ('arch="x86_64" vendor="CentaurHauls" familyid="7" modelid="91"', 9),
        ('arch="x86_64" vendor="  Shanghai  " familyid="7" modelid="59"', 6),
        ('arch="arm64"', 6),
        ('arch="ppc64"', 32),
    ],
)
def test_cpus(about, gb_per_s):
    """Links between CPUs have the speed that NCCL assumes for their vendor and model."""
    topology = read_nccl_xml(system(gpu(0, chip='sm="61"'), gpu(1, chip='sm="61"'), about=about))
    assert topology.link("cpu0", "cpu1").bandwidth == topology.link("cpu1", "cpu0").bandwidth == gb_per_s
    assert topology.route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cpu1", "cuda:1")


def test_power9():
    """On POWER9, NVLinks lead to the CPU, too."""
    to_cpu = '<nvlink target="0004:00:01.0" count="3" tclass="0x068001"/>'
    halves = [
        "".join(gpu(k, entries({j: 3}) + to_cpu) for k, j in pairs) for pairs in [((0, 1), (1, 0)), ((2, 3), (3, 2))]
    ]
    topology = read_nccl_xml(system(*halves, about='arch="ppc64"'))
    assert topology.link("cuda:0", "cuda:1").bandwidth == 75
    assert topology.link("cpu1", "cuda:3").bandwidth == 75
    assert topology.link("cpu0", "cpu1").bandwidth == 32


def test_gpus_are_called_by_their_number():
    """Devices are in the order of ``dev``, not of the file; bus numbers may have any spelling."""
    links = {k: f'<nvlink target="00000000:{1 - k + 0xAA:X}:00.0" count="2" tclass="0x030200"/>' for k in (0, 1)}
    text = "".join(
        f'<pci busid="0000:{k + 0xAA:x}:00.0"><gpu dev="{7 - k}" sm="70">{links[k]}</gpu></pci>' for k in (0, 1)
    )
    assert read_nccl_xml(system(text)) == Topology.full_mesh(["cuda:6", "cuda:7"], 50, Fraction(7, 10**7))


def test_a_gpu_that_is_not_in_the_file():
    """Links to a GPU outside the job that wrote the file are left out."""
    text = system("".join(gpu(k, entries({j: 1 for j in range(4) if j != k})) for k in range(3)))
    assert read_nccl_xml(text) == Topology.full_mesh(["cuda:0", "cuda:1", "cuda:2"], 25, Fraction(7, 10**7))


def test_one_gpu():
    """A machine with one GPU has no links."""
    assert read_nccl_xml(system(gpu(0))) == Topology(("cuda:0",), ())


def test_several_hosts_in_one_file():
    """In a file of the hosts of a rack, names of devices start with their host; NVSwitches join the hosts."""
    link = '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>'
    cpu = '<cpu numaid="0" host_hash="0x{}" arch="arm64">{}</cpu>'
    inside = "".join(gpu(k, link, 'sm="100"') for k in range(4))
    topology = read_nccl_xml(f'<system version="1">{cpu.format("b", inside)}{cpu.format("a", inside)}</system>')
    assert topology.devices == tuple(f"host{h}/cuda:{k}" for h in range(2) for k in range(4))
    assert topology.route("host0/cuda:1", "host1/cuda:1") == ("host0/cuda:1", "nvswitch", "host1/cuda:1")
    assert {link.bandwidth for link in topology.links} == {900}


def test_cpus_of_several_hosts_are_apart():
    """CPUs of different hosts have no link; those of one host do."""
    cpu = '<cpu numaid="{}" host_hash="0x{}" arch="arm64">{}</cpu>'
    nodes = [cpu.format(n, host, gpu(n, chip='sm="61"')) for host in "ab" for n in (0, 1)]
    topology = read_nccl_xml(f'<system version="1">{"".join(nodes)}</system>')
    assert topology.link("host1/cpu0", "host1/cpu1").bandwidth == 6
    assert topology.route("host0/cuda:0", "host1/cuda:0") is None


def test_comments():
    """Comments are skipped, also the malformed ones at the start of RCCL's files; line numbers do not change."""
    text = "<!------\n - (c) <gpu> & more\n------->\n" + system(gpu(0) + "<!-- a - b -- c -->")
    assert read_nccl_xml(text).devices == ("cuda:0",)
    with pytest.raises(ArgumentError, match="line 8"):
        read_nccl_xml(text.replace("</system>", "</sys>"))


WITHOUT_GPU = system(f'<pci busid="{bus(1)}" class="0x030200" link_speed="16 GT/s" link_width="16"/>')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Parts that NCCL reads from the driver if the file lacks them.
        (WITHOUT_GPU, ["no <gpu>", "1 of its PCI devices", "line 1", "NCCL_TOPO_DUMP_FILE"]),
        (system(), ["no <gpu>", "0 of its PCI devices"]),
        ('<system version="1"/>', ["no <gpu>"]),
        (
            system(gpu(0, entries({0: 12}), 'sm="80"') + gpu(1, entries({1: 12}), 'sm="80"')),
            ["links of cuda:0 lead to itself", "line 3", 'count="12"', "NCCL_TOPO_DUMP_FILE"],
        ),
        (system(gpu(0, chip='sm="90"') + gpu(1, chip='sm="90"')), ["joined by NVLink or xGMI", 'sm="90"', "line 3"]),
        (system("".join(gpu(k, chip='sm="94" gcn="gfx942"') for k in (0, 1))), ["joined by NVLink or xGMI", "gfx942"]),
        (
            system(gpu(0, chip='sm="61"') + gpu(1, chip='sm="61"').replace("class", 'device="0x20b0" class')),
            ["joined by NVLink", 'dev="1"'],
        ),
        (system(gpu(0, chip='sm="61"'), gpu(1, chip='sm="61"'), about=""), ["the link between CPUs", 'numaid="0"']),
        (system(gpu(0, entries({1: 1}), "") + gpu(1)), ["a GPU must have its model"]),
        (system(gpu(0, entries({1: 1}, "xgmi"), 'gcn="gfx700"') + gpu(1)), ["a GPU must have its model", "gfx700"]),
        (system(gpu(0, '<nvlink target="0000:11:00.0" tclass="0x03"/>') + gpu(1)), ["the number of its links"]),
        (
            system(gpu(0, '<nvlink target="0000:11:00.0" count="0" tclass="0x03"/>') + gpu(1)),
            ["the number of its links"],
        ),
        (
            system(gpu(0, '<nvlink target="0000:11:00.0" count="2.5" tclass="0x03"/>') + gpu(1)),
            ["the number of its links"],
        ),
        (system(gpu(0, '<nvlink count="2" tclass="0x030200"/>') + gpu(1)), ["the target of its links"]),
        # Inconsistent files.
        (system(gpu(0) + gpu(0)), ["two GPUs are called cuda:0"]),
        (system(gpu(0), gpu(1)).replace('numaid="1"', 'numaid="0"'), ["NUMA node appears twice in the file"]),
        (system(gpu(0)).replace('numaid="0"', ""), ["number of its NUMA node"]),
        # Files of another kind.
        ("", ["this is not XML", "line 1"]),
        ("GPU0", ["this is not XML", "line 1"]),
        (system(gpu(0))[:-12], ["this is not XML", "line 4"]),
        (system(gpu(0)) + "<system/>", ["this is not XML", "line 6: <system/>"]),
        (system(gpu(0)).replace('dev="0"', "dev=0"), ["this is not XML", "line 3"]),
        ("<!-- never ends", ["this is not XML"]),
        ('<graphs version="1"/>', ["starts with <system", "<graphs", "line 1"]),
        (system(gpu(0), version=3), ["starts with <system", 'version="3"']),
        ("<system/>", ["starts with <system"]),
        (system("&unknown;"), ["this is not XML", "undefined entity"]),
        (b"<system/>", ["topology must be text"]),
        (None, ["topology must be text"]),
    ],
)
def test_invalid_xml(text, words):
    """An incomplete or invalid file is an ArgumentError with the line, the missing part and a remedy."""
    with pytest.raises(ArgumentError) as caught:
        read_nccl_xml(text)
    for word in words:
        assert word in str(caught.value)


def test_pcie_cards_need_no_nvlink():
    """A chip that exists on modules and on PCIe cards needs no NVLink if its device number is that of a card."""
    text = "".join(gpu(k, chip='sm="80"').replace("class", 'device="0x20b5" class') for k in (0, 1))
    assert read_nccl_xml(system(text)).route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cuda:1")


LAUGHS = '<!DOCTYPE l [<!ENTITY a "ha">' + "".join(
    f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in itertools.pairwise("abcdefghijk")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{LAUGHS}]><system version='1'>&k;</system>", ["a document type is not allowed", "line 1"]),
        ('<!DOCTYPE s SYSTEM "file:///etc/passwd"><system version="1"/>', ["a document type is not allowed"]),
        (
            '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><system version="1">&x;</system>',
            ["a document type is not allowed"],
        ),
        (
            '<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology/>',
            ["a document type is not allowed", "line 2"],
        ),
        (f'<system version="1">{"<pci>" * 5000}', ["levels of elements"]),
        (" " * nccl_xml.LONGEST + "<system/>", ["at most", "characters"]),
        ("<pci/>" * nccl_xml.MOST_TAGS * 2, ["at most", "tags"]),
        ("<!--" * nccl_xml.MOST_TAGS, ["this is not XML"]),
        (system(*[""] * 300), ["at most 256 CPUs"]),
        (system(gpu(0, '<nvlink count="99999999999999" target="a" tclass="0x068000"/>')), ["the number of its links"]),
        ("\ud800\x00", ["this is not XML"]),
    ],
    ids=["laughs", "dtd", "entity", "hwloc", "deep", "long", "tags", "comments", "cpus", "count", "junk"],
)
def test_hostile_xml(text, words):
    """Entities, and excessive depth, length and numbers, are refused at once."""
    with pytest.raises(ArgumentError) as caught:
        read_nccl_xml(text)
    for word in words:
        assert word in str(caught.value)


SAMPLES = [
    system(
        gpu(0, entries({1: 2}) + '<nvlink target="x" count="1" tclass="0x068000"/>') + pci(9, gpu(1) + gpu(2)), gpu(3)
    ),
    system(
        pci(8, gpu(0, entries({1: 1}, "xgmi"), 'gcn="908"') + gpu(1, entries({0: 1}, "xgmi"), 'gcn="908"')), version=2
    ),
]


@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_xml(sample, data):
    """A truncated or changed file is a topology or an ArgumentError, never another error."""
    at = data.draw(st.integers(0, len(sample)))
    text = data.draw(
        st.one_of(st.just(""), st.just(sample[at + 1 :]), st.text(max_size=3).map(lambda t: t + sample[at:]))
    )
    try:
        topology = read_nccl_xml(sample[:at] + text)
    except ArgumentError as error:
        assert "given" in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert topology.devices


# nvidia-smi topo -m.

# As published for PyTorch's benchmark of DistributedDataParallel, a DGX-1 with four cards.
DGX_1 = """
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    mlx5_2  mlx5_0  CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     SYS     PIX     0-19,40-59
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     SYS     PIX     0-19,40-59
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     SYS     PHB     0-19,40-59
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     SYS     PHB     0-19,40-59
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     PIX     SYS     0-19,40-59
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     PIX     SYS     0-19,40-59
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     PHB     SYS     0-19,40-59
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      PHB     SYS     0-19,40-59
mlx5_2  SYS     SYS     SYS     SYS     PIX     PIX     PHB     PHB      X      SYS
mlx5_0  PIX     PIX     PHB     PHB     SYS     SYS     SYS     SYS     SYS      X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def table(rows, names=None, cores=""):
    """Return a table as nvidia-smi prints it: tabs, a header underlined by escape codes, cores and a legend."""
    names = names or [f"GPU{k}" for k in range(len(rows))]
    header = "\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    lines = [
        f"{name}\t" + "\t".join(row.split()) + f"\t{cores}\t0\t\tN/A" for name, row in zip(names, rows, strict=False)
    ]
    return "\n".join([header, *lines, "", "Legend:", "", "  X    = Self", "  PIX  = at most a single PCIe bridge", ""])


def uniform(n, cell):
    return [" ".join("X" if i == j else cell for j in range(n)) for i in range(n)]


def test_the_table_of_a_dgx_1():
    """The table that nvidia-smi prints on a DGX-1 gives the library's DGX-1."""
    assert read_nvidia_smi(DGX_1) == machine("dgx-1v")
    assert read_nvidia_smi(DGX_1.replace("NV2", "NV1"), nvlink_gb_per_s=20) == machine("dgx-1p")


@pytest.mark.parametrize(
    ("name", "n", "links", "gb_per_s"),
    [("dgx-a100", 8, 12, 25), ("dgx-2", 16, 6, 25), ("hgx-h100", 8, 18, 25), ("hgx-b200", 8, 18, 50)],
)
def test_more_links_than_a_gpu_has_are_a_switch(name, n, links, gb_per_s):
    """If a row has more NVLinks than a GPU can have, all NVLinks lead to one switch."""
    topology = read_nvidia_smi(table(uniform(n, f"NV{links}"), cores="0-23,48-71"), nvlink_gb_per_s=gb_per_s)
    same = machine(name)
    assert (topology.devices, topology.switches) == (same.devices, same.switches)
    assert [link[:3] for link in topology.links] == [link[:3] for link in same.links]


@pytest.mark.parametrize(
    ("n", "links", "most", "direct"),
    [
        (4, 4, 18, True),  # HGX A100 with four GPUs
        (4, 6, 18, True),  # HGX H100 with four
        (4, 6, 6, False),  # four of a DGX-2
        (2, 12, 18, True),  # a bridge, or two of eight A100: the same
        (3, 12, 18, False),
        (2, 18, 18, True),
        (3, 9, 18, True),
    ],
)
def test_links_that_a_gpu_can_have_are_its_own(n, links, most, direct):
    """If a row has at most the number of NVLinks that a GPU can have, they join pairs of GPUs."""
    topology = read_nvidia_smi(table(uniform(n, f"NV{links}")), nvlinks_per_gpu=most)
    assert (topology.switches == ()) == direct
    peer = "cuda:1" if direct else "nvswitch"
    assert topology.link("cuda:0", peer).bandwidth == links * 25


def test_a_switch_with_a_link_down():
    """A GPU with some inactive links has the number of links in its row."""
    rows = uniform(8, "NV12")
    rows[3] = rows[3].replace("NV12", "NV11")
    rows = [
        " ".join("NV11" if j == 3 and i != 3 else c for j, c in enumerate(row.split())) for i, row in enumerate(rows)
    ]
    topology = read_nvidia_smi(table(rows))
    assert [topology.link(device, "nvswitch").bandwidth for device in topology.devices] == [300] * 3 + [275] + [300] * 4


def test_two_islands_of_nvlink():
    """Groups of GPUs that NVLink joins, through switches or not, have PCIe between the groups."""
    rows = [" ".join("X" if i == j else "NV12" if i // 4 == j // 4 else "SYS" for j in range(8)) for i in range(8)]
    topology = read_nvidia_smi(table(rows))
    assert topology.route("cuda:1", "cuda:3") == ("cuda:1", "nvswitch", "cuda:3")
    assert topology.route("cuda:5", "cuda:7") == ("cuda:5", "nvswitch1", "cuda:7")
    assert joins(topology.devices, topology.links)


def test_bridges_in_a_workstation():
    """Pairs with an NVLink bridge have PCIe to the CPU, too; its speed is a parameter."""
    rows = ["X NV4 PHB PHB", "NV4 X PHB PHB", "PHB PHB X NV4", "PHB PHB NV4 X"]
    topology = read_nvidia_smi(table(rows), nvlink_gb_per_s=14.0625, pcie="pcie4")
    assert topology == machine("nvlink-pairs-4")


def test_the_tree_of_pcie():
    """PIX is a switch, PXB a switch above switches, PHB and NODE a CPU, SYS another CPU."""
    rows = [
        "X   PIX  PXB  PXB  PHB  SYS",
        "PIX X    PXB  PXB  PHB  SYS",
        "PXB PXB  X    PIX  NODE SYS",
        "PXB PXB  PIX  X    NODE SYS",
        "PHB PHB  NODE NODE X    SYS",
        "SYS SYS  SYS  SYS  SYS  X  ",
    ]
    topology = read_nvidia_smi(table(rows))
    assert topology.route("cuda:0", "cuda:1") == ("cuda:0", "pcie0", "cuda:1")
    assert topology.route("cuda:0", "cuda:3") == ("cuda:0", "pcie0", "pcie2", "pcie1", "cuda:3")
    assert topology.route("cuda:2", "cuda:4") == ("cuda:2", "pcie1", "pcie2", "cpu0", "cuda:4")
    assert topology.route("cuda:4", "cuda:5") == ("cuda:4", "cpu0", "cpu1", "cuda:5")
    assert topology.link("cpu0", "cpu1").bandwidth == 10
    assert {link.bandwidth for link in topology.links} == {10, Fraction("15.75")}
    assert len(topology.links) == 2 * (len(topology.nodes) - 1), "a tree"


def test_eight_gpus_under_two_cpus():
    """The table of the library's PCIe machine gives that machine, with other names of switches."""
    rows = [
        " ".join("X" if i == j else ("PIX", "PHB", "SYS")[(i // 2 != j // 2) + (i // 4 != j // 4)] for j in range(8))
        for i in range(8)
    ]
    topology, same = read_nvidia_smi(table(rows)), machine("pcie-8")
    to = {f"pcie{k}": f"plx{k}" for k in range(4)}
    links = {tuple(to.get(node, node) for node in link[:2]) for link in topology.links}
    assert links == {link[:2] for link in same.links}


def test_cards_tell_which_gpus_share_a_switch():
    """GPUs of an NVLink pair, for which the table has no PCIe entry, share the switch of a card that is near both."""
    names = ["GPU0", "GPU1", "GPU2", "NIC0"]
    rows = ["X NV2 SYS PIX", "NV2 X SYS PIX", "SYS SYS X SYS", "PIX PIX SYS X"]
    topology = read_nvidia_smi(table(rows, names))
    assert topology.without_link("cuda:0", "cuda:1").route("cuda:0", "cuda:1") == ("cuda:0", "pcie0", "cuda:1")
    assert {switch.name for switch in topology.switches} == {"pcie0", "cpu0", "cpu1"}
    with_legend = table(rows[:3], names) + "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    assert read_nvidia_smi(with_legend) == topology, "cards may lack a row"


def test_cores_tell_which_gpus_share_a_cpu():
    """GPUs of an NVLink pair have one CPU if their cores are the same, else two."""
    rows = ["X NV2 SYS SYS", "NV2 X SYS SYS", "SYS SYS X NV2", "SYS SYS NV2 X"]
    text = table(rows, cores="{}")
    one = read_nvidia_smi(text.format("0-7", "0-7", "8-15", "8-15"))
    assert one.without_link("cuda:0", "cuda:1").route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cuda:1")
    assert len(read_nvidia_smi(text.format("0-7", "8-15", "16-23", "24-31")).switches) == 4


@pytest.mark.parametrize(
    "text",
    [
        "GPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-63\t0\nGPU1\tSYS\t X \t64-127\t1\n",
        "$ nvidia-smi topo -m\n\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSOC\t0-7\nGPU1\tSOC\t X \t8-15\n",
        "\tGPU0\tGPU1\nGPU0\t X \tSYS\t\nGPU1\tSYS\t X \t\n",
        "        GPU0    GPU1\r\nGPU0     X      SYS\r\nGPU1    SYS     X\r\n",
    ],
)
def test_variants_of_the_table(text):
    """Lost whitespace and differences between drivers do not matter."""
    assert read_nvidia_smi(text).route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cpu1", "cuda:1")


def test_one_gpu_in_a_table():
    """One GPU has no links."""
    assert read_nvidia_smi("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == Topology(("cuda:0",), ())


GOOD = table(["X NV1 SYS", "NV1 X SYS", "SYS SYS X"], cores="0-7")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, ["does not contain a table of GPUs", "nvidia-smi topo -m"]),
        ("GPU 0: Tesla V100 (UUID: GPU-1)", {}, ["does not contain a table of GPUs"]),
        (GOOD[: GOOD.index("GPU2\tSYS")], {}, ["not have a row of GPU2", "line 1"]),
        (GOOD[: GOOD.index("GPU2\tSYS") + 10], {}, ["row of GPU2", "line 4", "GPU2 SYS"]),
        (GOOD.replace("NV1", "NVX"), {}, ["row of GPU0", "line 2"]),
        (GOOD.replace("NV1", "NV1", 1).replace("GPU1\tNV1", "GPU1\tNV2"), {}, ["the entries of GPU0 and GPU1 differ"]),
        (GOOD.replace("GPU0\tX", "GPU0\tNV1"), {}, ["the entries of GPU0 and GPU0 differ"]),
        (GOOD.replace("GPU1\tNV1", "GPU1\tX"), {}, ["the entries of"]),
        (GOOD.replace("GPU1\tNV1", "GPU0\tNV1"), {}, ["row of GPU0", "line 3"]),
        (GOOD.replace("\tGPU2\t", "\tGPU1\t"), {}, ["twice"]),
        ("x" * (nvidia_smi.LONGEST + 1), {}, ["at most", "characters"]),
        (None, {}, ["must be text of at most"]),
        (GOOD.encode(), {}, ["must be text of at most"]),
        (GOOD, {"nvlink_gb_per_s": 0}, ["GB/s above 0"]),
        (GOOD, {"nvlink_gb_per_s": float("nan")}, ["GB/s above 0", "nan"]),
        (GOOD, {"nvlink_gb_per_s": float("inf")}, ["GB/s above 0"]),
        (GOOD, {"nvlink_gb_per_s": "25"}, ["GB/s above 0", "'25'"]),
        (GOOD, {"nvlink_gb_per_s": True}, ["GB/s above 0"]),
        (GOOD, {"nvlinks_per_gpu": 0}, ["number of links", "0"]),
        (GOOD, {"nvlinks_per_gpu": True}, ["number of links"]),
        (GOOD, {"nvlinks_per_gpu": 4.0}, ["number of links"]),
        (GOOD, {"pcie": "pcie7"}, ["kind of PCIe is not known", "'pcie7'"]),
        (GOOD, {"pcie": "hdr"}, ["kind of PCIe is not known"]),
    ],
)
def test_invalid_tables(text, options, words):
    """An invalid or incomplete table is an ArgumentError with the line and a remedy."""
    with pytest.raises(ArgumentError) as caught:
        read_nvidia_smi(text, **options)
    for word in words:
        assert word in str(caught.value)


@given(st.sampled_from([DGX_1, GOOD]), st.data())
def test_damaged_tables(sample, data):
    """A truncated or changed table is a topology or an ArgumentError, never another error."""
    at = data.draw(st.integers(0, len(sample)))
    text = data.draw(
        st.one_of(st.just(""), st.just(sample[at + 1 :]), st.text(max_size=3).map(lambda t: t + sample[at:]))
    )
    try:
        topology = read_nvidia_smi(sample[:at] + text)
    except ArgumentError as error:
        assert "given" in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert topology.devices


# Files.

FILES = {
    "powershell-be.txt": (b"\xfe\xff" + DGX_1.encode("utf-16-be"), machine("dgx-1v")),
    "topology.json": (Topology.torus(2, 3).to_json().encode(), Topology.torus(2, 3)),
    "topology-indented.json": (b"\n  " + Topology.star(3).to_json().encode() + b"\n", Topology.star(3)),
    "nccl.xml": (SAMPLES[0].encode(), read_nccl_xml(SAMPLES[0])),
    "with-header.xml": (b'<?xml version="1.0" encoding="UTF-8"?>\n' + SAMPLES[1].encode(), read_nccl_xml(SAMPLES[1])),
    "table.txt": (DGX_1.encode(), machine("dgx-1v")),
    "underlined": (GOOD.encode(), read_nvidia_smi(GOOD)),
    "powershell.txt": (b"\xff\xfe" + DGX_1.encode("utf-16-le"), machine("dgx-1v")),
    "with-mark.xml": (b"\xef\xbb\xbf" + SAMPLES[0].encode(), read_nccl_xml(SAMPLES[0])),
}


@pytest.mark.parametrize("name", FILES)
def test_load(name, tmp_path):
    """The content of a file determines its format, not its name; paths may be of any kind."""
    data, topology = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    assert load(path) == load(str(path)) == Topology.load(path) == topology


@pytest.mark.parametrize("name", [name for name, _ in machine_names()])
def test_machines_survive_a_file(name, tmp_path):
    """Every machine of the library can be written to a file and loaded."""
    path = tmp_path / "machine.json"
    path.write_text(machine(name).to_json())
    assert load(path) == machine(name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["empty"]),
        (b" \n\t\n", ["empty"]),
        (b"\x00\x01\x02", ["this is not a topology"]),
        (bytes(range(256)), ["this is not text"]),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), ["this is not text"]),
        (b"\xff\xfe\x00", ["this is not text"]),
        (b"hello", ["this is not a topology", "nvidia-smi topo -m", "crossreduce.topology/1"]),
        (b"[1, 2]", ["this is not a topology"]),
        (b"{", ["not a topology in JSON"]),
        (b"{}", ["not a topology in JSON"]),
        (b'{"a": ' * 100_000, ["not a topology in JSON"]),
        (Topology.ring(3).to_json().encode()[:-20], ["not a topology in JSON"]),
        (SAMPLES[0].encode()[:-20], ["this is not XML", "line"]),
        (b"<html></html>", ["starts with <system"]),
        (b"GPU0 is busy", ["does not contain a table of GPUs"]),
        (b"x" * (LARGEST + 1), ["at most", "bytes"]),
    ],
)
def test_invalid_files(data, words, tmp_path):
    """An invalid file is an ArgumentError that names it."""
    path = tmp_path / "given.file"
    path.write_bytes(data)
    with pytest.raises(ArgumentError) as caught:
        load(path)
    for word in (*words, "given.file"):
        assert word in str(caught.value)


@pytest.mark.parametrize("path", [None, 3.5, b"topology.xml", ["topology.xml"], "a\0b"])
def test_invalid_paths(path):
    """An invalid path is an ArgumentError."""
    with pytest.raises(ArgumentError, match="this is not a path"):
        load(path)


def test_files_that_cannot_be_read(tmp_path):
    """A missing file, or a folder, is an OSError."""
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing.xml")
    with pytest.raises(OSError, match="irectory"):
        load(tmp_path)
