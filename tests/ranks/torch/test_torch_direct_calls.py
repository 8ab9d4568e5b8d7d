"""Collectives of a group of torch that were prepared run without Python, unless they need a part of it."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode

from crossreduce import ArgumentError, ContextError, ReduceOp
from crossreduce.engines.host.prepared import compiled_module
from crossreduce.ranks.intra_host.shared_memory import SPIN_S
from crossreduce.torch.options import option_probes

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # their names before torch 2.13
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
LIMIT, OTHER = timedelta(seconds=50), timedelta(seconds=40)


def group_of(rendezvous, store):
    torch.set_num_threads(1)  # a forked process has no other threads of torch's pool
    dist.init_process_group(
        "crossreduce", f"file://{store}", rank=rendezvous.rank, world_size=rendezvous.size, timeout=LIMIT
    )
    return dist.group.WORLD


def options_of(timeout=None, asynchronous=False):
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    if timeout is not None:
        options.timeout = timeout
    return options


def others(group, x):
    """Return calls of the other collectives, which take a function that makes their options."""
    small, large = torch.ones(4), torch.ones(8)
    return {
        "broadcast": lambda o: group.broadcast([x], o(c10d.BroadcastOptions)).wait(),
        "all_gather": lambda o: group.all_gather_single(large, small, o(c10d.AllgatherOptions)).wait(),
        "reduce_scatter": lambda o: group.reduce_scatter_single(small, large, o(c10d.ReduceScatterOptions)).wait(),
        "all_to_all": lambda o: group.all_to_all_single(large, x, (), (), o(c10d.AllToAllOptions)).wait(),
    }


def with_options(call, **values):
    def made(kind):
        options = kind()
        options.asyncOp = False
        for name, value in values.items():
            setattr(options, name, value)
        return options

    return lambda: call(made)


def in_mode(call):
    with FakeTensorMode(allow_non_fake_inputs=True):
        call()


def profiled(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        call()


def ways_of(group):
    """Return ways to reduce the tensors that they return, and whether they run without Python when repeated."""
    x, columns, weights = torch.ones(2, 4), torch.ones(4, 2).T, torch.nn.Parameter(torch.ones(2, 4))
    with torch.inference_mode():
        inferred = torch.ones(2, 4)
    eight, four = torch.ones(8), torch.ones(4)
    further = {}
    for name, call in others(group, eight).items():
        further[name] = True, with_options(call)
        further[f"{name}, timeout of the group"] = True, with_options(call, timeout=LIMIT)
        further[f"{name}, other timeout"] = False, with_options(call, timeout=OTHER)
        further[f"{name}, asynchronous"] = False, with_options(call, asyncOp=True)
        further[f"{name}, profiler"] = False, lambda call=call: profiled(with_options(call))
    return further | {
        "broadcast from rank 1": (True, lambda: dist.broadcast(x, 1)),
        "all_gather of torch": (True, lambda: ALL_GATHER(eight, four)),
        "reduce_scatter of torch": (True, lambda: REDUCE_SCATTER(four, eight, dist.ReduceOp.AVG)),
        "all_to_all of torch": (True, lambda: dist.all_to_all_single(torch.empty(8), eight)),
        "all_to_all with splits": (False, lambda: dist.all_to_all_single(torch.empty(8), eight, [4, 4], [4, 4])),
        "all_gather of columns": (False, lambda: ALL_GATHER(eight, torch.ones(2, 2).T)),
        "torch.distributed": (True, lambda: dist.all_reduce(x)),
        "directly": (True, lambda: group.all_reduce(x)),
        "name": (True, lambda: group.all_reduce(x, "max")),
        "op": (True, lambda: group.all_reduce(x, ReduceOp.MEAN)),
        "op of torch": (True, lambda: group.all_reduce(x, dist.ReduceOp.MIN)),
        "timeout of the group": (True, lambda: group.allreduce([x], options_of(LIMIT)).wait()),
        "other timeout": (False, lambda: group.allreduce([x], options_of(OTHER)).wait()),
        "asynchronous": (False, lambda: group.allreduce([x], options_of(asynchronous=True)).wait()),
        "bitwise": (True, lambda: group.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.BOR)),
        "inference mode": (True, torch.inference_mode()(lambda: group.all_reduce(inferred))),
        "inference mode, torch.distributed": (True, torch.inference_mode()(lambda: dist.all_reduce(inferred))),
        "ended inference mode": (False, lambda: group.all_reduce(inferred)),
        "columns": (False, lambda: group.all_reduce(columns)),
        "parameter": (False, lambda: group.all_reduce(weights.detach_().requires_grad_())),
        "profiler": (False, lambda: profiled(lambda: group.all_reduce(x))),
        "mode": (False, lambda: in_mode(lambda: group.all_reduce(x))),
    }


def without_python(rendezvous, store):
    """Return for each way how many of two calls, after a first one, began without Python, and how many were counted."""
    group = group_of(rendezvous, store)
    found, prepared = {}, group._prepared
    for name, (_, call) in ways_of(group).items():
        call()
        before = prepared.begun(), group._get_sequence_number_for_group()
        call(), call()
        found[name] = prepared.begun() - before[0], group._get_sequence_number_for_group() - before[1]
    x = torch.ones(2, 4)
    work = group.allreduce([x], options_of())
    assert (work.wait(), work.is_completed(), work.result()[0] is x) == (True, True, True)
    group.set_timeout(OTHER)
    begun = prepared.begun()
    assert torch.equal(group.all_reduce(x), torch.full((2, 4), float(group.size() ** 2)))
    assert prepared.begun() == begun
    for given, op, word in ((x.numpy(), "sum", "a tensor"), ([x], "sum", "a tensor"), (x, "sums", "not a known")):
        with pytest.raises(ArgumentError, match=word):
            group.all_reduce(given, op)
    dist.destroy_process_group()
    with pytest.raises(ContextError, match="destroyed"):
        group.all_reduce(x)
    return found


def test_which_calls_run_without_python(tmp_path):
    """A repeated synchronous all-reduce of a plain tensor with the group's timeout runs without Python, and no other.
    Every call is counted once. A changed timeout of the group, and the end of the group, are noticed."""
    expected = {name: (2 if is_prepared else 0, 2) for name, (is_prepared, _) in ways_of(None).items()}
    assert ranks(2, without_python, tmp_path / "store") == [expected] * 2


def repeated(group, given, out, part):
    """Call each of the other collectives, and return their results, torch's counts of writes, and how many calls began
    without Python."""
    calls = {
        "broadcast": (out, lambda: dist.broadcast(out.copy_(given), 1)),
        "all_gather": (out, lambda: ALL_GATHER(out, given[:2].clone())),
        "reduce_scatter": (part, lambda: REDUCE_SCATTER(part, given, dist.ReduceOp.MAX)),
        "all_to_all": (out, lambda: dist.all_to_all_single(out, given)),
    }
    found = {}
    for name, (result, call) in calls.items():
        before, begun = result._version, group._prepared.begun()
        call()
        found[name] = result.tolist(), result._version - before, group._prepared.begun() - begun
    return found


def results_of(rendezvous, store):
    group, rank = group_of(rendezvous, store), rendezvous.rank
    out, part = torch.zeros(6), torch.zeros(2)
    found = [repeated(group, torch.arange(6.0) + 10 * rank + step, out, part) for step in range(3)]
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    assert group.all_gather_single(out, torch.zeros(2), options).result()[0] is out
    with pytest.raises(RuntimeError, match="expect"):  # the compiled path wrote a count into None: the process ended
        group.all_gather_single(None, torch.zeros(2), options)
    dist.destroy_process_group()
    return found


def test_results_and_versions_of_repeated_calls(tmp_path):
    """Collectives that run without Python give the values of the first call, and autograd sees each write."""
    all_ranks = range(3)
    for rank, steps in enumerate(ranks(3, results_of, tmp_path / "store")):
        for step, found in enumerate(steps):
            begun = int(step > 0)
            assert found == {
                "broadcast": ([10.0 + step + k for k in range(6)], 1 + (rank != 1), begun),  # 1 of ``copy_``
                "all_gather": ([10.0 * other + step + k for other in all_ranks for k in range(2)], 1, begun),
                "reduce_scatter": ([20.0 + step + 2 * rank + k for k in range(2)], 1, begun),
                "all_to_all": ([10.0 * other + step + 2 * rank + k for other in all_ranks for k in range(2)], 1, begun),
            }


def unequal_parts(rendezvous, store):
    """Rank 1 later has parts of other sizes, and says so; the others have equal ones, as before."""
    group, found = group_of(rendezvous, store), []
    for sizes in ((2, 2), (2, 2), (2, 5), (2, 2)):
        own = list(sizes) if rendezvous.rank == 1 else [2, 2]
        given, out = torch.arange(float(sum(own))) + 100 * rendezvous.rank, torch.zeros(sum(own))
        before = group._get_sequence_number_for_group()
        dist.all_to_all_single(out, given, *([own, own] if own != [2, 2] else []))
        found.append((out.tolist(), group._get_sequence_number_for_group() - before))
    dist.destroy_process_group()
    return found


def test_an_all_to_all_with_unequal_parts_on_one_rank(tmp_path):
    """A rank with equal parts begins a prepared call, learns that another one's are unequal, and exchanges them."""
    for rank, found in enumerate(ranks(2, unequal_parts, tmp_path / "store")):
        rows = [0.0, 1.0, 100.0, 101.0] if rank == 0 else [2.0, 3.0, 102.0, 103.0]
        unequal = rows if rank == 0 else [2.0, 3.0, *(102.0 + k for k in range(5))]
        assert found == [(rows, 1), (rows, 1), (unequal, 1), (rows, 1)]


