"""Frameworks in replicas: gradients through all_reduce, modes that a framework sets per thread, modules, tracing."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from engine_runs import kernel_launches
from expect import digits

import crossreduce as cr

context = cr.get_replica_context
pytestmark = pytest.mark.usefixtures("no_thread_stays")
STRATEGY = cr.MirroredStrategy(2)


def leaves(n, shape=(3,)):
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in digits(n, shape)]


@pytest.mark.parametrize(("n", "op"), [(1, "mean"), (3, "sum"), (4, "mean")])
def test_gradients_are_those_of_the_sum_of_all_losses(torch_, n, op):
    """Gradients through all_reduce and all_gather are those of the sum of all replicas' losses."""
    scale = [torch.tensor([k + 1.0, 2.0, -k], dtype=torch.float64) for k in range(n)]
    xs, ys = leaves(n), leaves(n, ())
    rows = [torch.arange(2.0 * (k + 1), dtype=torch.float64).reshape(k + 1, 2).requires_grad_() for k in range(n)]

    def step(x, y, w, own):
        reduced = context().all_reduce(op, {"x": x * x, "y": y, "count": 1})
        assert reduced["x"].requires_grad
        ((reduced["x"] * w).sum() * reduced["y"]).backward()
        gathered = context().all_gather({"x": own, "n": torch.ones(1)}, 0)["x"]
        (gathered * gathered * (context().replica_id_in_sync_group + 1.0)).sum().backward()
        return x.grad, y.grad, own.grad

    got = cr.MirroredStrategy(n).run(step, args=tuple(map(cr.PerReplica, (xs, ys, scale, rows))))
    over = n if op == "mean" else 1  # n is a power of two if the op divides, so all results are exact
    total, count, weights = sum(x.detach() ** 2 for x in xs) / over, sum(y.item() for y in ys) / over, sum(scale)
    # The sum of the losses is (total * weights).sum() * count for all_reduce, and n * (n + 1) / 2 times the sum of all
    # squares for all_gather.
    for x, own, x_grad, y_grad, own_grad in zip(xs, rows, *got, strict=True):
        assert x_grad.tolist() == (2 * x * weights * count / over).tolist()
        assert y_grad.item() == (total * weights).sum() / over
        assert own_grad.tolist() == (n * (n + 1) * own).tolist()


def test_gradients_are_never_lost_silently(torch_):
    """all_reduce and backward raise an error if they cannot compute the gradient."""
    xs = cr.PerReplica(leaves(2))
    sparse = cr.PerReplica([torch.eye(2).to_sparse().requires_grad_() for _ in range(2)])
    slices = cr.IndexedSlices(torch.ones(1, 2, requires_grad=True), torch.tensor([0]), (2, 2))
    half = cr.PerReplica([xs[0], xs[1].detach()])

    def total(x):
        return context().all_reduce("sum", x)

    def one_alone(x):
        y = total(x).sum()
        if context().replica_id_in_sync_group:
            y.backward()

    for error, words, step, given in (
        (cr.UnsupportedError, "by max has no gradient", lambda x: context().all_reduce("max", x), xs),
        (cr.UnsupportedError, "sparse values has no gradient", total, sparse),
        (cr.UnsupportedError, "sparse values has no gradient", total, slices),
        (cr.MismatchError, r"(?s)replica 0.*with gradients; replica 1.*float64\[3\]\n", total, half),
        (cr.MismatchError, "0 on cpu:0 has returned; replica 1 on cpu:1 waits in all_reduce", one_alone, xs),
        (cr.UnsupportedError, r"torch\.func", torch.func.grad(lambda x: total(x).sum()), xs),
    ):
        with pytest.raises(error, match=words):
            STRATEGY.run(step, args=(given,))
    late = STRATEGY.run(total, args=(xs,))
    with pytest.raises(cr.ContextError, match=r"(?s)has already returned, so it cannot wait for the others.*backward"):
        late[0].sum().backward()
    assert STRATEGY.run(lambda x: context().all_reduce("max", x.detach()), args=(xs,))[0].tolist() == [3, 6, 9]


def test_replicas_inherit_torch_modes(torch_):
    """Replicas start with the caller's grad mode, inference mode, autocast and default device."""

    def modes():
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        y = context().all_reduce("sum", torch.ones(1, requires_grad=True))
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.requires_grad
        return " ".join(map(str, (*state, autocast, torch.get_default_device())))

    def differentiates(x):
        with torch.inference_mode(False):  # a replica may leave inference mode
            y = torch.ones(1, requires_grad=True)
            (context().all_reduce("sum", y).sum() * x).backward()
            return y.grad

    for mode, wanted in (
        (nullcontext(), "True False True False cpu"),
        (torch.no_grad(), "False False False False cpu"),
        (torch.inference_mode(), "False True False False cpu"),
        (torch.autocast("cpu", dtype=torch.bfloat16), "True False True torch.bfloat16 cpu"),
    ):
        with mode:
            assert modes() == wanted
            assert STRATEGY.run(modes) == wanted
    with torch.device("meta"):
        assert STRATEGY.run(lambda: str(torch.get_default_device())) == "meta"
    with torch.inference_mode():
        assert [x.tolist() for x in STRATEGY.run(differentiates, args=(3.0,))] == [[6], [6]]
    assert STRATEGY.run(modes) == "True False True False cpu"


