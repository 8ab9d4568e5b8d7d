"""``all_reduce`` inside JAX programs: under ``shard_map``, ``pmap`` and ``vmap``, in ``jit``, through ``grad``.

Input: a pytree of this device's arrays, and the name of the axis to reduce over. Output: the same tree, reduced, on
every device. It uses the compiled kernels (on CPU devices of one process), XLA's own collective, or a schedule that
``engines.jax`` runs. Outside such programs, ``crossreduce.all_reduce`` reduces lists of per-device arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, permutations
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..engines.jax import in_process, spmd
from ..engines.jax.axes import MeshAxes, read_axes, unreduced_axes, varying_axes
from ..engines.jax.permutations import compile_permutations
from ..errors import ArgumentError, ReductionError, UnsupportedError, shown
from ..frameworks import Array
from ..frameworks.jax.arrays import FRAMEWORK, finish
from ..lowering import Program, lower
from ..ops import FLOATS, Numbers, ReduceOp
from ..options import CommunicationOptions, algorithm_name, count
from ..packing import itemsize
from ..planning import Request, hierarchical_copy, schedule_for
from ..reduction.pipeline import log_once
from ..reduction.validation import read_op
from ..topology import Topology, TopologyLike, topology_of
from ..values import IndexedSlices, host_devices
from .leaves import dense_leaf, is_sparse, warn_if_invariant

_LOG: Final = logging.getLogger("crossreduce")

SMALL_BYTES: Final = 1 << 16
"""Leaves below this size are joined before XLA's collective runs. On 8 CPU devices one more collective costs about
0.2 ms, as much as copying 64 KiB to a joined buffer and back on each device. Measured with ResNet-50's gradients: 74 ms
with 64 KiB, 77 with 16 KiB, 78 with 256 KiB, 88 with 1 MiB, and 173 if no leaves are joined."""

MAX_JOINED: Final = 256
"""The maximum number of small leaves that are joined, since XLA's compile time grows faster than this number. 2,000
leaves compile in 53 s if all are joined, in 13 s in groups of 256, in 9 s if none are, and run in 65, 71 and 379 ms."""


def all_reduce(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    op: ReduceOp | str = "sum",
    topology: TopologyLike | None = None,
    algorithm: str = "auto",
    *,
    num_packs: int = 1,
    exact: bool = False,
    weight: Any = None,
) -> Any:
    """Reduce a pytree over an axis of the mesh, leaf by leaf. Every device receives the result.

    Call it in place of ``lax.psum``: under ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with a named axis. Small
    leaves of one dtype are joined and reduced by one collective.

    Args:
      x: a pytree of arrays and numbers. The slices of ``crossreduce.IndexedSlices`` and ``BCOO`` are concatenated
        in the order of the devices.
      axis_name: the name of an axis, or several names. Several axes are reduced as one axis, in row-major order.
      op: a ``ReduceOp`` or its name.
      topology: the links between the devices: a ``Topology``, a machine's name or a file's path. Its devices are the
        positions along the axis, in order. ``None`` means that all links are equal.
      algorithm: a planner's name. "auto" and "nccl" select the algorithm with the shortest simulated time on the
        topology. Without a topology, or if equal links join all pairs of devices, they select the compiled kernels for
        CPU devices, and XLA's own collective for other devices ("halving_doubling" for products).
        Without a topology, "hierarchical_copy" over several axes reduces over the last one first.
      num_packs: for "one_device" and "hierarchical_copy", the number of trees that share the buffer, each with another
        root; at most one per device is used.
      exact: whether sums and means of floats are exact, rounded once, to nearest even (see
        ``crossreduce.CommunicationOptions``). Only the compiled kernels can do this, on CPU devices of one process.
        They then ignore ``algorithm`` and ``topology``.
      weight: for the op "mean", this device's weight, a number or an array without axes, such as its number of samples:
        the result is sum(w x) / sum(w), and is differentiable also by the weights. The leaves of a device of weight 0
        are not used, even if they are NaN. Traced weights cannot be checked: they must not be negative, nor all be 0.
    Returns:
      The same tree. Half types are accumulated in float32, and the mean of integers is a float. Numbers become arrays.
      With ``check_vma=True`` the results count as replicated (``out_specs=P()``), like those of ``lax.psum``.
    Raises:
      AxisError: an axis does not exist (also a ``NameError``).
      ArgumentError: an unknown op or algorithm, the topology's size differs from that of the axis, or ``weight`` is not
        a finite number of 0 or more.
      UnsupportedError: a leaf is not an array, or the op is not defined for it: for its dtype, or because it is
        unreduced (on explicit meshes). The message has its path. With ``exact``, also for a product of floats, and if
        the kernels cannot run: over an axis of ``vmap``, on accelerators, in exported programs.
      PlanError: the algorithm cannot run on the topology.

    Example, with ``P = jax.sharding.PartitionSpec``::

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
        def mean_of_squares(x):
            return crossreduce.jax.all_reduce({"loss": (x * x).mean()}, "data", "mean")
    """
    with jax.named_scope("crossreduce:all_reduce"):  # profilers show it with the operations of the compiled program
        if weight is not None:
            from .weighted_mean import weighted_mean

            call = partial(_all_reduce, topology=topology, algorithm=algorithm, num_packs=num_packs, exact=False)
            return weighted_mean(call, x, axis_name, read_op(op), weight, exact)
        return _all_reduce(x, axis_name, op, topology, algorithm, num_packs, exact)


def _all_reduce(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    op: ReduceOp | str,
    topology: TopologyLike | None,
    algorithm: str,
    num_packs: int,
    exact: bool,
) -> Any:
    op = read_op(op)
    exact = CommunicationOptions(exact=exact).exact  # raises if it is not a bool
    packs = count("num_packs", num_packs, "1 is one tree") or 1
    spec = _read_spec(axis_name, topology, algorithm_name(algorithm), packs)
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(x, is_leaf=is_sparse)
    leaves: list[Any] = []
    for path, leaf in paths_and_leaves:
        warn_if_invariant(leaf, spec.axes, jax.tree_util.keystr(path))
        try:
            leaves.append(_gather_leaf(leaf, op, spec.axes) if is_sparse(leaf) else dense_leaf(leaf, spec.axes, op))
            if exact and not is_sparse(leaf):
                _require_exact_sum(leaves[-1], op, spec.axes)
            if not is_sparse(leaf) and unreduced_axes(leaves[-1]):
                leaves[-1] = _ReducedLeaf(_sum_of_parts(leaves[-1], op, spec.axes))
        except ReductionError as error:
            error.prefix("leaf x" + jax.tree_util.keystr(path))
            raise
    groups: dict[tuple[str, frozenset[Hashable]], list[int]] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, _ReducedLeaf):
            leaves[number] = leaf.array
        elif not is_sparse(leaf):
            # Leaves that vary over different axes are not joined: the joined array would vary over all of them.
            groups.setdefault((leaf.dtype.name, varying_axes(leaf)), []).append(number)
    for (dtype, _), members in groups.items():
        numbers = FRAMEWORK.numbers(op, dtype, spec.axes.devices)
        if exact and spec.axes.devices > 1:
            numbers = numbers.exactly()
        for number, leaf in zip(members, _reduce_leaves([leaves[k] for k in members], numbers, spec), strict=True):
            leaves[number] = leaf
    return jax.tree_util.tree_unflatten(structure, leaves)


class _ReduceSpec(NamedTuple):
    """How a call reduces: over which axes and by which algorithm.

    The devices of ``topology`` are the positions along the axes, in order. ``None`` means that all links are equal.
    """

    axes: MeshAxes
    algorithm: str
    topology: Topology | None
    packs: int


def _read_spec(axis_name: Any, topology: Any, algorithm: str, packs: int) -> _ReduceSpec:
    """Return the spec of a call, after checking its axes and the size of its topology."""
    axes = read_axes(axis_name)
    topology = None if topology is None else topology_of(topology)
    if topology is not None and len(topology.devices) != axes.devices:
        problem = "the topology must have one device for each position along the axis."
        given = f"{len(topology.devices)} devices; {axes.devices} positions along {axes}"
        raise ArgumentError.of(problem, given, "topology.subset(...), or other axes")
    return _ReduceSpec(axes, "auto" if algorithm == "nccl" else algorithm, topology, min(packs, axes.devices))


# ---- leaves -------------------------------------------------------------------------------------------------------


def _require_exact_sum(x: Array, op: ReduceOp, axes: MeshAxes) -> None:
    """Raise an ``UnsupportedError`` if the sum or mean of an array over the axes cannot be exact."""
    numbers = FRAMEWORK.numbers(op, x.dtype.name, axes.devices).exactly()
    if numbers.exact and axes.devices > 1 and (unreduced_axes(x) or not in_process.supports(numbers, axes)):
        raise _no_exact_sum(f"{jax.typeof(x)} over {axes}")


def _no_exact_sum(given: str) -> UnsupportedError:
    """Return the error for an exact sum where the kernels cannot run."""
    problem = "exact sums inside JAX programs need the compiled kernels, on CPU devices, without vmap over the axis."
    return UnsupportedError.of(problem, f"{given}, exact=True", "crossreduce.all_reduce outside of the program")


class _ReducedLeaf(NamedTuple):
    """Marks a leaf that is reduced already, so that it is not grouped with others."""

    array: Array


def _sum_of_parts(x: Array, op: ReduceOp, axes: MeshAxes) -> Array:
    """Reduce an array whose type is unreduced: each device has one term of a sum. Only XLA's collective accepts it."""
    parts = unreduced_axes(x)
    if op is not ReduceOp.SUM and (op is not ReduceOp.MEAN or not parts <= set(axes.names)):
        over = ", ".join(sorted(map(repr, parts)))
        problem = f"the {op.value} over {axes} needs complete arrays, but each device has only its part of a sum."
        given = f"{jax.typeof(x)}, unreduced over {over}"
        raise UnsupportedError.of(problem, given, f"add the parts: psum over {over}")
    numbers = FRAMEWORK.numbers(op, x.dtype.name, axes.devices)
    total = x.astype(numbers.accumulator)
    for names in ([a for a in axes.names if a in parts], [a for a in axes.names if a not in parts]):
        total = lax.psum(total, tuple(names)) if names else total
    return finish(numbers, total)


