"""Checks of crossreduce.torch: asynchronous calls, gloo as inner backend, errors, groups, and other tools of torch."""

import functools
import gc
import os
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from kinds_of_groups import wait_until
from torch_oracle import (
    AVG,
    DIGESTS,
    INTEGERS,
    MAX,
    MIN,
    SUM,
    Checks,
    expect_reduced,
    given,
    inputs,
    raises,
    record_digest,
)

CHECKS = Checks()


@CHECKS.add
def asynchronous_calls(c):
    """Asynchronous calls run in their order, and a later synchronous call runs after them."""
    x = given(c.rank, (1000,), torch.float64, 120)
    y = x.clone()
    works = [dist.all_reduce(y, async_op=True) for _ in range(20)]
    dist.all_reduce(y, AVG)
    assert all(work.is_completed() for work in works)
    for work in works:
        assert work.wait() is True
        assert work.is_success()
    total = torch.stack(inputs(c, (1000,), torch.float64, 120)).sum(0) * float(c.size) ** 19
    torch.testing.assert_close(y, total)
    work = dist.all_reduce(x, async_op=True)
    (result,) = work.get_future().wait()
    assert result.data_ptr() == x.data_ptr()
    work = dist.broadcast(x, 0, async_op=True)
    halved = work.get_future().then(lambda done: done.value()[0] / 2).wait()
    assert torch.equal(halved, x / 2)
    works = [dist.barrier(async_op=True), dist.reduce(x, 0, async_op=True)]
    works.append(dist.all_gather([torch.empty_like(x) for _ in range(c.size)], x, async_op=True))
    for work in works:
        work.wait(timedelta(seconds=20))


@CHECKS.add
def ops_in_callbacks(c):
    """A callback of a future, which runs in the queue's thread, may call ops and wait for them."""
    waits = (lambda y: dist.all_reduce(y), lambda y: dist.all_reduce(y, async_op=True).wait())
    for wait in (*waits, lambda y: dist.all_reduce(y, async_op=True).get_future().wait()):
        x, y = (given(c.rank, (200_000,), torch.float32, 125), given(c.rank, (9,), torch.float32, 126))
        work = dist.all_reduce(x, async_op=True)
        work.get_future().then(lambda _, wait=wait, y=y: wait(y)).wait()
        expect_reduced(y, SUM, inputs(c, (9,), torch.float32, 126))


def unequal_parts(c, pattern):
    """Exchange parts of unequal sizes, and check them. ``pattern``: sizes, by sender and receiver; repeated."""
    sizes = [[pattern[a % len(pattern)][b % 3] for b in range(c.size)] for a in range(c.size)]
    for dtype in (torch.float32, torch.bool, torch.float8_e5m2):
        parts = [
            [torch.full((size, 2), 1 + a + 10 * b).to(dtype) for b, size in enumerate(row)]
            for a, row in enumerate(sizes)
        ]
        mine, due = parts[c.rank], [row[c.rank] for row in parts]
        splits = [list(map(len, each)) for each in (due, mine)]
        whole, results = torch.empty_like(torch.cat(due)), [torch.empty_like(each) for each in due]
        dist.all_to_all_single(whole, torch.cat(mine), *splits)
        dist.all_to_all(results, mine)
        for result in (whole, torch.cat(results)):
            assert torch.equal(result.view(torch.uint8), torch.cat(due).view(torch.uint8))


