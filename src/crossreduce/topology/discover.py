"""Find out how this machine's devices are joined.

In: nothing.  Out: a ``Topology``: of its GPUs where NVML sees any, else of its memory's NUMA nodes. On a machine that
tells neither there is one device, ``cpu:0``. Measures nothing and never fails.
"""

from __future__ import annotations

import os
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from .kinds import kind, nvlink
from .nvidia_smi import Slot, wired
from .topology import Link, Topology

NODES: Final = Path("/sys/devices/system/node")
_LEVELS: Final = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE"}  # nvmlGpuTopologyLevel_t; 50: SYS
_GPU, _NPU = 0, 1  # nvmlIntNvLinkDeviceType_t; 2 is a switch, 255 unknown: virtual machines hide NVSwitches
_UNREACHABLE: Final = 255  # in ACPI's table of distances; a node's distance to itself is 10


def discover() -> Topology:
    """Return the topology of this machine: its GPUs where NVML sees any, else its memory's NUMA nodes.

    GPUs: those of CUDA_VISIBLE_DEVICES in its order, else all in the order of the PCI bus, in which CUDA numbers GPUs
    that are alike. NVLinks and PCIe have the speed that they are built for; CPUs are joined by 10 GB/s, which NCCL
    counts on for Skylake. It takes the package nvidia-ml-py.

    NUMA nodes: ``cpu:k`` is the k-th that has CPUs and memory. Linux tells distances, a node's to itself being 10; a
    way of distance 20 has 16 GB/s, which NCCL counts on between the nodes of an EPYC, and 0.2 us, a usual figure; twice
    the distance is half the speed and twice the latency.
    """
    return _gpus() or _numa(NODES)


def _gpus() -> Topology | None:
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, no driver, a driver of another version: there are no GPUs
        return None
    try:
        return _wiring(pynvml)
    except Exception:  # noqa: BLE001 - a GPU that fell off the bus, a driver that lacks a function
        return None
    finally:
        _ask(None, pynvml, "nvmlShutdown")


def _wiring(nvml: Any) -> Topology | None:
    handles = _visible(nvml, [nvml.nvmlDeviceGetHandleByIndex(k) for k in range(nvml.nvmlDeviceGetCount())])
    if not handles:
        return None
    devices = [f"cuda:{k}" for k in range(len(handles))]
    buses = [_bus(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    fast: list[Link] = []
    for device, handle in zip(devices, handles, strict=True):
        major, minor = _ask((0, 0), nvml, "nvmlDeviceGetCudaComputeCapability", handle)
        direct, switched = nvlink(10 * major + minor)
        for peer, number in _peers(nvml, handle, buses).items():
            if peer in buses:
                fast.append(kind(direct).both_ways(device, devices[buses.index(peer)], number, "raw")[0])
            elif not peer:
                fast += kind(switched).both_ways(device, "nvswitch", number, "raw")

    def near(i: int, j: int) -> str:
        level = _ask(50, nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
        return _LEVELS.get(level, "SYS")

    return wired(devices, fast, len(devices), near, [_slot(nvml, handle) for handle in handles])


def _peers(nvml: Any, handle: Any, buses: list[str]) -> Counter[str]:
    """Return how many NVLinks of a GPU are up, by the bus number of the GPU at the other end; "" is a switch."""
    peers: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _ask(0, nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1:
            what = _ask(255, nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            bus = _bus(_ask(None, nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            peers[bus if what in (_GPU, _NPU) or bus in buses else ""] += 1
    return peers


def _slot(nvml: Any, handle: Any) -> Slot:
    generation = _ask(3, nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = _ask(16, nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    return Fraction(lanes if 1 <= lanes <= 32 else 16, 16), f"pcie{min(max(generation, 1), 6)}"


def _visible(nvml: Any, handles: list[Any]) -> list[Any]:
    """Return the GPUs that CUDA numbers, in its order; a list that names parts of GPUs is left alone."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or "MIG" in value:
        return handles
    chosen: list[Any] = []
    for word in value.split(","):
        name = word.strip()
        if name.startswith("GPU-"):
            found = [handle for handle in handles if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(name)]
        else:
            found = handles[int(name) : int(name) + 1] if name.isdecimal() else []
        if len(found) != 1 or found[0] in chosen:  # CUDA, too, goes no further
            break
        chosen += found
    return chosen


def _bus(info: Any) -> str:
    return _text(info.busId).lower() if info is not None else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ask(default: Any, nvml: Any, function: str, *arguments: Any) -> Any:
    """Call the driver, which refuses what this GPU does not have, and lacks what came after it."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:  # noqa: BLE001 - NVMLError, and whatever a driver of another version brings
        return default


def _numa(root: Path) -> Topology:
    try:
        nodes = sorted(int(path.name[4:]) for path in root.glob("node[0-9]*"))
        distances = [[int(word) for word in (root / f"node{n}" / "distance").read_text("ascii").split()] for n in nodes]
        used = [k for k, n in enumerate(nodes) if _has_cpus_and_memory(root / f"node{n}")]
        ways = [(a, b, distances[i][j]) for a, i in enumerate(used) for b, j in enumerate(used) if a != b]
    except (OSError, ValueError, IndexError):  # another system, a container without /sys, a file that is cut short
        return Topology(("cpu:0",), ())
    if any(len(row) != len(nodes) for row in distances) or any(way[2] < 1 for way in ways):
        return Topology(("cpu:0",), ())
    reference = 20 * kind("cpu-zen2").effective
    links = [
        Link(f"cpu:{a}", f"cpu:{b}", reference / distance, Fraction(distance, 10**8))
        for a, b, distance in ways
        if distance < _UNREACHABLE
    ]
    return Topology(tuple(f"cpu:{k}" for k in range(max(len(used), 1))), tuple(links))


def _has_cpus_and_memory(node: Path) -> bool:
    """A node of memory alone (CXL, a GPU's) runs nothing, and one without memory holds nothing."""
    words = (node / "meminfo").read_text("ascii").split()
    total = words[words.index("MemTotal:") + 1] if "MemTotal:" in words else "1"
    return bool((node / "cpulist").read_text("ascii").strip()) and total != "0"
