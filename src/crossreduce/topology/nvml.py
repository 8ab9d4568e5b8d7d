"""NVML, the management library of NVIDIA's driver: the functions that ``discover.py`` calls, through ctypes.

Input: the file of the library, which the driver installs; no package is needed. Output: numbers and text. If a function
fails, or if an older driver does not have it, OSError is raised.

Source: signatures, the layout of ``nvmlPciInfo_t`` and constants are those of NVIDIA's nvml.h
(https://docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_char_p, c_int, c_uint, c_ulong, c_void_p
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"
MAX_LINKS: Final = 36  # NVML_NVLINK_MAX_LINKS of the newest driver; older ones return an error for links beyond theirs

_CPUS: Final = 4096  # a CPU mask has one bit for each
_BITS: Final = 8 * ctypes.sizeof(c_ulong)


class _Pci(ctypes.Structure):
    """``nvmlPciInfo_t``."""

    _fields_ = (
        ("busIdLegacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * 32),
    )


_Text: Final = c_char * 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE
_Mask: Final = c_ulong * (_CPUS // _BITS)

# For each function, the types of its arguments, and the types of the results to which it gets pointers. The length of a
# text is an argument after it, and the length of a mask is an argument before it.
_FUNCTIONS: Final[dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]] = {
    "nvmlInit_v2": ((), ()),
    "nvmlShutdown": ((), ()),
    "nvmlSystemGetDriverVersion": ((), (_Text,)),
    "nvmlDeviceGetCount_v2": ((), (c_uint,)),
    "nvmlDeviceGetHandleByIndex_v2": ((c_uint,), (c_void_p,)),
    "nvmlDeviceGetName": ((c_void_p,), (_Text,)),
    "nvmlDeviceGetUUID": ((c_void_p,), (_Text,)),
    "nvmlDeviceGetPciInfo_v3": ((c_void_p,), (_Pci,)),
    "nvmlDeviceGetCudaComputeCapability": ((c_void_p,), (c_int, c_int)),
    "nvmlDeviceGetMigMode": ((c_void_p,), (c_uint, c_uint)),
    "nvmlDeviceGetNvLinkState": ((c_void_p, c_uint), (c_uint,)),
    "nvmlDeviceGetNvLinkVersion": ((c_void_p, c_uint), (c_uint,)),
    "nvmlDeviceGetNvLinkRemoteDeviceType": ((c_void_p, c_uint), (c_uint,)),
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": ((c_void_p, c_uint), (_Pci,)),
    "nvmlDeviceGetTopologyCommonAncestor": ((c_void_p, c_void_p), (c_uint,)),
    "nvmlDeviceGetCpuAffinity": ((c_void_p,), (_Mask,)),
    "nvmlDeviceGetP2PStatus": ((c_void_p, c_void_p, c_uint), (c_uint,)),
    "nvmlDeviceGetMaxPcieLinkGeneration": ((c_void_p,), (c_uint,)),
    "nvmlDeviceGetMaxPcieLinkWidth": ((c_void_p,), (c_uint,)),
}


class Nvml:
    """NVML, loaded from a file.

    Raises:
      OSError: no library has this name.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of ``_FUNCTIONS``, and return its result, or a tuple of several results.

        PCI bus ids and other text are str, and a mask is an int.

        Raises:
          OSError: the library does not have the function, or the function returns an error.
        """
        types, results = _FUNCTIONS[function]
        outputs = [result() for result in results]
        passed: list[Any] = []
        for result in outputs:
            if isinstance(result, _Mask):
                passed += [c_uint(len(result)), result]
            elif isinstance(result, _Text):
                passed += [result, c_uint(len(result))]
            else:
                passed.append(byref(result))
        converted = [convert(argument) for convert, argument in zip(types, arguments, strict=True)]
        code = self._function(function)(*converted, *passed)
        if code:
            raise OSError(f"{function}: {self._error_text(code)}")
        values = [_value(result) for result in outputs]
        return values[0] if len(values) == 1 else tuple(values)

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError as error:
            raise OSError(f"this driver's NVML has no function {name}") from error

    def _error_text(self, code: int) -> str:
        try:
            explain = self._function("nvmlErrorString")
        except OSError:
            return f"error {code}"
        explain.restype, explain.argtypes = c_char_p, (c_int,)
        return f"{_text(explain(code) or b'an error')} ({code})"


def _value(result: Any) -> Any:
    """Return the result that NVML wrote to a variable of ``ctypes``, as a str or an int."""
    if isinstance(result, _Pci):
        return _text(result.busId).lower()
    if isinstance(result, _Mask):
        return sum(word << _BITS * k for k, word in enumerate(result))
    return _text(result.value) if isinstance(result, _Text) else result.value


def _text(value: bytes) -> str:
    return value.decode("ascii", "replace")
