"""The properties of this machine that matter to a benchmark, for its report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return the processor, the number of cores, the system and the versions, but no names that identify the machine.

    >>> sorted(machine())
    ['cores', 'cpu', 'python', 'system', 'versions']
    """
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if "model name" in x), model)
    versions = {}
    gpus = "nvidia-nccl-cu12", "nvidia-nccl-cu13", "jax-cuda13-plugin", "cupy-cuda12x", "cupy-cuda13x"
    for name in ("crossreduce", "numpy", "ml_dtypes", "torch", "jax", "tensorflow_cpu", "mpi4py", *gpus):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": versions,
    }
