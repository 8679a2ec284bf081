"""A LightningModule with a validation, a checkpoint callback and early stopping."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


data = TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
trainer = L.Trainer(
    accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=5, log_every_n_steps=1, gradient_clip_val=1.0, logger=False,
    callbacks=[ModelCheckpoint(".", monitor="val_acc", mode="max"), EarlyStopping("val_loss", patience=2)],
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(data, 32, shuffle=True, num_workers=2), DataLoader(data, 32, num_workers=2))
