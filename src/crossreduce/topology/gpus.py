"""Kinds of GPUs, from data/gpus.json with its sources: their NVLinks or xGMI links, and their PCIe.

Input: a name, or the output of a program that contains names. Output: a ``GpuKind``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from ..errors import ArgumentError, shown
from .link_kinds import nvlink, read_data


class GpuKind(NamedTuple):
    """A kind of GPU. ``direct`` and ``switched`` are kinds of links, to another GPU and to a switch."""

    name: str
    pattern: str  # a regular expression for the names that programs print
    direct: str
    switched: str
    links: int  # NVLinks or xGMI links of a GPU; 0: it has none
    pcie: int  # the generation
    pair: int = 1  # the number of xGMI links that join two GPUs
    package: int = 0  # the number of xGMI links that join the two halves of a package, if a half is a device


# The lines with names: those of nvidia-smi -L (or "GPU 0,1: ..." in reports) and of nvidia-smi's table, and those of
# rocm-smi --showproductname.
_LINES: Final = (
    re.compile(r"GPU\s*[0-9]+(?:,\s*[0-9]+)*:\s*(.+?)\s*(?:\(UUID|$)"),
    re.compile(r"\|\s*[0-9]+\s+((?:NVIDIA|Tesla|Quadro|GeForce)\b.+?)\s+(?:On|Off)\b"),
    re.compile(r"Card (?:[Ss]eries|[Mm]odel)\s*:\s*(.+?)\s*$"),
    re.compile(r"(?:Device|Market)[_ ]Name\s*:\s*(.+?)\s*$", re.IGNORECASE),
)


def gpu_kind(name: object) -> GpuKind:
    """Return the kind of GPU with this name, such as "gb200" or "NVIDIA A100-SXM4-80GB".

    Raises:
      ArgumentError: the kind is not known.

    >>> [(kind.links, kind.direct) for kind in map(gpu_kind, ("gb200", "V100-SXM2", "MI300X"))]
    [(18, 'nvlink5'), (6, 'nvlink2'), (7, 'xgmi-mi300')]
    """
    kinds = _kinds()
    wanted = name.strip().lower() if isinstance(name, str) else ""
    for each in kinds:
        if wanted == each.name:
            return each
    for each in kinds if wanted else ():
        if re.search(each.pattern, wanted, re.IGNORECASE):
            return each
    raise ArgumentError.of("this kind of GPU is not known.", shown(name), ", ".join(each.name for each in kinds))


def gpu_in_text(text: str) -> GpuKind | None:
    """Return the kind of the GPUs that a text names, or ``None`` if it names none or only unknown ones.

    Raises:
      ArgumentError: the text names GPUs of several kinds.
    """
    found: dict[str, GpuKind] = {}
    for name in _names(text):
        for each in _kinds():
            if re.search(each.pattern, name, re.IGNORECASE):
                found.setdefault(each.name, each)
                break
    if len(found) > 1:
        problem = "the text names GPUs of several kinds, whose links have different speeds."
        raise ArgumentError.of(problem, ", ".join(found), f"one kind: --gpu {next(iter(found))}, or NCCL's XML")
    return next(iter(found.values()), None)


def _names(text: str) -> Iterator[str]:
    """Yield the names of GPUs in the output of nvidia-smi or rocm-smi."""
    for line in text.splitlines():
        for pattern in _LINES:
            if match := pattern.search(line):
                yield match[1]
                break


@lru_cache(maxsize=1)
def _kinds() -> tuple[GpuKind, ...]:
    kinds = []
    for entry in read_data()["gpus.json"]["gpus"]:
        direct, switched = nvlink(entry["sm"]) if "sm" in entry else (entry["xgmi"], entry["xgmi"])
        numbers = entry["links"], entry["pcie"], entry.get("pair", 1), entry.get("package", 0)
        kinds.append(GpuKind(entry["name"], entry["pattern"], direct, switched, *numbers))
    return tuple(kinds)
