"""``all_reduce`` inside JAX programs: under ``shard_map``, ``pmap`` and ``vmap``, in ``jit``, through ``grad``.

In: a pytree of this device's arrays, and the name of the axis to reduce over.  Out: the same tree, reduced, on every
device. What runs is XLA's own collective, or, along a schedule, ``lax.ppermute`` and folds. Lists of per-device arrays
outside such programs are ``crossreduce.all_reduce``'s.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import ReductionError, UnsupportedError, message, shown
from ..frameworks.jax import FRAMEWORK, finish
from ..ops import ACCUMULATORS, FLOATS, Numbers, ReduceOp
from ..options import algorithm_name, count
from ..packing import itemsize
from ..pipeline import log_once
from ..planning import hierarchical_copy, planned, planned_for
from ..schedule import Schedule
from ..topology import Topology
from ..validation import read_op
from ..values import IndexedSlices, host_devices
from .permutes import program
from .walk import along
from .way import Array, Way, named, read_way, vary, varying

__all__ = ["all_reduce"]

_LOG: Final = logging.getLogger("crossreduce")

SMALL_BYTES: Final = 1 << 16
"""Leaves below this are joined before XLA's collective runs. On 8 CPU devices a collective more costs about 0.2 ms, as
much as it takes to copy 64 KiB to and fro on each; of 16 KiB to 1 MiB this was the quickest for ResNet-50's gradients
(74 ms; 16 KiB 77, 256 KiB 78, 1 MiB 88; nothing joined: 173)."""

LEAVES: Final = 256
"""So many small leaves are joined at most: XLA's time to compile grows faster than their number (2,000 leaves: 53 s in
one, 13 s by 256, 9 s alone; they run in 65, 71 and 379 ms)."""


def all_reduce(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    op: ReduceOp | str = "sum",
    topology: Topology | None = None,
    algorithm: str = "auto",
    *,
    num_packs: int = 1,
) -> Any:
    """Reduce a pytree over an axis of the mesh, leaf by leaf; every device gets the result.

    To be called where ``lax.psum`` would be: under ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with a named
    axis. Small leaves of one dtype travel together. For the gradients of a model, that is all there is to change.

    Args:
      x: a pytree of arrays and numbers; of ``crossreduce.IndexedSlices`` and ``BCOO`` the slices are listed
        one after another, in the devices' order.
      axis_name: a name, or several: then all of these axes are reduced, as one axis in row-major order.
      op: a ``ReduceOp`` or its name.
      topology: the links between the devices, which stand for the positions along the axis, in order; ``None``: any
        two are joined alike.
      algorithm: a planner's name; "auto" (as is "nccl"): XLA's own collective where any two devices are joined
        alike, else what is quickest in simulation on the topology. "hierarchical_copy" without a topology, over several
        axes, reduces over the last one first.
      num_packs: for "one_device" and "hierarchical_copy": how many trees, with different roots, share the buffer;
        no more than devices.
    Returns:
      The same tree. Halves are accumulated in float32, the mean of integers is a float; with ``check_vma=True``
      the results count as replicated (``out_specs=P()``), as those of ``lax.psum`` do. Numbers become arrays.
    Raises:
      AxisError: an axis that is not there (also a ``NameError``).
      ArgumentError: an unknown op or algorithm, a topology of another size than the axis.
      UnsupportedError: the op is not defined for a leaf's dtype, or a leaf is no array; the leaf's path is named.
      PlanError: the topology has no way for the algorithm.

    Example, with ``P = jax.sharding.PartitionSpec``::

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
        def mean_of_squares(x):
            return crossreduce.jax.all_reduce({"loss": (x * x).mean()}, "data", "mean")
    """
    op = read_op(op)
    way = read_way(axis_name, topology, algorithm_name(algorithm), count("num_packs", num_packs, "1 is one tree") or 1)
    listed, structure = jax.tree_util.tree_flatten_with_path(x, is_leaf=_is_sparse)
    leaves: list[Any] = []
    for path, leaf in listed:
        try:
            leaves.append(_sparse(leaf, op, way) if _is_sparse(leaf) else _dense(leaf, op, way))
        except ReductionError as error:
            error.prefix("leaf x" + jax.tree_util.keystr(path))
            raise
    groups: dict[tuple[str, frozenset[Hashable]], list[int]] = {}
    for number, leaf in enumerate(leaves):
        if not _is_sparse(leaf):
            # What varies over fewer of the other axes would, packed, vary over all that its neighbours do.
            groups.setdefault((leaf.dtype.name, varying(leaf)), []).append(number)
    for (dtype, _), members in groups.items():
        numbers = FRAMEWORK.numbers(op, dtype, way.devices)
        for number, leaf in zip(members, _reduced([leaves[k] for k in members], op, numbers, way), strict=True):
            leaves[number] = leaf
    return jax.tree_util.tree_unflatten(structure, leaves)


# ---- leaves -------------------------------------------------------------------------------------------------------


def _dense(leaf: Any, op: ReduceOp, way: Way) -> Array:
    """Check a leaf and return it as an array that varies over the axes."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise UnsupportedError(
            message("arrays of PRNG keys cannot be reduced.", shown(leaf), "jax.random.key_data(value)")
        )
    try:
        jax.typeof(leaf)
        array = jnp.asarray(leaf)
    except (TypeError, ValueError, OverflowError) as error:  # an OverflowError: 2**70
        remedy = "arrays, and numbers that fit their dtype; None for nothing"
        raise UnsupportedError(message("this is no array for JAX.", shown(leaf), remedy)) from error
    ACCUMULATORS[op, array.dtype.name]  # raises where the op is not defined
    return vary(array, way) if way.checked else array


