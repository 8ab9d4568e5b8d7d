"""``all_reduce`` inside JAX programs: under ``shard_map``, ``pmap`` and ``vmap``, in ``jit``, through ``grad``.

In: a pytree of this device's arrays, and the name of the axis to reduce over.  Out: the same tree, reduced, on every
device. What runs is XLA's own collective, or, along a schedule, ``lax.ppermute`` and folds. Lists of per-device arrays
outside such programs are ``crossreduce.all_reduce``'s.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Hashable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..backends.contract import Numbers
from ..backends.jax import BACKEND, FUNCTIONS, finish
from ..devices import host_devices
from ..errors import ArgumentError, AxisError, ReductionError, UnsupportedError, message, shown
from ..ops import FLOATS, ReduceOp, accumulator, read_op
from ..options import algorithm_name, count
from ..packing import itemsize
from ..pipeline import say_once
from ..planning import hierarchical_copy, planned, planned_for
from ..schedule import Schedule
from ..topology import Topology
from ..values import IndexedSlices
from .permutes import Permute, Program, Table, program, ranges

__all__ = ["all_reduce"]

_LOG: Final = logging.getLogger("crossreduce")

Array = Any
Axes = tuple[Hashable, ...]

SMALL_BYTES: Final = 1 << 16
"""Leaves below this are joined before XLA's collective runs. On 8 CPU devices a collective more costs about 0.2 ms, as
much as it takes to copy 64 KiB to and fro on each; of 16 KiB to 1 MiB this was the quickest for ResNet-50's gradients
(74 ms; 16 KiB 77, 256 KiB 78, 1 MiB 88; nothing joined: 173)."""


_FEW: Final = 2
"""Values between which a device chooses its rows by comparing; of more, it cuts them out of all of them joined."""


class Way(NamedTuple):
    """How a call reduces.

    ``checked``: shard_map tracks what varies over which axes (``check_vma=True``). ``mapped``: the axis is ``vmap``'s.
    """

    axes: Axes
    sizes: tuple[int, ...]
    checked: bool
    mapped: bool
    algorithm: str
    topology: Topology | None
    packs: int

    @property
    def devices(self) -> int:
        """How many there are along the axes."""
        return math.prod(self.sizes)


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
      num_packs: for "one_device" and "hierarchical_copy": how many trees, with different roots, share the buffer.
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
    way = _way(axis_name, topology, algorithm_name(algorithm), count("num_packs", num_packs, "1 is one tree") or 1)
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
            groups.setdefault((leaf.dtype.name, _varying(leaf)), []).append(number)
    for (dtype, _), members in groups.items():
        numbers = BACKEND.numbers(op, dtype, way.devices)
        for number, leaf in zip(members, _reduced([leaves[k] for k in members], op, numbers, way), strict=True):
            leaves[number] = leaf
    return jax.tree_util.tree_unflatten(structure, leaves)


# ---- what the caller asks for -------------------------------------------------------------------------------------


def _way(axis_name: Any, topology: Any, algorithm: str, packs: int) -> Way:
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    try:
        if not axes or len(set(axes)) < len(axes):
            raise ArgumentError(
                message("axis_name is one axis, or several different ones.", shown(axis_name), "an axis")
            )
        sizes = tuple(int(lax.axis_size(axis)) for axis in axes)
        # Only where shard_map checks does the type of a device's position say that it differs from device to device.
        checked = any(_varying(lax.axis_index(axis)) for axis in axes)
    except (NameError, TypeError) as error:
        remedy = "a name of the mesh's axes, inside jax.shard_map (or jax.pmap and jax.vmap with axis_name=)"
        raise AxisError(message("there is no such axis here.", shown(axis_name), remedy)) from error
    n = math.prod(sizes)
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(message("topology must be a Topology.", shown(topology), 'Topology.machine("dgx-1v")'))
    if topology is not None and len(topology.devices) != n:
        raise ArgumentError(
            message(
                "the topology's devices stand for the positions along the axis, one for one.",
                f"{len(topology.devices)} devices; {n} positions along {_named(axes)}",
                "topology.subset(...), or other axes",
            )
        )
    mapped = not set(axes) <= set(jax.sharding.get_abstract_mesh().axis_names)
    return Way(axes, sizes, checked, mapped, "auto" if algorithm == "nccl" else algorithm, topology, packs)


def _dense(leaf: Any, op: ReduceOp, way: Way) -> Array:
    """Check a leaf and return it as an array that varies over the axes."""
    try:
        jax.typeof(leaf)
    except TypeError as error:
        raise UnsupportedError(
            message("this is no array for JAX.", shown(leaf), "arrays and numbers; None for nothing")
        ) from error
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise UnsupportedError(
            message("arrays of PRNG keys cannot be reduced.", shown(leaf), "jax.random.key_data(value)")
        )
    array = jnp.asarray(leaf)
    accumulator(op, array.dtype.name)  # raises where the op is not defined
    return _vary(array, way) if way.checked else array


def _is_sparse(leaf: Any) -> bool:
    sparse = sys.modules.get("jax.experimental.sparse")  # slow to import; without it nobody has such an array
    return isinstance(leaf, IndexedSlices) or (sparse is not None and isinstance(leaf, sparse.JAXSparse))


def _sparse(leaf: Any, op: ReduceOp, way: Way) -> Any:
    """List the slices of all devices one after another."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedError(
            message(f"the {op.value} of sparse values is not defined.", shown(leaf), "sum or mean, or dense arrays")
        )
    found = BACKEND.array(leaf)
    numbers = BACKEND.numbers(op, found.values.dtype.name, way.devices)
    values, indices = (_gathered(part, way) for part in (found.values, found.indices))
    return BACKEND.sparse(found._replace(values=finish(numbers, values), indices=indices))


