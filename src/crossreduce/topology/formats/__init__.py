"""Topologies in files of any supported format. The content of a file determines its format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import ArgumentError, shown
from ..links import Wiring
from .json_format import FORMAT, read_json

if TYPE_CHECKING:
    from .nvidia_smi import TableOptions

LARGEST: Final = 16 << 20  # bytes; the JSON of 1,024 GPUs on 128 hosts has 300,000
_FORMATS: Final = (
    f"JSON of {FORMAT}, NCCL's topology XML, or the text of nvidia-smi topo -m, rocm-smi --showtopo or amd-smi topology"
)


def read_file(path: Any) -> bytes:
    """Return at most ``LARGEST`` + 1 bytes of a file. ArgumentError: ``path`` is not a path. OSError: reading fails."""
    try:
        with Path(path).open("rb") as file:
            return file.read(LARGEST + 1)
    except (TypeError, ValueError) as error:  # not a path, or one with a zero byte
        raise ArgumentError.of("this is not a path.", shown(path), '"topology.xml"') from error


def parse(data: bytes, options: TableOptions | None = None) -> Wiring:
    """Return the wiring in a file: JSON, NCCL's topology XML, or the text of ``nvidia-smi topo -m`` or ``rocm-smi``.

    Tables of these programs have no speeds: ``options`` has what is known about the machine. If the format is unknown,
    the data are malformed or truncated, or a file that has speeds is given with options, an ArgumentError is raised.
    """
    if len(data) > LARGEST:
        given = f"a larger file, which begins with {shown(data[:40])}"
        raise ArgumentError.of(f"a file with a topology must have at most {LARGEST} bytes.", given, _FORMATS)
    text = _text(data)
    # Loaded with the first file, since ``import crossreduce`` loads this package.
    from .nccl_xml import read_nccl_xml
    from .nvidia_smi import NOT_STATED, read_nvidia_smi
    from .rocm_smi import is_rocm_smi, read_rocm_smi

    options = options or NOT_STATED
    start = text.lstrip()[:1]
    if start in ("{", "<") and options != NOT_STATED:
        given = ", ".join(f"{name}={value}" for name, value in options._asdict().items() if value not in (None, 1))
        raise ArgumentError.of("this file states the speeds of its links itself.", given, "the file without options")
    if start in ("{", "[") and ('"link_type"' in text or "(Topology)" in text):
        problem = "this is the JSON of amd-smi or rocm-smi, which is not read."
        raise ArgumentError.of(problem, shown(text[:80]), "their text: amd-smi topology, without --json")
    if start == "{":
        return read_json(text)
    if start == "<":
        return read_nccl_xml(text)
    if is_rocm_smi(text):
        return read_rocm_smi(text, options)
    if "GPU" in text:
        return read_nvidia_smi(text, options)
    problem = "this is not a topology." if start else "the file is empty."
    raise ArgumentError.of(problem, shown(text[:80]), _FORMATS)


def is_table(path: Any) -> bool:
    """Return whether a file is a table. Its errors are those of ``parse``."""
    return _text(read_file(path)).lstrip()[:1] not in ("{", "<")


def _text(data: bytes) -> str:
    """Return the text of a file. A table of GPUs loses the marks of what quotes it."""
    # Windows PowerShell writes UTF-16 when the output of a program is redirected.
    is_utf_16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        return _without_markup(data.decode("utf-16" if is_utf_16 else "utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ArgumentError.of("this is not text.", shown(data[:40]), _FORMATS) from error


def _without_markup(text: str) -> str:
    """Return a table of GPUs without the tags of HTML, or the quotes and escapes of JSON and Python."""
    if text.lstrip().startswith("<") and "GPU0" in text and "<system" not in text:
        return re.sub(r"<[^<>]*>|&nbsp;", " ", re.sub(r"</tr>|<br ?/?>", "\n", text))
    if "\\tGPU0" in text:
        text = re.sub(r"""\\n|["'],\s*["']""", "\n", text.replace("\\tGPU0", "\n\\tGPU0", 1))
        return re.sub(r"""[]["'{}]""", " ", text.replace("\\t", "\t"))
    return text
