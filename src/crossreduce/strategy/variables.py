"""Variables: one component a replica, kept alike (mirrored), or joined when they are read (sync-on-read).

Assignments replace NumPy and JAX arrays, which nobody can write: what was read stays what it was. Torch tensors are
written in place, so whoever holds a component (an optimizer) sees it.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Any

from ..cross_device_ops import AllReduceCrossDeviceOps
from ..errors import ArgumentError, ContextError, MismatchError, UnsupportedError, message, shown
from ..frameworks import Array, Framework, Immutable, Sparse, framework_of
from ..ops import COMPLEX, FLOATS, INTEGERS, ReduceOp
from ..validation import device_names
from ..values import DistributedValues, Mirrored, PerReplica, describe
from .contexts import Current, current, replica_framework
from .regroup import Whole, localized, placed
from .replica_group import Call

_UNDISTRIBUTED = AllReduceCrossDeviceOps("auto")  # copies a variable's first value, where there is no strategy
_NUMBERS = (bool, int, float, complex)
_DTYPES = ({"bool"}, INTEGERS, FLOATS, COMPLEX)  # that hold them, each those of all before it


_WRITING = threading.RLock()  # runs of several threads may assign to one variable, whose components stay alike


class _Named(enum.Enum):
    @classmethod
    def _missing_(cls, value: object) -> Any:
        for member in cls:
            if isinstance(value, str) and member.value == value.lower():
                return member
        names = ", ".join(f'"{member.value}"' for member in cls)
        raise ArgumentError(message(f"there is no such {cls.__name__}.", shown(value), f"one of {names}"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class VariableSynchronization(_Named):
    """When the components of a variable are joined: when it is written, or when it is read. AUTO: when written.

    >>> VariableSynchronization("On_Read")
    VariableSynchronization.ON_READ
    """

    AUTO = "auto"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(_Named):
    """How the replicas' values of a variable become one.

    >>> VariableAggregation("mean")
    VariableAggregation.MEAN
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


