"""All-gather, reduce-scatter and all-to-all among CPU devices of several processes: a custom call of XLA.

Input: an array inside a function that JAX traces, ``Numbers`` and ``MeshAxes``. Output: this device's result. The first
axis of the array of a reduce-scatter or all-to-all, and of the result of an all-gather or all-to-all, has one row per
position. As in ``in_process``, a caller passes a function that does the same by collectives of XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...frameworks import Array
from ...frameworks.jax.arrays import finish
from ...ops import Numbers, copy_numbers
from . import in_process, process_calls
from .axes import MeshAxes

Otherwise = Callable[[str, Array, Numbers, MeshAxes], Array]
"""Computes a collective by collectives of XLA: its arguments are those of ``run``. It must be hashable."""


def run(kind: str, x: Array, numbers: Numbers, axes: MeshAxes, otherwise: Otherwise) -> Array:
    """Return the result of a collective. Except for minima, maxima and products, it is differentiable.

    Args:
      kind: "all_gather", "reduce_scatter" or "all_to_all".
      x: the array; if ``axes.checked``, it varies over the axes.
      numbers: how a reduce-scatter computes; ``copy_numbers`` for the others.
      axes: the axes whose positions exchange data, in order.
      otherwise: used where the program is not lowered for CPU devices of several processes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = mesh.axis_types or ()
    if axes.mapped or any(one is not jax.sharding.AxisType.Manual for one in kinds) or not in_process.is_compiled():
        return otherwise(kind, x, numbers, axes)
    others = tuple(name for name in mesh.axis_names if name in mesh.manual_axes and name not in axes.names)
    result: Array = _COLLECTIVE.bind(x, kind=kind, numbers=numbers, axes=axes, others=others, otherwise=otherwise)
    return result


_COLLECTIVE: Final = Primitive("crossreduce_collective")


def _abstract_eval(x: Any, *, kind: str, numbers: Numbers, axes: MeshAxes, **_: Any) -> Any:
    shape = {"all_gather": (axes.devices, *x.shape), "reduce_scatter": x.shape[1:], "all_to_all": x.shape}[kind]
    return x.update(shape=shape, dtype=jnp.dtype(numbers.result or x.dtype), weak_type=False)


def _transpose(cotangent: Any, x: Any, *, kind: str, numbers: Numbers, **params: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    if kind == "reduce_scatter":
        dtype = numbers.dtype
        back = finish(numbers, cotangent.astype(numbers.accumulator)).astype(dtype)
        return [_COLLECTIVE.bind(back, kind="all_gather", numbers=copy_numbers(dtype), **params)]
    if kind == "all_gather":
        sums = numbers._replace(accumulator="float32" if x.aval.dtype.itemsize == 2 else numbers.dtype)
        return [_COLLECTIVE.bind(cotangent, kind="reduce_scatter", numbers=sums, **params)]
    return [_COLLECTIVE.bind(cotangent, kind=kind, numbers=numbers, **params)]


def _batch(args: Sequence[Array], dims: Sequence[int], *, kind: str, **params: Any) -> tuple[Array, int]:
    if kind == "all_gather":
        return _COLLECTIVE.bind(args[0], kind=kind, **params), dims[0] + 1
    rows = jnp.moveaxis(args[0], dims[0], 1)  # the first axis remains that of the positions
    return _COLLECTIVE.bind(rows, kind=kind, **params), int(kind == "all_to_all")


def _lower_to_collectives(ctx: Any, x: Any, *, kind: str, numbers: Numbers, axes: MeshAxes, **params: Any) -> Any:
    otherwise = params["otherwise"]
    return mlir.lower_fun(lambda value: otherwise(kind, value, numbers, axes), multiple_results=False)(ctx, x)


def _lower(ctx: Any, x: Any, **params: Any) -> Any:
    numbers, axes, others = params["numbers"], params["axes"], params["others"]
    processes = process_calls.processes_of(ctx, axes, others) if jax.process_count() > 1 else ()
    exports = ctx.module_context.lowering_parameters.for_export
    if exports or not processes or not process_calls.spans_processes(processes, axes.devices):
        return _lower_to_collectives(ctx, x, **params)
    shapes = [tuple(x.type.shape)]
    attributes = process_calls.attributes(ctx, params["kind"], numbers, shapes, axes, processes)
    results = [tuple(aval.shape) for aval in ctx.avals_out]
    return in_process.custom_call(ctx, process_calls.TARGET, [x], results, axes, others, {}, attributes)


_COLLECTIVE.def_abstract_eval(_abstract_eval)
ad.deflinear2(_COLLECTIVE, _transpose)
batching.primitive_batchers[_COLLECTIVE] = _batch
mlir.register_lowering(_COLLECTIVE, _lower_to_collectives)
mlir.register_lowering(_COLLECTIVE, _lower, platform="cpu", cacheable=False)
