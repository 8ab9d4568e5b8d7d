"""accelerate: a loop with gather_for_metrics and save_state. Run: torchrun --nproc-per-node 2 accelerate_loop.py"""

import json
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed

dist.init_process_group("crossreduce")  # before Accelerator, which accepts only "gloo" by name
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

set_seed(0)
x = torch.randn(90, 8)  # not a multiple of the batches: gather_for_metrics drops repeated samples
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1] ** 2), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), data)


def epoch():
    """Train for one epoch; return the loss of each sample."""
    found = []
    for inputs, targets in data:
        with accelerator.accumulate(model):
            each = torch.nn.functional.mse_loss(model(inputs), targets, reduction="none")
            accelerator.backward(each.mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.gather_for_metrics(each.detach()))
    return torch.cat(found)


losses = [epoch().mean().item()]
with tempfile.TemporaryDirectory() as own:
    (folder,) = broadcast_object_list([own])
    accelerator.save_state(folder)
    losses.append(epoch().mean().item())
    accelerator.load_state(folder)
    again = epoch()
    losses.append(again.mean().item())
    accelerator.wait_for_everyone()
assert len(again) == len(x)
assert losses[1] == losses[2], "the state was not restored"
if accelerator.is_main_process:
    print("losses", json.dumps(losses))
accelerator.end_training()  # destroys the process group