def test_replicas_inherit_jax_settings(jax_):
    """Replicas start with the JAX settings of the calling thread."""
    import jax
    import jax.numpy as jnp

    def seen():
        x = jnp.zeros(1)
        return x.dtype.name, next(iter(x.devices())).id, str(jax.config.jax_default_matmul_precision)

    assert STRATEGY.run(seen)[0] == "float64"
    with jax.enable_x64(False), jax.default_device(jax.devices()[3]), jax.default_matmul_precision("highest"):
        name, device, precision = STRATEGY.run(seen)
    assert (name, device.values, precision) == ("float32", (3, 3), "highest")
    assert STRATEGY.run(seen)[1].values == (0, 0)


def test_traced_jax_values_are_refused(jax_):
    """Inside jax.jit and jax.grad, all_reduce raises an error. Outside, it reduces gradients that they computed."""
    import jax

    xs = cr.PerReplica(jax_.arrays([np.full(2, 1.0), np.full(2, 3.0)]))
    for transform in (jax.jit, jax.grad):
        function = transform(lambda x: context().all_reduce("sum", x).sum())
        words = r"(?s)a traced value cannot be reduced with.*crossreduce\.jax\.all_reduce"
        with pytest.raises(cr.UnsupportedError, match=words):
            STRATEGY.run(function, args=(xs,))
    gradient = jax.jit(jax.grad(lambda x: (x**2).sum()))
    result = STRATEGY.run(lambda x: context().all_reduce("mean", gradient(x)), args=(xs,))
    assert [jax_.to_numpy(x).tolist() for x in result] == [[4, 4]] * 2
    assert [jax_.device_of(x) for x in result] == ["cpu:0", "cpu:1"]


def test_modules_are_replicated_with_their_optimizers(torch_):
    """A copy of an optimizer updates the copy of its module, and the originals do not change."""
    model = torch.nn.Linear(2, 1)
    models, optimizers = STRATEGY.replicate((model, torch.optim.SGD(model.parameters(), 0.5)))
    wanted = (model.weight - 1).tolist()

    def step(model, optimizer):
        model(torch.ones(2)).sum().backward()
        model.weight.grad = context().all_reduce("sum", model.weight.grad)
        optimizer.step()

    STRATEGY.run(step, args=(models, optimizers))
    assert [other.weight.tolist() for other in models] == [wanted] * 2
    assert (model.weight - 1).tolist() == wanted


@pytest.mark.parametrize("kind", ["tpu", "cuda"])
def test_devices_of_another_framework_do_not_affect_torch(torch_, kind):
    """Replicas run on devices that only another framework has, even if torch is imported."""
    first = torch.cuda.device_count() if kind == "cuda" else 0
    strategy = cr.MirroredStrategy([f"{kind}:{first}", f"{kind}:{first + 1}"])
    assert strategy.run(lambda: context().replica_id_in_sync_group).values == (0, 1)


@pytest.mark.gpu
def test_replicas_on_one_gpu(torch_):
    """Replicas can be logical devices of one GPU. Results stay there. Gradients through all_reduce are refused."""
    assert cr.MirroredStrategy().devices == tuple(f"cuda:{k}" for k in range(torch.cuda.device_count()))
    strategy = cr.MirroredStrategy(["cuda:0", "cuda:0#1", "cuda:0#2"])
    model = strategy.replicate(torch.nn.Linear(3, 1))
    batch = strategy.split(torch.arange(12.0).reshape(4, 3))

    def step(model, x):
        model(x).sum().backward()
        grad, count = context().all_reduce("sum", (model.weight.grad, float(len(x))))
        assert grad.device == x.device == torch.device("cuda:0")
        return grad, count

    with pytest.raises(cr.UnsupportedError, match="replicas that share an accelerator cannot compute gradients"):
        strategy.run(lambda model: context().all_reduce("sum", model.weight), args=(model,))
    launches = kernel_launches()
    weights, count = strategy.run(step, args=(model, batch))
    assert kernel_launches() > launches, "the kernels of the CUDA engine did not run"
    assert [w.tolist() for w in weights] == [[[18, 22, 26]]] * 3
    assert count.values == (4.0,) * 3
