"""The rate of an exported MSCCL++ file on the clock of ``mscclpp_clock.py``, with the routes that its plan has."""

import json
from collections import defaultdict
from fractions import Fraction

from mscclpp_clock import PlanClock

from crossreduce.lowering import lower

SIZE = 256 << 20


def routes_of(schedule, topology):
    """Return the routes of a schedule between each two devices, and the part of the buffer that takes each of them."""
    found = defaultdict(lambda: defaultdict(Fraction))
    for transfers in lower(schedule).transfers:
        for chunk, src, dst, through, _ in transfers:
            a, b = schedule.devices[src], schedule.devices[dst]
            nodes = topology.route(a, b) if through is None else (a, *through, b)
            found[a, b][nodes] += schedule.chunks[chunk].share
    return {pair: list(routes.items()) for pair, routes in found.items()}


def algbw(text, schedule, topology):
    """Return the GB/s of a file for messages of at least 256 MiB that it runs for."""
    step = verify_step(text)
    nbytes = -(-SIZE // step) * step
    return nbytes / PlanClock(text, topology, nbytes, routes_of(schedule, topology)).seconds / 1e9


def verify_step(text):
    gpu = json.loads(text)["gpus"][0]
    return 16 * max(gpu["input_chunks"], gpu["output_chunks"])
