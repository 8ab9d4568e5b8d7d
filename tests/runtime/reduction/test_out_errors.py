"""Invalid values of ``out=`` raise errors before anything is written. test_out.py has the valid calls."""

import numpy as np
import pytest
from expect import cpus
from guarded import LIKE, SHARED, WRITABLE, Adding, Arrays, added, refused, two
from pairs import pairs

import crossreduce as cr
from crossreduce import ArgumentError, MismatchError, PerReplica, UnsupportedError

OPS = cr.AllReduceCrossDeviceOps()
EACH = "out must be a PerReplica or Mirrored on the destinations, in their order"
PAIRS = "out must have one PerReplica or Mirrored for each pair"
TREES = "out must be a list of one tree per replica"
NUMPY = "results need writable NumPy arrays in C order"

WRONG = {
    "shape": (lambda a, v: a.blanks(2, (5,)), MismatchError, LIKE),
    "dtype": (lambda a, v: a.blanks(2, (6,), "float32"), MismatchError, LIKE),
    "too few": (lambda a, v: a.blanks(1, (6,)), ArgumentError, EACH),
    "devices": (lambda a, v: a.blanks(2, (6,), devices=cpus(0, 2)), ArgumentError, EACH),
    "order": (lambda a, v: a.blanks(2, (6,), devices=cpus(1, 0)), ArgumentError, EACH),
    "a list": (lambda a, v: list(a.blanks(2, (6,))), ArgumentError, EACH),
    "a name": (lambda a, v: "cpu:0", ArgumentError, EACH),
    "numbers": (lambda a, v: PerReplica([1.0, 2.0]), UnsupportedError, NUMPY),
    "slices": (
        lambda a, v: PerReplica([cr.IndexedSlices(a.blank((6,), "float64"), a.put(np.arange(6)), (6,)) for _ in v]),
        UnsupportedError, f"{NUMPY}|this is not a tensor that can be reduced",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_out(arrays, name):
    """An invalid out raises an error with the given object and a remedy. In a batch, the error names the pair."""
    make, error, words = WRONG[name]
    value, good = arrays.value(two()), arrays.value(two())
    pairs = [(good, good), (value, value)]
    out = make(arrays, value)
    for ops in (OPS, cr.ReductionToOneDevice(), Adding()):
        refused(arrays, error, words, ops.reduce, "sum", value, value, out=out)
        if isinstance(out, PerReplica):
            refused(arrays, error, f"^pair 1: ({words})", ops.batch_reduce, "sum", pairs, out=[good, out])
    for outs in ([good, "cpu:0"], [], [good], [good] * 3, "ab", {0: 0, 1: 1}, 3, PerReplica([1.0, 1.0])):
        refused(arrays, ArgumentError, PAIRS, OPS.batch_reduce, "sum", pairs, out=outs)


def test_wrong_trees(arrays):
    """out must have one tree per replica, with the same structure. An error about a leaf has its path."""
    trees = [{"a": arrays.put(x), "b": arrays.put(x)} for x in two()]
    a, b = arrays.blank((6,), "float64"), arrays.blank((6,), "float64")
    for out in ([], trees[:1], [*trees, trees[0]], trees[0], a, "ab", 3):
        refused(arrays, ArgumentError, TREES, cr.all_reduce, trees, out=out)
    for out in ([], [{}, {}]):  # also of trees without leaves
        refused(arrays, ArgumentError, TREES + r"\.(.|\n)*a list of 1 tree$", cr.all_reduce, [{}], out=out)
    for wrong, error, words in [
        (arrays.blank((5,), "float64"), MismatchError, LIKE),
        (1.0, UnsupportedError, "results need"),
        ("b", ArgumentError, "this is not an array"),
        (type, ArgumentError, "this is not an array"),
    ]:
        out = [{"a": a, "b": wrong}, {"a": b, "b": wrong}]
        refused(arrays, error, r"^leaf tree\['b'\]: .*" + words, cr.all_reduce, trees, out=out)
    for out, missing in (
        ([{"a": a}, {"a": b}], r"tree\['b'\]"),
        ([{"a": a, "c": a}, {"a": b, "c": b}], r"tree\['c'\]"),
        ([[a, a], [b, b]], r"tree\[0\]"),
    ):
        words = r"the trees of out differ in structure from those of the replicas\.\n.*" + missing
        refused(arrays, MismatchError, words, cr.all_reduce, trees, out=out)


def test_sparse_values_have_no_out(arrays):
    """out raises an error for a sparse result, since the number of slices of the result depends on the inputs."""
    slices = [cr.IndexedSlices(arrays.put(np.ones((2, 3))), arrays.put(np.array([0, 2])), (4, 3)) for _ in range(2)]
    value, out = PerReplica(slices), arrays.blanks(2, (4, 3))
    dense = arrays.value(two())
    words = "out cannot be used for a sparse result, whose size is not known in advance"
    for ops in (OPS, cr.ReductionToOneDevice(), Adding()):
        refused(arrays, UnsupportedError, words, ops.reduce, "sum", value, value, out=out)
        refused(arrays, UnsupportedError, words, ops.reduce, "sum", value, value, out=value)
        pairs = [(dense, dense), (value, value)]
        refused(arrays, UnsupportedError, "^pair 1: " + words, ops.batch_reduce, "sum", pairs, out=[dense, out])
    trees = [{"d": x, "s": s} for x, s in zip(dense, slices, strict=True)]
    refused(arrays, UnsupportedError, r"^leaf tree\['s'\]: " + words, cr.all_reduce, trees, out=trees)


@pytest.mark.parametrize(("name", "library"), [("jax", "JAX arrays"), ("tensorflow", "TensorFlow's tensors")])
def test_immutable_arrays(request, arrays, name, library):
    """Arrays of JAX and TensorFlow, which are immutable, raise an error as out, and no value of a batch is reduced."""
    final = request.getfixturevalue(f"{name}_")
    words = f"{library} cannot be written into"
    value, good = PerReplica(final.arrays(two())), arrays.value(two())
    for ops in (OPS, cr.ReductionToOneDevice(), Adding()):
        refused(arrays, UnsupportedError, words, ops.reduce, "sum", value, value, out=value)
        batch = [(good, good), (value, value)]
        refused(arrays, UnsupportedError, "^pair 1: " + words, ops.batch_reduce, "sum", batch, out=[good, value])
        refused(arrays, MismatchError, LIKE, ops.reduce, "sum", value, value, out=good)
    trees = [{"a": x, "b": y} for x, y in zip(good, value, strict=True)]
    refused(arrays, UnsupportedError, r"^leaf tree\['b'\]: " + words, cr.all_reduce, trees, out=trees)
    assert [final.to_numpy(x).tolist() for x in value] == [x.tolist() for x in two()]


def test_arrays_of_another_framework(numpy_, torch_):
    """A torch tensor as out of a NumPy result is an error, and vice versa, although they could share memory."""
    ours, theirs = Arrays(numpy_), Arrays(torch_)
    value, other = ours.value(two()), theirs.value(two())
    for a, b in ((value, other), (other, value)):
        for out in (b, PerReplica([a[0], b[1]])):
            before = theirs.contents()
            refused(ours, MismatchError, LIKE, OPS.reduce, "sum", a, a, out=out)
            assert theirs.contents() == before


OPS_BY_PATH = {
    "kernels": cr.AllReduceCrossDeviceOps("direct"),
    "packs": cr.AllReduceCrossDeviceOps("ring", num_packs=3),
    "several dtypes": cr.AllReduceCrossDeviceOps("hierarchical_copy"),
    "loop": cr.AllReduceCrossDeviceOps("direct"),
    "one device": cr.ReductionToOneDevice(),
    "function": cr.ReductionToOneDevice(accumulation_fn=added),
    "subclass": Adding(),
}


def partly_sparse(arrays, value):
    """Return ``value`` with a sparse first component, whose slices have the same memory. The "loop" engine is used."""
    rows = arrays.put(np.arange(len(value[0])))
    return PerReplica([cr.IndexedSlices(value[0], rows, tuple(value[0].shape)), *value.values[1:]], value.devices)


def wrong_pairs(a):
    """Return batches by name: lists of pairs of a value and an out with an unsupported layout or with shared memory."""
    first, second, out, block = a.value(two()), a.value(two(10)), a.blanks(2, (6,)), a.put(np.arange(7.0))
    matrix, locked = a.blank((3, 2), "float64"), np.zeros(6)
    locked.flags.writeable = False
    return {
        "read-only": [(first, PerReplica([out[0], locked]))],
        "strided": [(a.value(two(1, (3, 2))), PerReplica([matrix, a.blank((2, 3), "float64").T]))],
        "overlapping": [(first, PerReplica([block[1:], block[:6]]))],
        "shared by pairs": [(first, out), (second, out)],
        "another pair's input": [(first, second), (second, out)],
        "in place and not": [(first, first), (first, out)],
        "shifted": [(PerReplica([block[:6], first[1]]), PerReplica([out[0], block[1:]]))],
    }


ORDER = r"results need (writable NumPy arrays in C order|tensors that are contiguous)"
LAYOUTS = {"read-only": ORDER + r"[\s\S]*read-only", "strided": ORDER}
SHARING = ("overlapping", "shared by pairs", "another pair's input", "in place and not", "shifted")
CASES = [
    *pairs(["strided", *SHARING], OPS_BY_PATH, WRITABLE),
    *(("read-only", path, "numpy") for path in OPS_BY_PATH),  # torch does not have such tensors
]


@pytest.mark.parametrize(("name", "path", "writable"), CASES, indirect=["writable"])
def test_out_is_checked_before_anything_is_written(arrays, name, path):
    """Unsupported layouts and shared memory of out raise errors before the first write, in every implementation."""
    rows = wrong_pairs(arrays)[name]
    if path == "several dtypes":
        integers = arrays.value([np.int32([1, 2]), np.int32([3, 4])])
        rows = [(integers, integers), *rows]  # this result would be written first
    elif path == "loop":
        rows = [(partly_sparse(arrays, value), out) for value, out in rows]
    batch = [(value, PerReplica([0] * len(out), out.devices)) for value, out in rows]
    error, words = (UnsupportedError, LAYOUTS[name]) if name in LAYOUTS else (ArgumentError, SHARED)
    if len(batch) == 1:
        refused(arrays, error, words, OPS_BY_PATH[path].reduce, "sum", *batch[0], out=rows[0][1])
    outs = [out for _, out in rows]
    if path != "several dtypes":
        good = arrays.value(two())
        batch, outs = [(good, good), *batch], [good, *outs]
    words = rf"^pair \d: (.|\n)*({words})" if len(batch) > 1 else words
    refused(arrays, error, words, OPS_BY_PATH[path].batch_reduce, "sum", batch, out=outs)
