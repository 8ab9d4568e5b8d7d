"""Tables as people paste them: shapes of nvidia-smi topo -m and of rocm-smi, kinds of GPUs, network cards, assumptions.

Each shape is what programs print, or what terminals, web pages and editors make of it.
"""

import pickle
import re
from fractions import Fraction
from itertools import combinations

import pytest
from strategies import names as cpus
from test_nccl_xml import machine, read_nvidia_smi
from test_nvidia_smi import DGX_1, table, uniform

from crossreduce import ArgumentError, Topology, bound, plan
from crossreduce.topology.formats import parse
from crossreduce.topology.formats.nvidia_smi import TableOptions
from crossreduce.topology.formats.rocm_smi import read_rocm_smi
from crossreduce.topology.gpus import gpu_kind

# Two pairs of V100 on two CPUs, with two cards.
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV1\tSYS\tSYS\tPIX\tSYS\t0-15\t0\t\tN/A
GPU1\tNV1\t X \tSYS\tSYS\tPIX\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV1\tSYS\tNODE\t16-31\t1\t\tN/A
GPU3\tSYS\tSYS\tNV1\t X \tSYS\tNODE\t16-31\t1\t\tN/A
NIC1\tPIX\tPIX\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC2\tSYS\tSYS\tNODE\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)

NIC Legend:

  NIC1: mlx5_0
  NIC2: mlx5_1
"""
P2P = """\
 \tGPU0\tGPU1\tGPU2\tGPU3\t
 GPU0\tX\tOK\tCNS\tCNS\t
 GPU1\tOK\tX\tCNS\tCNS\t
 GPU2\tCNS\tCNS\tX\tOK\t
 GPU3\tCNS\tCNS\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""


def markdown(text):
    """Return the table as a Markdown table, as issue trackers have it."""
    head, *rows = [line.split("\t") for line in text.split("\n\n")[0].splitlines()]
    lines = [["", *head[1:]], ["---"] * len(head), *([f"**{row[0]}**", *row[1:]] for row in rows)]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


SHAPES = {
    "tabs": PAIRS,
    "blanks": PAIRS.expandtabs(),
    "the blanks of a web page": re.sub("[\t ]+", " ", PAIRS),
    "no tabs": PAIRS.replace("\t", ""),
    "no tabs, no blanks": PAIRS.replace("\t", "").replace(" X ", "X"),
    "no tabs in the header": "\n".join(
        line.replace("\t", "") if k == 0 else line for k, line in enumerate(PAIRS.splitlines())
    ),
    "joined cards": PAIRS.replace("NIC1\tNIC2", "NIC1NIC2"),
    "joined cells": PAIRS.replace("SYS\tSYS", "SYSSYS").replace("NODE\tNODE", "NODENODE"),
    "colours": PAIRS.replace("\tGPU0", "\t\x1b[4mGPU0").replace("GPU NUMA ID", "GPU NUMA ID\x1b[0m"),
    "colours without the escape character": PAIRS.replace("\tGPU0", "\t[4mGPU0").replace("NUMA ID", "NUMA ID[0m"),
    "colours as less and tput write them": PAIRS.replace("\tGPU0", "\t^[[4mGPU0\x1b(B")
    .replace("NUMA ID", "NUMA ID\\033[0m"),
    "characters without a width": PAIRS.replace("\tGPU0", "\u200b\tGPU0").replace("\t", "\u00a0 "),
    "names with dashes": PAIRS.replace("NIC1", "roce-0_a").replace("NIC2", "roce-1_a"),
    "Markdown": markdown(PAIRS),
    "a prompt": "user@host:~$ nvidia-smi topo -m\n" + PAIRS,
    "a prompt before the header": "root@node:/# nvidia-smi topo -m " + PAIRS,
    "a quotation": "\n".join(f"> {line}" for line in PAIRS.splitlines()),
    "Windows": PAIRS.replace("\n", "\r\n"),
    "an older driver": PAIRS.replace("\tNUMA Affinity\tGPU NUMA ID", "").replace("\t\tN/A", "").replace("SYS", "SOC"),
    "names of cards": PAIRS.replace("NIC1", "mlx5_0").replace("NIC2", "mlx5_1"),
    "joined names of cards": PAIRS.replace("NIC1\tNIC2", "mlx5_0mlx5_1").replace("NIC1", "mlx5_0")
    .replace("NIC2", "mlx5_1"),
    "rows of cards are missing": "\n".join(line for line in PAIRS.splitlines() if not line.startswith("NIC")),
    "parts of GPUs": "GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\n" + PAIRS,
    "a column and a row of a part": PAIRS.replace("\tCPU Aff", "\tMIG0\tCPU Aff").replace("\t0-15", "\tSYS\t0-15")
    .replace("\t16-31", "\tSYS\t16-31").replace("\t\t\t\t", "\tSYS\t\t\t\t")
    .replace("\n\nLeg", "\nMIG0" + "\tSYS" * 6 + "\t X \n\nLeg", 1),
    "followed by the table of access": PAIRS + "\n$ nvidia-smi topo -p2p r\n" + P2P,
    "after the table of access": P2P + PAIRS,
}  # fmt: skip


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_shapes_of_one_table(text):
    """All shapes of a table give the same wiring: two pairs on two CPUs, whose bound is 10 GB/s."""
    topology = read_nvidia_smi(text)
    assert topology == read_nvidia_smi(PAIRS)
    assert {switch.name for switch in topology.switches} == {"pcie0", "cpu0", "cpu1"}
    assert bound(topology, "broadcast").algbw == 10


