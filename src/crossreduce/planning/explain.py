"""Plans as text: their trees, bytes, seconds and percentages. The links that limit a rate: ``bounds/tight_cuts.py``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from operator import or_
from typing import Final, NamedTuple

from ..devices import parse
from ..schedule import Costs, GeneratedSchedule, Schedule
from ..schedule.costs import OPERATION_S
from ..schedule.schedule import many
from .optimal.bounds.certificate import Bound
from .optimal.bounds.tight_cuts import devices_text

_MOST_LINES: Final = 16  # of trees
_MOST_ALIKE: Final = 4  # trees of one shape and share; if there are more, one of them is shown
_LEAST_FOLDED: Final = 3  # stars or paths that are described together
LEAST_WIDTH: Final = 60
_LEAST_BUSY: Final = 0.01  # resources that are busy for a smaller part of the time are not mentioned

# A share of the buffer, the name of the root, and the parent of each other node. Children send to their parents; but if
# nothing is reduced, parents send to their children.
Tree = tuple[Fraction, str, dict[str, str]]


class Shape(NamedTuple):
    """The trees of a schedule."""

    roots: tuple[str, ...]  # the devices that compute the final values of chunks; if nothing is reduced, the sources
    depth: int  # the greatest number of hops from a device to the root of a chunk, or back
    trees: tuple[Tree, ...]  # one for each chunk and each of the chunk's roots


class _Value(NamedTuple):
    """A value of a chunk that a device stores."""

    device: int
    operands: tuple[_Value, ...]  # the values that the device reduced or copied to compute this one
    contributions: int  # the sources whose data the value contains, as bits
    hops: int  # the most hops from a source to this value, or from the root after the reduction


def shape(schedule: Schedule) -> Shape:
    """Return the trees of a schedule.

    >>> from crossreduce.planning import hierarchical_copy, one_shot
    >>> shape(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])).trees
    ((Fraction(1, 1), 'cpu:0', {'cpu:2': 'cpu:0', 'cpu:1': 'cpu:0', 'cpu:3': 'cpu:2'}),)
    >>> shape(one_shot(["cpu:0", "cpu:1"])).trees
    ((Fraction(1, 1), 'cpu:0', {'cpu:1': 'cpu:0'}), (Fraction(1, 1), 'cpu:1', {'cpu:0': 'cpu:1'}))
    """
    if isinstance(schedule, GeneratedSchedule):
        of_base, depth = _trees(schedule.base)
        trees = _images(schedule, of_base)
    else:
        trees, depth = _trees(schedule)
    all_trees = tuple(tree for chunk_trees in trees for tree in chunk_trees)
    return Shape(tuple(dict.fromkeys(root for _, root, _ in all_trees)), depth, all_trees)


def _trees(schedule: Schedule) -> tuple[list[list[Tree]], int]:
    """Return the trees of each chunk, and the depth of the deepest tree."""
    names = schedule.devices
    contributed = [(c, source) for c, chunk in enumerate(schedule.chunks) for source in chunk.sources]
    stored = {(c, source): _Value(source, (), 1 << source, 0) for c, source in contributed}  # by chunk and device
    everyone = [sum(1 << source for source in chunk.sources) for chunk in schedule.chunks]
    complete: list[list[_Value]] = [[] for _ in schedule.chunks]  # the final values, computed at the roots
    depth = 0
    for steps in schedule.rounds:
        computed = {}
        for c, dst, srcs in steps:
            operands = tuple(stored[c, src] for src in srcs)
            contributions = reduce(or_, [operand.contributions for operand in operands])
            hops = max(operand.hops + (operand.device != dst) for operand in operands)
            depth = max(depth, hops)
            value = _Value(dst, operands, contributions, hops)
            if len(srcs) > 1 and contributions == everyone[c]:
                complete[c].append(value)
                value = value._replace(hops=0)  # hops from a root are counted from 0
            computed[c, dst] = value
        stored.update(computed)
    trees: list[list[Tree]] = []
    for c, chunk in enumerate(schedule.chunks):
        trees.append([(chunk.share, names[value.device], _parents(value, names)) for value in complete[c]])
        if not complete[c]:  # nothing is reduced: the route of the data to each destination, from the source
            (source,) = chunk.sources
            parents: dict[str, str] = {}
            for dst in chunk.destinations:
                parents |= {child: parent for parent, child in _parents(stored[c, dst], names).items()}
            trees[c].append((chunk.share, names[source], parents))
    return trees, depth


def _images(schedule: GeneratedSchedule, trees: list[list[Tree]]) -> list[list[Tree]]:
    """Return the trees of all chunks of a generated schedule; ``trees`` are those of its base's chunks."""
    order, names = schedule.symmetry.order, schedule.devices
    images = [  # for each element of the symmetry, the device to which it maps each device
        {name: names[k] for name, k in zip(names, moves, strict=False)} for moves in schedule.symmetry.elements()
    ]
    return [
        [
            (share / order, image[root], {image[child]: image[parent] for child, parent in parents.items()})
            for share, root, parents in trees[chunk]
        ]
        for element, chunk in schedule.numbering
        for image in [images[element]]
    ]


