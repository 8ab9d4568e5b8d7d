"""Train a classifier of handwritten digits under ``jax.shard_map``, on several devices and on one.

Every device computes the gradients of its share of the batch; ``crossreduce.jax.all_reduce`` makes of them those of the
whole batch. So the loss curves of n devices and of one are the same, up to the rounding of float32. Exits with 1 if
they are not. Run it with ``python examples/jax_digits.py [devices]``.

Source of the data: E. Alpaydin & C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
1998; the 1,797 images of 8 x 8 that scikit-learn ships.
"""

import sys
from functools import partial
from itertools import pairwise

import numpy as np

DEVICES = int(sys.argv[1]) if len(sys.argv) > 1 else 8
EPOCHS = 12
BATCH = 16  # samples a device, on DEVICES devices
RATE = 0.1

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", DEVICES)  # before JAX is first used

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

import crossreduce.jax  # noqa: E402


def first_parameters():
    """Return the weights of a network with one hidden layer of 64."""
    rng = np.random.default_rng(0)
    sizes = (64, 64, 10)
    return [
        {"w": (rng.standard_normal((a, b)) / np.sqrt(a)).astype("float32"), "b": np.zeros(b, "float32")}
        for a, b in pairwise(sizes)
    ]


def loss(parameters, images, labels):
    """Return the mean cross-entropy."""
    hidden, out = parameters
    scores = jnp.tanh(images @ hidden["w"] + hidden["b"]) @ out["w"] + out["b"]
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1).mean()


def train(devices):
    """Return the loss of every step and the final parameters."""
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("data",))
    everywhere, shares = PartitionSpec(), PartitionSpec("data")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(everywhere, shares, shares), out_specs=everywhere)
    def step(parameters, images, labels):
        # Each device's own copy. Of parameters that are the same everywhere, JAX's gradients are summed already.
        own = jax.lax.pcast(parameters, "data", to="varying")
        value, gradients = jax.value_and_grad(loss)(own, images, labels)
        value, gradients = crossreduce.jax.all_reduce((value, gradients), "data", "mean")
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)

    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target
    size, order = BATCH * DEVICES, np.random.default_rng(1)
    parameters, losses = first_parameters(), []
    for _ in range(EPOCHS):
        mixed = order.permutation(len(labels))
        for start in range(0, len(labels) - size + 1, size):
            batch = mixed[start : start + size]
            value, parameters = step(parameters, images[batch], labels[batch])
            losses.append(float(value))
    return np.array(losses), parameters


def main():
    """Train on all devices and on one; print both curves."""
    many, ours = train(DEVICES)
    one, theirs = train(1)
    print(f"step   {DEVICES} devices   1 device")
    for k in range(0, len(one), max(1, len(one) // 12)):
        print(f"{k:4d}   {many[k]:9.6f}   {one[k]:9.6f}")
    off = max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(np.asarray(a) - np.asarray(b)).max(), ours, theirs)))
    print(f"largest difference: {abs(many - one).max():.1e} in the loss, {off:.1e} in a weight")
    # Gradients differ by a few roundings of 2**-24 a step; training a smooth network does not blow them up.
    agree = abs(many - one).max() < 1e-4 and many[-10:].mean() < many[0] / 2
    print("the curves agree" if agree else "THE CURVES DIFFER")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
