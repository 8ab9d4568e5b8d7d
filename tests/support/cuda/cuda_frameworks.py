"""The public calls on CUDA arrays, without a GPU: on the fake driver, with stand-ins for the frameworks' devices.

CuPy is the stand-in of support/standins. PyTorch is the real one: its tensors in host memory count as those of cuda:0.
JAX is one that has moved what the engine imports. The commands ask the driver, too. Run as a program, in a process of
its own: python cuda_frameworks.py cupy|torch|jax|commands.
"""

import io
import os
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from fake_cuda import MAPPED, PLAIN, FakeDriver, cupy_on, engine_only

import crossreduce as cr
from crossreduce.reduction import all_reduce_ops

SIZES = [(), (1,), (7, 3), (1000,), (0, 4), (33_333,)]
LOGICAL = [f"cuda:0#{k}" if k else "cuda:0" for k in range(8)]


def expected(rows, op):
    """Return the result of each tensor, as NumPy arrays on the host give it."""
    return [x[0] for x in zip(*[list(each) for each in cr.all_reduce(rows, op)], strict=True)]


def cupy_calls(fake):
    """Reduce CuPy arrays on 8 devices and on logical devices of one."""
    cupy, draw = cupy_on(fake), np.random.default_rng(1)
    cases = "float32 mean", "float16 sum", "int32 mean", "int64 max", "complex64 sum"
    places = LOGICAL, [f"cuda:{k}" for k in range(8)], ["cuda:3", "cuda:1", "cuda:3#1"]
    for devices, case in product(places, cases):
        (dtype, op), physical = case.split(), [int(name[5]) for name in devices]
        rows = [[np.asarray(100 * draw.standard_normal(size)).astype(dtype) for size in SIZES] for _ in devices]
        arrays = []
        for row, number in zip(rows, physical, strict=True):
            with cupy.cuda.Device(number):
                arrays.append([cupy.asarray(x) for x in row])
        right = expected(rows, op)
        for algorithm in ("auto", "direct", "hierarchical_copy", "ring"):
            ops = cr.AllReduceCrossDeviceOps(algorithm)
            with engine_only():
                results = cr.all_reduce(arrays, op, devices=devices, cross_device_ops=ops)
            fake.run()
            for row, number in zip(results, physical, strict=True):
                assert [(got.device.id, got.dtype) for got in row] == [(number, x.dtype) for x in right]
                for got, x in zip(row, right, strict=True) if algorithm in ("auto", "direct") else ():
                    np.testing.assert_array_equal(cupy.asnumpy(got), x, strict=True)  # combined in the host's order
    assert not fake.report(), fake.report()[:3]


