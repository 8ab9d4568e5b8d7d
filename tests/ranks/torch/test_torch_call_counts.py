"""How many calls of the communicator a collective of torch takes: each of them waits for all ranks."""

import torch
import torch.distributed as dist
from ranks import ranks


def counted(rendezvous, store):
    """Return how many calls each collective takes when it is repeated."""
    torch.set_num_threads(1)  # a forked process has no other threads of torch's pool
    rank, n = rendezvous.rank, rendezvous.size
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=n)
    memory = dist.group.WORLD.communicator.memory
    sent, received = [rank + k + 1 for k in range(n)], [k + rank + 1 for k in range(n)]
    parts, room = torch.full((sum(sent), 2), rank), torch.zeros(sum(received), 2, dtype=torch.int64)
    rows, written = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    mixed = [[2, 2], [2, 5]][rank]  # equal on rank 0 only
    few, some = torch.full((sum(mixed),), rank), torch.zeros(sum(mixed), dtype=torch.int64)
    bits, many = torch.tensor([1 << rank]), torch.full((3000,), 1 << rank)
    calls = [
        lambda: dist.all_to_all_single(room, parts, received, sent),
        lambda: dist.all_to_all_single(written, rows),
        lambda: dist.all_to_all_single(some, few, mixed, mixed),
        lambda: dist.all_reduce(bits, op=dist.ReduceOp.BOR),
        lambda: dist.all_reduce(many, op=dist.ReduceOp.BOR),
    ]
    counts = []
    for call in calls:
        call()
        before = memory.number
        call()
        counts.append(memory.number - before)
    assert torch.equal(room[:, 0], torch.arange(n).repeat_interleave(torch.tensor(received)))
    assert torch.equal(some, torch.arange(n).repeat_interleave(torch.tensor(mixed)))
    assert torch.equal(written, torch.full((n,), rank))
    assert {*bits.tolist(), *many.tolist()} == {(1 << n) - 1}
    dist.destroy_process_group()
    return counts


def test_few_calls_per_collective(tmp_path):
    """An all-to-all takes one call, also of unequal parts. One more shows that only some ranks have equal parts. A
    bitwise reduction takes one call."""
    assert ranks(2, counted, tmp_path / "store") == [[1, 1, 2, 1, 1]] * 2