def _gather_leaf(leaf: Any, op: ReduceOp, axes: MeshAxes) -> Any:
    """Return a sparse leaf with the slices of all devices, which are divided if the op is a mean."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        problem = f"the {op.value} of sparse values is not defined."
        raise UnsupportedError.of(problem, shown(leaf), "sum or mean, or dense arrays")
    sparse = FRAMEWORK.array(leaf)
    numbers = FRAMEWORK.numbers(op, sparse.values.dtype.name, axes.devices)
    values, indices = (_gather(part, axes) for part in (sparse.values, sparse.indices))
    return FRAMEWORK.rebuild_sparse(sparse._replace(values=finish(numbers, values), indices=indices))


def _gather(x: Array, axes: MeshAxes) -> Array:
    """Return the arrays of all devices, concatenated in the order of the devices."""
    if not axes.checked:
        return lax.all_gather(x, axes.names, tiled=True)
    # shard_map treats the result of a gather as varying, and that of a sum as replicated. So each device puts its array
    # into a buffer of zeros, and the buffers are summed.
    x = axes.vary(x)
    zeros = axes.vary(jnp.zeros((axes.devices, *x.shape), x.dtype))
    placed = lax.dynamic_update_index_in_dim(zeros, x, lax.axis_index(axes.names), 0)
    return lax.psum(placed, axes.names).reshape(axes.devices * x.shape[0], *x.shape[1:])


# ---- arrays of one dtype ------------------------------------------------------------------------------------------


def _reduce_leaves(xs: list[Array], numbers: Numbers, spec: _ReduceSpec) -> Sequence[Array]:
    """Reduce arrays of one dtype. The compiled kernels do it if they can, unless the caller chose an algorithm."""
    if not numbers.exact and (not _is_free(spec) or not in_process.supports(numbers, spec.axes)):
        return _reduce_by_collectives(xs, numbers, spec)
    _log_plan(spec.axes, "the compiled kernels on CPU devices, elsewhere XLA's own all-reduce")
    is_linear = numbers.op in (ReduceOp.SUM, ReduceOp.MEAN)
    if is_linear or not jnp.issubdtype(xs[0].dtype, jnp.inexact):
        return _reduce_in_process(xs, numbers, spec)
    results: Sequence[Array] = _differentiable_reduce_in_process(xs, numbers, spec)
    return results


@dataclass(frozen=True)
class _Collectives:
    """A hashable function that reduces arrays by collectives of XLA, for platforms where the kernels cannot run."""

    numbers: Numbers
    spec: _ReduceSpec

    def __call__(self, xs: Sequence[Array]) -> Sequence[Array]:
        if self.numbers.exact:
            raise _no_exact_sum(f"{jax.typeof(xs[0])} over {self.spec.axes} on {jax.default_backend()}")
        return _reduce_by_collectives(list(xs), self.numbers, self.spec)


def _reduce_in_process(xs: list[Array], numbers: Numbers, spec: _ReduceSpec) -> list[Array]:
    return in_process.reduce(xs, numbers, spec.axes, _Collectives(numbers, spec))


_differentiable_reduce_in_process = jax.custom_jvp(_reduce_in_process, nondiff_argnums=(1, 2))


@_differentiable_reduce_in_process.defjvp  # type: ignore[untyped-decorator]
def _reduce_in_process_jvp(numbers: Numbers, spec: _ReduceSpec, primals: Any, tangents: Any) -> Any:
    """Return the results and their tangents."""
    (xs,), (ts,) = primals, tangents
    ys = _differentiable_reduce_in_process(xs, numbers, spec)
    wide = [[x.astype(numbers.accumulator) for x in group] for group in (xs, ys, ts)]
    results = [_selection_tangent(numbers.op, None, spec.axes, x, y, t) for x, y, t in zip(*wide, strict=True)]
    return ys, [t.astype(numbers.result) for t in results]


def _reduce_by_collectives(xs: list[Array], numbers: Numbers, spec: _ReduceSpec) -> list[Array]:
    """Reduce arrays of one dtype. All of them are joined for a program, only small ones for XLA's own collective."""
    program = _program(spec, numbers.op, sum(x.size for x in xs) * itemsize(numbers.accumulator))
    # Along mesh axes that are not Manual, XLA itself partitions arrays, and to join them it would gather them first.
    kinds = jax.sharding.get_abstract_mesh().axis_types or ()
    small = SMALL_BYTES if all(kind is jax.sharding.AxisType.Manual for kind in kinds) else 0
    joined = [k for k, x in enumerate(xs) if program is not None or x.nbytes < small]
    group_size = len(xs) if program is not None else MAX_JOINED
    groups = [joined[k : k + group_size] for k in range(0, len(joined), group_size)]
    groups += [[k] for k in sorted({*range(len(xs))} - {*joined})]
    results = list(xs)
    for group in groups:
        flat = xs[group[0]] if len(group) == 1 else jnp.concatenate([xs[k].reshape(-1) for k in group])
        total = finish(numbers, _total(flat.astype(numbers.accumulator), numbers.op, program, spec.axes))
        start = 0
        for k in group:
            stop = start + xs[k].size
            results[k] = total if len(group) == 1 else total[start:stop].reshape(xs[k].shape)
            start = stop
    return results


