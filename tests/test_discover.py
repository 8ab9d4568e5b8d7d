"""Topologies of this machine: from NVML, from /sys, or of one device."""

import itertools
import sys
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import pytest

from crossreduce import Topology
from crossreduce.topology import discover as module
from crossreduce.topology.kinds import nvlink

machine, discover = Topology.machine, Topology.discover

NOTHING = Topology(("cpu:0",), ())


@pytest.fixture
def sys_tree(tmp_path, monkeypatch):
    """Return a function that writes a tree of NUMA nodes as Linux does, without GPUs."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(module, "NODES", tmp_path)

    def write(distances, cpus=None, memory=None, numbers=None):
        for k, row in enumerate(distances):
            n = numbers[k] if numbers else k
            node = tmp_path / f"node{n}"
            node.mkdir()
            (node / "distance").write_text(row + "\n")
            (node / "cpulist").write_text((cpus[k] if cpus else f"{8 * k}-{8 * k + 7}") + "\n")
            kib = memory[k] if memory else 65536
            (node / "meminfo").write_text(f"Node {n} MemTotal:       {kib} kB\nNode {n} MemFree:        1 kB\n")
        for name in ("online", "possible", "has_cpu"):
            (tmp_path / name).write_text("0-1\n")
        return tmp_path

    return write


def test_two_sockets(sys_tree):
    """NUMA nodes are devices; distance 20 is 16 GB/s and 0.2 us, 32 is 10 GB/s and 0.32 us."""
    sys_tree(["10 20", "32 10"])
    topology = discover()
    assert topology.devices == ("cpu:0", "cpu:1")
    assert topology.link("cpu:0", "cpu:1")[2:] == (16, Fraction(2, 10**7))
    assert topology.link("cpu:1", "cpu:0")[2:] == (10, Fraction(32, 10**8))


def test_eight_nodes(sys_tree):
    """Nodes of one socket are nearer to each other than nodes of different sockets, so they form an island."""
    rows = [" ".join("10" if i == j else "12" if i // 4 == j // 4 else "32" for j in range(8)) for i in range(8)]
    sys_tree(rows)
    topology = discover()
    assert len(topology.links) == 56
    assert topology.islands == (tuple(f"cpu:{k}" for k in range(4)), tuple(f"cpu:{k}" for k in range(4, 8)))


def test_nodes_without_cpus_or_memory_are_none(sys_tree):
    """A NUMA node without CPUs, such as the memory of CXL or a GPU, is not a device, nor is one without memory; numbers
    of nodes may have gaps."""
    rows = ["10 20 30 20", "20 10 20 20", "30 20 10 20", "20 20 20 10"]
    sys_tree(rows, cpus=["0-7", "", "8-15", "16-23"], memory=[9, 9, 9, 0], numbers=[0, 2, 8, 9])
    topology = discover()
    assert topology.devices == ("cpu:0", "cpu:1")
    assert topology.link("cpu:0", "cpu:1").bandwidth == Fraction(320, 30)


def test_unreachable_nodes_have_no_link(sys_tree):
    """ACPI's distance 255 means that a link does not exist."""
    sys_tree(["10 255", "20 10"])
    topology = discover()
    assert topology.link("cpu:0", "cpu:1") is None
    assert topology.link("cpu:1", "cpu:0").bandwidth == 16


def test_one_node_is_one_device(sys_tree):
    """One NUMA node, as of a laptop, is one device without links."""
    sys_tree(["10"])
    assert discover() == NOTHING


@pytest.mark.parametrize(
    "rows",
    [["10 20"], ["10 20", "20"], ["10 20", "20 x"], ["10 20", ""], ["10 0", "20 10"], ["10 -5", "20 10"], ["", ""]],
)
def test_malformed_distances_are_no_machine(sys_tree, rows):
    """If the table of distances is invalid, the topology has one device."""
    sys_tree(rows)
    assert discover() == NOTHING


@pytest.mark.parametrize("gone", ["distance", "cpulist", "meminfo"])
def test_missing_files_are_no_machine(sys_tree, gone):
    """If a file of a NUMA node is missing or is not text, the topology has one device."""
    root = sys_tree(["10 20", "20 10"])
    assert len(discover().devices) == 2
    (root / "node1" / gone).write_bytes(b"\xff\xfe")
    assert discover() == NOTHING
    (root / "node1" / gone).unlink()
    assert discover() == NOTHING


def test_odd_trees_are_no_machine(sys_tree, tmp_path):
    """An unexpected entry in the folder of NUMA nodes is not an error; the topology has one device."""
    sys_tree(["10 20", "20 10"])
    (tmp_path / "node1x").mkdir()
    assert discover() == NOTHING


