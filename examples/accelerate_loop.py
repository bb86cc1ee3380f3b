"""The plain loop under Accelerate: prepare the DoubleHead like any model, `accelerate launch` this file."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import Alternation, DoubleHead, Predictions, metrics, refit
from doublehead.data import fashion_subset


def batches(part, shuffle):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(part.labels)), 64, shuffle)


torch.manual_seed(0)
accelerator = Accelerator()
data = fashion_subset()
model = DoubleHead(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.main_parameters(), lr=0.1, momentum=0.9)
model, optimizer, train_batches = accelerator.prepare(model, optimizer, batches(data.train, True))
alternation = Alternation(model, batches(data.calib, True), lr=optimizer)  # calibration batches: not prepared
for _ in range(5):
    model.train()
    for step, (x, y) in enumerate(train_batches):
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        alternation.step(step / len(train_batches))
refit(model, batches(data.calib, False))  # the head to the finished network, in all processes

model.eval()
with torch.no_grad():
    x, y = batches(data.test, False).dataset.tensors
    p = Predictions(model(x.to(accelerator.device)).cpu(), y)
accelerator.print(f"calibrated: accuracy {metrics.accuracy(p):.3f}  ECE {metrics.ece(p):.3f}")
