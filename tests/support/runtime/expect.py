"""Data, and assertions that every result must pass. ``oracle.py`` computes the correct values."""

import itertools

import numpy as np
import oracle

import crossreduce as cr


def cpus(*numbers):
    """Return the device names ``cpu:k`` for these numbers k."""
    return tuple(f"cpu:{k}" for k in numbers)


def on(*numbers):
    """Return destinations on the devices ``cpu:k`` for these numbers k."""
    return cr.PerReplica([0] * len(numbers), cpus(*numbers))


def value(framework, xs):
    """Return a PerReplica of arrays of the framework, the k-th on ``cpu:k``."""
    return cr.PerReplica(framework.arrays(xs), cpus(*range(len(xs))))


def small(dtype, shape, n, seed=0):
    """Return n random arrays of small integers, whose sums and products are exact in most dtypes."""
    rng = np.random.default_rng(seed)
    made = oracle.dtype_of(dtype)
    if dtype == "bool":
        return [np.asarray(rng.integers(0, 2, shape)).astype(made) for _ in range(n)]
    low = 0 if dtype.startswith("u") else -3
    xs = [np.asarray(rng.integers(low, 4, shape)) for _ in range(n)]
    if dtype.startswith("complex"):
        return [np.asarray(x + 1j * rng.integers(-3, 4, shape)).astype(made) for x in xs]
    return [x.astype(made) for x in xs]


def digits(n, shape):
    """Return n int64 arrays whose sum shows how often each device contributed to each element."""
    # One digit per device. Base 16 fits into int64 for 15 devices, and base 8 (51 bits) for 17, the most in tests.
    base = min(n + 1, 8 if n > 15 else 16)
    size = int(np.prod(shape))
    position = np.arange(1, size + 1, dtype=np.int64).reshape(shape)
    return [position * base**device for device in range(n)]


def result_dtype(framework, op, dtype):
    """Return the dtype of a result: the dtype of true division for the mean of integers, else ``dtype``."""
    return framework.mean_dtype(dtype) if op == "mean" and "int" in dtype else dtype


def check_places(framework, result, devices):
    """Assert that a result is a Mirrored on the given devices, in their order, and that its arrays are there."""
    assert type(result) is cr.Mirrored
    assert result.devices == tuple(devices), f"a result on {result.devices}, wanted {devices}"
    assert len(result) == len(devices)
    for component, device in zip(result, devices, strict=True):
        for part in framework.memory(component):
            assert framework.device_of(part) in ("cpu", device)


def check_memory(framework, result, inputs):
    """Assert that the components of a result share no memory with each other or an input, if arrays are mutable."""
    if not framework.mutable:
        return
    own = [framework.memory(component) for component in result]
    others = [part for x in inputs for part in framework.memory(x)]
    for part in itertools.chain.from_iterable(own):
        assert not any(framework.shares(part, other) for other in others), "a result shares memory with an input"
    for a, b in itertools.combinations(own, 2):
        assert not any(framework.shares(x, y) for x in a for y in b), "two components share memory"


def check(framework, result, op, xs, devices, inputs=()):
    """Assert that a dense result has the correct values, dtype, shape and devices, equal bits, and its own memory."""
    check_places(framework, result, devices)
    ys = [framework.to_numpy(y) for y in result]
    wanted = result_dtype(framework, op, xs[0].dtype.name)
    oracle.check(ys[0], op, xs, result=wanted)
    for y in ys[1:]:
        assert y.dtype == ys[0].dtype
        assert y.shape == ys[0].shape
        assert y.tobytes() == ys[0].tobytes(), "the replicas have different bits"
    check_memory(framework, result, inputs)


def unchanged(framework, arrays, xs):
    """Return whether arrays of the framework still have the elements ``xs``."""
    pairs = zip(arrays, xs, strict=True)
    return all(framework.to_numpy(array).tobytes() == np.ascontiguousarray(x).tobytes() for array, x in pairs)