@CHECKS.add
def inner_backend(c):
    """gloo executes only sums of sparse tensors, and all-to-alls of parts of very different sizes."""
    collectives, rows = dist.group.WORLD._collectives, torch.ones(c.size, 5)
    gloo, collectives._gloo = collectives._gloo, None
    try:
        for x in (rows, rows.to(torch.complex64), rows.to(torch.float8_e5m2)):  # the last one is moved as bytes
            own, listed = x[0].clone(), list(x) if c.rank == 1 else None
            dist.broadcast(own, 1)
            dist.all_gather_into_tensor(x, own)
            dist.all_gather(list(x), own)
            dist.gather(own, listed, 1)
            dist.scatter(own, listed, 1)
            dist.all_to_all_single(torch.empty_like(x), x)
            dist.all_to_all(list(torch.empty_like(x)), list(x))
        dist.all_reduce(rows)
        dist.reduce(rows, 1)
        dist.reduce_scatter_tensor(rows[0].clone(), rows)
        dist.reduce_scatter(rows[0].clone(), list(rows))
        for shape in ((9, 4), (3, 0), (1111, 7), (3,)):  # large ones are reduced in parts
            bits = [given(rank, shape, torch.int32, 140) for rank in range(c.size)]
            for op, function in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BXOR, torch.bitwise_xor)):
                x, y = bits[c.rank].clone(), bits[c.rank].clone()
                dist.all_reduce(x.mT if x.ndim > 1 else x, op)
                dist.reduce(y, 1, op)
                assert torch.equal(x, functools.reduce(function, bits))
                assert torch.equal(y, x if c.rank == 1 else bits[c.rank])
        out = torch.empty(3, 4, dtype=torch.int32)
        dist.reduce_scatter_tensor(out, torch.cat(inputs(c, (3, 4), torch.int32, 141)), dist.ReduceOp.BOR)
        assert torch.equal(out, given(c.rank, (3, 4), torch.int32, 141))
        unequal_parts(c, [[3, 1, 0], [1, 1, 1], [0, 0, 2]])
        unequal_parts(c, [[90_000, 90_001, 90_000]])
    finally:
        collectives._gloo = gloo
    unequal_parts(c, [[0, 1, 0], [60_000, 0, 0]])  # by gloo
    assert collectives._gloo is gloo
    dense = given(c.rank, (20,), torch.float32, 142)
    dense[dense < 0.5] = 0
    sparse = dense.to_sparse()
    dist.all_reduce(sparse)
    every = inputs(c, (20,), torch.float32, 142)
    for x in every:
        x[x < 0.5] = 0
    torch.testing.assert_close(sparse.to_dense(), sum(every))


@CHECKS.add
def sparse_leaf(c):
    """A sparse tensor that requires gradients is reduced like others, whether or not it is coalesced."""
    every = [torch.sparse_coo_tensor([[0, 0, rank + 1]], given(rank, (3,)), (c.size + 1,)) for rank in range(c.size)]
    for tensor in (every[c.rank].clone(), every[c.rank].coalesce()):
        leaf = tensor.requires_grad_()
        dist.all_reduce(leaf)
        assert leaf.is_leaf
        torch.testing.assert_close(leaf.detach().to_dense(), sum(x.to_dense() for x in every))


@CHECKS.add
def sequence_numbers(c):
    """The sequence number of a group counts its collectives and messages, like that of a gloo group."""
    ours, gloo = dist.new_group(), dist.new_group(backend="gloo")

    def messages(group):
        if c.rank < 2:
            (dist.send, dist.recv)[c.rank](torch.ones(1), 1 - c.rank, group=group)

    calls = (
        lambda group: dist.all_reduce(torch.ones(3), group=group),
        lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
        lambda group: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.BAND, group=group),
        lambda group: dist.broadcast(torch.ones(3), 0, group=group),
        lambda group: dist.all_gather_object([None] * c.size, c.rank, group=group),
        lambda group: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(c.size), group=group),
        lambda group: dist.barrier(group=group),
        messages,
    )
    numbers = {ours: [], gloo: []}
    for group, found in numbers.items():
        for call in calls:
            call(group)
            found.append(group._get_sequence_number_for_group())
    assert numbers[ours] == numbers[gloo] == [1, 2, 3, 4, 6, 7, 8, 9 if c.rank < 2 else 8]
    for group in numbers:
        dist.destroy_process_group(group)


@CHECKS.add
def unsupported_calls(c):
    """Unsupported calls raise errors on all ranks, and the group can still be used."""
    raises(TypeError, "mean of bools", dist.all_reduce, torch.ones(3, dtype=torch.bool), AVG)
    raises(ValueError, "do not match in number or size", dist.all_gather_into_tensor, torch.empty(5), torch.empty(7))
    raises(ValueError, "do not match in number or size", dist.all_gather, [torch.empty(5)], torch.empty(5))
    raises(ValueError, "do not match in number or size", dist.all_to_all, [], [])
    work = dist.all_reduce(torch.ones(3, dtype=torch.bool), AVG, async_op=True)
    future = work.get_future()
    raises(TypeError, "the mean of bools", work.wait)
    raises(TypeError, "the mean of bools", future.wait)
    assert work.exception() is not None
    dist.barrier()


def reduce_and_wait(tensor, asynchronous):
    work = dist.all_reduce(tensor, async_op=asynchronous)
    work.wait()  # its error refers to this frame, which refers to the work


