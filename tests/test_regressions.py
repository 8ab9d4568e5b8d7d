"""Faults that reviewers found once, each with the test that shows it is gone."""

import dataclasses
import functools
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import crossreduce as cr
from crossreduce import devices, pipeline
from crossreduce.planning import planned
from crossreduce.values import default_devices


def slices(rows, dtype, shape=(2, 1)):
    return cr.IndexedSlices(np.array(rows, dtype).reshape(-1, 1), np.zeros(len(rows), int), shape)


@pytest.mark.parametrize(
    ("op", "dtype", "rows", "wanted"),
    [
        ("mean", "float16", [40000, 40000], 40000),
        ("mean", "int8", [100, 100], 100),
        ("sum", "float16", [2048, 1, 1], 2050),
    ],
)
def test_slices_of_one_row_are_added_in_the_accumulator(op, dtype, rows, wanted):
    """A sparse component beside dense ones is made dense in the dtype that the op accumulates in."""
    value = cr.PerReplica([slices(rows, dtype), np.zeros((2, 1), dtype)])
    assert cr.ReductionToOneDevice().reduce(op, value, "cpu:0")[0][0, 0] == wanted


def test_gathered_slices_keep_their_dtype():
    """Gathering sparse halves adds up in float32 and gives halves."""
    value = cr.PerReplica([slices([2048, 1, 1], "float16")])
    gathered = cr.CrossDeviceOps().gather(value, "cpu:0", 0)[0]
    assert gathered.dtype == np.float16
    assert gathered[0, 0] == 2050


def test_mixed_dense_and_sparse_halves_share_a_pack(framework):
    """A value made dense in float32 is packed with one that is float16 all along."""
    dense = [framework.array(np.full((5, 2), k + 1, "float16"), k) for k in range(2)]
    rows = framework.sparse("IndexedSlices", np.ones((1, 2), "float16"), np.array([1]), (5, 2), 0)
    mixed = cr.PerReplica([rows, dense[1]])
    plain = cr.PerReplica(dense)
    results = cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(mixed, mixed), (plain, plain)])
    assert framework.to_numpy(results[0][1]).tolist() == [[2, 2], [3, 3], [2, 2], [2, 2], [2, 2]]
    assert framework.to_numpy(results[1][0]).tolist() == [[3, 3]] * 5
    assert str(framework.to_numpy(results[0][0]).dtype) == "float16"


def test_open_sizes_that_differ_are_found_when_they_run(tensorflow_):
    """Where tf.function leaves sizes open, components of different shapes raise and are never added up."""
    import tensorflow as tf

    spec = tf.TensorSpec

    @tf.function(input_signature=[spec([None]), spec([None]), spec([3]), spec([2])])
    def batch(a0, b0, a1, b1):
        a, b = cr.PerReplica([a0, a1]), cr.PerReplica([b0, b1])
        return [r[0] for r in cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(a, "cpu:0"), (b, "cpu:0")])]

    right = batch([1.0, 2.0, 3.0], [10.0, 20.0], [100.0] * 3, [1000.0] * 2)
    assert [x.numpy().tolist() for x in right] == [[101, 102, 103], [1010, 1020]]
    with pytest.raises(tf.errors.InvalidArgumentError):
        batch([1.0, 2.0], [10.0, 20.0, 30.0], [100.0] * 3, [1000.0] * 2)

    @tf.function(input_signature=[spec([None]), spec([None])])
    def greatest(a, b):
        return cr.all_reduce([a, b], "max")[0]

    assert greatest([1.0, 5.0], [3.0, 2.0]).numpy().tolist() == [3, 5]
    with pytest.raises(tf.errors.InvalidArgumentError):
        greatest([1.0, 2.0, 3.0], [7.0])


def test_a_plan_does_not_grow_with_the_number_of_packs(monkeypatch):
    """However many packs, a plan has the trees of one turn of the roots, and every pack's limit is kept."""
    planned_packs, parts = [], []
    monkeypatch.setattr(pipeline, "planned", lambda *args: planned_packs.append(args[3]) or planned(*args))
    groups = pipeline.groups

    def spy(*args):
        found = groups(*args)
        parts.extend(part.stop - part.start for group in found for piece in group.pieces for part in piece.parts)
        return found

    monkeypatch.setattr(pipeline, "groups", spy)
    value = cr.PerReplica([np.arange(1000, dtype="float32") * k for k in range(4)])
    for algorithm, most in (("hierarchical_copy", 4), ("ring", 1), ("direct", 1), ("one_device", 4)):
        planned_packs.clear()
        parts.clear()
        ops = cr.AllReduceCrossDeviceOps(algorithm)
        result = ops.reduce("sum", value, value, cr.CommunicationOptions(bytes_per_pack=40))
        assert all((x == 6 * np.arange(1000)).all() for x in result)
        assert max(planned_packs) == most
        assert sum(parts) == 1000
        assert sum(planned_packs) == 100
        assert max(parts) == 10 * most


