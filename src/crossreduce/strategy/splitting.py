"""A batch's share for each replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, MismatchError, UnsupportedError, message, shown
from ..frameworks import Sparse, framework_of
from ..trees import flatten_tree, leaf_paths, unflatten_tree
from ..values import PerReplica, describe
from .regroup import each

if TYPE_CHECKING:
    from .mirrored import MirroredStrategy


@dataclass(frozen=True)
class ValueContext:
    """For which replica a value is made: its number, how many there are, and its device."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int
    device: str


def shares(size: int, n: int) -> list[tuple[int, int]]:
    """Return from where to where each of ``n`` shares goes; they differ by at most one, and the first are larger.

    >>> shares(5, 3), shares(1, 3)
    ([(0, 2), (2, 4), (4, 5)], [(0, 1), (1, 1), (1, 1)])
    """
    ends = [k * (size // n) + min(k, size % n) for k in range(n + 1)]
    return list(pairwise(ends))


def split_tree(batch: Any, axis: int, devices: tuple[str, ...]) -> Any:
    """Return a tree of each array's shares along an axis, each on its device; see ``MirroredStrategy.split``."""
    if not isinstance(axis, Integral) or isinstance(axis, bool):
        raise ArgumentError(message("axis must be a whole number.", shown(axis), "0"))
    leaves, structure = flatten_tree(batch)
    arrays = each(leaves, structure, lambda leaf: _splittable(leaf, axis, devices))
    sizes = {x.shape[axis] for _, x in arrays}
    if len(sizes) > 1:
        found = ", ".join(f"{path}: {describe(leaf)}" for path, leaf in zip(leaf_paths(structure), leaves, strict=True))
        raise MismatchError(
            message(f"the arrays of a batch differ in size along axis {axis}.", found, "as many samples in each")
        )
    made = []
    for framework, x in arrays:
        along = (slice(None),) * (axis % len(x.shape))
        cut = [x[(*along, slice(*share))] for share in shares(x.shape[axis], len(devices))]
        components = tuple(framework.to_device(part, device) for part, device in zip(cut, devices, strict=True))
        made.append(PerReplica.on(components, devices))
    return unflatten_tree(structure, made)


def _splittable(leaf: Any, axis: int, devices: tuple[str, ...]) -> tuple[Any, Any]:
    framework = framework_of(leaf)
    x = framework.array(leaf)
    if isinstance(x, Sparse):
        raise UnsupportedError(message("sparse arrays cannot be split.", describe(leaf), "dense ones"))
    if not -len(x.shape) <= axis < len(x.shape):
        raise ArgumentError(
            message(
                f"an array without axis {axis} cannot be split along it.",
                describe(leaf),
                "hand what is for all replicas to run() as it is",
            )
        )
    framework.require(devices)
    return framework, x


class DistributedDataset:
    """Batches of a dataset, each split over the replicas; from ``MirroredStrategy.distribute_dataset``."""

    def __init__(self, strategy: MirroredStrategy, batches: Iterable[Any], axis: int) -> None:
        if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes)):
            raise ArgumentError(message("a dataset is an iterable of batches.", shown(batches), "[batch, batch]"))
        self._strategy, self._batches, self._axis = strategy, batches, axis

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield self._strategy.split(batch, self._axis)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # a generator has none, and says so