def unknown_layout(rendezvous, store):
    """Rank 1 does not know where the options of calls are in memory."""
    if rendezvous.rank == 1:
        assert not compiled_module().use_torch_options([], [])
    group, x = group_of(rendezvous, store), torch.ones(3)
    for _ in range(3):
        dist.all_reduce(x)
        group.all_reduce(x, "mean")
    assert x.tolist() == [8.0] * 3
    begun = group._prepared.begun()
    dist.destroy_process_group()
    return begun


def test_options_are_read_by_torch_if_their_layout_is_unknown(tmp_path):
    """All calls then take the path in Python. So do those of torch versions whose options lie elsewhere in memory."""
    assert ranks(2, unknown_layout, tmp_path / "store") == [4, 0]


def test_an_unexpected_layout_of_options_is_noticed():
    """The layout is unknown if one number is not where the others are, or could be in several places."""
    use, (timeouts, kinds) = compiled_module().use_torch_options, option_probes()

    def broken(probes):
        assert len(probes) == 8
        for number, (made, value) in enumerate(probes):
            yield [*probes[:number], (made, value + 1), *probes[number + 1 :]]
        yield []

    try:
        assert len(kinds) == 5
        assert all(not use(other, kinds) for other in broken(timeouts))
        assert not use(timeouts, kinds[:4])
        for k, kind in enumerate(kinds):
            for place, probes in enumerate(kind[2:], 2):
                for other in broken(probes) if probes is not None else ():
                    changed = [*kinds[:k], (*kind[:place], other, *kind[place + 1 :]), *kinds[k + 1 :]]
                    assert not use(timeouts, changed), (k, place)
    finally:
        assert use(timeouts, kinds)


def on_one_processor(rendezvous, store):
    """Return the CPU time of a call, in s, when both ranks may use the same processor only, after they have met."""
    group_of(rendezvous, store)
    x = torch.ones(16)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(50):
        dist.all_reduce(x)
    before = time.process_time()
    for _ in range(500):
        dist.all_reduce(x)
    used_s = time.process_time() - before
    dist.destroy_process_group()
    return used_s / 500


def test_ranks_that_share_a_processor_do_not_spin(tmp_path):
    """Spinning keeps the awaited rank from running: each call would then take the time for which a rank spins."""
    assert max(ranks(2, on_one_processor, tmp_path / "store")) < SPIN_S / 2
