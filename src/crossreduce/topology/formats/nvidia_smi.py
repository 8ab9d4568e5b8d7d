"""The table that ``nvidia-smi topo -m`` prints.

Input: the text, with or without its underlining. Output: a ``Wiring`` of the GPUs in it, ``cuda:0`` for ``GPU0``.

The table has an entry for every two GPUs. ``NV#`` means that # NVLinks join them. Other entries name the part of PCIe
that joins them: ``PIX`` one PCIe switch, ``PXB`` several, ``PHB`` and ``NODE`` one CPU, ``SYS`` several CPUs. The table
has no speeds, so these are parameters and constants here. If NVLinks do not join all GPUs, the wiring includes trees of
PCIe switches (``pcie0``) below CPUs (``cpu0``), which are linked. Network cards only show which GPUs share a switch.

Source: the legend below the table; https://docs.nvidia.com/deploy/nvidia-smi.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Final, NamedTuple, NoReturn

from ...errors import ArgumentError, shown
from ..link_kinds import kind
from ..links import Link, Wiring, both_ways
from ..routes import groups, is_connected

LONGEST: Final = 1 << 18  # characters; a table of 72 GPUs and 72 NICs has 170,000

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU: Final = re.compile(r"GPU[0-9]{1,4}")
_NAME: Final = re.compile(r"[A-Za-z]\w*[0-9]")  # the name of a GPU or NIC: mlx5_0, NIC0
_CELL: Final = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC")  # SOC is what SYS was called until 2017
# The levels of the PCIe tree, lowest first: the kind of their nodes, and the entries of GPUs below one such node.
_NEAR: Final = (("pcie", {"PIX"}), ("pcie", {"PIX", "PXB"}), ("cpu", {"PIX", "PXB", "PHB", "NODE"}))
_SHOW: Final = "the complete output of nvidia-smi topo -m, from the line with GPU0"

Slot = tuple[Fraction, str]  # a PCIe link: its width divided by 16, and its kind


class _Row(NamedTuple):
    line: int  # in the text, for errors
    cells: dict[str, str]  # by column
    cores: str  # the CPU affinity, or ""


def read_nvidia_smi(
    text: str, *, nvlink_gb_per_s: float | Fraction = 25, nvlinks_per_gpu: int = 18, pcie: str = "pcie3"
) -> Wiring:
    """Return the wiring in the text of ``nvidia-smi topo -m``.

    The table does not distinguish NVLinks between GPUs from NVLinks to an NVSwitch: any two of 8 A100 have ``NV12``.
    So the numbers in a GPU's row are added up. If a sum exceeds ``nvlinks_per_gpu``, all GPUs that NVLinks join with
    this one are linked to a switch, ``nvswitch``, each by as many links as the largest number in its row. Three or four
    V100 of a DGX-2 (``NV6``) have sums of only 12 or 18: set ``nvlinks_per_gpu=6``.

    Args:
      text: the output of the command.
      nvlink_gb_per_s: the speed of one NVLink, in one direction: 20 on P100, 25 on V100, A100 and H100, 50 on B200,
        14.0625 on RTX 3090.
      nvlinks_per_gpu: the largest number of NVLinks of a GPU: 4 on P100 and RTX 3090, 6 on V100, 12 on A100, 18 on H100
        and B200.
      pcie: the kind of all PCIe links, which are x16: "pcie3" to "pcie6". Links between CPUs have 10 GB/s, which
        NCCL assumes for Skylake.
    Raises:
      ArgumentError: the table is missing, truncated or inconsistent, or a parameter is invalid.

    >>> table = '''
    ...         GPU0    GPU1    CPU Affinity
    ... GPU0     X      NV4     0-7
    ... GPU1    NV4      X      0-7'''
    >>> read_nvidia_smi(table, nvlink_gb_per_s=14.0625).links[0].bandwidth
    Fraction(225, 4)
    """
    valid = isinstance(nvlink_gb_per_s, (int, float, Fraction)) and not isinstance(nvlink_gb_per_s, bool)
    if not valid or not 0 < nvlink_gb_per_s < math.inf:
        raise ArgumentError.of("nvlink_gb_per_s must be a finite number of GB/s above 0.", shown(nvlink_gb_per_s), "25")
    speed = Fraction(nvlink_gb_per_s)
    if not isinstance(nvlinks_per_gpu, int) or isinstance(nvlinks_per_gpu, bool) or nvlinks_per_gpu < 1:
        raise ArgumentError.of("nvlinks_per_gpu must be a whole number of links above 0.", shown(nvlinks_per_gpu), "18")
    if pcie not in ("pcie3", "pcie4", "pcie5", "pcie6"):
        raise ArgumentError.of("this kind of PCIe is not known.", shown(pcie), '"pcie3", "pcie4", "pcie5" or "pcie6"')
    names, rows = _table(text)
    gpus = [name for name in names if _GPU.fullmatch(name)]
    devices = [f"cuda:{int(name[3:])}" for name in gpus]
    fast = _nvlinks(devices, lambda i, j: _number(rows[gpus[i]].cells[gpus[j]]), speed, nvlinks_per_gpu)
    members = gpus + [name for name in names if name not in gpus]

    def near(i: int, j: int) -> str:
        """Return which part of PCIe joins two members, or "" if the table does not say so."""
        a, b = rows.get(members[i]), rows.get(members[j])
        cell = a.cells[members[j]] if a else b.cells[members[i]] if b else ""
        if cell.startswith("NV"):  # GPUs with the same CPU affinity are at one CPU
            return "NODE" if a and b and a.cores and a.cores == b.cores else ""
        return cell

    return gpu_wiring(devices, fast, len(members), near, [(Fraction(1), pcie)] * len(gpus))


def gpu_wiring(
    devices: Sequence[str], fast: list[Link], members: int, near: Callable[[int, int], str], slots: Sequence[Slot]
) -> Wiring:
    """Return the wiring of GPUs: NVLinks, and a tree of PCIe switches and CPUs if NVLinks do not join all of them.

    Args:
      devices: the GPUs.
      fast: the NVLinks, which may lead to switches.
      members: the number of GPUs and network cards; the GPUs come first.
      near: returns for two members PIX, PXB, PHB, NODE, SYS, or "" if it is not known.
      slots: the PCIe link of each GPU.
    """
    links = fast if is_connected(devices, fast) else [*fast, *_pcie_links(devices, members, near, slots)]
    return Wiring.of(devices, links)


def _pcie_links(
    devices: Sequence[str], members: int, near: Callable[[int, int], str], slots: Sequence[Slot]
) -> list[Link]:
    """Return the links of the PCIe tree: GPUs are joined under switches and CPUs, the nearest ones first."""
    links: list[Link] = []
    # The highest node above each GPU so far, and its link upwards.
    top = dict(enumerate(zip(devices, slots, strict=True)))
    count = {"pcie": 0, "cpu": 0}

    def join(switch: str, group: Iterable[int]) -> None:
        """Add a node of the kind ``switch`` above the highest nodes of some GPUs."""
        below = dict.fromkeys(top[k] for k in group)
        name = f"{switch}{count[switch]}"
        count[switch] += 1
        for node, (width, pcie) in below:
            links.extend(kind(pcie).between(node, name, width, "raw"))
        widest = max((slot for _, slot in below), key=lambda slot: slot[0] * kind(slot[1]).raw)
        top.update(dict.fromkeys(group, (name, widest)))

    for switch, codes in _NEAR:
        pairs = [pair for pair in combinations(range(members), 2) if near(*pair) in codes]
        for neighbours in groups(range(members), pairs):
            group = [k for k in neighbours if k in top]
            if len({top[k] for k in group}) > 1:
                join(switch, group)
    tops = dict.fromkeys(top.values())
    if len(tops) > 1:  # several CPUs; those with only one GPU or switch still lack a node
        for node in tops:
            if not node[0].startswith("cpu"):
                join("cpu", [k for k in top if top[k] == node])
    for a, b in combinations(dict.fromkeys(name for name, _ in top.values()), 2):
        links += kind("cpu-skylake").between(a, b, 1, "effective")
    return links


def _nvlinks(devices: Sequence[str], link_count: Callable[[int, int], int], speed: Fraction, most: int) -> list[Link]:
    """Return the NVLinks between devices, or to a switch for each group in which a row's sum exceeds ``most``."""
    links: list[Link] = []
    switches = 0
    pairs = [pair for pair in combinations(range(len(devices)), 2) if link_count(*pair)]
    for group in groups(range(len(devices)), pairs):
        rows = {i: [link_count(i, j) for j in group if j != i] for i in group}
        if max(map(sum, rows.values())) > most:
            name = f"nvswitch{switches or ''}"
            switches += 1
            ends = [(devices[i], name, max(rows[i])) for i in group]
        else:
            ends = [(devices[i], devices[j], link_count(i, j)) for i, j in combinations(group, 2) if link_count(i, j)]
        latency = kind("nvlink2" if ends and ends[0][1] in devices else "nvswitch1").latency_s
        for a, b, count in ends:
            links += both_ways(a, b, count * speed, latency)
    return links