@CHECKS.add
def failed_ops_release_their_tensors(c):
    """After an op has failed, its tensor is in no reference cycle: it is released without the garbage collector."""
    gc.disable()
    try:
        for asynchronous in (False, True):
            tensor, failed = torch.ones(3 + c.rank), False
            released = weakref.ref(tensor)
            try:
                reduce_and_wait(tensor, asynchronous)
            except ValueError:  # not by ``raises``, whose frame would refer to the error
                failed = True
            assert failed
            del tensor
            wait_until(lambda released=released: released() is None)  # the queue's thread may be a little later
    finally:
        gc.enable()


@CHECKS.add
def tensors_that_wrap_others(c):
    """Calls use the tensors inside a wrapper, such as the pending result of a functional collective."""
    import torch.distributed._functional_collectives as functional
    from torch.testing._internal.two_tensor import TwoTensor

    pending = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert type(pending) is functional.AsyncCollectiveTensor
    work = dist.all_reduce(pending, async_op=True)
    assert work.wait() is True
    assert torch.equal(pending + 0, torch.full((3,), float(c.size**2)))
    every = [given(rank, (2, 3), torch.float32, 180) for rank in range(c.size)]
    pairs = [TwoTensor(x[0].clone(), x[1].clone()) for x in every]
    gathered = [TwoTensor(torch.zeros(3), torch.zeros(3)) for _ in every]
    dist.all_gather(gathered, pairs[c.rank])
    assert all(torch.equal(x.a, y[0]) and torch.equal(x.b, y[1]) for x, y in zip(gathered, every, strict=True))
    own = TwoTensor(torch.zeros(3), torch.zeros(3))
    dist.scatter(own, pairs if c.rank == 1 else None, 1)
    assert torch.equal(torch.stack([own.a, own.b]), every[c.rank])
    if c.rank < 2:
        (dist.send if c.rank else dist.recv)(own, 1 - c.rank)
        assert torch.equal(torch.stack([own.a, own.b]), every[1])
    pair = TwoTensor(torch.ones(3), torch.ones(3))
    for asynchronous in (False, True):  # after the error, the calls of the two parts do not run
        raises(ValueError, "rank 1 differs", reduce_and_wait, pair if c.rank == 1 else torch.ones(3), asynchronous)
    assert torch.equal(pair.a, torch.ones(3))
    logged = torch.ones(3)
    dist.all_reduce(torch.Tensor._make_subclass(Logged, logged))
    assert torch.equal(logged, torch.full((3,), float(c.size)))


