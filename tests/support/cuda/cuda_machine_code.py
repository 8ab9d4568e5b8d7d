"""The CUDA kernels' machine code, without a GPU: the packed file, and cubins (ELF)."""

from __future__ import annotations

import lzma
import re
import struct
from functools import cache

from crossreduce.engines.cuda import driver, kernels

# Attributes of kernels in .nv.info, and the format of values of any size.
REGISTERS, STACK, ANY_SIZE = 0x2F, 0x12, 0x04


@cache
def unpacked() -> dict[str, bytes]:
    """Return the code of each architecture in ``kernels.bin``: cubins, and PTX as bytes."""
    sizes, codes = driver._packed()
    code = {}
    for name, nbytes in sizes.items():
        code[name], codes = lzma.decompress(codes[:nbytes]), codes[nbytes:]
    assert not codes
    return code


def ptx() -> str:
    """Return the packed PTX."""
    return unpacked()[kernels.PTX].rstrip(b"\0").decode()


def bodies() -> dict[str, str]:
    """Return the body of each kernel in PTX."""
    pattern = r"\.visible \.entry (\w+)\([^)]+\)[^{]+\{\n(.*?)\n\}\n"
    return dict(re.findall(pattern, ptx(), re.DOTALL))


def resources(cubin: bytes) -> dict[str, dict[str, int]]:
    """Return for each kernel in a cubin the registers of a thread, and the bytes of its stack, calls included."""
    # The ELF header has the offset, size and number of the section headers, and the number of the section of names.
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    nbytes, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + k * nbytes) for k in range(count)]

    def text(strings: int, at: int) -> str:
        begin = headers[strings][4] + at
        return cubin[begin : cubin.index(b"\0", begin)].decode()

    found: dict[str, dict[str, int]] = {}
    sections = {text(names, header[0]): header for header in headers}
    symbols = sections[".symtab"]
    at, end = sections[".nv.info"][4], sections[".nv.info"][4] + sections[".nv.info"][5]
    while at < end:
        kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
        if kind == ANY_SIZE and attribute in (REGISTERS, STACK):
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            key = "registers" if attribute == REGISTERS else "stack"
            found.setdefault(text(symbols[6], name), {})[key] = value
        at += 4 + (size if kind == ANY_SIZE else 0)
    return {name: values for name, values in found.items() if "registers" in values}  # not subroutines
