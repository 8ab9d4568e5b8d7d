"""FSDP2, tensor parallelism, pipelining and torch.compile. Run: torchrun --nproc-per-node 2 torch_native.py fsdp2"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("crossreduce")
rank = dist.get_rank()
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
x = torch.randn(2, 32, 8)
mse = torch.nn.functional.mse_loss


def train(model, inputs):
    """Take 8 steps; return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = mse(model(inputs), inputs[:, :1] ** 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp2():
    mesh = init_device_mesh("cpu", (2,))
    for layer in (layers[0], layers[2], layers):
        fully_shard(layer, mesh=mesh)
    return train(layers, x[rank])


def tensor_parallel():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(layers, init_device_mesh("cpu", (2,)), plan), x[0])


def pipeline():
    stage = PipelineStage(torch.nn.Sequential(*layers[2 * rank : 2 * rank + 2]), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse)
    optimizer, means = torch.optim.SGD(stage.submod.parameters(), lr=0.05), torch.zeros(8)
    for step in range(8):
        optimizer.zero_grad()
        losses = []
        schedule.step(*([x[0]] if rank == 0 else []), target=x[0, :, :1] ** 2, losses=losses)
        optimizer.step()
        means[step] = sum(losses) / 4
    dist.broadcast(means, 1)  # the last stage has the losses
    return means.tolist()


def compiled():
    return train(torch.compile(DistributedDataParallel(layers)), x[rank])


found = globals()[sys.argv[1]]()
if rank == 0:
    print("losses", json.dumps(found))
dist.destroy_process_group()
