"""A process of a survival storm whose group is that of ``torch.distributed``."""

from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from survival_storm import SIZES, Process

from crossreduce.torch import elastic


class TorchProcess(Process):
    """See ``Process``."""

    PLACES: ClassVar = {what: (elastic, what) for what in ("agree", "shrink", "grow", "join")}

    def make_group(self):
        torch.set_num_threads(1)
        where = f"tcp://{self.case['address']}:{self.case['port']}"
        dist.init_process_group("crossreduce", where, rank=self.number, world_size=self.case["size"])
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.case["timeout_s"]))

    def join(self, invitation):
        torch.set_num_threads(1)
        elastic.join(invitation, timeout_s=3)

    def invitation(self):
        return elastic.invitation()

    def synchronised(self, numbers):
        state = torch.tensor(numbers)
        dist.broadcast(state, 0)
        return map(int, state)

    def reduce(self, draw, numbers):
        x = torch.tensor(numbers, dtype=torch.int64)
        big = torch.full([draw.choice(SIZES)], 1 + self.number, dtype=torch.float32)
        works = []
        if draw.random() < 0.5:
            works.append(dist.all_reduce(big, async_op=draw.random() < 0.5))
        if draw.random() < 0.2:
            parts = [torch.empty_like(big) for _ in range(dist.get_world_size())]
            works.append(dist.all_gather(parts, big.clone(), async_op=draw.random() < 0.5))
        if draw.random() < 0.2:
            dist.barrier()
        dist.all_reduce(x)
        for work in works:
            if work is not None:
                work.wait()
        return map(int, x)

    def committed(self):
        return elastic.committed(self.detecting, timeout_s=self.case["wait_s"])

    def grow(self):
        return elastic.grow() is not None

    def leave(self):
        if dist.is_initialized():
            dist.destroy_process_group()
