"""``crossreduce.jax.all_reduce`` inside JAX programs: its results and the collectives that it runs."""

import logging
import re
from functools import partial

import numpy as np
import oracle
import pytest
import strategies
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax_programs import DTYPES, P, draw, jax, mesh, same_everywhere, spread
from pairs import each

import crossreduce as cr
from crossreduce.jax import all_reduce

jnp, lax = jax.numpy, jax.lax

ALGORITHMS = (*strategies.NAMED, "auto")
PAIRS = r"source_target_pairs = dense<(\[\[.*?\]\])>"
# LINE links four devices in a line. SLOW links all pairs of four devices, but the link of the first two is slow.
LINE = cr.Topology.from_matrix([[int(abs(a - b) == 1) for b in range(4)] for a in range(4)])
SLOW = cr.Topology.from_matrix([[(a != b) * (1 if a + b == 1 else 9) for b in range(4)] for a in range(4)])


@pytest.mark.parametrize(("n", "algorithm"), each([8, 3, 5, 9, 2, 6, 1], ALGORITHMS))
def test_every_device_gets_every_contribution_once(n, algorithm):
    """On 1 to 9 devices, every algorithm gives exact sums of (n + 1) ** device on every device. Replicated values are
    added once per device, as by psum."""
    rng = np.random.default_rng(n)
    contributions = np.stack(oracle.contributions(n, "int32", (11,)))
    floats = rng.standard_normal((n, 3, 7)).astype("float32")
    run = jax.jit(spread(lambda x: all_reduce({**x, "same": 2}, "d", algorithm=algorithm), n, check=n % 2 == 0))
    got = run({"digits": contributions, "floats": [floats]})
    assert int(got["same"]) == 2 * n
    assert (same_everywhere(got["digits"]) == contributions.sum(0)).all()
    oracle.check(same_everywhere(got["floats"][0]), "sum", list(floats))
    if algorithm != "auto":  # the engine ``host`` computes the same bits along the same schedule
        value = cr.PerReplica(list(floats))
        plain = cr.AllReduceCrossDeviceOps(algorithm).reduce("sum", value, value)
        assert same_everywhere(got["floats"][0]).tobytes() == plain[0].tobytes()


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_every_op_over_every_dtype(algorithm):
    """Each op is correct over each dtype that it is defined for. Means of integers are float32."""
    rng = np.random.default_rng(7)
    every = {dtype: draw(rng, dtype, (3, 10)) for dtype in DTYPES}
    xs = {op: {d: x for d, x in every.items() if op in strategies.ops_for(d)} for op in strategies.OPS}

    def own(xs):
        return {op: all_reduce(x, "d", op, algorithm=algorithm) for op, x in xs.items()}

    got = jax.jit(spread(own, 3, algorithm == "auto"))(xs)
    for op, row in got.items():
        for dtype, result in row.items():
            x, y = every[dtype], same_everywhere(result)
            if dtype in strategies.INTEGERS and op == "mean":
                # Without x64, means of integers accumulate in float32: three roundings of the sum, one of the quotient.
                wide = x.astype("float64")
                assert y.dtype == "float32"
                assert (np.abs(y - wide.mean(0)) <= 4 * 2.0**-24 * np.abs(wide).sum(0)).all()
            else:
                oracle.check(y, op, list(x), result=dtype)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_half_types_round_once_and_nan_propagates(algorithm):
    """Two 40000s in float16 have the mean 40000. Means, minima and maxima of NaN, infinities and -0 are NumPy's."""
    nan, inf = np.nan, np.inf
    xs = np.array([[40000, nan, -inf, 1, -0.0, inf], [40000, 1, 2, nan, 0.0, 3]])
    want = {
        "mean": [40000, nan, -inf, nan, 0, inf],
        "min": [40000, nan, -inf, nan, 0, 3],
        "max": [40000, nan, 2, nan, 0, inf],
    }
    kinds = [oracle.dtype_of(dtype) for dtype in ("float16", "bfloat16", "float32")]

    def own(x):
        return {op: all_reduce(x, "d", op, algorithm=algorithm) for op in want}

    given = [xs.astype(kind) for kind in kinds]
    by_xla = jax.tree.map(lambda x: x[0], jax.vmap(own, axis_name="d")(given))
    for found in (jax.tree.map(same_everywhere, jax.jit(spread(own, 2))(given)), by_xla):
        for op, row in found.items():
            for x, kind in zip(row, kinds, strict=True):
                expected = np.array(want[op]).astype(kind)
                np.testing.assert_array_equal(np.asarray(x).astype("float32"), expected.astype("float32"))


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling"])
def test_every_device_has_the_same_nan(algorithm):
    """All devices combine in the same order, so that even the payload of the sum of two different NaNs agrees."""
    n = 4
    bits = np.uint32(0x7FC00001) + np.arange(n, dtype="uint32")[:, None]  # NaNs with another payload on each device
    x = np.repeat(bits, 12, 1).view("float32")
    x[:, :6] = np.where(np.arange(n)[:, None] % 2, 0.0, -0.0)
    run = jax.jit(spread(lambda x: [all_reduce(x, "d", op, algorithm=algorithm) for op in ("sum", "max")], n))
    for got in run(x):  # the first 6 elements are zeros of both signs
        assert np.isnan(same_everywhere(got)).tolist() == [False] * 6 + [True] * 6


