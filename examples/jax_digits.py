"""Train a classifier of handwritten digits under ``jax.shard_map``, on several devices and on one.

Every device computes the gradients of its part of the batch, and ``crossreduce.jax.all_reduce`` averages them to the
gradients of the full batch. So the loss curves of n devices and of one device are equal, up to the rounding of float32.
The exit code is 1 if they are not, or if the loss is not halved.

    python examples/jax_digits.py [--devices 8]

Source of the data: E. Alpaydin & C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
1998; the 1,797 images of 8 x 8 pixels in scikit-learn.
"""

import argparse
import sys
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from sklearn.datasets import load_digits

import crossreduce.jax

STEPS = 160  # at least, whatever the number of devices: complete passes through the data follow until then
BATCH = 16  # samples per device in the run on several; one device alone gets those of all
RATE = 0.1


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


def train(devices, size):
    """Train with batches of ``size`` samples; return the loss of every step and the final parameters."""
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("data",))
    everywhere, shares = PartitionSpec(), PartitionSpec("data")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(everywhere, shares, shares), out_specs=everywhere)
    def step(parameters, images, labels):
        # Without this, JAX would sum the gradients itself, since the parameters are replicated.
        own = jax.lax.pcast(parameters, "data", to="varying")
        value, gradients = jax.value_and_grad(loss)(own, images, labels)
        value, gradients = crossreduce.jax.all_reduce((value, gradients), "data", "mean")
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)

    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target
    order = np.random.default_rng(1)
    parameters, losses = first_parameters(), []
    while len(losses) < STEPS:
        mixed = order.permutation(len(labels))
        for start in range(0, len(labels) - size + 1, size):
            batch = mixed[start : start + size]
            value, parameters = step(parameters, images[batch], labels[batch])
            losses.append(float(value))
    return np.array(losses), parameters


def main(devices):
    """Train on all devices and on one; print both loss curves."""
    jax.config.update("jax_num_cpu_devices", devices)  # before JAX is first used
    many, ours = train(devices, BATCH * devices)
    one, theirs = train(1, BATCH * devices)
    print(f"step   {devices} devices   1 device")
    for k in range(0, len(one), max(1, len(one) // 12)):
        print(f"{k:4d}   {many[k]:9.6f}   {one[k]:9.6f}")
    off = max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(np.asarray(a) - np.asarray(b)).max(), ours, theirs)))
    print(f"largest difference: {abs(many - one).max():.1e} in the loss, {off:.1e} in a weight")
    # Gradients differ by a few roundings of 2**-24 per step, and the training here does not amplify the difference.
    agree, halved = abs(many - one).max() < 1e-4, many[-10:].mean() < many[0] / 2
    if not halved:
        print("THE LOSS IS NOT HALVED")
    print("the curves agree" if agree else "THE CURVES DIFFER")
    return 0 if agree and halved else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a classifier of digits on n devices and on one, and compare.")
    parser.add_argument("--devices", type=int, choices=range(1, 65), default=8, metavar="N")
    sys.exit(main(parser.parse_args().devices))
