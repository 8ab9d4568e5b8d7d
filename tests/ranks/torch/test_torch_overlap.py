"""Collectives of torch tensors that overlap, in all forms, compared with an oracle that uses copies."""

import os
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from budget import examples
from fleets import Fleet
from hypothesis import given
from hypothesis import strategies as st
from overlaps import FORMS, cases, check, places
from ranks import ranks as forked
from torch_running import HERE, Piped

from crossreduce.errors import MismatchError
from crossreduce.ranks.communicator import Communicator
from crossreduce.ranks.prepared import NO_CALLS
from crossreduce.torch import memory
from crossreduce.torch.collectives import Collectives

HOSTS = ["AA", "AAB", *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("AAA", "AB"))]


class ForkedFleet(Fleet):
    """A fleet of processes that are forked from a process that has imported torch, which is fast."""

    def _start(self):
        for command, environment in zip(self.commands, self.environments, strict=True):
            self.running.append(Piped(command, {**os.environ, **environment}, self.log))


@pytest.fixture(scope="module", params=HOSTS)
def ranks(request, tmp_path_factory):
    """Start a group of ranks on one host or on two simulated hosts. Yield its ``Fleet`` and its size."""
    folder, n = tmp_path_factory.mktemp("ranks"), len(request.param)
    environments = [
        {"RANK": str(rank), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "CROSSREDUCE_HOST": request.param[rank]}
        for rank in range(n)
    ]
    command = [str(HERE / "torch_overlap.py"), str(folder)]
    fleet = ForkedFleet([command] * n, environments, folder / "log")
    yield fleet, n
    statuses = fleet.finish()
    assert not any(statuses), (folder / "log").read_text()


@examples(600)
@given(data=st.data())
def test_every_overlap_gives_right_values_or_an_error_on_all_ranks(ranks, data):
    """Each collective gives the same results as with copies. If results overlap, all ranks raise and write nothing."""
    fleet, n = ranks
    case = data.draw(cases(n, FORMS))
    check(case, fleet.run(case))


def exchanged_in_place(rendezvous, store):
    """Execute all-to-alls in place with rows of several sizes, of single tensors and of lists."""
    torch.set_num_threads(1)  # a forked process has no other threads of torch's pool
    rank, n = rendezvous.rank, rendezvous.size
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=n)
    for size in [100, 5000, 20_000] * 8:
        right = torch.arange(n).repeat_interleave(size) * n + rank
        single = torch.arange(n).repeat_interleave(size) + rank * n
        rows = list(single.clone().split(size))
        dist.all_to_all_single(single, single)
        dist.all_to_all(rows, rows)
        assert torch.equal(single, right), size
        assert torch.equal(torch.cat(rows), right), size
    dist.destroy_process_group()


@pytest.mark.parametrize("n", [2, 3])
def test_large_all_to_alls_in_place(tmp_path, n):
    """In an all-to-all in place, no rank reads a row of another rank that already contains a result."""
    forked(n, exchanged_in_place, tmp_path / "store")


def large_parts(rendezvous, store):
    """Execute all-to-alls of large parts: equal ones, and ones of which not all ranks know that they are unequal."""
    torch.set_num_threads(1)
    rank, n = rendezvous.rank, rendezvous.size
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=n, timeout=timedelta(seconds=60))
    size = (5 << 20) // 4 + 3  # more than one message
    right = torch.arange(n).repeat_interleave(size).float() * n + rank
    single = torch.arange(n).repeat_interleave(size).float() + rank * n
    with mock.patch.object(Communicator, "all_to_all", side_effect=AssertionError("copies through slots")):
        for given, out in ((single, torch.zeros_like(single)), (single.clone(), None)):
            got = given if out is None else out
            dist.all_to_all_single(got, given)
            assert torch.equal(got, right)
        rows = [torch.zeros(size) for _ in range(n)]
        dist.all_to_all(rows, list(single.split(size)))
        assert torch.equal(torch.cat(rows), right)
    with pytest.raises(MismatchError, match="another number of rows than it expects"):
        dist.all_to_all_single(torch.zeros(n * (size + rank)), torch.zeros(n * (size + rank)))
    sizes = [[size + ((src, dst) == (0, 1)) for dst in range(n)] for src in range(n)]
    rows = [torch.zeros(row[rank]) for row in sizes]
    dist.all_to_all(rows, [torch.full((count,), 10.0 * rank + dst) for dst, count in enumerate(sizes[rank])])
    for src, row in enumerate(rows):
        assert row.numel() == sizes[src][rank]
        assert (row == 10.0 * src + rank).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_large_all_to_alls_are_messages_if_hosts_have_several_ranks(tmp_path, transport):
    """Each rank sends large parts directly to ranks of other hosts, without copies. Calls that differ raise an error on
    all ranks, and parts may be unequal although some ranks have equal ones."""
    around = {"CROSSREDUCE_TRANSPORT": transport, "UCX_TLS": "tcp"}
    forked(3, large_parts, tmp_path / "store", environment=[around | {"CROSSREDUCE_HOST": host} for host in "ABB"])


