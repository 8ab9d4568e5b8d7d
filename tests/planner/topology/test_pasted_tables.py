"""Further tables as people paste them: logs, damaged fabrics, parts of cards, and hosts whose table lists no cards."""

import json
import re
from fractions import Fraction

import pytest
from test_nccl_xml import machine, read_nvidia_smi
from test_nvidia_smi import table, uniform
from test_smi_tables import FULL, PAIRS, grid, read_rocm, showtopo, square

from crossreduce import ArgumentError, Topology, bound
from crossreduce.topology.formats import parse
from crossreduce.topology.formats.nvidia_smi import TableOptions

LINES = PAIRS.splitlines()


@pytest.mark.parametrize(
    "prefix",
    [
        lambda _: "node-01: ",
        lambda _: "[1,0]<stdout>:",
        lambda _: "[pod/nccl-0/main] ",
        lambda k: f"2026-05-09T05:26:{k:02d}.123456789Z ",
        lambda k: f"[host1] 2026-05-09 05:26:{k:02d},123 ",
        lambda k: f"{k + 1:6}\t",
        lambda k: f"{k + 1}:",
        lambda _: "Nov 30 12:10:01 host1 bash[123]: ",
        lambda _: "2026-11-30T12:10:01+0100 host1 bash[123]: ",
        lambda _: "worker-1  | ",
        lambda _: "- ",
        lambda _: "# ",
        lambda _: "+",
    ],
)
def test_lines_of_a_log(prefix):
    """The name of a host, of a pod or a rank, a time, and the mark of a comment at the start of lines are removed."""
    text = "\n".join(prefix(k) + line for k, line in enumerate(LINES))
    assert read_nvidia_smi(text) == read_nvidia_smi(PAIRS)
    rows = showtopo(4, lambda i, j: True, lambda k: k // 2).splitlines()
    text = "\n".join(prefix(k) + row for k, row in enumerate(rows))
    assert read_rocm(text, gpu="mi300x") == read_rocm("\n".join(rows), gpu="mi300x")


MARKUP = {
    "JSON": json.dumps(PAIRS),
    "Ansible": json.dumps({"stdout_lines": LINES}, indent=1),
    "Python": repr(LINES),
    "HTML": "".join(f"<tr><td>{line}</td></tr>".replace("\t", "&nbsp;</td><td>") for line in LINES),
    "a code block in HTML": f"<pre>\n{PAIRS}</pre>",
    "heavy bars": PAIRS.replace("\t", "┃"),
}


@pytest.mark.parametrize("text", MARKUP.values(), ids=MARKUP)
def test_tables_in_markup(text):
    """Tags of HTML, and the quotes and escapes of JSON and Python, are removed."""
    assert Topology(*parse(text.encode(), TableOptions())) == read_nvidia_smi(PAIRS)


def test_many_prefixes_take_no_time():
    """A line that can be read as prefixes in many ways is not a table."""
    with pytest.raises(ArgumentError, match="does not contain a table"):
        read_nvidia_smi("GPU0 is busy\n" + "1: " * 80_000)


def test_the_second_pcie_function_of_a_card_is_no_card():
    """Data Direct columns (DD0), which nvidia-smi topo -all -m adds, do not make the network faster."""
    text = table(
        ["X NV18 NODE NODE PXB NODE", "NV18 X NODE NODE NODE PXB", "NODE NODE X PIX NODE NODE",
         "NODE NODE PIX X NODE NODE", "PXB NODE NODE NODE X NODE", "NODE PXB NODE NODE NODE X"],
        ["GPU0", "GPU1", "NIC0", "NIC1", "DD0", "DD1"],
    )  # fmt: skip
    topology = read_nvidia_smi(text, hosts=2, nics=400)
    assert bound(topology, "broadcast").algbw == 100
    assert topology.assumed[-1].startswith("network of NIC0, NIC1, 50 GB/s each")


SHORT = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"
REFUSED = {
    "only PCIe": (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: 1)\n$ nvidia-smi topo -mp\n" + SHORT.replace("NV4", "NODE"),
        ["nvidia-smi topo -mp shows only PCIe", "line 2", "nvidia-smi topo -m"],
    ),
    "a failed NVLink": (
        table(["X NV18 NV18 NV18", "NV18 X NV18 NV18", "NV18 NV18 X PHB", "NV18 NV18 PHB X"]),
        ["GPU2 and GPU3 have no NVLinks (PHB), but an NVSwitch joins both", "the row of GPU2"],
    ),
    "a column that is not a GPU": (
        " GPU0 GPU1 CPU\nGPU0 X NV1 PHB\nGPU1 NV1 X PHB\nCPU PHB PHB X\n",
        ["this line is not the header of a table", "line 1: GPU0 GPU1 CPU"],
    ),
    "rows without a header": ("GPU0 X NV1\nGPU1 NV1 X\n", ["this line is not the header of a table", "line 1: GPU0 X"]),
    "a cut row": (SHORT[:-4], ["the row of GPU1 must have X, NV#", "but has none for GPU1", "line 3: GPU1 NV4"]),
    "blanks in names": (SHORT.replace("GPU", "GPU "), ["this line is not the header of a table", "line 1: GPU 0"]),
    "commas": (",GPU0,GPU1\nGPU0,X,NV4\nGPU1,NV4,X\n", ["this line is not the header of a table", "line 1: ,GPU0"]),
    "a row of a later command": (
        SHORT + "\n$ nvidia-smi topo -m | grep ^GPU1\nGPU1\tNV3\t X \n",
        ["the table has a second row of GPU1", "line 6"],
    ),
    "two hosts of a log": (
        "\n".join(f"{host}: {line}" for host in ("a", "b") for line in LINES[:7]),
        ["the text has a second table", "line 8", "one file for each machine"],
    ),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_tables_that_are_refused(text, words):
    """A table that is not what it seems is refused, with its line."""
    with pytest.raises(ArgumentError) as caught:
        read_nvidia_smi(text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_missing_nvlinks_of_a_gpu_that_can_have_them_are_assumptions():
    """The table of H100 without NVLinks may be that of topo -mp, so the topology lists this as an assumption."""
    text = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: 1)\n" + table(uniform(2, "NODE"))
    assert read_nvidia_smi(text, pcie=5).assumed == ("no NVLinks, as in the table; the h100 can have 18",)
    assert read_nvidia_smi(table(uniform(2, "NODE")), gpu="l40s", pcie=4).assumed == ()


def test_speeds_of_rocm_smi_are_numbers_of_links():
    """The driver states 50 or 64 GB/s for each link of any kind: with a known kind, only the number of links counts."""
    for stated, gpu, expected in ((50, "mi300x", 64), (64, "mi300x", 64), (64, "mi350x", 76.8), (100, "mi300a", 128)):
        text = grid("Bandwidth", square(4, lambda i, j, k=stated: f"{k // (1 + (k > 99))}000-{k}000", "N/A"), 16)
        topology = read_rocm(text, gpu=gpu)
        assert topology.link(0, 1).bandwidth == Fraction(str(expected))
        assert bool(topology.assumed) == (stated != expected)
        assert all("a constant" in each for each in topology.assumed)
        unknown = read_rocm(text)
        assert unknown.link(0, 1).bandwidth == stated
        assert "--gpu sets the kind" in unknown.assumed[0]


def test_speeds_of_rocm_smi_in_logs():
    """The titles of tables are found behind the names of hosts, so that the numbers of links are not assumed."""
    double = grid("Bandwidth", square(4, lambda i, j: "64000-128000", "N/A"), 16)
    text = f"{FULL}\n{double}"
    for given in (
        text,
        double,
        re.sub(r"=+ (\w+) between two GPUs =+", r"\1 TABLE:", text).replace("Link T", "LINK T"),
    ):
        log = "\n".join(f"host1: {line}" for line in given.splitlines())
        assert read_rocm(log, gpu="mi300a").link(0, 1).bandwidth == 128
        assert read_rocm(log, gpu="mi300a").assumed == ()


@pytest.mark.parametrize("entry", ["0-0", "N/A"])
def test_a_driver_that_does_not_know_speeds(entry):
    """If the speeds of all pairs are missing, the link types determine the xGMI links, as without the table."""
    without = grid("Bandwidth", square(4, lambda i, j: entry, "N/A"), 16)
    assert read_rocm(f"{FULL}\n{without}", gpu="mi300x") == read_rocm(FULL, gpu="mi300x")


def test_errors_of_rocm_smi_before_a_table():
    """Lines between a title and its table, such as errors of rocm-smi, are skipped. XXXX is a link it does not know."""
    broken = FULL.replace("GPU0 ", "ERROR: GPU[1]: Cannot read Link Weight: Not supported\n\nGPU0 ", 1)
    assert broken != FULL
    assert read_rocm(broken, gpu="mi300x") == read_rocm(FULL, gpu="mi300x")
    for text, words in (
        (FULL.replace("XGMI", "XXXX"), "does not know the link of GPU0"),
        ("==== Link Type between two GPUs ====\nnothing\n==== Hops between two GPUs ====\n", "must have the names"),
    ):
        with pytest.raises(ArgumentError, match=words):
            read_rocm(text, gpu="mi300x")


def test_hosts_whose_table_lists_no_cards():
    """--nics 8x400 states the number of cards, which are next to the GPUs in order; the topology lists this."""
    full = showtopo(8, lambda i, j: True, lambda k: k // 4)
    topology = read_rocm(full, gpu="mi300x", hosts=2, nics="8x400")
    assert topology == machine("mi300x", 2)
    assert topology.assumed[1].startswith("no network cards in the table")
    four = read_rocm(full, gpu="mi300x", hosts=2, nics="4 x NDR")
    assert four.route("host0/cuda:3", "net") == ("host0/cuda:3", "host0/nic1", "net")
    assert bound(four, "broadcast").algbw == 200
    sixteen = read_rocm(full, gpu="mi300x", hosts=2, nics="16x200")
    assert sixteen.link("host0/cuda:3", "rail3").bandwidth == 50
    tree = read_nvidia_smi(table(uniform(4, "PHB")), gpu="a10g", hosts=2, nics="1x40")
    assert tree.route("host0/cuda:3", "net") == ("host0/cuda:3", "host0/cpu0", "host0/nic0", "net")
    assert bound(tree, "broadcast").algbw == 5
    two = read_nvidia_smi(
        table(["X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PIX", "SYS SYS PIX X"]), hosts=2, nics="2x100"
    )
    assert two.route("host1/cuda:2", "net") == ("host1/cuda:2", "host1/pcie1", "host1/cpu1", "host1/nic1", "net")
    for nics, words in (
        (None, "lists no network cards"),
        ("0x400", "lists no network cards"),
        ("8x", "must be Gb/s above 0"),
    ):
        with pytest.raises(ArgumentError, match=words):
            read_rocm(full, gpu="mi300x", hosts=2, nics=nics)
    with pytest.raises(ArgumentError, match=r"the table lists 2 network cards, not 8(.|\n)*--nics 400"):
        read_nvidia_smi(PAIRS, hosts=2, nics="8x400")
    assert read_nvidia_smi(PAIRS, hosts=2, nics="2x200") == read_nvidia_smi(PAIRS, hosts=2, nics=200)


def test_names_of_gpus_in_reports():
    """Reports of problems list the GPUs in one line, followed by other facts about them."""
    text = "GPU 0,1: NVIDIA B300 SXM6 AC\nGPU 0,1 Compute Capability: 10.3\nNVIDIA Topology: \n"
    topology = read_nvidia_smi(text + table(uniform(2, "NV18")))
    assert (topology.link(0, 1).bandwidth, topology.assumed) == (900, ())
    report = "GPU 0,1,2,3: AMD Instinct MI300X\nAMD Topology:\n" + FULL
    assert read_rocm(report) == read_rocm(FULL, gpu="mi300x")


def test_one_part_of_the_topology_of_rocm_smi():
    """The error about the output of --showtoponuma or --showtopohops alone says that the link types are missing."""
    parts = FULL.split("\n=")
    for part in ("=" + parts[-2], "=" + parts[2]):
        with pytest.raises(ArgumentError, match=r"has no table of link types(.|\n)*--showtopotype"):
            parse(part.encode(), TableOptions())


def test_json_of_the_programs_of_amd_is_refused():
    """The error says that the text of these programs is read, and not their JSON."""
    for text in (
        '[{"gpu": 0, "links": [{"gpu": 1, "link_type": "XGMI"}]}]',
        '{"system": {"(Topology) Link type": "XGMI"}}',
    ):
        with pytest.raises(ArgumentError, match=r"JSON of amd-smi or rocm-smi(.|\n)*without --json"):
            parse(text.encode(), TableOptions())


def test_amd_smi_of_cards_without_xgmi():
    """Tables that follow each other without blank lines; GPUs of one CPU, which have no speeds."""
    names = ["0000:03:00.0", "0000:0c:00.0"]
    blocks = {"ACCESS": ("ENABLED", "DISABLED"), "WEIGHT": (0, 40), "HOPS": (0, 2), "LINK TYPE": ("SELF", "PCIE"),
              "NUMA BW": ("N/A", "N/A"), "CACHE COHERANCY": ("SELF", "N/A")}  # fmt: skip
    lines = []
    for title, (own, other) in blocks.items():
        lines += [f"{title} TABLE:", "             " + " ".join(names)]
        lines += [f"{names[0]} {own} {other}", f"{names[1]} {other} {own}"]
    topology = Topology(*parse("\n".join([*lines, "Legend:", "  SELF = Current GPU"]).encode(), TableOptions(pcie=4)))
    assert topology.route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cuda:1")
    assert re.fullmatch("cuda:[01]", topology.devices[1])
