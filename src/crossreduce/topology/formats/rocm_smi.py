"""The wiring in the tables that ``rocm-smi --showtopo`` and ``--shownodesbw``, or ``amd-smi topology``, print.

Input: the text, with the table of link types at least. Output: a ``Wiring`` of the GPUs in it, ``cuda:0`` for ``GPU0``,
as ROCm's builds of frameworks call them. amd-smi names GPUs by their PCI addresses, in the order of their numbers.

``XGMI`` joins two GPUs directly if their weight is 15; 30 and more stand for a path through other GPUs. ``PCIE`` joins
GPUs through one CPU (2 hops) or two (3 hops). The tables of ``--showtopo`` have neither speeds nor numbers of links:
they follow from the kind of GPU. Those of ``--shownodesbw`` and ``amd-smi topology`` have MB/s for every pair: a number
of links times a constant of the driver, which is 50,000 in older drivers for all GPUs, and in newer ones 64,000 from
MI300 on. So if the kind of GPU is known, they only determine the number of links.

Source: github.com/ROCm/rocm_smi_lib, README (python_smi_tools) and issue 108; github.com/ROCm/rocm-systems, issue 5763
and pull request 7372 (weights); github.com/torvalds/linux, drivers/gpu/drm/amd/amdgpu/amdgpu_amdkfd.c (25 GT/s for each
of 16 lanes) and amdgpu_xgmi.c (32 GT/s from MI300 on).
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from itertools import combinations
from typing import Final, NoReturn

from ...errors import ArgumentError, shown
from ..gpus import GpuKind
from ..link_kinds import kind
from ..links import Link, Wiring, both_ways
from .nvidia_smi import TableOptions, table_wiring
from .smi_table import clean_lines, without_log_prefix

LONGEST: Final = 1 << 18  # characters
# The tables by the words in their titles, and what their cells are. A cell on the diagonal is 0, N/A or True.
_TABLES: Final = {
    "weight": (re.compile(r"Weight between two GPUs|\bWEIGHT TABLE\b", re.IGNORECASE), re.compile(r"[0-9]{1,5}")),
    "hops": (re.compile(r"Hops between two GPUs|\bHOPS TABLE\b", re.IGNORECASE), re.compile(r"[0-9]{1,3}")),
    "type": (
        re.compile(r"Link Type between two GPUs|\bLINK TYPE TABLE\b", re.IGNORECASE),
        re.compile(r"XGMI|PCIE|0|N/A|SELF"),
    ),
    "access": (re.compile(r"accessibility between two GPUs", re.IGNORECASE), re.compile(r"True|False")),
    "speed": (
        re.compile(r"(?<!=)=+ *(?:\w+ )*Bandwidth[\w ]* *=+$|\bNUMA BW TABLE\b", re.IGNORECASE),
        re.compile(r"[0-9]+-[0-9]+|N/A|0"),
    ),
}  # fmt: skip
_ADDRESS: Final = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE)
_NUMA: Final = re.compile(r"GPU ?\[?([0-9]+)\]?\s*:\s*\(Topology\) Numa Node:\s*(-?[0-9]+)")
_DIRECT: Final = 15  # the weight of one xGMI hop
_OF_ONE_LINK: Final = (50_000, 64_000)  # MB/s that drivers state
_SHOW: Final = "the complete output of rocm-smi --showtopo or amd-smi topology"

Pair = tuple[int, int]


def is_rocm_smi(text: str) -> bool:
    """Return whether a text has a table of rocm-smi, or its list of NUMA nodes."""
    return "(Topology) Numa" in text or any(map(_is_title, text.splitlines()))


def _is_title(line: str) -> bool:
    return any(title.search(line) for title, _ in _TABLES.values())


def read_rocm_smi(text: str, options: TableOptions) -> Wiring:
    """Return the wiring in the text of ``rocm-smi --showtopo``, perhaps with that of ``--shownodesbw``.

    Raises:
      ArgumentError: a table is missing, truncated or inconsistent; the kind of GPU is not known, or has no xGMI; or an
        option is invalid.

    >>> text = '''
    ... ===== Link Type between two GPUs =====
    ...        GPU0    GPU1
    ... GPU0   0       XGMI
    ... GPU1   XGMI    0'''
    >>> read_rocm_smi(text, TableOptions(gpu="MI300X")).links[0].bandwidth
    Fraction(64, 1)
    """
    if len(text) > LONGEST:
        raise ArgumentError.of(f"the tables must have at most {LONGEST} characters.", f"{len(text)} characters", _SHOW)
    number = {address: k for k, address in enumerate(dict.fromkeys(_ADDRESS.findall(text)))}
    named = _ADDRESS.sub(lambda match: f"GPU{number[match[0]]}", text)
    lines = [without_log_prefix(line) for line in clean_lines(named)]
    names: list[int] = []
    tables: dict[str, dict[Pair, str]] = {}
    for k, line in enumerate(lines):
        for what, (title, cell) in _TABLES.items():
            if title.search(line):
                if what in tables:
                    _refuse(k, lines, "the text has this table twice.", "one file for each machine")
                found, tables[what] = _read(lines, k, cell)
                if names and found != names:
                    _refuse(k, lines, "the tables do not have the same GPUs.")
                names = found
    if "type" not in tables and "speed" not in tables:
        problem = "the text has no table of link types."
        raise ArgumentError.of(problem, ", ".join(tables) or shown(text), f"{_SHOW}, or --showtopotype")
    numa = {int(match[1]): match[2] for line in lines if (match := _NUMA.search(line))}
    return _wiring(text, options, names, tables, numa)


def _wiring(
    text: str, options: TableOptions, names: list[int], tables: dict[str, dict[Pair, str]], numa: dict[int, str]
) -> Wiring:
    """Return the wiring of GPUs, given their numbers, the tables by what they contain, and the GPUs' NUMA nodes."""
    gpu = options.kind_of_gpu(text)
    devices = [f"cuda:{number}" for number in names]
    fast, assumed = _xgmi(names, tables, gpu)

    def near(i: int, j: int) -> str:
        a, b = names[i], names[j]
        hops = tables.get("hops", {}).get((a, b))
        if hops in ("2", "3") and tables.get("type", {}).get((a, b)) == "PCIE":
            return "NODE" if hops == "2" else "SYS"
        if not numa:  # amd-smi does not state the NUMA nodes: GPUs that xGMI joins are taken to be at one CPU
            return "NODE" if tables.get("type", {}).get((a, b)) == "XGMI" else "SYS"
        return "NODE" if a in numa and numa.get(a) == numa.get(b) else "SYS"

    return table_wiring(devices, fast, near, [], options, gpu, assumed)


