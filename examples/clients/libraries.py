"""Libraries that ask torch for gloo. Run: CROSSREDUCE_FOR_GLOO=1 torchrun --nproc-per-node 2 libraries.py NAME

NAME: ignite, torchmetrics, checkpoint, trl, keras_torch, composer, zero_1, zero_2, zero_3, zero_offload, zero_shm.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
x = torch.randn(2, 250, 8)[rank]
samples = torch.utils.data.TensorDataset(x, x[:, :1] ** 2)
mse = torch.nn.functional.mse_loss


def begin():
    """Make the default group, unless the library has made it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def train(model, optimizer, steps=12):
    """Take steps on 32 samples each; return the losses."""
    losses = []
    for step in range(steps):
        rows = x[32 * step % 224 :][:32]
        optimizer.zero_grad()
        loss = mse(model(rows), rows[:, :1] ** 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ignite():
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss

    with idist.Parallel("gloo"):
        model = idist.auto_model(layers)
        data = idist.auto_dataloader(samples, batch_size=16)
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
        trainer = create_supervised_trainer(model, optimizer, mse)
        evaluator, losses = create_supervised_evaluator(model, {"loss": Loss(mse)}), []

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate():
            losses.append(evaluator.run(data).metrics["loss"])
            losses.append(idist.all_reduce(losses[-1] + rank, "MAX"))
            assert idist.all_gather(f"rank {rank}") == ["rank 0", "rank 1"]
            idist.barrier()

        trainer.run(data, max_epochs=3)
    return losses


def torchmetrics():
    import torchmetrics

    begin()
    metrics = torchmetrics.MetricCollection(
        torchmetrics.MeanSquaredError(), torchmetrics.PearsonCorrCoef(), torchmetrics.SpearmanCorrCoef()
    )
    model = torch.nn.parallel.DistributedDataParallel(layers)
    train(model, torch.optim.SGD(model.parameters(), lr=0.05))
    rows = x[: 200 + 50 * rank]  # the ranks gather tensors of unequal sizes
    metrics.update(model(rows).detach().flatten(), rows[:, 0] ** 2)
    return [value.item() for value in metrics.compute().values()]


def checkpoint():
    """Save a sharded model in the background, with its optimizer, and train on from what was saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    begin()
    model = fully_shard(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(model, optimizer, 6)
    folder = [tempfile.mkdtemp(dir=".")]
    dist.broadcast_object_list(folder)
    state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
    dcp.async_save(state, checkpoint_id=folder[0]).result()
    later = train(model, optimizer, 6)
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    assert train(model, optimizer, 6) == later, "the state was not restored"
    return losses + later


def trl():
    import datasets
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0")
    ids = ((torch.randint(0, 64, (60, 1)) + torch.arange(17)) % 64).tolist()
    arguments = SFTConfig(
        tempfile.mkdtemp(dir="."), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_train_epochs=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, max_length=32,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    data = datasets.Dataset.from_dict({"input_ids": ids})
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def keras_torch():
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    begin()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model = torch.nn.parallel.DistributedDataParallel(model)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.05))


def composer():
    from composer import Trainer
    from composer.models import ComposerModel

    class Regression(ComposerModel):
        def __init__(self):
            super().__init__()
            self.layers, self.losses = layers, []

        def forward(self, batch):
            return self.layers(batch[0])

        def loss(self, outputs, batch):
            loss = mse(outputs, batch[1])
            self.losses.append(loss.item())
            return loss

    from composer.utils import dist as composers

    composers.initialize_dist("cpu")
    data = torch.utils.data.DataLoader(samples, 16, sampler=composers.get_sampler(samples))
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Trainer(model=model, train_dataloader=data, max_duration="2ep", optimizers=optimizer, device="cpu").fit()
    return model.losses


def zero(stage, **options):
    """Train with DeepSpeed's ZeRO on CPUs; return the losses."""
    import deepspeed

    deepspeed.init_distributed()
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam if options else torch.optim.Adam
    model = torch.nn.Sequential(*layers[:2], torch.nn.Linear(16, 2))  # DeepSpeed's padding would not be initialized
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam(model.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": stage, **options}},
    )
    losses = []
    for step in range(12):
        rows = x[32 * step % 224 :][:32]
        loss = mse(engine(rows), rows[:, :2] ** 2)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def zero_1():
    return zero(1)


def zero_2():
    return zero(2)


def zero_3():
    return zero(3)


def zero_offload():
    return zero(2, offload_optimizer={"device": "cpu"})


def zero_shm():
    """Time DeepSpeed's own all-reduce in shared memory, and torch's, in turn. Return the sums of both."""
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # as DeepSpeed's launcher does
    import deepspeed.comm

    deepspeed.init_distributed()
    ways = {"its shared-memory op": deepspeed.comm.inference_all_reduce, "torch.distributed": dist.all_reduce}
    sums, medians = [], {}
    for nbytes in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        found = {name: [] for name in ways}
        for _ in range(9):
            for name, all_reduce in ways.items():
                y, calls = torch.full((nbytes // 4,), rank + 1.0), 200 if nbytes < 1 << 20 else 10
                all_reduce(y)
                sums.append(y.mean().item())
                y.zero_()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    all_reduce(y)
                found[name].append((time.perf_counter() - start) / calls * 1e6)
        medians[nbytes] = {name: round(statistics.median(times), 1) for name, times in found.items()}
    if rank == 0:
        print("microseconds", json.dumps(medians))
    for left in Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_{rank}"):  # 66 MiB each
        left.unlink()
    return sums


found = globals()[sys.argv[1]]()
if rank == 0:
    print("losses", json.dumps(found), flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
