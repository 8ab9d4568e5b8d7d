"""PerReplica, Mirrored and IndexedSlices: what they hold, and what they refuse."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from strategies import device_counts, dtypes, shapes

from crossreduce import ArgumentError, DeviceError, IndexedSlices, Mirrored, PerReplica
from crossreduce.values import TensorSpec, describe, read_devices

KINDS = [PerReplica, Mirrored]
A, B = np.zeros(3, "float32"), np.ones(3, "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_components_stay_as_they_are(kind):
    """The components are the very objects that were given, in the order given."""
    value = kind([A, B])
    assert value.values[0] is A
    assert value.values[1] is B
    assert value[1] is B
    assert value[-2] is A
    assert [x is y for x, y in zip(value, (A, B), strict=True)] == [True, True]
    assert len(value) == 2
    assert isinstance(value.values, tuple)


@pytest.mark.parametrize("kind", KINDS)
def test_devices_default_to_where_components_are(kind):
    """NumPy arrays are in host memory, which has one device a replica."""
    assert kind([A, B, A]).devices == ("cpu:0", "cpu:1", "cpu:2")


@pytest.mark.parametrize("kind", KINDS)
def test_given_devices_are_kept_in_canonical_form(kind):
    """Devices may be spelled in any way and are held in one, in the order given."""
    assert kind([A, B], ["/device:CPU:1", "GPU:0"]).devices == ("cpu:1", "cuda:0")
    assert kind([A, B], (name for name in ("cpu:3", "cpu:2"))).devices == ("cpu:3", "cpu:2")


@pytest.mark.parametrize("kind", KINDS)
def test_any_iterable_of_arrays_will_do(kind):
    """A generator, a tuple and a zip serve as well as a list."""
    assert len(kind(x for x in (A, B))) == 2
    assert len(kind((A,))) == 1
    assert len(kind(map(np.copy, [A, B]))) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [A, np.float32(3), "cpu:0", b"x", {"cpu:0": A}, 3, None, 2.5])
def test_what_is_no_list_of_arrays_is_refused(kind, wrong):
    """An array stands for no replicas: its rows are never taken for components."""
    with pytest.raises(ArgumentError, match=rf"{kind.__name__} takes a list with one array a replica[\s\S]*given: "):
        kind(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty", [[], (), iter([])])
def test_no_components_is_refused(kind, empty):
    """A value has at least one component."""
    with pytest.raises(ArgumentError, match=f"{kind.__name__} needs at least one component"):
        kind(empty)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1", "cpu:2"], []])
def test_one_device_a_component(kind, devices):
    """As many devices as components, and the message says how many of each there are."""
    with pytest.raises(ArgumentError, match=f"2 components, {len(devices)} devices"):
        kind([A, B], devices)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_stands_once(kind):
    """Two spellings of one device are the same device, and it cannot hold two components."""
    with pytest.raises(ArgumentError, match=r'cuda:1 stands more often[\s\S]*"cuda:1#1"'):
        kind([A, B], ["cuda:1", "GPU:1"])


@pytest.mark.parametrize("devices", ["cpu:0", 3, 2.5])
def test_devices_are_a_list(devices):
    """One name is not taken for the list of its letters."""
    with pytest.raises(ArgumentError, match="devices must be a list of names"):
        PerReplica([A, B], devices)


def test_an_unreadable_device_is_named():
    """The name that cannot be read is in the message."""
    with pytest.raises(DeviceError, match="given: 'foo'"):
        PerReplica([A, B], ["cpu:0", "foo"])


def test_repr_is_readable():
    """A repr shows each component's device, dtype and shape, and no elements."""
    assert repr(PerReplica([A, np.float64(2)])) == "PerReplica(\n  cpu:0: float32[3],\n  cpu:1: float64[]\n)"
    assert repr(Mirrored([np.zeros((2, 0), "int8")], ["cuda:1"])) == "Mirrored(\n  cuda:1: int8[2, 0]\n)"


def test_repr_shows_what_is_no_array():
    """Components are looked at when they are reduced, so a repr must bear anything, broken reprs included."""

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


def test_values_cannot_be_changed():
    """Components and devices are read-only: a value that was checked stays what it was."""
    value = PerReplica([A, B])
    for name in ("values", "devices"):
        with pytest.raises(AttributeError):
            setattr(value, name, ())
    with pytest.raises(AttributeError):
        value.anything = 1
    with pytest.raises(TypeError):
        value[0] = B


