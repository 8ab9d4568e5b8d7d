"""Lightning: DDP with averages over the ranks (sync_dist) and callbacks. Run: python lightning_ddp.py"""

import json
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", torch.nn.functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def on_train_epoch_end(self):
        self.losses += [self.trainer.callback_metrics[name].item() for name in ("loss", "val_loss")]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    lightning.seed_everything(0)
    x = torch.randn(250, 8)  # the last batches have different sizes
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1] ** 2), batch_size=16)
    strategy = DDPStrategy(process_group_backend="crossreduce")
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(folder, monitor="val_loss")],
            default_root_dir=folder,
            logger=False,
            max_epochs=3,
        )
        model = Regression()
        trainer.fit(model, data, data)
        trainer.strategy.barrier()  # before rank 0 removes the folder
    if trainer.is_global_zero:
        print("losses", json.dumps(model.losses))
