"""The plain loop under Accelerate: a DoubleHead beside the prepared network. Run it by `accelerate launch`."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import DoubleHead, Predictions, metrics
from doublehead.data import fashion_subset


def batches(part, shuffle):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(part.labels)), 64, shuffle)


torch.manual_seed(0)
accelerator = Accelerator()
data = fashion_subset()
network = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
network, optimizer, train_batches = accelerator.prepare(network, optimizer, batches(data.train, True))
double = DoubleHead(network, batches(data.calib, True), follow=optimizer)  # calibration batches: not prepared
for _ in range(5):
    for step, (x, y) in enumerate(train_batches):
        accelerator.backward(F.cross_entropy(network(x), y))
        optimizer.step()
        optimizer.zero_grad()
        double.step(step / len(train_batches))
model = double.finish()  # in all processes

with torch.no_grad():
    x, y = batches(data.test, False).dataset.tensors
    p = Predictions(model(x.to(accelerator.device)).cpu(), y)
accelerator.print(f"calibrated: accuracy {metrics.accuracy(p):.3f}  ECE {metrics.ece(p):.3f}")
