"""Training continues in the same processes after ranks have died: DDP, FSDP2, and groups of some ranks.

The oracle of the training cases is one process that trains on whole batches. The ranks split each batch evenly, so the
oracle does not depend on the number of ranks. All numbers are float64, so that rounding differences are tiny.
"""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kinds_of_groups import die, wait_until
from ranks import Died, Moment, ranks
from torch.nn.parallel import DistributedDataParallel
from torch_oracle import given, raises
from torch_training import Model

import crossreduce.torch
from crossreduce import ContextError, PeerLostError

pytestmark = pytest.mark.usefixtures("torch_optimizers")
BATCH = 12  # samples of a step, which 1, 2, 3 or 4 ranks can split evenly
STEPS = 6
DEADLY = 2  # the step in which ranks die


def batch(step):
    """Return the samples of a step."""
    return (given(0, (BATCH, width), torch.float64, 10 * step + width) for width in (7, 5))


def mean_loss(model, step):
    """Return the mean loss of this rank's share of a batch. The mean over the ranks is the mean loss of the batch."""
    x, y = (each[dist.get_rank() :: dist.get_world_size()] for each in batch(step))
    return ((model(x) - y) ** 2).mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def oracle():
    """Return the model that one process trains."""
    model = Model()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return model


def expect_trained(parameters):
    """Check that these are the weights of the oracle, up to rounding."""
    wanted = list(oracle().parameters())
    assert len(parameters) == len(wanted)
    for got, want in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def die_in_backward(model, killed):
    """Make the ranks ``killed`` die in the middle of the next backward pass."""
    if dist.get_rank() in killed:
        model.second.register_full_backward_hook(lambda *_: die())


class Ddp:
    """Training by DistributedDataParallel. ``renew`` wraps the same model again when the group has changed."""

    def __init__(self):
        self.model = Model()
        self.optimizer = sgd(self.model)
        self.renew()

    def backward(self, step):
        self.optimizer.zero_grad()
        mean_loss(self.parallel, step).backward()

    def renew(self):
        self.parallel = DistributedDataParallel(self.model, bucket_cap_mb=0.001)

    def parameters(self):
        return list(self.model.parameters())


