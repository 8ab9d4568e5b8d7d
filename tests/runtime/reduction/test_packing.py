"""Packing of tensors into flat buffers, and of buffers into packs."""

import math
from itertools import pairwise

import numpy as np
import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from strategies import algorithms, dtypes, names, packings, shapes

import crossreduce as cr
from crossreduce.packing import Packing, itemsize, layout
from crossreduce.planning import PLANNERS
from crossreduce.reduction import pipeline
from crossreduce.values import TensorSpec

specs = st.lists(st.builds(TensorSpec, shapes, dtypes), min_size=1, max_size=12).map(tuple)
few = st.lists(st.builds(TensorSpec, shapes, st.sampled_from(["float32", "int8"])), min_size=1, max_size=12).map(tuple)


def f32(*sizes):
    return tuple(TensorSpec((size,), "float32") for size in sizes)


@examples(300)
@given(specs | few, packings(), algorithms, st.integers(1, 5))
def test_each_tensor_is_in_one_buffer(batch, packing, algorithm, n):
    """Each tensor is in one buffer of its dtype, without gaps and in order. The packs of a buffer keep the limits."""
    num_packs, nbytes, *_ = packing
    buffers = layout(batch, packing)
    assert sorted(span.tensor for buffer in buffers for span in buffer.spans) == list(range(len(batch)))
    if num_packs or nbytes:
        assert [buffer.dtype for buffer in buffers] == list(dict.fromkeys(spec.dtype for spec in batch))
    for buffer in buffers:
        end = 0
        for span in buffer.spans:
            assert batch[span.tensor] == TensorSpec(span.shape, buffer.dtype)
            assert span.start == end
            assert span.size == math.prod(span.shape)
            end += span.size
        assert buffer.size == end
        assert all(a.tensor < b.tensor for a, b in pairwise(buffer.spans))
        schedule = PLANNERS[algorithm](names(n), packs=buffer.packs)
        per_pack = len(schedule.chunks) // buffer.packs
        spans = schedule.spans(buffer.size)
        pack_sizes = [spans[p * per_pack + per_pack - 1][1] - spans[p * per_pack][0] for p in range(buffer.packs)]
        item = itemsize(buffer.dtype)
        assert item == oracle.dtype_of(buffer.dtype).itemsize
        assert max(pack_sizes) * item <= max(nbytes, item) or not nbytes
        assert max(pack_sizes) - min(pack_sizes) <= 1
        assert sum(pack_sizes) == buffer.size
        needed = math.ceil(buffer.size / max(1, nbytes // item)) if nbytes else 1
        assert buffer.packs == max(1, min(buffer.size, max(num_packs, needed)))


@pytest.mark.parametrize(
    ("batch", "packing", "wanted"),
    [
        # TensorFlow 2.0 joins up to small_group + 2 tensors (measured on CPU): deviation D15 in docs/contract.md.
        ((8, 9, 12, 125), Packing(0, 0, 40, 10), [17, 12, 125]),
        ((125, 6, 5, 7, 100), Packing(0, 0, 40, 10), [125, 18, 100]),
        ((1,) * 25, Packing(0, 0, 40, 10), [10, 10, 5]),
        ((0, 1), Packing(0, 0, 40, 10), [1]),
        ((10, 11), Packing(0, 0, 40, 10), [10, 11]),
        ((1,) * 5, Packing(0, 0, 40, 2), [2, 2, 1]),
        ((1,) * 5, Packing(0, 0, 40, 0), [1] * 5),
        ((1,) * 5, Packing(0, 0, 0, 10), [1] * 5),
        ((1,) * 5, Packing(1, 0, 40, 2), [5]),  # with packs, all tensors share a buffer
        ((1,) * 5, Packing(0, 8, 40, 2), [5]),
    ],
)
def test_small_tensors_are_joined(batch, packing, wanted):
    """Without packs, up to small_group neighbouring tensors of at most small_bytes bytes each share a buffer.

    The fields of Packing: num_packs, bytes_per_pack, small_bytes, small_group. ``wanted``: the elements of each buffer.
    """
    assert [buffer.size for buffer in layout(f32(*batch), packing)] == wanted


def test_joined_tensors_have_one_dtype():
    """f32 f32 i32 f32 f32 is joined to three buffers. Other dtypes are joined, too, unlike in TensorFlow."""
    batch = (*f32(1, 1), TensorSpec((1,), "int32"), *f32(1, 1))
    buffers = layout(batch, Packing(0, 0, 40, 10))
    assert [(b.dtype, b.size) for b in buffers] == [("float32", 2), ("int32", 1), ("float32", 2)]
    for nbytes, sizes in ((10, [15]), (9, [5, 5, 5])):
        assert [b.size for b in layout((TensorSpec((5,), "bfloat16"),) * 3, Packing(0, 0, nbytes, 10))] == sizes


@pytest.mark.parametrize(
    ("algorithm", "most"), [("hierarchical_copy", 4), ("ring", 1), ("direct", 1), ("one_device", 4)]
)
def test_a_plan_does_not_grow_with_the_number_of_packs(monkeypatch, algorithm, most):
    """No schedule has more than ``most`` packs. More packs, here 101 of at most 40 bytes, take several schedules."""
    packs, schedule_for = [], pipeline.schedule_for

    def requested(request):
        packs.append(request.packs)
        return schedule_for(request)

    monkeypatch.setattr(pipeline, "schedule_for", requested)
    pipeline.layouts.cache_clear()
    value = cr.PerReplica([np.arange(1001, dtype="float32") * k for k in range(4)])
    options = cr.CommunicationOptions(bytes_per_pack=40)
    result = cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value, options)
    assert all((x == 6 * np.arange(1001)).all() for x in result)
    assert (max(packs), sum(packs)) == (most, 101)