class Logged(torch.Tensor):
    """A tensor that handles ops, but has memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


@CHECKS.add
def lists_of_tensors(c):
    """A call that is not coalesced takes one tensor per rank. Other numbers are an error, and nothing is written.

    (gloo would reduce, or gather, all tensors of all ranks together.)
    """
    group, x, y = dist.group.WORLD, torch.ones(3), torch.ones(3)
    pairs, rows = [x, y], [torch.zeros(3) for _ in range(c.size)]
    for call in (group.allreduce, group.broadcast, group.reduce):
        raises(ValueError, "one tensor per rank", lambda call=call: call(pairs).wait())
        raises(ValueError, "is empty", lambda call=call: call([]).wait())
    raises(ValueError, "one tensor per rank", lambda: group.allgather([rows, rows], pairs).wait())
    raises(ValueError, "is empty", lambda: group.allgather([], [x]).wait())
    raises(ValueError, "one tensor per rank", lambda: group.gather([], pairs).wait())
    raises(ValueError, "one tensor per rank", lambda: group.scatter(pairs, []).wait())
    raises(ValueError, "one tensor per rank", lambda: group.reduce_scatter(pairs, [rows, rows]).wait())
    raises(ValueError, "is empty", dist.all_reduce_coalesced, [])
    raises(ValueError, r"lists: [2, 1]", lambda: group.allgather_into_tensor_coalesced(pairs, [x]).wait())
    raises(
        ValueError,
        "rank 1 differs",
        lambda: group.allreduce_coalesced([x, y, torch.ones(3)][: 3 - (c.rank == 1)]).wait(),
    )
    ragged = [[torch.zeros(3) for _ in range(1 + (k != 1))] for k in range(c.size)]
    raises(ValueError, "do not match in number", lambda: group.allgather_coalesced(ragged, pairs).wait())
    assert torch.equal(torch.stack([x, y, *rows]).sum(0), torch.full((3,), 2.0))
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce_coalesced([x, sparse, y])
    assert torch.equal(sparse.to_dense(), c.size * torch.eye(3))
    assert torch.equal(x + y, torch.full((3,), 2.0 * c.size))


@CHECKS.add
def tensors_on_other_devices(c):
    """Tensors on a device for which the group has no backend are an error on all ranks. The group still works."""
    far, near, text = (torch.empty(c.size, device="meta"), torch.empty(c.size), "no backend for meta tensors")
    for call, *arguments in (
        (dist.all_reduce, far),
        (dist.reduce_scatter_tensor, far, near),
        (dist.all_gather, [far] * c.size, far),
        (dist.send, far, (c.rank + 1) % c.size),
    ):
        words = raises(TypeError, text, call, *arguments).args[0]
        assert "the group serves cpu\n" in words
        assert '"cpu:crossreduce,cuda:nccl"' in words
    raises(TypeError, text, dist.all_reduce(far, async_op=True).wait)
    for call, *arguments in (  # must not access the memory of a meta tensor, which is at the address 0
        (dist.all_gather_into_tensor, torch.empty(c.size**2, device="meta"), near),
        (dist.reduce_scatter_tensor, torch.empty(1), far),
        (dist.all_to_all_single, far, near),
    ):
        raises(ValueError, "float32 on cpu, float32 on meta", call, *arguments)
    raises(ValueError, "rank 0 differs from ranks 1, 2", dist.all_reduce, far if c.rank == 0 else near)
    dist.all_reduce(near)


@CHECKS.add
def mismatch(c):
    """If calls of ranks differ, all ranks raise the same MismatchError, and the group can still be used."""
    from crossreduce import MismatchError

    x = torch.ones(10 + (c.rank == 1))
    error = raises(MismatchError, "rank 1", dist.all_reduce, x)
    DIGESTS["mismatch"] = str(error)
    work = dist.all_reduce(torch.ones(3), MAX if c.rank == 0 else MIN, async_op=True)
    raises(MismatchError, "rank 0", work.wait)
    sparse = torch.ones(3).to_sparse()
    raises(MismatchError, "rank 1", dist.all_reduce, sparse if c.rank == 1 else sparse.to_dense())
    raises(MismatchError, "rank 1", dist.all_reduce, torch.ones(3, 2).to_sparse(1 + (c.rank == 1)))  # gloo would crash
    moved_as_bytes = torch.float8_e5m2 if c.rank == 1 else torch.float8_e4m3fn
    raises(MismatchError, "rank 1", dist.broadcast, torch.ones(3).to(moved_as_bytes), 0)
    shape = tuple(range(2, 2 + c.size))  # rank 1: the sizes of its outputs; other ranks: the shape of their input
    sizes = shape if c.rank == 1 else [torch.Size(shape).numel()] * c.size
    x = torch.ones(sizes[c.rank] if c.rank == 1 else shape)
    raises(MismatchError, "rank 1", dist.all_gather, [torch.empty(size).reshape(-1) for size in sizes], x)
    y = torch.full((3,), 4.0**c.rank)
    dist.all_reduce(y)
    assert torch.equal(y, torch.full((3,), sum(4.0**rank for rank in range(c.size))))


@CHECKS.add
def subgroups(c):
    """Groups of some ranks, groups of another backend, and several groups that are used in threads are independent."""
    pair = dist.new_group([0, c.size - 1])
    alone = dist.new_group([1])
    plain = dist.new_group(backend="gloo")
    groups = [dist.new_group() for _ in range(3)]
    assert dist.get_backend(groups[0]) == "crossreduce"
    assert dist.get_backend(plain) == "gloo"
    if c.rank in (0, c.size - 1):
        x = given(c.rank, (50,), torch.float32, 150)
        dist.all_reduce(x, group=pair)
        expect_reduced(x, SUM, [given(rank, (50,), torch.float32, 150) for rank in (0, c.size - 1)])
        listed = [c.rank]
        dist.broadcast_object_list(listed, c.size - 1, group=pair)
        assert listed == [c.size - 1]
    if c.rank == 1:
        x = given(1, (5,))
        dist.all_reduce(x, AVG, group=alone)
        assert torch.equal(x, given(1, (5,)))
    x = given(c.rank, (50,), torch.float32, 151)
    dist.all_reduce(x, group=plain)
    torch.testing.assert_close(x, sum(inputs(c, (50,), torch.float32, 151)))

    def work(number):
        for turn in range(10):
            arguments = (200 * (number + 1),), torch.float32, 160 + number + 10 * turn
            dist.all_reduce(x := given(c.rank, *arguments), group=groups[number])
            expect_reduced(x, SUM, inputs(c, *arguments))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    for group in groups:
        dist.destroy_process_group(group)
    for _ in range(3):  # the groups in all iterations have the same name
        ranks = [0, 1] if c.rank < 2 else list(range(2, c.size))
        group = dist.new_group(ranks, use_local_synchronization=True)
        x = given(c.rank, (5,), torch.float64, 155)
        dist.all_reduce(x, group=group)
        expect_reduced(x, SUM, [given(rank, (5,), torch.float64, 155) for rank in ranks])
        dist.destroy_process_group(group)
    x = torch.ones(1)
    raises(Exception, "", dist.all_reduce, x, group=groups[0])


@CHECKS.add
def methods_of_the_group(c):
    """The methods of the group accept the arguments of torch's groups."""
    group, xs = dist.group.WORLD, inputs(c, (5,), torch.float32, 170)
    assert (group.rank(), group.size(), group.name()) == (c.rank, c.size, "crossreduce")
    x = xs[c.rank]
    group.allreduce(y := x.clone()).wait()
    expect_reduced(y, SUM, xs)
    group.allreduce([y := x.clone()], op=MAX).wait()
    expect_reduced(y, MAX, xs)
    group.broadcast(y := x.clone(), 1).wait()
    assert torch.equal(y, xs[1])
    group.allgather(out := [torch.empty(5) for _ in xs], x).wait()
    assert all(map(torch.equal, out, xs))
    group.barrier().wait()
    group.allgather_coalesced(out := [[torch.empty(5), torch.empty(2)] for _ in xs], [x, x[:2].clone()]).wait()
    assert all(torch.equal(a, want) and torch.equal(b, want[:2]) for (a, b), want in zip(out, xs, strict=True))


