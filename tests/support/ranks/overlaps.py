"""Collectives on overlapping arrays: hypothesis draws them, and an oracle computes the expected results on copies.

A case is a JSON value. On each rank all arrays are views of one buffer, whose content depends only on the rank. A view
is ``[offset, shape, strides]``, in elements. ``ops`` lists the collectives of a coalesced call, or a single collective.
``reads`` and ``writes`` are the views of each rank, and rank ``src`` sends ``sizes[src][dst]`` elements to ``dst``.
``repeats``: for each rank whether the second op has the same tensor as the first. ``outcome_of`` runs a case on a rank.
If results share memory on some rank, every rank must raise an ``ArgumentError``, and no buffer may change. Otherwise
every buffer must be equal to the oracle's.
"""

import math

import numpy as np
from hypothesis import strategies as st

REDUCTIONS = {"sum": np.add, "max": np.maximum, "band": np.bitwise_and}
DTYPES = {"int32": "int32", "uint8": "uint8", "float64": "float64", "float8": "uint8"}  # float8 is only moved, as bytes
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
# The forms of each collective of torch: "list" has a tensor per rank, "single" one tensor for all, and the others
# consist of several ops.
FORMS = {
    "all_reduce": ("single", "coalesced"),
    "reduce": ("single",),
    "broadcast": ("single",),
    "all_gather": ("list", "single", "coalesced", "transposed"),
    "reduce_scatter": ("list", "single", "coalesced"),
    "gather": ("list",),
    "scatter": ("list",),
    "all_to_all": ("list", "single"),
}


# The oracle


def buffer(case, rank):
    """Return a rank's buffer before the call: small integers, whose sums are exact."""
    return np.random.default_rng(rank).integers(0, 60, case["length"]).astype(DTYPES[case["dtype"]])


def places(views):
    """Return the positions of the elements of all views in the buffer, in the order of the views and elements."""
    found = [np.zeros(0, np.int64)]
    for offset, shape, strides in views:
        at = np.full((), offset)
        for size, stride in zip(shape, strides, strict=True):
            at = at[..., None] + np.arange(size) * stride
        found.append(at.reshape(-1))
    return np.concatenate(found)


def is_shared(case):
    """Return whether on some rank two elements of the results share memory, apart from what all ranks repeat."""
    if len(set(case["repeats"])) > 1:
        return True
    ops = case["ops"][:1] + case["ops"][1 + all(case["repeats"]) :]
    written = [places([view for op in ops for view in op["writes"][rank]]) for rank in range(case["ranks"])]
    return any(len(set(each.tolist())) < len(each) for each in written)


def expected(case, rank):
    """Return a rank's buffer after the call."""
    ranks, name, made = range(case["ranks"]), case["collective"], buffer(case, rank)
    for op in case["ops"]:
        given = [buffer(case, src)[places(op["reads"][src])] for src in ranks]
        if not op["writes"][rank]:
            continue
        if name in ("reduce_scatter", "scatter", "all_to_all"):  # each source has a part for each rank
            given = [np.split(x, np.cumsum(sizes)[:-1])[rank] for x, sizes in zip(given, op["sizes"], strict=True)]
        if name in ("broadcast", "scatter"):
            result = given[case["root"]]
        else:
            result = REDUCTIONS[case["op"]].reduce(given) if name in REDUCING else np.concatenate(given)
        made[places(op["writes"][rank])] = result
    return made


def check(case, outcomes):
    """Check the outcomes that ``outcome_of`` has returned on all ranks."""
    errors = {outcome["error"] for outcome in outcomes}
    if is_shared(case):
        assert len(errors) == 1, errors
        assert "share memory" in str(*errors), errors
    else:
        assert errors == {None}, errors
    for rank, outcome in enumerate(outcomes):
        want = (buffer if is_shared(case) else expected)(case, rank)
        assert outcome["buffer"] == want.tolist(), f"rank {rank}: {outcome['buffer']}, not {want.tolist()}"


def outcome_of(call, made):
    """Run a call and return its outcome. ``made``: the rank's buffer as a NumPy array."""
    from crossreduce import ArgumentError

    error = None
    try:
        call()
    except ArgumentError as raised:
        error = str(raised)
    return {"error": error, "buffer": made.tolist()}


# Drawing


@st.composite
def cases(draw, ranks, forms):
    """Draw a case. ``forms``: the forms of each collective, such as ``FORMS``."""
    name, form = draw(st.sampled_from([(name, form) for name in sorted(forms) for form in forms[name]]))
    dtypes = [each for each in DTYPES if each != "float8" or name not in REDUCING]
    dtype = draw(st.sampled_from(dtypes))
    ops = ["sum", "max"] + ["band"] * (dtype != "float64")  # gloo computes "band"
    case = {"collective": name, "form": form, "dtype": dtype, "ranks": ranks, "op": draw(st.sampled_from(ops))}
    case |= {"root": draw(st.integers(0, ranks - 1)) if name in ROOTED else None}
    case |= {"late": draw(st.booleans()), "wide": draw(st.booleans())}
    several = form in ("coalesced", "transposed")
    tables = [_sizes(draw, name, form, ranks) for _ in range(draw(st.integers(1 + several, 1 + 2 * several)))]
    repeat = several and name == "all_reduce" and draw(st.booleans())
    tables[1:2] = tables[:1] * repeat or tables[1:2]
    case["repeats"] = [repeat and draw(st.sampled_from([True, True, False])) for _ in range(ranks)]
    case["length"] = 3 * sum(sum(map(sum, table)) for table in tables) + 8
    case["ops"] = [{"sizes": table, "reads": [], "writes": []} for table in tables]
    for rank in range(ranks):
        _draw_views(draw, case, rank)
    return case


