"""The topology of this machine: its GPUs if NVML finds any, else its NUMA nodes.

A machine that reports neither has one device, ``cpu:0``. Nothing is measured, and no error is raised. Notes describe
where the topology is from, and why no GPUs were found.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple

from .formats.nvidia_smi import Slot, gpu_wiring
from .link_kinds import kind, nvlink
from .links import Link, Wiring
from .nvml import LIBRARY, MAX_LINKS, Nvml

NODES: Final = Path("/sys/devices/system/node")
_LEVELS: Final = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
_GPU, _NPU = 0, 1  # nvmlIntNvLinkDeviceType_t; 2 is a switch, 255 unknown: virtual machines hide NVSwitches
# Compute capabilities (times ten) of GPUs with a version of NVLink, NVML_NVLINK_VERSION_1_0 and later.
_VERSIONS: Final = {1: 60, 2: 70, 3: 70, 4: 80, 5: 80, 6: 90, 7: 100, 8: 100}
_READS: Final = 0  # NVML_P2P_CAPS_INDEX_READ
_UNREACHABLE: Final = 255  # in ACPI's table of distances; the distance of a node to itself is 10
_ORDER: Final = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA numbers them as this topology does"


class Discovery(NamedTuple):
    """The wiring of this machine, and sentences about where it is from."""

    wiring: Wiring
    notes: tuple[str, ...]


class _VisibleGpu(NamedTuple):
    handle: Any
    bus: str  # the PCI bus id
    name: str


def discover(library: str = LIBRARY) -> Discovery:
    """Return the wiring of this machine: its GPUs if NVML finds any, else its NUMA nodes.

    GPUs are those in CUDA_VISIBLE_DEVICES, in its order. Without this variable, all GPUs are listed in the order of the
    PCI bus. CUDA uses this order if they are equal, or if CUDA_DEVICE_ORDER is PCI_BUS_ID. NVLinks and PCIe have their
    specified speed. Links between CPUs have 10 GB/s, which NCCL assumes for Skylake. If CUDA_VISIBLE_DEVICES
    begins with a part of a GPU (MIG), or all GPUs are divided into parts, there is one device, because a process can
    only use one part.

    For NUMA nodes, ``cpu:k`` is the k-th node that has CPUs and memory. Linux reports distances between nodes; the
    distance of a node to itself is 10. A distance of 20 stands for 16 GB/s, which NCCL assumes between the nodes of a
    Zen 2 EPYC, and for 0.2 us, a typical value. Twice the distance means half the speed and twice the latency.

    Args:
      library: the file of NVML, which is part of NVIDIA's driver.
    """
    try:
        return _call_nvml(library)
    except OSError as error:
        reason = f"no GPUs were found: {error}"
    wiring = _numa_wiring(NODES)
    count = len(wiring.devices)
    return Discovery(wiring, (reason, f"{count} NUMA nodes" if count > 1 else "one device, as there is one NUMA node"))


def _call_nvml(library: str) -> Discovery:
    """Return the wiring of the GPUs. OSError: there is no NVML, no GPU was found, or a function of NVML failed."""
    nvml = Nvml(library)
    nvml.call("nvmlInit_v2")
    try:
        return _discover_gpus(nvml)
    finally:
        _query(None, nvml, "nvmlShutdown")


def _discover_gpus(nvml: Any) -> Discovery:
    """Return the wiring of the GPUs that this process can use, in the order in which CUDA numbers them."""
    count = nvml.call("nvmlDeviceGetCount_v2")
    handles = [nvml.call("nvmlDeviceGetHandleByIndex_v2", k) for k in range(count)]
    gpus = []
    for handle in handles:
        bus, name = nvml.call("nvmlDeviceGetPciInfo_v3", handle), _query("GPU", nvml, "nvmlDeviceGetName", handle)
        gpus.append(_VisibleGpu(handle, bus, name))
    if not gpus:
        raise OSError("NVML reports no GPU")
    version = _query("of an unknown version", nvml, "nvmlSystemGetDriverVersion")
    gpus = sorted(gpus, key=lambda gpu: gpu.bus)
    notes = []
    if len({gpu.name for gpu in gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(f"the GPUs differ: {_ORDER}")
    is_part = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip().startswith("MIG-")
    chosen = [] if is_part else _visible_gpus(nvml, gpus)
    if not chosen and not is_part:
        raise OSError(f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} selects none of {len(gpus)} GPUs")
    undivided = [gpu for gpu in chosen if _query((0, 0), nvml, "nvmlDeviceGetMigMode", gpu.handle)[0] != 1]
    if not undivided:
        return Discovery(Wiring(("cuda:0",), ()), (f"one part (MIG) of a GPU, from NVML, driver {version}", *notes))
    if len(undivided) < len(chosen):
        notes.append(f"{len(chosen) - len(undivided)} GPUs that are divided into parts (MIG) are left out")
    names = ", ".join(f"{number} x {name}" for name, number in Counter(gpu.name for gpu in undivided).items())
    wiring, link_notes = _wire_gpus(nvml, undivided)
    return Discovery(wiring, (f"{names}, from NVML, driver {version}", *notes, *link_notes))


def _wire_gpus(nvml: Any, gpus: Sequence[_VisibleGpu]) -> tuple[Wiring, list[str]]:
    """Return the wiring of GPUs, and notes about links that do not work."""
    devices = [f"cuda:{k}" for k in range(len(gpus))]
    buses = [gpu.bus for gpu in gpus]
    fast: list[Link] = []
    notes = []
    for device, gpu in zip(devices, gpus, strict=True):
        peers, inactive = _peers(nvml, gpu.handle, buses)
        if peers and inactive:
            notes.append(f"{device}: {inactive} of {inactive + peers.total()} NVLinks are inactive")
        direct, switched = nvlink(_capability(nvml, gpu.handle)) if peers else ("", "")
        for peer, number in peers.items():
            if peer in buses:
                fast.append(kind(direct).between(device, devices[buses.index(peer)], number, "raw")[0])
            elif not peer:
                fast += kind(switched).between(device, "nvswitch", number, "raw")
    pairs, handles = list(combinations(range(len(gpus)), 2)), [gpu.handle for gpu in gpus]
    status = {(i, j): _query(0, nvml, "nvmlDeviceGetP2PStatus", handles[i], handles[j], _READS) for i, j in pairs}
    refused = [f"{devices[i]} and {devices[j]}" for (i, j), code in status.items() if code]
    if refused:
        some = ", ".join(refused[:3]) + ", ..." * (len(refused) > 3)
        notes.append(f"{len(refused)} of {len(pairs)} pairs of GPUs cannot access each other's memory: {some}")

    def near(i: int, j: int) -> str:
        """Return which part of PCIe joins two GPUs, as an entry of nvidia-smi's table."""
        level = _query(None, nvml, "nvmlDeviceGetTopologyCommonAncestor", gpus[i].handle, gpus[j].handle)
        if level is None:  # GPUs with the same CPUs are at one CPU
            cpus = [_query(k, nvml, "nvmlDeviceGetCpuAffinity", gpus[k].handle) for k in (i, j)]
            return "NODE" if cpus[0] == cpus[1] else "SYS"
        return _LEVELS.get(level, "SYS")

    return gpu_wiring(devices, fast, len(devices), near, [_slot(nvml, gpu.handle) for gpu in gpus]), notes