@pytest.mark.parametrize("path", ["missing", "file"])
def test_systems_without_sys(monkeypatch, tmp_path, path):
    """Without the folder of NUMA nodes, as on macOS, on Windows and in bare containers, the topology has one device."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "NODES", tmp_path / path)
    assert discover() == NOTHING


def test_this_machine():
    """The topology of the machine that runs this test has at least one device."""
    assert discover().devices


# NVML.


class RefusedError(Exception):
    """The error that NVML raises for unsupported queries."""


LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


class Nvml(ModuleType):
    """An NVML with one GPU for each entry of ``peers``.

    Args:
      peers: for each GPU, the peer of each of its NVLinks: the number of a GPU, "switch", "hidden" (a switch, in a
        virtual machine), "cpu", "other" (a GPU that is not visible), or None for an inactive link.
      level: returns the part of PCIe that joins two GPUs, a key of ``LEVELS``.
    """

    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, peers, level=lambda i, j: "SYS", sm=(8, 0), pcie=(4, 16), as_bytes=False):
        super().__init__("pynvml")
        self.peers, self.level, self.sm, self.pcie, self.as_bytes = peers, level, sm, pcie, as_bytes
        self.up = 0

    def text(self, value):
        return value.encode() if self.as_bytes else value

    def nvmlInit(self):  # noqa: N802
        self.up += 1

    def nvmlShutdown(self):  # noqa: N802
        self.up -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.peers)

    def nvmlDeviceGetHandleByIndex(self, k):  # noqa: N802
        return SimpleNamespace(k=k)

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self.text(f"GPU-{handle.k}{handle.k}-uuid")

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(busId=self.text(f"00000000:{handle.k + 0xA0:X}:00.0"))

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return self.sm

    def nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        if link >= len(self.peers[handle.k]):
            raise RefusedError
        return 0 if self.peers[handle.k][link] is None else 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):  # noqa: N802
        return {"switch": 2, "hidden": 255, "cpu": 1}.get(self.peers[handle.k][link], 0)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):  # noqa: N802
        peer = self.peers[handle.k][link]
        if peer == "hidden":
            raise RefusedError
        if isinstance(peer, int):
            return self.nvmlDeviceGetPciInfo(SimpleNamespace(k=peer))
        return SimpleNamespace(busId=self.text({"switch": "00000000:C4:00.0"}.get(peer, "00000000:F0:00.0")))

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):  # noqa: N802
        return LEVELS[self.level(a.k, b.k)]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):  # noqa: N802
        return self.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):  # noqa: N802
        return self.pcie[1]


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    """Return a function that installs a driver; /sys is empty, and all GPUs are visible."""
    monkeypatch.setattr(module, "NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*arguments, **options):
        driver = Nvml(*arguments, **options)
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        return driver

    return install


def bricks(name, one):
    """Return for each GPU of a machine the number of the peer of each of its NVLinks, each of ``one`` GB/s."""
    out = [machine(name).out_links(f"cuda:{k}") for k in range(8)]
    return [[int(link.dst[5:]) for link in links for _ in range(int(link.bandwidth / one))] for links in out]


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("name", "one", "sm"), [("dgx-1v", 25, (7, 0)), ("dgx-1p", 20, (6, 0))])
def test_a_dgx_1_is_found(nvml, name, one, sm, as_bytes):
    """From the NVLinks of a DGX-1, discover makes the library's topology of a DGX-1, and shuts NVML down."""
    driver = nvml(bricks(name, one), sm=sm, as_bytes=as_bytes)
    assert discover() == machine(name)
    assert driver.up == 0


@pytest.mark.parametrize("seen", ["switch", "hidden"])
@pytest.mark.parametrize(
    ("name", "n", "links", "sm"), [("dgx-2", 16, 6, (7, 0)), ("dgx-a100", 8, 12, (8, 0)), ("hgx-h100", 8, 18, (9, 0))]
)
def test_nvswitches_are_found(nvml, name, n, links, sm, seen):
    """All NVSwitches of a machine become one switch, whether the driver reports their type or not."""
    nvml([[seen] * links] * n, sm=sm)
    assert discover() == machine(name)


def test_three_gpus_of_a_dgx_2(nvml):
    """Unlike the table of nvidia-smi, the driver reports that three V100 are linked to a switch."""
    nvml([["switch"] * 6] * 3, sm=(7, 0))
    assert discover() == machine("dgx-2").subset(["cuda:0", "cuda:1", "cuda:2"])


def test_a_workstation_is_found(nvml):
    """GPUs that an NVLink bridge joins in pairs have PCIe links, too, with the speed that the driver reports."""
    nvml([[k ^ 1] * 4 for k in range(4)], lambda i, j: "PHB", sm=(8, 6))
    assert discover() == machine("nvlink-pairs-4")


