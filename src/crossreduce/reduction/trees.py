"""The function that most users call: ``all_reduce`` of pytrees, one per replica.

Input: n trees of arrays. Output: n reduced trees. optree flattens the trees; dataclasses that it does not support are
registered with it, in a namespace of this library.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..autograph import unconverted
from ..errors import ArgumentError, MismatchError, ReductionError, UnsupportedError, shown
from ..frameworks import framework_of
from ..observe.profilers import PROFILERS, entry, is_outermost
from ..ops import ReduceOp
from ..options import CommunicationOptions
from ..values import DistributedValues, PerReplica, read_devices
from .all_reduce_ops import AllReduceCrossDeviceOps
from .cross_device_ops import CrossDeviceOps
from .validation import check_value, read_op, read_options, uniform_value

if TYPE_CHECKING:
    from ..ops import Weights

_NAMESPACE = "crossreduce"
_DEFAULT = AllReduceCrossDeviceOps("auto")
_REGISTERED: set[type] = set()  # dataclasses that are registered with OpTree
_LOCK = threading.Lock()


@unconverted
def all_reduce(
    trees: Sequence[Any],
    op: ReduceOp | str = "sum",
    *,
    devices: Sequence[str] | None = None,
    cross_device_ops: CrossDeviceOps | None = None,
    options: CommunicationOptions | None = None,
    out: Sequence[Any] | None = None,
    weights: Sequence[Any] | None = None,
) -> list[Any]:
    """Reduce n pytrees, one per replica, leaf by leaf. Return one reduced tree per replica.

    Args:
      trees: a list with one tree per replica: an array, or dicts, lists, tuples, named tuples, dataclasses and other
        pytree nodes of arrays and numbers, all of one structure. Leaves may be sparse, torch Parameters or
        tf.Variables, and of different dtypes, shapes, devices and frameworks. Dataclasses are rebuilt from their
        fields; other attributes of an instance are lost.
      op: a ``ReduceOp`` or its name.
      devices: one device per replica. ``None`` means that each leaf stays on its device.
      cross_device_ops: how to reduce. ``None`` means ``AllReduceCrossDeviceOps("auto")``.
      options: hints for this call.
      out: n trees of the same structure; the results are written into their leaves (see ``CrossDeviceOps.reduce``).
        With the inputs themselves as ``out`` the reduction is in place.
      weights: for the op "mean", one number per replica, such as its number of samples: the result is
        sum(w x) / sum(w). A replica of weight 0 does not take part: its elements are not read, even if they are NaN.
        Equal weights give the bits of the mean. With ``exact=True`` the weights must be in the ratio of whole numbers
        with a sum of at most 2**24.
    Returns:
      n trees of the same structure. Leaf k of tree i is the reduction of leaf k of all trees, on ``devices[i]``, or by
      default on the device of leaf k of input i. All n trees have the same bits. Their leaves are those of ``out`` if
      it is given. Otherwise, they share memory only if arrays are immutable. Numbers become 0-d NumPy arrays.
    Raises:
      MismatchError: trees of different structure, or leaves that differ in shape, dtype or framework. The message has
        the leaf's path and all replicas.
      ArgumentError: ``trees`` is empty, a leaf is not an array, or another argument is invalid: also a weight that is
        negative, infinite or NaN, or weights that are all 0.
      UnsupportedError: the op is not defined for a leaf's dtype; ``cross_device_ops`` is not a ``CrossDeviceOps``.

    >>> import numpy as np
    >>> grads = [{"w": np.full((2, 2), float(k)), "b": np.float32(k)} for k in range(3)]
    >>> all_reduce(grads, "mean")[2]["w"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    >>> batches = [np.float32(2), np.float32(5)]  # means over 64 and 32 samples
    >>> all_reduce(batches, "mean", weights=[64, 32])[0].item()
    3.0
    >>> buffers = [np.empty(3) for _ in range(2)]  # once: no iteration allocates results
    >>> for step in range(3):
    ...     _ = all_reduce([np.full(3, step + 0.0), np.full(3, 1.0)], out=buffers)
    >>> buffers[1]
    array([3., 3., 3.])
    """
    if PROFILERS.are_on() and is_outermost():
        with entry("all_reduce", op, trees):
            call = partial(all_reduce, devices=devices, cross_device_ops=cross_device_ops, weights=weights)
            return call(trees, op, options=options, out=out)
    is_one_tree = isinstance(trees, (str, bytes, dict, DistributedValues)) or hasattr(trees, "shape")
    if is_one_tree or not isinstance(trees, Iterable):
        remedy = "[tree, tree]: one tree per replica, as in all_reduce([tree, tree], op)"
        remedy = "list(value)" if isinstance(trees, DistributedValues) else remedy
        raise ArgumentError.of("trees must be a list of one tree per replica.", shown(trees), remedy)
    op = read_op(op)
    ops = check_ops(cross_device_ops)
    tree_list = list(trees)
    if not tree_list:
        raise ArgumentError.of("trees must contain at least one replica's tree.", shown(trees), "[tree, tree]")
    names = None if devices is None else read_devices(devices)
    if names is not None and len(names) != len(tree_list):
        given = f"{len(tree_list)} trees; {', '.join(names)}"
        raise ArgumentError.of("devices must have one name per replica.", given, "devices=None")
    read = None
    if weights is not None:
        from .weighting import weights_of_call

        read = weights_of_call(weights, len(tree_list), op, ops)
    rows, out_rows = tree_list, out
    single = type(tree_list[0]) is not list
    if single:  # each tree may be a single array: look it up as a list of one array
        rows, out_rows = [[tree] for tree in tree_list], [[tree] for tree in out] if type(out) is list else out
    reduced = None if read else ops.reduce_prepared(op, rows, names, options, out_rows)
    if reduced is not None:
        return [row[0] for row in reduced] if single else reduced
    flat, structure = flatten_trees(tree_list)
    targets = None if out is None else _flat_targets(out, len(tree_list), structure)
    reduced = reduce_leaves(flat, structure, op, names, ops, options, targets, read)
    return [unflatten_tree(structure, row) for row in reduced]


def reduce_leaves(
    rows: list[list[Any]],
    structure: Any,
    op: ReduceOp,
    devices: tuple[str, ...] | None,
    ops: CrossDeviceOps,
    options: CommunicationOptions | None,
    out: list[list[Any]] | None = None,
    weights: Weights | None = None,
) -> list[list[Any]]:
    """Reduce the leaves of trees, leaf by leaf, and return each replica's reduced leaves. Errors name the leaf.

    Each row of ``rows`` has the leaves of one replica's tree, as ``flatten_trees`` returns them. ``out`` has rows of
    the same lengths: the arrays that the results are written into.
    """
    prepared = None if weights else ops.reduce_prepared(op, rows, devices, options, out)
    if prepared is not None:
        return prepared
    weigh = None
    if weights is not None:
        from .weighting import weighted

        weigh = partial(weighted, weights=weights, exact=read_options(options).exact)
    pairs: list[tuple[PerReplica, PerReplica]] = []
    for number, components in enumerate(zip(*rows, strict=True)):
        try:
            value: PerReplica | None = uniform_value(op, components, devices)
            if value is None:
                for component in components:
                    framework_of(component)  # raises for a leaf that is not an array
                value = PerReplica(components, devices)
            source = value if weigh is None else weigh(check_value(op, value))
        except ReductionError as error:
            name_leaf(error, structure, number)
            raise
        pairs.append((source, value))
    targets = None
    if out is not None:
        columns = zip(*out, strict=True)
        targets = [PerReplica.on(arrays, value.devices) for arrays, (_, value) in zip(columns, pairs, strict=True)]
    try:
        reduced = ops.batch_reduce(op, pairs, options, out=targets)
    except ReductionError as error:
        if error.pair is not None:  # replace the pair's number by the leaf's path
            name_leaf(error, structure, error.pair)
        raise
    # zip() of no leaves would have no rows, rather than an empty row per replica.
    return [list(row) for row in zip(*(result.values for result in reduced), strict=True)] or [[] for _ in rows]


def _flat_targets(out: Any, replicas: int, structure: Any) -> list[list[Any]]:
    """Return for each replica the leaves of its tree in ``out``."""
    trees = list(out) if isinstance(out, Iterable) and not isinstance(out, (str, bytes, dict)) else []
    if hasattr(out, "shape") or len(trees) != replicas:
        given = f"a {type(out).__name__} of {len(trees)}" if trees and not hasattr(out, "shape") else shown(out)
        remedy = f"a list of {replicas} tree{'s' if replicas > 1 else ''}"
        raise ArgumentError.of("out must be a list of one tree per replica.", given, remedy)
    leaves, out_structure = flatten_trees(trees)
    if out_structure != structure:
        of_replicas, of_out = _outline([out_structure, structure], 1), _outline([structure, out_structure], 1)
        outlines = f"replicas: {of_replicas}; out: {of_out}"
        remedy = "trees of the same keys, lengths and types"
        raise MismatchError.of("the trees of out differ in structure from those of the replicas.", outlines, remedy)
    return leaves


def check_ops(ops: object) -> CrossDeviceOps:
    """Return the ops that a caller gave, or ``AllReduceCrossDeviceOps("auto")`` instead of ``None``.

    Raises:
      UnsupportedError: ``ops`` is a class, or not a ``CrossDeviceOps``.
    """
    if ops is None:
        return _DEFAULT
    if isinstance(ops, CrossDeviceOps):
        return ops
    remedy = 'crossreduce.AllReduceCrossDeviceOps("ring")'
    if isinstance(ops, type) and issubclass(ops, CrossDeviceOps):
        remedy = f"{ops.__name__}()"
    raise UnsupportedError.of("cross_device_ops must be an instance of crossreduce.CrossDeviceOps.", shown(ops), remedy)


def flatten_trees(trees: list[Any]) -> tuple[list[list[Any]], Any]:
    """Return the leaves of each tree, and the structure of all trees. Raise ``MismatchError`` if structures differ."""
    flat = [flatten_tree(tree) for tree in trees]
    structures = [structure for _, structure in flat]
    if any(structure != structures[0] for structure in structures):
        outlines = "; ".join(f"replica {k}: {_outline(structures, k)}" for k in range(len(trees)))
        remedy = "the same keys, lengths and types on all replicas; None on all of them or on none"
        raise MismatchError.of("the replicas' trees differ in structure.", outlines, remedy)
    return [leaves for leaves, _ in flat], structures[0]


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree. Dataclasses that optree treats as leaves are registered first.

    Raises:
      ArgumentError: the tree contains itself, or is too deep.
    """
    import optree

    while True:
        try:
            leaves, structure = optree.tree_flatten(tree, namespace=_NAMESPACE)
        except RecursionError as error:
            given = f"a {type(tree).__name__}"
            raise ArgumentError.of("a tree is too deep, or contains itself.", given, "a flatter tree") from error
        kinds = {kind for kind in set(map(type, leaves)) if dataclasses.is_dataclass(kind)}
        # An array class of a framework may be a dataclass too, but it has a shape.
        unknown = {type(leaf) for leaf in leaves if type(leaf) in kinds and not hasattr(leaf, "shape")}
        if not unknown:
            return leaves, structure
        for kind in unknown:
            _register(kind)


def leaf_paths(structure: Any) -> list[str]:
    """Return the path of each leaf as a Python expression, such as ``tree['w'][0]``."""
    return [accessor.codify("tree") for accessor in structure.accessors()]


def name_leaf(error: ReductionError, structure: Any, number: int) -> None:
    """Put the path of leaf ``number`` in front of an error's text, unless the tree is a single array."""
    path = leaf_paths(structure)[number]
    error.prefix("" if path == "tree" else f"leaf {path}")


def _outline(structures: list[Any], replica: int) -> str:
    """Return a text for an error that describes a replica's tree: the number of leaves, and which another tree lacks.

    The other tree is that of replica 0; for replica 0, it is that of replica 1. If both have the same paths, they
    differ in the types of nodes, so the text is the structure itself.
    """
    paths, others = leaf_paths(structures[replica]), set(leaf_paths(structures[int(replica == 0)]))
    only_here = [path for path in paths if path not in others]
    if not only_here and set(paths) == others:
        return shown(structures[replica], 200)
    count = f"{len(paths)} leaves" if len(paths) != 1 else "1 leaf"
    return count + (f", only here: {', '.join(only_here[:3])}{', ...' * (len(only_here) > 3)}" if only_here else "")


def unflatten_tree(structure: Any, leaves: Iterable[Any]) -> Any:
    """Rebuild a tree from its leaves."""
    import optree

    return optree.tree_unflatten(structure, leaves)


def _register(kind: type) -> None:
    """Register a dataclass with optree as a node whose children are its fields."""
    import optree

    names = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(node: Any) -> tuple[list[Any], None, tuple[str, ...]]:
        return [getattr(node, name) for name in names], None, names

    def unflatten(_: Any, children: Iterable[Any]) -> Any:
        instance: Any = object.__new__(kind)  # fields only: other attributes may depend on the fields' old values
        for name, child in zip(names, children, strict=True):
            object.__setattr__(instance, name, child)
        return instance

    with _LOCK:
        if kind not in _REGISTERED:
            entry = optree.DataclassEntry
            optree.register_pytree_node(kind, flatten, unflatten, path_entry_type=entry, namespace=_NAMESPACE)
            _REGISTERED.add(kind)