def _peers(nvml: Any, handle: Any, buses: list[str]) -> tuple[Counter[str], int]:
    """Return a GPU's number of active NVLinks by the peer's PCI bus id ("": a switch), and that of inactive ones."""
    peers: Counter[str] = Counter()
    inactive = 0
    for link in range(MAX_LINKS):
        state = _query(None, nvml, "nvmlDeviceGetNvLinkState", handle, link)
        inactive += state == 0
        if state == 1:
            peer_type = _query(255, nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            bus = _query("", nvml, "nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link)
            peers[bus if peer_type in (_GPU, _NPU) or bus in buses else ""] += 1
    return peers, inactive


def _capability(nvml: Any, handle: Any) -> int:
    """Return a GPU's compute capability times ten, or if it is unknown, the least one with the GPU's NVLink version."""
    major, minor = _query((0, 0), nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    versions = () if major else range(MAX_LINKS)
    reported = (_query(0, nvml, "nvmlDeviceGetNvLinkVersion", handle, link) for link in versions)
    return 10 * int(major) + int(minor) or next((_VERSIONS[version] for version in reported if version in _VERSIONS), 0)


def _slot(nvml: Any, handle: Any) -> Slot:
    """Return a GPU's PCIe link; PCIe 3 x16 if the driver does not report it."""
    generation = _query(3, nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = _query(16, nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    return Fraction(lanes if 1 <= lanes <= 32 else 16, 16), f"pcie{min(max(generation, 1), 6)}"


def _visible_gpus(nvml: Any, gpus: list[_VisibleGpu]) -> list[_VisibleGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return gpus
    chosen: list[_VisibleGpu] = []
    for word in value.split(","):
        name = word.strip()
        if name.startswith("GPU-"):
            selected = [gpu for gpu in gpus if _query("", nvml, "nvmlDeviceGetUUID", gpu.handle).startswith(name)]
        else:
            selected = gpus[int(name) : int(name) + 1] if name.isdecimal() else []
        if selected and selected[0] in chosen:  # a repeated entry: CUDA then uses no GPU (as torch.cuda describes it)
            return []
        if len(selected) != 1:  # CUDA also ignores what follows an invalid entry
            break
        chosen += selected
    return chosen


def _query(default: Any, nvml: Any, function: str, *arguments: Any) -> Any:
    """Return the result of an NVML function, or the default if the driver or the GPU does not support it."""
    try:
        return nvml.call(function, *arguments)
    except OSError:
        return default


def _numa_wiring(root: Path) -> Wiring:
    """Return the wiring of the NUMA nodes in a folder of Linux's sysfs, or of one device if none can be read."""
    try:
        nodes = sorted(int(path.name[4:]) for path in root.glob("node[0-9]*"))
        distances = [[int(word) for word in (root / f"node{n}" / "distance").read_text("ascii").split()] for n in nodes]
        used = [k for k, n in enumerate(nodes) if _has_cpus_and_memory(root / f"node{n}")]
        paths = [(a, b, distances[i][j]) for a, i in enumerate(used) for b, j in enumerate(used) if a != b]
    except (OSError, ValueError, IndexError):  # another system, a container without /sys, a truncated file
        return Wiring(("cpu:0",), ())
    if any(len(row) != len(nodes) for row in distances) or any(distance < 1 for _, _, distance in paths):
        return Wiring(("cpu:0",), ())
    reference = 20 * kind("cpu-zen2").effective
    reached = [(f"cpu:{a}", f"cpu:{b}", distance) for a, b, distance in paths if distance < _UNREACHABLE]
    links = [Link(src, dst, reference / distance, Fraction(distance, 10**8)) for src, dst, distance in reached]
    return Wiring(tuple(f"cpu:{k}" for k in range(max(len(used), 1))), tuple(links))


def _has_cpus_and_memory(node: Path) -> bool:
    """Return whether a NUMA node can run code and store data; nodes of CXL or GPU memory have no CPUs."""
    words = (node / "meminfo").read_text("ascii").split()
    total = words[words.index("MemTotal:") + 1] if "MemTotal:" in words else "1"
    return bool((node / "cpulist").read_text("ascii").strip()) and total != "0"
