"""``crossreduce train``: a small classifier of handwritten digits, trained data-parallel.

In: options.  Out: a table, and a JSON file where one is asked for. Every replica holds its own copy
of the parameters on its own device; after each step's reduction all copies have the same bits, which
is checked at the end. The losses are those of one device, up to the rounding of float32.

Source of the data: E. Alpaydin & C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
Learning Repository, 1998; the 1,797 images of 8 x 8 that scikit-learn ships.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from .. import AllReduceCrossDeviceOps, __version__, all_reduce
from ..frameworks import FRAMEWORKS
from ..frameworks.null import NullFramework
from ..options import ALGORITHMS
from .arguments import at_least, one_of, read_device_list
from .output import json_file, progress
from .trainers import Trainer, Tree, load

Numbers = np.ndarray[Any, Any]

TEST_SIZE = 360
HIDDEN = 64


class Digits(NamedTuple):
    """Images of shape ``(k, 64)``, float32 from 0 to 1, and labels of shape ``(k,)``, int64 from 0 to 9."""

    images: Numbers
    labels: Numbers
    test_images: Numbers
    test_labels: Numbers


@dataclass
class Run:
    """What a training run did."""

    losses: list[float]
    """The mean loss over each step's global batch, before its update."""
    epoch_losses: list[float]
    """The mean loss over each epoch's samples."""
    reduction_s: float
    total_s: float
    replicas: list[dict[str, Numbers]]
    """The final parameters of each replica."""


def train(
    framework: Annotated[str, typer.Option(help=", ".join(FRAMEWORKS))] = "numpy",
    devices: Annotated[str, typer.Option(help="How many replicas, or their devices: cpu:0,cpu:1")] = "8",
    algorithm: Annotated[str, typer.Option(help=", ".join(ALGORITHMS))] = "auto",
    num_packs: Annotated[int, typer.Option(help="Packs that the gradients are joined in; 0: no packing.")] = 1,
    epochs: Annotated[int, typer.Option(help="How often every sample is seen.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Samples a step, over all replicas.")] = 64,
    seed: Annotated[int, typer.Option(help="Decides the first parameters and the order of samples.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results and every loss to this file.")] = None,
) -> None:
    """Train a classifier of handwritten digits, data-parallel.

    Each replica computes the gradient over its share of the batch, the
    gradients are summed by all_reduce, and each replica updates its own copy
    of the parameters. Exits with 1 if the copies differ in a single bit.
    """
    one_of(FRAMEWORKS, "--framework", framework)
    names = read_device_list("--devices", devices)
    ops = AllReduceCrossDeviceOps(one_of(ALGORITHMS, "--algorithm", algorithm), at_least(0, "--num-packs", num_packs))
    at_least(1, "--epochs", epochs)
    at_least(1, "--batch-size", batch_size)
    at_least(0, "--seed", seed)
    with json_file("--json", json) as write:
        here = load(framework, names)
        digits = load_digits()
        first = initial(seed)
        order = list(batches(len(digits.labels), batch_size, epochs, seed))
        with progress("training", len(order)) as tick:
            run = fit(here, names, ops, digits, first, order, tick)
        report = {
            "crossreduce": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "framework": framework,
            "framework_version": here.version,
            "devices": list(names),
            "algorithm": algorithm,
            "num_packs": num_packs,
            "epochs": epochs,
            "batch_size": batch_size,
            "seed": seed,
            "steps": len(order),
            "losses": run.losses,
            "epoch_losses": run.epoch_losses,
            "final_loss": run.epoch_losses[-1],
            "test_accuracy": accuracy(run.replicas[0], digits.test_images, digits.test_labels),
            "gradients_reduced": len(first) * len(order),
            "bytes_moved": bytes_moved(first, names, ops) * len(order),
            "reduction_s": run.reduction_s,
            "total_s": run.total_s,
            "replicas_identical": same_bits(run.replicas),
        }
        write(report)
    show(report)
    if not report["replicas_identical"]:
        print("crossreduce: the replicas' parameters differ, and must not.", file=sys.stderr)
        raise typer.Exit(1)


def load_digits() -> Digits:
    """Return the digits that scikit-learn ships, split the same way every time."""
    from sklearn.datasets import load_digits as load_bunch

    bunch = load_bunch()
    images, labels = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, rest = order[:TEST_SIZE], order[TEST_SIZE:]
    return Digits(images[rest], labels[rest], images[test], labels[test])


