"""The programs of the processes of a JAX job (see ``jax_job``). Each function checks its results against NumPy."""

import contextlib
import hashlib
import os
import signal
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import crossreduce.jax as cj

OPS = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}


def mesh_of(*shape, names=("x", "y"), order=None):
    """Return a mesh of the first devices of the job, in the given order."""
    count = int(np.prod(shape))
    devices = np.array(jax.devices())[list(range(count)) if order is None else order]
    return Mesh(devices.reshape(shape), names[: len(shape)])


def placed(rows, mesh, spec=None):
    """Return a global array with one of ``rows`` on each device."""
    sharding = NamedSharding(mesh, P(mesh.axis_names) if spec is None else spec)
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def mapped(function, mesh, inside=None, outside=None, donate=(), **options):
    """Return a jitted function that calls ``function`` on every device of the mesh."""
    every = P(mesh.axis_names)
    inside, outside = (every if spec is None else spec for spec in (inside, outside))  # P() is false
    over = jax.shard_map(function, mesh=mesh, in_specs=inside, out_specs=outside, **options)
    return jax.jit(over, donate_argnums=donate)


def equal(found, due, rtol=0.0):
    """Check the parts of a global array that this process has."""
    for shard in found.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data, "float64"), due[shard.index], rtol=rtol)


def rows_of(mesh, size=12, seed=0):
    """Return small whole numbers, a row for each device."""
    return np.random.default_rng(seed).integers(1, 4, (mesh.devices.size, size)).astype("float32")


def reductions():
    """Every op, dtypes of every kind, several leaves, exact sums, and the same bits in all processes."""
    mesh = mesh_of(jax.device_count())
    rows, bits = rows_of(mesh), hashlib.sha256()
    for op, function in OPS.items():
        for dtype in ("float32", "bfloat16", "int32", "float16"):

            def reduce(x, op=op, dtype=dtype):
                leaves = {"a": x.astype(dtype), "b": (x[:, :5] + 1).astype(dtype), "empty": x[:, :0].astype(dtype)}
                return cj.all_reduce(leaves, "x", op)

            found = mapped(reduce, mesh, outside=P())(placed(rows, mesh))
            equal(found["a"], function(rows.astype("float64"), 0, keepdims=True), 1e-2)
            equal(found["b"], function(rows[:, :5].astype("float64") + 1, 0, keepdims=True), 1e-2)
            assert found["empty"].shape == (1, 0)
    noise = np.random.default_rng(1).standard_normal((mesh.devices.size, 5000)).astype("float32") * 10 ** rows[:, :1]
    for exact in (False, True):
        for op in ("sum", "mean"):
            found = mapped(partial(cj.all_reduce, axis_name="x", op=op, exact=exact), mesh, outside=P())(
                placed(noise, mesh)
            )
            bits.update(np.asarray(found.addressable_shards[-1].data).tobytes())
            if exact:
                wide = noise.astype("float64").sum(0) / (len(noise) if op == "mean" else 1)
                equal(found, wide.astype("float32")[None])
    huge = np.zeros((mesh.devices.size, 3), "float32")
    huge[0], huge[1], huge[-1] = 1e30, 1, -1e30
    exact_sum = mapped(lambda x: cj.all_reduce([x, x], "x", exact=True)[1], mesh, outside=P())
    due = huge.astype("float64").sum(0) if len(huge) == 2 else np.ones(3)
    equal(exact_sum(placed(huge, mesh)), due[None])
    poisoned = rows.copy()
    poisoned[-1, 0] = np.nan
    smallest = mapped(partial(cj.all_reduce, axis_name="x", op="min"), mesh, outside=P())(placed(poisoned, mesh))
    assert np.isnan(np.asarray(smallest.addressable_shards[0].data)[0, 0])
    flags = mapped(lambda x: cj.all_reduce(x > 2, "x", "max"), mesh, outside=P())(placed(rows, mesh))
    assert (np.asarray(flags.addressable_shards[0].data) == (rows > 2).any(0)).all()
    print(bits.hexdigest())


