"""``crossreduce.jax.all_reduce`` on the CPU devices of one process: a custom call of XLA that runs the kernels."""

import itertools
import os
import re
import subprocess
import sys

import budget
import numpy as np
import oracle
import pytest
import strategies
from exact_cases import UNSIGNED, cancelling, exact_sums, subnormal, terms_of, wide
from jax_programs import DTYPES, P, draw, jax, mesh, spread
from paths import program

import crossreduce as cr
from crossreduce import kernels
from crossreduce.engines.jax import in_process
from crossreduce.errors import ArgumentError, UnsupportedError
from crossreduce.jax import all_reduce

jnp, lax = jax.numpy, jax.lax
CALL = "custom_call @crossreduce_all_reduce"


def calls(function, *xs):
    """Count the custom calls of a jitted function."""
    return function.lower(*xs).as_text().count(CALL)


def test_the_bits_are_those_of_the_kernels():
    """For every dtype and op, all devices get the bits of the host engine, which combines in the order of positions."""
    rng = np.random.default_rng(0)
    every = {dtype: draw(rng, dtype, (8, 333)) for dtype in DTYPES}
    xs = {op: {d: x for d, x in every.items() if op in strategies.ops_for(d)} for op in strategies.OPS}
    run = jax.jit(spread(lambda xs: {op: all_reduce(x, "d", op) for op, x in xs.items()}, 8)).lower(xs)
    assert run.as_text().count(CALL) == sum(map(len, xs.values()))
    got = run.compile()(xs)
    values = {dtype: cr.PerReplica(list(map(jax.device_put, x, jax.devices("cpu")))) for dtype, x in every.items()}
    one = cr.AllReduceCrossDeviceOps("one_device")
    for op, row in got.items():
        for dtype, result in row.items():
            want = one.reduce(op, values[dtype], values[dtype])
            for shard in result.addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.asarray(want[0]).tobytes(), (op, dtype)


def test_groups_of_positions_meet_separately():
    """Over any axes of a mesh, in any order, each group of positions gets the sum of its own arrays."""
    names, x = ("a", "b", "c"), np.stack(oracle.contributions(8, "int32", (5,))).reshape(2, 2, 2, 5)
    every = [axes for count in (1, 2, 3) for axes in itertools.permutations(names, count)]
    for check_vma, some in ((True, every[::2]), (False, every[1::2])):
        run = jax.shard_map(
            lambda x, some=some: [all_reduce(x, axes) for axes in some],
            mesh=mesh((2, 2, 2), names), in_specs=P(*names),
            out_specs=[P(*(None if name in axes else name for name in names)) for axes in some], check_vma=check_vma,
        )  # fmt: skip
        assert calls(jax.jit(run), x) == len(some)
        for axes, got in zip(some, jax.jit(run)(x), strict=True):
            np.testing.assert_array_equal(np.asarray(got), x.sum(tuple(map(names.index, axes)), keepdims=True))