def test_trees_keep_their_structure():
    """The result has the structure of the given tree, which has Nones, numbers, empty, 0-d and NumPy arrays."""

    def own(x):
        tree = {"none": None, "number": 2, "float": 0.5, "numpy": np.float32([1, 2]), "x": [x, (x.sum(),)]}
        return all_reduce({**tree, "empty": jnp.zeros((0, 3)), "int": x.astype(int), "half": x.astype("float16")}, "d")

    for check in (True, False):
        x = np.arange(6.0, dtype="float32").reshape(3, 2)
        got = jax.jit(spread(own, 3, check))(x)
        assert got["none"] is None
        assert (got["number"].tolist(), got["float"].tolist(), got["numpy"].tolist()) == (6, 1.5, [3, 6])
        assert (got["x"][0].tolist(), got["x"][1][0].tolist(), got["int"].tolist()) == ([6, 9], 15, [6, 9])
        assert (got["empty"].shape, got["half"].dtype, got["half"].tolist()) == ((0, 3), "float16", [6, 9])
    assert jax.vmap(lambda x: x + all_reduce({}, "d").get("a", 0), axis_name="d")(np.ones(2)).tolist() == [1, 1]


@examples(6)
@given(st.data())
def test_plans_for_any_topology(data):
    """On any topology, with uneven shares and routes, all devices get the same sum of all contributions."""
    n, algorithm = data.draw(st.integers(2, 5)), data.draw(st.sampled_from(["forest", "hierarchical_copy", "auto"]))
    topology = data.draw(strategies.wired(strategies.names(n), both_ways=False))
    x = np.stack(oracle.contributions(n, "int32", (23,)))
    got = jax.vmap(lambda x: all_reduce(x, "d", topology=topology, algorithm=algorithm), axis_name="d")(x)
    assert (np.asarray(got) == x.sum(0)).all()


@pytest.mark.parametrize("check", [True, False])
def test_slices_are_concatenated(check):
    """The slices of IndexedSlices and BCOO are concatenated in the order of the devices. A mean divides the values."""
    from jax.experimental.sparse import BCOO

    def own(x):
        rows = jnp.arange(2) + lax.axis_index("d")
        slices = cr.IndexedSlices(x, rows, (4, 3))
        return all_reduce({"slices": slices, "bcoo": BCOO((x, rows[:, None]), shape=(4, 3)), "dense": x}, "d", "mean")

    x = np.random.default_rng(0).standard_normal((2, 2, 3)).astype("float32")
    got = jax.jit(spread(own, 2, check))(x)
    slices, bcoo = got["slices"], got["bcoo"]
    assert type(slices) is cr.IndexedSlices
    assert (slices.indices.tolist(), slices.dense_shape) == ([0, 1, 1, 2], (4, 3))
    np.testing.assert_array_equal(np.asarray(slices.values), x.reshape(4, 3) / 2)
    expected = np.zeros((4, 3), "float32")
    np.add.at(expected, [0, 1, 1, 2], x.reshape(4, 3) / 2)
    np.testing.assert_array_equal(np.asarray(bcoo.todense()), expected)
    np.testing.assert_array_equal(np.asarray(got["dense"]), x.sum(0) / 2)
    empty = jax.jit(spread(lambda x: all_reduce(cr.IndexedSlices(x, jnp.arange(2)), "d"), 2, check))(x[:, :, :0])
    assert (empty.values.shape, empty.indices.tolist()) == ((4, 0), [0, 1, 0, 1])
    with pytest.raises(cr.UnsupportedError, match="the max of sparse values is not defined"):
        jax.vmap(lambda x: all_reduce(cr.IndexedSlices(x, jnp.arange(2)), "d", "max"), axis_name="d")(x)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_every_transformation_with_named_axes(algorithm):
    """all_reduce runs under shard_map without jit, pmap, vmap of another axis, and vmap of the named axis. The current
    mesh may have an axis of the same name as that of vmap."""
    x = np.random.default_rng(1).integers(-9, 9, (3, 4)).astype("float32")

    def own(x):
        return all_reduce(x, "d", algorithm=algorithm)

    for run in (
        spread(own, 3),
        jax.pmap(own, axis_name="d", devices=jax.devices("cpu")[:3]),
        jax.vmap(own, axis_name="d"),
        jax.jit(spread(jax.vmap(own), 3)),
    ):
        got = np.asarray(run(x))
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum(0), got.shape))
    with jax.set_mesh(mesh((3,))):
        assert jax.vmap(own, axis_name="d")(x).tolist() == [x.sum(0).tolist()] * 3


