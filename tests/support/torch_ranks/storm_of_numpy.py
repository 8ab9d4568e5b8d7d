"""A process of a survival storm whose group is that of ``crossreduce.processes``."""

from typing import ClassVar

import numpy as np
from survival_storm import SIZES, Process

from crossreduce import processes
from crossreduce.processes import RankGroup


class NumpyProcess(Process):
    """See ``Process``."""

    PLACES: ClassVar = {what: (RankGroup, what) for what in ("agree", "shrink", "grow")} | {
        "join": (processes, "join_invited")
    }
    group = None

    def make_group(self):
        address = f"{self.case['address']}:{self.case['port']}"
        self.group = processes.join(self.number, self.case["size"], address)
        self.group.communicator.timeout_s = self.case["timeout_s"]

    def join(self, invitation):
        self.group = processes.join_invited(invitation, timeout_s=3)

    def invitation(self):
        return self.group.invitation()

    def synchronised(self, numbers):
        return map(int, self.group.broadcast(np.array(numbers, np.int64), 0))

    def reduce(self, draw, numbers):
        group, x = self.group, np.array(numbers, np.int64)
        big = np.full(draw.choice(SIZES), 1 + self.number, np.float32)
        if draw.random() < 0.5:
            group.all_reduce(big, out=big)
        if draw.random() < 0.2:
            group.all_gather(big)
        if draw.random() < 0.2:
            group.barrier()
        return map(int, group.all_reduce(x))

    def committed(self):
        def step(group):
            self.group = group
            return self.detecting()

        self.group, result = self.group.committed(step, timeout_s=self.case["wait_s"])
        return result

    def grow(self):
        made = self.group.grow()
        self.group = made or self.group
        return made is not None

    def leave(self):
        if self.group is not None:
            self.group.close()
