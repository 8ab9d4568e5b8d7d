"""Split messages into permutations.

Input: pairs ``(src, dst)``. Output: sets of pairs in which each device sends at most once and receives at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

Pair = tuple[int, int]


def matchings(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Split different pairs ``(src, dst)`` into as few matchings as possible.

    The number of matchings is the number of partners of the busiest device. A matching is an edge color of the
    bipartite graph of senders and receivers. Each pair gets the first color that is free at both ends, so pairs that
    are close together in ``pairs`` are likely to share a matching.

    >>> matchings([(0, 1), (1, 2), (2, 0), (0, 2)])
    [[(0, 1), (1, 2), (2, 0)], [(0, 2)]]

    Source: D. König, Über Graphen und ihre Anwendung auf Determinantentheorie und Mengenlehre, Math. Ann. 77, 1916.
    """
    counts = [Counter(pair[side] for pair in pairs) for side in (0, 1)]
    degree = max(chain(*(count.values() for count in counts)), default=0)
    partner: tuple[dict[Pair, int], dict[Pair, int]] = ({}, {})  # by side (0: senders) the partner of (device, color)

    def free(side: int, device: int) -> int:
        return next(color for color in range(degree) if (device, color) not in partner[side])

    def paint(pair: Pair, color: int) -> None:
        partner[0][pair[0], color], partner[1][pair[1], color] = pair[1], pair[0]

    for src, dst in pairs:
        both = (c for c in range(degree) if (src, c) not in partner[0] and (dst, c) not in partner[1])
        color = next(both, None)
        if color is None:
            # Exchange two colors along the path that starts at dst. It cannot reach src, so src's free color becomes
            # free at dst as well.
            color, other = free(0, src), free(1, dst)
            path, side, device, wanted = [], 1, dst, color
            while (device, wanted) in partner[side]:
                mate = partner[side][device, wanted]
                path.append(((mate, device) if side else (device, mate), wanted))
                side, device, wanted = 1 - side, mate, other if wanted == color else color
            for pair, old in path:
                del partner[0][pair[0], old], partner[1][pair[1], old]
            for pair, old in path:
                paint(pair, other if old == color else color)
        paint((src, dst), color)
    found: list[list[Pair]] = [[] for _ in range(degree)]
    for (src, color), dst in partner[0].items():
        found[color].append((src, dst))
    return [sorted(matching) for matching in found]
