"""Reduce JAX arrays on one CUDA device: XLA runs a plan as a custom call, eagerly and, if chosen, in traced programs.

Input: a layout on logical devices of one GPU, or of arrays that ``jit`` traces, whose device is not known yet. Traced
arrays are left to JAX's operations unless ``CROSSREDUCE_CUDA_JIT`` is 1: XLA joins its own operations with what makes
their operands and what uses their results, but not a custom call. Output: an executable with one primitive. Where a
program is lowered for one CUDA device, the primitive becomes a custom call (``native/xla_cuda.cpp``), which runs the
plan on XLA's stream. Everywhere else (other platforms, programs for several devices, ``jax.export``), and for
derivatives, it becomes the operations that the loop engine traces.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import pkgutil
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from ....devices import parse
from ....errors import DriverError
from ....frameworks import Array
from ....frameworks.jax.arrays import is_somewhere
from ....ops import Numbers
from ...base import Layout
from ...loop import ENGINE as LOOP
from ..batching import operations
from ..driver import is_on, lacks_kernels, load_kernels, native
from ..encoding import plan_of
from ..streams import Operations

TARGET: Final = "crossreduce_cuda_plan"
_LOG: Final = logging.getLogger("crossreduce")
WIDE: Final = frozenset({"float64", "complex128", "int64", "uint64"})
"""The dtypes whose arrays are made only with ``jax_enable_x64``."""


@cache
def _has_plugin() -> bool:
    """Return whether JAX's plug-in for CUDA is installed. This does not start JAX's backends."""
    spec = importlib.util.find_spec("jax_plugins")
    modules = pkgutil.iter_modules(spec.submodule_search_locations or []) if spec is not None else ()
    return any(module.name.startswith("xla_cuda") for module in modules)


@cache
def reduces_traced() -> bool:
    """Return whether traced arrays are reduced, too: whether the variable ``CROSSREDUCE_CUDA_JIT`` is 1.

    Raises:
      ArgumentError: the variable is neither 0 nor 1.
    """
    return is_on("CROSSREDUCE_CUDA_JIT", "1 to use the CUDA kernels in programs of jit", "0")


@lru_cache(maxsize=1024)
def supports(layout: Layout) -> bool:
    """Return whether all devices are logical devices of one CUDA device, or of ``cpu:0``.

    Traced arrays count as on ``cpu:0``, since their platform is known only when the program is lowered.
    """
    names = {*layout.sources, *layout.destinations, *(name for program in layout.programs for name in program.devices)}
    places = {parse(name).physical for name in names}
    is_here = len(places) == 1 and (parse(*places).kind == "cuda" or (places == {"cpu:0"} and reduces_traced()))
    return is_here and _has_plugin()


def bind(layout: Layout, arrays: Sequence[Sequence[Array]]) -> Sequence[Sequence[Array]] | None:
    """Return the arrays themselves, or ``None`` if the custom call would give other results than the loop engine."""
    dtype = layout.buffers[0].buffer.dtype
    if dtype in WIDE and not jax.config.jax_enable_x64:
        return None  # such arrays were made while x64 was enabled
    flat = [x for row in arrays for x in row]
    traced = [x for x in flat if isinstance(x, jax.core.Tracer)]
    if traced:
        if not reduces_traced() or len(traced) < len(flat) or not jax.sharding.get_abstract_mesh().empty:
            return None
        if any(not _is_plain(jax.typeof(x)) for x in traced):
            return None
    if layout.on_host and (not traced or any(map(is_somewhere, traced))):
        return None  # arrays on the CPU, perhaps in tracers of grad or vmap
    if any(all(x.weak_type for x in row) for row in arrays):
        return None  # the result must be weakly typed, too (mostly scalars)
    return arrays


def _is_plain(kind: Any) -> bool:
    """Return whether a traced array is in a device's memory, and does not belong to a mesh."""
    return kind.memory_space == jax.memory.Space.Device and bool(kind.sharding.mesh.empty)


class JaxExecutable:
    """The operations of a layout on one device. See ``engines.base.Executable``."""

    prepared = None

    def __init__(self, layout: Layout, numbers: Numbers) -> None:
        self._framework, self._sources, self._destinations = layout.framework, layout.sources, layout.destinations
        dtype = jnp.dtype(numbers.result)
        self.kinds = [jax.core.ShapedArray(shape, dtype) for shape in layout.shapes for _ in self._destinations]
        names = {*self._sources, *self._destinations, *(name for each in layout.programs for name in each.devices)}
        places = dict.fromkeys(names, 0)  # one physical device, whose number is known when a program is lowered
        self.operations = operations(layout, numbers, places, readable=((True,),), with_out=False)
        loop = LOOP.compile(layout, numbers, False)

        # The loop is jitted on its own, so that its arrays have no device, and it does not move them.
        def by_loop(*xs: Array) -> list[Array]:
            return [x for row in loop.run(self._rows(xs, len(self._sources)), None) for x in row]

        self.by_loop: Any = jax.jit(by_loop)

    def __repr__(self) -> str:
        """Return a short text, since printed programs contain it."""
        return f"{len(self._sources)} to {len(self._destinations)}"

    @staticmethod
    def _rows(xs: Sequence[Array], count: int) -> list[list[Array]]:  # cuts ``xs`` into rows of ``count`` arrays
        return [list(xs[k : k + count]) for k in range(0, len(xs), count)]

    def run(self, operands: Sequence[Sequence[Array]], out: Sequence[Sequence[Array]] | None) -> list[list[Array]]:
        assert out is None, "JAX arrays are immutable"
        move = self._framework.to_device
        flat = [move(x, name) for row in operands for x, name in zip(row, self._sources, strict=True)]
        return self._rows(REDUCE.bind(*flat, executable=self), len(self._destinations))