def test_several_axes_of_vmap():
    """Over several axes of vmap, XLA's all-reduce runs. A schedule is rejected, since JAX would run it incorrectly."""
    x = np.arange(6.0, dtype="float32").reshape(2, 3)

    def both(**how):
        return jax.vmap(jax.vmap(lambda x: all_reduce(x, ("a", "b"), **how), axis_name="b"), axis_name="a")(x)

    assert both().tolist() == [[15] * 3] * 2
    for how in ({"algorithm": "ring"}, {"op": "product"}):
        words = r"(?s)no schedule can run over several axes if one belongs to vmap.*axes 'a', 'b'"
        with pytest.raises(cr.UnsupportedError, match=words):
            both(**how)


@pytest.mark.parametrize(("algorithm", "check"), [("ring", False), ("hierarchical_copy", True)])
def test_meshes_of_several_axes(algorithm, check):
    """all_reduce runs over one or several axes of a mesh, in any order. Results still vary over the other axes."""
    names = ("hosts", "devices", "other")
    x = np.random.default_rng(2).integers(-9, 9, (2, 2, 2, 5)).astype("float32")

    def own(x):
        x = x[0, 0]
        mean, kept = lax.psum(x, "other"), all_reduce([x, x[0] * 0 + 1], "devices", algorithm=algorithm)
        both = all_reduce({"all": mean, "own": x}, ("devices", "hosts"), algorithm=algorithm)
        return both["all"], both["own"][None], kept[0][None, None]

    out = (P(), P("other"), P("hosts", "other"))
    run = jax.shard_map(own, mesh=mesh((2, 2, 2), names), in_specs=P(*names), out_specs=out, check_vma=check)
    everything, over_two, over_one = jax.jit(run)(x)
    np.testing.assert_array_equal(np.asarray(everything)[0], x.sum((0, 1, 2)))
    np.testing.assert_array_equal(np.asarray(over_two)[:, 0], x.sum((0, 1)))
    np.testing.assert_array_equal(np.asarray(over_one)[:, :, 0], x.sum(1))


def lowered(function, *xs):
    return jax.jit(function).trace(*xs).lower(lowering_platforms=("cuda",)).as_text()