def pointers(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


@pytest.mark.parametrize("how", ["squeezed", "pmap", "161 leaves"])
def test_a_donated_array_is_reduced_in_place(how):
    """The result of a donated array has its memory on each device, and the program does not copy anything."""
    sharding = jax.NamedSharding(mesh(8), P("d"))
    shapes = [(8, 1 + 7 * (k % 3)) for k in range(161)] if how == "161 leaves" else [(8, 5000)]
    xs = [jax.device_put(np.full(shape, 2, "float32"), sharding) + 1 for shape in shapes]
    run = {
        "squeezed": lambda x: jax.tree.map(lambda y: y[None], all_reduce([y[0] for y in x], "d")),
        "pmap": lambda x: all_reduce(x, "d"),
        "161 leaves": lambda x: all_reduce(x, "d", "mean"),
    }[how]
    if how == "pmap":
        run = jax.pmap(run, axis_name="d", donate_argnums=0, devices=jax.devices("cpu")[:8])
    else:
        over = jax.shard_map(run, mesh=mesh(8), in_specs=P("d"), out_specs=P("d"), check_vma=False)
        run = jax.jit(over, donate_argnums=0)
    before, lowered = list(map(pointers, xs)), run.lower(xs)
    assert lowered.as_text().count(CALL) == 1
    compiled = lowered.compile()
    assert not re.search(r" copy\(", compiled.as_text())
    results = compiled(xs)
    assert list(map(pointers, results)) == before
    assert all(x.is_deleted() for x in xs)
    want = 3 if how == "161 leaves" else 24  # the mean or the sum of eight 3s
    assert all((np.asarray(x) == want).all() for x in results)


def test_other_arguments_are_not_copied_or_written():
    """An argument that is not donated keeps its value, and no copy is made of it."""
    over = jax.shard_map(
        lambda x, y: (all_reduce(x, "d"), y + 1), mesh=mesh(8), in_specs=P("d"), out_specs=P("d"), check_vma=False
    )
    run = jax.jit(over, donate_argnums=1)  # donated arguments are recognized by their type, which the first lacks
    x, y = jnp.ones((8, 300)), jnp.ones((8, 7), "int32")
    compiled = run.lower(x, y).compile()
    assert not re.search(r" copy\(", compiled.as_text())
    assert (np.asarray(compiled(x, y)[0]) == 8).all()
    assert (np.asarray(x) == 1).all()
    # A value that is used afterwards does not change either.
    after = jax.jit(spread(lambda x: (x * 2, all_reduce(x * 2, "d"))[::-1], 8, check=False, out=(P(), P("d"))))
    total, own = after(np.ones((8, 4), "float32"))
    assert (total.tolist(), set(np.asarray(own).tolist())) == ([16] * 4, {2})


def test_nothing_is_compiled_twice():
    """A jitted step is traced and compiled once, and equal programs have equal texts, so caches on disk find them.

    Two calls of one jitted function, and the calls of a loop, are not confused with each other.
    """
    traced = []
    inner = jax.jit(lambda x: all_reduce(x, "d"))

    def own(x):
        traced.append(1)
        loop, _ = lax.scan(lambda c, _: (c + all_reduce(x * c[0], "d"), None), jnp.ones_like(x), None, length=4)
        return inner(x) - inner(3 * x), loop

    x = np.arange(1.0, 9, dtype="float32")[:, None].repeat(3, 1)
    step = jax.jit(spread(own, 8, check=False))
    for _ in range(4):
        difference, loop = step(x)
        assert difference.tolist() == [-72] * 3
        assert loop.tolist() == [37.0**4] * 3
    assert (len(traced), step._cache_size()) == (1, 1)
    first, second = (jax.jit(spread(lambda x: all_reduce([x, x * 2], "d"), 8)).lower(x).as_text() for _ in range(2))
    assert first == second


def test_where_xla_reduces():
    """XLA's collectives run over axes that XLA partitions or vmap maps, in exports, and on devices of other kinds."""
    from jax import export

    x = np.arange(8.0, dtype="float32").reshape(8, 1)
    grid = mesh((4, 2), ("d", "auto"))
    specs = {"in_specs": P("d"), "out_specs": P(), "axis_names": {"d"}}
    partly = jax.jit(jax.shard_map(lambda x: all_reduce(x, "d"), mesh=grid, **specs))
    assert calls(partly, x) == 0
    assert np.asarray(partly(x)).ravel().tolist() == [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]
    assert calls(jax.jit(jax.vmap(lambda x: all_reduce(x, "v"), axis_name="v")), x) == 0
    over = jax.jit(spread(lambda x: all_reduce(x, "d"), 8))
    assert calls(over, x) == 1
    exported = export.export(over)(x)
    assert "all_reduce" in exported.mlir_module()
    assert CALL not in exported.mlir_module()
    assert "all_reduce" in over.trace(x).lower(lowering_platforms=("cuda",)).as_text().replace(CALL, "")
    assert calls(jax.jit(spread(lambda x: all_reduce(x, "d", algorithm="ring"), 8)), x) == 0


MOVED = """
import logging, sys, jax.extend
sys.modules["jax.extend.mlir"] = None
import crossreduce.jax
logging.basicConfig(level="INFO", stream=sys.stdout)
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
run = jax.shard_map(lambda x: crossreduce.jax.all_reduce(x, "d"), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P())
print(jax.jit(run)(jax.numpy.arange(2.0)))
"""


def test_a_version_of_jax_that_has_moved_its_parts():
    """If JAX lacks the classes with which the custom call is lowered, XLA's collectives run, and the log says why."""
    how = {"capture_output": True, "text": True, "check": True, "timeout": 120}
    ran = subprocess.run([sys.executable, "-c", MOVED], env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"}, **how)
    assert "JAX does not accept the custom call of the kernels (import of jax.extend.mlir halted" in ran.stdout
    assert ran.stdout.endswith("[1.]\n")


def test_a_device_that_does_not_arrive_is_named():
    """If some devices do not call all_reduce, the others raise an error that names them, and later programs run."""

    def own(x):
        return lax.cond(lax.axis_index("d") % 4 == 3, lambda x: x, lambda x: all_reduce(x, "d"), x)

    run = jax.jit(spread(own, 8, check=False, out=P("d")))
    every = jax.jit(spread(lambda x: all_reduce(x, "d"), 8, check=False))
    x = np.ones((8, 8), "float32")
    settings = kernels.instruction_set(), kernels.threads(), kernels.STREAMING_BYTES, kernels.THREADED_BYTES
    every(x)  # the first call of a process sets the limit
    kernels.native().xla_handlers(*settings, 0.8)  # seconds that devices wait for each other
    words = r"(?s)axis 'd': position 3, 7 did not arrive within 0.8 s.*given: position 0, 1, 2, 4, 5, 6 arrived, of 8"
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready(run(x))
    finally:
        kernels.native().xla_handlers(*settings, 40.0)
    assert every(x).tolist() == [8] * 8


def test_an_invalid_timeout_is_rejected(monkeypatch):
    """CROSSREDUCE_JAX_TIMEOUT must be a positive number. The error shows the value."""
    for text in ("0", "-1", "soon", "nan", "inf"):
        monkeypatch.setenv("CROSSREDUCE_JAX_TIMEOUT", text)
        with pytest.raises(ArgumentError, match=rf"(?s)CROSSREDUCE_JAX_TIMEOUT must be a positive number.*{text}"):
            in_process.limit_s()
    monkeypatch.setenv("CROSSREDUCE_JAX_TIMEOUT", "2.5")
    assert in_process.limit_s() == 2.5


@pytest.mark.parametrize("threads", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 8))])
def test_random_programs_end(threads):
    """Random programs that also use XLA's collectives end with right results, two at once, on any number of threads."""
    count = budget.count(20, least=2)
    environment = {**os.environ, "NPROC": str(threads), "PJRT_NPROC": str(threads), "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, str(program("jax_storm.py")), str(threads * 1000), str(count)]
    how = {"capture_output": True, "text": True, "check": False, "timeout": 120 + 6 * count}
    done = subprocess.run(command, env=environment, **how)
    assert (done.returncode, done.stdout) == (0, f"{count} programs\n"), done.stderr[-3000:]


def test_exact_sums_have_the_bits_of_rational_arithmetic(jax_):
    """With ``exact=True`` sums and means are correctly rounded, for any algorithm, also of subnormal numbers."""
    bits = {dtype: [terms_of(kind, 1, dtype, 8, 50) for kind in (cancelling, subnormal, wide)] for dtype in UNSIGNED}
    xs = {dtype: [x.view(oracle.dtype_of(dtype)) for x in each] for dtype, each in bits.items()}
    hows = {"sum": "auto", "mean": "ring"}

    def own(xs):
        return {op: all_reduce(xs, "d", op, algorithm=algorithm, exact=True) for op, algorithm in hows.items()}

    with jax.enable_x64(True):
        got = jax.jit(spread(own, 8))(xs)
    for op, dtype in itertools.product(hows, UNSIGNED):
        for x, result in zip(bits[dtype], got[op][dtype], strict=True):
            right = exact_sums(x, dtype, 8 if op == "mean" else 1)
            for shard in result.addressable_shards:
                assert np.asarray(shard.data).tobytes() == right.tobytes(), (op, dtype)
    floats = bits["float32"][0]  # the gradient of an exact sum is the exact sum of the devices' gradients
    summed = spread(lambda x: all_reduce(x, "d", exact=True)[None], 8, check=False, out=P("d"))
    grad = jax.jit(jax.grad(lambda x: (summed(x) * floats.view("float32")).sum()))(jnp.ones(floats.shape, "float32"))
    assert {np.asarray(row).tobytes() for row in np.asarray(grad)} == {exact_sums(floats, "float32").tobytes()}


def test_exact_sums_are_refused_where_the_kernels_cannot_run():
    """Under vmap, in exported programs and for products, ``exact=True`` is an error, never ignored."""
    x = np.ones((8, 3), "float32")
    needed = "exact sums inside JAX programs need the compiled kernels"
    for kind, words, call in (
        (UnsupportedError, needed, jax.vmap(lambda x: all_reduce(x, "d", exact=True), axis_name="d")),
        (UnsupportedError, needed, jax.export.export(jax.jit(spread(lambda x: all_reduce(x, "d", exact=True), 8)))),
        (UnsupportedError, "a product cannot be exact", spread(lambda x: all_reduce(x, "d", "product", exact=True), 8)),
        (ArgumentError, "exact must be True or False", spread(lambda x: all_reduce(x, "d", exact=1), 8)),
    ):
        with pytest.raises(kind, match=words):
            call(x)
    whole = jax.jit(spread(lambda x: all_reduce(x, "d", exact=True), 1))(x[:1])  # one device: nothing is added
    assert (np.asarray(whole) == 1).all()
