"""All-reduce among CPU devices: a custom call of XLA, which runs the compiled kernels, in one process or in several.

Input: arrays of one dtype, ``Numbers`` and ``MeshAxes``, inside a function that JAX traces. Output: the reduced arrays.
The devices meet in the custom call (``native/xla/xla_call.cpp``), and one run of a kernel reduces the arrays of all
of them, in the order of their positions. Each result has the memory of its operand, unless XLA still needs the operand.
If devices of other processes take part, it is another custom call: see ``process_calls``.

The platform is known only when a program is lowered. So a caller also passes a function that reduces the arrays by
collectives of XLA. That function is lowered on other platforms, if the mesh is not known, and for ``jax.export``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ... import kernels
from ...errors import ArgumentError
from ...frameworks import Array
from ...frameworks.jax.arrays import finish
from ...kernels import FusedProgram, Segment
from ...ops import KERNEL_OPS, Numbers
from . import process_calls
from .axes import MeshAxes
from .in_process_limits import limit_s

_MISSING: str | None = None  # what this version of JAX lacks
try:
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import func, stablehlo
except ImportError as error:
    _MISSING = str(error)

_LOG: Final = logging.getLogger("crossreduce")
_TARGET: Final = "crossreduce_all_reduce"

Reduce = Callable[[Sequence[Array]], Sequence[Array]]
"""Reduces arrays by collectives of XLA. It must be hashable, since it is a parameter of a primitive."""


def supports(numbers: Numbers, axes: MeshAxes) -> bool:
    """Return whether ``reduce`` can reduce arrays over axes here.

    The axes must belong to a mesh, and all axes of the mesh must be manual, since XLA itself partitions other axes.
    """
    kinds = jax.sharding.get_abstract_mesh().axis_types or ()
    manual = all(kind is jax.sharding.AxisType.Manual for kind in kinds)
    return axes.devices > 1 and not axes.mapped and manual and _has_kernel(numbers) and _register()


def reduce(xs: Sequence[Array], numbers: Numbers, axes: MeshAxes, otherwise: Reduce) -> list[Array]:
    """Return the reduced arrays, which are the same on every device.

    Sums and means are differentiable, like ``lax.psum``; minima, maxima and products are not.

    Args:
      xs: arrays of one dtype and any shapes; if ``axes.checked``, they vary over the axes.
      numbers: how the arrays are reduced. ``supports`` must have accepted it.
      axes: the axes whose positions are combined, in order.
      otherwise: reduces the arrays where the program is not lowered for CPU devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    others = tuple(name for name in mesh.axis_names if name in mesh.manual_axes and name not in axes.names)
    results: list[Array] = _ALL_REDUCE.bind(*xs, numbers=numbers, axes=axes, others=others, otherwise=otherwise)
    return results


@lru_cache(maxsize=256)
def _has_kernel(numbers: Numbers) -> bool:
    """Return whether the compiled kernels can reduce arrays of these dtypes by this op, by compiling a small one."""
    if kernels.instruction_set() == "numpy":
        return False
    dtypes = numbers.dtype, numbers.accumulator, numbers.result
    program = FusedProgram(1, ((0, 0, 1),), (~0, ~0))  # combines two sources; the value becomes two results
    try:
        op = KERNEL_OPS[numbers.op, numbers.exact]
        kernels.compile_kernel(op, dtypes, numbers.divisor, 2, 2, (1,), (program,), (Segment(0, 0, 1, 0),))
    except ValueError:
        return False
    return True


def is_compiled() -> bool:
    """Return whether the compiled kernels exist and JAX accepts their custom calls."""
    return kernels.instruction_set() != "numpy" and _register()


@lru_cache(maxsize=1)
def _register() -> bool:
    """Register the custom call with JAX, once, and return whether JAX accepts it."""
    text = "JAX does not accept the custom call of the kernels (%s); XLA's own all-reduce is used instead"
    if _MISSING is not None:
        _LOG.info(text, _MISSING)
        return False
    try:
        sizes = kernels.STREAMING_BYTES, kernels.THREADED_BYTES
        handlers = kernels.native().xla_handlers(kernels.instruction_set(), kernels.threads(), *sizes, limit_s())
        jax.ffi.register_ffi_target(_TARGET, handlers, platform="cpu")
    except ArgumentError:
        raise
    except Exception as error:  # noqa: BLE001 -- another version of XLA's interface may raise any class
        _LOG.info(text, error)
        return False
    return True


# ---- the primitive --------------------------------------------------------------------------------------------------

_ALL_REDUCE: Final = Primitive("crossreduce_in_process_all_reduce")
_ALL_REDUCE.multiple_results = True


def _abstract_eval(*xs: Any, numbers: Numbers, axes: MeshAxes, **_: Any) -> list[Any]:
    """Return the types of the results: those of ``psum``, which do not vary over the axes, with another dtype."""
    kinds = jax.make_jaxpr(lambda *values: lax.psum(values, axes.names))(*xs).out_avals if axes.checked else xs
    return [kind.update(dtype=jax.numpy.dtype(numbers.result), weak_type=False) for kind in kinds]