def _xgmi(names: list[int], tables: dict[str, dict[Pair, str]], gpu: GpuKind | None) -> tuple[list[Link], list[str]]:
    """Return the xGMI links, and what was assumed about them."""
    speeds, types, weights = (tables.get(what, {}) for what in ("speed", "type", "weight"))
    if gpu is not None and not gpu.direct.startswith("xgmi"):
        problem = "the tables of rocm-smi and amd-smi are those of GPUs of AMD."
        raise ArgumentError.of(problem, f"gpu={gpu.name}, which has no xGMI", "--gpu mi300x")
    latency = kind(gpu.direct if gpu else "xgmi-mi300").latency_s
    pairs = list(combinations(names, 2))
    links: list[Link] = []
    stated = {pair: int(speeds[pair].partition("-")[2] or 0) for pair in pairs if pair in speeds}
    stated = {pair: each for pair, each in stated.items() if each and types.get(pair, "XGMI") == "XGMI"}
    if stated or not types:  # drivers that do not know the speeds state 0-0 or N/A for all pairs
        found, assumed = _speeds(stated, gpu)
        for (a, b), speed in found.items():
            links += both_ways(f"cuda:{a}", f"cuda:{b}", speed, latency)
        return links, assumed
    joined = [pair for pair in pairs if types[pair] == "XGMI" and int(weights.get(pair, _DIRECT)) <= _DIRECT]
    if not joined:
        return [], []
    if gpu is None:
        problem = "the speed of xGMI depends on the kind of GPU, which the tables do not state."
        raise ArgumentError.of(
            problem, "no name of a GPU", "--gpu mi300x, or the output of rocm-smi --shownodesbw, too"
        )
    counts: Counter[str] = Counter()
    used: Counter[int] = Counter()
    for a, b in joined:
        is_package = gpu.package and a // 2 == b // 2
        number = gpu.package if is_package else gpu.pair
        counts[f"{number} in a package" if is_package else str(number)] += 1
        used.update({a: number, b: number})
        links += kind(gpu.direct).between(f"cuda:{a}", f"cuda:{b}", number, "raw")
    if max(used.values()) > gpu.links:
        given = f"{max(used.values())} links of one GPU in the tables, gpu={gpu.name}"
        raise ArgumentError.of(f"a {gpu.name} has {gpu.links} xGMI links.", given, "another kind of GPU")
    each = f"{float(kind(gpu.direct).raw):g} GB/s each between two {gpu.name}"
    text = f"{' or '.join(sorted(counts))} xGMI links of {each}; rocm-smi --shownodesbw states their number"
    return links, [text]


