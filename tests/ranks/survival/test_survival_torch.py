"""Training continues in the same processes after ranks have died: DDP, FSDP2, and groups of some ranks.

The oracle of the training cases is one process that trains on whole batches. The ranks split each batch evenly, so it
does not matter for the oracle how many they are. All numbers are float64, so that rounding differences are tiny.
"""

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kinds_of_groups import die, wait_until
from ranks import Died, ranks
from torch.nn.parallel import DistributedDataParallel
from torch_oracle import given, raises
from torch_training import Model

import crossreduce.torch
from crossreduce import ContextError, PeerLostError

pytestmark = pytest.mark.usefixtures("torch_optimizers")
BATCH = 12  # samples of a step; 1, 2, 3, 4 ranks have equally many
STEPS = 6
DEADLY = 2  # the step in which ranks die


def batch(step):
    """Return the samples of a step."""
    return (given(0, (BATCH, width), torch.float64, 10 * step + width) for width in (7, 5))


def mean_loss(model, step):
    """Return the mean loss of this rank's share of a batch; the mean over the ranks is that of the batch."""
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
    """Let some ranks die in the middle of the backward pass."""
    if dist.get_rank() in killed:
        model.second.register_full_backward_hook(lambda *_: die())


class Ddp:
    """DistributedDataParallel: made again, with the same model and optimizer, when the group has changed."""

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
    """FSDP2 with replicas of ``shards`` ranks. The state of a replica that is left is sharded over all ranks."""

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
        """Return the shards of a tensor; the last ones may be empty."""
        found = list(whole.chunk(parts))
        return found + [whole[:0]] * (parts - len(found))

    def renew(self):
        """Let for each shard a rank that has it send it to all, and shard the model again."""
        held = [None] * dist.get_world_size()
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
        sharded = self.optimizer.param_groups[0]["params"]  # those of the model may be whole in the failed step
        for p, new in zip(sharded, fresh.parameters(), strict=True):
            state = self.optimizer.state[p]
            new.data.copy_(whole(p.detach(), new.detach()))
            momentum.append(whole(state["momentum_buffer"], new.detach()))
        self.shard(fresh, momentum)

    def parameters(self):
        return [p.full_tensor() for p in self.model.parameters()]


def train(kind, killed):
    """Train; some ranks die in the backward pass of one step, and the others repeat that step."""
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
    """Two of four ranks die at once under DDP: rank 0, and with it the store of the rendezvous, and another one."""
    train(Ddp, (0, 2))


def hsdp(*_):
    """A rank of the second of two replicas of FSDP2 dies; its neighbour and the other replica form three shards."""
    train(Hsdp, (3,))


def subgroups(*_):
    """shrink makes a default group, and tells which ops have succeeded everywhere. Groups that were made before are
    closed, with an error that says so; new ones can be made."""
    pair, world = dist.new_group([0, 2]), dist.group.WORLD
    x = torch.ones(5)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        die()
    dist.all_reduce(x, group=pair)
    raises(PeerLostError, "call shrink, or restart", dist.all_reduce, x)
    made = crossreduce.torch.shrink()
    assert made is dist.group.WORLD
    assert made.reformed == ((0, 2), 1)
    advice = "create the group again: shrink, grow and destroy_process_group end all earlier groups"
    for group in (pair, world):
        raises(ValueError, advice, dist.all_reduce, x, group=group)  # torch's own error, which shows the group
        raises(ContextError, advice, group.allreduce, [x])
        raises(ContextError, advice, crossreduce.torch.shrink, group)
        raises(ContextError, advice, crossreduce.torch.agree, True, group)
        raises(ContextError, advice, crossreduce.torch.invitation, group)
    again = dist.new_group([0, 1])  # in the new numbers
    x = torch.ones(5)
    dist.all_reduce(x, group=again)
    assert x.tolist() == [2.0] * 5
    dist.destroy_process_group()
    assert not dist.is_initialized()


def waits_in_a_subgroup(*_):
    """Ranks that wait in a sub-group for one that has noticed the loss in another group continue with it, at once."""
    members = [0, 1], [0, 2], [2, 3]
    pairs = [dist.new_group(each) for each in members]
    begun = time.monotonic()

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
    assert time.monotonic() - begun < 25, "less than the timeout of the groups, 30 s"


def both_at_once(number, folder):
    """One call of grow removes a dead rank and admits a new process; the dead one is rank 0, which has invited it."""
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
    """Run a case in one process; the first ``members`` of them are the ranks of a group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, for functions that have newer names
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
    """Each case passes in all processes that it does not kill."""
    found = ranks(processes, lives, case, processes - joining, tmp_path, timeout_s=150, check=False)
    for number, one in enumerate(found):
        assert isinstance(one, Died) if number in killed else one is None, getattr(one, "__notes__", one)
