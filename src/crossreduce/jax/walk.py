"""Walk a schedule's program in a JAX program: cut rows, permute them, fold them, put them together again.

In: a verified ``Schedule``, whose devices stand for the positions along a way's axes, and an array.  Out: the array,
reduced. Every device runs the same operations; where it stands decides only which rows it cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, groupby, pairwise, product
from operator import itemgetter
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..frameworks.jax import FUNCTIONS
from ..ops import ReduceOp
from ..schedule import Schedule
from .permutes import Permute, Program, Table, program, ranges
from .way import Array, Way, vary

_FEW: Final = 2
"""Values between which a device chooses its rows by comparing; of more, it cuts them out of all of them joined."""


def along(schedule: Schedule, x: Array, op: ReduceOp, way: Way) -> Array:
    """Reduce an array along a schedule; every device gets the result."""
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
    came = lax.ppermute(flat, *_in_mesh_order(way, pairs))
    if len(loads) == 1:
        return [came]
    ends = list(accumulate(load.size for load in loads))
    return [part.reshape(load.shape) for part, load in zip(jnp.split(came, ends[:-1]), loads, strict=True)]


def _in_mesh_order(way: Way, pairs: tuple[tuple[int, int], ...]) -> tuple[Any, tuple[tuple[int, int], ...]]:
    """Return the axes, and pairs of positions along them, in the mesh's order.

    ``lax.ppermute`` counts positions in that order, however its axes are listed, and ``lax.axis_index`` as they are
    listed (JAX 0.10.2).
    """
    if len(way.axes) == 1:
        return way.axes[0], pairs
    places = []
    for where in product(*map(range, way.sizes)):
        place = 0
        for k in way.order:
            place = place * way.sizes[k] + where[k]
        places.append(place)
    return tuple(way.axes[k] for k in way.order), tuple((places[src], places[dst]) for src, dst in pairs)


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
    return [vary(ct, way)]


def _mirrored_batch(args: Sequence[Array], dims: Sequence[int], **how: Any) -> tuple[Array, int]:
    return _MIRRORED.bind(args[0], **how), dims[0]


_MIRRORED.def_abstract_eval(_mirrored_type)
ad.deflinear2(_MIRRORED, _mirrored_transpose)
batching.primitive_batchers[_MIRRORED] = _mirrored_batch
mlir.register_lowering(_MIRRORED, mlir.lower_fun(_run, multiple_results=False))
