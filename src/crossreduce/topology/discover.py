"""The topology of this machine: of its GPUs if NVML finds any, else of its NUMA nodes.

A machine that reports neither has one device, ``cpu:0``. Nothing is measured, and no error is raised.
"""

from __future__ import annotations

import os
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from .kinds import kind, nvlink
from .links import Link, Wiring
from .nvidia_smi import Slot, wired

NODES: Final = Path("/sys/devices/system/node")
_LEVELS: Final = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE"}  # nvmlGpuTopologyLevel_t; 50: SYS
_GPU, _NPU = 0, 1  # nvmlIntNvLinkDeviceType_t; 2 is a switch, 255 unknown: virtual machines hide NVSwitches
_UNREACHABLE: Final = 255  # in ACPI's table of distances; the distance of a node to itself is 10


def discover() -> Wiring:
    """Return the wiring of this machine: of its GPUs if NVML finds any, else of its NUMA nodes.

    GPUs: those of CUDA_VISIBLE_DEVICES in its order, else all in the order of the PCI bus, in which CUDA numbers equal
    GPUs. NVLinks and PCIe have their specified speed; links between CPUs have 10 GB/s, which NCCL assumes for Skylake.
    This needs the package nvidia-ml-py.

    NUMA nodes: ``cpu:k`` is the k-th node that has CPUs and memory. Linux reports distances; that of a node to itself
    is 10. A distance of 20 stands for 16 GB/s, which NCCL assumes between the nodes of a Zen 2 EPYC, and 0.2 us, a
    typical value; twice the distance is half the speed and twice the latency.
    """
    return _gpus() or _numa(NODES)


def _gpus() -> Wiring | None:
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, no driver, or a driver of another version: no GPUs
        return None
    try:
        return _wiring(pynvml)
    except Exception:  # noqa: BLE001 - a GPU that was lost, or a driver that lacks a function
        return None
    finally:
        _query(None, pynvml, "nvmlShutdown")


def _wiring(nvml: Any) -> Wiring | None:
    handles = _visible(nvml, [nvml.nvmlDeviceGetHandleByIndex(k) for k in range(nvml.nvmlDeviceGetCount())])
    if not handles:
        return None
    devices = [f"cuda:{k}" for k in range(len(handles))]
    buses = [_bus(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    fast: list[Link] = []
    for device, handle in zip(devices, handles, strict=True):
        major, minor = _query((0, 0), nvml, "nvmlDeviceGetCudaComputeCapability", handle)
        direct, switched = nvlink(10 * major + minor)
        for peer, number in _peers(nvml, handle, buses).items():
            if peer in buses:
                fast.append(kind(direct).between(device, devices[buses.index(peer)], number, "raw")[0])
            elif not peer:
                fast += kind(switched).between(device, "nvswitch", number, "raw")

    def near(i: int, j: int) -> str:
        level = _query(50, nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
        return _LEVELS.get(level, "SYS")

    return wired(devices, fast, len(devices), near, [_slot(nvml, handle) for handle in handles])


def _peers(nvml: Any, handle: Any, buses: list[str]) -> Counter[str]:
    """Return the number of active NVLinks of a GPU, by the PCI bus id of the peer GPU or NPU; "": a switch."""
    peers: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _query(0, nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1:
            what = _query(255, nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            bus = _bus(_query(None, nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            peers[bus if what in (_GPU, _NPU) or bus in buses else ""] += 1
    return peers


def _slot(nvml: Any, handle: Any) -> Slot:
    generation = _query(3, nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = _query(16, nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    return Fraction(lanes if 1 <= lanes <= 32 else 16, 16), f"pcie{min(max(generation, 1), 6)}"


def _visible(nvml: Any, handles: list[Any]) -> list[Any]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order; a list with parts of GPUs (MIG) is ignored."""
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
        if found and found[0] in chosen:  # a repeated entry: CUDA then uses no GPU (as torch.cuda describes it)
            return []
        if len(found) != 1:  # CUDA also ignores what follows an invalid entry
            break
        chosen += found
    return chosen


def _bus(info: Any) -> str:
    return _text(info.busId).lower() if info is not None else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _query(default: Any, nvml: Any, function: str, *arguments: Any) -> Any:
    """Call a function of the driver; return the default if the driver or the GPU does not support it."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:  # noqa: BLE001 - NVMLError, or a missing function of an older driver
        return default


def _numa(root: Path) -> Wiring:
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
    links = [
        Link(f"cpu:{a}", f"cpu:{b}", reference / distance, Fraction(distance, 10**8))
        for a, b, distance in paths
        if distance < _UNREACHABLE
    ]
    return Wiring(tuple(f"cpu:{k}" for k in range(max(len(used), 1))), tuple(links))


def _has_cpus_and_memory(node: Path) -> bool:
    """Return whether a NUMA node can run code and store data; nodes of CXL or GPU memory have no CPUs."""
    words = (node / "meminfo").read_text("ascii").split()
    total = words[words.index("MemTotal:") + 1] if "MemTotal:" in words else "1"
    return bool((node / "cpulist").read_text("ascii").strip()) and total != "0"
