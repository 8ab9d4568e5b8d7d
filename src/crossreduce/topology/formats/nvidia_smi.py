"""The wiring in the table that ``nvidia-smi topo -m`` prints.

Input: the text, with or without its underlining. Output: a ``Wiring`` of the GPUs in it, ``cuda:0`` for ``GPU0``.

The table has an entry for every two GPUs. ``NV#`` means that # NVLinks join them. Other entries name the part of PCIe
that joins them: ``PIX`` one PCIe switch, ``PXB`` several, ``PHB`` and ``NODE`` one CPU, ``SYS`` several CPUs. The table
has no speeds: they follow from the kind of GPU, from parameters, or from assumptions, which the wiring lists. If
NVLinks do not join all GPUs, the wiring includes trees of PCIe switches (``pcie0``) below CPUs (``cpu0``), which are
linked. Network cards show which GPUs share a switch, and join several hosts.

Source: the legend below the table; https://docs.nvidia.com/deploy/nvidia-smi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Final, NamedTuple

from ...errors import ArgumentError, shown
from ..gpus import GpuKind, gpu_in_text, gpu_kind
from ..link_kinds import kind
from ..links import Link, Wiring, both_ways
from ..network import is_next_to, join_hosts, network_cards
from ..routes import groups, is_connected
from .smi_table import GPU, Table, read_table

# The levels of the PCIe tree, lowest first: the kind of their nodes, and the entries of GPUs below one such node.
_NEAR: Final = (("pcie", {"PIX"}), ("pcie", {"PIX", "PXB"}), ("cpu", {"PIX", "PXB", "PHB", "NODE"}))
_LEVELS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")  # the entries for network cards, nearest first

Slot = tuple[Fraction, str]  # a PCIe link: its width divided by 16, and its kind


class TableOptions(NamedTuple):
    """What a table of GPUs does not state; ``None`` if it is not known."""

    gpu: str | None = None  # the kind of GPU
    pcie: int | str | None = None  # the generation of PCIe, x16
    between_cpus: float | Fraction | None = None  # GB/s of the links between CPUs
    hosts: int = 1  # the number of equal machines, joined by their network cards
    nics: str | float | None = None  # the speed of a network card in Gb/s, or its kind

    def kind_of_gpu(self, text: str) -> GpuKind | None:
        """Return the kind of GPU that ``gpu`` or a text names, or ``None``."""
        return gpu_in_text(text) if self.gpu is None else gpu_kind(self.gpu)

    def pcie_kind(self, gpu: GpuKind | None) -> tuple[str, list[str]]:
        """Return the kind of PCIe links, and the assumption if it was not given."""
        if self.pcie is None:
            name = f"pcie{3 if gpu is None else gpu.pcie}"
            because = "" if gpu is None else f" as on the {gpu.name}"
            return name, [f"PCIe {name[4:]} x16{because}, {_number(kind(name).raw)} GB/s for each GPU; --pcie sets it"]
        name = str(self.pcie).removeprefix("pcie")
        if name not in ("3", "4", "5", "6") or isinstance(self.pcie, bool):
            raise ArgumentError.of("this generation of PCIe is not known.", shown(self.pcie), "3, 4, 5 or 6")
        return f"pcie{name}", []

    def cpu_links(self) -> tuple[Fraction, list[str]]:
        """Return the GB/s of the links between CPUs, and the assumption if they were not given."""
        if self.between_cpus is not None:
            return _speed(self.between_cpus), []
        assumed = kind("cpu-skylake").effective
        return assumed, [f"{_number(assumed)} GB/s between CPUs; --between-cpus sets it"]


NOT_STATED: Final = TableOptions()


def read_nvidia_smi(text: str, options: TableOptions = NOT_STATED) -> Wiring:
    """Return the wiring in the text of ``nvidia-smi topo -m``.

    The table does not distinguish NVLinks between GPUs from NVLinks to an NVSwitch: any two of 8 A100 have ``NV12``.
    So the numbers in a GPU's row are added up. If a sum exceeds the NVLinks that a GPU has, all GPUs that NVLinks join
    with this one are linked to a switch, ``nvswitch``, each by as many links as the largest number in its row. Three
    or four V100 of a DGX-2 (``NV6``) have sums of only 12 or 18, so the kind of GPU must be known to read them.

    Args:
      text: the output of the command. The output of ``nvidia-smi -L`` before it names the kind of GPU.
      options: the kind of GPU, the speeds of PCIe and of links between CPUs, and the number of hosts. If the kind is
        not known, up to 18 NVLinks of 25 GB/s are assumed, as on H100.
    Raises:
      ArgumentError: the table is missing, truncated or inconsistent, or a parameter is invalid.

    >>> table = '''
    ...         GPU0    GPU1    CPU Affinity
    ... GPU0     X      NV4     0-7
    ... GPU1    NV4      X      0-7'''
    >>> read_nvidia_smi(table, TableOptions(gpu="RTX 3090")).links[0].bandwidth
    Fraction(225, 4)
    >>> read_nvidia_smi(table).assumed
    ('4 NVLinks of 25 GB/s each between GPUs; --gpu sets it',)
    """
    table = read_table(text)
    gpu = options.kind_of_gpu(text)
    gpus = [name for name in table.names if GPU.fullmatch(name)]
    devices = [f"cuda:{int(name[3:])}" for name in gpus]
    most = 18 if gpu is None else gpu.links
    links, switches, largest = _nvlinks(devices, lambda i, j: _count(table, gpus[i], gpus[j]), most)
    _check_switches(table, gpus, links)
    if gpu is not None and largest > most:
        given = f"{largest} NVLinks of one GPU in the table, gpu={gpu.name}"
        raise ArgumentError.of(f"a {gpu.name} has {most} NVLinks.", given, "another kind of GPU")
    fast = _at_speed(links, gpu)
    where = f"to {'NVSwitches' if switches > 1 else 'an NVSwitch'}" if switches else "between GPUs"
    assumed = [f"{largest} NVLinks of 25 GB/s each {where}; --gpu sets it"] if fast and gpu is None else []
    if gpu is not None and gpu.links and len(gpus) > 1 and not fast:
        assumed = [f"no NVLinks, as in the table; the {gpu.name} can have {gpu.links}"]
    others = [name for name in table.names if name not in gpus]
    return table_wiring(devices, fast, _near(table, gpus + others), others, options, gpu, assumed)


def table_wiring(
    devices: Sequence[str],
    fast: list[Link],
    near: Callable[[int, int], str],
    listed: Sequence[str],
    options: TableOptions,
    gpu: GpuKind | None,
    assumed: list[str],
) -> Wiring:
    """Return the wiring of one host or of several equal ones, and what was assumed about it.

    Args:
      devices: the GPUs of the table.
      fast: their NVLinks or xGMI links.
      near: as in ``gpu_wiring``; GPUs come first, and then the cards of the table.
      listed: the network cards of the table.
      options: what the table does not state.
      gpu: the kind of GPU, if it is known.
      assumed: what was assumed about ``fast``.
    """
    pcie, pcie_assumed = options.pcie_kind(gpu)
    between_cpus, cpus_assumed = options.cpu_links()
    cards = network_cards(options.nics, options.hosts, listed) if options.hosts != 1 else None
    names = listed if cards is None else cards.names
    has_tree = not is_connected(devices, fast)
    if cards is not None and not listed:
        near = _with_cards(near, len(devices), len(names), "PHB" if has_tree else "PIX")
    leaves = list(names) if cards and has_tree else []
    slots = [(Fraction(1), pcie)] * len([*devices, *leaves])
    wiring = gpu_wiring([*devices, *leaves], fast, len(devices) + len(names), near, slots, between_cpus)
    wiring = Wiring.of(devices, wiring.links)
    if has_tree:
        joined = any(src[:3] == dst[:3] == "cpu" for src, dst, *_ in wiring.links)
        assumed = [*assumed, *pcie_assumed, *cpus_assumed * joined]
    if cards is None:
        return wiring._replace(assumed=tuple(assumed))
    nearest = [_nearest([near(k, len(devices) + c) for k in range(len(devices))]) for c in range(len(names))]
    known_pcie = kind(pcie).raw if options.pcie is not None or gpu is not None else None
    hosts = join_hosts(
        wiring, cards, options.hosts, None if has_tree else nearest, kind(pcie), known_pcie, pcie_assumed
    )
    if not listed:
        assumed = [*assumed, "no network cards in the table: taken to be evenly next to the GPUs, in order"]
    return hosts._replace(assumed=(*assumed, *hosts.assumed))


def _with_cards(near: Callable[[int, int], str], gpus: int, cards: int, code: str) -> Callable[[int, int], str]:
    """Return ``near`` with cards that the table does not list. ``code`` joins a card to the GPUs next to it.

    In a tree of PCIe, a card is a leaf, which can only be next to one GPU: the first.
    """

    def extended(i: int, j: int) -> str:
        if j < gpus:
            return near(i, j)
        if i >= gpus or not is_next_to(j - gpus, i, cards, gpus):
            return "SYS"
        return "SYS" if code == "PHB" and i and is_next_to(j - gpus, i - 1, cards, gpus) else code

    return extended


def _nearest(codes: list[str]) -> tuple[int, tuple[int, ...]]:
    """Return how near the nearest GPUs of a network card are (0: one PCIe switch), and their positions."""
    ranks = [_LEVELS.index(code) if code in _LEVELS else len(_LEVELS) for code in codes]
    return min(ranks), tuple(k for k, rank in enumerate(ranks) if rank == min(ranks))


def _near(table: Table, members: Sequence[str]) -> Callable[[int, int], str]:
    """Return a function: which part of PCIe joins two members, or "" if the table does not say so."""
    rows = table.rows

    def near(i: int, j: int) -> str:
        a, b = rows.get(members[i]), rows.get(members[j])
        cell = a.cells[members[j]] if a else b.cells[members[i]] if b else ""
        if cell.startswith("NV"):  # GPUs with the same CPU affinity are at one CPU
            return "NODE" if a and b and a.cores and a.cores == b.cores else ""
        return "" if cell == "N/A" else cell

    return near


def _count(table: Table, a: str, b: str) -> int:
    """Return the number of NVLinks between two GPUs."""
    cell = table.rows[a].cells[b]
    return int(cell[2:]) if cell.startswith("NV") else 0


def _check_switches(table: Table, gpus: Sequence[str], links: Sequence[tuple[str, str, int]]) -> None:
    """Refuse a table in which two GPUs of one NVSwitch have no NVLinks: a part of the fabric has failed."""
    for switch in dict.fromkeys(end for _, end, _ in links if end.startswith("nvswitch")):
        joined = [f"GPU{start[5:]}" for start, end, _ in links if end == switch]
        for a, b in combinations([gpu for gpu in gpus if f"GPU{int(gpu[3:])}" in joined], 2):
            if not _count(table, a, b):
                cell = table.rows[a].cells[b]
                problem = f"{a} and {b} have no NVLinks ({cell}), but an NVSwitch joins both with the same GPUs."
                remedy = "a table without the row and the column of one; nvidia-smi nvlink -s shows inactive links"
                raise ArgumentError.of(problem, f"line {table.rows[a].line + 1}, the row of {a}", remedy)


def _speed(value: object) -> Fraction:
    if isinstance(value, (int, float, Fraction)) and not isinstance(value, bool) and 0.001 <= value <= 1e6:
        return Fraction(str(value))
    raise ArgumentError.of("between_cpus must be a number of GB/s from 0.001 to 1000000.", shown(value), "22")


def _number(value: Fraction) -> str:
    return f"{float(value):g}"


def gpu_wiring(
    devices: Sequence[str],
    fast: list[Link],
    members: int,
    near: Callable[[int, int], str],
    slots: Sequence[Slot],
    between_cpus: Fraction | None = None,
) -> Wiring:
    """Return the wiring of GPUs: NVLinks, and a tree of PCIe switches and CPUs if NVLinks do not join all of them.

    Args:
      devices: the GPUs, and then network cards that are leaves of the tree.
      fast: the NVLinks, which may lead to switches.
      members: the number of GPUs and network cards; the GPUs come first.
      near: returns for two members PIX, PXB, PHB, NODE, SYS, or "" if it is not known.
      slots: the PCIe link of each GPU.
      between_cpus: GB/s of the links between CPUs, by default what NCCL assumes for Skylake.
    """
    links = fast
    if not is_connected(devices, fast):
        links = [*fast, *_pcie_links(devices, members, near, slots, between_cpus or kind("cpu-skylake").effective)]
    return Wiring.of(devices, links)


def _pcie_links(
    devices: Sequence[str],
    members: int,
    near: Callable[[int, int], str],
    slots: Sequence[Slot],
    between_cpus: Fraction,
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
    latency = kind("cpu-skylake").latency_s
    for a, b in combinations(dict.fromkeys(name for name, _ in top.values()), 2):
        links += both_ways(a, b, between_cpus, latency)
    return links


def _nvlinks(
    devices: Sequence[str], link_count: Callable[[int, int], int], most: int
) -> tuple[list[tuple[str, str, int]], int, int]:
    """Return the NVLinks between devices, or to a switch for each group in which a row's sum exceeds ``most``.

    A link is (device, device or switch, number of NVLinks). The other results are the number of switches, and the
    largest number of NVLinks of a GPU.
    """
    links: list[tuple[str, str, int]] = []
    switches = largest = 0
    pairs = [pair for pair in combinations(range(len(devices)), 2) if link_count(*pair)]
    for group in groups(range(len(devices)), pairs):
        rows = {i: [link_count(i, j) for j in group if j != i] for i in group}
        if max(map(sum, rows.values())) > most:
            name = f"nvswitch{switches or ''}"
            switches += 1
            ends = [(devices[i], name, max(rows[i])) for i in group]
            largest = max(largest, *(max(row) for row in rows.values()))
        else:
            ends = [(devices[i], devices[j], link_count(i, j)) for i, j in combinations(group, 2) if link_count(i, j)]
            largest = max(largest, *(sum(row) for row in rows.values()), 0)
        links += ends
    return links, switches, largest


def _at_speed(links: list[tuple[str, str, int]], gpu: GpuKind | None) -> list[Link]:
    """Return NVLinks with the speed of the kind of GPU, or 25 GB/s if it is not known."""
    made: list[Link] = []
    for a, b, count in links:
        is_switched = b.startswith("nvswitch")
        if gpu is None:
            of_kind = kind("nvswitch1" if is_switched else "nvlink2")
        else:
            of_kind = kind(gpu.switched if is_switched else gpu.direct)
        made += both_ways(a, b, count * of_kind.raw, of_kind.latency_s)
    return made
