"""The members of a strategy that can be used in every context.

Input: names of devices and the ops that reduce. Output: a ``Strategy``. Contexts, variables and ``extended`` use this
class, since they refer to their strategy but must not import ``MirroredStrategy``. Nothing is run or reduced here.
"""

from __future__ import annotations

from typing import Any

from ..reduction.cross_device_ops import CrossDeviceOps
from ..values import DistributedValues


class Strategy:
    """Base class of ``MirroredStrategy``: the members that can be used in every context, also inside replicas."""

    is_default = False
    """Whether this is the strategy that ``get_strategy`` returns outside all scopes."""

    def __init__(self, devices: tuple[str, ...], ops: CrossDeviceOps) -> None:
        self._devices = devices
        self._ops = ops

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._devices)}; {self._ops!r})"

    @property
    def devices(self) -> tuple[str, ...]:
        """The replicas' devices: canonical names, in the order of the replicas."""
        return self._devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return len(self._devices)

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The object whose methods reduce, gather and broadcast."""
        return self._ops

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of a distributed value's components, in the order of the replicas, or of another value alone.

        >>> from crossreduce import MirroredStrategy
        >>> MirroredStrategy(2).local_results(5)
        (5,)
        """
        return tuple(value) if isinstance(value, DistributedValues) else (value,)
