"""Ray collective groups: a backend for ray.util.collective. Run: python ray_collective.py"""

import json

import ray
import torch
import torch.distributed as dist
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective.collective_group import torch_gloo_collective_group as gloo


class CrossreduceGroup(gloo.TorchGLOOGroup):
    """A collective group that uses torch's default group. An actor can be in one such group."""

    def __init__(self, world_size, rank, group_name):
        assert not dist.is_initialized(), "an actor can be in one group of this backend"
        self._rendezvous(group_name, rank, None)  # rank 0 stores its address in Ray
        key = gloo.get_master_address_metadata_key(group_name)
        address = internal_kv._internal_kv_get(key).decode()
        dist.init_process_group(
            "crossreduce",
            f"tcp://{address}",
            rank=rank,
            world_size=world_size,
        )
        if rank == 0:
            internal_kv._internal_kv_del(key)
        super().__init__(world_size, rank, "default")

    @classmethod
    def backend(cls):
        return "CROSSREDUCE"


@ray.remote
class Worker:
    def __init__(self, rank):
        collective.register_collective_backend("CROSSREDUCE", CrossreduceGroup)
        collective.init_collective_group(2, rank, "CROSSREDUCE")
        torch.manual_seed(0)
        self.model, self.x = torch.nn.Linear(8, 1), torch.randn(2, 32, 8)[rank]

    def train(self):
        losses = []
        for _ in range(8):
            loss = torch.nn.functional.mse_loss(self.model(self.x), self.x[:, :1] ** 2)
            self.model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in self.model.parameters():
                    collective.allreduce(p.grad)
                    p -= 0.05 / 2 * p.grad
            losses.append(loss.item())
        collective.destroy_collective_group()
        return losses


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    print("losses", json.dumps(ray.get([worker.train.remote() for worker in map(Worker.remote, range(2))])[0]))