def test_dataclasses_are_taught_once_whatever_the_threads():
    """Many threads that bring a new dataclass at the same time all get their results."""
    errors = []

    def call(kind):
        try:
            assert cr.all_reduce([kind(1.0), kind(2.0)])[1].x == 3.0
        except BaseException as error:
            errors.append(error)

    for number in range(20):
        kind = dataclasses.make_dataclass(f"Fresh{number}", ["x"])
        threads = [threading.Thread(target=call, args=(kind,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


@dataclasses.dataclass
class Normed:
    x: np.ndarray

    @functools.cached_property
    def norm(self):
        return float(self.x.sum())


def test_cached_values_of_a_dataclass_are_not_carried_over():
    """What a dataclass's instance cached belongs to the input, and a result computes its own."""
    trees = [Normed(np.ones(3)), Normed(np.full(3, 5.0))]
    assert trees[0].norm == 3
    assert [tree.norm for tree in cr.all_reduce(trees)] == [18, 18]


class OwnError(cr.ReductionError):
    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")


@pytest.mark.parametrize("error", [OwnError(7, "no"), cr.ArgumentError("pair 99: boom")])
def test_errors_of_ones_own_op_arrive_as_they_are(error):
    """An error that a user's op raises reaches the caller unchanged, whatever its text says."""

    class Failing(cr.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            raise error

    with pytest.raises(type(error)) as caught:
        cr.all_reduce([np.ones(1), np.ones(1)], cross_device_ops=Failing())
    assert caught.value is error


def test_default_devices_are_named_in_one_try_each(monkeypatch):
    """However many arrays share a device, each gets its name at the first try."""
    tries = []
    monkeypatch.setattr(
        devices, "replace", lambda *args, **kwargs: tries.append(1) or dataclasses.replace(*args, **kwargs)
    )
    names = default_devices(["cuda:0"] * 2000)
    assert len(tries) == 2000
    assert names[:2] == ("cuda:0", "cuda:0#1")
    assert len(set(names)) == 2000


def test_arguments_in_the_wrong_order():
    """An array where the op is meant is an ArgumentError, not NumPy's own."""
    with pytest.raises(cr.ArgumentError, match="no such reduction"):
        cr.ReductionToOneDevice().reduce(np.array([1, 2]), "sum", "cpu:0")


def test_numpys_error_state_does_not_matter():
    """Infinities, NaN and underflow are results, also where the caller made NumPy raise on them."""
    with np.errstate(all="raise"):
        tiny = cr.all_reduce([np.float32([1e-30, 3e38])] * 2, "product")[0]
        half = cr.all_reduce([np.float16([6e-8, 65504])] * 3, "mean")[0]
    assert tiny.tolist() == [0, np.inf]
    assert half[1] == 65504


def test_tensorflow_values_are_readable(tensorflow_):
    """The repr of TensorFlow's arrays says dtype and shape like everybody's."""
    import tensorflow as tf

    assert "float32[2]" in repr(cr.PerReplica([tf.ones(2)]))
    assert "dtype" not in repr(cr.PerReplica([tf.ones(2)]))


def test_a_tree_that_contains_itself():
    """A tree without end is an ArgumentError."""
    loop = []
    loop.append(loop)
    with pytest.raises(cr.ArgumentError, match="too deep, or contains itself"):
        cr.all_reduce([loop, loop])


def test_indices_of_different_kinds_stay_integers():
    """Indices that are int64 on one replica and uint64 on another are listed as integers."""
    rows = [
        cr.IndexedSlices(np.ones((1, 2)), np.array([k], kind), (4, 2)) for k, kind in enumerate(["int64", "uint64"])
    ]
    result = cr.ReductionToOneDevice().reduce("sum", cr.PerReplica(rows), "cpu:0")[0]
    assert result.indices.tolist() == [0, 1]
    assert result.indices.dtype == np.int64


def test_a_terminated_run_leaves_no_file(tmp_path):
    """SIGTERM in the middle of a training run removes the temporary file and leaves no target."""
    target = tmp_path / "result.json"
    command = [sys.executable, "-m", "crossreduce", "train", "--epochs", "100000", "--json", str(target)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(600):
            if list(tmp_path.iterdir()):
                break
            time.sleep(0.05)
        assert len(list(tmp_path.iterdir())) == 1  # the temporary file: it is in the middle
        process.terminate()
        try:
            error = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 143, error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_bools_of_other_bytes(op):
    """A bool whose byte is neither 0 nor 1 is true, and the result's bytes are 0 and 1."""
    a, b = np.uint8([2, 1, 0, 2] * 20).view(bool), np.uint8([1, 2, 2, 0] * 20).view(bool)
    wanted = [True, True, op == "max", op == "max"] * 20
    for result in cr.all_reduce([a, b], op):
        assert result.view(np.uint8).tolist() == [int(x) for x in wanted]


class Twice(cr.AllReduceCrossDeviceOps):
    """An op that reduces everything twice, as a retry or a probe would."""

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        super().batch_reduce_implementation(reduce_op, pairs, options)
        return super().batch_reduce_implementation(reduce_op, pairs, options)


class Probing(cr.AllReduceCrossDeviceOps):
    """An op that reduces into a buffer of its own first."""

    def __init__(self, scratch):
        super().__init__("auto")
        self.scratch = scratch

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        for value, names in pairs:
            cr.AllReduceCrossDeviceOps().reduce(reduce_op, value, cr.PerReplica([0, 0], names), out=self.scratch)
        return super().batch_reduce_implementation(reduce_op, pairs, options)


def test_a_subclass_may_reduce_a_value_twice():
    """An implementation of the user's hears nothing of out: inputs stay what they were until it has returned."""
    value = cr.PerReplica([np.array([1.0, 2.0]), np.array([3.0, 5.0])])
    assert Twice().reduce("sum", value, value, out=value)[1] is value[1]
    assert value[0].tolist() == value[1].tolist() == [4, 7]
    scratch = cr.PerReplica([np.zeros(2), np.zeros(2)])
    result = Probing(scratch).reduce("sum", value, value)
    assert scratch[0].tolist() == result[0].tolist() == [8, 14]
    assert not any(np.shares_memory(x, y) for x in result for y in scratch)


def test_a_traced_torch_function_reduces(torch_):
    """torch.jit.trace sees a reduction of numbers as operations, and not as memory that something filled."""
    import torch

    def total(a, b):
        value = cr.PerReplica([a, b])
        return cr.AllReduceCrossDeviceOps().reduce("sum", value, value)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(total, (torch.tensor(1.0), torch.tensor(2.0)))
    assert traced(torch.tensor(10.0), torch.tensor(10.0)).item() == 20


def test_a_wrong_environment_stops_a_batch_before_its_first_write(monkeypatch):
    """Several runs of the kernels: what is wrong with a variable is said before the first."""
    small = cr.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    large = cr.PerReplica([np.ones(1 << 17), np.ones(1 << 17)])
    monkeypatch.setenv("CROSSREDUCE_NUM_THREADS", "many")
    with pytest.raises(cr.ArgumentError, match="CROSSREDUCE_NUM_THREADS"):
        cr.AllReduceCrossDeviceOps().batch_reduce("sum", [(small, small), (large, large)], out=[small, large])
    assert small[0].tolist() == [1, 2]
    assert large[0].max() == 1


def test_frozen_tensors_are_no_out(torch_):
    """A tensor of torch's inference mode is refused as out once that is over, before anything is written."""
    import torch

    with torch.inference_mode():
        frozen = torch.zeros(2)
    value = cr.PerReplica([torch.ones(2), torch.ones(2)])
    out = cr.PerReplica([torch.zeros(2), frozen])
    with pytest.raises(cr.UnsupportedError, match="inference"):
        cr.AllReduceCrossDeviceOps().reduce("sum", value, value, out=out)
    assert out[0].tolist() == [0, 0]


def test_weak_types_stay_weak(jax_):
    """The sum of JAX's weakly typed numbers is weakly typed, as under jit."""
    import jax.numpy as jnp

    assert cr.all_reduce([jnp.asarray(1.0), jnp.asarray(2.0)])[0].weak_type
