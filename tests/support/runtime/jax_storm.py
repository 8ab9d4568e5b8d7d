"""``python jax_storm.py FIRST COUNT`` runs random JAX programs of ``crossreduce.jax.all_reduce`` in two threads.

It fails if a program hangs, if two runs differ, or if the result differs from that of XLA's collectives.
"""

import faulthandler
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from crossreduce.jax import all_reduce

DEVICES = 8
KINDS = ("ours", "ours", "ours", "two", "psum", "ppermute", "scan")


def theirs(xs, axes, op):
    """Reduce as ``all_reduce``, with XLA's collectives."""
    reduce = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax}[op]
    return jax.tree.map(lambda x: reduce(x, axes), xs)


def step(kind, reduce, v, other, axes, op, mesh):
    """Apply an operation to the value ``v``: our ``all_reduce`` of one value, or of two, or an operation of XLA."""
    n, first = math.prod(mesh.shape[axis] for axis in axes), axes[0]
    if kind == "ours":
        return reduce(v, axes, op) / n
    if kind == "two":
        v, w = reduce((v, other[: max(1, other.size // 3)]), axes, op)
        return v / n + w.sum() * 1e-3
    if kind == "psum":
        return lax.psum(jnp.sin(v), axes) / n
    if kind == "ppermute":
        size = mesh.shape[first]
        return lax.ppermute(v, first, [(k, (k + 1) % size) for k in range(size)])
    # XLA gets no loop: loops of its collectives beside others crash jaxlib 0.10.2 now and then.
    once = lambda c, _: (jnp.sin(reduce(c, axes, op)) / n, None)  # noqa: E731
    return lax.scan(once, v, None, length=3, unroll=reduce is theirs)[0]


def program(seed, reduce):
    """Return a jitted program of six random steps on three values, which may depend on each other, and its argument."""
    rng = random.Random(seed)
    shape = rng.choice([(8,), (4, 2), (2, 4), (2, 2, 2)])
    names = ("a", "b", "c")[: len(shape)]
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(shape), names)
    size = rng.choice([1, 7, 300, 5000, 70000])
    steps = [
        (rng.choice(KINDS), tuple(rng.sample(names, rng.randint(1, len(names)))), rng.choice(("sum", "mean", "max")))
        for _ in range(6)
    ]

    def own(x):
        values = [x, jnp.cos(x), x * 0.5]
        for number, (kind, axes, op) in enumerate(steps):
            k = number % 3
            values[k] = step(kind, reduce, values[k], values[k - 1], axes, op, mesh)
        return values[0] + values[1] - values[2]

    x = np.random.default_rng(seed).standard_normal(DEVICES * size).astype("float32")
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False)), x


def check(seed):
    """Assert that the program of a seed is deterministic, and close to the same program with XLA's collectives."""
    run, x = program(seed, all_reduce)
    first, second = (np.asarray(run(x)) for _ in range(2))
    assert first.tobytes() == second.tobytes(), f"program {seed} is not deterministic"
    peer, x = program(seed, theirs)
    np.testing.assert_allclose(first, np.asarray(peer(x)), rtol=1e-3, atol=1e-3, err_msg=f"program {seed}")


def main():
    first, count = map(int, sys.argv[1:])
    faulthandler.dump_traceback_later(60 + 5 * count, exit=True)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(check, seed) for seed in range(first, first + count)]:
            done.result()
    print(f"{count} programs")


if __name__ == "__main__":
    main()