@CHECKS.add
def functional_collectives(c):
    """Functional collectives, which C++ code calls, and a device mesh use the backend."""
    import torch.distributed._functional_collectives as functional

    xs = inputs(c, (4, 6), torch.float32, 180)
    x = xs[c.rank]
    group = dist.group.WORLD
    expect_reduced(functional.wait_tensor(functional.all_reduce(x, "sum", group)), SUM, xs)
    expect_reduced(functional.wait_tensor(functional.all_reduce(x, "avg", group)), AVG, xs)
    gathered = functional.wait_tensor(functional.all_gather_tensor(x, 0, group))
    assert torch.equal(gathered, torch.cat(xs))
    wide = given(c.rank, (2 * c.size, 3), torch.float32, 181)
    part = functional.wait_tensor(functional.reduce_scatter_tensor(wide, "sum", 0, group))
    wides = [given(rank, (2 * c.size, 3), torch.float32, 181) for rank in range(c.size)]
    expect_reduced(part, SUM, [w[2 * c.rank : 2 * c.rank + 2] for w in wides])
    moved = functional.wait_tensor(functional.all_to_all_single(wide, None, None, group))
    assert torch.equal(moved, torch.cat([w[2 * c.rank : 2 * c.rank + 2] for w in wides]))
    most = list(map(functional.wait_tensor, functional.all_reduce_coalesced([x, x + 1], "max", group)))
    expect_reduced(most[0], MAX, xs)
    expect_reduced(most[1], MAX, [x + 1 for x in xs])
    mesh = dist.init_device_mesh("cpu", (c.size,), mesh_dim_names=("data",))
    assert dist.get_backend(mesh.get_group()) == "crossreduce"
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = given(0, (9, 4), torch.float32, 182)
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(spread.full_tensor(), whole)
    torch.testing.assert_close(spread.sum().redistribute(mesh, [Replicate()]).to_local(), whole.sum())


@CHECKS.add
def topology(c):
    """measure_topology returns the same topology on all ranks. Later reductions on it work, and so does ``plan``."""
    import crossreduce
    from crossreduce.torch import measure_topology

    found = measure_topology(seconds=0.2)
    assert len(found.devices) == c.size
    DIGESTS["topology"] = repr(found.links)
    xs = inputs(c, (70_000,), torch.float32, 190)
    x = xs[c.rank].clone()
    dist.all_reduce(x)
    expect_reduced(x, SUM, xs)
    record_digest("topology sum", x)
    assert crossreduce.plan(found, "all_reduce", nbytes=1 << 20).seconds > 0
    raises(ValueError, "not a process group of crossreduce", measure_topology, dist.new_group(backend="gloo"))


