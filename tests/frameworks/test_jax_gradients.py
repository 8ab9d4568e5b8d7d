"""Gradients of ``crossreduce.jax.all_reduce``, and arrays that are unreduced over axes of an explicit mesh."""

import numpy as np
import pytest
from jax_programs import P, jax, spread
from pairs import each

import crossreduce as cr
from crossreduce.jax import all_reduce

jnp, lax = jax.numpy, jax.lax


def transformed(kind, reduce):
    """Return a function of one device's array that differentiates through ``reduce``."""

    def loss(x):
        return (reduce(jnp.sin(x)) ** 3).sum()

    def scanned(x):
        step = jax.checkpoint(lambda total, _: (jnp.sin(reduce(x * total / 9)), None))
        return (lax.scan(step, reduce(x), None, length=2)[0] ** 3).sum()

    return {
        "grad": jax.grad(loss),
        "jvp": lambda x: jax.jvp(reduce, (x,), (jnp.cos(x),))[1],
        "vjp": lambda x: jax.vjp(reduce, x)[1](reduce(x))[0],
        "hessian": jax.hessian(loss),
        "scan of remat": jax.grad(scanned),
        "vmap": jax.vmap(jax.grad(loss)),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "check"), each(["grad", "jvp", "vjp", "hessian", "scan of remat", "vmap"], [True, False, False, True])
)
def test_gradients_are_those_of_psum(kind, check):
    """Inside shard_map, every transformation gives the same as with lax.psum or lax.pmean, for any check_vma."""
    x = np.random.default_rng(3).standard_normal((3, 2, 3)).astype("float32")
    is_replicated = kind == "jvp"  # then the value is the same on all devices

    def own(x):
        found = []
        for op, theirs, algorithms in (("sum", lax.psum, ("auto", "ring")), ("mean", lax.pmean, ("one_shot",))):
            right = transformed(kind, lambda x, f=theirs: f(x, "d"))(x)
            for algorithm in algorithms:
                ours = transformed(kind, lambda x, a=algorithm, op=op: all_reduce(x, "d", op, algorithm=a))(x)
                found.append((ours, right))
        return found if is_replicated else jax.tree.map(lambda x: x[None], found)

    for ours, theirs in jax.jit(spread(own, 3, check, P() if is_replicated else P("d")))(x):
        scale = np.abs(theirs).max()
        assert scale > 0
        # Both differ from the exact result by fewer than 64 roundings: of a few sums over 3 devices, powers and sines.
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=64 * 2.0**-24 * float(scale))


@pytest.mark.parametrize(
    ("op", "algorithm", "check"), [("min", "auto", True), ("product", "ring", True), ("max", "ring", False)]
)
def test_gradients_of_extremes_and_products(op, algorithm, check):
    """The gradients are those of jnp's reductions of the stacked arrays, also for equal extremes and zero factors."""
    x = np.random.default_rng(5).integers(-2, 3, (3, 20)).astype("float32")
    plain = {"min": jnp.min, "max": jnp.max, "product": jnp.prod}[op]
    weights = jnp.arange(1.0, 21.0)
    run = spread(lambda x: all_reduce(x, "d", op, algorithm=algorithm), 3, check)
    ours = jax.jit(jax.grad(lambda x: (weights * run(x)).sum()))(x)
    theirs = jax.grad(lambda x: (weights * plain(x, axis=0)).sum())(x)
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2.0**-20)
    assert (x == 0).any(0).sum() > 3  # some products have zero factors


def explicitly(function, before, out=None):
    """Run ``before`` and then ``function`` on each device of an explicit 2 x 2 mesh, and return all results.

    The arrays of the four devices are [0, 1], [2, 3], [4, 5] and [6, 7].
    """
    axes = jax.make_mesh((2, 2), ("d", "e"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(axes):
        x = jax.sharding.reshard(jnp.arange(8.0), P(("d", "e")))
        specs = {"in_specs": P(("d", "e")), "out_specs": P() if out is None else out}
        own = jax.shard_map(lambda x: function(before(x)), **specs)
        return [np.asarray(shard.data).tolist() for shard in jax.jit(own)(x).addressable_shards]


def unreduced(*axes):
    """Return a function that declares an array unreduced over some axes: a part of a sum."""
    return lambda x: lax.pcast(x, axes, to="unreduced")


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_unreduced_arrays(algorithm):
    """Arrays that are unreduced over some axes are reduced over all given axes, alone and beside other leaves."""

    def ours(axes, op="sum"):
        return lambda x: all_reduce({"a": (x, 1.0)}, axes, op, algorithm=algorithm)["a"][0]

    both = ("d", "e")
    for before in (unreduced("d", "e"), unreduced("d"), unreduced("e"), lambda x: x):
        assert explicitly(ours(both), before) == [[12.0, 16.0]] * 4
    assert explicitly(ours(both, "mean"), unreduced("e")) == [[3.0, 4.0]] * 4
    before, still = unreduced("d"), P(unreduced={"d"})  # the result is still unreduced over the other axis
    assert explicitly(ours("e"), before, still) == explicitly(lambda x: lax.psum(x, "e"), before, still)
    twice = explicitly(ours(both), lambda x: lax.psum(unreduced("d")(x), "e"))  # a replicated array counts per device
    assert twice == [[24.0, 32.0]] * 4
    # In float16 the sum of four 30000s overflows, but not their mean.
    half = explicitly(ours(both, "mean"), lambda x: unreduced("d", "e")((x * 0 + 30000).astype("float16")))
    assert half == [[30000.0] * 2] * 4
    for op, axes in (("max", both), ("min", "d"), ("product", "e"), ("mean", "e")):  # not defined for parts of a sum
        with pytest.raises(cr.UnsupportedError, match=rf"(?s)leaf x: the {op} over .*part of a sum.*psum over 'd'"):
            explicitly(lambda x, op=op, axes=axes: all_reduce(x, axes, op), unreduced("d"))
