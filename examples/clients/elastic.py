"""An elastic restart: rank 1 is killed, and torchrun starts all ranks again. Run:
torchrun --nproc-per-node 2 --max-restarts 1 elastic.py CHECKPOINT [kill]
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("crossreduce")
checkpoint = Path(sys.argv[1])
torch.manual_seed(0)
x = torch.randn(2, 32, 8)[dist.get_rank()]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
state = {"losses": []}
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
while len(state["losses"]) < 8:
    if len(state["losses"]) == 4 and sys.argv[2:] == ["kill"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dist.barrier()  # the checkpoint is written
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x[:, :1] ** 2)
    loss.backward()
    optimizer.step()
    losses = [*state["losses"], loss.item()]
    state = {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)
if dist.get_rank() == 0:
    print("losses", json.dumps(losses))
dist.destroy_process_group()
