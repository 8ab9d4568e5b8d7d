"""torchft: two replica groups, of which one is killed and comes back. Run: python torchft_ddp.py"""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, coordination

from crossreduce.torchft import ProcessGroupCrossreduce


def train(replica, lighthouse):
    """Train one replica group of one rank; replica 1 kills itself at step 4 in its first life."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    inner, x, losses = torch.optim.SGD(model.parameters(), lr=0.05), torch.randn(2, 32, 8)[int(replica[0])], {}

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    group = ProcessGroupCrossreduce(timeout=timedelta(seconds=10))
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=replica,
        hostname="localhost",
    )
    model, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while manager.current_step() < 8:
        if manager.current_step() == 4 and replica == "1 first":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1] ** 2)
        loss.backward()
        step = manager.current_step()
        optimizer.step()
        if manager.current_step() > step:  # the step was not discarded
            losses[step] = loss.item()
    print(f"losses {json.dumps(list(losses.values()))}", flush=True)
    manager.shutdown()


if __name__ == "__main__" and len(sys.argv) == 3:
    train(*sys.argv[1:])
elif __name__ == "__main__":
    lighthouse = coordination.LighthouseServer(bind="localhost:0", min_replicas=2, join_timeout_ms=1000)
    start = [sys.executable, __file__]
    address = lighthouse.address()
    first, second = (subprocess.Popen([*start, name, address]) for name in ("0", "1 first"))
    assert second.wait(100) == -signal.SIGKILL
    second = subprocess.Popen([*start, "1 again", address], stdout=subprocess.DEVNULL)
    assert first.wait(100) == second.wait(100) == 0
    lighthouse.shutdown()
