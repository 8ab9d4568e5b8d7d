"""``out=``: results are written into the given arrays. See also test_out_errors.py and, for any batch, test_laws.py."""

from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from guarded import SHARED, Adding, Arrays, added, refused, two
from pairs import each

import crossreduce as cr
from crossreduce import Mirrored, MismatchError, PerReplica, UnsupportedError

OPS = cr.AllReduceCrossDeviceOps()


def test_other_kinds_of_inputs_and_out(arrays):
    """``out`` may be on a device without a replica. Inputs may be strided, repeated, numbers, or partly sparse."""
    out = Mirrored([arrays.blank((6,), "float64")], ["cpu:7"])
    result = cr.ReductionToOneDevice().reduce("mean", arrays.value(two()), "cpu:7", out=out)
    assert result[0] is out[0]
    assert out[0].tolist() == [1.5] * 6
    scalars = PerReplica([np.zeros(()), np.zeros(())])
    OPS.reduce("sum", PerReplica([1.5, 2.0]), scalars, out=scalars)
    assert [x.item() for x in scalars] == [3.5, 3.5]
    x = np.arange(12.0).reshape(3, 4)
    value, out = PerReplica([arrays.put(x.T).T, arrays.put(np.repeat(x, 2, 1))[:, ::2]]), arrays.blanks(2, (3, 4))
    OPS.reduce("sum", value, value, out=out)
    assert [y.tolist() for y in out] == [(2 * x).tolist()] * 2
    x, other = arrays.put([1.0, 2.0]), arrays.blank((2,), "float64")
    value, outs = PerReplica([x, x]), [arrays.blanks(2, (2,)), arrays.blanks(2, (2,))]
    OPS.batch_reduce("sum", [(value, value)] * 2, out=outs)
    OPS.reduce("sum", value, value, out=PerReplica([other, x]))
    assert [y.tolist() for y in (*outs[0], *outs[1], other, x)] == [[2.0, 4.0]] * 6
    rows, indices = arrays.put(np.ones((2, 3))), arrays.put(np.array([0, 2]))
    value = PerReplica([cr.IndexedSlices(rows, indices, (4, 3)), arrays.put(np.full((4, 3), 2.0))])
    out = PerReplica([arrays.blank((4, 3), "float64"), value[1]])
    for y, target in zip(OPS.reduce("sum", value, value, out=out), out, strict=True):
        assert y is target
        assert y.tolist() == [[3.0] * 3, [2.0] * 3, [3.0] * 3, [2.0] * 3]


class Layer(NamedTuple):
    w: Any
    b: Any


@pytest.mark.parametrize("in_place", [False, True])
def test_trees_into_trees(arrays, in_place):
    """The result of each leaf is written into the same leaf of ``out``. Results are new trees with these leaves."""

    def tree(k):
        w, b, step = (arrays.put(np.full(shape, k, kind)) for shape, kind in (((2, 3), "f4"), ((), "f4"), (1, "i4")))
        return {"layers": [Layer(w, b)], "step": (step,), "no": None}

    def leaves(tree):
        return [*tree["layers"][0], *tree["step"]]

    trees = [tree(1), tree(5)]
    outs = trees if in_place else [tree(0), tree(0)]
    results = cr.all_reduce(trees, "sum", out=(x for x in outs))
    assert [type(result["layers"][0]) for result in results] == [Layer, Layer]
    for result, out, given in zip(results, outs, trees, strict=True):
        assert result is not out
        assert all(y is target for y, target in zip(leaves(result), leaves(out), strict=True))
        assert all((np.asarray(y) == 6).all() for y in leaves(result))
        assert in_place or not any((np.asarray(x) == 6).any() for x in leaves(given))
    assert cr.all_reduce([{}, {}], out=[{}, {}]) == [{}, {}]


