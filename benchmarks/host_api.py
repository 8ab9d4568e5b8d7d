"""How long do the ops take on host memory, beside the frameworks' own reductions and a plain loop?

8 devices, steady state. TensorFlow's HierarchicalCopyAllReduce and ReductionToOneDevice run eagerly on
8 logical CPUs, JAX's psum under jit and shard_map on 8 CPU devices. Run: python benchmarks/host_api.py
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import numpy as np
import tensorflow as tf
from common import in_turn, keep
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import crossreduce as cr

N = 8
ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "auto")

jax.config.update("jax_num_cpu_devices", N)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * N
)
MESH = Mesh(np.array(jax.devices("cpu")), ("replica",))


def tensorflow_value(arrays):
    components = []
    for k, array in enumerate(arrays):
        with tf.device(f"CPU:{k}"):
            components.append(tf.identity(tf.constant(array)))
    from tensorflow.python.distribute import values  # no public way to make one

    return values.PerReplica(components)


def jax_psum(batches):
    """Return a call that sums a list of tensors over the mesh; each is sharded, one row a device."""
    sharding = NamedSharding(MESH, PartitionSpec("replica"))
    given = [jax.device_put(np.stack(arrays), sharding) for arrays in batches]
    summed = jax.jit(
        jax.shard_map(
            lambda xs: jax.lax.psum(xs, "replica"),
            mesh=MESH,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec("replica"),
        )
    )
    return lambda: jax.block_until_ready(summed(given))


def contenders(batches):
    """Return the calls that reduce a batch: ``batches[t][k]`` is replica k's tensor t."""
    ours = [cr.PerReplica(arrays) for arrays in batches]
    pairs = [(value, value) for value in ours]
    theirs = [tensorflow_value(arrays) for arrays in batches]
    tf_pairs = [(value, value) for value in theirs]
    runs = {}
    for algorithm in ALGORITHMS:
        op = cr.AllReduceCrossDeviceOps(algorithm)
        if len(batches) == 1:
            runs[f"ours {algorithm}"] = lambda op=op: op.reduce("sum", ours[0], ours[0])
        else:
            runs[f"ours {algorithm}"] = lambda op=op: op.batch_reduce("sum", pairs)

    def loop():
        results = []
        for arrays in batches:
            acc = arrays[0].copy()
            for x in arrays[1:]:
                acc += x
            results.append([acc.copy() for _ in arrays])
        return results

    runs["plain NumPy loop and copies"] = loop
    for op in (tf.distribute.HierarchicalCopyAllReduce(num_packs=1), tf.distribute.ReductionToOneDevice()):
        runs[f"TensorFlow {type(op).__name__}"] = lambda op=op: op.batch_reduce(tf.distribute.ReduceOp.SUM, tf_pairs)
    runs["JAX psum"] = jax_psum(batches)
    return runs


def main():
    rng = np.random.default_rng(0)
    cases = {
        "1 KiB": (1, 256, 30, 20),
        "160 x 1 KiB": (160, 256, 15, 1),
        "64 MiB": (1, 1 << 24, 7, 1),
    }
    kept = {}
    for case, (tensors, size, repeats, inner) in cases.items():
        batches = [[rng.standard_normal(size, dtype=np.float32) for _ in range(N)] for _ in range(tensors)]
        rows = in_turn(contenders(batches), repeats, inner)
        kept[case] = rows
        base = rows["ours auto"]["median_s"]
        print(f"\n{case} float32 over {N} devices: median ms (x: times as long as ours auto)")
        for name, row in rows.items():
            print(f"  {name:36} {row['median_s'] * 1e3:9.3f}  x{row['median_s'] / base:.2f}")
    keep("host_api", {"devices": N, "dtype": "float32", "cases": kept})


if __name__ == "__main__":
    main()
