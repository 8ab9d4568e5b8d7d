"""The null framework counts the copies, additions and bytes of a schedule, as its steps and spans imply."""

from collections import Counter

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from planned import planned
from running import run_engine
from strategies import FLOATS, INTEGERS, NAMED, named, names, ops, requests

from crossreduce import AllReduceCrossDeviceOps, IndexedSlices, PerReplica, UnsupportedError
from crossreduce.frameworks.null import Counts, NullFramework
from crossreduce.packing import itemsize
from crossreduce.planning import PLANNERS

WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "int64": 8}


def by_steps(schedule, size, width, after, final):
    """Return the ``Counts`` of a schedule's steps for a buffer of ``size`` elements. An element has ``width`` bytes in
    an input, ``after`` bytes in a partial sum, and ``final`` bytes in the full sum."""
    spans = [(start, stop) for start, stop in schedule.spans(size)]
    if size == 0:  # an empty buffer passes through chunk 0, and the other chunks are skipped
        spans = [(0, 0)] + [None] * (len(spans) - 1)
    base = len(schedule.devices) + 1
    # By chunk and device: which contributions the value contains, as a number, and the bytes of an element.
    held = {(c, s): (base**s, width) for c, chunk in enumerate(schedule.chunks) for s in chunk.sources}
    copies, additions, nbytes = 0, 0, Counter()
    for steps in schedule.rounds:
        before = dict(held)
        for chunk, dst, srcs in steps:
            if spans[chunk] is None or (size and spans[chunk][0] == spans[chunk][1]):
                continue
            length = spans[chunk][1] - spans[chunk][0]
            for src in srcs:
                if src != dst:
                    copies += 1
                    nbytes[schedule.devices[src], schedule.devices[dst]] += length * before[chunk, src][1]
            additions += (len(srcs) - 1) * length
            total = sum(before[chunk, src][0] for src in srcs)
            if len(srcs) == 1:
                held[chunk, dst] = before[chunk, srcs[0]]
            else:
                due = sum(base**source for source in schedule.chunks[chunk].sources)
                held[chunk, dst] = (total, final if total == due else after)
    return Counts(copies, additions, nbytes)


@examples(300)
@given(named, requests(most_packs=4), ops, st.sampled_from(sorted(WIDTH)), st.integers(0, 60))
def test_counts_are_those_of_the_steps(algorithm, ask, op, dtype, size):
    """The copies, additions and bytes are those that follow from steps and dtypes."""
    if algorithm == "forest":
        schedule = planned(algorithm, ask.sources, ask.destinations)
    else:
        schedule = PLANNERS[algorithm](ask.devices, ask.sources, ask.destinations, packs=ask.packs, first=ask.first)
    null = NullFramework()
    run_engine("loop", schedule, op, [null.zeros((size,), dtype, source) for source in ask.sources], null)
    after = final = WIDTH[dtype]
    if dtype in ("float16", "bfloat16") and op not in ("min", "max"):
        after = 4  # accumulated in float32
    elif op == "mean" and dtype in INTEGERS:
        after = final = 8  # float64
    width = final if len(ask.sources) == 1 else WIDTH[dtype]  # a single input is the result
    wanted = by_steps(schedule, size, width, after, final)
    assert null.counts == wanted
    assert null.counts.bytes_moved == sum(wanted.bytes.values())


@pytest.mark.parametrize("algorithm", NAMED)
def test_results_have_shape_dtype_and_device(algorithm):
    """Results have the shape, dtype and device of real results: the mean of int32 is float64, on each destination."""
    null = NullFramework()
    value = PerReplica([null.zeros((2, 3), "int32", name) for name in names(5)])
    for op, dtype in (("sum", "int32"), ("mean", "float64")):
        result = AllReduceCrossDeviceOps(algorithm, num_packs=2).reduce(op, value, value)
        assert [(x.shape, x.dtype, x.device) for x in result] == [((2, 3), dtype, name) for name in names(5)]


@given(st.sampled_from([*FLOATS, *INTEGERS]), st.integers(0, 9))
def test_a_copy_counts_its_bytes(dtype, size):
    """A copy to another device is counted once, with its bytes. Values that are not null arrays are refused."""
    null, other = NullFramework(), NullFramework()
    x = null.zeros((size, 2), dtype, "cpu:0")
    assert null.to_device(x, "cpu:0") is x
    assert null.counts == Counts()
    assert null.to_device(x, "cpu:1").device == "cpu:1"
    assert null.counts == Counts(1, 0, Counter({("cpu:0", "cpu:1"): 2 * size * itemsize(dtype)}))
    assert other.counts == Counts()
    for wrong in (3.0, [1], None, "x"):
        with pytest.raises(UnsupportedError, match=r"a NullFramework accepts only null arrays[\s\S]*null\.zeros"):
            null.array(wrong)


def test_sparse_values_are_counted_too():
    """Slices are concatenated on one device, and the bytes of their values and indices are counted."""
    null = NullFramework()
    places = [(k + 1, f"cuda:{k}") for k in range(3)]
    parts = [(null.zeros((n, 4), "float32", device), null.zeros((n,), "int32", device)) for n, device in places]
    value = PerReplica([IndexedSlices(*part) for part in parts])
    (result,) = AllReduceCrossDeviceOps("ring").reduce("sum", value, "cuda:0")
    assert (result.values.shape, result.indices.shape) == ((6, 4), (6,))
    row = 4 * itemsize("float32") + itemsize("int32")  # the bytes of a slice and its index
    assert null.counts.bytes == {("cuda:1", "cuda:0"): 2 * row, ("cuda:2", "cuda:0"): 3 * row}