class Variable(Whole):
    """A value that outlives a step, with one component for each replica of the strategy in whose scope it is made.

    Mirrored (``ON_WRITE``, what ``AUTO`` means): all components are alike. A replica's assignment is joined with
    those of the others, which must assign as well, by ``aggregation``. Sync-on-read (``ON_READ``): each replica reads
    and writes its own component, without waiting; read in the cross-replica context, they are joined by
    ``aggregation``.

    In the cross-replica context, an assigned array is the same for all. A ``PerReplica`` is joined first where the
    variable is mirrored, and taken component by component where it is not. What is assigned to a sync-on-read sum is
    its sum: the first component gets it, the others 0.

    Args:
      initial_value: an array or number, or a function that returns one.
      name: for messages.
      synchronization: a ``VariableSynchronization`` or its name.
      aggregation: a ``VariableAggregation`` or its name.
    Raises:
      ArgumentError: no array; an unknown name; the mean of an integer variable.

    >>> import numpy as np
    >>> from crossreduce import MirroredStrategy, get_replica_context
    >>> strategy = MirroredStrategy(3)
    >>> with strategy.scope():
    ...     seen = Variable(np.int64(0), synchronization="on_read", aggregation="sum")
    >>> _ = strategy.run(lambda: seen.assign_add(1 + get_replica_context().replica_id_in_sync_group))
    >>> int(seen.value())
    6
    """

    __slots__ = ("_aggregation", "_backend", "_components", "_name", "_spec", "_strategy", "_synchronization")

    def __init__(
        self,
        initial_value: Any,
        name: str | None = None,
        synchronization: VariableSynchronization | str = "auto",
        aggregation: VariableAggregation | str = "none",
    ) -> None:
        self._name = name
        self._synchronization = VariableSynchronization(synchronization)
        self._aggregation = VariableAggregation(aggregation)
        here = current()
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, Variable):
            value = value.value()
        if here is not None and here.replica is not None:
            raise ContextError(
                message(
                    "variables are made in the cross-replica context.",
                    f"Variable({describe(value)}) inside of {here.replica}",
                    "with strategy.scope(): Variable(...), before run",
                )
            )
        self._strategy = None if here is None else here.strategy
        ops = _UNDISTRIBUTED if here is None else here.strategy.cross_device_ops
        self._devices = device_names(value) if here is None and not isinstance(value, _NUMBERS) else ("cpu:0",)
        if here is not None:
            self._devices = here.strategy.devices
        copies = list(ops.broadcast(value, Mirrored.on(self._devices, self._devices)))
        self._backend = replica_framework(copies[0])
        first = self._backend.array(copies[0])
        if isinstance(first, Sparse):
            raise UnsupportedError(message("a variable is dense.", shown(value), "value.todense() or the like"))
        held = [self._backend.variable_value(None, x, device) for x, device in zip(copies, self._devices, strict=True)]
        self._components = held
        self._spec = self._backend.spec(first)
        if self._aggregation is VariableAggregation.MEAN and self._spec.dtype in INTEGERS | {"bool"}:
            raise ArgumentError(
                message(
                    "the mean of integers is a float, which an integer variable cannot hold.",
                    f"{self._spec}, aggregation mean",
                    'a float, or aggregation="sum"',
                )
            )

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in the order of the replicas."""
        return tuple(self._components)

    @property
    def name(self) -> str | None:
        """The name it was given."""
        return self._name

    @property
    def synchronization(self) -> VariableSynchronization:
        """When components are joined; never ``AUTO``."""
        on_read = self._synchronization is VariableSynchronization.ON_READ
        return VariableSynchronization.ON_READ if on_read else VariableSynchronization.ON_WRITE

    @property
    def aggregation(self) -> VariableAggregation:
        """How components become one."""
        return self._aggregation

    def __len__(self) -> int:
        return len(self._components)

    def __iter__(self) -> Any:
        return iter(self._components)

    def __getitem__(self, index: int) -> Any:
        return self._components[index]

    def __repr__(self) -> str:
        return (
            f"Variable({self._name or ''}{': ' if self._name else ''}{self._spec} on {', '.join(self._devices)}, "
            f"{self.synchronization.value}, {self._aggregation.value})"
        )

    def value(self) -> Array:
        """Return this replica's component; in the cross-replica context the first one, or, sync-on-read, all in one.

        It is the component itself, where it is one: a NumPy or JAX array that no assignment changes, or a torch tensor
        that each assignment writes into (``clone()`` what is to stay).

        Raises:
          ArgumentError: a sync-on-read variable without aggregation, read in the cross-replica context.
          ContextError: inside of another strategy.
        """
        here = self._here()
        if here is not None and here.replica is not None and self._strategy is not None:
            return self._components[here.replica.replica_id_in_sync_group]
        joined = self.synchronization is VariableSynchronization.ON_READ and len(self._components) > 1
        if not joined or self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self._components[0]
        return self._joined(self._components)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        made = self.value()
        found = made.__array__() if dtype is None else made.__array__(dtype)
        if copy is False and found is not made:
            raise ValueError("a variable's value becomes a NumPy array of this dtype only as a copy")
        return found.copy() if copy else found

    def assign(self, value: Any) -> Variable:
        """Give the variable another value of its shape and dtype.

        Args:
          value: an array of the variable's framework, shape and dtype; for a variable of no axes a number, too.
        Returns:
          The variable.
        Raises:
          MismatchError: another shape or dtype; replicas that assign to different variables.
          ArgumentError: a replica assigns to a mirrored variable without aggregation.
          ContextError: inside of another strategy than the variable's.
        """
        return self._assign("assign", value)

    def assign_add(self, value: Any) -> Variable:
        """Add to the variable; see ``assign``. Numbers are added to every element.

        Raises:
          As ``assign``; ContextError for a sync-on-read sum in the cross-replica context: it has no one component
          to add to.
        """
        return self._assign("assign_add", value)

    def assign_sub(self, value: Any) -> Variable:
        """Subtract from the variable; see ``assign_add``."""
        return self._assign("assign_sub", value)

    def _here(self) -> Current | None:
        here = current()
        if here is not None and self._strategy is not None and here.strategy is not self._strategy:
            raise ContextError(
                message(
                    "a variable is used inside of another strategy than its own.",
                    f"{self} in a context of {here.strategy}",
                    "one strategy a program",
                )
            )
        return here

    def _assign(self, how: str, value: Any) -> Variable:
        here = self._here()
        mirrored = self.synchronization is VariableSynchronization.ON_WRITE
        if here is None or here.replica is None:
            self._assign_all(how, value, mirrored)
            return self
        if self._strategy is None:
            raise ContextError(
                message(
                    "a variable that was made outside of the strategy's scope has one component for all replicas.",
                    f"{how} of {self} in {here.replica}",
                    "with strategy.scope(): Variable(...)",
                )
            )
        k, n = here.replica.replica_id_in_sync_group, len(self._components)
        value = value.value() if isinstance(value, Variable) else localized(value, k, n)
        if not mirrored:
            self._put(k, self._changed(how, k, value))
            return self
        self._require_aggregation(f"{how} of {self} in {here.replica}")

        def merge(values: list[Any]) -> list[None]:
            self._put_all(how, self._joined(values))
            return [None] * n

        here.replica._meet(Call((how, id(self)), lambda: f"{how} of {self}", value, merge))
        return self

    def _assign_all(self, how: str, value: Any, mirrored: bool) -> None:
        """Assign in the cross-replica context."""
        n = len(self._components)
        if isinstance(value, Variable):
            value = value.value()
        if isinstance(value, DistributedValues):
            if len(value) != n:
                given = f"{len(value)} components for {n}"
                raise MismatchError(message("a distributed value needs a component for each of the variable's.", given))
            if mirrored and isinstance(value, PerReplica):
                self._require_aggregation(f"{how} of {value} to {self}")
                self._put_all(how, self._joined(value.values))
            else:
                self._put_all(how, list(value))
            return
        if mirrored or self._aggregation is not VariableAggregation.SUM or n == 1:
            self._put_all(how, [value] * n)
            return
        if how != "assign":
            raise ContextError(
                message(
                    "a sync-on-read sum has no one component to add to.",
                    f"{how} of {self} in the cross-replica context",
                    "assign, or assign_add in the replicas",
                )
            )
        self._put_all("assign", [value, *(_filled(self._backend, x, 0) for x in self._components[1:])])

    def _require_aggregation(self, what: str) -> None:
        if self._aggregation is VariableAggregation.NONE:
            raise ArgumentError(
                message(
                    "replicas cannot assign to a mirrored variable that has no aggregation.",
                    what,
                    'Variable(..., aggregation="mean"), "sum" or "only_first_replica"; or synchronization="on_read"',
                )
            )

    def _joined(self, values: Sequence[Any]) -> list[Any]:
        """Return the replicas' values as one, for each replica."""
        if self._aggregation is VariableAggregation.NONE:
            raise ArgumentError(
                message(
                    "a sync-on-read variable without aggregation has a value in each replica only.",
                    f"{self} in the cross-replica context",
                    'strategy.local_results(variable), or aggregation="sum"',
                )
            )
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return [values[0]] * len(values)
        together = placed(values, self._devices)
        ops = _UNDISTRIBUTED if self._strategy is None else self._strategy.cross_device_ops
        joined = ops.reduce(_OPS[self._aggregation], together, together)
        numbers = all(isinstance(value, _NUMBERS) for value in values)
        return [x.item() for x in joined] if numbers else list(joined)

    def _changed(self, how: str, k: int, value: Any) -> Array:
        """Return what a component becomes, checked."""
        old = self._components[k]
        if how != "assign":
            plain: Any = self._backend.array(old)  # without gradients
            number = value if isinstance(value, _NUMBERS) else self._taken(value, k)
            new = plain + number if how == "assign_add" else plain - number
            return self._taken(new, k)
        if isinstance(value, _NUMBERS) and self._spec.shape == () and _holds(self._spec.dtype, value):
            return _filled(self._backend, self._backend.array(old), value)
        return self._taken(value, k)

    def _taken(self, value: Any, k: int) -> Array:
        """Return an array on a component's device, if it is like the component."""
        framework = framework_of(value)
        x = framework.array(value) if framework is self._backend else None
        if x is None or isinstance(x, Sparse) or framework.spec(x) != self._spec:
            raise MismatchError(
                message(
                    "a variable keeps its framework, shape and dtype.", f"{describe(value)} for {self}", f"{self._spec}"
                )
            )
        return framework.to_device(x, self._devices[k])

    def _put_all(self, how: str, values: Sequence[Any]) -> None:
        with _WRITING:
            changed = [self._changed(how, k, value) for k, value in enumerate(values)]  # all or none
            for k, new in enumerate(changed):
                self._put(k, new)

    def _put(self, k: int, new: Array) -> None:
        self._components[k] = self._backend.variable_value(self._components[k], new, self._devices[k])