def _speeds(stated: dict[Pair, int], gpu: GpuKind | None) -> tuple[dict[Pair, Fraction], list[str]]:
    """Return GB/s by pair, given the MB/s that the driver states, and what was assumed about them.

    For a known kind of GPU, the MB/s divided by the driver's constant are the number of links.
    """
    speeds = {pair: Fraction(each, 1000) for pair, each in stated.items()}
    if not stated:
        return speeds, []
    if gpu is None:
        return speeds, ["the xGMI speeds that the driver states, which may be a constant; --gpu sets the kind"]
    raw = kind(gpu.direct).raw
    constants = set()
    for pair, each in stated.items():
        one = next((one for one in _OF_ONE_LINK if each % one == 0), None)
        if one is not None and one != raw * 1000:
            constants.add(one)
            speeds[pair] = each // one * raw
    words = " or ".join(f"{one // 1000}" for one in sorted(constants))
    text = f"{float(raw):g} GB/s for each xGMI link of a {gpu.name}; the driver states {words}, a constant"
    return speeds, [text] if constants else []


def _read(lines: list[str], title: int, cell: re.Pattern[str]) -> tuple[list[int], dict[Pair, str]]:
    """Return the numbers of the GPUs in the table below a title, and the cell of each two of them."""
    k = title + 1
    # Errors and warnings of rocm-smi may stand between a title and its table.
    while k < len(lines) and not re.match(r"GPU[0-9]", lines[k]) and not _is_title(lines[k]):
        k += 1
    head = lines[k].split() if k < len(lines) else []
    if not head or not all(re.fullmatch(r"GPU[0-9]{1,4}", word) for word in head):
        _refuse(title, lines, "below its title, a table must have the names of the GPUs.")
    names = [int(word[3:]) for word in head]
    cells: dict[Pair, str] = {}
    rows = 0
    for row in range(k + 1, len(lines)):
        words = lines[row].split()
        if not words or not re.sub("[:-]", "", "".join(words)):  # blank, or the rule of a Markdown table
            continue
        if not re.fullmatch(r"GPU[0-9]{1,4}", words[0]):
            break
        if rows == len(names) or words[0] != head[rows]:
            _refuse(row, lines, f"the rows must be those of {', '.join(head)}, in this order.")
        rows += 1
        if len(words) != len(names) + 1:
            _refuse(row, lines, f"the row of {words[0]} must have an entry for each of {len(names)} columns.")
        if unknown := [entry for entry in words[1:] if not cell.fullmatch(entry)]:
            problem = f"the row of {words[0]} has an entry that this table cannot have: {unknown[0]}."
            if unknown[0] == "XXXX":
                problem = f"rocm-smi does not know the link of {words[0]} (XXXX), which may be a part of a GPU."
            _refuse(row, lines, problem)
        cells |= {(int(words[0][3:]), name): word for name, word in zip(names, words[1:], strict=True)}
    if rows < len(names):
        _refuse(k, lines, f"the table does not have a row of {head[rows]}.")
    for (a, b), word in cells.items():
        if cells[b, a] != word:
            _refuse(k, lines, f"the entries of GPU{a} and GPU{b} differ: {word} and {cells[b, a]}.")
    return names, cells


def _refuse(line: int, lines: list[str], problem: str, remedy: str = _SHOW) -> NoReturn:
    raise ArgumentError.of(problem, f"line {line + 1}: {' '.join(lines[line].split())[:160]}", remedy)