@pytest.mark.parametrize(
    ("pcie", "gb_per_s"),
    [
        ((3, 16), "15.75"),
        ((4, 8), "15.75"),
        ((5, 16), "63"),
        ((6, 16), "121"),
        ((7, 16), "121"),
        ((0, 0), "4"),
        ((3, 255), "15.75"),
    ],
)
def test_a_pcie_machine_is_found(nvml, pcie, gb_per_s):
    """PCIe switches and CPUs are derived from which part of PCIe joins two GPUs; an invalid generation becomes the
    nearest valid one, an invalid width x16."""
    nvml([[]] * 8, lambda i, j: "PIX" if i // 2 == j // 2 else "NODE" if i // 4 == j // 4 else "SYS", pcie=pcie)
    topology = discover()
    assert topology.route("cuda:0", "cuda:1") == ("cuda:0", "pcie0", "cuda:1")
    assert topology.route("cuda:1", "cuda:7") == ("cuda:1", "pcie0", "cpu0", "cpu1", "pcie3", "cuda:7")
    assert topology.link("cuda:0", "pcie0").bandwidth == Fraction(gb_per_s)


def test_a_switch_is_as_wide_as_its_widest_gpu(nvml):
    """GPUs with different PCIe links share a switch, whose link to the CPU is as fast as the fastest of these."""
    driver = nvml([[]] * 3, lambda i, j: "PIX" if i + j == 1 else "PHB")
    driver.nvmlDeviceGetMaxPcieLinkGeneration = lambda handle: (3, 5, 3)[handle.k]
    driver.nvmlDeviceGetMaxPcieLinkWidth = lambda handle: (16, 8, 16)[handle.k]
    topology = discover()
    widths = [topology.link(*pair).bandwidth for pair in (("cuda:0", "pcie0"), ("cuda:1", "pcie0"), ("pcie0", "cpu0"))]
    assert widths == [Fraction("15.75"), Fraction("31.5"), Fraction("31.5")]


def test_links_that_lead_elsewhere(nvml):
    """Links that are inactive, or lead to CPUs or to GPUs that are not visible, are left out."""
    nvml([[1, None, "cpu", "other"], [0, None, "cpu", "other"]])
    assert discover() == Topology.full_mesh(["cuda:0", "cuda:1"], 25, Fraction(7, 10**7))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("2,0", [2, 0]),
        ("3", [3]),
        (" 1 , 2 ", [1, 2]),
        ("1,9,2", [1]),
        ("1,-1,2", [1]),
        ("1,1", None),
        ("2,1,2,3", None),
        ("GPU-33,GPU-00-uuid", [3, 0]),
        ("GPU-99", None),
        ("GPU-", None),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
        ("MIG-1234", [0, 1, 2, 3]),
    ],
)
def test_cuda_visible_devices(nvml, monkeypatch, value, found):
    """Devices are the GPUs that CUDA_VISIBLE_DEVICES selects, numbered as CUDA does; cpu:0 if none; all for MIG-*."""
    nvml([[1, 3], [0, 2, 2], [1, 1, 3, 3, 3], [0, 2, 2, 2]])
    links = {(0, 1): 1, (0, 3): 1, (1, 2): 2, (2, 3): 3}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    topology = discover()
    if found is None:
        assert topology == NOTHING
        return
    assert topology.devices == tuple(f"cuda:{k}" for k in range(len(found)))
    for a, b in itertools.permutations(range(len(found)), 2):
        number = links.get(tuple(sorted((found[a], found[b]))), 0)
        link = topology.link(f"cuda:{a}", f"cuda:{b}")
        assert (link.bandwidth if link else 0) == 25 * number


@pytest.mark.parametrize(
    ("sm", "kind"),
    [
        (60, "nvlink1"),
        (70, "nvlink2"),
        (75, "nvlink2"),
        (80, "nvlink3"),
        (89, "nvlink3"),
        (90, "nvlink4"),
        (103, "nvlink5"),
    ],
)
def test_nvlink_by_compute_capability(sm, kind):
    """The generation of a GPU's NVLink follows from its compute capability."""
    assert nvlink(sm)[0] == kind


FUNCTIONS = [name for name in vars(Nvml) if name.startswith("nvml")]
# Without a function of NEEDED no GPU is found; without one of SPARE the topology of this test is the same.
NEEDED = {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo"}
SPARE = {"nvmlShutdown", "nvmlDeviceGetUUID", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetMaxPcieLinkWidth"}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("how", ["refuses", "missing"])
def test_a_driver_that_refuses(nvml, monkeypatch, name, how):
    """A function that the driver refuses or lacks is not an error; unless it is in NEEDED, all GPUs are still found."""
    driver = nvml([[1, 1], [0, 0], []], lambda i, j: "PHB")
    whole = discover()

    def refuse(*_):
        raise RefusedError

    if how == "refuses":
        setattr(driver, name, refuse)
    else:
        monkeypatch.delattr(Nvml, name)
    topology = discover()
    assert topology.devices == (NOTHING if name in NEEDED else whole).devices
    assert (topology == whole) == (name in SPARE)


@pytest.mark.parametrize("broken", [None, ModuleType("pynvml"), SimpleNamespace()])
def test_a_broken_package(monkeypatch, tmp_path, broken):
    """If the package pynvml is missing or broken, no GPU is found."""
    monkeypatch.setattr(module, "NODES", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert discover() == NOTHING


def test_no_gpu(nvml):
    """If the driver reports no GPU, the topology is that of a machine without GPUs."""
    nvml([])
    assert discover() == NOTHING
