"""Entries of calls in torch.profiler: names, nesting, shapes, dtypes, details of the group, durations, errors."""

import json
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch.profiler import ProfilerActivity, profile, record_function

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce.errors import MismatchError

SLOW_S = 0.2


def profiler():
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True)


def ours(found):
    """Return the entries of this library in a profile."""
    return [event for event in found.events() if event.name.startswith("crossreduce:")]


def entries(rank, size, folder):
    """While a profiler is on, each call has an entry with shapes, dtype and group, nested in the range around it."""
    x, parts = torch.ones(6, 5, dtype=torch.float64), [torch.zeros(6, 5, dtype=torch.float64) for _ in range(size)]
    dist.all_reduce(x)  # the first call of a group, without a profiler
    with profiler() as found, record_function("mine"):
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather(parts, x)
        dist.reduce_scatter(x, [part.clone() for part in parts])
        dist.all_gather_single(torch.zeros(size * 6, 5, dtype=torch.float64), x)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
    names = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_gather", "barrier"]
    names += [["send"], ["recv"], []][min(rank, 2)]
    made = ours(found)
    assert [event.name for event in made] == [f"crossreduce:{name}" for name in names]
    assert {event.cpu_parent.name for event in made} == {"mine"}
    shapes = [event.input_shapes for event in made if event.name != "crossreduce:barrier"]
    assert shapes == [[[6, 5]]] * (len(names) - 1)
    found.export_chrome_trace(str(folder / f"{rank}.json"))
    events = json.loads((folder / f"{rank}.json").read_text())["traceEvents"]
    facts = [event["args"] for event in events if event.get("name", "").startswith("crossreduce:")]
    assert [fact["Collective name"] for fact in facts[:3]] == ["allreduce", "broadcast", "allgather"]
    assert {fact["dtype"] for fact in facts if fact["Collective name"] != "barrier"} == {"float64"}
    assert {fact["Group size"] for fact in facts} == {size}
    assert {fact["Process Group Description"] for fact in facts} == {"default_pg"}
    assert (facts[2]["In msg nelems"], facts[2]["Out msg nelems"]) == (30, 30 * size)
    assert (facts[3]["In msg nelems"], facts[3]["Out msg nelems"]) == (30, 30)
    dist.all_reduce(x)  # the profiler is off
    assert ours(found) == made


def lasting(rank, size):
    """An asynchronous call has a second entry, which ends when the op has run in the queue's thread."""
    x = torch.ones(100)
    with profiler() as found, record_function("mine"):
        dist.barrier()
        if rank == 1:
            time.sleep(SLOW_S)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x[0].item() == size
    start, whole = sorted(ours(found)[1:], key=lambda event: event.is_async)  # the first entry is the barrier's
    assert (start.name, whole.name) == ("crossreduce:all_reduce",) * 2
    assert (start.cpu_parent.name, start.is_async, whole.is_async) == ("mine", False, True)
    assert start.input_shapes == [[100]]
    if rank == 0:  # it waits for rank 1
        assert whole.time_range.elapsed_us() >= 0.5 * SLOW_S * 1e6
    assert start.time_range.start <= whole.time_range.start
    assert whole.time_range.end >= start.time_range.end


def failing(rank):
    """A call that raises an error, at once or in ``wait``, has its entries, and does not affect the next profile."""
    with profiler() as found:
        with pytest.raises(MismatchError, match="all_reduce"):
            dist.all_reduce(torch.ones(10 + rank))
        work = dist.all_reduce(torch.ones(10 + rank), async_op=True)
        with pytest.raises(MismatchError, match="all_reduce"):
            work.wait()
    assert [event.is_async for event in sorted(ours(found), key=lambda event: event.is_async)] == [False, False, True]
    with profiler() as found:
        dist.all_reduce(torch.ones(10))
    assert len(ours(found)) == 1


def training():
    """DDP's reductions, which C++ starts in the backward pass, have entries."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    model(torch.ones(4, 10)).sum().backward()
    with profiler() as found:
        model(torch.ones(4, 10)).sum().backward()
    names = [event.name for event in ours(found)]
    assert names.count("crossreduce:all_reduce") >= 1
    assert any(event.is_async for event in ours(found))


def profiled(rendezvous, folder):
    torch.set_num_threads(1)  # a forked process has no other threads of torch's pool
    rank, size, timeout = rendezvous.rank, rendezvous.size, timedelta(seconds=30)
    dist.init_process_group("crossreduce", f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    entries(rank, size, folder)
    lasting(rank, size)
    failing(rank)
    training()
    dist.destroy_process_group()


def test_calls_have_entries(tmp_path):
    """Synchronous, asynchronous and failed calls, and calls of DDP, have the entries that the functions above check."""
    ranks(3, profiled, tmp_path)
