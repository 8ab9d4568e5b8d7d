"""vLLM's groups of ranks, and the layers whose weights are divided among the ranks of such a group."""

from importlib import import_module

import torch.distributed as dist
from torch.nn.functional import linear

from ..platforms import current_platform


class GroupCoordinator:
    """One group of each list of ranks: two groups of torch and, if it has several ranks, a communicator."""

    def __init__(self, group_ranks, backend, name):
        self.unique_name = name
        for ranks in group_ranks:
            device_group, cpu_group = dist.new_group(ranks, backend=backend), dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                self.ranks, self.device_group, self.cpu_group = ranks, device_group, cpu_group
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(dist.get_rank())
        if self.world_size > 1:
            module, _, kind = current_platform.get_device_communicator_cls().rpartition(".")
            arguments = {"cpu_group": self.cpu_group, "device_group": self.device_group, "unique_name": name}
            self.device_communicator = getattr(import_module(module), kind)(
                device="cpu", use_all2all=False, **arguments
            )

    def all_reduce(self, input_):
        return input_ if self.world_size == 1 else self.device_communicator.all_reduce(input_)

    def destroy(self):
        self.device_communicator.destroy()
        dist.destroy_process_group(self.device_group)
        dist.destroy_process_group(self.cpu_group)


def column_parallel(group, x, weight):
    """Return this rank's columns of ``x @ weight.T``."""
    return linear(x, weight.chunk(group.world_size)[group.rank_in_group])


def row_parallel(group, x, weight):
    """Return ``whole @ weight.T``, where ``x`` has this rank's columns of ``whole``."""
    return group.all_reduce(linear(x, weight.chunk(group.world_size, dim=1)[group.rank_in_group]))