class Component:
    """One component of a variable, as ``extended.update`` hands it over: read, assigned and added to on its own."""

    def __init__(self, variable: Variable, replica: int) -> None:
        self._variable = variable
        self._replica = replica

    def __repr__(self) -> str:
        return f"Component({self._replica} of {self._variable})"

    @property
    def device(self) -> str:
        """Where it is."""
        return self._variable.devices[self._replica]

    def value(self) -> Array:
        """Return the array."""
        return self._variable[self._replica]

    def assign(self, value: Any) -> Component:
        """Give it another value of its shape and dtype."""
        return self._change("assign", value)

    def assign_add(self, value: Any) -> Component:
        """Add to it."""
        return self._change("assign_add", value)

    def assign_sub(self, value: Any) -> Component:
        """Subtract from it."""
        return self._change("assign_sub", value)

    def _change(self, how: str, value: Any) -> Component:
        self._variable._put(self._replica, self._variable._changed(how, self._replica, value))
        return self


def _holds(dtype: str, number: complex) -> bool:
    """Return whether numbers of this kind are numbers of a dtype: no float is an integer."""
    kind = next(k for k, types in enumerate(_NUMBERS) if isinstance(number, types))
    return any(dtype in dtypes for dtypes in _DTYPES[kind:])


def _filled(framework: Framework, x: Array, number: Any) -> Array:
    """Return an array like another, of one number."""
    if isinstance(framework, Immutable):
        return x.at[...].set(number)
    made = framework.clone(framework.array(x))
    made[...] = number
    return made
