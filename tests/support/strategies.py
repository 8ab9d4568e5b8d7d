"""Hypothesis strategies: devices, topologies, requests, shapes, dtypes, ops, algorithms and packings.

They draw names of devices and NumPy arrays, but no arrays of other frameworks.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
import oracle
from hypothesis import strategies as st

from crossreduce import Link, Topology
from crossreduce.packing import Packing
from crossreduce.planning import PLANNERS, REGISTRY

ALGORITHMS = tuple(PLANNERS)  # the algorithms with a planner for lists of devices
NAMED = tuple(REGISTRY)
OPS = ("sum", "mean", "min", "max", "product")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, "bool")

device_counts = st.integers(1, 17)
dtypes = st.sampled_from(DTYPES)
ops = st.sampled_from(OPS)
algorithms = st.sampled_from(ALGORITHMS)
named = st.sampled_from(NAMED)
# Scalars, empty arrays and sizes around the number of devices; at most 216 elements.
shapes = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (2, 3)]),
    st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple),
    st.integers(0, 40).map(lambda size: (size,)),
)


def plan(algorithm, ask):
    """Return the schedule of a planner for drawn devices, sources and destinations; see ``requests``."""
    return PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)


def ops_for(dtype):
    """Return the ops that are defined for a dtype."""
    if dtype == "bool":
        return ("min", "max", "product")
    return ("sum", "mean", "product") if dtype in COMPLEX else OPS


@st.composite
def op_and_dtype(draw, dtypes=dtypes):
    """Draw an op and a dtype that it is defined for."""
    dtype = draw(dtypes)
    return draw(st.sampled_from(ops_for(dtype))), dtype


@st.composite
def damaged(draw, sample):
    """Draw a text that is truncated, lacks a character, or has up to three characters too many."""
    at = draw(st.integers(0, len(sample)))
    rest = [st.just(""), st.just(sample[at + 1 :]), st.text(max_size=3).map(lambda text: text + sample[at:])]
    return sample[:at] + draw(st.one_of(rest))


def names(n):
    """Return ``cpu:0`` to ``cpu:n-1``."""
    return tuple(f"cpu:{k}" for k in range(n))


@st.composite
def wired(draw, devices, most_switches=2, both_ways=True, latency=True):
    """Draw a topology of ``devices`` and some switches, in which every node has a route to every other.

    ``both_ways``: for every link there is one of the same bandwidth in the other direction.
    """
    nodes = [*devices, *(f"bus{k}" for k in range(draw(st.integers(0, most_switches))))]
    speeds = st.sampled_from([1, 2, Fraction(5, 2), 25, Fraction(64, 3), 450])
    widths = {}

    def join(a, b, back):
        widths[a, b] = draw(speeds)
        if back:
            widths[b, a] = widths[a, b] if both_ways else draw(speeds)

    for k in range(1, len(nodes)):
        join(nodes[k], nodes[draw(st.integers(0, k - 1))], back=True)
    pairs = st.permutations(nodes).map(lambda order: order[:2])
    for a, b in draw(st.lists(pairs, max_size=8)) if len(nodes) > 1 else ():
        join(a, b, back=both_ways)
    delays = st.sampled_from([Fraction(0), Fraction(1, 10**6), Fraction(7, 10**7)]) if latency else st.just(Fraction(0))
    links = tuple(Link(*pair, width, draw(delays)) for pair, width in widths.items())
    return Topology(devices, links, tuple(nodes[len(devices) :]))


class DeviceRequest(NamedTuple):
    """The arguments of a planner for lists of devices."""

    devices: tuple[str, ...]
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    packs: int
    first: int


@st.composite
def requests(draw, counts=device_counts, most_packs=20):
    """Draw devices, and sources and destinations among them: all, some, one, disjoint ones, permuted."""
    devices = names(draw(counts))
    some = st.lists(st.sampled_from(devices), min_size=1, unique=True).map(tuple)
    one = st.sampled_from(devices).map(lambda d: (d,))
    chosen = st.one_of(st.just(devices), st.permutations(devices).map(tuple), some, one)
    sources = draw(chosen)
    others = tuple(d for d in devices if d not in sources)
    kinds = [chosen, st.just(sources), st.just(sources[:1]), st.permutations(sources).map(tuple)]
    if others:
        kinds.append(st.just(others))
    destinations = draw(st.one_of(kinds))
    return DeviceRequest(devices, sources, destinations, draw(st.integers(1, most_packs)), draw(st.integers(0, 40)))


@st.composite
def packings(draw, most_packs=20):
    """Draw packing options: no packs, n packs, packs of a number of bytes, joined small tensors, several of these."""
    kind = draw(st.sampled_from(["none", "packs", "bytes", "small", "any"]))
    any_ = kind == "any"
    return Packing(
        draw(st.integers(1, most_packs)) if any_ or kind == "packs" else 0,
        draw(st.integers(1, 200)) if any_ or kind == "bytes" else 0,
        draw(st.integers(0, 200)) if any_ or kind == "small" else 0,
        draw(st.integers(0, 12)) if any_ or kind == "small" else 0,
    )


@st.composite
def arrays(draw, dtype, shape, n):
    """Draw ``n`` random arrays of one dtype and shape; integers over their complete range, without NaN or inf."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = oracle.dtype_of(dtype)
    if dtype == "bool":
        return [rng.integers(0, 2, shape).astype(made) for _ in range(n)]
    if dtype in INTEGERS:
        bounds = np.iinfo(made)
        return [rng.integers(bounds.min, bounds.max, shape, made, endpoint=True) for _ in range(n)]
    if dtype in COMPLEX:
        return [(rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(made) for _ in range(n)]
    return [np.asarray(rng.normal(size=shape)).astype(made) for _ in range(n)]
