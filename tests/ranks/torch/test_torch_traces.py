"""Traces of process groups of ``torch.distributed`` contain the time in the queue, and calls that gloo executes."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import ranks
from trace_events import read_events

import crossreduce.torch  # noqa: F401 - registers the backend
from crossreduce.observe.traces.calls import read_directory
from crossreduce.observe.traces.format import Phase

LATE_S = 0.1


def calls(rendezvous, store):
    """Queue three all-reduces, of which rank 0 delays the first. Then make single calls, in two groups."""
    torch.set_num_threads(1)
    rank, size = rendezvous.rank, rendezvous.size
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(5))
    if rank == 0:
        time.sleep(LATE_S)
    works = [dist.all_reduce(torch.ones(100 + k), async_op=True) for k in range(3)]
    for work in works:
        work.wait()
    dist.all_reduce(torch.ones(3).to_sparse())
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(7), group=group)
    dist.destroy_process_group()


def test_ops_wait_in_the_queue(tmp_path, crossreduce):
    """The trace of an asynchronous call contains its time in the queue, which includes the delay of an earlier call. A
    synchronous call has no such time. In a call that gloo executes, gloo's work is a phase of its own. So is
    the making of gloo's group, in the first such call."""
    ranks(2, calls, str(tmp_path / "store"), environment=[{"CROSSREDUCE_TRACE": str(tmp_path / "trace")}] * 2)
    (groups,) = read_directory(tmp_path / "trace").runs
    world = next(group for group in groups if len(group.ranks[0].calls) > 2)
    assert len(groups) == 2
    for rank, found in world.ranks.items():
        by_text = {call.text: call for call in found.calls}
        queued = [by_text[f"all_reduce sum float32[{size}]"] for size in (100, 101, 102)]
        assert by_text["all_reduce sum float32[5]"].queued_ns is None
        assert all(call.queued_ns < call.begin_ns for call in queued)
        if rank == 1:
            assert (queued[2].begin_ns - queued[2].queued_ns) / 1e9 > 0.8 * LATE_S
        inner = [call for call in found.calls if Phase.INNER in [part.phase for part in call.parts]]
        assert ["sparse" in call.text for call in inner] == [True] * 2
    assert crossreduce("trace", tmp_path / "trace", "-o", tmp_path / "trace.json")[0] == 0
    events = read_events((tmp_path / "trace.json").read_text())
    begins = [event for event in events if event["ph"] == "b"]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert len(begins) == len(ends) == 6  # those in the queue
    assert max(ends[event["id"]] - event["ts"] for event in begins) > 0.8 * LATE_S * 1e6