def _table(text: str) -> tuple[list[str], dict[str, _Row]]:
    """Return the names of the columns (GPUs and NICs), and the rows by name. Every GPU has a row."""
    if not isinstance(text, str) or len(text) > LONGEST:
        given = shown(text) if not isinstance(text, str) else f"{len(text)} characters"
        raise ArgumentError.of(f"the table must be text of at most {LONGEST} characters.", given, _SHOW)
    lines = [line.split() for line in _COLOURS.sub("", text).splitlines()]
    start = next((k for k, words in enumerate(lines) if _is_header(words)), None)
    if start is None:
        raise ArgumentError.of("this text does not contain a table of GPUs.", shown(text), _SHOW)
    names = _columns(lines[start])
    if len(set(names)) < len(names):
        _refuse(start + 1, lines[start], "a column appears twice in the table.")
    rows: dict[str, _Row] = {}
    for line, words in enumerate(lines[start + 1 :], start + 2):
        if words[:1] == ["Legend:"]:
            break
        if not words or words[0] not in names:
            continue
        cells = words[1 : len(names) + 1]
        if words[0] in rows:
            _refuse(line, words, f"the table has a second row of {words[0]}.")
        if len(cells) < len(names) or not all(map(_CELL.fullmatch, cells)):
            _refuse(line, words, f"the row of {words[0]} must have X, NV#, PIX, PXB, PHB, NODE or SYS for each column.")
        cores = words[len(names) + 1] if len(words) > len(names) + 1 else ""
        rows[words[0]] = _Row(line, dict(zip(names, cells, strict=True)), cores if re.match("[0-9]", cores) else "")
    for name in names:
        if _GPU.fullmatch(name) and name not in rows:
            _refuse(start + 1, lines[start], f"the table does not have a row of {name}.")
    for a, row in rows.items():
        for b, cell in row.cells.items():
            words = lines[row.line - 1]
            other = rows[b].cells[a] if b in rows else cell  # network cards may have no rows
            if other != cell:
                _refuse(row.line, words, f"the entries of {a} and {b} differ: {cell} and, in the row of {b}, {other}.")
            if (cell == "X") != (a == b):
                _refuse(row.line, words, f"the entry of {a} and {b} must {'be' if a == b else 'not be'} X.")
    return names, rows


def _columns(words: list[str]) -> list[str]:
    """Return the words of a header before "CPU Affinity"."""
    return words[: next((k for k, word in enumerate(words) if word in ("CPU", "NUMA")), len(words))]


def _is_header(words: list[str]) -> bool:
    names = _columns(words)
    if not names or not _GPU.fullmatch(names[0]):
        return False
    return all(_NAME.fullmatch(name) and not _CELL.fullmatch(name) for name in names)


def _number(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _refuse(line: int, words: list[str], problem: str) -> NoReturn:
    raise ArgumentError.of(problem, f"line {line}: {' '.join(words)[:160]}", _SHOW)