@CHECKS.add
def statistics(c):
    """stats counts the collectives of a group and their bytes. A new group begins at 0."""
    from crossreduce.torch import stats

    group, x = dist.new_group(), torch.ones(1000, dtype=torch.float64)
    assert stats(group).collectives == {}
    for _ in range(5):
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_gather([torch.empty(10) for _ in range(c.size)], torch.ones(10), group=group)
    found = stats(group)
    assert (found.rank, found.size) == (c.rank, c.size)
    counted = {name: tuple(each[:2]) for name, each in found.collectives.items()}
    assert counted == {"all_reduce": (10, 80_000), "all_gather": (1, 40 * c.size)}
    dist.destroy_process_group(group)
    assert found.total.calls <= stats(group).total.calls
    assert stats().total.calls > 12
    raises(ValueError, "not a process group of crossreduce", stats, dist.new_group(backend="gloo"))


@CHECKS.add
def forked(c):
    """A forked process, such as a worker of DataLoader, cannot use the group of its parent, and does not affect it."""
    pid = os.fork()
    if not pid:
        try:
            raises(RuntimeError, "forked", dist.all_reduce, torch.ones(3))
            raises(RuntimeError, "forked", dist.barrier, async_op=True)
            raises(RuntimeError, "forked", dist.isend, torch.ones(3), (c.rank + 1) % c.size)
            raises(RuntimeError, "forked", dist.irecv, torch.ones(3), (c.rank + 1) % c.size)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    data = torch.utils.data.DataLoader(list(range(20)), batch_size=5, num_workers=1)
    assert sum(int(batch.sum()) for batch in data) == 190
    dist.barrier()


@CHECKS.add
def versions(c):
    """Autograd notices the tensors that a call writes, in every form of it, and no others: a backward pass that needs
    values from before the call raises an error."""
    x, y, whole, other = torch.ones(4), torch.ones(4), torch.ones(4 * c.size), torch.ones(4 * c.size)
    rows, columns = ([torch.ones(4) for _ in range(c.size)] for _ in range(2))
    square, bits, name = torch.ones(4, 4), torch.ones(4, dtype=torch.int32), dist.group.WORLD.group_name
    is_root, splits = c.rank == 1, [4] * c.size
    at_root, elsewhere = ([x], []) if is_root else ([], [x])

    def coalesced():
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(y)

    calls = [  # a call, the tensors that it writes, those that it only reads
        (lambda: dist.all_reduce(x), [x], []),
        (lambda: dist.all_reduce(x, async_op=True).wait(), [x], []),
        (lambda: dist.all_reduce(square.T), [square], []),
        (lambda: dist.all_reduce(bits, dist.ReduceOp.BAND), [bits], []),
        (lambda: dist.all_reduce_coalesced([x, y]), [x, y], []),
        (coalesced, [x, y], []),
        (lambda: torch.ops._c10d_functional.all_reduce_(x, "sum", name), [x], []),
        (lambda: dist.reduce(x, 1), at_root, elsewhere),
        (lambda: dist.broadcast(x, 1), elsewhere, at_root),
        (lambda: dist.all_gather(rows, x), rows, [x]),
        (lambda: dist.all_gather_into_tensor(whole, x), [whole], [x]),
        (lambda: dist.gather(x, rows if is_root else None, 1), rows if is_root else [], [x]),
        (lambda: dist.scatter(x, rows if is_root else None, 1), [x], rows),
        (lambda: dist.reduce_scatter(x, rows), [x], rows),
        (lambda: dist.reduce_scatter_tensor(x, whole), [x], [whole]),
        (lambda: dist.all_to_all(rows, columns), rows, columns),
        (lambda: dist.all_to_all_single(whole, other), [whole], [other]),
        (lambda: dist.all_to_all_single(whole, other, splits, splits), [whole], [other]),
    ]
    if c.rank == 0:
        calls += [(lambda: dist.send(x, 1), [], [x]), (lambda: dist.isend(x, 1).wait(), [], [x])]
    if is_root:
        calls += [(lambda: dist.recv(x, 0), [x], []), (lambda: dist.irecv(x).wait(), [x], [])]
    for _ in range(3):  # calls may be prepared at first
        for k, (call, written, read) in enumerate(calls):
            before = [tensor._version for tensor in written + read]
            call()
            after = [tensor._version for tensor in written + read]
            changed = [new > old for old, new in zip(before, after, strict=True)]
            assert changed == [True] * len(written) + [False] * len(read), (k, before, after)

    weight = torch.ones(4 * c.size, requires_grad=True)
    dist.all_gather_into_tensor(whole, torch.ones(4))
    loss = (weight * whole).sum()
    dist.all_gather_into_tensor(whole, torch.zeros(4))
    raises(RuntimeError, "modified by an inplace operation", loss.backward)
    with torch.inference_mode():
        untracked = torch.ones(4)
        dist.all_reduce(untracked)  # has no version
    assert torch.equal(untracked, torch.full((4,), float(c.size)))


