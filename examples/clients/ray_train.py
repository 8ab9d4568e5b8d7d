"""Ray Train: DDP on two workers, which import nothing of crossreduce. Run: python ray_train.py"""

import json
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train(config):
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    x = torch.randn(2, 32, 8)[rank]
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(8):
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1] ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert torch.distributed.get_backend() == "crossreduce"
    ray.train.report({"loss": loss.item()})
    if rank == 0:
        Path(config["file"]).write_text(json.dumps(losses))


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False)
    torch_config = TorchConfig(backend="crossreduce")
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"file": f"{folder}/losses"},
            torch_config=torch_config,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        trainer.fit()
        print("losses", Path(folder, "losses").read_text())
