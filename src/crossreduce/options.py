"""The options of one call: packing, timeout, algorithm and exactness.

Input: the caller's arguments. Output: a validated, immutable ``CommunicationOptions``. Nothing here reduces or plans.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from numbers import Real
from typing import Final

from .errors import ArgumentError, shown
from .planning import NAMES

ALGORITHMS: Final = NAMES
"""The names of all algorithms, and "auto" and "nccl", which select one of them."""


def count(name: str, value: object, remedy: str) -> int:
    """Return ``value`` as a non-negative int, or raise an ``ArgumentError``. ``name`` is the argument's name."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ArgumentError.of(f"{name} must be a whole number, 0 or more.", shown(value), remedy)
    return number


def algorithm_name(value: object) -> str:
    """Return ``value`` if it is the name of an algorithm, or raise an ``ArgumentError`` that lists the names."""
    if isinstance(value, str) and value in ALGORITHMS:
        return value
    raise ArgumentError.of("there is no such algorithm.", shown(value), "one of " + ", ".join(ALGORITHMS))


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for one call of ``reduce``, ``batch_reduce``, ``gather`` or ``all_reduce``.

    Args:
      bytes_per_pack: the largest size of a pack, in bytes of one replica. Tensors are joined and cut into such packs.
        With 0, the ``num_packs`` of the op applies instead.
      timeout_seconds: the longest time that replicas of a ``MirroredStrategy`` wait for each other. ``run`` has 600 s
        by default, and calls inside ``run`` have its timeout. Other reductions do not use this option.
      implementation: the algorithm for ops with the algorithm "auto" or "nccl"; other ops ignore it.
      exact: whether sums and means of floats are correctly rounded: the result is the real sum or mean of the
        components, rounded once, to nearest even. It is the same for every order of the replicas, algorithm, packing
        and number of threads (see docs/explanation/exactness.md). Products of floats and means of 64-bit integers are
        refused.
    Raises:
      ArgumentError: the number of bytes is negative or not an integer, the timeout is not a positive number, the
        algorithm is unknown, or ``exact`` is not a bool.

    >>> CommunicationOptions(bytes_per_pack=1 << 20).bytes_per_pack
    1048576
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: str = "auto"
    exact: bool = False

    def __post_init__(self) -> None:
        nbytes = count("bytes_per_pack", self.bytes_per_pack, "0 leaves the packing to num_packs")
        object.__setattr__(self, "bytes_per_pack", nbytes)
        seconds = self.timeout_seconds
        if seconds is not None and not (isinstance(seconds, Real) and not isinstance(seconds, bool) and seconds > 0):
            raise ArgumentError.of("timeout_seconds must be a positive number.", shown(seconds), "None for the default")
        if isinstance(self.implementation, str):
            object.__setattr__(self, "implementation", self.implementation.lower())
        algorithm_name(self.implementation)
        if not isinstance(self.exact, bool):
            raise ArgumentError.of("exact must be True or False.", shown(self.exact), "exact=True, a bool of Python")


@dataclass(frozen=True)
class CollectiveHints(CommunicationOptions):
    """The older form of ``CommunicationOptions``, without the last two fields. All calls accept both classes.

    >>> CollectiveHints(bytes_per_pack=1024)
    CollectiveHints(bytes_per_pack=1024, timeout_seconds=None)
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> None:
        super().__init__(bytes_per_pack, timeout_seconds)

    def __repr__(self) -> str:
        return f"CollectiveHints(bytes_per_pack={self.bytes_per_pack}, timeout_seconds={self.timeout_seconds})"


DEFAULT: Final = CommunicationOptions()