def initial(seed: int) -> dict[str, Numbers]:
    """Return a network's first parameters, float32: 64 inputs, one hidden layer, 10 outputs.

    Source of the scale: He et al., Delving deep into rectifiers, ICCV 2015.
    """
    rng = np.random.default_rng(seed)
    return {
        "w1": (rng.standard_normal((64, HIDDEN)) * math.sqrt(2 / 64)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": (rng.standard_normal((HIDDEN, 10)) * math.sqrt(2 / HIDDEN)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[tuple[int, Numbers]]:
    """Yield each step's epoch and the indices of its samples; an epoch's last batch may be smaller.

    >>> [(epoch, len(batch)) for epoch, batch in batches(5, 3, 2, seed=0)]
    [(0, 3), (0, 2), (1, 3), (1, 2)]
    """
    rng = np.random.default_rng([seed, 1])
    for epoch in range(epochs):
        order = rng.permutation(count)
        for start in range(0, count, size):
            yield epoch, order[start : start + size]


def fit(
    framework: Trainer,
    devices: tuple[str, ...],
    ops: AllReduceCrossDeviceOps,
    digits: Digits,
    first: dict[str, Numbers],
    order: list[tuple[int, Numbers]],
    tick: Callable[[str], None],
) -> Run:
    """Train on the batches of ``order`` and return what happened."""
    parameters: list[Tree] = [{k: framework.put(x, device) for k, x in first.items()} for device in devices]
    velocity: list[Tree] = [{k: framework.put(0 * x, device) for k, x in first.items()} for device in devices]
    losses: list[float] = []
    sums = [0.0] * (order[-1][0] + 1)
    reduction_s, began = 0.0, time.perf_counter()
    for epoch, batch in order:
        shards = [
            (framework.put(digits.images[part], device), framework.put(digits.labels[part], device))
            for part, device in zip(np.array_split(batch, len(devices)), devices, strict=True)
        ]
        pairs = [framework.gradient(own, *shard) for own, shard in zip(parameters, shards, strict=True)]
        grads = [tree for _, tree in pairs]
        framework.wait(x for tree in grads for x in tree.values())
        before = time.perf_counter()
        totals = all_reduce(grads, "sum", devices=devices, cross_device_ops=ops)
        framework.wait(x for tree in totals for x in tree.values())
        reduction_s += time.perf_counter() - before
        for replica, total in enumerate(totals):
            parameters[replica], velocity[replica] = framework.update(
                parameters[replica], velocity[replica], total, len(batch)
            )
        loss = math.fsum(float(framework.get(loss)) for loss, _ in pairs)
        losses.append(loss / len(batch))
        sums[epoch] += loss
        tick(f"epoch {epoch + 1:3}  loss {losses[-1]:.4f}")
    replicas = [{k: framework.get(x) for k, x in own.items()} for own in parameters]
    total_s = time.perf_counter() - began
    return Run(losses, [loss / len(digits.labels) for loss in sums], reduction_s, total_s, replicas)


def bytes_moved(first: dict[str, Numbers], devices: tuple[str, ...], ops: AllReduceCrossDeviceOps) -> int:
    """Return how many bytes one step's reduction moves between devices, by doing it without elements."""
    null = NullFramework()
    trees = [{k: null.zeros(x.shape, x.dtype.name, device) for k, x in first.items()} for device in devices]
    all_reduce(trees, "sum", devices=devices, cross_device_ops=ops)
    return null.counts.bytes_moved


def accuracy(parameters: dict[str, Numbers], images: Numbers, labels: Numbers) -> float:
    """Return the share of images that the network labels rightly."""
    hidden = np.maximum(images @ parameters["w1"] + parameters["b1"], 0)
    guesses = (hidden @ parameters["w2"] + parameters["b2"]).argmax(axis=1)
    return float((guesses == labels).mean())


def same_bits(replicas: list[dict[str, Numbers]]) -> bool:
    """Say whether all replicas hold the same parameters, to the bit.

    >>> same_bits([{"w": np.zeros(2)}, {"w": -np.zeros(2)}])
    False
    """
    return len({tuple(x.tobytes() for x in replica.values()) for replica in replicas}) == 1


def show(report: dict[str, Any]) -> None:
    """Print a run's results as a table."""
    n, steps = len(report["devices"]), report["steps"]
    replicas = f"{n} replica{'s' * (n != 1)}"
    table = Table(
        title=f"digits on {replicas}, {report['framework']} {report['framework_version']}", title_justify="left"
    )
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right")
    rows = {
        "algorithm, packs": f"{report['algorithm']}, {report['num_packs']}",
        "final loss": f"{report['final_loss']:.6f}",
        "test accuracy": f"{report['test_accuracy']:.4f}",
        "gradients reduced": f"{report['gradients_reduced']:,} arrays ({steps:,} steps)",
        "bytes moved": f"{report['bytes_moved']:,}",
        "seconds in reduction": f"{report['reduction_s']:.2f}",
        "seconds in total": f"{report['total_s']:.2f}",
        "replicas": "identical to the bit" if report["replicas_identical"] else "DIFFERENT",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    table.show_header = False
    Console().print(table)