STARTS = st.lists(st.integers(0, 20), min_size=1) | st.builds(range, st.integers(0, 20), st.just(21), st.integers(1, 7))
DIMENSIONS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=3)


@given(st.lists(st.tuples(STARTS, DIMENSIONS), max_size=5), st.randoms())
def test_shared_memory_is_found_exactly(drawn, order):
    """``share_memory`` is true if and only if two elements have the same position in memory, for any strides. If
    ``are_apart`` is true, no elements have."""
    views = [(at, [size for size, _ in each], [stride for _, stride in each]) for ats, each in drawn for at in ats]
    order.shuffle(views)
    base = torch.zeros(300, dtype=torch.float16)
    tensors = [torch.as_strided(base, shape, strides, offset) for offset, shape, strides in views]
    positions = places(views)
    shared = len(np.unique(positions)) < len(positions)
    assert memory.share_memory(tensors) == shared
    if memory.are_apart(tensors):
        assert not shared
        assert all(x.is_contiguous() for x in tensors)


@pytest.mark.parametrize("count", [16, 1024])
def test_columns_of_one_tensor_are_compared_at_once(count, monkeypatch):
    """For any number of columns of one tensor, three calls of ``share_memory`` make at most 12 comparisons in NumPy."""
    compared, real = [], np.shares_memory
    monkeypatch.setattr(np, "shares_memory", lambda *pair: compared.append(pair) or real(*pair))
    whole = torch.zeros(8, count)
    assert not memory.share_memory(list(whole.T))
    assert memory.share_memory([*whole.T, whole[:, count // 2]])
    assert memory.share_memory([*whole.T, whole[3, 1:2]])
    assert len(compared) <= 12


class Recorder:
    """A communicator of one rank that only records the addresses of the arrays in its calls."""

    def __init__(self, rank, size):
        self.rank, self.size, self.used = rank, size, []
        self.hosts = ((0,), tuple(range(1, size)))

    def supports(self, *_):
        return True

    def agree(self, text):
        pass

    def __getattr__(self, name):
        def record(*arguments):
            lists = [argument if isinstance(argument, list) else [argument] for argument in arguments]
            self.used.append([each.address for one in lists for each in one if isinstance(each, memory.ArrayView)])

        return record


def test_own_parts_are_not_copied(monkeypatch):
    """Inputs that overlap results are copied, except if the input is the result, or this rank's part of it."""
    monkeypatch.setattr("crossreduce.torch.collectives.new_calls", lambda _: NO_CALLS)  # no call is prepared
    recorder = Recorder(1, 3)
    collectives, kind = Collectives(recorder, None), dist.AllreduceOptions().reduceOp
    x = torch.zeros(3, 4)
    rows = list(x)
    at = [row.data_ptr() for row in rows]  # row 1 is the part of rank 1
    collectives.all_reduce(x, kind)
    collectives.all_gather(rows, rows[1])
    collectives.all_gather_single(x, rows[1])
    collectives.reduce_scatter(rows[1], rows, kind)
    collectives.reduce_scatter_single(rows[1], x, kind)
    collectives.gather(rows, rows[1], 1)
    collectives.scatter(rows[1], rows, 1)
    own_first, own_last = [at[1], *at], [*at, at[1]]
    assert recorder.used == [at[:1] * 2, own_first, own_first, own_last, own_last, own_first, own_last]
    recorder.used.clear()
    collectives.all_gather_single(x, rows[0])  # not in place: row 0 is the part of rank 0
    collectives.reduce_scatter(rows[0], rows, kind)
    gathered, reduced = recorder.used
    assert gathered[1:] == at
    assert gathered[0] not in at
    assert reduced[1:] == [at[1], at[2], at[0]]
    assert reduced[0] not in at
