"""Topologies that are read from the table of nvidia-smi topo -m."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import damaged
from test_nccl_xml import machine, read_nvidia_smi

from crossreduce import ArgumentError, Topology
from crossreduce.topology.formats import smi_table

# The table of a DGX-1, as published for PyTorch's benchmark of DistributedDataParallel.
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
    cells = ["\t".join(row.split()) for row in rows]
    lines = [f"{name}\t{row}\t{cores}\t0\t\tN/A" for name, row in zip(names, cells, strict=False)]
    return "\n".join([header, *lines, "", "Legend:", "", "  X    = Self", "  PIX  = at most a single PCIe bridge", ""])


def uniform(n, cell):
    return [" ".join("X" if i == j else cell for j in range(n)) for i in range(n)]


def test_the_table_of_a_dgx_1():
    """The table that nvidia-smi prints on a DGX-1 gives the library's DGX-1."""
    assert read_nvidia_smi(DGX_1) == machine("dgx-1v")
    assert read_nvidia_smi(DGX_1.replace("NV2", "NV1"), gpu="p100") == machine("dgx-1p")


@pytest.mark.parametrize(
    ("name", "n", "links", "gpu"),
    [("dgx-a100", 8, 12, "a100"), ("dgx-2", 16, 6, "v100"), ("hgx-h100", 8, 18, "h100"), ("hgx-b200", 8, 18, "b200")],
)
def test_more_links_than_a_gpu_has_are_a_switch(name, n, links, gpu):
    """If a row has more NVLinks than a GPU can have, all NVLinks lead to one switch."""
    assert read_nvidia_smi(table(uniform(n, f"NV{links}"), cores="0-23,48-71"), gpu=gpu) == machine(name)


def test_links_that_a_gpu_can_have_are_its_own():
    """NVLinks join pairs of GPUs if no row has more than a GPU can have. Otherwise they join GPUs and a switch."""
    for n, links, gpu, direct in (  # n GPUs, with entries "NV{links}"
        (4, 6, "h100", True),  # HGX H100 with four GPUs
        (4, 6, "v100", False),  # four GPUs of a DGX-2
        (2, 12, None, True),  # an NVLink bridge, or two GPUs of an HGX A100: the tables are equal
        (3, 12, None, False),
        (3, 9, None, True),
    ):
        topology = read_nvidia_smi(table(uniform(n, f"NV{links}")), gpu=gpu)
        assert (topology.switches == ()) == direct
        assert topology.link("cuda:0", "cuda:1" if direct else "nvswitch").bandwidth == links * 25


def test_a_switch_with_a_link_down():
    """A GPU with some inactive links has as many links to the switch as its row states."""
    rows = [" ".join("X" if i == j else "NV11" if 3 in (i, j) else "NV12" for j in range(8)) for i in range(8)]
    topology = read_nvidia_smi(table(rows))
    bandwidths = [topology.link(device, "nvswitch").bandwidth for device in topology.devices]
    assert bandwidths == [12 * 25] * 3 + [11 * 25] + [12 * 25] * 4


def test_bridges_in_a_workstation():
    """Two GPUs with an NVLink bridge between them have PCIe links to the CPU, too. ``pcie`` sets their speed."""
    rows = ["X NV4 PHB PHB", "NV4 X PHB PHB", "PHB PHB X NV4", "PHB PHB NV4 X"]
    topology = read_nvidia_smi(table(rows), gpu="RTX 3090", pcie="pcie4")
    assert topology == machine("nvlink-pairs-4")


def test_the_tree_of_pcie():
    """Two GPUs are joined by a PCIe switch (PIX), a switch above switches (PXB), a CPU (PHB, NODE) or two (SYS)."""
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
    assert {link.bandwidth for link in topology.links} == {10, Fraction("15.75")}  # the latter is PCIe 3 x16
    assert len(topology.links) == 2 * (len(topology.nodes) - 1), "a tree"


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
    """GPUs of an NVLink pair are at the same CPU if they have the same CPU affinity, and otherwise at two CPUs."""
    rows = ["X NV2 SYS SYS", "NV2 X SYS SYS", "SYS SYS X NV2", "SYS SYS NV2 X"]
    text = table(rows, cores="{}")
    one = read_nvidia_smi(text.format("0-7", "0-7", "8-15", "8-15"))
    assert one.without_link("cuda:0", "cuda:1").route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cuda:1")
    assert len(read_nvidia_smi(text.format("0-7", "8-15", "16-23", "24-31")).switches) == 4


def test_variants_of_the_table():
    """Lost whitespace and differences between drivers do not matter. One GPU has no links."""
    for text in (
        "GPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-63\t0\nGPU1\tSYS\t X \t64-127\t1\n",
        "$ nvidia-smi topo -m\n\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSOC\t0-7\nGPU1\tSOC\t X \t8-15\n",
        "\tGPU0\tGPU1\nGPU0\t X \tSYS\t\nGPU1\tSYS\t X \t\n",
        "        GPU0    GPU1\r\nGPU0     X      SYS\r\nGPU1    SYS     X\r\n",
    ):
        assert read_nvidia_smi(text).route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cpu1", "cuda:1")
    assert read_nvidia_smi("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == Topology(("cuda:0",), ())


GOOD = table(["X NV1 SYS", "NV1 X SYS", "SYS SYS X"], cores="0-7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["does not contain a table of GPUs", "nvidia-smi topo -m"]),
        (GOOD[: GOOD.index("GPU2\tSYS")], ["not have a row of GPU2", "line 1"]),
        (GOOD[: GOOD.index("GPU2\tSYS") + 10], ["row of GPU2", "line 4", "GPU2 SYS"]),
        (GOOD.replace("NV1", "NVX"), ["row of GPU0", "line 2"]),
        (GOOD.replace("NV1", "NV1", 1).replace("GPU1\tNV1", "GPU1\tNV2"), ["the entries of GPU0 and GPU1 differ"]),
        (GOOD.replace("GPU0\tX", "GPU0\tNV1"), ["the entry of GPU0 and GPU0 must be X"]),
        (GOOD.replace("GPU1\tNV1", "GPU0\tNV1"), ["a second row of GPU0", "line 3"]),
        (GOOD.replace("\tGPU2\t", "\tGPU1\t"), ["twice"]),
        ("x" * (smi_table.LONGEST + 1), ["at most", "characters"]),
        (GOOD.encode(), ["must be text of at most"]),
    ],
)
def test_invalid_tables(text, words):
    """An invalid table raises an ArgumentError that states the fault and, if it is in a line, the line."""
    with pytest.raises(ArgumentError, match="".join(rf"(?=[\s\S]*{re.escape(word)})" for word in words)):
        read_nvidia_smi(text)


def test_invalid_options():
    """An invalid speed or kind of PCIe raises an ArgumentError that shows it."""
    for options, text in (
        *(({"between_cpus": wrong}, "GB/s from 0.001 to 1000000") for wrong in (0, math.nan, math.inf, "25", True)),
        *(({"pcie": wrong}, "generation of PCIe is not known") for wrong in ("pcie7", "hdr")),
    ):
        (wrong,) = options.values()
        with pytest.raises(ArgumentError, match=rf"{text}[\s\S]*{wrong!r}"):
            read_nvidia_smi(GOOD, **options)


@given(st.sampled_from([DGX_1, GOOD]).flatmap(damaged))
def test_damaged_tables(text):
    """Reading a truncated or changed table gives a topology or an ArgumentError, never another error."""
    try:
        topology = read_nvidia_smi(text)
    except ArgumentError as error:
        assert "given" in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert topology.devices