@pytest.mark.parametrize("value", [PerReplica([A, B]), Mirrored([A]), IndexedSlices(np.ones((2, 3)), np.arange(2))])
def test_values_survive_pickling(value):
    """A value goes through pickle with its components and devices."""
    again = pickle.loads(pickle.dumps(value))
    assert type(again) is type(value)
    assert repr(again) == repr(value)


@given(device_counts, dtypes, shapes)
def test_one_line_a_component(n, dtype, shape):
    """For any count, dtype and shape the repr has one line a component, naming its device and spec."""
    from oracle import dtype_of

    value = PerReplica([np.zeros(shape, dtype_of(dtype))] * n)
    lines = repr(value).splitlines()[1:-1]
    spec = f"{dtype}[{', '.join(map(str, shape))}]"
    assert [line.strip(" ,") for line in lines] == [f"cpu:{k}: {spec}" for k in range(n)]


def test_read_devices_keeps_order_and_names_duplicates():
    """Canonical names in the order given; the message lists each duplicate once."""
    assert read_devices(["GPU:1", "cpu"]) == ("cuda:1", "cpu:0")
    with pytest.raises(ArgumentError, match=r"and cpu:0, cpu:1 stands more often"):
        read_devices(["cpu:1", "cpu:0", "cpu", "CPU:1", "cpu:1"])


def test_spec_shows_open_sizes():
    """A size that tracing leaves open is a question mark."""
    assert str(TensorSpec((None, 3), "float32")) == "float32[?, 3]"
    assert describe(A) == "float32[3]"


def test_slices_hold_what_they_are_given():
    """Values and indices are the very arrays that were given; the dense shape is a tuple of ints."""
    values, indices = np.ones((2, 3), "float32"), np.array([4, 4])
    slices = IndexedSlices(values, indices, [5, 3])
    assert slices.values is values
    assert slices.indices is indices
    assert slices.dense_shape == (5, 3)
    assert slices.device == "cpu"
    assert IndexedSlices(values, indices).dense_shape is None


def test_slices_of_lists():
    """Lists become NumPy arrays; a ragged one is an error."""
    slices = IndexedSlices([[1.0, 2.0]], [3], (5, 2))
    assert slices.values.tolist() == [[1.0, 2.0]]
    assert slices.indices.dtype.kind == "i"
    with pytest.raises(ArgumentError, match="IndexedSlices take arrays"):
        IndexedSlices([[1.0], [2.0, 3.0]], [0, 1])


def test_slices_repr():
    """The repr shows both specs and the dense shape."""
    slices = IndexedSlices(np.ones((2, 3), "float16"), np.array([1, 2], "int32"), (9, 3))
    assert repr(slices) == "IndexedSlices(values=float16[2, 3], indices=int32[2], dense_shape=(9, 3))"
    assert "  cpu:0: IndexedSlices(values=" in repr(PerReplica([slices]))


@pytest.mark.parametrize(
    ("values", "indices"), [((2, 3), (3,)), ((2,), (1,)), ((), (0,)), ((2, 2), (2, 1)), ((1,), ()), ((0, 3), (1,))]
)
def test_one_index_a_slice(values, indices):
    """As many indices as slices, along one axis; both shapes are in the message."""
    with pytest.raises(ArgumentError) as caught:
        IndexedSlices(np.zeros(values), np.zeros(indices, int))
    assert f"values of shape {values}, indices of shape {indices}" in str(caught.value)


@pytest.mark.parametrize("dense_shape", [(5,), (5, 4), (5, 3, 1), ()])
def test_dense_shape_fits_the_slices(dense_shape):
    """The dense shape has as many axes as the values and, but for the rows, their sizes."""
    with pytest.raises(ArgumentError, match=r"dense_shape does not fit[\s\S]*\(rows, 3\)"):
        IndexedSlices(np.zeros((2, 3)), np.zeros(2, int), dense_shape)


def test_dense_shape_of_vectors():
    """For slices of one element the hint is a one-tuple, spelled as Python does."""
    with pytest.raises(ArgumentError, match=r"\(rows,\)$"):
        IndexedSlices(np.zeros(2), np.zeros(2, int), (5, 1))
    assert IndexedSlices(np.zeros(2), np.zeros(2, int), (5,)).dense_shape == (5,)


def test_empty_slices():
    """No slices at all are as good as any."""
    slices = IndexedSlices(np.zeros((0, 3)), np.zeros(0, int), (5, 3))
    assert repr(slices) == "IndexedSlices(values=float64[0, 3], indices=int64[0], dense_shape=(5, 3))"
