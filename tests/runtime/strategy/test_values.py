"""PerReplica, Mirrored and IndexedSlices: the components they store, and the arguments they reject."""

import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from pairs import each
from strategies import device_counts, dtypes, shapes

from crossreduce import ArgumentError, DeviceError, IndexedSlices, Mirrored, PerReplica
from crossreduce.values import TensorSpec, describe, read_devices

KINDS = [PerReplica, Mirrored]
A, B = np.zeros(3, "float32"), np.ones(3, "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_components_are_stored_by_reference(kind):
    """A value stores the given objects themselves, in the given order, without a copy."""
    value = kind([A, B])
    assert value.values[0] is A
    assert value.values[1] is B
    assert value[1] is B
    assert value[-2] is A
    assert [x is y for x, y in zip(value, (A, B), strict=True)] == [True, True]
    assert len(value) == 2
    assert isinstance(value.values, tuple)


@pytest.mark.parametrize("kind", KINDS)
def test_devices_default_to_those_of_the_components(kind):
    """NumPy arrays are in host memory; each replica has its own device there: cpu:0, cpu:1, ..."""
    assert kind([A, B, A]).devices == ("cpu:0", "cpu:1", "cpu:2")


@pytest.mark.parametrize("kind", KINDS)
def test_given_devices_become_canonical(kind):
    """Devices may have any accepted spelling; a value stores canonical names, in the given order."""
    assert kind([A, B], ["/device:CPU:1", "GPU:0"]).devices == ("cpu:1", "cuda:0")
    assert kind([A, B], (name for name in ("cpu:3", "cpu:2"))).devices == ("cpu:3", "cpu:2")


@pytest.mark.parametrize("kind", KINDS)
def test_any_iterable_of_arrays_is_accepted(kind):
    """The components may be a generator, a tuple or a map instead of a list."""
    assert len(kind(x for x in (A, B))) == 2
    assert len(kind((A,))) == 1
    assert len(kind(map(np.copy, [A, B]))) == 2


@pytest.mark.parametrize(("wrong", "kind"), each([A, np.float32(3), "cpu:0", b"x", {"cpu:0": A}, 3, None, 2.5], KINDS))
def test_components_must_be_a_list_of_arrays(kind, wrong):
    """A single array raises an error, since its rows are not replicas; so do text, dicts and numbers."""
    with pytest.raises(ArgumentError, match=rf"{kind.__name__} requires a list of one array per replica[\s\S]*given: "):
        kind(wrong)


@pytest.mark.parametrize(("empty", "kind"), each([[], (), iter([])], KINDS))
def test_a_value_without_components_is_an_error(kind, empty):
    """A value without components raises an error."""
    with pytest.raises(ArgumentError, match=f"{kind.__name__} needs at least one component"):
        kind(empty)


@pytest.mark.parametrize(("devices", "kind"), each([["cpu:0"], ["cpu:0", "cpu:1", "cpu:2"], []], KINDS))
def test_one_device_per_component(kind, devices):
    """The number of devices must be the number of components; the message states both."""
    with pytest.raises(ArgumentError, match=f"2 components, {len(devices)} devices"):
        kind([A, B], devices)


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_may_be_listed_once(kind):
    """Two spellings of one device are the same device, which cannot have two components."""
    with pytest.raises(ArgumentError, match=r'cuda:1 is listed more than once[\s\S]*"cuda:1#1"'):
        kind([A, B], ["cuda:1", "GPU:1"])


@pytest.mark.parametrize("devices", ["cpu:0", 3, 2.5])
def test_devices_must_be_a_list(devices):
    """A single name raises an error; it is not read as a list of letters."""
    with pytest.raises(ArgumentError, match="devices must be a list of names"):
        PerReplica([A, B], devices)


def test_an_invalid_device_name_is_reported():
    """The message contains the name that cannot be parsed."""
    with pytest.raises(DeviceError, match="given: 'foo'"):
        PerReplica([A, B], ["cpu:0", "foo"])


def test_repr_of_a_value():
    """A repr shows each component's device, dtype and shape, and no elements."""
    assert repr(PerReplica([A, np.float64(2)])) == "PerReplica(\n  cpu:0: float32[3],\n  cpu:1: float64[]\n)"
    assert repr(Mirrored([np.zeros((2, 0), "int8")], ["cuda:1"])) == "Mirrored(\n  cuda:1: int8[2, 0]\n)"


def test_repr_of_components_that_are_not_arrays():
    """Components are checked only when they are reduced, so a repr must work for any object, even one with a broken
    repr."""

    class Broken:
        def __repr__(self):
            raise RuntimeError

    class Long:
        def __repr__(self):
            return "x" * 500

    text = repr(PerReplica([Long(), Broken()]))
    assert "... (Long)" in text
    assert "<no repr> (Broken)" in text
    assert max(map(len, text.splitlines())) < 100


def test_values_are_immutable():
    """Components and devices are read-only, so a value stays valid after it was checked."""
    value = PerReplica([A, B])
    for name in ("values", "devices"):
        with pytest.raises(AttributeError, match="has no setter"):
            setattr(value, name, ())
    with pytest.raises(AttributeError, match="has no attribute 'anything'"):
        value.anything = 1
    with pytest.raises(TypeError, match="does not support item assignment"):
        value[0] = B


@pytest.mark.parametrize("value", [PerReplica([A, B]), Mirrored([A]), IndexedSlices(np.ones((2, 3)), np.arange(2))])
def test_values_can_be_pickled(value):
    """A pickled value keeps its type, its devices, and the dtypes and shapes of its components."""
    again = pickle.loads(pickle.dumps(value))
    assert type(again) is type(value)
    assert repr(again) == repr(value)


@given(device_counts, dtypes, shapes)
def test_repr_has_one_line_per_component(n, dtype, shape):
    """For any count, dtype and shape, the repr has one line per component, with its device and spec."""
    from oracle import dtype_of

    value = PerReplica([np.zeros(shape, dtype_of(dtype))] * n)
    lines = repr(value).splitlines()[1:-1]
    spec = f"{dtype}[{', '.join(map(str, shape))}]"
    assert [line.strip(" ,") for line in lines] == [f"cpu:{k}: {spec}" for k in range(n)]


def test_read_devices_keeps_order_and_names_duplicates():
    """The canonical names have the given order; the message lists each duplicate once."""
    assert read_devices(["GPU:1", "cpu"]) == ("cuda:1", "cpu:0")
    with pytest.raises(ArgumentError, match=r"only once: cpu:0, cpu:1 are listed more than once"):
        read_devices(["cpu:1", "cpu:0", "cpu", "CPU:1", "cpu:1"])


def test_spec_shows_unknown_sizes():
    """A size that tracing leaves unknown is shown as a question mark."""
    assert str(TensorSpec((None, 3), "float32")) == "float32[?, 3]"
    assert describe(A) == "float32[3]"


def test_slices_are_stored_by_reference():
    """IndexedSlices store the given arrays themselves, and the dense shape as a tuple of ints."""
    values, indices = np.ones((2, 3), "float32"), np.array([4, 4])
    slices = IndexedSlices(values, indices, [5, 3])
    assert slices.values is values
    assert slices.indices is indices
    assert slices.dense_shape == (5, 3)
    assert slices.device == "cpu"
    assert IndexedSlices(values, indices).dense_shape is None


def test_slices_of_lists():
    """Lists become NumPy arrays; a ragged list raises an error."""
    slices = IndexedSlices([[1.0, 2.0]], [3], (5, 2))
    assert slices.values.tolist() == [[1.0, 2.0]]
    assert slices.indices.dtype.kind == "i"
    with pytest.raises(ArgumentError, match="IndexedSlices must contain arrays"):
        IndexedSlices([[1.0], [2.0, 3.0]], [0, 1])


def test_slices_repr():
    """The repr shows both specs and the dense shape."""
    slices = IndexedSlices(np.ones((2, 3), "float16"), np.array([1, 2], "int32"), (9, 3))
    assert repr(slices) == "IndexedSlices(values=float16[2, 3], indices=int32[2], dense_shape=(9, 3))"
    assert "  cpu:0: IndexedSlices(values=" in repr(PerReplica([slices]))


@pytest.mark.parametrize(
    ("values", "indices"), [((2, 3), (3,)), ((2,), (1,)), ((), (0,)), ((2, 2), (2, 1)), ((1,), ()), ((0, 3), (1,))]
)
def test_one_index_per_slice(values, indices):
    """The indices are one per slice, along one axis; the message contains both shapes."""
    given_ = re.escape(f"values of shape {values}, indices of shape {indices}")
    with pytest.raises(ArgumentError, match=rf"must have one index per slice[\s\S]*{given_}"):
        IndexedSlices(np.zeros(values), np.zeros(indices, int))


@pytest.mark.parametrize("dense_shape", [(5,), (5, 4), (5, 3, 1), ()])
def test_dense_shape_must_agree_with_the_slices(dense_shape):
    """The dense shape has the number of axes of the values and, except for the rows, their sizes."""
    with pytest.raises(ArgumentError, match=r"dense_shape does not agree with the slices[\s\S]*\(rows, 3\)"):
        IndexedSlices(np.zeros((2, 3)), np.zeros(2, int), dense_shape)


def test_dense_shape_of_vectors():
    """If each slice is a number, the error suggests a dense_shape in Python's notation of a tuple of one: (rows,)."""
    with pytest.raises(ArgumentError, match=r"\(rows,\)$"):
        IndexedSlices(np.zeros(2), np.zeros(2, int), (5, 1))
    assert IndexedSlices(np.zeros(2), np.zeros(2, int), (5,)).dense_shape == (5,)


def test_empty_slices():
    """IndexedSlices may have no slices."""
    slices = IndexedSlices(np.zeros((0, 3)), np.zeros(0, int), (5, 3))
    assert repr(slices) == "IndexedSlices(values=float64[0, 3], indices=int64[0], dense_shape=(5, 3))"


def test_repr_of_tensorflow_values(tensorflow_):
    """The repr of TensorFlow's arrays has the same form as that of other arrays: dtype and shape."""
    text = repr(PerReplica([tensorflow_.tf.ones(2)]))
    assert "float32[2]" in text
    assert "dtype" not in text