def odd_tensors(size):
    """Return tensors whose values are not in their memory, by a word of the error about them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.forward_ad import make_dual
    from torch.distributed.tensor import Replicate, distribute_tensor

    matrix = torch.eye(4)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    return {
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.quint8),
        "sparse_coo": matrix.to_sparse(),
        "sparse_csr": matrix.to_sparse_csr(),
        "_mkldnn": torch.ones(4).to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "NestedTensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "without memory": freed,
        "FakeTensor": FakeTensorMode().from_tensor(torch.ones(4)),
        "DTensor": distribute_tensor(torch.ones(4), dist.init_device_mesh("cpu", (size,)), [Replicate()]),
        "dual": make_dual(torch.ones(4), torch.ones(4)),
    }


@CHECKS.add
def tensors_without_dense_values(c):
    """Tensors whose values are not in their memory are refused on all ranks, also if only one rank passes one."""
    from crossreduce import MismatchError, UnsupportedError

    level = torch.autograd.forward_ad.enter_dual_level()
    for word, odd in odd_tensors(c.size).items():
        of_one = [
            lambda x: dist.broadcast(x, 0),
            lambda x: dist.reduce(x, 1),
            lambda x: dist.broadcast(x, 1, async_op=True).wait(),
            *([] if word == "sparse_coo" else [dist.all_reduce]),
        ]
        of_several = [
            lambda x: dist.all_gather([x] * c.size, x),
            lambda x: dist.gather(x, [x] * c.size if c.rank == 0 else None),
            lambda x: dist.scatter(x, [x] * c.size if c.rank == 0 else None),
            lambda x: dist.all_to_all_single(x, x),
        ]
        for call in of_one + of_several:
            raises(UnsupportedError, word, call, odd)
        for call in of_one:
            raises(MismatchError, "rank 2", call, odd if c.rank == 2 else torch.ones(4))
        if c.rank == 0:
            raises(UnsupportedError, word, dist.send, odd, 1)
        if c.rank == 1:
            raises(UnsupportedError, word, dist.recv, odd, 0)
    torch.autograd.forward_ad.exit_dual_level(level=level)
    lazy = torch.nn.parameter.UninitializedParameter() if c.rank == 2 else torch.zeros(4)
    outputs = [lazy, *(torch.zeros(4) for _ in range(c.size - 1))]
    raises(MismatchError, "rank 2", dist.all_gather, outputs, torch.zeros(4))


@CHECKS.add
def modes_of_the_thread(c):
    """In a mode of torch that changes operations, a call of tensors outside of the mode works. A trace, which would not
    contain the call, raises an error on all ranks."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from crossreduce import MismatchError, UnsupportedError

    x, own = torch.full((2, 3), 4.0**c.rank).T, torch.full((2, 3), 5.0**c.rank).T
    with FakeTensorMode(allow_non_fake_inputs=True):
        dist.all_reduce(x)
        if c.rank < 2:
            (dist.send if c.rank else dist.recv)(own, 1 - c.rank)
    torch.func.grad(lambda w: (dist.all_reduce(x), w)[1])(torch.ones(()))
    assert torch.equal(x, torch.full((3, 2), c.size * sum(4.0**rank for rank in range(c.size))))
    assert torch.equal(own, torch.full((3, 2), 5.0 ** max(c.rank, 1)))
    asynchronous = lambda y: dist.all_reduce(y, async_op=True).wait()  # noqa: E731
    for call in (lambda y: dist.all_reduce(y), lambda y: dist.broadcast(y, 0), asynchronous):
        traced = make_fx(call)
        raises(UnsupportedError, "cannot be traced", traced, torch.ones(3))
        raises(UnsupportedError, "cannot be traced", torch.jit.trace, call, torch.ones(3))
        raises(MismatchError, "rank 1", traced if c.rank == 1 else call, torch.ones(3))


