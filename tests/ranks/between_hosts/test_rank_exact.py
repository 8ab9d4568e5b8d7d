"""Exact reductions of ranks: the bits of rational arithmetic, on one host and on several."""

import random
from functools import lru_cache

import numpy as np
import pytest
from exact_cases import KINDS, UNSIGNED, exact_sums, narrow, terms_of, wide
from host_checks import joined, on
from ranks import ranks
from test_live_plans import without
from test_rank_prepared import group_of

from crossreduce.errors import ArgumentError
from crossreduce.ops import ReduceOp
from crossreduce.ranks.array_views import ArrayView
from crossreduce.ranks.inter_host.exact_exchange import OVERFLOW_TAG
from crossreduce.ranks.inter_host.two_level import host_names
from crossreduce.topology import Topology

COMPLEX = {"float32": "complex64", "float64": "complex128"}
LARGE = 997  # the elements of which large arrays are repetitions


def view(bits, dtype):
    """Return the view of an array of bits as an array of ``dtype``. A complex number has two elements of bits."""
    size = bits.size // (2 if dtype.startswith("complex") else 1)
    return ArrayView(bits.ctypes.data, size, dtype, (size,))


def inputs(kind, dtype, n, size, seed):
    """Return the terms of n ranks, in an order that depends on the seed. Large arrays repeat ``LARGE`` elements."""
    terms = terms_of(kind, size, dtype, n, min(size, LARGE))
    order = random.Random(seed).sample(range(n), n)
    return [np.ascontiguousarray(np.resize(terms[k], size)) for k in order]


@lru_cache
def right(kind, dtype, n, size, divisor):
    """Return the bits of the exact sum of the terms of ``inputs``, divided and rounded once."""
    return np.resize(exact_sums(terms_of(kind, size, dtype, n, min(size, LARGE)), dtype, divisor), size)