class Hsdp(Ddp):
    """Training by FSDP2 with replicas of ``shards`` ranks. ``renew`` shards the state again, over all ranks left."""

    shards = 2

    def __init__(self):
        self.shard(Model(), {})

    def shard(self, model, momentum):
        """Shard a model that is the same on all ranks, and the momentum of its optimizer ({} at first)."""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        size = dist.get_world_size()
        self.parts = self.shards if size % self.shards == 0 else size
        mesh = dist.init_device_mesh("cpu", (size // self.parts, self.parts), mesh_dim_names=("replicate", "shard"))
        self.part = mesh.get_local_rank("shard")
        self.model = self.parallel = model
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.optimizer = sgd(model)
        for p, whole in zip(model.parameters(), momentum, strict=False):
            own = self.share(whole, self.parts)[self.part]
            made = DTensor.from_local(own, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            self.optimizer.state[p]["momentum_buffer"] = made

    @staticmethod
    def share(whole, parts):
        """Return a tensor's shards, one per rank of a replica. The last ones may be empty."""
        found = list(whole.chunk(parts))
        return found + [whole[:0]] * (parts - len(found))

    def renew(self):
        """Broadcast each shard from a rank that has it, and shard the whole model again."""
        held = [None] * dist.get_world_size()  # the number of the shard of each rank
        dist.all_gather_object(held, self.part)
        assert {*held} == {*range(self.parts)}, "a whole replica is left"
        fresh = Model()

        def whole(sharded, like):
            parts = [torch.empty_like(part) for part in self.share(like, self.parts)]
            parts[self.part] = sharded.to_local().contiguous()
            for k, part in enumerate(parts):
                dist.broadcast(part, held.index(k))
            return torch.cat(parts)

        momentum = []
        sharded = self.optimizer.param_groups[0]["params"]  # the failed step may have left unsharded ones in the model
        for p, new in zip(sharded, fresh.parameters(), strict=True):
            state = self.optimizer.state[p]
            new.data.copy_(whole(p.detach(), new.detach()))
            momentum.append(whole(state["momentum_buffer"], new.detach()))
        self.shard(fresh, momentum)

    def parameters(self):
        return [p.full_tensor() for p in self.model.parameters()]


def train(kind, killed):
    """Train. The ranks ``killed`` die in the backward pass of one step, and the others repeat that step."""
    trainer, changes = kind(), []

    def changed(reformed):
        changes.append(list(reformed.members))
        trainer.renew()

    for step in range(STEPS):
        if step == DEADLY and not changes:
            die_in_backward(trainer.model, killed)
        crossreduce.torch.committed(lambda step=step: trainer.backward(step), changed)
        trainer.optimizer.step()
    assert changes == [[rank for rank in range(4) if rank not in killed]]
    assert dist.get_world_size() == 4 - len(killed)
    expect_trained(trainer.parameters())


def ddp(*_):
    """Two of four ranks die at once under DDP. One of them is rank 0, which serves the store of the rendezvous."""
    train(Ddp, (0, 2))


def hsdp(*_):
    """A rank of the second of two FSDP2 replicas dies. The three ranks left shard the state of the first replica."""
    train(Hsdp, (3,))


def subgroups(*_):
    """shrink makes a default group. ``reformed`` has its ranks and the number of ops that succeeded on all of them.
    Earlier groups are closed, and their calls raise errors that say so. New groups can be made."""
    pair, world = dist.new_group([0, 2]), dist.group.WORLD
    x = torch.ones(5)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        die()
    dist.all_reduce(x, group=pair)
    raises(PeerLostError, "call shrink, or restart", dist.all_reduce, x)
    made = crossreduce.torch.shrink()
    assert made is dist.group.WORLD
    assert made.reformed == ((0, 2), 1)  # the ranks that are left, and the first all-reduce
    advice = "create the group again: shrink, grow and destroy_process_group end all earlier groups"
    for group in (pair, world):
        raises(ValueError, advice, dist.all_reduce, x, group=group)  # torch's own error, which shows the group
        raises(ContextError, advice, group.allreduce, [x])
        raises(ContextError, advice, crossreduce.torch.shrink, group)
        raises(ContextError, advice, crossreduce.torch.agree, True, group)
        raises(ContextError, advice, crossreduce.torch.invitation, group)
    again = dist.new_group([0, 1])  # the new numbers of ranks 0 and 2
    x = torch.ones(5)
    dist.all_reduce(x, group=again)
    assert x.tolist() == [2.0] * 5
    dist.destroy_process_group()
    assert not dist.is_initialized()


def waits_in_a_subgroup(*_):
    """Rank 1 dies. Rank 0 notices it in a sub-group with rank 1, rank 2 waits for rank 0 in another sub-group, and rank
    3 for rank 2 in a third one. All three continue at once."""
    members = [0, 1], [0, 2], [2, 3]
    pairs = [dist.new_group(each) for each in members]
    begun = Moment()

    def step():
        if dist.get_world_size() == 3:
            return
        if dist.get_rank() == 1:
            die()
        for pair, own in zip(pairs, members, strict=True):
            if dist.get_rank() in own:
                dist.all_reduce(torch.ones(5), group=pair)

    crossreduce.torch.committed(step)
    assert dist.get_world_size() == 3
    assert Moment().seconds_since(begun) < 25, "less than the timeout of the groups, 30 s"


def both_at_once(number, folder):
    """One call of grow removes a dead rank and admits a new process. The dead rank, rank 0, made the invitation."""
    invited = folder / "invitation"
    if number == 3:
        wait_until(invited.exists)
        crossreduce.torch.join(invited.read_text())
    else:
        if number == 0:
            (folder / "partial").write_text(crossreduce.torch.invitation())
            (folder / "partial").rename(invited)
            die()
        made = None
        while made is None:
            made = crossreduce.torch.grow()
        assert made.reformed.members == (1, 2)
    assert (dist.get_rank(), dist.get_world_size()) == (number - 1, 3)
    parts = [torch.zeros(1000) for _ in range(3)]
    dist.all_gather(parts, torch.full((1000,), float(number)))
    assert [part[-1] for part in parts] == [1, 2, 3]


def lives(rendezvous, case, members, folder):
    """Run a case in one process. The first ``members`` processes are the ranks of a group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns of functions that have newer names
    number, timeout = rendezvous.rank, timedelta(seconds=30)
    if number < members:
        where = f"file://{folder}/store"
        dist.init_process_group("crossreduce", where, rank=number, world_size=members, timeout=timeout)
    case(number, folder)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "processes", "killed", "joining"),
    [
        pytest.param(ddp, 4, (0, 2), 0, id="ddp"),
        pytest.param(hsdp, 4, (3,), 0, id="hsdp", marks=pytest.mark.system),
        pytest.param(subgroups, 3, (1,), 0, id="subgroups"),
        pytest.param(waits_in_a_subgroup, 4, (1,), 0, id="waits in a sub-group"),
        pytest.param(both_at_once, 4, (0,), 1, id="both at once"),
    ],
)
def test_survivors_go_on(tmp_path, case, processes, killed, joining):
    """Each case passes in all processes that it does not kill. The other processes die."""
    found = ranks(processes, lives, case, processes - joining, tmp_path, check=False)
    for number, one in enumerate(found):
        assert isinstance(one, Died) if number in killed else one is None, getattr(one, "__notes__", one)
