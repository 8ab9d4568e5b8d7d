"""Hugging Face's Trainer: a tiny GPT-2 from a config. Run: torchrun --nproc-per-node 2 hf_trainer.py"""

import json
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

# before TrainingArguments, which accepts only "gloo" by name
dist.init_process_group("crossreduce")

set_seed(0)
tokens = torch.randint(0, 64, (60, 1)) + torch.arange(17)  # each text counts upwards
samples = [{"input_ids": text % 64, "labels": text % 64} for text in tokens]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:20])
    trainer.train()
if trainer.is_world_process_zero():
    log = trainer.state.log_history
    print("losses", json.dumps([entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry]))
dist.destroy_process_group()
