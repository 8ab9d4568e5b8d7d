"""The CUDA kernels' machine code, without a GPU: the packed file, cubins (ELF), and nvdisasm's listing."""

from __future__ import annotations

import importlib.util
import json
import lzma
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from paths import ROOT

PACKED = ROOT / "src/crossreduce/engines/cuda/kernels.bin"
# Attributes of kernels in .nv.info, and the format of values of any size.
REGISTERS, STACK, ANY_SIZE = 0x2F, 0x12, 0x04


def unpacked(path: Path = PACKED) -> tuple[dict, dict[str, bytes]]:
    """Return the header of the packed file, and the code of each architecture: cubins, and PTX as bytes."""
    line, rest = path.read_bytes().split(b"\n", 1)
    header = json.loads(line)
    code, start = {}, 0
    for name, nbytes in header["code"].items():
        code[name] = lzma.decompress(rest[start : start + nbytes])
        start += nbytes
    assert start == len(rest)
    return header, code


def ptx() -> str:
    """Return the packed PTX."""
    (text,) = (code for name, code in unpacked()[1].items() if name.startswith("compute_"))
    return text.rstrip(b"\0").decode()


def resources(cubin: bytes) -> dict[str, dict[str, int]]:
    """Return for each kernel in a cubin how many registers a thread has, and the bytes of its stack, calls included."""
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


def nvdisasm() -> str | None:
    """Return the program nvdisasm of its wheel or of a CUDA toolkit, or None."""
    namespace = importlib.util.find_spec("nvidia")  # of NVIDIA's wheels
    folders = (namespace.submodule_search_locations if namespace else None) or ()
    found = [str(path) for each in folders for path in Path(each).glob("*/bin/nvdisasm")]
    return found[0] if found else shutil.which("nvdisasm")


def listing(cubin: bytes, program: str) -> dict[str, list[str]]:
    """Return the instructions of each kernel in a cubin, in order, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True)
    sections = re.split(r"^\.text\.(\w+):$", done.stdout, flags=re.MULTILINE)
    return {
        name: re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", body, re.MULTILINE)
        for name, body in zip(sections[1::2], sections[2::2], strict=True)
    }


def loads(instructions: list[str]) -> dict[str, int]:
    """Return what the loads of a kernel are like.

    ``widest`` and ``stored``: the most bytes that are loaded and stored at once; ``ahead``: how many of the widest
    loads precede, without a branch, the first use of a loaded value; ``spills``: loads and stores of local memory;
    ``constant``: loads through the cache for memory that does not change.
    """

    def width(opcode: str) -> int:
        found = re.search(r"\.(?:[US]?(8|16)|(64|128))(?:\.|$)", opcode)
        return int(found[1] or found[2]) // 8 if found else 4

    parsed = [re.fullmatch(r"(?:@!?\w+ )?([A-Z][\w.]*)\s*(.*)", each).groups() for each in instructions]
    reads = [(k, width(op), rest) for k, (op, rest) in enumerate(parsed) if op.split(".")[0] in ("LDG", "LD")]
    widest = max(nbytes for _, nbytes, _ in reads)
    ahead = now = 0
    loaded: set[int] = set()
    for op, rest in parsed:
        name = op.split(".")[0]
        used = {int(register) for register in re.findall(r"\bR(\d+)\b", rest)}
        if name in ("LDG", "LD") and width(op) == widest:
            first = int(re.match(r"R(\d+)", rest)[1])
            loaded |= set(range(first, first + widest // 4)) if widest >= 4 else {first}
            now += 1
            ahead = max(ahead, now)
        elif used & loaded or name in ("BRA", "EXIT", "RET"):
            loaded, now = set(), 0
    stores = [width(op) for op, _ in parsed if op.split(".")[0] in ("STG", "ST")]
    return {
        "spills": sum(op.split(".")[0] in ("LDL", "STL") for op, _ in parsed),
        "widest": widest,
        "ahead": ahead,
        "stored": max(stores),
        "generic": sum(op.split(".")[0] in ("LD", "ST") for op, _ in parsed),
        "constant": sum("CONSTANT" in op or ".NC" in op or ".CI" in op for op, _ in parsed if op.startswith("LD")),
    }