def _sizes(draw, name, form, ranks):
    """Return a table: how many elements each rank sends to each other rank."""
    size = st.integers(0, 6) if draw(st.integers(0, 3)) else st.integers(0, 90)
    if form == "list" and draw(st.booleans()) and name in ("all_gather", "reduce_scatter"):
        sizes = [draw(size) for _ in range(ranks)]
        return [[sizes[src if name == "all_gather" else dst] for dst in range(ranks)] for src in range(ranks)]
    if name == "all_to_all" and draw(st.booleans()):
        return [[draw(size) for _ in range(ranks)] for _ in range(ranks)]
    return [[draw(size)] * ranks] * ranks


def _draw_views(draw, case, rank):
    """Draw the views that a rank reads and writes in each op: first all results, mostly disjoint, then the inputs."""
    name, length, is_root = case["collective"], case["length"], rank == case["root"]
    written = [_shapes(case, op["sizes"], rank, True) for op in case["ops"]]
    views = iter(_results(draw, [shape for shapes in written for shape in shapes], length))
    for op, shapes in zip(case["ops"], written, strict=True):
        results = [next(views) for _ in shapes]
        reads = [_near(draw, shape, results, length) for shape in _shapes(case, op["sizes"], rank, False)]
        writes = is_root if name in ("reduce", "gather") else True
        if name in ("all_reduce", "reduce", "broadcast"):  # in place
            reads, writes = results, writes and (name, case["form"], is_root) != ("broadcast", "single", True)
        op["reads"].append(reads if is_root or name != "scatter" else [])
        op["writes"].append(results if writes else [])
    if case["repeats"][rank]:
        for views in ("reads", "writes"):
            case["ops"][1][views][rank] = case["ops"][0][views][rank]


def _shapes(case, sizes, rank, written):
    """Return the shapes of the arrays that a rank writes or reads in an op. ``wide``: even sizes get 2 columns."""
    name, form = case["collective"], case["form"]
    if written:
        each, elements = name in ("all_gather", "gather", "all_to_all"), [row[rank] for row in sizes]
    else:
        each, elements = name in ("reduce_scatter", "scatter", "all_to_all"), sizes[rank]
    if not each:
        elements = [sizes[rank][rank]]
    elif form in ("single", "coalesced"):
        elements = [sum(elements)]
    wide = case["wide"] and (name, form) != ("all_to_all", "single")
    return [(size // 2, 2) if wide and size % 2 == 0 else (size,) for size in elements]


def _results(draw, shapes, length):
    """Draw a view for each shape: disjoint views, columns of one matrix, or any views."""
    sizes = [math.prod(shape) for shape in shapes]
    layout = draw(st.sampled_from(["apart", "apart", "apart", "columns", "any"]))
    if layout == "any":
        return [_view(draw, shape, length) for shape in shapes]
    if layout == "columns" and len(set(sizes)) == 1 and len(shapes[0]) == 1:
        order = draw(st.permutations(range(len(shapes))))
        return [[k, shape, [len(shapes)]] for k, shape in zip(order, shapes, strict=True)]
    found, at = [None] * len(shapes), draw(st.integers(0, 3))
    for k in draw(st.permutations(range(len(shapes)))):
        found[k] = [at, shapes[k], _strides(shapes[k])]
        at += sizes[k] + draw(st.sampled_from([0, 0, 1]))
    return found


def _near(draw, shape, results, length):
    """Draw a view that often overlaps a result, is a part of a result, or contains a result."""
    size = math.prod(shape)
    if not results or not draw(st.integers(0, 2)):
        return _view(draw, shape, length)
    offset, other, _ = draw(st.sampled_from(results))
    step = draw(st.sampled_from([1, min(size, math.prod(other))]))
    offset += step * draw(st.integers(-3, 3))
    return [max(0, min(offset, length - size)), shape, _strides(shape)]


def _view(draw, shape, length):
    """Draw a view: in C order, with gaps, with elements that share memory, or transposed."""
    strides = _strides(shape)
    factor = draw(st.sampled_from([1, 1, 2, 3, 0]))
    transposed = _strides(shape[::-1])[::-1]
    strides = transposed if draw(st.booleans()) else [factor * stride for stride in strides]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    return [draw(st.integers(0, max(0, length - 1 - last))), shape, strides]


def _strides(shape):
    """Return the strides of an array in C order."""
    return [math.prod(shape[k + 1 :]) for k in range(len(shape))]
