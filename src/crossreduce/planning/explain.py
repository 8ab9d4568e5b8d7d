"""A plan in words: its trees, its time, what limits it, and how others compare.

In: a schedule's trees, a bound, numbers.  Out: lines of text.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from math import gcd, lcm
from typing import Final, NamedTuple

from ..devices import parse
from ..schedule import Schedule
from .bounds import Bound, Cut

_MOST_LINES: Final = 16
_MOST_NAMES: Final = 8


class Shape(NamedTuple):
    """What the trees of a schedule look like.

    Args:
      k: unit trees a root, where a unit is the greatest share of which all chunks are multiples.
      roots: where chunks become whole.
      depth: the most hops from a device to a chunk's root, or back.
      trees: for each chunk its share, its root, and who sends to whom on the way there, or, if nothing is
        reduced, from there: child -> parent.
    """

    k: Fraction
    roots: tuple[str, ...]
    depth: int
    trees: tuple[tuple[Fraction, str, dict[str, str]], ...]


def shape(schedule: Schedule) -> Shape:
    """Read a schedule's trees off its steps.

    >>> from crossreduce.planning import hierarchical_copy
    >>> shape(hierarchical_copy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])).trees
    ((Fraction(1, 1), 'cpu:0', {'cpu:1': 'cpu:0', 'cpu:3': 'cpu:2', 'cpu:2': 'cpu:0'}),)
    """
    names = schedule.devices
    ups: list[dict[str, str]] = [{} for _ in schedule.chunks]
    downs: list[dict[str, str]] = [{} for _ in schedule.chunks]
    whole = [sum(1 << source for source in chunk.sources) for chunk in schedule.chunks]
    held = {(c, source): 1 << source for c, chunk in enumerate(schedule.chunks) for source in chunk.sources}
    roots = [chunk.sources[0] if len(chunk.sources) == 1 else -1 for chunk in schedule.chunks]
    hops: defaultdict[tuple[int, int], int] = defaultdict(int)
    depth = 0
    for steps in schedule.rounds:
        made, far = {}, {}
        for c, dst, srcs in steps:
            bits = 0
            for src in srcs:
                bits |= held.get((c, src), 0)
            first = roots[c] < 0 and bits == whole[c]
            going = ups if roots[c] < 0 else downs
            for src in srcs:
                if src != dst:
                    child, parent = (src, dst) if going is ups else (dst, src)
                    going[c][names[child]] = names[parent]
            far[c, dst] = max(hops[c, src] + (src != dst) for src in srcs)
            depth = max(depth, far[c, dst])
            if first:
                roots[c], far[c, dst] = dst, 0  # hops are counted anew on the way back
            made[c, dst] = bits
        held.update(made)
        hops.update(far)
    shares = [chunk.share for chunk in schedule.chunks]
    scale = lcm(*(share.denominator for share in shares))
    unit = Fraction(gcd(*(int(share * scale) for share in shares)), scale)
    places = tuple(dict.fromkeys(names[root] for root in roots))
    trees = tuple(
        (share, names[root], up or down) for share, root, up, down in zip(shares, roots, ups, downs, strict=True)
    )
    return Shape(1 / unit / len(places), places, depth, trees)


def nested(root: str, parents: dict[str, str]) -> str:
    """Write a tree in brackets.

    >>> nested("cpu:0", {"cpu:1": "cpu:0", "cpu:3": "cpu:2", "cpu:2": "cpu:0"})
    'cpu:0(cpu:1 cpu:2(cpu:3))'
    """
    children = sorted((child for child, parent in parents.items() if parent == root), key=_by_number)
    rest = {child: parent for child, parent in parents.items() if parent != root}
    return root + (f"({' '.join(nested(child, rest) for child in children)})" if children else "")


def _by_number(name: str) -> tuple[str, ...]:
    return tuple(part.zfill(9) for part in name.replace("/", ":").split(":"))


def tree_lines(found: Shape) -> list[str]:
    """Return a line for each different tree: its share of the buffer, and the tree out of its root."""
    drawn: dict[str, Fraction] = {}
    for share, root, parents in found.trees:
        text = nested(root, parents)
        drawn[text] = drawn.get(text, Fraction(0)) + share
    lines = [f"{share!s:>8s} {text}" for text, share in list(drawn.items())[:_MOST_LINES]]
    return lines + ([f"         and {len(drawn) - _MOST_LINES} more"] if len(drawn) > _MOST_LINES else [])


def limited_by(limit: Bound) -> str:
    """Say which links make a bound.

    >>> from crossreduce.planning import bound
    >>> from crossreduce import Topology
    >>> limited_by(bound(Topology.star(4, 450), "broadcast", "cpu:1"))
    'the link into cpu:0 (450 GB/s)'
    """
    heaviest = max((cut.weight for cut in limit.cuts), default=Fraction(0))
    texts: dict[tuple[str, str], list[str]] = {}
    for cut in limit.cuts:
        if cut.weight == heaviest:
            side, links = _described(limit, cut)
            texts.setdefault((side, links), [])
    alone = {side for side, _ in texts if side.removeprefix("into ").removeprefix("out of ") in limit.devices}
    if len(alone) >= len(limit.devices) > 1:
        return "the links of every device: " + "; ".join(sorted({links for _, links in texts}))
    listed = [f"{links} {side}" if "(" not in links else links.replace(" (", f" {side} (", 1) for side, links in texts]
    more = f", and {len(listed) - 2} more such cuts together" if len(listed) > 2 else ""
    return " and ".join(listed[:2]) + more


def _described(limit: Bound, cut: Cut) -> tuple[str, str]:
    """Return a cut's smaller side, and how many links of how many GB/s cross it."""
    inside = [device for device in limit.devices if device in cut.nodes]
    outside = [device for device in limit.devices if device not in cut.nodes]
    crossing = [
        link
        for link in limit.topology.links
        if (
            (link.src in cut.nodes) > (link.dst in cut.nodes)
            if cut.outward
            else (link.dst in cut.nodes) > (link.src in cut.nodes)
        )
    ]
    here, into = (outside, cut.outward) if len(outside) <= len(inside) else (inside, not cut.outward)
    width = sum((link.bandwidth for link in crossing), Fraction(0))
    host = {parse(device).host for device in here}
    everyone_there = [device for device in limit.devices if parse(device).host in host]
    name = ", ".join(here[:_MOST_NAMES]) + (f" and {len(here) - _MOST_NAMES} more" if len(here) > _MOST_NAMES else "")
    if len(here) > 1:
        name = f"{{{name}}}"
    noun = "link"
    if len(host) == 1 and "" not in host and len(everyone_there) == len(here) < len(limit.devices):
        (name,) = host
        noun = "NIC"
    count = f"the {len(crossing)} {noun}s" if len(crossing) > 1 else f"the {noun}"
    return f"{'into' if into else 'out of'} {name}", f"{count} ({_number(width)} GB/s)"


def _number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.4g}"


def size(nbytes: int) -> str:
    """Return bytes as people say them.

    >>> size(1 << 26), size(1500), size(7)
    ('64 MiB', '1500 bytes', '7 bytes')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} bytes"


def duration(seconds: float) -> str:
    """Return seconds as people say them.

    >>> duration(0.0123), duration(4.2e-6)
    ('12.30 ms', '4.20 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def percent(ratio: Fraction) -> str:
    """Return a ratio in percent: "100 %" only where it is exactly 1.

    >>> percent(Fraction(1)), percent(Fraction(999999, 1000000))
    ('100 %', '99.99 %')
    """
    return f"{int(ratio * 100)} %" if (ratio * 100).denominator == 1 else f"{int(ratio * 10000) / 100} %"
