"""Load a topology from a file of any known kind.

In: a path.  Out: a ``Topology``.  What the file is, its first characters tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError, message, shown
from .nccl_xml import read_nccl_xml
from .nvidia_smi import read_nvidia_smi
from .topology import FORMAT, Topology

LARGEST: Final = 16 << 20  # bytes; our JSON of 1,024 GPUs on 128 hosts has 300,000
_KINDS: Final = f"JSON of {FORMAT}, NCCL's topology XML, or the text of nvidia-smi topo -m"


def load(path: Any) -> Topology:
    """Read a topology from a file: our JSON, NCCL's topology XML, or the text of ``nvidia-smi topo -m``.

    NVLinks and PCIe have the speed that they are built for, as far as a file says what they are; where it does not,
    that of V100, A100 and H100, and of PCIe 3: call ``read_nvidia_smi`` for others.

    Raises:
      ArgumentError: a file of no such kind, malformed or truncated, or one that lacks devices or links.
      OSError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except (TypeError, ValueError) as error:  # no path at all, or one with a zero byte
        raise ArgumentError(message("this is no path.", shown(path), '"topology.xml"')) from error
    try:
        return _read(data)
    except ArgumentError as error:
        error.prefix(str(path))
        raise


def _read(data: bytes) -> Topology:
    if len(data) > LARGEST:
        raise ArgumentError(message(f"a topology's file has at most {LARGEST} bytes.", "more", _KINDS))
    # Windows PowerShell writes UTF-16 where a program's output is redirected.
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(message("this is no text.", shown(data[:40]), _KINDS)) from error
    start = text.lstrip()[:1]
    if start == "{":
        return Topology.from_json(text)
    if start == "<":
        return read_nccl_xml(text)
    if "GPU" in text:
        return read_nvidia_smi(text)
    raise ArgumentError(message("this is no topology." if start else "the file is empty.", shown(text[:80]), _KINDS))
