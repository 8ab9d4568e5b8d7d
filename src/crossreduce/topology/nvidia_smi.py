"""Read the table that ``nvidia-smi topo -m`` prints.

In: the text, with or without its underlining.  Out: a ``Topology`` of the GPUs in it, ``cuda:0`` for ``GPU0``.

The table says how each two GPUs are joined: ``NV#``, by # NVLinks; else how far PCIe goes: ``PIX`` and ``PXB`` to a
PCIe switch or through several, ``PHB`` and ``NODE`` to one CPU, ``SYS`` to another. It has no speeds, so they are
parameters and constants here. Where NVLinks do not join all GPUs there is also a tree of PCIe switches and CPUs,
``pcie0``, ``cpu0``; network cards only tell which GPUs share a switch.

Source: the legend below the table; https://docs.nvidia.com/deploy/nvidia-smi.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Final, NamedTuple, NoReturn

from ..errors import ArgumentError, message, shown
from .kinds import joins, kind
from .topology import Link, Switch, Topology

LONGEST: Final = 1 << 18  # characters; 72 GPUs and as many cards take 170,000

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU: Final = re.compile(r"GPU[0-9]{1,4}")
_NAME: Final = re.compile(r"[A-Za-z]\w*[0-9]")  # of a GPU or card: mlx5_0, NIC0
_CELL: Final = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC")  # SOC is what SYS was called until 2017
_NEAR: Final = (("pcie", {"PIX"}), ("pcie", {"PIX", "PXB"}), ("cpu", {"PIX", "PXB", "PHB", "NODE"}))
_SHOW: Final = "all that nvidia-smi topo -m prints, from the line with GPU0 on"

Slot = tuple[Fraction, str]
"""A PCIe link: how many times 16 lanes, of which kind."""


class _Row(NamedTuple):
    line: int
    cells: dict[str, str]
    cores: str


def read_nvidia_smi(
    text: str, *, nvlink_gb_per_s: float | Fraction = 25, nvlinks_per_gpu: int = 18, pcie: str = "pcie3"
) -> Topology:
    """Read the text of ``nvidia-smi topo -m``.

    A GPU's own NVLinks and those to an NVSwitch look alike: each two of 8 A100 are ``NV12``. They are told apart by
    counting. A GPU with more links in its row than it can have reaches its peers through a switch, ``nvswitch``, by as
    many links as its row's largest number. Three or four V100 of a DGX-2, ``NV6``, take ``nvlinks_per_gpu=6`` for that.

    Args:
      nvlink_gb_per_s: of one NVLink, one way: 20 on P100, 25 on V100, A100 and H100, 50 on B200, 14.0625 on RTX 3090.
      nvlinks_per_gpu: the most that a GPU has: 4 on P100 and RTX 3090, 6 on V100, 12 on A100, 18 on H100 and B200.
      pcie: the kind of all PCIe links, which have 16 lanes: "pcie3" to "pcie6". CPUs are joined by 10 GB/s, which
        NCCL counts on for Skylake.
    Raises:
      ArgumentError: the table is missing, cut short or contradicts itself, or a parameter cannot be.

    >>> table = '''
    ...         GPU0    GPU1    CPU Affinity
    ... GPU0     X      NV4     0-7
    ... GPU1    NV4      X      0-7'''
    >>> read_nvidia_smi(table, nvlink_gb_per_s=14.0625).link("cuda:0", "cuda:1").bandwidth
    Fraction(225, 4)
    """
    speed = _speed(nvlink_gb_per_s)
    if not isinstance(nvlinks_per_gpu, int) or isinstance(nvlinks_per_gpu, bool) or nvlinks_per_gpu < 1:
        raise ArgumentError(message("nvlinks_per_gpu is a number of links.", shown(nvlinks_per_gpu), "18"))
    if pcie not in ("pcie3", "pcie4", "pcie5", "pcie6"):
        raise ArgumentError(message("there is no such PCIe.", shown(pcie), '"pcie3", "pcie4", "pcie5" or "pcie6"'))
    names, rows = _table(text)
    gpus = [name for name in names if _GPU.fullmatch(name)]
    devices = [f"cuda:{int(name[3:])}" for name in gpus]
    fast = _nvlinks(devices, lambda i, j: _number(rows[gpus[i]].cells[gpus[j]]), speed, nvlinks_per_gpu)
    members = gpus + [name for name in names if name not in gpus]

    def near(i: int, j: int) -> str:
        a, b = rows.get(members[i]), rows.get(members[j])
        cell = a.cells[members[j]] if a else b.cells[members[i]] if b else ""
        if cell.startswith("NV"):  # what PCIe is there, the cores may tell
            return "NODE" if a and b and a.cores and a.cores == b.cores else ""
        return cell

    return wired(devices, fast, len(members), near, [(Fraction(1), pcie)] * len(gpus))


def wired(
    devices: Sequence[str], fast: list[Link], members: int, near: Callable[[int, int], str], slots: Sequence[Slot]
) -> Topology:
    """Return the topology of GPUs that NVLinks join, or else NVLinks and a tree of PCIe switches and CPUs.

    Args:
      devices: the GPUs, members 0 and up.
      fast: links of NVLink between them, or to switches.
      members: how many GPUs and, after them, network cards there are.
      near: of two members: PIX, PXB, PHB, NODE, SYS, or "" where it is not known.
      slots: each GPU's PCIe.
    """
    links = fast if joins(devices, fast) else [*fast, *_pcie_links(devices, members, near, slots)]
    switches = dict.fromkeys(node for link in links for node in link[:2] if node not in devices)
    return Topology(tuple(devices), tuple(links), tuple(map(Switch, switches)))


def _pcie_links(
    devices: Sequence[str], members: int, near: Callable[[int, int], str], slots: Sequence[Slot]
) -> list[Link]:
    links: list[Link] = []
    top = dict(enumerate(zip(devices, slots, strict=True)))  # the highest node over each GPU so far, and its way up
    count = {"pcie": 0, "cpu": 0}

    def within(codes: set[str]) -> Callable[[int, int], bool]:
        return lambda i, j: near(i, j) in codes

    def gather(switch: str, group: Iterable[int]) -> None:
        below = dict.fromkeys(top[k] for k in group)
        name = f"{switch}{count[switch]}"
        count[switch] += 1
        for node, (number, of) in below:
            links.extend(kind(of).both_ways(node, name, number, "raw"))
        widest = max((slot for _, slot in below), key=lambda slot: slot[0] * kind(slot[1]).raw)
        top.update(dict.fromkeys(group, (name, widest)))

    for switch, codes in _NEAR:
        for found in _groups(range(members), within(codes)):
            group = [k for k in found if k in top]
            if len({top[k] for k in group}) > 1:
                gather(switch, group)
    tops = dict.fromkeys(top.values())
    if len(tops) > 1:  # several CPUs, some of which may have a single GPU or switch
        for node in tops:
            if not node[0].startswith("cpu"):
                gather("cpu", [k for k in top if top[k] == node])
    for a, b in combinations(dict.fromkeys(name for name, _ in top.values()), 2):
        links += kind("cpu-skylake").both_ways(a, b, 1, "effective")
    return links


def _nvlinks(devices: Sequence[str], number: Callable[[int, int], int], speed: Fraction, most: int) -> list[Link]:
    """Return the NVLinks between devices, or to a switch where some device has more than ``most`` to its peers."""
    links: list[Link] = []
    switches = 0
    for group in _groups(range(len(devices)), lambda i, j: number(i, j) > 0):
        rows = {i: [number(i, j) for j in group if j != i] for i in group}
        if max(map(sum, rows.values())) > most:
            name = f"nvswitch{switches or ''}"
            switches += 1
            ends = [(devices[i], name, max(rows[i])) for i in group]
        else:
            ends = [(devices[i], devices[j], number(i, j)) for i, j in combinations(group, 2) if number(i, j)]
        latency = kind("nvlink2" if ends and ends[0][1] in devices else "nvswitch1").latency_s
        for a, b, count in ends:
            links += [Link(a, b, count * speed, latency), Link(b, a, count * speed, latency)]
    return links


def _groups(items: Iterable[int], joined: Callable[[int, int], bool]) -> list[list[int]]:
    """Return the items in groups, sorted, within which each is joined to another."""
    left, groups = list(items), []
    while left:
        group, front = [], [left.pop(0)]
        while front:
            here = front.pop()
            group.append(here)
            new = {item for item in left if joined(here, item)}
            front += new
            left = [item for item in left if item not in new]
        groups.append(sorted(group))
    return groups


def _table(text: str) -> tuple[list[str], dict[str, _Row]]:
    """Return the names of the columns, and the rows that there are; each GPU has one."""
    if not isinstance(text, str) or len(text) > LONGEST:
        given = shown(text) if not isinstance(text, str) else f"{len(text)} characters"
        raise ArgumentError(message(f"the table is text of at most {LONGEST} characters.", given, _SHOW))
    lines = [line.split() for line in _COLOURS.sub("", text).splitlines()]
    start = next((k for k, words in enumerate(lines) if _is_header(words)), None)
    if start is None:
        raise ArgumentError(message("there is no table of GPUs in this text.", shown(text), _SHOW))
    names = _columns(lines[start])
    if len(set(names)) < len(names):
        _refuse(start + 1, lines[start], "a column is in the table twice.")
    rows: dict[str, _Row] = {}
    for line, words in enumerate(lines[start + 1 :], start + 2):
        if words[:1] == ["Legend:"]:
            break
        if not words or words[0] not in names:
            continue
        cells = words[1 : len(names) + 1]
        if len(cells) < len(names) or not all(map(_CELL.fullmatch, cells)) or words[0] in rows:
            _refuse(
                line, words, f"the row of {words[0]} has one of X, NV#, PIX, PXB, PHB, NODE and SYS for each column."
            )
        cores = words[len(names) + 1] if len(words) > len(names) + 1 else ""
        rows[words[0]] = _Row(line, dict(zip(names, cells, strict=True)), cores if re.match("[0-9]", cores) else "")
    for name in names:
        if _GPU.fullmatch(name) and name not in rows:
            _refuse(start + 1, lines[start], f"the table has no row of {name}.")
    for a, row in rows.items():
        for b, cell in row.cells.items():
            if (cell == "X") != (a == b) or (b in rows and rows[b].cells[a] != cell):
                _refuse(row.line, lines[row.line - 1], f"{a} and {b} are joined in two ways.")
    return names, rows


def _columns(words: list[str]) -> list[str]:
    """Return a header's names, up to "CPU Affinity"."""
    return words[: next((k for k, word in enumerate(words) if word in ("CPU", "NUMA")), len(words))]


def _is_header(words: list[str]) -> bool:
    names = _columns(words)
    if not names or not _GPU.fullmatch(names[0]):
        return False
    return all(_NAME.fullmatch(name) and not _CELL.fullmatch(name) for name in names)


def _number(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _speed(value: object) -> Fraction:
    if isinstance(value, (int, float, Fraction)) and not isinstance(value, bool) and 0 < value < math.inf:
        return Fraction(value)
    raise ArgumentError(message("nvlink_gb_per_s is a number of GB/s above 0.", shown(value), "25"))


def _refuse(line: int, words: list[str], problem: str) -> NoReturn:
    raise ArgumentError(message(problem, f"line {line}: {' '.join(words)[:160]}", _SHOW))
