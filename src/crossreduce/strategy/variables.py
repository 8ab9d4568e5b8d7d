"""Variables with one component per replica: kept equal (mirrored), or aggregated when they are read (sync-on-read).

Input: assignments in replicas or in the cross-replica context. Output: the current value. An assignment replaces
NumPy and JAX arrays, which are read-only, and CuPy arrays, so arrays that were read before do not change. Torch tensors
are written in place, so an optimizer that refers to a component uses the new value.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Self

from ..errors import ArgumentError, ContextError, MismatchError, UnsupportedError, shown
from ..frameworks import Array, Immutable, ReplicaFramework, Sparse, framework_of
from ..kernels.overlap import overlaps
from ..ops import COMPLEX, FLOATS, INTEGERS, ReduceOp
from ..reduction.cross_device_ops import CrossDeviceOps
from ..reduction.trees import check_ops
from ..reduction.validation import check_array, device_names
from ..values import DistributedValues, Mirrored, PerReplica, describe
from .contexts import Current, current, replica_framework
from .regroup import DistributedVariable, localize, per_replica_on
from .replica_group import CollectiveCall

_NUMBERS = (bool, int, float, complex)
# A number of the class _NUMBERS[k] can be stored in every dtype in _DTYPES[k] and in the later sets.
_DTYPES = ({"bool"}, INTEGERS, FLOATS, COMPLEX)

_WRITING = threading.RLock()  # several threads may run replicas that assign to one variable


class _Named(enum.Enum):
    """An enumeration whose members can be given by their names, in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str) and value.lower() in cls._value2member_map_:
            return cls(value.lower())
        names = ", ".join(f'"{member.value}"' for member in cls)
        raise ArgumentError.of(f"invalid {cls.__name__}.", shown(value), f"one of {names}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class VariableSynchronization(_Named):
    """When a variable's components are aggregated: when it is written (also with ``AUTO``), or when it is read.

    >>> VariableSynchronization("On_Read")
    VariableSynchronization.ON_READ
    """

    AUTO = "auto"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(_Named):
    """How the replicas' values of a variable are combined.

    >>> VariableAggregation("mean")
    VariableAggregation.MEAN
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class _Assignable:
    """The assignments that variables and their components have in common."""

    __slots__ = ()

    def assign(self, value: Any) -> Self:
        """Set the value; its shape and dtype stay the same.

        Args:
          value: an array of the variable's framework, shape and dtype; for a variable without axes also a number.
        Returns:
          The variable, or its component.
        Raises:
          MismatchError: another shape or dtype; replicas that assign to different variables.
          ArgumentError: a replica assigns to a mirrored variable without aggregation.
          ContextError: inside a strategy that does not own the variable.
        """
        return self._assign("assign", value)

    def assign_add(self, value: Any) -> Self:
        """Add to the value; see ``assign``. Numbers are added to every element.

        Raises:
          As ``assign``; ContextError for a sync-on-read variable with aggregation sum in the cross-replica context,
          since no single component stores the sum.
        """
        return self._assign("assign_add", value)

    def assign_sub(self, value: Any) -> Self:
        """Subtract from the value; see ``assign_add``."""
        return self._assign("assign_sub", value)

    def _assign(self, how: str, value: Any) -> Self:
        raise NotImplementedError


_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


class Variable(_Assignable, DistributedVariable):
    """A value that persists between steps, with one component per replica of the strategy in whose scope it is created.

    A variable is mirrored (``ON_WRITE``, and ``AUTO``) or sync-on-read (``ON_READ``). All components of a mirrored one
    are equal: all replicas must assign, and their values are combined by ``aggregation``. In a sync-on-read one, each
    replica reads and writes its own component, without waiting; in the cross-replica context, reading combines the
    components by ``aggregation``.

    In the cross-replica context, an assigned array goes to all components. If the variable is a sync-on-read sum, the
    array goes only to the first component, and the others become 0, so that the array is the sum. A ``PerReplica`` is
    combined first if the variable is mirrored, and assigned component by component if it is not.

    Args:
      initial_value: an array or number, or a function that returns one.
      name: for error messages.
      synchronization: a ``VariableSynchronization`` or its name.
      aggregation: a ``VariableAggregation`` or its name.
    Raises:
      ArgumentError: the value is neither an array nor a number; an unknown name; the mean of an integer variable.

    >>> import numpy as np
    >>> from crossreduce import MirroredStrategy, get_replica_context
    >>> strategy = MirroredStrategy(3)
    >>> with strategy.scope():
    ...     seen = Variable(np.int64(0), synchronization="on_read", aggregation="sum")
    >>> _ = strategy.run(lambda: seen.assign_add(1 + get_replica_context().replica_id_in_sync_group))
    >>> int(seen.value())
    6
    """

    __slots__ = ("_aggregation", "_components", "_framework", "_name", "_spec", "_strategy", "_synchronization")

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
            problem = "variables must be created in the cross-replica context."
            given = f"Variable({describe(value)}) inside {here.replica}"
            raise ContextError.of(problem, given, "with strategy.scope(): Variable(...), before run")
        if not isinstance(value, DistributedValues):
            check_array(value)
        self._strategy = None if here is None else here.strategy
        if here is not None:
            self._devices = here.strategy.devices
        else:
            self._devices = ("cpu:0",) if isinstance(value, _NUMBERS) else device_names(value)
        copies = list(self._ops.broadcast(value, Mirrored.on(self._devices, self._devices)))
        self._framework = replica_framework(copies[0])
        first = self._framework.array(copies[0])
        if isinstance(first, Sparse):
            raise UnsupportedError.of("a variable must be dense.", shown(value), "a dense array")
        self._components = self._framework.variable_values(None, copies, self._devices)
        self._spec = self._framework.spec(first)
        if self._aggregation is VariableAggregation.MEAN and self._spec.dtype in INTEGERS | {"bool"}:
            problem = "the mean of integers is a float, which an integer variable cannot store."
            remedy = 'a float initial_value, or aggregation="sum"'
            raise ArgumentError.of(problem, f"{self._spec}, aggregation mean", remedy)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in the order of the replicas."""
        return tuple(self._components)

    @property
    def name(self) -> str | None:
        """The variable's name."""
        return self._name

    @property
    def synchronization(self) -> VariableSynchronization:
        """When components are aggregated: ``ON_WRITE`` or ``ON_READ``."""
        on_read = self._synchronization is VariableSynchronization.ON_READ
        return VariableSynchronization.ON_READ if on_read else VariableSynchronization.ON_WRITE

    @property
    def aggregation(self) -> VariableAggregation:
        """How components are combined."""
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
        """Return this replica's component, or in the cross-replica context the value of the variable.

        This value is the first component or, if the variable is sync-on-read, all components combined. A component is
        not copied. Assignments write into a torch tensor (``clone()`` it to keep the value), but not into other arrays.

        Raises:
          ArgumentError: a sync-on-read variable without aggregation, read in the cross-replica context.
          ContextError: inside a strategy that does not own the variable.
        """
        here = self._check_context()
        if here is not None and here.replica is not None and self._strategy is not None:
            return self._components[here.replica.replica_id_in_sync_group]
        combined = self.synchronization is VariableSynchronization.ON_READ and len(self._components) > 1
        if not combined or self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self._components[0]
        return self._combine(self._components)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self.value()
        array = value.__array__() if dtype is None else value.__array__(dtype)
        if copy is False and array.dtype != value.__array__().dtype:
            raise ValueError(f"{self} cannot be converted to {array.dtype} without a copy: use copy=None")
        return array.copy() if copy else array

    @property
    def _ops(self) -> CrossDeviceOps:
        return check_ops(None) if self._strategy is None else self._strategy.cross_device_ops

    def _check_context(self) -> Current | None:
        """Return the current context. ContextError: it belongs to a strategy that does not own the variable."""
        here = current()
        if here is not None and self._strategy is not None and here.strategy is not self._strategy:
            problem = "a variable is used inside a strategy that does not own it."
            remedy = "create it in the scope of the strategy that uses it"
            raise ContextError.of(problem, f"{self} in a context of {here.strategy}", remedy)
        return here

    def _assign(self, how: str, value: Any) -> Self:
        """Assign in the current context. ``how`` is "assign", "assign_add" or "assign_sub"."""
        here = self._check_context()
        mirrored = self.synchronization is VariableSynchronization.ON_WRITE
        if here is None or here.replica is None:
            self._assign_all(how, value, mirrored)
            return self
        if self._strategy is None:
            problem = "a replica cannot assign to a variable that was created outside the strategy's scope."
            raise ContextError.of(problem, f"{how} of {self} in {here.replica}", "with strategy.scope(): Variable(...)")
        k, n = here.replica.replica_id_in_sync_group, len(self._components)
        value = value.value() if isinstance(value, Variable) else localize(value, k, n)
        if not mirrored:
            self.assign_component(how, k, value)
            return self
        self._require_aggregation(f"{how} of {self} in {here.replica}")

        def merge(values: list[Any]) -> list[None]:
            self._put_all(how, self._combine(values))
            return [None] * n

        here.replica.rendezvous(CollectiveCall((how, id(self)), lambda: f"{how} of {self}", value, merge))
        return self

    def _assign_all(self, how: str, value: Any, mirrored: bool) -> None:
        """Assign in the cross-replica context, to all components: see ``Variable``."""
        n = len(self._components)
        if isinstance(value, Variable):
            value = value.value()
        if isinstance(value, DistributedValues):
            if len(value) != n:
                problem = "an assigned distributed value must have as many components as the variable."
                raise MismatchError.of(problem, f"{len(value)} components for a variable of {n}")
            if mirrored and isinstance(value, PerReplica):
                self._require_aggregation(f"{how} of {value} to {self}")
                self._put_all(how, self._combine(value.values))
            else:
                self._put_all(how, list(value))
            return
        if mirrored or self._aggregation is not VariableAggregation.SUM or n == 1:
            self._put_all(how, [value] * n)
            return
        if how != "assign":
            problem = f"{how} outside of replicas is not defined for a sync-on-read variable with aggregation sum."
            given = f"{how} of {self} in the cross-replica context"
            raise ContextError.of(problem, given, f"assign, or {how} in the replicas")
        others = zip(self._components[1:], self._devices[1:], strict=True)
        self._put_all("assign", [value, *(_fill(self._framework, x, device, 0) for x, device in others)])

    def _require_aggregation(self, assignment: str) -> None:
        if self._aggregation is VariableAggregation.NONE:
            problem = "the values of replicas cannot be assigned to a mirrored variable without aggregation."
            remedy = 'Variable(..., aggregation="mean"), "sum" or "only_first_replica"; or synchronization="on_read"'
            raise ArgumentError.of(problem, assignment, remedy)

    def _combine(self, values: Sequence[Any]) -> list[Any]:
        """Return a list with the values of the replicas combined by ``aggregation``, once for each replica."""
        if self._aggregation is VariableAggregation.NONE:
            problem = "a sync-on-read variable without aggregation cannot be read outside of replicas."
            remedy = 'strategy.local_results(variable), or aggregation="sum"'
            raise ArgumentError.of(problem, f"{self} in the cross-replica context", remedy)
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return [values[0]] * len(values)
        value_per_replica = per_replica_on(self._devices, values)
        combined = self._ops.reduce(_OPS[self._aggregation], value_per_replica, value_per_replica)
        numbers = all(isinstance(value, _NUMBERS) for value in values)
        return [x.item() for x in combined] if numbers else list(combined)

    def _new_component(self, how: str, k: int, value: Any) -> Array:
        """Return the value of component ``k`` after an assignment, without storing it. An invalid value is an error."""
        old = self._components[k]
        if how != "assign":
            plain: Any = self._framework.array(old)  # the value without its gradient
            number = value if isinstance(value, _NUMBERS) else self._on_device(value, k)
            with _computing_on(self._framework, self._devices[k]):
                new = plain + number if how == "assign_add" else plain - number
            return self._on_device(new, k)
        if isinstance(value, _NUMBERS) and self._spec.shape == () and _can_represent(value, self._spec.dtype):
            return _fill(self._framework, self._framework.array(old), self._devices[k], value)
        return self._on_device(value, k)

    def _on_device(self, value: Any, k: int) -> Array:
        """Return an array on a component's device. MismatchError: its framework, shape or dtype differs."""
        framework = framework_of(value)
        x = framework.array(value) if framework is self._framework else None
        if x is None or isinstance(x, Sparse) or framework.spec(x) != self._spec:
            problem = "the value must have the framework, shape and dtype of the variable."
            given = f"{describe(value)}, framework {framework.name}, for {self}"
            raise MismatchError.of(problem, given, f"a dense array of {self._framework.name}, {self._spec}")
        return framework.to_device(x, self._devices[k])

    def _put_all(self, how: str, values: Sequence[Any]) -> None:
        """Assign one value to each component. If one value does not fit, no component is changed."""
        with _WRITING:
            components = [self._new_component(how, k, value) for k, value in enumerate(values)]
            self._components[:] = self._framework.variable_values(self._components, components, self._devices)

    def separate(self, value: Any) -> Any:
        """Return a value that does not change while the components are assigned: a copy if it shares their memory.

        A variable becomes a ``PerReplica``. Values that are not arrays of its framework are returned as they are.
        """
        if not self._framework.writes_variables:
            return value
        if isinstance(value, DistributedValues):
            return PerReplica.on(tuple(map(self._separate_array, value)), value.devices)
        return self._separate_array(value)

    def _separate_array(self, x: Any) -> Any:
        """Return an array, or a copy if it shares memory with a component."""
        framework = self._framework
        with suppress(ArgumentError, UnsupportedError):  # the value cannot be a component
            plain = framework.array(x) if framework_of(x) is framework else None
            if plain is None or isinstance(plain, Sparse):
                return x
            if overlaps(framework.memory_range(plain), map(framework.memory_range, self._components)):
                return framework.clone(x)
        return x

    def assign_component(self, how: str, k: int, value: Any) -> None:
        """Assign to the component of replica ``k``. ``how`` is "assign", "assign_add" or "assign_sub"."""
        one = slice(k, k + 1)
        new = [self._new_component(how, k, value)]
        self._components[one] = self._framework.variable_values(self._components[one], new, self._devices[one])


class Component(_Assignable):
    """One component of a variable, which ``extended.update`` passes to its function to read and to assign."""

    def __init__(self, variable: Variable, replica: int) -> None:
        self._variable = variable
        self._replica = replica

    def __repr__(self) -> str:
        return f"Component({self._replica} of {self._variable})"

    @property
    def device(self) -> str:
        """The component's device."""
        return self._variable.devices[self._replica]

    def value(self) -> Array:
        """Return the component's array."""
        return self._variable[self._replica]

    def _assign(self, how: str, value: Any) -> Self:
        self._variable.assign_component(how, self._replica, value)
        return self


def _can_represent(number: complex, dtype: str) -> bool:
    """Return whether a dtype can represent numbers of this kind: an integer dtype cannot represent floats."""
    kind = next(k for k, types in enumerate(_NUMBERS) if isinstance(number, types))
    return any(dtype in dtypes for dtypes in _DTYPES[kind:])


def _computing_on(framework: ReplicaFramework, device: str) -> AbstractContextManager[object]:
    """Return a context in which a framework's operators compute on one device; CuPy requires it on accelerators."""
    return nullcontext() if device.startswith("cpu:") else framework.thread_modes()(device)


def _fill(framework: ReplicaFramework, x: Array, device: str, number: Any) -> Array:
    """Return an array filled with a number, of the shape and dtype of ``x``, and on its device."""
    if isinstance(framework, Immutable):
        return x.at[...].set(number)
    filled = framework.clone(framework.array(x))
    with _computing_on(framework, device):
        filled[...] = number
    return filled