def _transpose(cotangents: Sequence[Any], *_: Any, numbers: Numbers, axes: MeshAxes, **params: Any) -> list[Any]:
    """Return the cotangents of the arrays, as for ``psum``."""
    nonzero = [k for k, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    values = [cotangents[k] for k in nonzero]
    if axes.checked:  # then all devices have the same cotangents, and need no reduction
        values = [axes.vary(finish(numbers, value)) for value in values]
    else:
        values = _ALL_REDUCE.bind(*values, numbers=numbers, axes=axes, **params)
    results = list(cotangents)
    for k, value in zip(nonzero, values, strict=True):
        results[k] = value
    return results


def _batch(args: Sequence[Array], dims: Sequence[Any], **params: Any) -> tuple[list[Array], Sequence[Any]]:
    return _ALL_REDUCE.bind(*args, **params), dims


def _lower_to_collectives(ctx: Any, *operands: Any, otherwise: Reduce, **_: Any) -> Any:
    return mlir.lower_fun(lambda *xs: otherwise(xs))(ctx, *operands)


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower to a custom call, whose operands are the arrays and this device's position."""
    numbers, axes, others = params["numbers"], params["axes"], params["others"]
    processes = process_calls.processes_of(ctx, axes, others) if jax.process_count() > 1 else ()
    if processes is None or ctx.module_context.lowering_parameters.for_export:
        return _lower_to_collectives(ctx, *operands, **params)
    # Without reshapes, as of pmap, XLA recognizes that a donated argument and a result have the same memory.
    unshaped = list(map(_value_before_reshapes, operands))
    same = numbers.dtype == numbers.result
    aliases = {k: k for k, operand in enumerate(unshaped) if same and not _is_kept(ctx, operand)}
    shapes = [tuple(operand.type.shape) for operand in unshaped]
    if process_calls.spans_processes(processes, axes.devices):
        attributes = process_calls.attributes(ctx, "all_reduce", numbers, shapes, axes, processes)
        results = custom_call(ctx, process_calls.TARGET, unshaped, shapes, axes, others, aliases, attributes)
    else:
        texts = {"op": KERNEL_OPS[numbers.op, numbers.exact], "accumulator": numbers.accumulator, "axes": str(axes)}
        attributes = {name: ir.StringAttr.get(text) for name, text in texts.items()}
        attributes["numbers"] = ir.DenseI64ArrayAttr.get([axes.devices, numbers.divisor])
        results = custom_call(ctx, _TARGET, unshaped, shapes, axes, others, aliases, attributes)
    return [
        stablehlo.reshape(ir.RankedTensorType.get(aval.shape, result.type.element_type), result)
        for aval, result in zip(ctx.avals_out, results, strict=True)
    ]


def custom_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    axes: MeshAxes,
    others: Sequence[Any],
    aliases: dict[int, int],
    attributes: dict[str, Any],
) -> Any:
    """Return the results of a custom call, whose operands are arrays and the position of the device.

    ``shapes``: of the results. ``others``: the manual axes that are not reduced. ``aliases``: which result has the
    memory of which operand.
    """
    position_type = jax.core.ShapedArray((), jax.numpy.dtype("int32"))
    # The position of this device, in an order in which the devices that are reduced together follow one another.
    position = mlir.lower_fun(lambda: lax.axis_index((*others, *axes.names)), multiple_results=False)(
        ctx.replace(primitive=None, avals_in=[], avals_out=[position_type])
    )
    lowering = jax.ffi.ffi_lowering(
        target, operand_output_aliases=aliases, has_side_effect=True, backend_config=attributes
    )
    avals_in = [aval.update(shape=tuple(x.type.shape)) for aval, x in zip(ctx.avals_in, operands, strict=True)]
    avals_out = [aval.update(shape=shape) for aval, shape in zip(ctx.avals_out, shapes, strict=True)]
    return lowering(ctx.replace(avals_in=[*avals_in, position_type], avals_out=avals_out), *operands, *position)


def _value_before_reshapes(value: Any) -> Any:
    """Return the value from which reshapes have made this one, or the value itself if no reshape has."""
    while not isinstance(value.owner, ir.Block) and value.owner.name == "stablehlo.reshape":
        value = value.owner.operands[0]
    return value


def _is_kept(ctx: Any, value: Any) -> bool:
    """Return whether a value is an argument of the whole program that is not donated, so no result may use its memory.

    Otherwise XLA would copy the argument first, which takes longer than the reduction. JAX lowers the body of a
    ``shard_map`` before the call to it, so the body's arguments cannot be traced to those of the program: an argument
    counts as donated if a donated one has its type. XLA also copies a value that a later operation reads. This is not
    detected, since that operation is not lowered yet.
    """
    if not isinstance(value.owner, ir.Block):
        return False
    parent = value.owner.owner.operation
    if parent.name == "sdy.manual_computation":
        return _is_kept(ctx, _value_before_reshapes(parent.operands[ir.BlockArgument(value).arg_number]))
    return parent.name == "func.func" and value.type not in _donated_types(ctx.module_context.module)


def _donated_types(module: Any) -> list[Any]:
    """Return the types of the arguments of a program that are donated."""
    for function in module.body.operations:
        if isinstance(function, func.FuncOp) and function.name.value == "main":
            names = [{attribute.name for attribute in ir.DictAttr(attributes)} for attributes in function.arg_attrs]
            marks = {"jax.buffer_donor", "tf.aliasing_output"}
            return [kind for kind, marked in zip(function.type.inputs, names, strict=True) if marks & marked]
    return []


_ALL_REDUCE.def_abstract_eval(_abstract_eval)
ad.deflinear2(_ALL_REDUCE, _transpose)
batching.primitive_batchers[_ALL_REDUCE] = _batch
mlir.register_lowering(_ALL_REDUCE, _lower_to_collectives)
mlir.register_lowering(_ALL_REDUCE, _lower, platform="cpu", cacheable=False)