def _parents(value: _Value, names: tuple[str, ...]) -> dict[str, str]:
    """Return the edges by which data reached a value: for each device that sent data, the device that received it."""
    parents: dict[str, str] = {}
    values = [value]
    for parent in values:
        for operand in parent.operands:
            if operand.device != parent.device:
                parents[names[operand.device]] = names[parent.device]
            values.append(operand)
    return parents


def tree_text(root: str, parents: dict[str, str]) -> str:
    """Return a tree as text, with brackets.

    >>> tree_text("cpu:0", {"cpu:1": "cpu:0", "cpu:3": "cpu:2", "cpu:2": "cpu:0"})
    'cpu:0(cpu:1 cpu:2(cpu:3))'
    """
    children: dict[str, list[str]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    parts: list[str] = []
    stack = [(root, True)]  # texts still to write, the next one last; True: the text is a node, then come its children
    while stack:
        text, is_node = stack.pop()
        parts.append(text)
        below = sorted(children.pop(text, ()), key=_device_order) if is_node else []
        if below:
            between = [pair for child in reversed(below) for pair in ((child, True), (" ", False))]
            stack += [(")", False), *between[:-1], ("(", False)]
    return "".join(parts)


def _device_order(name: str) -> tuple[str, ...]:
    """Return a key that sorts device names by number: cuda:2 before cuda:10."""
    return tuple(part.zfill(9) for part in name.replace("/", ":").split(":"))


def tree_lines(plan_shape: Shape, outward: bool = False, width: int | None = None) -> list[str]:
    """Return lines about the different trees, each with the share of the buffer that one tree has.

    Three or more stars have one line, and so do paths along one ring. Of more than four other trees of one shape and
    share, the first is shown. A last line has the number of trees beyond the first 16 lines.

    Args:
      outward: whether data flow from the roots, as in a broadcast.
      width: the longest line, to which trees are cut; ``None``: they are not cut.

    >>> from crossreduce.planning import ring
    >>> tree_lines(shape(ring(["cpu:0", "cpu:1", "cpu:2"])))
    ['     1/3 on each device, along the ring cpu:0 -> cpu:1 -> cpu:2 -> cpu:0']
    """
    shares: dict[tuple[str, frozenset[tuple[str, str]]], Fraction] = {}  # by root and edges
    for share, root, parents in plan_shape.trees:
        tree = root, frozenset(parents.items())
        shares[tree] = shares.get(tree, Fraction(0)) + share
    trees = [(share, root, dict(edges)) for (root, edges), share in shares.items()]
    texts = folded(trees, outward)
    lines = []
    for text, others, same in texts[:_MOST_LINES]:
        most = len(text) if width is None else max(width, LEAST_WIDTH) - 9 - len(others)
        cut = text if len(text) <= most else text[: most - 4] + " ..."
        lines.append(f"{trees[same[0]][0]!s:>8s} {cut}{others}")
    more = sum(len(same) for *_, same in texts[_MOST_LINES:])
    return [*lines, f"         and {more} more"] if more else lines


def folded(trees: Sequence[Tree], outward: bool) -> list[tuple[str, str, list[int]]]:
    """Return the text of each line about trees, what follows it if it is cut, and the positions of its trees."""
    alike, lines = dict[tuple[Fraction, object], list[int]](), list[tuple[str, str, list[int]]]()
    for k, (share, root, parents) in enumerate(trees):
        alike.setdefault((share, _kind(root, parents, outward)), []).append(k)
    for (_, kind), same in alike.items():
        text = _text_of_kind(kind, [trees[k][1] for k in same], outward) if len(same) >= _LEAST_FOLDED else ""
        if text or len(same) > _MOST_ALIKE:
            others = "" if text else f" and {len(same) - 1} more of this shape"
            lines.append((text or tree_text(*trees[same[0]][1:]), others, same))
        else:
            lines += [(tree_text(*trees[k][1:]), "", [k]) for k in same]
    return lines


def _kind(root: str, parents: dict[str, str], outward: bool) -> object:
    """Return what trees that share a line have in common: a star's devices, a path's ring, or the shape."""
    parents = {child: parent for child, parent in parents.items() if child != root}  # data may come back to the root
    nodes = frozenset([root, *parents])
    if len(nodes) > 1 and all(parent == root for parent in parents.values()):
        return "star", nodes
    if len(set(parents.values())) == len(parents):  # no node has two children: a path
        children = {parent: child for child, parent in parents.items()}
        path = [root]
        while path[-1] in children:
            path.append(children[path[-1]])
        cycle = path if outward else path[::-1]
        first = cycle.index(min(cycle, key=_device_order))
        return "ring", tuple(cycle[first:] + cycle[:first])
    below: dict[str, list[str]] = {}
    for child, parent in parents.items():
        below.setdefault(parent, []).append(child)
    order, shapes = [root], dict[str, str]()
    for node in order:
        order += below.get(node, [])
    for node in reversed(order):
        shapes[node] = f"({''.join(sorted(shapes[child] for child in below.get(node, ())))})"
    return "tree", shapes[root]


def _text_of_kind(kind: object, roots: list[str], outward: bool) -> str:
    """Return a text about stars or about paths along one ring, with these roots; "" for other trees."""
    assert isinstance(kind, tuple)
    name, nodes = kind
    if name == "tree":
        return ""
    where = "on each device" if len(roots) == len(nodes) else f"on each of {devices_text(tuple(roots))}"
    if name == "star":
        return f"{where}, {'to' if outward else 'from'} all others"
    return f"{where}, along the ring {' -> '.join([*nodes, nodes[0]])}"


def wrapped(lines: Sequence[str], width: int | None) -> str:
    """Join lines to a text. With a width, longer lines are continued below the texts after their labels."""
    if width is not None:
        width, indent = max(width, LEAST_WIDTH), " " * 12
        lines = [
            part
            for line in lines
            for part in textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
        ]
    return "\n".join(lines)


def other_lines(others: dict[str, tuple[float, Fraction | None]], seconds: float, most: Fraction) -> list[str]:
    """Return a line for each other plan, by name, with its seconds and rate beside ``seconds`` and the bound."""
    lines = []
    for name, (other, rate) in others.items():
        part = f"{float(rate):8.2f} GB/s when large, {percent(rate / most)} of the bound" if rate else ""
        lines.append(f"    {name:20s} {duration(other):>10s} ({other / seconds if seconds else 1.0:.2f} x) {part}")
    return lines


def counted(costs: Costs, devices: Sequence[str]) -> str:
    """Return a text about what a simulation counts besides the links; "" if it counts nothing else.

    >>> counted(Costs(), ["cuda:0"]), counted(Costs(operation_s=0), ["cuda:0"]), counted(Costs(), ["cpu:0"])
    ('2.00 us to queue each operation', 'no time to queue operations, as in one kernel', '')
    """
    on_cuda = any(parse(device).kind == "cuda" for device in devices)
    operation_s = costs.operation_s if costs.operation_s is not None else OPERATION_S * on_cuda
    texts = [f"{duration(operation_s)} to queue each operation"] if operation_s else []
    texts += ["no time to queue operations, as in one kernel"] if on_cuda and not operation_s else []
    if costs.reduction_gb_per_s is not None:
        texts.append(f"reductions at {costs.reduction_gb_per_s:g} GB/s")
    if costs.messages_per_s is not None:
        texts.append(f"{costs.messages_per_s:g} messages per second between two hosts")
    if costs.shared:
        texts.append(many(len(costs.shared), "limit") + " of several links together")
    return "; ".join(texts)


def crossings(schedule: Schedule) -> str:
    """Return a text about the transfers between hosts, or "" if there is one host, or if steps are generated.

    >>> from crossreduce.planning import direct
    >>> crossings(direct(["host0/cuda:0", "host1/cuda:0"])), crossings(direct(["cuda:0", "cuda:1"]))
    ('4 transfers between hosts in 2 of 2 rounds, 2 for each share', '')
    """
    hosts = [device.rpartition("/")[0] for device in schedule.devices]
    if len(set(hosts)) == 1 or isinstance(schedule, GeneratedSchedule):
        return ""
    counts = [sum(hosts[src] != hosts[step.dst] for step in steps for src in step.srcs) for steps in schedule.rounds]
    each = sum(counts) / len(schedule.chunks)
    where = f"in {len(counts) - counts.count(0)} of {many(len(counts), 'round')}"
    return f"{many(sum(counts), 'transfer')} between hosts {where}, {each:.3g} for each share"


def helped_by(helpers: tuple[str, ...], rate: Fraction, least: Bound | None) -> str:
    """Return a text about helpers: devices that contribute and need no data, but forward and combine it.

    Args:
      helpers: the names of the devices.
      rate: the rate of the plan with the helpers, in GB/s.
      least: the bound without the helpers; ``None``: some devices cannot be reached without them.

    >>> helped_by(("cuda:6", "cuda:7"), Fraction(224), None)
    'cuda:6, cuda:7 forward and combine; without them some devices cannot be reached'
    """
    gain = "without them some devices cannot be reached"
    if least is not None and least.algbw:
        gain = f"{float(rate / least.algbw):.2f} x the bound without them, {float(least.algbw):.2f} GB/s"
    return f"{devices_text(helpers)} forward and combine; {gain}"


def busiest_text(limits: tuple[tuple[str, float], ...]) -> str:
    """Return a text about the busiest resource of each kind, such as links or operations of hosts.

    ``limits`` contains, for each resource, its name and the part of the time in which it is busy, the greatest first.

    >>> busiest_text((("the link a -> b", 0.5), ("the link b -> a", 0.25), ("the operations of the host", 0.125)))
    'the link a -> b, 50 % of the time; the operations of the host, 12.5 %'
    """
    kinds: dict[str, tuple[str, float]] = {}
    for name, part in limits:
        kinds.setdefault(name.split()[1], (name, part))  # the second word is the kind: "the link a -> b"
    listed = [(name, percent(Fraction(part))) for name, part in kinds.values() if part >= _LEAST_BUSY]
    texts = [f"{name}, {part}{' of the time' if k == 0 else ''}" for k, (name, part) in enumerate(listed)]
    return "; ".join(texts)


def size(nbytes: int) -> str:
    """Return a number of bytes as text.

    >>> size(1 << 26), size(1500), size(7)
    ('64 MiB', '1500 bytes', '7 bytes')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} bytes"


def rate(gb_per_s: Fraction, only_if: str = "") -> str:
    """Return a rate with two decimals, then in brackets the exact number if it has more, and a condition.

    >>> rate(Fraction(25, 2)), rate(Fraction(800, 3), "if x")
    ('12.50 GB/s', '266.67 GB/s (exactly 800/3, if x)')
    """
    more = ", ".join(filter(None, ("" if (gb_per_s * 100).denominator == 1 else f"exactly {gb_per_s}", only_if)))
    return f"{float(gb_per_s):.2f} GB/s{f' ({more})' if more else ''}"


def duration(seconds: float) -> str:
    """Return seconds as text.

    >>> duration(0.0123), duration(4.2e-6)
    ('12.30 ms', '4.20 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def percent(ratio: Fraction) -> str:
    """Return a ratio in percent, rounded down, so "100 %" means exactly 1.

    >>> percent(Fraction(1)), percent(Fraction(999999, 1000000))
    ('100 %', '99.99 %')
    """
    return f"{int(ratio * 100)} %" if (ratio * 100).denominator == 1 else f"{int(ratio * 10000) / 100} %"


def rest_percent(ratio: Fraction) -> str:
    """Return the difference between 100 % and ``percent(ratio)``.

    >>> percent(Fraction(99845, 100000)), rest_percent(Fraction(99845, 100000))
    ('99.84 %', '0.16 %')
    """
    return percent(1 - Fraction(int(ratio * 10000), 10000))
