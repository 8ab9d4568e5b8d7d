"""Run a program in SPMD code: cut rows out of an array, permute them, combine them and join them again.

Input: a ``Program`` whose devices are the positions along mesh axes, and this device's array. Output: the reduced
array. Every device executes the same operations; only which rows it reads and writes depends on its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import accumulate, groupby, pairwise, product
from operator import itemgetter
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...frameworks import Array
from ...frameworks.jax.arrays import FUNCTIONS
from ...lowering import Program
from ...ops import ReduceOp
from .axes import MeshAxes, is_partitioned
from .permutations import Pair, Permutation, PermutationProgram, Place, Table, compile_permutations, ranges

_SELECTED: Final = 2
"""The largest number of blocks between which a device selects with ``where``, if each device reads consecutive rows of
one block. Otherwise each device joins the blocks and cuts its rows out of the joined array."""


def run(program: Program, x: Array, op: ReduceOp, axes: MeshAxes) -> Array:
    """Return an array reduced as a program defines it. The result is the same on every device.

    Args:
      program: an all-reduce of ``axes.devices`` devices.
      x: any shape; if ``axes.checked``, it varies over the axes.
      op: the combination; a mean is a sum that the caller divides.
      axes: the axes whose positions are the program's devices, in order.
    Raises:
      ScheduleError: the program is not an all-reduce of all devices.
    """
    if axes.checked:
        result: Array = _ALL_REDUCE.bind(x, program=program, op=op, axes=axes, batches=0)
        return result
    return _run(x, program=program, op=op, axes=axes)


def _run(x: Array, *, program: Program, op: ReduceOp, axes: MeshAxes, batches: int = 0) -> Array:
    """Run the rounds of a program. ``stacks`` has the blocks of each stack, and each operation appends a block.

    ``batches``: the number of axes, at the beginning, that are not cut into chunks.
    """
    if batches:
        one = partial(_run, program=program, op=op, axes=axes, batches=batches - 1)
        result: Array = jax.vmap(one)(x)
        return result
    compiled, spans = compile_permutations(program), program.spans(x.size)
    flat, position = x.reshape(-1), lax.axis_index(axes.names)
    stacks = [[_stack(flat, [spans[chunk] for chunk in chunks])] for chunks in compiled.stacks]
    for permutations, combinations in compiled.by_round:
        for received in [_permute(stacks, permutation, axes, position) for permutation in permutations]:
            for blocks, rows in zip(stacks, received, strict=True):
                blocks.append(rows)
        for stack, operands in combinations:
            blocks = stacks[stack]
            blocks.append(reduce(FUNCTIONS[op], [_take_rows(blocks, table, position) for table in operands]))
    results = [_result_rows(blocks, table, position) for blocks, table in zip(stacks, compiled.results, strict=True)]
    return _unstack(results, compiled, spans).reshape(x.shape)


def _stack(flat: Array, spans: list[tuple[int, int]]) -> Array:
    """Return ranges of a flat array as the rows of an array. Shorter ranges are padded to the longest one."""
    longest = max(stop - start for start, stop in spans)
    if _is_even(spans):
        return flat[spans[0][0] : spans[-1][1]].reshape(len(spans), longest)
    return jnp.stack([jnp.pad(flat[start:stop], (0, longest - (stop - start))) for start, stop in spans])


def _unstack(results: list[Array], compiled: PermutationProgram, spans: tuple[tuple[int, int], ...]) -> Array:
    """Return the rows of all stacks as one flat array, in the order of the chunks."""
    if len(results) == 1 and _is_even(spans):
        return results[0].reshape(-1)
    parts = {
        chunk: rows[row, : spans[chunk][1] - spans[chunk][0]]
        for chunks, rows in zip(compiled.stacks, results, strict=True)
        for row, chunk in enumerate(chunks)
    }
    return jnp.concatenate([parts[chunk] for chunk in range(len(spans))])


def _is_even(spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether ranges have the same length and follow one another without gaps."""
    lengths = {stop - start for start, stop in spans}
    return len(lengths) == 1 and all(a[1] == b[0] for a, b in pairwise(spans))


def _permute(stacks: list[list[Array]], permutation: Permutation, axes: MeshAxes, position: Array) -> list[Array]:
    """Send rows of all stacks, joined to one message per pair of devices. Return the received rows of each stack."""
    sent = [_take_rows(blocks, table, position) for blocks, table in zip(stacks, permutation.sent, strict=True)]
    flat = sent[0] if len(sent) == 1 else jnp.concatenate([rows.reshape(-1) for rows in sent])
    pairs = permutation.pairs
    if axes.mapped:  # under vmap, every position must send and receive
        idle = [sorted({*range(axes.devices)} - {pair[side] for pair in pairs}) for side in (0, 1)]
        pairs += tuple(zip(*idle, strict=True))
    received = lax.ppermute(flat, *_pairs_in_mesh_order(axes, pairs))
    if len(sent) == 1:
        return [received]
    ends = list(accumulate(rows.size for rows in sent))
    return [part.reshape(rows.shape) for part, rows in zip(jnp.split(received, ends[:-1]), sent, strict=True)]


