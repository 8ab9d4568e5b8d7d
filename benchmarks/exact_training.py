"""Which trainings have the same bits? One training on 1, 2, 4 and 8 replicas, of the same global batches.

A classifier of handwritten digits, with one hidden layer, is trained in float32 with NumPy: 300 steps of 64 images. The
gradients of the replicas are averaged by default and with exact=True; on 8 replicas along every algorithm, and with the
replicas in reverse order. In the kinds with 8 parts, gradients are those of 8 equal parts of each batch, whatever
the number of replicas. They are averaged in the order of the replicas: n replicas have every n-th part each.
Run: python benchmarks/exact_training.py [--json PATH]
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, keep

import crossreduce as cr

STEPS, BATCH, HIDDEN, RATE = 300, 64, 64, np.float32(0.2)
REPLICAS = (1, 2, 4, 8)
PARTS = 8  # of a batch, in the kinds that have parts
ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "recursive_doubling", "direct")
EXACT = cr.CommunicationOptions(exact=True)
KINDS = {  # the options of the reduction, and whether the parts are always 8
    "default": (None, False),
    "exact": (EXACT, False),
    "default, 8 parts": (None, True),
    "exact, 8 parts": (EXACT, True),
}

Arrays = list[Any]


def data() -> tuple[Any, Any]:
    """Return images and the numbers that they show."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels


def gradients(weights: Arrays, x: Any, y: Any) -> tuple[Arrays, Any]:
    """Return the gradients of the mean loss of a batch, and the losses of its images."""
    first, bias, second = weights
    hidden = np.maximum(x @ first + bias, 0)
    scores = hidden @ second
    scores -= scores.max(1, keepdims=True)
    chances = np.exp(scores)
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(y))
    losses = -np.log(chances[rows, y])
    chances[rows, y] -= 1
    chances /= np.float32(len(y))
    back = (chances @ second.T) * (hidden > 0)
    return [x.T @ back, back.sum(0), hidden.T @ chances], losses


def train(replicas: int, parts: int, mean: Callable[[list[Arrays]], Arrays]) -> tuple[list[float], str]:
    """Train on a number of equal parts of each batch; return the loss of each step and a digest of the weights."""
    images, labels = data()
    rng = np.random.default_rng(0)
    weights = [
        rng.normal(0, 0.1, (64, HIDDEN)).astype("float32"),
        np.zeros(HIDDEN, "float32"),
        rng.normal(0, 0.1, (HIDDEN, 10)).astype("float32"),
    ]
    losses = []
    for _ in range(STEPS):
        chosen = rng.integers(0, len(labels), BATCH).reshape(parts, -1)
        found = [gradients(weights, images[rows], labels[rows]) for rows in chosen]
        losses.append(float(np.mean(np.concatenate([part for _, part in found]), dtype="float64")))
        by_replica = [part for k in range(replicas) for part, _ in found[k::replicas]]
        weights = [w - RATE * g for w, g in zip(weights, mean(by_replica), strict=True)]
    return losses, hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()[:12]


def averaging(
    options: cr.CommunicationOptions | None, algorithm: str = "one_device", turned: bool = False
) -> Callable[[list[Arrays]], Arrays]:
    """Return the function that averages the gradients of replicas."""
    ops = cr.AllReduceCrossDeviceOps(algorithm)

    def mean(parts: list[Arrays]) -> Arrays:
        given = parts[::-1] if turned else parts
        found: Arrays = cr.all_reduce(given, "mean", cross_device_ops=ops, options=options)[0]
        return found

    return mean


def main() -> None:
    """Train, print what differs, and keep it; or draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "exact_training.json")
    arguments = parser.parse_args()
    curves: dict[str, Any] = {}
    for kind, (options, parted) in KINDS.items():
        for n in REPLICAS:
            losses, digest = train(n, PARTS if parted else n, averaging(options))
            curves.setdefault(kind, {})[str(n)] = {"losses": losses, "weights": digest}
    orders: dict[str, Any] = {}
    for kind, options in (("default", None), ("exact", EXACT)):
        for algorithm in ALGORITHMS:
            for turned in (False, True):
                _, digest = train(8, 8, averaging(options, algorithm, turned))
                orders.setdefault(kind, {})[f"{algorithm}{', reversed' * turned}"] = digest
    for kind, found in curves.items():
        whole = np.array(found["1"]["losses"])
        for n, row in found.items():
            most = np.abs(np.array(row["losses"]) - whole).max()
            print(f"{kind:16} {n} replicas: weights {row['weights']}, last loss {row['losses'][-1]:.9f}, "
                  f"largest difference from 1 replica {most:.1e}")  # fmt: skip
    for kind, digests in orders.items():
        print(f"{kind}: {len(set(digests.values()))} different weights of {len(digests)} algorithms and orders")
    keep("exact_training", {"steps": STEPS, "batch": BATCH, "curves": curves, "orders": orders}, arguments.json)


if __name__ == "__main__":
    main()
