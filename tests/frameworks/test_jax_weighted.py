"""``crossreduce.jax.all_reduce(..., weight=)``, and its warning about leaves that do not vary over the axis."""

import warnings

import numpy as np
import pytest
from jax_programs import P, draw, jax, mesh, same_everywhere, spread

from crossreduce import ArgumentError, IndexedSlices, Topology, UnsupportedError
from crossreduce.jax import all_reduce

jnp, lax = jax.numpy, jax.lax
WEIGHTS = np.float32([3, 0, 1.5, 2])


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_weighted_means(check, algorithm):
    """The results are sum(w x) / sum(w) in the dtype of a mean; a device of weight 0 does not take part."""
    rng = np.random.default_rng(5)
    xs = {dtype: draw(rng, dtype, (4, 3, 2)) for dtype in ("float32", "bfloat16", "float16", "complex64", "int16")}
    xs = {dtype: x.copy() for dtype, x in xs.items()}
    for x in xs.values():
        if x.dtype.kind != "i":
            x[1] = np.nan
    run = spread(lambda x, w: all_reduce(x, "d", "mean", algorithm=algorithm, weight=w), 4, check)
    got = jax.jit(run)(xs, WEIGHTS)
    plain = jax.jit(spread(lambda x: all_reduce(x, "d", "mean"), 4, check))(xs)
    for dtype, x in xs.items():
        found = same_everywhere(got[dtype])
        assert found.dtype == plain[dtype].dtype
        kept = [0, 2, 3]
        wide = x[kept].astype("complex128" if dtype == "complex64" else "float64")
        right = np.tensordot(WEIGHTS[kept].astype("float64"), wide, 1) / WEIGHTS.sum()
        unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-21)
        assert (abs(found.astype(wide.dtype) - right) <= unit * abs(wide).sum(0)).all(), dtype


def test_large_leaves_do_not_overflow():
    """The product of a leaf and its weight need not be finite."""
    found = spread(lambda x: all_reduce(x, "d", "mean", weight=1000.0), 2)(np.float32([1e38, 1e38]))
    assert np.allclose(found, 1e38)


def test_gradients_by_leaves_and_weights():
    """Derivatives by the leaves and by the weights are those of the formula, also where the weight is 0."""
    x = np.float32([[1, 2], [np.nan, np.inf], [3, 5], [4, -1]])

    def formula(x, w):
        safe = jnp.where(w[:, None] == 0, 0, x)
        return ((safe * w[:, None]).sum(0) / w.sum()) @ jnp.float32([1, 10])

    def ours(x, w):
        own = spread(lambda x, w: all_reduce(x, "d", "mean", weight=w), 4)
        return own(x, w) @ jnp.float32([1, 10])

    right, got = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, WEIGHTS) for f in (formula, ours))
    for a, b in zip(right, got, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-5, atol=1e-6)
    tangents = np.ones_like(x), np.float32([1, 2, 3, 4])
    right, got = (jax.jvp(f, (x, WEIGHTS), tangents) for f in (formula, ours))
    np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=1e-5)


def test_sparse_leaves_numbers_and_places():
    """Slices are weighted; numbers and static weights are accepted; topologies and ``vmap`` are used."""

    def own(values, indices, w):
        got = all_reduce({"s": IndexedSlices(values, indices), "n": 2}, "d", "mean", weight=w)
        return got["s"].values, got["s"].indices, got["n"]

    out = (P(), P(), P())
    rows = np.float32([[[2]], [[6]]]), np.int32([[1], [1]])  # one slice per device
    values, indices, number = spread(own, 2, out=out)(*rows, np.float32([1, 3]))
    assert same_everywhere(values).reshape(-1).tolist() == [0.5, 4.5]
    assert indices.size == 2
    assert float(number) == 2
    mesh_of_two = Topology.full_mesh(2, gb_per_s=5)
    run = spread(lambda x: all_reduce(x, "d", "mean", mesh_of_two, "ring", weight=1 + lax.axis_index("d")), 2)
    assert float(run(np.float32([3, 9]))) == 7
    both = jax.vmap(lambda x, w: all_reduce(x, "v", "mean", weight=w), axis_name="v")(
        jnp.float32([3, 9]), jnp.int32([1, 2])
    )
    assert both.tolist() == [7, 7]
    assert spread(lambda x: all_reduce(x, "d", "mean", weight=5), 2)(np.float32([3, 9])).tolist() == 6


@pytest.mark.parametrize(
    ("weight", "options", "kind", "words"),
    [
        (-1, {}, ArgumentError, "0 or more"),
        (float("nan"), {}, ArgumentError, "0 or more"),
        (np.ones(2), {}, ArgumentError, "weight must be"),
        (2, {"op": "sum"}, ArgumentError, "only a mean"),
        (2, {"exact": True}, UnsupportedError, "cannot be exact"),
    ],
)
def test_invalid_weights(weight, options, kind, words):
    """Weights that are known when the program is traced are checked then."""
    options = {"op": "mean"} | options
    with pytest.raises(kind, match=words):
        spread(lambda x: all_reduce(x, "d", weight=weight, **options), 2)(np.float32([3, 9]))


def gradients(vary, weight=None):
    """Return the program of README: the gradients of replicated parameters, reduced over the axis."""

    def own(params, x):
        params = lax.pcast(params, "d", to="varying") if vary else params
        grads = jax.grad(lambda p: (p * x[0]).sum())(params)
        return all_reduce(grads, "d", "mean", weight=weight)

    return jax.shard_map(own, mesh=mesh(4), in_specs=(P(), P("d")), out_specs=P())


def test_a_leaf_that_does_not_vary_is_a_warning():
    """The gradient of replicated parameters is reduced already: one warning has the remedy, which gives the mean."""
    x = np.float32([1, 2, 3, 6]).reshape(4, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        wrong = [jax.jit(gradients(False, weight))(jnp.float32(1), x) for weight in (None, None, 2.0)]
    assert [float(each) for each in wrong] == [12, 12, 12]  # four times the mean
    warning, *others = caught
    assert len(others) <= 1  # the weighted mean has its own
    assert "is the same on all devices along 'd'" in str(warning.message)
    assert "jax.lax.pcast(params, ('d',), to=\"varying\")" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(jax.jit(gradients(True))(jnp.float32(1), x)) == 3
        counted = jax.shard_map(lambda: all_reduce((1, 2.0), "d"), mesh=mesh(4), in_specs=(), out_specs=P())()
        assert [float(each) for each in counted] == [4, 8]  # numbers are meant to be counted
        unchecked = spread(lambda x: all_reduce(jnp.float32(2), "d") + 0 * x, 2, check=False)
        assert unchecked(np.float32([3, 9])).tolist() == 4