def _pairs_in_mesh_order(axes: MeshAxes, pairs: tuple[Pair, ...]) -> tuple[Any, tuple[Pair, ...]]:
    """Return the arguments of ``lax.ppermute``: the names of the axes, and the pairs with positions in its numbering.

    ``lax.ppermute`` numbers positions in the mesh's order of the axes, even if the axes are listed in another order.
    ``lax.axis_index`` and ``pairs`` number them in the listed order (JAX 0.10.2).
    """
    if len(axes.names) == 1:
        return axes.names[0], pairs
    numbers = []
    for coordinates in product(*map(range, axes.sizes)):
        number = 0
        for k in axes.mesh_order:
            number = number * axes.sizes[k] + coordinates[k]
        numbers.append(number)
    return tuple(axes.names[k] for k in axes.mesh_order), tuple((numbers[src], numbers[dst]) for src, dst in pairs)


def _take_rows(blocks: list[Array], table: Table, position: Array) -> Array:
    """Return the rows that the table lists for this device."""
    used = sorted({block for places in table for block, _ in places})
    if not used:
        return blocks[0][:0]
    if len(used) <= _SELECTED and all(places == _consecutive_places(places) for places in table):
        # Each device reads consecutive rows of one block: select between the blocks, without joining them first.
        firsts = [places[0] for places in table]
        rows = _cut_rows(blocks[used[0]], used[0], firsts, len(table[0]), position)
        for block in used[1:]:
            other = _cut_rows(blocks[block], block, firsts, len(table[0]), position)
            rows = jnp.where(_own_element([first == block for first, _ in firsts], position), other, rows)
        return rows
    starts = dict(zip(used, accumulate((len(blocks[block]) for block in used), initial=0), strict=False))
    joined = blocks[used[0]] if len(used) == 1 else jnp.concatenate([blocks[block] for block in used])
    wanted = ranges([[starts[block] + row for block, row in places] for places in table])
    parts = [lax.dynamic_slice_in_dim(joined, _own_element(firsts, position), size) for firsts, size in wanted]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _result_rows(blocks: list[Array], table: Table, position: Array) -> Array:
    """Return the rows that the table lists for this device.

    If all devices need the same rows in different orders, each row is written to its place in the result: XLA's CPU
    compiler does this at the speed of memory, while cutting rows out of joined blocks takes three times as long.
    """
    places = sorted(table[0])
    if all(own == table[0] for own in table) or any(sorted(own) != places for own in table):
        return _take_rows(blocks, table, position)
    result = blocks[0]  # every row is written; its type has the axes over which an array counts as reduced
    for block, group in groupby(places, key=itemgetter(0)):
        rows = [row for _, row in group]
        at = 0
        for starts, size in ranges([[own.index((block, row)) for row in rows] for own in table]):
            part = _take_rows(blocks, (tuple((block, row) for row in rows[at : at + size]),) * len(table), position)
            result = lax.dynamic_update_slice_in_dim(result, part, _own_element(starts, position), 0)
            at += size
    return result


def _consecutive_places(places: Sequence[Place]) -> tuple[Place, ...]:
    """Return the places of ``len(places)`` consecutive rows of one block, starting with the first place."""
    block, first = places[0]
    return tuple((block, first + k) for k in range(len(places)))


def _cut_rows(rows: Array, block: int, firsts: Sequence[Place], size: int, position: Array) -> Array:
    """Return ``size`` consecutive rows of a block, starting at this device's place in ``firsts``.

    If that place is in another block, the caller does not use the rows, so they are those of any device.
    """
    if size == len(rows):
        return rows
    default = next(row for number, row in firsts if number == block)
    starts = [row if number == block else default for number, row in firsts]
    return lax.dynamic_slice_in_dim(rows, _own_element(starts, position), size)


def _own_element(numbers: Sequence[Any], position: Array) -> Any:
    """Return the element of ``numbers`` at this device's position, as a constant if all elements are equal."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return lax.dynamic_index_in_dim(jnp.asarray(numbers), position, keepdims=False)


# ``verify`` has proved that all devices end with the same values, which shard_map cannot derive. So if shard_map
# checks types, a program is one primitive with the type of psum: the input varies over the axes and the output does
# not. The transpose is that of psum, too: the cotangent, which is the same on all devices, is that of each input.
_ALL_REDUCE: Final = Primitive("crossreduce_all_reduce")


def _abstract_eval(x: Any, *, axes: MeshAxes, **_: Any) -> Any:
    (kind,) = jax.make_jaxpr(lambda value: lax.psum(value, axes.names))(x).out_avals
    return kind.update(dtype=x.dtype)  # psum of bools returns integers


def _transpose(cotangent: Array, _: Any, *, axes: MeshAxes, **__: Any) -> list[Array]:
    return [axes.vary(cotangent)]


def _batch(args: Sequence[Array], dims: Sequence[int], *, batches: int, **params: Any) -> tuple[Array, int]:
    if not batches and not is_partitioned(args[0], dims[0]):
        return _ALL_REDUCE.bind(args[0], batches=0, **params), dims[0]
    # Chunks of the flat array would have to be gathered from the devices between which XLA partitions this axis.
    return _ALL_REDUCE.bind(jnp.moveaxis(args[0], dims[0], 0), batches=batches + 1, **params), 0


_ALL_REDUCE.def_abstract_eval(_abstract_eval)
ad.deflinear2(_ALL_REDUCE, _transpose)
batching.primitive_batchers[_ALL_REDUCE] = _batch
mlir.register_lowering(_ALL_REDUCE, mlir.lower_fun(_run, multiple_results=False))
