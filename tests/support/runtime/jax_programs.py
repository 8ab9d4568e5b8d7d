"""Programs of JAX on several CPU devices of one process, for the tests of ``crossreduce.jax.all_reduce``."""

import numpy as np
import oracle
import pytest
from frameworks import NAMES

if "jax" not in NAMES:
    pytest.skip("CROSSREDUCE_TEST_FRAMEWORKS excludes jax", allow_module_level=True)
import jax
from jax.sharding import PartitionSpec as P

DTYPES = ("float16", "bfloat16", "float32", "complex64", "int8", "int16", "int32", "uint8", "uint32", "bool")


def mesh(shape, names=("d",)):
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))])
    return jax.sharding.Mesh(devices.reshape(shape), names)


def spread(function, n, check=True, out=None, names=("d",), over=None):
    """Return a function that runs ``function`` on each of ``n`` devices (or of a mesh of shape ``n`` with axes
    ``names``), on its row of the arguments. ``over`` names the axes over which the rows are spread, by default all."""
    over = P(over or names)

    def own(*xs):
        return function(*jax.tree.map(lambda x: x[0], xs))

    out = P() if out is None else out
    return jax.shard_map(own, mesh=mesh(n, names), in_specs=over, out_specs=out, check_vma=check)


def same_everywhere(x):
    """Return one device's copy of an array, after checking that it has the same bits on all devices."""
    shards = [np.asarray(shard.data) for shard in x.addressable_shards]
    assert len({shard.tobytes() for shard in shards}) == 1
    return shards[0]


def draw(rng, dtype, shape):
    kind = oracle.dtype_of(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        return rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, kind, endpoint=True)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype == "complex64" else x).astype(kind)
