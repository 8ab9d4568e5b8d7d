"""Train a Keras classifier of handwritten digits under ``tf.distribute.MirroredStrategy``, on n devices and on one.

Each replica computes the gradients of its share of the batch; ``crossreduce.tensorflow.HierarchicalCopyAllReduce`` sums
them along a planned schedule. The default is 3 devices, of which TensorFlow's own op of this name would omit the last.
The loss curves of n replicas and of one must agree up to rounding in float32; if not, the exit code is 1.

    python examples/keras_digits.py [--replicas 3]

Source of the data: E. Alpaydin & C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
1998; the 1,797 images of 8 x 8 that scikit-learn ships.
"""

import argparse
import logging
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import crossreduce.tensorflow as crt

EPOCHS = 8
BATCH = 120  # samples per step, over all replicas
STEPS = 14  # per epoch; all batches are full, so every epoch's loss is a mean over batches of one size

keras = tf.keras


def train(replicas):
    """Return the mean loss of each epoch, and the final share of recognized digits."""
    devices = [f"CPU:{k}" for k in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=crt.HierarchicalCopyAllReduce())
    digits = load_digits()
    images = (digits.data[: BATCH * STEPS] / 16).astype("float32")
    labels = digits.target[: BATCH * STEPS]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(10)])
        model.compile(
            keras.optimizers.SGD(0.2, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,  # compiling the step with XLA takes longer than the training
        )
    history = model.fit(images, labels, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    return np.array(history["loss"]), history["accuracy"][-1]


def main(replicas):
    """Train twice, print both loss curves, and return 0 if they agree and over 90 % are recognized; otherwise 1."""
    tf.get_logger().setLevel("ERROR")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("crossreduce").setLevel(logging.INFO)  # each new plan is logged once
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    one, accuracy = train(1)
    several, _ = train(replicas)
    print(f"epoch  1 replica  {replicas} replicas")
    for epoch, (a, b) in enumerate(zip(one, several, strict=True)):
        print(f"{epoch + 1:5}  {a:9.6f}  {b:10.6f}")
    # A sum over the 120 samples of a step, in another order, differs by about 120 roundings of 2**-24 at most, 7e-6.
    # The training here does not amplify the difference.
    difference = float(np.max(np.abs(several - one)) / one[0])
    agree = difference < BATCH * 2.0**-24
    print(f"recognized: {accuracy:.1%}; largest difference: {difference:.1e} of the first loss")
    print("the curves agree" if agree else "THE CURVES DIFFER")
    return 0 if agree and accuracy > 0.9 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a classifier of digits on n replicas and on one, and compare.")
    parser.add_argument("--replicas", type=int, choices=range(1, 121), default=3, metavar="N")
    sys.exit(main(parser.parse_args().replicas))