class CallsBatchReduce(cr.CrossDeviceOps):
    """Calls the public ``batch_reduce`` of another op."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        to = PerReplica([0] * len(destinations), destinations)
        return cr.HierarchicalCopyAllReduce().batch_reduce(reduce_op, [(per_replica_value, to)], options)[0]


class Twice(cr.AllReduceCrossDeviceOps):
    """Reduces everything twice, as a retry would. This is right, since the first reduction does not write ``out``."""

    def batch_reduce_implementation(self, *args):
        super().batch_reduce_implementation(*args)
        return super().batch_reduce_implementation(*args)


@pytest.mark.parametrize(
    ("kind", "in_place", "writable"),
    each([Adding, CallsBatchReduce, Twice, Adding, Twice], [True, False], ["numpy", "numpy", "torch"]),
    indirect=["writable"],
)
def test_results_of_a_subclass_are_written_into_out(arrays, kind, in_place):
    """Results of custom implementations and of ``accumulation_fn`` are written into ``out``, also in place."""
    values = [arrays.value(two(k)) for k in (1.0, 10.0, 100.0, 1000.0, 2000.0)]
    outs = values if in_place else [arrays.blanks(2, (6,)) for _ in values]
    results = [kind().reduce("sum", values[0], values[0], out=outs[0])]
    results += kind().batch_reduce("sum", [(value, value) for value in values[1:3]], out=outs[1:3])
    by_function = cr.ReductionToOneDevice(accumulation_fn=added)
    for op, value, out in (("sum", values[3], outs[3]), ("mean", values[4], outs[4])):
        results.append(by_function.reduce(op, value, value, out=out))
    for result, target, due in zip(results, outs, (3.0, 30.0, 300.0, 3000.0, 3000.0), strict=True):
        assert all(y is x for y, x in zip(result, target, strict=True))
        assert [y.tolist() for y in target] == [[due] * 6] * 2


def test_a_function_that_returns_another_dtype(arrays):
    """If ``accumulation_fn`` returns another dtype than ``out`` has, a MismatchError is raised, and nothing written."""
    wide = (lambda x: x.astype("float64")) if arrays.framework.name == "numpy" else (lambda x: x.double())
    value, out = arrays.value([np.ones(5, "float32")] * 2), arrays.blanks(2, (5,), "float32")
    ops = cr.ReductionToOneDevice(accumulation_fn=lambda xs: wide(added(xs)))
    refused(arrays, MismatchError, "a result differs from its array of out", ops.reduce, "sum", value, value, out=out)


def test_parameters_in_and_out(torch_):
    """Parameters can be inputs and ``out``. The results are these parameters, which still require gradients."""
    torch = torch_.torch
    weights = [torch.nn.Parameter(torch.full((3,), k)) for k in (1.0, 3.0)]
    results = cr.all_reduce([{"w": w} for w in weights], "mean", out=[{"w": w} for w in weights])
    for result, w in zip(results, weights, strict=True):
        assert result["w"] is w
        assert (w.requires_grad, w.is_leaf, w.tolist()) == (True, True, [2.0] * 3)
    out = [torch.zeros(3) for _ in weights]
    cr.all_reduce(weights, "sum", out=out)
    assert [(x.tolist(), x.requires_grad) for x in out] == [([4.0] * 3, False)] * 2


@pytest.mark.parametrize(
    ("ops", "size"), [(OPS, 3), (OPS, 100_000), (cr.ReductionToOneDevice(accumulation_fn=added), 3), (Adding(), 3)]
)
def test_a_write_increments_the_version(torch_, ops, size):
    """A write into ``out`` invalidates the tensors that autograd has saved. A call that raises an error does not."""
    torch = torch_.torch
    w = torch.ones(size, requires_grad=True)
    saved = w * 2
    loss = (saved * saved).sum()
    for other, words in ((saved, SHARED), (torch.zeros(2 * size)[::2], "results need tensors that are contiguous")):
        with pytest.raises(cr.ReductionError, match=words):
            cr.all_reduce([torch.ones(size)] * 2, out=[saved, other], cross_device_ops=ops)
    loss.backward(retain_graph=True)
    assert (w.grad == 8).all()
    cr.all_reduce([torch.ones(size)] * 2, out=[saved, torch.zeros(size)], cross_device_ops=ops)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_and_inference_tensors(torch_):
    """Lazy views (conjugated or negated), and inference tensors outside of that mode, raise errors as ``out``."""
    torch, arrays = torch_.torch, Arrays(torch_)
    x = arrays.put(np.array([1 + 2j, 3 + 4j]))
    for view, dtype, words in (
        (x.conj(), "complex128", "without a pending conjugation or negation"),
        (x.conj().imag, "float64", "that are contiguous"),
    ):
        value = arrays.value([np.ones(2, oracle.dtype_of(dtype))] * 2)
        out = PerReplica([view, arrays.blank((2,), dtype)])
        refused(arrays, UnsupportedError, words, OPS.reduce, "sum", value, value, out=out)
    with torch.inference_mode():
        value, out = [torch.ones(3), torch.ones(3)], [torch.zeros(3), torch.zeros(3)]
        cr.all_reduce(value, out=out)
        cr.all_reduce(value, out=value)
    assert [x.tolist() for x in (*out, *value)] == [[2.0] * 3] * 4
    fresh = torch.zeros(3)
    with pytest.raises(UnsupportedError, match="inference"):
        cr.all_reduce([torch.ones(3), torch.ones(3)], out=[fresh, out[0]])
    assert fresh.tolist() == [0] * 3
