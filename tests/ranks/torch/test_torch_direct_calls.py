"""All-reduces of a group of torch that were prepared run without Python, unless they need a part of it."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from crossreduce import ArgumentError, ContextError, ReduceOp
from crossreduce.engines.host.prepared import compiled_module
from crossreduce.torch.options import option_probes

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
    return {
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


def unknown_layout(rendezvous, store):
    """Rank 1 does not know where the options of calls are in memory."""
    if rendezvous.rank == 1:
        assert not compiled_module().use_torch_options(dist.AllreduceOptions, [], [], [], [])
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
    use, (options, *facts) = compiled_module().use_torch_options, option_probes()
    try:
        for k, probes in enumerate(facts):
            assert len(probes) == 8
            for number, (made, value) in enumerate(probes):
                other = [*probes[:number], (made, value + 1), *probes[number + 1 :]]
                assert not use(options, *facts[:k], other, *facts[k + 1 :]), (k, number)
            assert not use(options, *facts[:k], probes[:0], *facts[k + 1 :])
    finally:
        assert use(options, *facts)
