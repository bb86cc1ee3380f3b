"""Lightning: an unmodified LightningModule and one callback."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead.data import fashion_subset
from doublehead.integrations.lightning import DoubleHeadCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, _):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def batches(part, shuffle):
    images = torch.from_numpy(part.images).float() / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(part.labels)), 64, shuffle)


data = fashion_subset()
double = DoubleHeadCallback(batches(data.calib, True))  # data the network never trains on
trainer = pl.Trainer(max_epochs=5, callbacks=[double], enable_progress_bar=False, log_every_n_steps=20)
module = Classifier()
trainer.fit(module, batches(data.train, True), batches(data.test, False))
numbers = trainer.validate(module, batches(data.test, False), verbose=False)[0]
print(f"ECE of the network {numbers['val_ece_main']:.3f} calibrated {numbers['val_ece_calib']:.3f}")
probs = double.model.eval()(torch.rand(2, 784)).exp()  # network and calibration as one module