# ---- planning -----------------------------------------------------------------------------------------------------


def _is_free(spec: _ReduceSpec) -> bool:
    """Return whether the algorithm is "auto" on equal links, where no schedule is faster than XLA's collective."""
    return spec.algorithm == "auto" and (spec.topology is None or _is_uniform(spec.topology))


def _program(spec: _ReduceSpec, op: ReduceOp, nbytes: int) -> Program | None:
    """Return the program for a buffer, or ``None`` if XLA's own collective reduces it."""
    axes, algorithm, topology, packs = spec
    names = host_devices(axes.devices)
    if _is_free(spec):
        if op is not ReduceOp.PRODUCT:
            _log_plan(axes, "XLA's own all-reduce")
            return None
        algorithm = "halving_doubling"  # jax.lax has no all-reduce of products
    if axes.mapped and len(axes.names) > 1:
        # If one of several axes is vmap's, lax.ppermute silently ignores that axis (JAX 0.10.2).
        problem = "no schedule can run over several axes if one belongs to vmap, but XLA's own all-reduce can."
        given = f"{axes}, op {op.value}, algorithm {spec.algorithm}"
        remedy = 'one axis after the other, or algorithm="auto" without topology (not for products)'
        raise UnsupportedError.of(problem, given, remedy)
    if topology is not None:
        names = topology.devices
        schedule = schedule_for(Request("all_reduce", names, names, algorithm, topology, nbytes, packs))
    elif algorithm == "hierarchical_copy" and len(axes.names) > 1:
        groups = [names[k : k + axes.sizes[-1]] for k in range(0, len(names), axes.sizes[-1])]
        schedule = hierarchical_copy(names, packs=packs, groups=groups)
    else:
        schedule = schedule_for(Request("all_reduce", names, names, algorithm, packs=packs))
    program = lower(schedule)
    number = compile_permutations(program).permutation_count
    _log_plan(axes, f"{schedule.head}, {number} permutations; devices {', '.join(schedule.devices)}")
    return program


