"""vLLM's communicator for CPUs: collectives of torch in ``device_group``, except in groups named tp and pp, for which
vLLM has shared memory of its own. Here this raises an error, since no test may use it."""

import torch
import torch.distributed as dist

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class SharedMemory:
    def __getattr__(self, name):
        raise AssertionError(f"vLLM's own shared memory executes {name}")


class CpuCommunicator:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.device, self.device_group, self.unique_name = device, device_group, unique_name
        self.ranks, self.world_size = dist.get_process_group_ranks(cpu_group), dist.get_world_size(cpu_group)
        self.rank_in_group = dist.get_group_rank(cpu_group, dist.get_rank())
        self.use_all2all = use_all2all
        self.dist_module = SharedMemory() if unique_name.startswith(("tp", "pp")) else dist
        self.supports_tensor_dict = False

    def all_reduce(self, input_):
        self.dist_module.all_reduce(input_, group=self.device_group)
        return input_

    def all_gather(self, input_, dim=-1):
        whole = torch.empty((self.world_size * input_.shape[0], *input_.shape[1:]), dtype=input_.dtype)
        getattr(self.dist_module, ALL_GATHER)(whole, input_, group=self.device_group)
        return torch.cat(whole.chunk(self.world_size), dim)

    def gather(self, input_, dst=0, dim=-1):
        parts = [torch.empty_like(input_) for _ in self.ranks] if self.rank_in_group == dst else None
        self.dist_module.gather(input_, parts, dst=self.ranks[dst], group=self.device_group)
        return torch.cat(parts, dim) if parts else None

    def send(self, tensor, dst=None):
        dist.send(
            tensor, self.ranks[(self.rank_in_group + 1) % self.world_size if dst is None else dst], self.device_group
        )

    def recv(self, size, dtype, src=None):
        tensor = torch.empty(size, dtype=dtype)
        dist.recv(tensor, self.ranks[self.rank_in_group - 1 if src is None else src], self.device_group)
        return tensor

    def destroy(self):
        pass