def collectives(function, n, *xs, check=True):
    """Count the collectives in the program that XLA compiles for GPUs. On the CPU, the kernels may run instead."""
    text = lowered(spread(function, n, check), *xs)
    found = re.findall(r"stablehlo\.(all_reduce|collective_permute|all_gather|all_to_all|reduce_scatter)", text)
    return {name: found.count(name) for name in set(found)}


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving_doubling", "hierarchical_copy", "one_device", "auto"])
def test_arrays_that_another_explicit_axis_divides_or_reduces(algorithm):
    """A schedule gives psum's result for an array that counts as reduced, and under vmap over a divided axis."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    rows = jnp.arange(1.0, 25.0).reshape(2, 4, 3) ** 2
    reduce = partial(all_reduce, axis_name="x", algorithm=algorithm)

    def over_reduced(x):
        x = jax.reshard(x, NamedSharding(mesh, P("x", reduced={"y"})))
        spec, kept = P("x", reduced={"y"}), P(None, reduced={"y"})
        return jax.shard_map(reduce, in_specs=spec, out_specs=kept, mesh=mesh)(x)

    x = jax.device_put(rows, NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(jax.jit(over_reduced)(x), rows.sum(0, keepdims=True))
    divided = jax.device_put(jnp.moveaxis(rows, 0, 1), NamedSharding(mesh, P("y", "x")))
    one = jax.shard_map(reduce, in_specs=P("x"), out_specs=P(None), mesh=mesh, axis_names={"x"})
    with jax.set_mesh(mesh):
        found = jax.jit(jax.vmap(one))(divided)
        twice = jax.jit(jax.vmap(jax.vmap(one), 3, 0))(jnp.stack([divided, divided * 2], 3))
    np.testing.assert_array_equal(found[:, 0], rows.sum(0))
    np.testing.assert_array_equal(twice[1, :, 0], 2 * rows.sum(0))


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_small_leaves_share_a_collective(op):
    """160 small leaves take one collective, a second dtype one more, and large leaves one each, without copies."""
    small, large = [np.ones((2, 256), "float32")] * 160, [np.ones((2, 1 << 14), "float32")] * 3
    other = [np.ones((2, 3), "int32")] * 9

    def own(*xs):
        return all_reduce(xs, "d", op)

    assert collectives(own, 2, *small) == {"all_reduce": 1}
    assert collectives(own, 2, *small, *other) == {"all_reduce": 2}
    if op == "sum":
        assert collectives(own, 2, *small * 4) == {"all_reduce": 3}  # 640 leaves, 256 in each at most
    assert collectives(own, 2, *small, *large) == {"all_reduce": 4}
    text = lowered(spread(own, 2), *large)
    assert "concatenate" not in text


def test_a_schedule_takes_as_few_permutations_as_possible():
    """For any leaves together, a ring of n takes 2(n - 1) permutations, halving_doubling 2 log2(n), one_shot n - 1."""
    for algorithm, n, count in (("ring", 5, 8), ("halving_doubling", 8, 6), ("one_shot", 5, 4)):
        xs = [np.ones((n, size), "float32") for size in (5, 64, 1 << 14)]
        found = collectives(lambda *xs, a=algorithm: all_reduce(xs, "d", algorithm=a), n, *xs, check=n == 8)
        assert found == {"collective_permute": count}


def test_the_topology_selects_the_collective():
    """If all links are equal, XLA's collective runs, else a plan for the topology."""
    x = np.arange(4.0, dtype="float32")
    for topology, xla in ((cr.Topology.full_mesh(4), True), (cr.Topology.star(4), True), (LINE, False), (SLOW, False)):
        run = spread(lambda x, topology=topology: all_reduce(x, "d", topology=topology), 4)
        text = lowered(run, x)
        assert ("all_reduce" in text, "collective_permute" in text) == (xla, not xla)
        if not xla:
            assert float(jax.jit(run)(x)) == 6
    # Only neighbours exchange messages: no message passes through another device.
    text = jax.jit(spread(lambda x: all_reduce(x, "d", topology=LINE, algorithm="forest"), 4)).lower(x).as_text()
    found = re.findall(r"\[(\d+), (\d+)\]", " ".join(re.findall(PAIRS, text)))
    assert {abs(int(src) - int(dst)) for src, dst in found} == {1}
    product = collectives(lambda x: all_reduce(x, "d", "product"), 4, x)
    assert product == {"collective_permute": 4}  # JAX has no collective for products
    machine = cr.Topology.machine("dgx-1v")  # some pairs of GPUs have no link
    for n, how in ((8, {"algorithm": "auto", "topology": machine}), (4, {"algorithm": "forest", "num_packs": 3})):
        x = np.stack(oracle.contributions(n, "int32", (100,)))
        got = jax.jit(spread(lambda x, how=how: all_reduce(x, "d", **how), n))(x)
        assert (same_everywhere(got) == x.sum(0)).all()