def _log_plan(axes: MeshAxes, text: str) -> None:
    if _LOG.isEnabledFor(logging.INFO):
        log_once(f"new plan: {text}; over {axes} of {axes.devices}")


@lru_cache(maxsize=256)
def _is_uniform(topology: Topology) -> bool:
    """Return whether the routes between all pairs of devices are equal: a direct link, or two through one switch.

    >>> _is_uniform(Topology.full_mesh(4)), _is_uniform(Topology.star(4)), _is_uniform(Topology.ring(4))
    (True, True, False)
    """
    routes = set()
    for ends in permutations(topology.devices, 2):
        links = [topology.by_ends[pair] for pair in pairwise(topology.route(*ends) or ())]
        routes.add(tuple((link.bandwidth, link.latency_s) for link in links))
    return len(routes) <= 1 and all(1 <= len(route) <= 2 for route in routes)


# ---- reducing one array -------------------------------------------------------------------------------------------


def _total(x: Array, op: ReduceOp, program: Program | None, axes: MeshAxes) -> Array:
    """Return an array reduced over the axes by an op. A mean is only summed."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _sum(x, program, axes)
    select = _differentiable_selection if jnp.issubdtype(x.dtype, jnp.inexact) else _selection
    return select(x, op, program, axes)


def _sum(x: Array, program: Program | None, axes: MeshAxes) -> Array:
    return lax.psum(x, axes.names) if program is None else spmd.run(program, x, ReduceOp.SUM, axes)


def _selection(x: Array, op: ReduceOp, program: Program | None, axes: MeshAxes) -> Array:
    """Return the minimum, maximum or product of an array over the axes."""
    if program is not None:
        return spmd.run(program, x, op, axes)
    function = lax.pmax if op is ReduceOp.MAX else lax.pmin
    if x.dtype.name not in FLOATS:
        return function(x, axes.names)
    # XLA's CPU collectives lose NaN (jaxlib 0.10.2). So map the floats to integers of the same order, and NaN to the
    # integer that is always selected. Half types are compared as float32, since NCCL has no integers of 16 bits.
    wide = x.astype(jnp.float32) if x.dtype.itemsize == 2 else x
    int_type = jnp.dtype(f"int{wide.dtype.itemsize * 8}")
    limits = jnp.iinfo(int_type)

    def flip(bits: Array) -> Array:  # reverses the order of negative floats, whose bits are sign and magnitude
        return jnp.where(bits < 0, bits ^ limits.max, bits)

    keys = flip(lax.bitcast_convert_type(wide, int_type))
    keys = jnp.where(jnp.isnan(wide), limits.max if op is ReduceOp.MAX else limits.min, keys)
    return lax.bitcast_convert_type(flip(function(keys, axes.names)), wide.dtype).astype(x.dtype)


_differentiable_selection = jax.custom_jvp(_selection, nondiff_argnums=(1, 2, 3))


@_differentiable_selection.defjvp  # type: ignore[untyped-decorator]
def _selection_jvp(op: ReduceOp, program: Any, axes: MeshAxes, primals: tuple[Array], tangents: tuple[Array]) -> Any:
    """Return the result and its tangent. Devices that have the same extreme value share its gradient, as in jnp.max."""
    (x,), (t,) = primals, tangents
    y = _differentiable_selection(x, op, program, axes)
    return y, _selection_tangent(op, program, axes, x, y, t)


def _selection_tangent(op: ReduceOp, program: Program | None, axes: MeshAxes, x: Array, y: Array, t: Array) -> Array:
    """Return the tangent of the result ``y``. ``t`` is the tangent of this device's operand ``x``."""
    if op is ReduceOp.PRODUCT:  # the sum over the devices of t times the product of the other devices' operands
        xs = lax.all_gather(x, axes.names)
        is_own = (jnp.arange(axes.devices) == lax.axis_index(axes.names)).reshape(-1, *[1] * x.ndim)
        return _sum(jnp.prod(jnp.where(is_own, 1, xs), 0) * t, program, axes)
    is_selected = (x == y).astype(x.dtype)
    return _sum(is_selected * t, program, axes) / _sum(is_selected, program, axes)


def _flatten_slices(slices: IndexedSlices) -> tuple[tuple[Array, Array], Any]:
    return (slices.values, slices.indices), slices.dense_shape


def _unflatten_slices(dense_shape: Any, parts: Sequence[Any]) -> IndexedSlices:
    slices = object.__new__(IndexedSlices)  # without its checks: JAX also puts objects that are not arrays into trees
    slices.values, slices.indices = parts
    slices.dense_shape = dense_shape
    return slices


# Jitted functions can then have IndexedSlices as arguments and results.
jax.tree_util.register_pytree_node(IndexedSlices, _flatten_slices, _unflatten_slices)
