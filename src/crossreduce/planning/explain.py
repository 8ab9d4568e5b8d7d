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
_MOST_LETTERS: Final = 160


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
    lines = [f"{share!s:>8s} {_short(text)}" for text, share in list(drawn.items())[:_MOST_LINES]]
    return lines + ([f"         and {len(drawn) - _MOST_LINES} more"] if len(drawn) > _MOST_LINES else [])


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 4] + " ..."


def limited_by(limit: Bound) -> str:
    """Say which links make a bound.

    >>> from crossreduce.planning import bound
    >>> from crossreduce import Topology
    >>> star = Topology.star(4, 450)
    >>> limited_by(bound(star, "broadcast", "cpu:1")), limited_by(bound(star, "all_reduce"))
    ('the link into cpu:0 (450 GB/s)', "every device's own links: 450 GB/s by 1 link in and out")
    """
    heaviest = max((cut.weight for cut in limit.cuts), default=Fraction(0))
    sides: dict[tuple[str, ...], dict[str, tuple[int, Fraction]]] = {}  # by devices: how many links of how many GB/s
    for cut in limit.cuts:
        if cut.weight == heaviest:
            here, way, links = _crossing(limit, cut)
            sides.setdefault(here, {})[way] = links
    if len(sides) == len(limit.devices) > 1 and all(len(here) == 1 for here in sides):
        kinds = dict.fromkeys((links, len(ways)) for ways in sides.values() for links in ways.values())
        words = [f"{_number(width)} GB/s by {many(n, 'link')} {_ways(ways)}" for (n, width), ways in kinds]
        return f"every device's own links: {'; '.join(words)}"
    texts = [_words(limit, here, ways) for here, ways in sides.items()]
    more = len(texts) - 2
    return " and ".join(texts[:2]) + (f", with {more} more such cut{'s' * (more > 1)}" if more > 0 else "")


def _crossing(limit: Bound, cut: Cut) -> tuple[tuple[str, ...], str, tuple[int, Fraction]]:
    """Return the devices on a cut's smaller side, the way over it, and how many links of how many GB/s go that way."""
    inside = tuple(device for device in limit.devices if device in cut.nodes)
    outside = tuple(device for device in limit.devices if device not in cut.nodes)
    widths = [
        bandwidth
        for src, dst, bandwidth, _ in limit.topology.links
        if (src in cut.nodes) != (dst in cut.nodes) and (src in cut.nodes) == cut.outward
    ]
    here, into = (outside, cut.outward) if len(outside) <= len(inside) else (inside, not cut.outward)
    return here, "into" if into else "out of", (len(widths), sum(widths, Fraction(0)))


def _words(limit: Bound, here: tuple[str, ...], ways: dict[str, tuple[int, Fraction]]) -> str:
    hosts = {parse(device).host for device in here}
    there = [device for device in limit.devices if parse(device).host in hosts]
    name, noun = ", ".join(here[:_MOST_NAMES]), "link"
    if len(here) > _MOST_NAMES:
        name += f" and {len(here) - _MOST_NAMES} more"
    if len(here) > 1:
        name = f"{{{name}}}"
    if len(hosts) == 1 and "" not in hosts and len(there) == len(here) < len(limit.devices):
        (name,), noun = hosts, "NIC"  # all devices of one host: what leaves it is its network
    if len(set(ways.values())) == 1:
        ways = {" and ".join(ways): next(iter(ways.values()))}
    return " and ".join(
        f"the {f'{n} {noun}s' if n > 1 else noun} {way} {name} ({_number(width)} GB/s)"
        for way, (n, width) in ways.items()
    )


def _ways(count: int) -> str:
    return "in and out" if count > 1 else "one way"


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


def many(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> many(1, "root"), many(2, "root")
    ('1 root', '2 roots')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


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