def donated():
    """A donated argument is reduced in place; another one is not changed."""
    mesh = mesh_of(jax.device_count())
    rows = np.tile(rows_of(mesh), 2000)
    for donate in ((), (0,)):
        run = mapped(lambda x: cj.all_reduce(x, "x"), mesh, donate=donate, check_vma=False)
        x = jax.jit(lambda x: x * 1)(placed(rows, mesh))  # memory of JAX, not of NumPy
        before = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
        y = run(x)
        equal(y, np.tile(rows.sum(0, keepdims=True), (len(rows), 1)))
        after = [shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards]
        assert (before == after) == bool(donate), (before, after)
        if not donate:
            equal(x, rows)


def moves():
    """all_gather, reduce_scatter and all_to_all, over one axis and over two in either order."""
    n = jax.device_count()
    for mesh, axes in ((mesh_of(n), "x"), (mesh_of(2, n // 2), ("y", "x")), (mesh_of(n, order=[*range(n)][::-1]), "x")):
        _moves_over(mesh, axes)


def _moves_over(mesh, axes):
    """Compare each way to move arrays over the axes with NumPy."""
    n = mesh.devices.size
    rows = rows_of(mesh, 3 * n)
    place = np.arange(n).reshape(mesh.devices.shape)
    order = (place.T if axes == ("y", "x") else place).reshape(-1)  # the device at each position
    position = np.argsort(order)
    x = placed(rows, mesh)
    gathered = rows[order]
    for tiled in (False, True):
        y = mapped(lambda x, tiled=tiled: cj.all_gather(x[0], axes, axis=0, tiled=tiled)[None], mesh)(x)
        equal(y, np.stack([gathered.reshape(-1) if tiled else gathered] * n))
        y = mapped(lambda x, tiled=tiled: cj.all_gather(x[0].reshape(n, 3), axes, axis=1, tiled=tiled)[None], mesh)(x)
        stacked = np.stack(gathered.reshape(n, n, 3), 1)
        equal(y, np.stack([stacked.reshape(n, -1) if tiled else stacked] * n))
        y = mapped(
            lambda x, tiled=tiled: cj.reduce_scatter(
                x[0] if tiled else x[0].reshape(3, n), axes, scatter_dimension=0 if tiled else 1, tiled=tiled
            )[None],
            mesh,
        )(x)
        total = rows.sum(0)
        equal(y, np.stack([total.reshape(n, 3)[p] if tiled else total.reshape(3, n)[:, p] for p in position]))
    for op in ("mean", "max"):
        y = mapped(lambda x, op=op: cj.reduce_scatter(x[0], axes, op, tiled=True)[None], mesh)(x)
        equal(y, OPS[op](rows, 0).reshape(n, 3)[position], 1e-6)
    y = mapped(lambda x: cj.all_to_all(x[0].reshape(n, 3), axes, 0, 1)[None], mesh)(x)
    equal(y, np.stack([gathered.reshape(n, n, 3)[:, p].T for p in position]))
    for one in (
        lambda x: cj.all_to_all(x[:, :0], axes, 1, 0, tiled=True),
        lambda x: cj.all_gather(x[:, :0], axes, axis=1),
    ):
        assert mapped(one, mesh)(x).size == 0
    y = mapped(lambda x: cj.all_to_all(x[0].reshape(3, n), axes, 1, 0, tiled=True)[None], mesh)(x)
    equal(y, np.stack([gathered.reshape(n, 3, n)[:, :, p].reshape(3 * n, 1) for p in position]))


def gradients():
    """Compare gradients and vmap with those of XLA's collectives, which need processes on one host."""
    n = jax.device_count()
    mesh = mesh_of(n)
    weights = np.arange(1.0, 7 * n * n + 1, dtype="float32")
    pairs = [
        (lambda x: cj.all_gather(x, "x"), lambda x: lax.all_gather(x, "x")),
        (
            lambda x: cj.reduce_scatter(x.reshape(n, -1), "x", "mean"),
            lambda x: lax.psum_scatter(x.reshape(n, -1), "x") / n,
        ),
        (lambda x: cj.all_to_all(x.reshape(n, -1), "x", 0, 0), lambda x: lax.all_to_all(x.reshape(n, -1), "x", 0, 0)),
        (lambda x: cj.all_reduce(x, "x"), lambda x: lax.psum(x, "x")),
    ]
    x = placed(rows_of(mesh, 2 * n), mesh)
    for ours, theirs in pairs:
        for check in (True, False):

            def gradient(x, function):
                y = lambda x: (function(x) ** 2).reshape(-1)  # noqa: E731
                return jax.grad(lambda x: (y(x) * weights[: y(x).size]).sum())(x[0])[None]

            def batched(x, function):
                return jax.vmap(function, 1, 0)(x.reshape(2 * n, 1) * weights[:3])[None]

            for outer in (gradient, batched):
                found, due = (
                    mapped(partial(outer, function=one), mesh, outside=P("x"), check_vma=check)(x)
                    for one in (ours, theirs)
                )
                for a, b in zip(found.addressable_shards, due.addressable_shards, strict=True):
                    np.testing.assert_allclose(a.data, b.data, rtol=1e-6)


def meshes():
    """Axes inside processes, axes across processes with several groups, other orders, and some devices only."""
    own, count = jax.local_device_count(), jax.process_count()
    for mesh, axis in ((mesh_of(count, own), "x"), (mesh_of(count, own), "y"), (mesh_of(own, count), "x")):
        rows = rows_of(mesh)
        cube = rows.reshape(*mesh.devices.shape, -1)
        found = mapped(lambda x, axis=axis: cj.all_reduce(x, axis, exact=True), mesh, check_vma=False)(
            placed(rows, mesh)
        )
        due = np.broadcast_to(cube.sum("xy".index(axis), keepdims=True), cube.shape)
        equal(found, due.reshape(rows.shape))
        found = mapped(lambda x, axis=axis: cj.all_gather(x[0], axis).sum(0)[None], mesh)(placed(rows, mesh))
        equal(found, due.reshape(rows.shape))
    some = mesh_of(own + 1, order=[*range(own + 1)][::-1])  # all devices of process 0, and one of process 1
    if jax.process_index() < 2:
        rows = rows_of(some)
        both = mapped(
            lambda x: (cj.all_reduce(x, "x", "mean"), cj.all_gather(x, "x", tiled=True)), some, outside=(P(), P("x"))
        )(placed(rows, some))
        equal(both[0], rows.mean(0, keepdims=True), 1e-6)
        equal(both[1], np.tile(rows, (len(rows), 1)))
    explicit = jax.make_mesh((count, own), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    rows = rows_of(explicit)
    x = jax.device_put(placed(rows, explicit), NamedSharding(explicit, P(("x", "y"))))
    for options in ({"mesh": explicit}, {}):
        with contextlib.nullcontext() if options else jax.set_mesh(explicit):
            over = jax.shard_map(
                lambda x: cj.all_reduce(x, ("x", "y")), in_specs=P(("x", "y")), out_specs=P(), **options
            )
            equal(jax.jit(over)(x), rows.sum(0, keepdims=True))


def order():
    """Independent reductions in one program, also of one inner function, in loops, and programs in flight."""
    mesh = mesh_of(jax.device_count())
    rows = np.tile(rows_of(mesh), 40)
    inner = jax.jit(lambda x: cj.all_reduce(jnp.sin(x) * 0 + x, "x"))

    def several(x):
        parts = [cj.all_reduce(x * k, "x") for k in range(1, 5)]
        twins = [inner(x * k) for k in range(5, 9)]
        looped, _ = lax.scan(
            lambda total, k: (total + cj.all_reduce(x * k, "x"), k), jnp.zeros_like(parts[0]), jnp.arange(3.0)
        )
        return *parts, *twins, looped

    run, other = (mapped(function, mesh, outside=P()) for function in (several, lambda x: cj.all_reduce(x + 1, "x")))
    total, pending = rows.sum(0, keepdims=True), []
    for k in range(4):  # with more than 31 programs in flight, XLA's threads can all wait; see docs/jax.md
        x = placed(rows + k, mesh)
        pending.append((k, run(x), other(x), other(x * 2)))
    for k, found, plus, twice in pending:
        now = total + k * len(rows)
        for factor, one in enumerate(found[:-1], 1):
            equal(one, now * factor, 1e-6)
        equal(found[-1], now * 3, 1e-6)
        equal(plus, now + len(rows), 1e-6)
        equal(twice, now * 2 + len(rows), 1e-6)


def _failing(call):
    """Call a function that must fail. Print the seconds that it took, and the error."""
    began = time.monotonic()
    try:
        jax.block_until_ready(call())
    except Exception as error:
        print(f"failed after {time.monotonic() - began:.2f} s:", " ".join(str(error).split()), flush=True)
    else:
        sys.exit("no error")


def in_flight(count):
    """Programs wait for each other. None is awaited before the last one was started."""
    mesh = mesh_of(jax.device_count())
    rows = rows_of(mesh)
    run, x = mapped(lambda x: cj.all_reduce(x, "x"), mesh, outside=P()), placed(rows, mesh)
    pending = [run(x) for _ in range(int(count))]
    for found in pending:
        equal(found, rows.sum(0, keepdims=True))


def dies(victim, then="end"):
    """A process is killed while the others are in a reduction. They get an error, and end.

    ``then``: "shut down": they shut JAX's job down first, and process 1 is 2 s late.
    """
    mesh = mesh_of(jax.device_count())
    x = placed(rows_of(mesh), mesh)
    run = mapped(lambda x: cj.all_reduce(x, "x"), mesh, outside=P())
    jax.block_until_ready(run(x))
    if jax.process_index() == int(victim):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _failing(lambda: run(x))
    _failing(lambda: run(x))  # and so does each later call
    if then == "shut down":
        time.sleep(2 * (jax.process_index() == 1))
        jax.distributed.shutdown()


def leaves(leaver):
    """A process ends by an error of its own while the others are in a reduction. The last one ends 2 s late."""
    mesh = mesh_of(jax.device_count())
    x = placed(rows_of(mesh), mesh)
    run = mapped(lambda x: cj.all_reduce(x, "x"), mesh, outside=P())
    jax.block_until_ready(run(x))
    if jax.process_index() == int(leaver):
        sys.exit("an error of the program")
    _failing(lambda: run(x))
    time.sleep(2 * (jax.process_index() == 2))


def absent(victim, how):
    """A process ends before its first collective: it is killed, or its program ends."""
    mesh = mesh_of(jax.device_count())
    x = placed(rows_of(mesh), mesh)
    if jax.process_index() == int(victim):
        time.sleep(1)
        if how == "left":
            sys.exit("an error of the program")
        os.kill(os.getpid(), signal.SIGKILL)
    _failing(lambda: mapped(lambda x: cj.all_reduce(x, "x"), mesh, outside=P())(x))


def other_programs():
    """Process 1 runs another program than the others."""
    mesh = mesh_of(jax.device_count())
    size = 5 if jax.process_index() == 1 else 7
    x = placed(np.ones((mesh.devices.size, size), "float32"), mesh)
    _failing(lambda: mapped(lambda x: cj.all_reduce(x, "x"), mesh, outside=P())(x))


def other_meshes():
    """Process 1 has the devices of its mesh in another order."""
    count = jax.device_count()
    mesh = mesh_of(count, order=[*range(count)][:: -1 if jax.process_index() == 1 else 1])
    x = placed(np.ones((count, 4), "float32"), mesh)
    _failing(lambda: mapped(lambda x: cj.all_reduce(x, "x"), mesh, outside=P())(x))


def missing_device():
    """A device of process 0 takes a branch without the collective."""
    mesh = mesh_of(jax.device_count())
    x = placed(np.arange(float(mesh.devices.size), dtype="float32")[:, None], mesh)

    def branch(x):
        return lax.cond(x[0, 0] == 0, lambda x: x, lambda x: cj.all_reduce(x, "x") + 0 * x, x)

    _failing(lambda: mapped(branch, mesh, check_vma=False)(x))


def other_versions():
    """Process 1 has another version of the library."""
    from crossreduce.observe import flight_recorder

    if jax.process_index() == 1:
        flight_recorder.version = lambda: "0.0.1"
    mesh = mesh_of(jax.device_count())
    x = placed(rows_of(mesh), mesh)
    _failing(lambda: mapped(lambda x: cj.all_reduce(x, "x"), mesh, outside=P())(x))


def main():
    """Join the job, and call the functions that the command line names."""
    name, number, processes, devices, address, *arguments = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    with contextlib.suppress(AttributeError):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(number), initialization_timeout=60)
    for each in name.split(","):
        globals()[each](*arguments)


if __name__ == "__main__":
    main()