def test_a_dgx_1_without_tabs():
    """The tables of a DGX-1 and of eight A100 are read without blanks, too: NV120-23 is NV12 and 0-23."""
    for text in (DGX_1, table(uniform(8, "NV12"), cores="0-23,48-71"), table(uniform(4, "NV1"), cores="20-31")):
        rows = text.strip("\n").split("\n\n")[0]
        assert read_nvidia_smi(re.sub(r"[ \t]+", "", rows)) == read_nvidia_smi(text)


SHORT = "\tGPU0\tGPU1\nGPU0\t X \t{}\nGPU1\t{}\t X \n"
REFUSED = {
    "more entries than columns": (
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\tSYS\t0-7\nGPU1\tSYS\t X \tSYS\t0-7\n",
        ["the row of GPU0 has more entries than the 2 columns", "line 2: GPU0 X SYS SYS 0-7"],
    ),
    "fewer": (SHORT.format("", "SYS"), ["row of GPU0 must have", "line 2"]),
    "a name that cannot be divided": (
        PAIRS.replace("NIC1\tNIC2", "NIC1ib0"),
        ["the row of GPU0 has more entries than the 5 columns", "line 2"],
    ),
    "an unknown entry": (SHORT.format("N?A", "SYS"), ["row of GPU0", "line 2"]),
    "no connection": (SHORT.format("N/A", "N/A"), ["does not state how GPU0 and GPU1 are joined (N/A)", "line 2"]),
    "no reading agrees": ("GPU0GPU1CPU Affinity\nGPU0XNV120-31\nGPU1NV3X0-31\n", ["can be read in 3 ways", "line 2"]),
    "cut lines": (
        "\n".join(line[:30] for line in PAIRS.expandtabs().splitlines()),
        ["does not have a column of GPU3: its lines are cut or wrapped", "line 5: GPU3 SYS SYS"],
    ),
    "a cut column of a card": (
        "\n".join(line[:46] for line in PAIRS.expandtabs().splitlines()),
        ["does not have a column of NIC2: its lines are cut or wrapped", "line 7"],
    ),
    "cut lines without tabs": (
        "GPU0GPU1\nGPU0XNV1\nGPU1NV1X\nGPU2SYSSYS\n",
        ["does not have a column of GPU2: its lines are cut or wrapped", "line 4"],
    ),
    "a wrapped header": (
        "\n".join(part for line in PAIRS.expandtabs().splitlines() for part in (line[:32], line[32:])),
        ["the lines of the table are wrapped", "line 2: GPU3 NIC1 NIC2"],
    ),
    "access": (P2P, ["topo -p2p states which GPUs can access each other", "nvidia-smi topo -m"]),
    "two machines": (PAIRS + PAIRS, ["a second table", "line 18", "one file for each machine"]),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_tables_that_are_refused(text, words):
    """A table without one right reading is refused, with its line."""
    with pytest.raises(ArgumentError) as caught:
        read_nvidia_smi(text)
    assert all(word in str(caught.value) for word in words), caught.value


def grid(title, cells, width=13):
    """Return a table of rocm-smi with a title. ``cells(i, j)`` is the entry of two of n GPUs."""
    n = len(cells)
    lines = [f"{' ' + title + ' ':=^80}", "       " + "".join(f"GPU{k:<{width - 3}}" for k in range(n))]
    return "\n".join(
        [*lines, *(f"GPU{i:<4}" + "".join(f"{c:<{width}}" for c in row) for i, row in enumerate(cells)), ""]
    )


def square(n, entry, own):
    return [[own if i == j else entry(i, j) for j in range(n)] for i in range(n)]


def showtopo(n, joined, numa=lambda k: 0, weight=lambda i, j: 15):
    """Return what ``rocm-smi --showtopo`` prints for n GPUs; ``joined(i, j)`` is whether xGMI joins two."""
    hops = square(n, lambda i, j: 1 if joined(i, j) else 2 + (numa(i) != numa(j)), 0)
    blocks = [
        grid("Weight between two GPUs", square(n, lambda i, j: weight(i, j) if joined(i, j) else 40, 0)),
        grid("Hops between two GPUs", hops),
        grid("Link Type between two GPUs", square(n, lambda i, j: "XGMI" if joined(i, j) else "PCIE", 0)),
        f"{' Numa Nodes ':=^80}",
        *(f"GPU[{k}]\t\t: (Topology) Numa {what}: {numa(k)}" for k in range(n) for what in ("Node", "Affinity")),
        f"{' End of ROCm SMI Log ':=^80}",
    ]  # fmt: skip
    return f"{' ROCm System Management Interface ':=^80}\n" + "\n".join(blocks)


# The matrix of a host with four MI250X: numbers of links between dies, from rocm_smi_lib's README.
MI250X = ["04100020", "40010100", "10042000", "01400001", "00200410", "01004001", "20001004", "00010140"]
LINKS = [[int(digit) for digit in row] for row in MI250X]


def read_rocm(text, **options):
    return Topology(*read_rocm_smi(text, TableOptions(**options)))


def test_rocm_smi():
    """The tables of rocm-smi give the machines of the library: xGMI pairs of weight 15, and CPUs by hops and NUMA."""
    full = showtopo(8, lambda i, j: True, lambda k: k // 4)
    for text in (
        full,
        "WARNING: a GPU is in a low-power state\n" + full,
        full.replace("Hops", "hops"),
        full.expandtabs(),
    ):
        assert read_rocm(text, gpu="mi300x") == machine("mi300x")
    assert read_rocm("GPU[0]\t: Card Series: AMD Instinct MI300X\n" + full) == machine("mi300x")
    assert Topology(*parse(full.encode(), TableOptions(gpu="mi325x"))) == machine("mi300x")
    hives = read_rocm(showtopo(8, lambda i, j: i // 4 == j // 4, lambda k: k // 4), gpu="mi100", between_cpus=16)
    assert {switch.name for switch in hives.switches} == {"cpu0", "cpu1"}
    assert [hives.link("cuda:0", node).bandwidth for node in ("cuda:3", "cpu0")] == [46, Fraction(63, 2)]
    assert hives.link("cpu0", "cpu1").bandwidth == 16
    assert hives.assumed[1:] == ("PCIe 4 x16 as on the mi100, 31.5 GB/s for each GPU; --pcie sets it",)
    only_pcie = read_rocm(showtopo(4, lambda i, j: False), pcie=3)
    assert only_pcie.route("cuda:0", "cuda:3") == ("cuda:0", "cpu0", "cuda:3")


def test_rocm_smi_of_dies():
    """GPUs whose weight is over 15 are not joined. The dies of an MI250 have four links in a package; the speeds of
    --shownodesbw replace what is assumed."""
    text = showtopo(8, lambda i, j: True, weight=lambda i, j: 15 if LINKS[i][j] else 30)
    topology = read_rocm(text, gpu="mi250")
    for i, j in combinations(range(8), 2):
        link = topology.link(i, j)
        assert (link is None) == (LINKS[i][j] == 0)
        assert link is None or link.bandwidth == (200 if i // 2 == j // 2 else 50)
    assert topology.assumed == (
        "1 or 4 in a package xGMI links of 50 GB/s each between two mi250; rocm-smi --shownodesbw states their number",
    )
    speeds = grid("Bandwidth", square(8, lambda i, j: f"{50000 * bool(LINKS[i][j])}-{50000 * LINKS[i][j]}", "N/A"), 14)
    for both in (text + "\n" + speeds + "Format: min-max; Units: mps", speeds):
        exact = read_rocm(both, gpu="mi250")
        assert exact.assumed == ()
        assert exact == Topology.from_matrix([[50 * n for n in row] for row in LINKS], exact.devices, 8e-7)


def test_amd_smi():
    """The tables of amd-smi topology name GPUs by PCI addresses, and state the speed of every pair."""
    names = [f"0000:{k}c:00.0" for k in range(4)]

    def block(title, entry, own):
        rows = [[name, *map(str, cells)] for name, cells in zip(names, square(4, entry, own), strict=True)]
        return "\n".join([f"{title} TABLE:", *("\t".join(row) for row in [["", *names], *rows]), ""])

    def near(i, j):
        return i // 2 == j // 2

    text = "\n".join([
        block("ACCESS", lambda i, j: "ENABLED", "ENABLED"),
        block("WEIGHT", lambda i, j: 15 if near(i, j) else 72, 0),
        block("HOPS", lambda i, j: 1 if near(i, j) else 3, 0),
        block("LINK TYPE", lambda i, j: "XGMI" if near(i, j) else "PCIE", "SELF"),
        block("NUMA BW", lambda i, j: "50000-100000" if near(i, j) else "N/A", "N/A"),
    ])  # fmt: skip
    topology = Topology(*parse(text.encode(), TableOptions(pcie=4, between_cpus=16)))
    assert topology.link("cuda:0", "cuda:1").bandwidth == 100
    assert topology.route("cuda:1", "cuda:3") == ("cuda:1", "cpu0", "cpu1", "cuda:3")
    without = text[: text.index("NUMA BW")]
    assert Topology(*parse(without.encode(), TableOptions("mi210"))).link("cuda:2", "cuda:3").bandwidth == 50


FULL = showtopo(4, lambda i, j: True)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (FULL, {}, ["the speed of xGMI depends on the kind of GPU", "--gpu mi300x"]),
        (FULL, {"gpu": "a100"}, ["gpu=a100, which has no xGMI"]),
        (grid("Bandwidth", square(2, lambda i, j: "1-1", "N/A")), {"gpu": "h100"}, ["gpu=h100, which has no xGMI"]),
        (showtopo(8, lambda i, j: True), {"gpu": "mi210"}, ["a mi210 has 3 xGMI links", "7 links of one GPU"]),
        (FULL, {"gpu": "mi300x", "hosts": 2}, ["the table lists no network cards", "--nics 8x400"]),
        (FULL[: FULL.index("Link Type")], {"gpu": "mi300x"}, ["no table of link types", "--showtopotype"]),
        (
            FULL.replace("XGMI", "WARP", 1),
            {"gpu": "mi300x"},
            ["the row of GPU0 has an entry that this table cannot have: WARP", "line"],
        ),
        (
            FULL.replace("GPU3   XGMI", "GPU3   PCIE"),
            {"gpu": "mi300x"},
            ["the entries of GPU", "differ: XGMI and PCIE"],
        ),
        (FULL[: FULL.rindex("GPU3   XGMI")], {"gpu": "mi300x"}, ["does not have a row of GPU3", "line"]),
        (FULL + FULL, {"gpu": "mi300x"}, ["this table twice", "one file for each machine"]),
        (FULL.replace("GPU2   XGMI", "GPU4   XGMI"), {"gpu": "mi300x"}, ["the rows must be those of GPU0, GPU1"]),
    ],
)
def test_tables_of_rocm_smi_that_are_refused(text, options, words):
    """An error states what is missing or wrong, and the line."""
    with pytest.raises(ArgumentError) as caught:
        read_rocm(text, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_kinds_of_gpus():
    """Names that drivers print, and short ones, give the number, speed and generation of a GPU's links."""
    for name, links, direct, pcie in (
        ("Tesla P100-SXM2-16GB", 4, "nvlink1", 3), ("Tesla P100-PCIE-16GB", 0, "nvlink1", 3),
        ("Tesla V100-SXM3-32GB", 6, "nvlink2", 3), ("NVIDIA A100-SXM4-80GB", 12, "nvlink3", 4),
        ("NVIDIA A100 80GB PCIe", 12, "nvlink3", 4), ("NVIDIA H100 80GB HBM3", 18, "nvlink4", 5),
        ("NVIDIA H100 PCIe", 12, "nvlink4", 5), ("NVIDIA H200", 18, "nvlink4", 5), ("H20", 18, "nvlink4", 5),
        ("NVIDIA GB200", 18, "nvlink5", 5), ("b200", 18, "nvlink5", 5), ("NVIDIA B300 SXM6 AC", 18, "nvlink5", 6),
        ("NVIDIA GeForce RTX 3090", 4, "nvlink3-ga10x", 4), ("NVIDIA L40S", 0, "nvlink3", 4),
        ("NVIDIA L20", 0, "nvlink3", 4),
        ("MI50", 2, "xgmi-vega", 4), ("AMD Instinct MI355X", 7, "xgmi-mi350", 5), ("mi300a", 6, "xgmi-mi300", 5),
    ):  # fmt: skip
        kind = gpu_kind(name)
        assert (kind.links, kind.direct, kind.pcie) == (links, direct, pcie), name
    with pytest.raises(ArgumentError, match=r"kind of GPU is not known(.|\n)*'h99'(.|\n)*gb200"):
        gpu_kind("h99")


NV18 = table(uniform(4, "NV18"))


def test_the_kind_of_gpu_determines_speeds():
    """NVLinks of a GB200 have 50 GB/s. The kind is given, or read from nvidia-smi -L; without it, 25 GB/s is assumed,
    and the topology, its parts, its JSON and plans say so. Equal topologies with other assumptions are equal."""
    for topology in (
        read_nvidia_smi(NV18, gpu="gb200"),
        read_nvidia_smi("GPU 0: NVIDIA GB200 (UUID: GPU-1)\nGPU 1: NVIDIA GB200 (UUID: GPU-2)\n" + NV18),
        read_nvidia_smi("|   0  NVIDIA GB200          On  |   00000008:01:00.0 Off |\n" + NV18),
    ):
        assert (bound(topology, "broadcast").algbw, topology.assumed) == (900, ())
    assumed = read_nvidia_smi(NV18)
    assert assumed.assumed == ("18 NVLinks of 25 GB/s each to an NVSwitch; --gpu sets it",)
    known = read_nvidia_smi(NV18, gpu="h100")
    plain = Topology(known.devices, known.links, known.switches)
    assert plain == known
    same = Topology(plain.devices, plain.links, plain.switches, ("a guess",))
    assert (same == plain, hash(same) == hash(plain), same.assumed) == (True, True, ("a guess",))
    for each in (
        assumed.subset([0, 1]), assumed.without_node(3), assumed.without_link(0, "nvswitch"), assumed.reversed(),
        assumed.renamed(cpus(4)), assumed.with_switches(reducing=True), Topology.from_json(assumed.to_json()),
        pickle.loads(pickle.dumps(assumed)),
    ):  # fmt: skip
        assert each.assumed == assumed.assumed
    assert "assumed" not in known.to_json()
    for topology, words in ((plain, False), (same, True), (plain, False)):  # equal, so planned once
        text = plan(topology, nbytes=4096).explain()
        assert ("\n  assumed   a guess\n" in text) == words
        assert ("if the links are as assumed)" in text) == words


def test_kinds_that_contradict_the_table():
    """A kind of GPU with fewer NVLinks than the table, and GPUs of several kinds, are refused."""
    two = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: 1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: 2)\n"
    for text, options, words in (
        (NV18, {"gpu": "a100"}, r"a a100 has 12 NVLinks(.|\n)*18 NVLinks of one GPU in the table"),
        (NV18, {"gpu": "l40s"}, "a l40s has 0 NVLinks"),
        (two + NV18, {}, r"several kinds(.|\n)*a100, h100(.|\n)*--gpu a100"),
        (NV18, {"gpu": "tpu"}, "kind of GPU is not known"),
        (PAIRS, {"pcie": 7}, "generation of PCIe is not known"),
        (PAIRS, {"between_cpus": 1e23}, "between_cpus must be a number of GB/s from 0.001 to 1000000"),
    ):
        with pytest.raises(ArgumentError, match=words):
            read_nvidia_smi(text, **options)


def test_speeds_of_pcie():
    """PCIe has the generation that is given or that the kind of GPU has; that of links between CPUs is given."""
    rows = ["X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PIX", "SYS SYS PIX X"]
    for options, pcie, cpu, count in (
        ({}, Fraction(63, 4), 10, 2), ({"pcie": 4}, Fraction(63, 2), 10, 1),
        ({"pcie": "pcie5", "between_cpus": 22}, 63, 22, 0),
        ({"gpu": "l40s"}, Fraction(63, 2), 10, 2), ({"between_cpus": 41.6}, Fraction(63, 4), Fraction(208, 5), 1),
    ):  # fmt: skip
        topology = read_nvidia_smi(table(rows), **options)
        assert topology.link("cuda:0", "pcie0").bandwidth == pcie
        assert topology.link("cpu0", "cpu1").bandwidth == cpu
        assert len(topology.assumed) == count
    assert read_nvidia_smi(table(rows)).assumed == (
        "PCIe 3 x16, 15.75 GB/s for each GPU; --pcie sets it",
        "10 GB/s between CPUs; --between-cpus sets it",
    )


def with_cards(gpus, cell, near, cards):
    """Return a table of GPUs with NVLinks, and cards; ``near(k, c)`` is the entry of GPU k and card c."""
    names = [*(f"GPU{k}" for k in range(gpus)), *(f"NIC{c}" for c in range(cards))]
    rows = [
        " ".join(["X" if k == j else cell for j in range(gpus)] + [near(k, c) for c in range(cards)])
        for k in range(gpus)
    ]
    rows += [
        " ".join([near(k, c) for k in range(gpus)] + ["X" if c == d else "SYS" for d in range(cards)])
        for c in range(cards)
    ]
    return table(rows, names)


def test_hosts_are_joined_by_the_cards_of_the_table():
    """GPUs with cards of their own have rails; cards that share no PCIe switch with a GPU are left out. So the tables
    of an HGX H100 and of a p4d give the library's machines."""
    rails = with_cards(8, "NV18", lambda k, c: "PXB" if c == k else "NODE" if k // 4 == c // 4 else "SYS", 10)
    topology = read_nvidia_smi(rails, gpu="h100", hosts=2, nics=400)
    assert topology == machine("hgx-h100", 2)
    (text,) = topology.assumed
    assert text.startswith("network of NIC0 to NIC7 (8 cards), 50 GB/s each: the k-th GPUs of all hosts share a switch")
    assert text.endswith("NIC8, NIC9 left out, as no PCIe switch joins them with a GPU")
    two_each = with_cards(8, "NV18", lambda k, c: "PIX" if k // 2 == c // 2 else "SYS", 8)
    assert read_nvidia_smi(two_each, gpu="h100", hosts=2, nics="ndr") == topology
    four_each = with_cards(8, "NV18", lambda k, c: "PIX" if k == c // 4 else "SYS", 32)
    assert read_nvidia_smi(four_each, gpu="h100", hosts=2, nics=100).link("host1/cuda:3", "rail3").bandwidth == 50
    shared = with_cards(8, "NV12", lambda k, c: "PXB" if k // 2 == c else "SYS", 4)
    found, same = read_nvidia_smi(shared, gpu="a100", pcie=3, hosts=2, nics=100), machine("p4d", 2)
    assert [bound(each, "all_gather").algbw for each in (found, same)] == [100, 100]
    assert found.link("host0/NIC1", "net").bandwidth == 12.5
    assert found.link("host1/cuda:3", "host1/NIC1").bandwidth == Fraction(63, 4)
    assert len(found.assumed) == 1  # --pcie was given
    for text, speed in (
        (shared, 100),
        (rails.replace("NV18", "NV12"), 400),
    ):  # PCIe 4, of a link and of a limit, is assumed
        pcie, network = read_nvidia_smi(text, gpu="a100", hosts=2, nics=speed).assumed
        assert pcie == "PCIe 4 x16 as on the a100, 31.5 GB/s for each GPU; --pcie sets it"
        assert network.startswith("network of")
    assert read_nvidia_smi(rails, hosts=1) == read_nvidia_smi(table(uniform(8, "NV18")))


def test_hosts_without_nvlink_are_joined_by_the_cards_of_the_table():
    """On a PCIe box a card is a node below the switch or CPU next to it. Its link to the network has the line rate."""
    topology = read_nvidia_smi(PAIRS, hosts=2, nics="200G", pcie=4, between_cpus=20)
    assert topology.route("host0/cuda:0", "net") == ("host0/cuda:0", "host0/pcie0", "host0/NIC1", "net")
    assert topology.route("host1/cuda:2", "net") == ("host1/cuda:2", "host1/cpu0", "host1/NIC2", "net")
    assert [topology.link("host0/NIC1", node).bandwidth for node in ("net", "host0/pcie0")] == [25, Fraction(63, 2)]
    assert topology.assumed[-1] == "network of NIC1, NIC2, 25 GB/s each: one switch joins all"
    assert bound(topology, "broadcast").algbw == 45  # a card of 25, and 20 from the card at the other CPU


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (PAIRS, {"hosts": 2}, r"does not state the speed of the network cards(.|\n)*--nics 400"),
        (PAIRS, {"hosts": 2, "nics": "fast"}, r"must be Gb/s above 0, or a kind(.|\n)*'fast'"),
        (PAIRS, {"hosts": 0, "nics": 400}, "hosts must be an integer from 1"),
        (NV18, {"hosts": 2, "nics": 400}, r"the table lists no network cards(.|\n)*--nics 8x400"),
    ],
)
def test_hosts_that_cannot_be_joined(text, options, words):
    """The error states what the table lacks, or the invalid argument."""
    with pytest.raises(ArgumentError, match=words):
        read_nvidia_smi(text, **options)


def test_files_that_have_speeds_take_no_options(tmp_path):
    """``Topology.load`` passes what is known about a table; JSON and XML state their speeds themselves."""
    file = tmp_path / "table.txt"
    file.write_text(NV18)
    assert Topology.load(file, gpu="gb200") == read_nvidia_smi(NV18, gpu="gb200")
    (tmp_path / "a.json").write_text(machine("dgx-1v").to_json())
    with pytest.raises(ArgumentError, match=r"states the speeds of its links itself(.|\n)*gpu=v100, hosts=2"):
        Topology.load(tmp_path / "a.json", gpu="v100", hosts=2)