def _is_sparse(leaf: Any) -> bool:
    sparse = sys.modules.get("jax.experimental.sparse")  # slow to import; without it nobody has such an array
    return isinstance(leaf, IndexedSlices) or (sparse is not None and isinstance(leaf, sparse.JAXSparse))


def _sparse(leaf: Any, op: ReduceOp, way: Way) -> Any:
    """List the slices of all devices one after another."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError(
            message(f"the {op.value} of sparse values is not defined.", shown(leaf), "sum or mean, or dense arrays")
        )
    found = FRAMEWORK.array(leaf)
    numbers = FRAMEWORK.numbers(op, found.values.dtype.name, way.devices)
    values, indices = (_gathered(part, way) for part in (found.values, found.indices))
    return FRAMEWORK.rebuild_sparse(found._replace(values=finish(numbers, values), indices=indices))


def _gathered(x: Array, way: Way) -> Array:
    if not way.checked:
        return lax.all_gather(x, way.axes, tiled=True)
    # A gather's result counts as varying; a sum of what each device has in its own place does not.
    x = vary(x, way)
    room = vary(jnp.zeros((way.devices, *x.shape), x.dtype), way)
    placed = lax.dynamic_update_index_in_dim(room, x, lax.axis_index(way.axes), 0)
    return lax.psum(placed, way.axes).reshape(way.devices * x.shape[0], *x.shape[1:])


# ---- packing ------------------------------------------------------------------------------------------------------


def _reduced(xs: list[Array], op: ReduceOp, numbers: Numbers, way: Way) -> list[Array]:
    """Reduce arrays of one dtype: all of them joined along a schedule, small ones joined for XLA's collective."""
    schedule = _schedule(way, op, sum(x.size for x in xs) * itemsize(numbers.accumulator))
    small = SMALL_BYTES if _all_manual() else 0
    joined: list[int] = []
    alone: list[list[int]] = []
    for k, x in enumerate(xs):
        if schedule is not None or x.nbytes < small:
            joined.append(k)
        else:
            alone.append([k])
    results = list(xs)
    most = len(xs) if schedule is not None else LEAVES
    runs = [joined[k : k + most] for k in range(0, len(joined), most)]
    for run in runs + alone:
        flat = xs[run[0]] if len(run) == 1 else jnp.concatenate([xs[k].reshape(-1) for k in run])
        total = finish(numbers, _total(flat.astype(numbers.accumulator), op, schedule, way))
        start = 0
        for k in run:
            stop = start + xs[k].size
            results[k] = total if len(run) == 1 else total[start:stop].reshape(xs[k].shape)
            start = stop
    return results


def _all_manual() -> bool:
    """Return whether no axis of the mesh is left to XLA: it would have to gather what is flattened."""
    return all(kind is jax.sharding.AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types or ())


# ---- planning -----------------------------------------------------------------------------------------------------


def _schedule(way: Way, op: ReduceOp, nbytes: int) -> Schedule | None:
    """Return the verified schedule for a buffer, or ``None`` where XLA's own collective is as good as any."""
    algorithm, names = way.algorithm, host_devices(way.devices)
    alike = way.topology is None or _is_uniform(way.topology)
    if algorithm == "auto" and alike:
        if op is not ReduceOp.PRODUCT:
            _say(way, "XLA's own all-reduce")
            return None
        algorithm = "halving_doubling"  # XLA has no product
    if way.mapped and len(way.axes) > 1:
        # lax.ppermute over a tuple with an axis of vmap silently leaves that axis out (JAX 0.10.2).
        problem = "over several axes of which one is vmap's, no schedule can run, only XLA's own all-reduce."
        given = f"{named(way.axes)}, op {op.value}, algorithm {way.algorithm}"
        raise UnsupportedError(
            message(problem, given, 'one axis after the other, or algorithm="auto" without topology')
        )
    if way.topology is not None:
        names = way.topology.devices
        schedule = planned_for(way.topology, algorithm, names, names, nbytes, way.packs)
    elif algorithm == "hierarchical_copy" and len(way.axes) > 1:
        groups = [names[k : k + way.sizes[-1]] for k in range(0, len(names), way.sizes[-1])]
        schedule = hierarchical_copy(names, packs=way.packs, groups=groups)
    else:
        schedule = planned(algorithm, names, names, way.packs)
    _say(way, f"{schedule.head}, {program(schedule).permutes} permutations; devices {', '.join(schedule.devices)}")
    return schedule


