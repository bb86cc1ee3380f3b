"""The plain loop under Lightning Fabric, in bf16: set up the DoubleHead like any model."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import Alternation, DoubleHead, Predictions, metrics, refit
from doublehead.data import fashion_subset


def batches(part, shuffle):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(part.labels)), 64, shuffle)


torch.manual_seed(0)
fabric = Fabric(accelerator="auto", devices=1, precision="bf16-mixed")
data = fashion_subset()
model = DoubleHead(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.main_parameters(), lr=0.1, momentum=0.9))
train_batches = fabric.setup_dataloaders(batches(data.train, True))
alternation = Alternation(model, batches(data.calib, True), lr=optimizer)
for _ in range(5):
    model.train()
    for step, (x, y) in enumerate(train_batches):
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        with fabric.autocast():
            alternation.step(step / len(train_batches))
with fabric.autocast():
    refit(model, batches(data.calib, False))  # the head to the finished network

model.eval()
with torch.no_grad():
    x, y = batches(data.test, False).dataset.tensors
    p = Predictions(model(x.to(fabric.device)).float().cpu(), y)
fabric.print(f"calibrated: accuracy {metrics.accuracy(p):.3f}  ECE {metrics.ece(p):.3f}")
