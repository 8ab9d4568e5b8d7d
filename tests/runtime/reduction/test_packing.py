"""Packing: every tensor is in exactly one flat buffer, and unpacking restores it to the bit."""

import math
from itertools import pairwise

import numpy as np
import oracle
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from running import bounds
from strategies import algorithms, arrays, dtypes, names, packings, shapes

import crossreduce as cr
from crossreduce import ArgumentError
from crossreduce.frameworks import get
from crossreduce.packing import MOST_PACKS, Packing, cuts, itemsize, layout
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
    """Each tensor is in exactly one buffer of its dtype; spans have no gaps and have the order of the batch. With
    num_packs or bytes_per_pack there is one buffer per dtype, in order of appearance. No pack has more bytes than the
    limit, except for a single element that is larger; there are no more packs than that and num_packs need."""
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
        packs = [spans[p * per_pack + per_pack - 1][1] - spans[p * per_pack][0] for p in range(buffer.packs)]
        size = itemsize(buffer.dtype)
        assert size == oracle.dtype_of(buffer.dtype).itemsize
        assert max(packs) * size <= max(nbytes, size) or not nbytes
        assert max(packs) - min(packs) <= 1
        assert sum(packs) == buffer.size
        needed = math.ceil(buffer.size / max(1, nbytes // size)) if nbytes else 1
        assert buffer.packs == max(1, min(buffer.size, max(num_packs, needed)))


@pytest.mark.parametrize(
    ("batch", "packing", "wanted"),
    [
        # TensorFlow 2.0 joins up to small_group + 2 tensors (measured on CPU): deviation D15 in docs/contract.md.
        ((8, 9, 12, 125), Packing(0, 0, 40, 10), [17, 12, 125]),
        ((125, 6, 5, 7, 100), Packing(0, 0, 40, 10), [125, 18, 100]),
        ((1,) * 25, Packing(0, 0, 40, 10), [10, 10, 5]),
        ((1, 100, 1), Packing(0, 0, 40, 10), [1, 100, 1]),
        ((0, 1), Packing(0, 0, 40, 10), [1]),
        ((10, 11), Packing(0, 0, 40, 10), [10, 11]),
        ((1,) * 5, Packing(0, 0, 40, 1), [1] * 5),
        ((1,) * 5, Packing(0, 0, 40, 2), [2, 2, 1]),
        ((1,) * 5, Packing(0, 0, 40, 0), [1] * 5),
        ((1,) * 5, Packing(0, 0, 0, 10), [1] * 5),
        ((1,) * 5, Packing(1, 0, 40, 2), [5]),  # with packs, all tensors share a buffer
        ((1,) * 5, Packing(0, 8, 40, 2), [5]),
    ],
)
def test_small_tensors_are_joined(batch, packing, wanted):
    """Without packs, neighbours of at most small_bytes bytes each share a buffer, at most small_group of them."""
    assert [buffer.size for buffer in layout(f32(*batch), packing)] == wanted


def test_small_runs_end_at_another_dtype():
    """A run has one dtype: f32 f32 i32 f32 f32 is three runs. The dtype may be any, which is not so in TensorFlow."""
    batch = (*f32(1, 1), TensorSpec((1,), "int32"), *f32(1, 1))
    assert [(b.dtype, b.size) for b in layout(batch, Packing(0, 0, 40, 10))] == [
        ("float32", 2),
        ("int32", 1),
        ("float32", 2),
    ]
    halves = (TensorSpec((5,), "bfloat16"),) * 3
    assert [buffer.size for buffer in layout(halves, Packing(0, 0, 10, 10))] == [15]
    assert [buffer.size for buffer in layout(halves, Packing(0, 0, 9, 10))] == [5, 5, 5]


def test_most_packs():
    """More than MOST_PACKS packs raise an error that states the number of packs and the given options."""
    assert layout(f32(MOST_PACKS), Packing(MOST_PACKS))[0].packs == MOST_PACKS
    assert layout(f32(MOST_PACKS), Packing(0, 1))[0].packs == MOST_PACKS
    words = r"10001 elements of float32 would be cut into 10001 packs; 10000 is the most[\s\S]*bytes_per_pack=1"
    with pytest.raises(ArgumentError, match=words):
        layout(f32(MOST_PACKS + 1), Packing(0, 1))
    with pytest.raises(ArgumentError, match=r"cut into 20000 packs[\s\S]*num_packs=20000"):
        layout(f32(10**6), Packing(20_000))


def test_tensors_of_unknown_shape_are_not_packed():
    """A tensor with an unknown size has its own buffer of one pack, for all packing options."""
    batch = (TensorSpec((None, 3), "float32"), *f32(4), TensorSpec((None,), "float32"), *f32(2))
    for packing in (Packing(), Packing(3), Packing(0, 8), Packing(0, 0, 100, 10)):
        buffers = layout(batch, packing)
        by_tensor = {span.tensor: buffer for buffer in buffers for span in buffer.spans}
        for tensor in (0, 2):
            assert by_tensor[tensor].size is None
            assert by_tensor[tensor].packs == 1
            assert len(by_tensor[tensor].spans) == 1
        assert by_tensor[1].size == (6 if packing.num_packs or packing.bytes_per_pack else 4)


@examples(300)
@given(specs | few, packings(), algorithms, st.integers(1, 5), st.data())
def test_unpack_undoes_pack(batch, packing, algorithm, n, data):
    """unpack(pack(xs)) == xs to the bit, for all parts into which a plan cuts the buffer; results have new memory."""
    framework = get("numpy")
    xs = [data.draw(arrays(spec.dtype, spec.shape, 1))[0] for spec in batch]
    before = [x.copy() for x in xs]
    back = [None] * len(xs)
    for buffer in layout(batch, packing):
        flat = framework.pack([xs[span.tensor] for span in buffer.spans])
        assert flat.shape == (buffer.size,)
        schedule = PLANNERS[algorithm](names(n), packs=buffer.packs)
        parts = [framework.slice(flat, *bound) for bound in bounds(schedule, buffer.size)]
        tensors = framework.unpack(parts, cuts(buffer.spans, bounds(schedule, buffer.size)), fresh=False)
        for span, tensor in zip(buffer.spans, tensors, strict=True):
            back[span.tensor] = tensor
    for x, tensor in zip(before, back, strict=True):
        assert tensor.shape == x.shape
        assert tensor.dtype == x.dtype
        assert tensor.tobytes() == x.tobytes()
        assert not any(np.shares_memory(tensor, x) for x in xs)


def test_a_fresh_part_that_is_one_tensor_is_not_copied():
    """A part that has no other reference and is exactly one tensor becomes that tensor without a copy."""
    framework = get("numpy")
    part = np.arange(6.0)
    (tensor,) = framework.unpack(
        [part], cuts(layout((TensorSpec((2, 3), "float64"),), Packing(1))[0].spans, ((0, 6),)), fresh=True
    )
    assert np.shares_memory(tensor, part)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.fixture
def planned(monkeypatch):
    """Record the plans of calls: the numbers of packs of requests, the sizes of buffers and of ranges in them."""
    found = {"packs": [], "buffers": [], "ranges": []}
    schedule_for, layouts = pipeline.schedule_for, pipeline.layouts

    def recorded(*args):
        for buffer, ranges in (lowered for made in layouts(*args) for lowered in made.buffers):
            found["buffers"].append(buffer.size)
            found["ranges"] += [each.stop - each.start for each in ranges]
        return layouts(*args)

    def requested(request):
        found["packs"].append(request.packs)
        return schedule_for(request)

    monkeypatch.setattr(pipeline, "schedule_for", requested)
    monkeypatch.setattr(pipeline, "layouts", recorded)
    layouts.cache_clear()
    return found


@pytest.mark.parametrize(
    ("algorithm", "most"), [("hierarchical_copy", 4), ("ring", 1), ("direct", 1), ("one_device", 4)]
)
def test_a_plan_does_not_grow_with_the_number_of_packs(planned, algorithm, most):
    """For any number of packs, a schedule has at most one tree per root, and every pack keeps the limit of bytes."""
    value = cr.PerReplica([np.arange(1000, dtype="float32") * k for k in range(4)])
    options = cr.CommunicationOptions(bytes_per_pack=40)
    result = cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value, options)
    assert all((x == 6 * np.arange(1000)).all() for x in result)
    assert (max(planned["packs"]), sum(planned["packs"])) == (most, 100)
    assert (max(planned["ranges"]), sum(planned["ranges"])) == (10 * most, 1000)


@pytest.mark.parametrize("group", [0, 1, 3, 12])
def test_groups_of_small_tensors(planned, group):
    """agg_small_grads_max_group=g joins at most g tensors: 25 scalars are in ceil(25/g) buffers; 0 joins none (D15)."""
    value = cr.PerReplica([np.float32(1), np.float32(2)])
    results = cr.AllReduceCrossDeviceOps("one_device", 0, 100, group).batch_reduce("sum", [(value, value)] * 25)
    assert [y.item() for result in results for y in result] == [3.0] * 50
    assert (sum(planned["buffers"]), max(planned["buffers"])) == (25, max(1, group))
    assert len(planned["buffers"]) == -(-25 // max(1, group))
