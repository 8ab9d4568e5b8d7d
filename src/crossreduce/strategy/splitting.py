"""Split batches into one share per replica.

Input: a tree of arrays and the replicas' devices. Output: the same tree with ``PerReplica`` values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

from ..errors import ArgumentError, MismatchError, UnsupportedError, shown
from ..frameworks import Sparse, framework_of
from ..reduction.trees import flatten_tree, leaf_paths, unflatten_tree
from ..values import PerReplica, describe
from .contexts import require_cross_replica
from .regroup import map_leaves


@dataclass(frozen=True)
class ValueContext:
    """The replica for which a value is created: its number, the number of replicas, and its device."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int
    device: str


def shares(size: int, n: int) -> list[tuple[int, int]]:
    """Return the start and the end of each of ``n`` shares of ``size`` samples. Larger shares come first.

    >>> shares(5, 3), shares(1, 3)
    ([(0, 2), (2, 4), (4, 5)], [(0, 1), (1, 1), (1, 1)])
    """
    ends = [k * (size // n) + min(k, size % n) for k in range(n + 1)]
    return list(pairwise(ends))


def split_tree(batch: Any, axis: int, devices: tuple[str, ...]) -> Any:
    """Return a tree with a ``PerReplica`` of shares in place of each array; see ``MirroredStrategy.split``."""
    require_cross_replica("split", "split before run(), and pass the shares as arguments")
    if not isinstance(axis, Integral) or isinstance(axis, bool):
        raise ArgumentError.of("axis must be an integer.", shown(axis), "0")
    leaves, structure = flatten_tree(batch)
    arrays = map_leaves(leaves, structure, lambda leaf: _splittable(leaf, axis, devices))
    sizes = {x.shape[axis] for _, x in arrays}
    if len(sizes) > 1:
        by_path = zip(leaf_paths(structure), leaves, strict=True)
        listing = ", ".join(f"{path}: {describe(leaf)}" for path, leaf in by_path)
        problem = f"the arrays of a batch differ in size along axis {axis}."
        raise MismatchError.of(problem, listing, "arrays with the same number of samples")
    values = []
    for framework, x in arrays:
        before = (slice(None),) * (axis % len(x.shape))
        parts = [x[(*before, slice(*share))] for share in shares(x.shape[axis], len(devices))]
        components = tuple(framework.to_device(part, device) for part, device in zip(parts, devices, strict=True))
        values.append(PerReplica.on(components, devices))
    return unflatten_tree(structure, values)


def _splittable(leaf: Any, axis: int, devices: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a leaf's framework and its array. Raise an error if it cannot be split along ``axis`` or be on devices."""
    framework = framework_of(leaf)
    x = framework.array(leaf)
    if isinstance(x, Sparse):
        raise UnsupportedError.of("sparse arrays cannot be split.", describe(leaf), "dense arrays")
    if not -len(x.shape) <= axis < len(x.shape):
        problem = f"the array has no axis {axis}, so it cannot be split."
        remedy = "an axis of the array; or run(fn, args=(x,)) without split(), if all replicas need x"
        raise ArgumentError.of(problem, describe(leaf), remedy)
    framework.require(devices)
    return framework, x


class DistributedDataset:
    """Batches of a dataset, each split over the replicas; from ``MirroredStrategy.distribute_dataset``."""

    def __init__(self, devices: tuple[str, ...], batches: Iterable[Any], axis: int) -> None:
        if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes)):
            raise ArgumentError.of("a dataset must be an iterable of batches.", shown(batches), "[batch, batch]")
        self._devices, self._batches, self._axis = devices, batches, axis

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield split_tree(batch, self._axis, self._devices)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # raises TypeError for a generator