def _say(way: Way, what: str) -> None:
    if _LOG.isEnabledFor(logging.INFO):
        log_once(f"new plan: {what}; over {named(way.axes)} of {way.devices}")


@lru_cache(maxsize=256)
def _is_uniform(topology: Topology) -> bool:
    """Return whether any two devices are joined alike, by a link or through one switch.

    >>> _is_uniform(Topology.full_mesh(4)), _is_uniform(Topology.star(4)), _is_uniform(Topology.ring(4))
    (True, True, False)
    """
    kinds = set()
    for src in topology.devices:
        for dst in topology.devices:
            if src != dst:
                way = topology.route(src, dst) or ()
                links = [topology.link(*pair) for pair in pairwise(way)]
                kinds.add(tuple((link.bandwidth, link.latency_s) for link in links if link is not None))
    return len(kinds) <= 1 and all(1 <= len(kind) <= 2 for kind in kinds)


# ---- reducing one array -------------------------------------------------------------------------------------------


def _total(x: Array, op: ReduceOp, schedule: Schedule | None, way: Way) -> Array:
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _summed(x, schedule, way)
    picked = _differentiable_pick if jnp.issubdtype(x.dtype, jnp.inexact) else _pick
    return picked(x, op, schedule, way)


def _summed(x: Array, schedule: Schedule | None, way: Way) -> Array:
    return lax.psum(x, way.axes) if schedule is None else along(schedule, x, ReduceOp.SUM, way)


def _pick(x: Array, op: ReduceOp, schedule: Schedule | None, way: Way) -> Array:
    """Return the least, the greatest or the product."""
    if schedule is not None:
        return along(schedule, x, op, way)
    function = lax.pmax if op is ReduceOp.MAX else lax.pmin
    if x.dtype.name not in FLOATS:
        return function(x, way.axes)
    # XLA's CPU collectives lose NaN (jaxlib 0.10.2). So compare integers that lie in the order of the floats, with
    # NaN beyond all others. Halves as float32: NCCL has no integers of 16 bits.
    wide = x.astype(jnp.float32) if x.dtype.itemsize == 2 else x
    kind = jnp.dtype(f"int{wide.dtype.itemsize * 8}")
    ends = jnp.iinfo(kind)

    def turned(bits: Array) -> Array:
        return jnp.where(bits < 0, bits ^ ends.max, bits)

    keys = turned(lax.bitcast_convert_type(wide, kind))
    keys = jnp.where(jnp.isnan(wide), ends.max if op is ReduceOp.MAX else ends.min, keys)
    return lax.bitcast_convert_type(turned(function(keys, way.axes)), wide.dtype).astype(x.dtype)


_differentiable_pick = jax.custom_jvp(_pick, nondiff_argnums=(1, 2, 3))


@_differentiable_pick.defjvp  # type: ignore[untyped-decorator]
def _pick_jvp(op: ReduceOp, schedule: Any, way: Way, primals: tuple[Array], tangents: tuple[Array]) -> Any:
    """Differentiate: an extreme shares among the devices that have it, as ``jnp.max`` does."""
    (x,), (t,) = primals, tangents
    y = _differentiable_pick(x, op, schedule, way)
    if op is ReduceOp.PRODUCT:
        xs = lax.all_gather(x, way.axes)
        own = (jnp.arange(way.devices) == lax.axis_index(way.axes)).reshape(-1, *[1] * x.ndim)
        return y, _summed(jnp.prod(jnp.where(own, 1, xs), 0) * t, schedule, way)
    hit = (x == y).astype(x.dtype)
    return y, _summed(hit * t, schedule, way) / _summed(hit, schedule, way)


def _flatten_slices(slices: IndexedSlices) -> tuple[tuple[Array, Array], Any]:
    return (slices.values, slices.indices), slices.dense_shape


def _unflatten_slices(dense_shape: Any, parts: Sequence[Any]) -> IndexedSlices:
    slices = object.__new__(IndexedSlices)  # unchecked: JAX also puts things that are no arrays into trees
    slices.values, slices.indices = parts
    slices.dense_shape = dense_shape
    return slices


# So that slices can be arguments and results of jitted functions.
jax.tree_util.register_pytree_node(IndexedSlices, _flatten_slices, _unflatten_slices)