def torch_calls(fake):
    """Reduce tensors of one or four devices, some in memory that peers cannot read.

    Later calls run in compiled code, unless a tensor is not as in the first one: negated by a bit, or with a gradient.
    """
    import torch
    from fake_cuda_torch import install

    from crossreduce.engines.host import prepared

    prepared.compiled_module().use_device_type(1)  # the CPU's
    memory = install()
    memory.fake = fake
    draw = np.random.default_rng(2)
    sizes = [size for size in SIZES if 0 not in size]  # host memory of no bytes is on no device
    cases = [*product((PLAIN, MAPPED), ("new", "out", "in place"), [range(4)]), (PLAIN, "new", [0] * 4)]
    for kind, into, places in cases:
        ops, is_one = cr.AllReduceCrossDeviceOps("direct"), len({*places}) == 1
        op, dtype = ("mean", "float16") if is_one else ("sum", "float32")
        for turn in ("first", "later", "other kind", "negated", "gradient", "freed", "filled"):
            is_readable = (kind == PLAIN) is (turn != "other kind")
            memory.kind = PLAIN if is_readable else MAPPED
            rows = [[np.asarray(draw.standard_normal(size)).astype(dtype) for size in sizes] for _ in places]
            right = expected(rows, op)
            tensors = [[memory.put(torch.tensor(x), k) for x in row] for k, row in zip(places, rows, strict=True)]
            if turn == "negated" and into != "in place":  # else it is an error
                tensors[1][3] = torch._neg_view(memory.put(torch.tensor(-rows[1][3]), places[1]))
            tensors[2][3].requires_grad_(turn == "gradient" and into == "new")
            out = [[memory.put(torch.full_like(x, 77), k) for x in row] for k, row in zip(places, tensors, strict=True)]
            out = {"new": None, "out": out, "in place": tensors}[into]
            if turn == "freed":  # a part of memory that was freed
                lost = torch.empty(9 + tensors[1][3].numel(), dtype=tensors[1][3].dtype)
                tensors[1][3] = lost[9:].view(tensors[1][3].shape)
                lost.untyped_storage().resize_(0)
                memory.devices[0] = places[1]
                with pytest.raises(cr.UnsupportedError, match="was freed"):
                    cr.all_reduce(tensors, op, cross_device_ops=ops, out=None if into == "new" else out)
                memory.release()
                continue
            fake.clear()
            before = memory.blocks
            torch.use_deterministic_algorithms(turn == "filled")  # then torch fills what it allocates
            with mock.patch.object(all_reduce_ops, "reduce_batch", wraps=all_reduce_ops.reduce_batch) as in_python:
                results = cr.all_reduce(tensors, op, cross_device_ops=ops, out=out)
            torch.use_deterministic_algorithms(False)
            fake.run()
            got = [[x.detach().numpy() for x in row] for row in results]
            assert all(np.array_equal(x, y) for row in got for x, y in zip(row, right, strict=True)), (kind, into, turn)
            assert (fake.count("cuMemcpyPeerAsync") > 0) is not (is_readable or is_one)
            assert not fake.report(), (kind, into, turn, fake.report()[:3])
            # Python plans, for memory of another kind once, and handles what needs a look at single tensors.
            known = {"other kind": kind == MAPPED or into == "in place" or is_one, "negated": into == "in place"}
            known |= {"first": False, "gradient": into != "new"}
            assert in_python.call_count == (not known.get(turn, True)), (kind, into, turn)
            if into == "new":
                assert memory.blocks - before >= (1 if is_one else 4)
                one, other = results[1][1], results[1][2]
                assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
                one.add_(1)
                assert (one._version, other._version, other._is_view()) == (1, 0, False)
            memory.release()
    big = [memory.put(torch.full((4, 1 << 20), 2.0**k), k) for k in range(2)]
    rows = [[x[0], x[3]] for x in big]  # 12 MiB after each other
    fake.clear()
    cr.all_reduce(rows, cross_device_ops=ops, out=rows)
    fake.run()
    assert all((x == 3).all() for row in rows for x in row)
    assert fake.count("cuPointerGetAttributes") == 2  # once per allocation
    memory.release()
    torch.use_deterministic_algorithms(True)
    assert not memory.block(torch.float32, 64 << 20, 0).isnan().any()  # so large that it is new: zeros
    assert torch.empty(1 << 20).isnan().all()  # torch itself fills


def jax_calls(_):
    """Reduce JAX arrays if the engine's import of JAX's interpreters fails: JAX's own operations do it."""
    import jax

    sys.modules["jax.interpreters"] = None
    from crossreduce.engines.cuda.memory import device_memory
    from crossreduce.frameworks.jax import arrays

    host = arrays.place("cpu:0")
    xs = [jax.numpy.ones(3)] * 2
    with mock.patch.object(arrays, "place", return_value=host):
        for devices in (None, LOGICAL[:2], ["cuda:0", "cuda:1"]):
            for reduced in (cr.all_reduce, jax.jit(cr.all_reduce, static_argnames="devices")):
                assert reduced(xs, devices=devices and tuple(devices))[1].tolist() == [2, 2, 2]
    assert device_memory("jax") is None


# What the process that checks the reads between GPUs does first: the fake driver starts, with a fault.
MACHINE = """
from fake_cuda import FakeDriver
fake = FakeDriver(4)
fake.corrupt(0, 2)
for call in 4, 5:  # of the last GPU
    fake.fail("cuDevicePrimaryCtxRetain", call, 46)
"""


def commands_calls(fake):
    """Run the commands that ask for GPUs: they make no context in this process."""
    import typer

    from crossreduce.cli import info
    from crossreduce.cli.doctor.command import doctor
    from crossreduce.engines.cuda import driver

    assert driver.devices()[7] == "cuda:7 Fake GPU 7, capability 9.0, kernels sm_90"
    none = dict.fromkeys(("version", "devices", "error"), "")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(info, "framework_info", return_value=none),
        mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([folder, os.environ["PYTHONPATH"]])),
        redirect_stdout(io.StringIO()) as printed,
    ):
        Path(folder, "sitecustomize.py").write_text(MACHINE)
        info.info()
        with suppress(typer.Exit):
            doctor(None)
    assert "Fake GPU 7" in printed.getvalue()
    assert "cuda:0 reads cuda:2 wrongly" in printed.getvalue(), printed.getvalue()
    assert "cuda:3 cannot be used now, and was not checked: the CUDA driver" in " ".join(printed.getvalue().split())
    assert "contexts retained" not in fake.live()


if __name__ == "__main__":
    globals()[f"{sys.argv[1]}_calls"](FakeDriver(seed=1))
    print(sys.argv[1], "done")