def _gathered(x: Array, way: Way) -> Array:
    if not way.checked:
        return lax.all_gather(x, way.axes, tiled=True)
    # A gather's result counts as varying; a sum of what each device has in its own place does not.
    x = _vary(x, way)
    room = _vary(jnp.zeros((way.devices, *x.shape), x.dtype), way)
    placed = lax.dynamic_update_index_in_dim(room, x, lax.axis_index(way.axes), 0)
    return lax.psum(placed, way.axes).reshape(-1, *x.shape[1:])


def _varying(x: Array) -> frozenset[Hashable]:
    """Return the axes over which shard_map's check says that a value varies."""
    kind = jax.typeof(x)
    found: frozenset[Hashable] = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return found


def _vary(x: Array, way: Way) -> Array:
    missing = tuple(axis for axis in way.axes if axis not in _varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _named(axes: Axes) -> str:
    return f"axis {axes[0]!r}" if len(axes) == 1 else "axes " + ", ".join(map(repr, axes))


# ---- packing ------------------------------------------------------------------------------------------------------


def _reduced(xs: list[Array], op: ReduceOp, numbers: Numbers, way: Way) -> list[Array]:
    """Reduce arrays of one dtype: all of them joined along a schedule, small ones joined for XLA's collective."""
    schedule = _schedule(way, op, sum(x.size for x in xs) * itemsize(numbers.accumulator))
    joined: list[int] = []
    alone: list[list[int]] = []
    for k, x in enumerate(xs):
        if schedule is not None or (x.nbytes < SMALL_BYTES and _all_manual()):
            joined.append(k)
        else:
            alone.append([k])
    results = list(xs)
    for run in [joined, *alone] if joined else alone:
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
        given = f"{_named(way.axes)}, op {op.value}, algorithm {way.algorithm}"
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
        say_once(f"new plan: {what}; over {_named(way.axes)} of {way.devices}")


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
    return lax.psum(x, way.axes) if schedule is None else _along(schedule, x, ReduceOp.SUM, way)


def _pick(x: Array, op: ReduceOp, schedule: Schedule | None, way: Way) -> Array:
    """Return the least, the greatest or the product."""
    if schedule is not None:
        return _along(schedule, x, op, way)
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


# ---- along a schedule ---------------------------------------------------------------------------------------------


def _along(schedule: Schedule, x: Array, op: ReduceOp, way: Way) -> Array:
    if way.checked:
        result: Array = _MIRRORED.bind(x, op=op, schedule=schedule, way=way)
        return result
    return _run(x, op=op, schedule=schedule, way=way)


def _run(x: Array, *, op: ReduceOp, schedule: Schedule, way: Way) -> Array:
    """Walk a schedule's program: permute and fold."""
    made, spans = program(schedule), schedule.spans(x.size)
    flat, me = x.reshape(-1), lax.axis_index(way.axes)
    values = [[_stacked(flat, [spans[chunk] for chunk in chunks])] for chunks in made.stacks]
    for permutes, folds in made.rounds:
        for came in [_permuted(values, permute, way, me) for permute in permutes]:
            for stack, rows in zip(values, came, strict=True):
                stack.append(rows)
        for fold in folds:
            operands = [_take(values[fold.stack], table, me) for table in fold.operands]
            values[fold.stack].append(reduce(FUNCTIONS[op], operands))
    results = [_placed(stack, table, me) for stack, table in zip(values, made.results, strict=True)]
    return _unstacked(results, made, spans).reshape(x.shape)


def _stacked(flat: Array, spans: list[tuple[int, int]]) -> Array:
    """Lay ranges of a flat array out as rows of one length."""
    longest = max(stop - start for start, stop in spans)
    if _is_even(spans):
        return flat[spans[0][0] : spans[-1][1]].reshape(len(spans), longest)
    return jnp.stack([jnp.pad(flat[start:stop], (0, longest - (stop - start))) for start, stop in spans])


def _unstacked(state: list[Array], made: Program, spans: tuple[tuple[int, int], ...]) -> Array:
    if len(state) == 1 and _is_even(list(spans)):
        return state[0].reshape(-1)
    parts = {
        chunk: stack[row, : spans[chunk][1] - spans[chunk][0]]
        for chunks, stack in zip(made.stacks, state, strict=True)
        for row, chunk in enumerate(chunks)
    }
    return jnp.concatenate([parts[chunk] for chunk in range(len(spans))])


def _is_even(spans: list[tuple[int, int]]) -> bool:
    lengths = {stop - start for start, stop in spans}
    return len(lengths) == 1 and all(a[1] == b[0] for a, b in pairwise(spans))


def _permuted(values: list[list[Array]], permute: Permute, way: Way, me: Array) -> list[Array]:
    """Send rows of all stacks in one message each, and return what came, stack by stack."""
    loads = [_take(stack, table, me) for stack, table in zip(values, permute.loads, strict=True)]
    flat = loads[0] if len(loads) == 1 else jnp.concatenate([load.reshape(-1) for load in loads])
    pairs = permute.pairs
    if way.mapped:  # vmap moves nothing, but wants every position to send and to take
        idle = [sorted({*range(way.devices)} - {pair[side] for pair in pairs}) for side in (0, 1)]
        pairs += tuple(zip(*idle, strict=True))
    came = lax.ppermute(flat, way.axes[0] if len(way.axes) == 1 else way.axes, pairs)
    if len(loads) == 1:
        return [came]
    ends = list(accumulate(load.size for load in loads))
    return [part.reshape(load.shape) for part, load in zip(jnp.split(came, ends[:-1]), loads, strict=True)]


def _take(values: list[Array], table: Table, me: Array) -> Array:
    """Return the rows that the table names for this device."""
    used = sorted({value for places in table for value, _ in places})
    if not used:
        return values[0][:0]
    if len(used) <= _FEW and all(list(places) == _run_of(places) for places in table):
        # One run of one value on each device: choose between the values, without joining them first.
        rows = _cut(values[used[0]], [places[0] for places in table], used[0], len(table[0]), me)
        for value in used[1:]:
            other = _cut(values[value], [places[0] for places in table], value, len(table[0]), me)
            rows = jnp.where(_mine([places[0][0] == value for places in table], me), other, rows)
        return rows
    base = dict(zip(used, accumulate((len(values[value]) for value in used), initial=0), strict=False))
    rows = values[used[0]] if len(used) == 1 else jnp.concatenate([values[value] for value in used])
    wanted = ranges([[base[value] + row for value, row in places] for places in table])
    parts = [lax.dynamic_slice_in_dim(rows, _mine(starts, me), size) for starts, size in wanted]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _placed(values: list[Array], table: Table, me: Array) -> Array:
    """Return the rows that the table names; where all devices name the same ones, in other orders, by writing them.

    XLA's CPU compiler writes a row in place as fast as memory goes, while cutting rows out of joined ones, in an order
    that only the running device knows, takes three times as long.
    """
    places = sorted(table[0])
    if all(own == table[0] for own in table) or any(sorted(own) != places for own in table):
        return _take(values, table, me)
    result = jnp.zeros_like(values[0])
    for value, group in groupby(places, key=itemgetter(0)):
        rows = [row for _, row in group]
        at = 0
        for starts, size in ranges([[own.index((value, row)) for row in rows] for own in table]):
            block = _take(values, (tuple((value, row) for row in rows[at : at + size]),) * len(table), me)
            result = lax.dynamic_update_slice_in_dim(result, block, _mine(starts, me), 0)
            at += size
    return result


def _run_of(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    value, first = places[0]
    return [(value, first + k) for k in range(len(places))]


def _cut(rows: Array, firsts: Sequence[tuple[int, int]], value: int, size: int, me: Array) -> Array:
    """Return a run of rows of one value, from each device's first on; from any where it has none there."""
    some = next(row for where, row in firsts if where == value)
    if size == len(rows):
        return rows
    return lax.dynamic_slice_in_dim(rows, _mine([row if at == value else some for at, row in firsts], me), size)


def _mine(numbers: Sequence[Any], me: Array) -> Any:
    """Return this device's number; without looking who it is, where all have the same."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return lax.dynamic_index_in_dim(jnp.asarray(numbers), me, keepdims=False)


# ``verify`` has proved that all devices end with the same, which shard_map's check cannot see. So, where it checks, a
# schedule is one primitive of psum's type: from values that vary over the axes to one that does not. Its transpose is
# psum's too: the cotangent, which all devices have, is each one's own.
_MIRRORED: Final = Primitive("crossreduce_all_reduce")


def _mirrored_type(x: Any, *, way: Way, **_: Any) -> Any:
    (kind,) = jax.make_jaxpr(lambda value: lax.psum(value, way.axes))(x).out_avals
    return kind.update(dtype=x.dtype)  # the sum of bools is none


def _mirrored_transpose(ct: Array, _: Any, *, way: Way, **__: Any) -> list[Array]:
    return [_vary(ct, way)]


def _mirrored_batch(args: Sequence[Array], dims: Sequence[int], **how: Any) -> tuple[Array, int]:
    return _MIRRORED.bind(args[0], **how), dims[0]


_MIRRORED.def_abstract_eval(_mirrored_type)
ad.deflinear2(_MIRRORED, _mirrored_transpose)
batching.primitive_batchers[_MIRRORED] = _mirrored_batch
mlir.register_lowering(_MIRRORED, mlir.lower_fun(_run, multiple_results=False))


def _flatten_slices(slices: IndexedSlices) -> tuple[tuple[Array, Array], Any]:
    return (slices.values, slices.indices), slices.dense_shape


def _unflatten_slices(dense_shape: Any, parts: Sequence[Any]) -> IndexedSlices:
    slices = object.__new__(IndexedSlices)  # unchecked: JAX also puts things that are no arrays into trees
    slices.values, slices.indices = parts
    slices.dense_shape = dense_shape
    return slices


# So that slices can be arguments and results of jitted functions.
jax.tree_util.register_pytree_node(IndexedSlices, _flatten_slices, _unflatten_slices)
