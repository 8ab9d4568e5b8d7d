"""The exchange of exact partial sums between hosts, for verified schedules, and any pieces and data."""

import ctypes

import numpy as np
import pytest
from exact_cases import KINDS, UNSIGNED, exact_sums, narrow, terms_of, wide
from planned import planned
from test_exchange import ALL, ThreadTransport, run_pieces, together

from crossreduce.lowering import lower
from crossreduce.ops import ReduceOp
from crossreduce.ranks.failures.peer_errors import PeerDisconnected
from crossreduce.ranks.inter_host.exact_exchange import OVERFLOW_TAG, ExactExchange, HostTerms
from crossreduce.ranks.inter_host.exchange import exchange_program
from crossreduce.ranks.intra_host.instructions import reduction_numbers

REDUCTIONS = [each for each in ALL if "broadcast" not in each.id]
RANKS = 2  # of each host


def exchange(schedule, terms, dtype, op, sizes, shared):
    """Run an exchange with one thread per host, and return the results. Each host has ``RANKS`` rows of the terms."""
    count = len(schedule.devices)
    numbers = reduction_numbers(op, dtype, count * RANKS, exact=True)
    starts = np.cumsum([0, *sizes])

    def host(k):
        program = exchange_program(lower(schedule), k, tuple(range(count)), sizes, numbers, len(sizes) == 1)
        made = ExactExchange(program, shared.at(k), tag=7, timeout_s=100, ranks=count * RANKS)
        rows = [np.ascontiguousarray(row) for row in terms[k * RANKS : (k + 1) * RANKS]]

        def put(stage):
            if sizes[stage]:
                addresses = [row.ctypes.data + int(starts[stage]) * row.itemsize for row in rows]
                made.add(stage, [HostTerms(sizes[stage], addresses, program.partial_at(stage))])

        others = [peer for peer in range(count) if peer != k]
        out = run_pieces(made, program, sizes, put, others, shared.at(k), terms.dtype)
        return out if k in schedule.chunks[0].destinations else None

    return together(count, host)


@pytest.mark.parametrize("schedule", REDUCTIONS)
def test_every_schedule_gives_the_bits_of_rational_arithmetic(schedule):
    """For any schedule, data, and number and size of pieces, with empty chunks, too, the results are rounded once."""
    count = len(schedule.devices)
    for number, sizes in enumerate(((64,), (1,), (3, 4, 3, 4, 4, 4, 4), (101, 100), (2, 1, 0, 1, 2))):
        dtype = [*UNSIGNED][number % 4]
        for kind in (KINDS[(number + count) % len(KINDS)], wide):
            terms = terms_of(kind, number, dtype, count * RANKS, sum(sizes))
            op = (ReduceOp.SUM, ReduceOp.MEAN)[number % 2]
            right = exact_sums(terms, dtype, count * RANKS if op is ReduceOp.MEAN else 1)
            shared = ThreadTransport(number, 1e-4)
            for host, got in enumerate(exchange(schedule, terms, dtype, op, sizes, shared)):
                if got is not None:
                    assert (got == right).all(), (host, kind.__name__, dtype, sizes)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2), ("float64", 3), ("bfloat16", 3), ("float16", 3)])
def test_the_bytes_between_hosts(dtype, limit):
    """A host sends ordinary data in messages of a fixed size, in all at most ``limit`` times the bytes of the array.
    Data with a wide range of exponents adds messages with 16 bytes per overflow term."""
    names = ("cpu:0", "cpu:1")
    for kind in (narrow, wide):
        terms, shared = terms_of(kind, 1, dtype, 2 * RANKS, 4000), ThreadTransport()
        exchange(planned("direct", names, names), terms, dtype, ReduceOp.SUM, (1000,) * 4, shared)
        sent = [size for src, _, size in shared.messages if src == 0]
        # The digest; for each of 4 pieces a header and partial sums of 500 elements, and 500 results.
        fixed = [len(b"call"), *[64 + 500 * 8 * (2 if dtype == "float64" else 1), 500 * terms.itemsize] * 4]
        if kind is narrow:
            assert sorted(sent) == sorted(fixed)
            assert sum(sent) <= limit * terms[0].nbytes + len(b"call")
        else:  # the sum of two float64s fits into two doubles, and that of float16s into one
            overflow = sum(sent) - sum(fixed)
            assert overflow % 16 == 0
            assert (overflow > 0) == (dtype in ("float32", "bfloat16"))


# A message of 10 partial sums of 4 ranks has at most 10 * (48 + 4) overflow terms (see ``most_overflow``).
@pytest.mark.parametrize("count", [-1, 1 << 40, 10 * 52 + 1])
def test_an_impossible_number_of_overflow_terms_is_refused(count):
    """A message whose header announces a negative or impossible number of overflow terms is refused."""
    names, terms, shared = ("cpu:0", "cpu:1"), np.ones((4, 20), "float32"), ThreadTransport()
    post = shared.post

    def corrupting(key, kind, address, nbytes):
        assert kind or key[-1] != OVERFLOW_TAG
        if kind == 0 and nbytes > 64:  # a send of partial sums, whose header begins with the number of overflow terms
            ctypes.c_int64.from_address(address).value = count
        return post(key, kind, address, nbytes)

    shared.post = corrupting
    with pytest.raises(PeerDisconnected, match="overflow terms for 10 partial sums of 4 ranks"):
        exchange(planned("direct", names, names), terms, "float32", ReduceOp.SUM, (20, 20), shared)