@CHECKS.add
def dtypes_that_torch_cannot_copy(c):
    """Tensors of every dtype are moved in every layout, also if torch cannot copy their elements."""
    for dtype in (torch.uint4, torch.int1, torch.bits16, torch.float4_e2m1fn_x2):
        ints = torch.int16 if dtype.itemsize == 2 else torch.uint8
        every = [torch.arange(12).add(20 * rank).to(ints).reshape(3, 4) for rank in range(c.size)]
        own = every[c.rank].clone()
        dist.broadcast(own.view(dtype).T, 1)
        assert torch.equal(own, every[1])
        if c.rank < 2:
            own = every[c.rank].clone()
            (dist.send if c.rank else dist.recv)(own.view(dtype).T, 1 - c.rank)
            assert torch.equal(own, every[1])
        firsts = [x[: rank + 1].clone() for rank, x in enumerate(every)]
        outs = [torch.zeros_like(x) for x in firsts]
        dist.all_gather([x.view(dtype) for x in outs], firsts[c.rank].view(dtype))
        assert all(map(torch.equal, outs, firsts))
        outs = [torch.zeros(max(c.rank, rank), 4, dtype=ints) for rank in range(c.size)]
        dist.all_to_all([x.view(dtype) for x in outs], [every[c.rank][: len(x)].view(dtype) for x in outs])
        assert all(torch.equal(x, every[rank][: len(x)]) for rank, x in enumerate(outs))


@CHECKS.add
def reductions_that_are_not_defined(c):
    """A reduction that neither the library nor gloo defines raises an error with the dtype and the op on all ranks."""
    from crossreduce import UnsupportedError

    raw = torch.arange(8, dtype=torch.uint8)
    dtypes = (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.bits8,
        torch.uint4,
    )
    for _ in range(2):
        dist.all_reduce(torch.zeros(8, dtype=torch.uint8))  # a prepared call, which must not accept uint4
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for call in (dist.all_reduce, lambda x: dist.reduce(x, 1), lambda x: dist.all_reduce(x, MAX)):
            error = raises(UnsupportedError, name, call, raw.view(dtype))
            assert "try:" in str(error)
        raises(UnsupportedError, name, dist.reduce_scatter_tensor, raw.view(dtype)[:1], raw.view(dtype)[: c.size])
    raises(UnsupportedError, "float32 cannot be reduced by band", dist.all_reduce, torch.ones(3), dist.ReduceOp.BAND)
    raises(
        UnsupportedError, "sparse_coo_float32 cannot be reduced by max", dist.all_reduce, torch.eye(2).to_sparse(), MAX
    )
    raises(UnsupportedError, "sparse_coo_float16", dist.all_reduce, torch.eye(2).half().to_sparse())
    premultiplied = dist._make_nccl_premul_sum(2.0)
    raises(UnsupportedError, "premul_sum", dist.all_reduce, torch.ones(3), premultiplied)


@CHECKS.add
def bitwise_reductions(c):
    """Bitwise reductions of every integer dtype, and of bools, are torch's own, wherever the elements lie in memory."""
    ops = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    for dtype in (*INTEGERS, torch.uint16, torch.uint32, torch.uint64, torch.bool):
        wide = [given(rank, (8,), torch.int64 if dtype is not torch.bool else dtype, 160) for rank in range(c.size)]
        for name, function in ops.items():
            x = torch.empty(9, dtype=dtype)[c.rank % 2 :][:8]
            dist.all_reduce(x.copy_(wide[c.rank]), getattr(dist.ReduceOp, name))
            assert torch.equal(x, functools.reduce(function, wide).to(dtype)), (dtype, name)


@CHECKS.add
def broadcasts_into_elements_that_share_memory(c):
    """If elements of the tensor of a broadcast share memory on all ranks, also on the root, all raise an ArgumentError.
    If they do so on some ranks only, all raise a MismatchError."""
    from crossreduce import ArgumentError, MismatchError

    raises(ArgumentError, "share memory", dist.broadcast, torch.zeros(1).expand(4), 0)
    x = torch.zeros(1).expand(4) if c.rank == 0 else torch.zeros(4)
    raises(MismatchError, "rank 0", dist.broadcast, x, 0)
    if c.rank == 1:
        raises(ArgumentError, "share memory", dist.recv, torch.zeros(1).expand(4), 0)  # takes no message


@CHECKS.add
def messages_to_the_own_rank(c):
    """A rank cannot send a message to itself; the error says so on one host and on several."""
    from crossreduce import ArgumentError

    group = dist.group.WORLD
    for send in (group.send, group.recv):
        raises(ArgumentError, "to itself", send, [torch.ones(1)], c.rank, 0)
    raises(ValueError, "itself", dist.batch_isend_irecv, [dist.P2POp(dist.isend, torch.ones(1), c.rank)])