# ---- the primitive --------------------------------------------------------------------------------------------------

REDUCE: Final = Primitive("crossreduce_cuda_reduce")
REDUCE.multiple_results = True


def _derivative(primals: Any, tangents: Any, *, executable: JaxExecutable) -> tuple[Any, Any]:
    """Return the results of the primitive, and the derivatives of the loop engine's operations."""
    variable = [k for k, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    by_loop = _with_constants(executable, primals, variable)
    _, derivatives = jax.jvp(by_loop, [primals[k] for k in variable], [tangents[k] for k in variable])
    return REDUCE.bind(*primals, executable=executable), derivatives


def _transpose(cotangents: Any, *xs: Any, executable: JaxExecutable) -> list[Any]:
    """Return the cotangents of the operands that are undefined in ``xs``; ``None`` for the others."""
    linear = [k for k, x in enumerate(xs) if ad.is_undefined_primal(x)]
    kinds = [jax.ShapeDtypeStruct(xs[k].aval.shape, xs[k].aval.dtype) for k in linear]
    transposed = jax.linear_transpose(_with_constants(executable, xs, linear), *kinds)
    results: list[Any] = [None] * len(xs)
    for k, cotangent in zip(linear, transposed([ad.instantiate_zeros(each) for each in cotangents]), strict=True):
        results[k] = cotangent
    return results


def _with_constants(executable: JaxExecutable, xs: Sequence[Any], variable: Sequence[int]) -> Any:
    """Return the loop engine's operations as a function of the operands at ``variable``; the others are constant."""

    def function(*some: Array) -> list[Array]:
        values = dict(zip(variable, some, strict=True))
        results: list[Array] = executable.by_loop(*(values.get(k, x) for k, x in enumerate(xs)))
        return results

    return function


def _batch(xs: Sequence[Array], dims: Sequence[Any], *, executable: JaxExecutable) -> tuple[Any, Any]:
    results = jax.vmap(executable.by_loop, in_axes=tuple(dims))(*xs)
    return results, [0] * len(results)


def _lower_otherwise(ctx: Any, *operands: Any, executable: JaxExecutable) -> Any:
    return mlir.lower_fun(executable.by_loop)(ctx, *operands)


def lower(ctx: Any, *operands: Any, executable: JaxExecutable) -> Any:
    """Lower the primitive for CUDA: to the custom call, or, if that cannot run, to the loop engine's operations."""
    try:
        can_call = _is_alone(ctx.module_context) and _keep(executable.operations, len(operands), ctx)
    except DriverError:
        raise  # it may be a defect of a GPU
    except Exception as error:  # noqa: BLE001 -- another version of JAX may lack any attribute
        _LOG.info("the CUDA engine cannot be used in a program of JAX: %s", error)
        can_call = False
    if not can_call:
        return _lower_otherwise(ctx, *operands, executable=executable)
    (scratch,) = executable.operations.scratch
    temporary = [jax.core.ShapedArray((scratch,), jnp.dtype("uint8"))] if scratch else []
    number = np.int64(number_of(executable.operations))
    with_temporary = ctx.replace(avals_out=[*ctx.avals_out, *temporary])
    return jax.ffi.ffi_lowering(TARGET)(with_temporary, *operands, number=number)[: len(ctx.avals_out)]


def _is_alone(context: Any) -> bool:
    """Return whether a program is for one device, and is not exported."""
    # The attribute exists in programs of jit, but not in those of shard_map.
    alone = getattr(context.axis_context, "num_devices", 0) == 1
    return alone and not context.lowering_parameters.for_export


def number_of(made: Operations) -> int:
    """Return a number that identifies operations: a hash of them, so that it is the same in all processes."""
    text = repr((made.streams, made.scratch, made.operations))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1  # 63 bits: an int64 is signed


def _keep(made: Operations, operands: int, ctx: Any) -> bool:
    """Register a plan for the custom call on each CUDA device of this process, and return whether that succeeded.

    Each device needs a plan, because a program is lowered once for all devices on which it may run.
    """
    if not _register():
        return False
    results = len(ctx.avals_out) + bool(made.scratch[0])
    for device in jax.local_devices(backend=ctx.module_context.platforms[0]):
        number = device.local_hardware_id
        if lacks_kernels(number):
            return False
        load_kernels(number)
        native().keep(number_of(made), plan_of(made._replace(devices=(number,))), operands, results)
    return True


@cache
def _register() -> bool:
    """Register the custom call with JAX, once, and return whether JAX accepts it."""
    try:
        jax.ffi.register_ffi_target(TARGET, native().xla_handler(), platform="CUDA")
    except Exception as error:  # noqa: BLE001 -- another version of XLA's interface may raise any class
        _LOG.info("JAX does not accept the custom call of the CUDA engine (%s)", error)
        return False
    return True


REDUCE.def_impl(partial(xla.apply_primitive, REDUCE))  # a jitted program, cached by executable and kinds of arrays
REDUCE.def_abstract_eval(lambda *_, executable: executable.kinds)
ad.primitive_jvps[REDUCE] = _derivative
ad.primitive_transposes[REDUCE] = _transpose
batching.primitive_batchers[REDUCE] = _batch
mlir.register_lowering(REDUCE, _lower_otherwise)
mlir.register_lowering(REDUCE, lower, platform="cuda")
