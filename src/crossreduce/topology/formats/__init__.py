"""Topologies in files of any supported format. The content of a file determines its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ...errors import ArgumentError, shown
from ..links import Wiring
from .json_format import FORMAT, read_json
from .nccl_xml import read_nccl_xml
from .nvidia_smi import read_nvidia_smi

LARGEST: Final = 16 << 20  # bytes; the JSON of 1,024 GPUs on 128 hosts has 300,000
_FORMATS: Final = f"JSON of {FORMAT}, NCCL's topology XML, or the text of nvidia-smi topo -m"


def read_file(path: Any) -> bytes:
    """Return at most ``LARGEST`` + 1 bytes of a file. ArgumentError: ``path`` is not a path. OSError: reading fails."""
    try:
        with Path(path).open("rb") as file:
            return file.read(LARGEST + 1)
    except (TypeError, ValueError) as error:  # not a path, or one with a zero byte
        raise ArgumentError.of("this is not a path.", shown(path), '"topology.xml"') from error


def parse(data: bytes) -> Wiring:
    """Return the wiring in a file: JSON, NCCL's topology XML, or the text of ``nvidia-smi topo -m``.

    The table of nvidia-smi has no speeds. Each NVLink gets 25 GB/s, as on V100, A100 and H100, and PCIe links are taken
    as PCIe 3. For other speeds use ``Topology(*read_nvidia_smi(text, ...))``. If the format is unknown, or the data are
    malformed or truncated, an ArgumentError is raised.
    """
    if len(data) > LARGEST:
        given = f"a larger file, which begins with {shown(data[:40])}"
        raise ArgumentError.of(f"a file with a topology must have at most {LARGEST} bytes.", given, _FORMATS)
    # Windows PowerShell writes UTF-16 when the output of a program is redirected.
    is_utf_16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = data.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError.of("this is not text.", shown(data[:40]), _FORMATS) from error
    start = text.lstrip()[:1]
    if start == "{":
        return read_json(text)
    if start == "<":
        return read_nccl_xml(text)
    if "GPU" in text:
        return read_nvidia_smi(text)
    problem = "this is not a topology." if start else "the file is empty."
    raise ArgumentError.of(problem, shown(text[:80]), _FORMATS)
