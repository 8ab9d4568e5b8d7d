"""Topologies of this machine: from NVML, from /sys, or of one device."""

import ctypes
import itertools
import subprocess
from fractions import Fraction

import pytest
from paths import NATIVE

from crossreduce import Topology
from crossreduce.topology import discover as module
from crossreduce.topology.nvml import _FUNCTIONS, Nvml

machine, discover = Topology.machine, Topology.discover

NOTHING = Topology(("cpu:0",), ())
SOURCE = NATIVE / "fake_nvml.c"


def without_driver(library):
    """Raise the error of a machine that has no driver."""
    raise OSError(f"{library}: cannot open shared object file")


@pytest.fixture
def sys_tree(tmp_path, monkeypatch):
    """Return a function that writes NUMA nodes as Linux does, without GPUs. Its arguments have an entry per node."""
    monkeypatch.setattr(module, "Nvml", without_driver)
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


def test_numa_nodes_are_devices(sys_tree):
    """NUMA nodes are devices, speeds and latencies follow from distances, and the nodes of a socket are an island."""
    sys_tree([" ".join("10" if i == j else "20" if i // 4 == j // 4 else "32" for j in range(8)) for i in range(8)])
    topology = discover()
    assert topology.devices == tuple(f"cpu:{k}" for k in range(8))
    assert topology.link("cpu:0", "cpu:1")[2:] == (16, Fraction(2, 10**7))
    assert topology.link("cpu:4", "cpu:0")[2:] == (10, Fraction(32, 10**8))
    assert len(topology.links) == 56
    assert topology.islands == (topology.devices[:4], topology.devices[4:])


def test_nodes_that_are_not_devices(sys_tree):
    """Nodes without CPUs or memory are not devices. Distance 255 means no link. Numbers of nodes may have gaps."""
    rows = ["10 20 255 20", "20 10 20 20", "30 20 10 20", "20 20 20 10"]
    sys_tree(rows, cpus=["0-7", "", "8-15", "16-23"], memory=[9, 9, 9, 0], numbers=[0, 2, 8, 9])
    topology = discover()
    assert topology.devices == ("cpu:0", "cpu:1")
    assert topology.link("cpu:0", "cpu:1") is None
    assert topology.link("cpu:1", "cpu:0").bandwidth == Fraction(320, 30)


@pytest.mark.parametrize(
    "rows", [["10"], ["10 20"], ["10 20", "20"], ["10 20", "20 x"], ["10 0", "20 10"], ["10 -5", "20 10"], [""]]
)
def test_malformed_distances_are_no_machine(sys_tree, rows):
    """If there is one NUMA node, as in a laptop, or the table of distances is invalid, the topology has one device."""
    sys_tree(rows)
    assert discover() == NOTHING


@pytest.mark.parametrize("gone", ["distance", "cpulist", "meminfo"])
def test_missing_files_are_no_machine(sys_tree, gone):
    """A file that is missing or not text, or an unexpected entry, gives a topology of one device."""
    root = sys_tree(["10 20", "20 10"])
    assert len(discover().devices) == 2
    (root / "node1" / gone).write_bytes(b"\xff\xfe")
    assert discover() == NOTHING
    (root / "node1" / gone).unlink()
    assert discover() == NOTHING
    (root / "node1").rename(root / "node1x")
    assert discover() == NOTHING


def test_systems_without_sys(monkeypatch, tmp_path):
    """Without the folder of NUMA nodes, as on macOS, on Windows and in bare containers, the topology has one device."""
    monkeypatch.setattr(module, "Nvml", without_driver)
    monkeypatch.setattr(module, "NODES", tmp_path / "missing")
    assert discover() == NOTHING


# NVML.

LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


def bus(k):
    """Return the PCI bus id of the k-th GPU as NVML reports it."""
    return f"00000000:{k + 0xA0:X}:00.0"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compile the fake library once, and return its path."""
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, timeout=200)
    return library


def described(library, peers, level=lambda i, j: "SYS", sm=(8, 0), pcie=(4, 16), names=None, order=None, version=2):
    """Describe a machine with one GPU for each entry of ``peers`` to the fake library, and return the library.

    ``peers``: for each GPU, the peer of each of its NVLinks: the number of a GPU, "switch", "hidden" (a switch, in a
    virtual machine), "cpu", "other" (a GPU that is not visible), or None for an inactive link. ``level`` returns the
    part of PCIe that joins two GPUs; ``order`` has NVML's number of each GPU, ``version`` the one of all NVLinks.
    """
    fake = ctypes.CDLL(str(library))
    n = len(peers)
    order = order or range(n)
    fake.fake_reset(n)
    for k, links in enumerate(peers):
        name, uuid = (names or ["V100"] * n)[k], f"GPU-{k}{k}-uuid"
        fake.fake_gpu(order[k], name.encode(), bus(k).encode(), uuid.encode(), *sm)
        fake.fake_slot(order[k], *pcie)
        for link, peer in enumerate(links):
            of = {"switch": 2, "hidden": 255, "cpu": 1}.get(peer, 0)
            far = {"switch": "00000000:C4:00.0", "hidden": ""}.get(peer, "00000000:F0:00.0")
            at = bus(peer) if isinstance(peer, int) else far
            fake.fake_link(order[k], link, int(peer is not None), of, version, at.encode())
        for j in range(k):
            fake.fake_pair(order[j], order[k], LEVELS[level(j, k)], 0)
    return fake


@pytest.fixture
def nvml(monkeypatch, tmp_path, library):
    """Return a function that describes a machine to the fake library. No NUMA nodes are found; all GPUs are visible."""
    monkeypatch.setattr(module, "NODES", tmp_path)
    monkeypatch.setattr(module, "Nvml", lambda name: Nvml(str(library)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return lambda *arguments, **options: described(library, *arguments, **options)


def bricks(name, one):
    """Return for each GPU of a machine the peers of its NVLinks, which have ``one`` GB/s each."""
    out = [machine(name).out_links(f"cuda:{k}") for k in range(8)]
    return [[int(link.dst[5:]) for link in links for _ in range(int(link.bandwidth / one))] for links in out]


@pytest.mark.parametrize(("name", "one", "sm"), [("dgx-1v", 25, (7, 0)), ("dgx-1p", 20, (6, 0))])
def test_a_dgx_1_is_found(nvml, name, one, sm):
    """From the NVLinks of a DGX-1, discover makes the library's topology of a DGX-1, and shuts NVML down."""
    fake = nvml(bricks(name, one), sm=sm)
    assert discover() == machine(name)
    assert fake.fake_opened() == 0
    assert module.discover().notes == ("8 x V100, from NVML, driver 550.54.14",)


@pytest.mark.parametrize(
    ("name", "n", "links", "sm"), [("dgx-2", 16, 6, (7, 0)), ("dgx-a100", 8, 12, (8, 0)), ("hgx-h100", 8, 18, (9, 0))]
)
def test_nvswitches_are_found(nvml, name, n, links, sm):
    """All NVSwitches of a machine are one switch, whether the driver reports their type or not."""
    for seen in ("switch", "hidden"):
        nvml([[seen] * links] * n, sm=sm)
        assert discover() == machine(name)
    nvml([["switch"] * links] * 3, sm=sm)
    assert discover() == machine(name).subset(range(3))


def test_a_workstation_is_found(nvml):
    """GPUs that NVLink joins in pairs have PCIe links, too. Inactive NVLinks and those to other nodes are left out."""
    nvml([[k ^ 1] * 4 for k in range(4)], lambda i, j: "PHB", sm=(8, 6))
    assert discover() == machine("nvlink-pairs-4")
    nvml([[1, None, "cpu", "other"], [0, None, "cpu", "other"]])
    assert discover() == Topology.full_mesh(["cuda:0", "cuda:1"], 25, Fraction(7, 10**7))


def test_a_pcie_machine_is_found(nvml):
    """The tree of PCIe follows from what joins two GPUs. Invalid generations become the nearest one, widths x16."""
    speeds = {(3, 16): "15.75", (4, 8): "15.75", (5, 16): "63", (6, 16): "121", (7, 16): "121", (0, 0): "4"}
    for pcie, gb_per_s in {**speeds, (3, 255): "15.75"}.items():
        nvml([[]] * 8, lambda i, j: "PIX" if i // 2 == j // 2 else "NODE" if i // 4 == j // 4 else "SYS", pcie=pcie)
        topology = discover()
        assert topology.route("cuda:0", "cuda:1") == ("cuda:0", "pcie0", "cuda:1")
        assert topology.route("cuda:1", "cuda:7") == ("cuda:1", "pcie0", "cpu0", "cpu1", "pcie3", "cuda:7")
        assert topology.link("cuda:0", "pcie0").bandwidth == Fraction(gb_per_s), pcie


VISIBLE = {  # values of CUDA_VISIBLE_DEVICES, and the numbers of the GPUs that they select, or None
    "2,0": [2, 0], "3": [3], " 1 , 2 ": [1, 2], "1,9,2": [1], "1,-1,2": [1], "1,1": None, "2,1,2,3": None,
    "GPU-33,GPU-00-uuid": [3, 0], "GPU-99": None, "GPU-": None, "": None, "-1": None, "NoDevFiles": None,
    "2,MIG-1234": [2],
}  # fmt: skip


def test_cuda_visible_devices(nvml, monkeypatch):
    """Devices are the GPUs that CUDA_VISIBLE_DEVICES selects, in its order. If it selects none, cpu:0 is found."""
    nvml([[1, 3], [0, 2, 2], [1, 1, 3, 3, 3], [0, 2, 2, 2]])
    links = {(0, 1): 1, (0, 3): 1, (1, 2): 2, (2, 3): 3}  # the number of NVLinks of each pair of GPUs
    for value, selected in VISIBLE.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        topology = discover()
        if selected is None:
            assert topology == NOTHING, value
            continue
        assert topology.devices == tuple(f"cuda:{k}" for k in range(len(selected))), value
        for a, b in itertools.permutations(range(len(selected)), 2):
            number = links.get(tuple(sorted((selected[a], selected[b]))), 0)
            link = topology.link(f"cuda:{a}", f"cuda:{b}")
            assert (link.bandwidth if link else 0) == 25 * number, value


# Without a function in NEEDED, no GPU is found. Without one in USED, the topology is another one. All others are spare.
NEEDED = {"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetPciInfo_v3"}
USED = {"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2"}
USED |= {"nvmlDeviceGetMaxPcieLinkGeneration"}


def test_a_driver_that_refuses(nvml):
    """GPUs are found although a function fails, unless the function is in NEEDED. Then a note names the function."""
    fake = nvml([[1, 1], [0, 0], []], lambda i, j: "PHB", version=1)
    whole = discover()
    for name in _FUNCTIONS:
        fake.fake_failure(name.encode(), 15)  # NVML_ERROR_GPU_IS_LOST
        topology, notes = discover(), module.discover().notes
        assert topology.devices == (NOTHING if name in NEEDED else whole).devices
        assert (topology == whole) == (name not in NEEDED | USED), name
        if name in NEEDED:
            why = f"no GPUs were found: {name}: GPU is lost (15)"
            assert notes == (why, "one device, as there is one NUMA node")


def test_gpus_without_nvlink_over_two_cpus(nvml):
    """GPUs of two NUMA nodes have a tree of PCIe, also if NVML reports only the CPUs near each GPU. A note lists pairs
    without peer-to-peer access."""
    fake = nvml([[]] * 4, lambda i, j: "NODE" if i // 2 == j // 2 else "SYS", pcie=(3, 16))
    found = discover()
    assert found.route("cuda:0", "cuda:1") == ("cuda:0", "cpu0", "cuda:1")
    assert found.route("cuda:0", "cuda:3") == ("cuda:0", "cpu0", "cpu1", "cuda:3")
    assert {link.bandwidth for link in found.links if "cuda" in link.src} == {machine("pcie-8").links[0].bandwidth}
    for k in range(4):
        fake.fake_cpus(k, ctypes.c_ulong(1 << 63 if k < 2 else 3))
    fake.fake_failure(b"nvmlDeviceGetTopologyCommonAncestor", 3)  # NVML_ERROR_NOT_SUPPORTED
    assert discover() == found
    fake.fake_pair(0, 3, LEVELS["SYS"], 1)
    assert module.discover().notes[1:] == ("1 of 6 pairs of GPUs cannot access each other's memory: cuda:0 and cuda:3",)


def test_one_gpu_and_failed_links(nvml):
    """One GPU has no links. Failed NVLinks are left out, and a note has their number. If the compute capability is not
    known, the version of NVLink gives the speed."""
    nvml([])
    assert discover() == NOTHING
    nvml([[]])
    assert discover() == Topology(("cuda:0",), ())
    peers = bricks("dgx-1v", 25)
    for a, b in ((0, 3), (3, 0)):
        peers[a] = [None if peer == b else peer for peer in peers[a]]
    fake = nvml(peers, sm=(7, 0))
    lost = sum(peer is None for peer in peers[0])
    assert discover() == machine("dgx-1v").without_link(0, 3)
    counted = tuple(f"cuda:{k}: {lost} of 6 NVLinks are inactive" for k in (0, 3))
    assert module.discover().notes[1:] == counted
    fake.fake_failure(b"nvmlDeviceGetCudaComputeCapability", 3)
    assert discover() == machine("dgx-1v").without_link(0, 3)
    peers = bricks("dgx-1v", 25)
    peers[0][peers[0].index(4)] = peers[4][peers[4].index(0)] = None  # one of the two NVLinks of this pair fails
    nvml(peers, sm=(7, 0))
    assert (discover().link(0, 4).bandwidth, machine("dgx-1v").link(0, 4).bandwidth) == (25, 50)
    nvml([["switch"] * 36] * 2, sm=(10, 0))
    assert discover().link("cuda:0", "nvswitch").bandwidth == 36 * 50


def test_the_order_of_cuda(nvml, monkeypatch):
    """GPUs have the order of the PCI bus. A note says so if CUDA's order may differ, or if no GPU is selected."""
    chain = [[1], [0, 2, 2], [1, 1]]
    nvml(chain)
    expected = discover()
    nvml(chain, order=[2, 0, 1], names=["A100", "T4", "A100"])
    assert discover() == expected
    head, *notes = module.discover().notes
    assert head == "2 x A100, 1 x T4, from NVML, driver 550.54.14"
    assert len(notes) == 1
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes[0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert module.discover().notes == (head,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    none = "no GPUs were found: CUDA_VISIBLE_DEVICES='7' selects none of 3 GPUs"
    assert module.discover().notes[0] == none


def test_parts_of_gpus(nvml, monkeypatch):
    """A process can use only one part (MIG) of a GPU, or all GPUs that are not divided into parts."""
    fake = nvml([[1, 2], [0, 2], [0, 1]])
    whole = discover()
    fake.fake_mig(1, 1)
    assert discover() == whole.subset([0, 2]).renamed(["cuda:0", "cuda:1"])
    assert module.discover().notes[1] == "1 GPUs that are divided into parts (MIG) are left out"
    one = Topology(("cuda:0",), ()), ("one part (MIG) of a GPU, from NVML, driver 550.54.14",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8a3f,MIG-77")
    assert (discover(), module.discover().notes) == one
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for k in range(3):
        fake.fake_mig(k, 1)
    assert (discover(), module.discover().notes) == one


def test_libraries_that_are_not_nvml(monkeypatch, tmp_path):
    """If the library is missing, damaged or another one, no GPU is found, and a note tells why."""
    monkeypatch.setattr(module, "NODES", tmp_path)
    (tmp_path / "damaged").write_bytes(b"\x7fELF damaged")
    for name, why in {
        str(tmp_path / "missing"): "cannot open shared object file",
        str(tmp_path / "damaged"): "damaged: ",
        "libc.so.6": "no function nvmlInit_v2",
    }.items():
        found = module.discover(name)
        assert found.wiring == module.Wiring(("cpu:0",), ())
        assert why in found.notes[0]