def test_plans_of_several_axes_are_logged(caplog):
    """hierarchical_copy over two axes reduces over the last one first: the first permutation stays within hosts.

    Each new plan is logged once at INFO, also if it is traced again.
    """
    run = jax.shard_map(
        lambda x: all_reduce(x[0], ("hosts", "devices"), algorithm="hierarchical_copy"),
        mesh=mesh((3, 2), ("hosts", "devices")), in_specs=P(("hosts", "devices")), out_specs=P(),
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "crossreduce"):
        text = jax.jit(run).lower(np.ones((6, 3), "float32")).as_text()
        for _ in range(2):
            jax.vmap(lambda x: all_reduce(x, "once"), axis_name="once")(np.ones(3))
            jax.vmap(lambda x: all_reduce(x, "once", algorithm="ring"), axis_name="once")(np.ones(3))
    assert re.findall(PAIRS, text)[0] == "[[1, 0], [3, 2], [5, 4]]"
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    levels, by_xla, ring = caplog.messages
    head = "new plan: all_reduce hierarchical_copy: 6 devices"
    for words in (head, "6 permutations", "axes 'hosts', 'devices' of 6"):
        assert words in levels
    assert "XLA's own all-reduce; over axis 'once' of 3" in by_xla
    assert "ring: 3 devices, 3 chunks, 4 rounds, 12 steps, 4 permutations" in ring


def rejected(error, match, leaf=1.0, axis_name="d", **how):
    """Assert that a call with the options ``how``, and with ``leaf`` in its tree, raises an error."""

    def own(x):
        return all_reduce({"w": [x, leaf]}, axis_name, **how)

    with pytest.raises(error, match=match):
        jax.vmap(own, axis_name="d")(np.ones(3, "float32"))


@pytest.mark.parametrize(
    ("words", "how"),
    {
        "axis_name must be the name of one axis, or of several different axes": {"axis_name": ()},
        "of several different axes": {"axis_name": ("d", "d")},
        "this is not a known reduction": {"op": "average"},
        "no such algorithm": {"algorithm": "rings"},
        "num_packs must be a whole number": {"num_packs": -1},
        "there is no machine of this name": {"topology": "ring"},
        "this is not a topology": {"topology": 4},
        r"(?s)one device for each position.*4 devices; 3 positions along axis 'd'": {"topology": cr.Topology.ring(4)},
        "cpu:2": {"topology": cr.Topology.from_matrix([[0, 1, 0], [1, 0, 0], [0, 0, 0]])},
    }.items(),
)
def test_invalid_arguments_are_rejected_while_tracing(words, how):
    """An error is raised while the function is traced. Its message has the argument and a remedy."""
    rejected(ValueError, words, **how)


def test_an_axis_that_does_not_exist():
    """An unknown axis raises an AxisError: a NameError, as in JAX, and a ValueError, as elsewhere in this library."""
    for axis in ("other", ("d", "other"), None, ["d", {}], 1.5):
        for kind in (NameError, ValueError, cr.ReductionError):
            rejected(kind, r"(?s)not mapped over every axis in axis_name.*jax\.shard_map", axis_name=axis)


def test_invalid_leaves_are_reported_with_their_path():
    """An error about a leaf (no array, a PRNG key, a dtype without this op) has the path of the leaf."""
    odd = (2**70, np.ma.masked_array([1.0]), jax.ShapeDtypeStruct((2,), "float32"))
    for leaf in ("text", object(), np.array(["a"]), np.array([1], "datetime64[s]"), {1, 2}, *odd):
        rejected(TypeError, r"leaf x\['w'\]\[1\]: JAX cannot convert this to an array", leaf)
    rejected(TypeError, r"\[1\]: arrays of PRNG keys cannot be reduced", jax.random.key(0))
    rejected(TypeError, r"\[1\]: arrays of dtype float8_e4m3fn cannot be", jnp.zeros(2, jnp.float8_e4m3fn))
    rejected(TypeError, r"\[1\]: the sum of bools is not defined", True)
    rejected(TypeError, r"\[1\]: the max of complex numbers is not defined", 1j, op="max")
    (size,) = jax.export.symbolic_shape("b")  # a size that an export leaves open
    traced = jax.jit(spread(lambda x: all_reduce({"w": x}, "d"), 4))
    with pytest.raises(cr.UnsupportedError, match=r"(?s)leaf x\['w'\]: arrays of symbolic size.*given: \(b,\)"):
        jax.export.export(traced)(jax.ShapeDtypeStruct((4, size), jnp.float32))
