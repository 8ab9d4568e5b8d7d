"""``crossreduce train``: train a small classifier of handwritten digits, data-parallel.

Input: options. Output: a table and, on request, JSON. After each step, all replicas have bitwise equal parameters, and
the losses equal those of one device, up to rounding. Source of the data: E. Alpaydin & C. Kaynak, Optical Recognition
of Handwritten Digits, UCI Machine Learning Repository, 1998; the 1,797 images that scikit-learn ships.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from typer import Exit, Option

from ... import AllReduceCrossDeviceOps, __version__, all_reduce
from ...frameworks.null import NullFramework
from ...options import ALGORITHMS
from ..support.arguments import in_range, one_of, read_device_list, say_unused
from ..support.output import json_report, progress, terminal
from ..support.topologies import Json
from .trainers import TRAINERS, Trainer, Tree, load, numbered_devices
from .view import TrainingStep, Watch, live_view

TEST_SIZE = 360
HIDDEN = 64
MOST_SEED = (1 << 64) - 1
Parameters = dict[str, NDArray[Any]]


class Run(NamedTuple):
    """The measurements and the final parameters of a training run."""

    losses: list[float]  # the mean over each step's global batch, before its update
    epoch_losses: list[float]  # the mean over each epoch's samples
    reduction_s: float
    total_s: float
    replicas: list[Parameters]  # each replica's final parameters


def train(
    framework: Annotated[str, Option(help=", ".join(TRAINERS))] = "numpy",
    devices: Annotated[str, Option(help="Number of replicas, or their devices: cpu:0-3")] = "8",
    algorithm: Annotated[str, Option(help=", ".join(ALGORITHMS))] = "auto",
    num_packs: Annotated[int, Option(help="Number of packs for the gradients; 0: no packing.")] = 1,
    epochs: Annotated[int, Option(help="Number of passes over the samples.")] = 20,
    batch_size: Annotated[int, Option(help="Samples per step, over all replicas.")] = 64,
    seed: Annotated[int, Option(help="Seed of the initial parameters and of the order of samples.")] = 0,
    live: Annotated[
        bool,
        Option(
            "--live",
            help="Draw the loss and the share of time in reductions while training. Without a terminal: print a line "
            "per epoch.",
        ),
    ] = False,
    output: Annotated[
        Path | None, Option("--output", help="Write the results and all losses to this file, too.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a classifier of handwritten digits, data-parallel.

    Each replica computes the gradient over its share of the batch, the
    gradients are summed by all_reduce, and each replica updates its own copy
    of the parameters. The exit code is 1 if the copies differ in any bit.
    """
    framework = one_of(TRAINERS, "--framework", framework)
    names = read_device_list("--devices", devices, partial(numbered_devices, framework))
    ops = AllReduceCrossDeviceOps(one_of(ALGORITHMS, "--algorithm", algorithm), in_range("--num-packs", num_packs, 0))
    in_range("--epochs", epochs, 1)
    in_range("--batch-size", batch_size, 1)
    in_range("--seed", seed, 0, MOST_SEED)
    if live and json:
        say_unused("--live", "--json prints only JSON")
    with json_report(output, json) as write:
        trainer = load(framework, names)
        images, labels, *test = load_digits()
        first = initial(seed)
        order = batches(len(labels), batch_size, epochs, seed)
        steps = epochs * -(-len(labels) // batch_size)
        title = f"{framework} {trainer.version}, {len(names)} replica{'s' * (len(names) != 1)}, {algorithm}"
        with live_view(title, steps, epochs) if live and not json else _bar(steps) as watch:
            run = fit(trainer, names, ops, images, labels, first, order, watch)
        report = {
            "crossreduce": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "framework": framework,
            "framework_version": trainer.version,
            "devices": list(names),
            "algorithm": algorithm,
            "num_packs": num_packs,
            "epochs": epochs,
            "batch_size": batch_size,
            "seed": seed,
            "steps": steps,
            "losses": run.losses,
            "epoch_losses": run.epoch_losses,
            "final_loss": run.epoch_losses[-1],
            "test_accuracy": accuracy(run.replicas[0], *test),
            "gradients_reduced": len(first) * steps,
            "bytes_moved": bytes_moved(first, names, ops) * steps,
            "reduction_s": run.reduction_s,
            "total_s": run.total_s,
            "replicas_identical": same_bits(run.replicas),
        }
        write(report)
        show(report)
    if not report["replicas_identical"]:
        print("crossreduce: the replicas' parameters differ, but all must have the same bits.", file=sys.stderr)
        raise Exit(1)


@contextmanager
def _bar(steps: int) -> Iterator[Watch]:
    """Show a progress bar, and yield the function to call after each step."""
    with progress("training", steps) as advance:
        yield lambda step: advance(f"epoch {step.epoch + 1:3}  loss {step.loss:.4f}")


def load_digits() -> tuple[NDArray[Any], ...]:
    """Return images and labels for training, and then for testing. The split of scikit-learn's digits never changes.

    Images have the shape ``(k, 64)``, float32 from 0 to 1; labels have the shape ``(k,)``, int64 from 0 to 9.
    """
    from sklearn.datasets import load_digits as load_bunch

    bunch = load_bunch()
    images, labels = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, rest = order[:TEST_SIZE], order[TEST_SIZE:]
    return images[rest], labels[rest], images[test], labels[test]


def initial(seed: int) -> Parameters:
    """Return a network's initial parameters, float32: 64 inputs, one hidden layer, 10 outputs.

    Source of the scale: He et al., Delving deep into rectifiers, ICCV 2015.
    """
    rng = np.random.default_rng(seed)
    return {
        "w1": (rng.standard_normal((64, HIDDEN)) * math.sqrt(2 / 64)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": (rng.standard_normal((HIDDEN, 10)) * math.sqrt(2 / HIDDEN)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the epoch of each step, and the indices of its samples. The last batch of an epoch may be smaller.

    >>> [(epoch, len(batch)) for epoch, batch in batches(5, 3, 2, seed=0)]
    [(0, 3), (0, 2), (1, 3), (1, 2)]
    """
    rng = np.random.default_rng([seed, 1])
    for epoch in range(epochs):
        order = rng.permutation(count)
        for start in range(0, count, size):
            yield epoch, order[start : start + size]


def fit(
    trainer: Trainer,
    devices: tuple[str, ...],
    ops: AllReduceCrossDeviceOps,
    images: NDArray[Any],
    labels: NDArray[Any],
    first: Parameters,
    order: Iterable[tuple[int, NDArray[Any]]],
    watch: Watch,
) -> Run:
    """Train from the parameters ``first``, call ``watch`` after each step, and return the run.

    ``order`` yields the epoch and the samples of each step, the epochs in ascending order. The reported seconds do not
    include those of ``watch``.
    """
    zero = {k: 0 * x for k, x in first.items()}
    states: list[tuple[Tree, ...]] = [  # the parameters and the velocity of each replica
        tuple({k: trainer.put(x, device) for k, x in tree.items()} for tree in (first, zero)) for device in devices
    ]
    losses: list[float] = []
    epoch_sums: list[float] = []
    reduction_s, watching_s, began = 0.0, 0.0, time.perf_counter()
    step_began = began
    for epoch, batch in order:
        shards = [
            (trainer.put(images[part], device), trainer.put(labels[part], device))
            for part, device in zip(np.array_split(batch, len(devices)), devices, strict=True)
        ]
        pairs = [trainer.gradient(own, *shard) for (own, _), shard in zip(states, shards, strict=True)]
        grads = [tree for _, tree in pairs]
        trainer.wait(x for tree in grads for x in tree.values())
        before = time.perf_counter()
        totals = all_reduce(grads, "sum", devices=devices, cross_device_ops=ops)
        trainer.wait(x for tree in totals for x in tree.values())
        step_reduction_s = time.perf_counter() - before
        reduction_s += step_reduction_s
        states = [trainer.update(p, v, total, len(batch)) for (p, v), total in zip(states, totals, strict=True)]
        loss = math.fsum(float(trainer.get(loss)) for loss, _ in pairs)
        losses.append(loss / len(batch))
        epoch_sums += [0.0] * (epoch == len(epoch_sums))
        epoch_sums[epoch] += loss
        step_ended = time.perf_counter()
        watch(TrainingStep(epoch, len(batch), losses[-1], step_reduction_s, step_ended - step_began))
        step_began = time.perf_counter()
        watching_s += step_began - step_ended
    replicas = [{k: trainer.get(x) for k, x in own.items()} for own, _ in states]
    total_s = time.perf_counter() - began - watching_s
    return Run(losses, [loss / len(labels) for loss in epoch_sums], reduction_s, total_s, replicas)


def bytes_moved(first: Parameters, devices: tuple[str, ...], ops: AllReduceCrossDeviceOps) -> int:
    """Return how many bytes the reduction of one step moves between devices. ``NullFramework`` counts them."""
    null = NullFramework()
    trees = [{k: null.zeros(x.shape, x.dtype.name, device) for k, x in first.items()} for device in devices]
    all_reduce(trees, "sum", devices=devices, cross_device_ops=ops)
    return null.counts.bytes_moved


def accuracy(parameters: Parameters, images: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the share of images that the network classifies correctly."""
    hidden = np.maximum(images @ parameters["w1"] + parameters["b1"], 0)
    guesses = (hidden @ parameters["w2"] + parameters["b2"]).argmax(axis=1)
    return float((guesses == labels).mean())


def same_bits(replicas: list[Parameters]) -> bool:
    """Return whether all replicas have the same parameters, to the bit.

    >>> same_bits([{"w": np.zeros(2)}, {"w": -np.zeros(2)}])
    False
    """
    return len({tuple(x.tobytes() for x in replica.values()) for replica in replicas}) == 1


def show(report: dict[str, Any]) -> None:
    """Print a run's results as a table."""
    n, steps = len(report["devices"]), report["steps"]
    replicas = f"{n} replica{'s' * (n != 1)}"
    title = f"digits on {replicas}, {report['framework']} {report['framework_version']}"
    table = Table(title=title, title_justify="left", show_header=False)
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
    terminal().print(table)
