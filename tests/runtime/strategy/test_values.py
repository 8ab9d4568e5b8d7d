"""PerReplica, Mirrored and IndexedSlices: the components they store, and the arguments they reject."""

import pickle
import re

import numpy as np
import pytest

from crossreduce import ArgumentError, DeviceError, IndexedSlices, Mirrored, PerReplica
from crossreduce.values import TensorSpec, read_devices

each_kind = pytest.mark.parametrize("kind", [PerReplica, Mirrored])
A, B = np.zeros(3, "float32"), np.ones(3, "float32")


@each_kind
def test_components_and_devices_are_stored(kind):
    """A value stores the given objects and the canonical names of devices. It is read-only and can be pickled."""
    for given_ in ([A, B], (A, B), (x for x in (A, B))):
        value = kind(given_)
        assert isinstance(value.values, tuple)
        assert all(x is y for x, y in zip(value, (A, B), strict=True))
        assert (value[1] is B, value[-2] is A, len(value)) == (True, True, 2)
    assert kind([A, B, A]).devices == ("cpu:0", "cpu:1", "cpu:2")
    assert kind([A, B], ["/device:CPU:1", "GPU:0"]).devices == ("cpu:1", "cuda:0")
    assert kind([A, B], (name for name in ("cpu:3", "cpu:2"))).devices == ("cpu:3", "cpu:2")
    for name, words in (("values", "no setter"), ("devices", "no setter"), ("anything", "no attribute 'anything'")):
        with pytest.raises(AttributeError, match=words):
            setattr(value, name, ())
    with pytest.raises(TypeError, match="does not support item assignment"):
        value[0] = B
    for known in (value, IndexedSlices(np.ones((2, 3)), np.arange(2))):
        again = pickle.loads(pickle.dumps(known))
        assert (type(again), repr(again)) == (type(known), repr(known))


@each_kind
def test_wrong_components_and_devices(kind):
    """Components that are no list, or an empty one, are refused. So are devices that are not one name per component."""
    for empty in ([], (), iter([])):
        with pytest.raises(ArgumentError, match=f"{kind.__name__} needs at least one component"):
            kind(empty)
    words = rf"{kind.__name__} requires a list of one array per replica[\s\S]*given: "
    for wrong in (A, np.float32(3), "cpu:0", b"x", {"cpu:0": A}, 3, None, 2.5):
        with pytest.raises(ArgumentError, match=words):
            kind(wrong)
    for devices, error, words in (
        (["cpu:0"], ArgumentError, r"one device for each component[\s\S]*2 components, 1 devices"),
        ([], ArgumentError, "2 components, 0 devices"),
        (["cuda:1", "GPU:1"], ArgumentError, r'only once: cuda:1 is listed more than once[\s\S]*"cuda:1#1"'),
        ("cpu:0", ArgumentError, "devices must be a list of names"),
        (2.5, ArgumentError, "devices must be a list of names"),
        (["cpu:0", "foo"], DeviceError, "given: 'foo'"),
    ):
        with pytest.raises(error, match=words):
            kind([A, B], devices)
    with pytest.raises(ArgumentError, match="only once: cpu:0, cpu:1 are listed more than once"):
        read_devices(["cpu:1", "cpu:0", "cpu", "CPU:1", "cpu:1"])


def test_repr_of_a_value(tensorflow_):
    """A repr shows the device, dtype and shape of each component, or any other object. An unknown size is a ?."""
    assert repr(PerReplica([A, np.float64(2)])) == "PerReplica(\n  cpu:0: float32[3],\n  cpu:1: float64[]\n)"
    assert repr(Mirrored([np.zeros((2, 0), "int8")], ["cuda:1"])) == "Mirrored(\n  cuda:1: int8[2, 0]\n)"
    assert repr(PerReplica([tensorflow_.tf.ones(2)])) == "PerReplica(\n  cpu:0: float32[2]\n)"
    texts = {"Long": lambda self: "x" * 500, "Broken": lambda self: 1 / 0}
    text = repr(PerReplica([type(name, (), {"__repr__": text})() for name, text in texts.items()]))
    assert re.search(r"\.\.\. \(Long\)[\s\S]*<no repr> \(Broken\)", text)
    assert max(map(len, text.splitlines())) < 100
    assert str(TensorSpec((None, 3), "float32")) == "float32[?, 3]"


def test_slices_are_stored_by_reference():
    """IndexedSlices store the given arrays; lists become NumPy arrays. The repr shows dtypes and shapes."""
    values, indices = np.ones((2, 3), "float32"), np.array([4, 4])
    slices = IndexedSlices(values, indices, [5, 3])
    assert (slices.values is values, slices.indices is indices) == (True, True)
    assert (slices.dense_shape, slices.device) == ((5, 3), "cpu")
    assert IndexedSlices(values, indices).dense_shape is None
    assert repr(slices) == "IndexedSlices(values=float32[2, 3], indices=int64[2], dense_shape=(5, 3))"
    assert "  cpu:0: IndexedSlices(values=" in repr(PerReplica([slices]))
    of_lists = IndexedSlices([[1.0, 2.0]], [3], (5, 2))
    assert (of_lists.values.tolist(), of_lists.indices.dtype.kind) == ([[1.0, 2.0]], "i")
    with pytest.raises(ArgumentError, match="IndexedSlices must contain arrays"):
        IndexedSlices([[1.0], [2.0, 3.0]], [0, 1])


def test_slices_must_agree():
    """There must be one index per slice, and the dense shape must have the sizes of a slice. Errors show the shapes."""
    for values, indices in (((2, 3), (3,)), ((2,), (1,)), ((), (0,)), ((2, 2), (2, 1)), ((1,), ()), ((0, 3), (1,))):
        shapes = re.escape(f"values of shape {values}, indices of shape {indices}")
        with pytest.raises(ArgumentError, match=rf"must have one index per slice[\s\S]*{shapes}"):
            IndexedSlices(np.zeros(values), np.zeros(indices, int))
    for dense_shape in ((5,), (5, 4), (5, 3, 1), ()):
        with pytest.raises(ArgumentError, match=r"dense_shape does not agree with the slices[\s\S]*\(rows, 3\)"):
            IndexedSlices(np.zeros((2, 3)), np.zeros(2, int), dense_shape)
    with pytest.raises(ArgumentError, match=r"\(rows,\)$"):
        IndexedSlices(np.zeros(2), np.zeros(2, int), (5, 1))
    assert IndexedSlices(np.zeros(2), np.zeros(2, int), (5,)).dense_shape == (5,)