CASES = [  # kind, dtype, size, op, whether complex
    (kind, [*UNSIGNED][number % 4], size, ("sum", "mean")[number // 2 % 2], number % 3 == 0)
    for number, (kind, size) in enumerate(
        [*((kind, (1, 60, 3001)[k % 3]) for k, kind in enumerate(KINDS)), (narrow, 200_002), (wide, 150_000)]
    )
]


def table(rendezvous, seed, lost=()):
    """Run all cases with every reduction, and return the names of cases with wrong bits."""
    comm = without(rendezvous, lost, 30.0)
    wrong = every_case(comm, seed)
    if len(comm.hosts) > 2 and not lost:  # plans on such links have trees in which hosts combine others' partial sums
        speeds = [[0 if a == b else 1 if {a, b} == {0, 2} else 5 for b in range(3)] for a in range(3)]
        comm.plan_on(Topology.from_matrix(speeds, host_names(3), latency_s=1e-4))
        wrong += every_case(comm, seed)
    assert len(comm.hosts) == 1 or comm.links.lost == lost
    comm.close()
    return wrong


def every_case(comm, seed):
    n, me, wrong = comm.size, comm.rank, []
    for kind, dtype, size, op, is_complex in CASES:
        numbers, name = ReduceOp(op), dtype
        if is_complex and dtype in COMPLEX and size % 2 == 0:
            name = COMPLEX[dtype]
        given, due = inputs(kind, dtype, n, size, seed)[me], right(kind, dtype, n, size, n if op == "mean" else 1)
        before, out = given.copy(), np.full_like(given, 7)

        def require(found, bits, what, case=f"{kind.__name__} {name} {size} {op}"):
            if (found != bits).any():
                wrong.append(f"{what} {case}")

        comm.all_reduce(numbers, view(given, name), view(out, name), exact=True)
        require(out, due, "all_reduce")
        out[:] = 7
        comm.reduce(numbers, view(given, name), view(out, name) if me == n - 1 else None, n - 1, exact=True)
        require(out, due if me == n - 1 else 7, "reduce")
        rows = [np.roll(given, k) for k in range(n)]
        comm.reduce_scatter(numbers, [view(row, name) for row in rows], view(out, name), exact=True)
        require(out, np.roll(due, me), "reduce_scatter")
        require(given, before, "input of")
        comm.all_reduce(numbers, view(given, name), view(given, name), exact=True)
        require(given, due, "all_reduce in place")
    return wrong


LAYOUTS = ["aaa", "abab", "abc", *(pytest.param(names, marks=pytest.mark.slow) for names in ("aaaaa", "ab", "abbc"))]


@pytest.mark.parametrize("names", LAYOUTS)
def test_results_have_the_bits_of_rational_arithmetic(names):
    """For any hosts, and any order of the ranks, every reduction gives the exact result, rounded once, also if a host
    without a direct link receives partial sums and their overflow terms through another host."""
    for kind, dtype, size, op, _ in CASES:  # cached before the ranks are forked, so that they need not compute it
        right(kind, dtype, len(names), size, len(names) if op == "mean" else 1)
    seed, without_link = sum(map(ord, names)), ((0, 2),)
    for lost in [(), without_link] if names == "abc" else [()]:
        for wrong in ranks(len(names), table, seed, lost, environment=on(*names)):
            assert not wrong, wrong


def long_lists(rendezvous):
    comm, sizes = joined(rendezvous), [0]
    send = comm.transport.send

    def counting(address, nbytes, dst, tag):
        sizes.append(nbytes if tag == OVERFLOW_TAG else 0)
        return send(address, nbytes, dst, tag)

    comm.transport.send = counting
    given = inputs(wide, "bfloat16", comm.size, 700_000, 0)[comm.rank]
    comm.all_reduce(ReduceOp.SUM, view(given, "bfloat16"), view(given, "bfloat16"), exact=True)
    comm.close()
    return given, max(sizes)


def test_overflow_terms_that_are_not_read_before_they_are_expected():
    """A list of overflow terms arrives, also if its size, over 1 MiB, blocks a TCP connection until it is expected."""
    due = right(wide, "bfloat16", 5, 700_000, 1)
    found = ranks(5, long_lists, environment=on(*"aaaab"))  # sums of the four ranks have overflow terms, one rank none
    assert max(longest for _, longest in found) > 1 << 20
    for got, _ in found:
        assert (got == due).all()


def numpy_group(rendezvous):
    """Reduce NumPy arrays, exactly and by default, several times. Compare the bits of the exact results."""
    group, counter = group_of(rendezvous)
    n, me = group.size, group.rank
    for dtype in ("float32", "float64"):
        x = inputs(wide, dtype, n, 600, 3)[me].view(dtype)
        rows = np.stack([np.roll(x, k) for k in range(n)])
        due, mean = (right(wide, dtype, n, 600, divisor) for divisor in (1, n))
        for turn in range(3):
            hits = counter.hits
            results = {
                "sum": (group.all_reduce(x, exact=True), due),
                "mean": (group.all_reduce(x, "mean", np.empty_like(x), exact=True), mean),
                "in place": (group.all_reduce(y := x.copy(), "SUM", y, exact=True), due),
                "reduce_scatter": (group.reduce_scatter(rows, exact=True), np.roll(due, me)),
            }
            group.all_reduce(x)
            assert counter.hits - hits == (5 if turn else 1), "the calls are prepared"
            root = group.reduce(x, exact=True)
            if me == 0:
                results["reduce"] = root, due
            assert not [name for name, (got, bits) in results.items() if (got.view(bits.dtype) != bits).any()]
    with pytest.raises(ArgumentError, match="exact must be True or False"):
        group.all_reduce(x, exact=1)
    assert (group.all_reduce(np.full(3, me + 1), "mean", exact=True) == (n + 1) / 2).all()
    group.close()


def test_numpy_arrays():
    """Exact calls of NumPy ranks are exact, also if they are prepared, or follow default calls on the same arrays."""
    ranks(3, numpy_group)
