"""The number of parts into which exporters divide each chunk, so that the channels of a GPU together fill its links.

Input: a schedule and its topology. Output: one number per chunk. Each part of a chunk has separate channels and
threadblocks, and all parts move at the same time.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from ...schedule import Schedule, fluid_rate
from ...topology import Topology

CHANNEL_GB_PER_S: Final = Fraction(24)
"""The GB/s that any channel can carry: the lowest of NCCL's limits for a channel of a tree on NVLink.

Source: perChMaxTreeBws in NCCL's src/graph/tuning.cc: 26.5 (V100), 24 (A100), 38.7 (H100), 70 (B200).
"""

MOST_PARTS: Final = 64  # no runtime has more threadblocks per GPU for one chunk


def parts_of_chunks(
    schedule: Schedule, topology: Topology | None, part_of_rate: Fraction = Fraction(1)
) -> tuple[int, ...]:
    """Return the number of parts of each chunk. Without a topology, each chunk is one part.

    A chunk moves at a rate that is its share of the schedule's rate. There are so many parts that each one carries at
    most the fraction ``part_of_rate`` of ``CHANNEL_GB_PER_S``.

    >>> from crossreduce.planning import direct
    >>> h100 = Topology.machine("hgx-h100")
    >>> parts_of_chunks(direct(h100.devices), h100)  # each chunk: 1/8 of 257 GB/s
    (2, 2, 2, 2, 2, 2, 2, 2)
    """
    rate = None if topology is None else fluid_rate(schedule, topology)
    if rate is None:
        return (1,) * len(schedule.chunks)
    wanted = (math.ceil(chunk.share * rate / (CHANNEL_GB_PER_S * part_of_rate)) for chunk in schedule.chunks)
    return tuple(max(1, min(count, MOST_PARTS)) for count in wanted)
