"""The devices that the CUDA driver reports to this process, and the kernels that are loaded on them.

The driver's library is opened at the first call that needs it; nothing here needs CUDA to be installed. The machine
code of the kernels is in ``kernels.bin``, which scripts/build_cuda_kernels makes.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from ...errors import ArgumentError, BackendError, DriverError, ReductionError, shown
from .kernels import PTX_DRIVER, chosen_code, copy_kernel

_LOG: Final = logging.getLogger("crossreduce")
_NO_CODE: Final = frozenset({200, 209, 218, 221, 222, 223, 801})
"""CUDA's codes for images that it cannot use; 801: an older driver may refuse parameters of more than 4 KiB so."""
_CHECKED_NBYTES: Final = 4 << 20  # that each device reads from each peer
_LARGE_TABLES: Final = 12010  # the driver's version from which parameters may have more than 4 KiB (CUDA 12.1)


@cache
def native() -> Any:
    """Return the compiled module, or ``None`` where it was not built."""
    try:
        module = importlib.import_module("._cuda", __package__)
    except ImportError as error:
        _LOG.info("the CUDA engine is not installed (%s)", error)
        return None
    module.use(_error)
    return module


@cache
def unusable() -> str:
    """Return the reason why no CUDA device can be used, or an empty string if one can be used.

    Raises:
      ArgumentError: the variable ``CROSSREDUCE_CUDA`` is neither 0 nor 1.
    """
    is_used = is_on("CROSSREDUCE_CUDA", "0 to use the frameworks' own operations")
    why = _why_missing() if is_used else "CROSSREDUCE_CUDA is 0"
    if why:
        _LOG.info("the CUDA kernels are not used (%s); the frameworks' own operations reduce arrays on GPUs", why)
    return why


@cache
def allows_peers() -> bool:
    """Return whether kernels may read the memory of other devices, where the driver can enable this.

    Raises:
      ArgumentError: the variable ``CROSSREDUCE_P2P`` is neither 0 nor 1.
    """
    return is_on("CROSSREDUCE_P2P", "0 to let the driver copy between devices")


def is_on(variable: str, remedy: str, default: str = "1") -> bool:
    """Return whether a variable is 1. Raise an ``ArgumentError`` with a ``remedy`` if it is not 0 either."""
    value = os.environ.get(variable, default)
    if value not in ("0", "1"):
        raise ArgumentError.of(f"{variable} must be 0 or 1.", shown(value), f"{variable}={remedy}")
    return value == "1"


def check_peer_reads(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Let each device read a pattern in the memory of each of its peers, and return the pairs that read it wrongly.

    A pair has the device that reads and the one that owns the memory. Devices without peer access to each other are
    left out, and so are all if ``CROSSREDUCE_P2P`` is 0.

    Raises:
      BackendError: there are no kernels for one of the devices.
      DriverError: the driver failed, for example since a read was refused; then no device can be used any more.
    """
    failing, kernel, words = [], copy_kernel("uint32"), _CHECKED_NBYTES // 4
    for reader in numbers if allows_peers() else ():
        load_kernels(reader)
        launch = {
            "device": 0, "kernel": kernel.name, "large": False, "sources": 1, "results": 1, "stack": 1, "divisor": 1.0,
            "kind": kernel.kind, "values": kernel.values, "units": kernel.units, "unit_nbytes": (4, 4),
            "orders": [(0, 0, 0, 0)], "parts": [(words, 0, ((0, 0), (1, 0)))],
        }  # fmt: skip
        plan = native().Plan(
            devices=(reader,), streams=[(0, -1)], scratch=(0,), operations=[(launch, None, 0, (), -1)], begins=(),
            ends=(), resumes=(), reads_peers=False,
        )  # fmt: skip
        for owner in numbers:
            if owner == reader or not native().enable_peer(reader, owner):
                continue
            if not native().reads_peer_rightly(plan, owner, _CHECKED_NBYTES):
                failing.append((reader, owner))
    return failing


def _why_missing() -> str:
    """Return the reason why the driver offers no CUDA device, or an empty string if it offers one."""
    module = native()
    if module is None:
        return "the compiled module was not built: install crossreduce with a C++ compiler"
    why: str = module.missing()
    return why or ("" if module.device_count() else "the CUDA driver has no device")


def devices() -> list[str]:
    """Return one line of text per device of the driver: its name, its capability, and the code that runs on it."""
    lines = []
    for number in range(native().device_count()):
        try:
            description = native().describe(number)
            capability = description["capability"]
            code = chosen_code(capability, description["driver"])
        except ReductionError as error:
            lines.append(f"cuda:{number} cannot be used: {' '.join(str(error).split())}")
        else:
            number_text = f"{capability // 10}.{capability % 10}"
            lines.append(f"cuda:{number} {description['name']}, capability {number_text}, kernels {code}")
    return lines


@cache
def accepts_large_tables(device: int) -> bool:
    """Return whether the parameters of a kernel on a device may have 32 KiB."""
    return bool(native().describe(device)["driver"] >= _LARGE_TABLES)


def load_kernels(device: int) -> None:
    """Load the kernels on a device, unless they are loaded already.

    Raises:
      BackendError: ``kernels.bin`` has no code for this device, or none that its driver can load.
      DriverError: the driver failed.
    """
    module = native()
    if not module.is_loaded(device):
        description = module.describe(device)
        module.load(device, _code(description["capability"], description["driver"]))


@cache
def lacks_kernels(device: int) -> str:
    """Return the reason why no kernels run on a device, or an empty string if they may."""
    try:
        load_kernels(device)
    except BackendError as error:
        why = str(error)
    except DriverError as error:
        why = str(error) if error.code in _NO_CODE else ""  # other failures are raised when the kernels are used
    else:
        why = ""
    if why:
        text = " ".join(why.split())
        _LOG.warning("the CUDA kernels are not used on cuda:%d, but the framework's own operations: %s", device, text)
    return why


@cache
def _code(capability: int, driver: int = PTX_DRIVER) -> bytes:
    """Return the machine code or the PTX for ``chosen_code``'s arguments, with a zero byte at the end."""
    try:
        lzma = importlib.import_module("lzma")  # which a Python that was built without liblzma lacks
    except ImportError as error:
        problem = "this Python cannot decompress the CUDA kernels."
        raise BackendError.of(problem, str(error), "build Python with liblzma (the headers of xz)") from error
    sizes, codes = _packed()
    names, name = list(sizes), chosen_code(capability, driver)
    start = sum(sizes[earlier] for earlier in names[: names.index(name)])
    return bytes(lzma.decompress(codes[start : start + sizes[name]])) + b"\0"


def _packed() -> tuple[dict[str, int], bytes]:
    """Return the size of each compressed code, by name, and the codes, one after another in the same order."""
    data = (resources.files(__package__) / "kernels.bin").read_bytes()
    first, rest = data.split(b"\n", 1)
    return json.loads(first)["code"], rest


def _error(call: str, device: int, code: int, name: str, text: str) -> DriverError:
    """Return the error for a failed call of the driver. ``device`` is its device, or -1 if that is not known."""
    where = "" if device < 0 else f" on cuda:{device}"
    remedy = "the error may come from an earlier operation of this process: run with CUDA_LAUNCH_BLOCKING=1"
    error = DriverError.of(f"the CUDA driver failed in {call}{where}.", f"{name} ({code}): {text}", remedy)
    error.call, error.device, error.code = call, device, code
    return error
