"""The plain loop under Lightning Fabric, in bf16: a DoubleHead beside the network that Fabric has set up."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import DoubleHead, Predictions, metrics
from doublehead.data import fashion_subset


def batches(part, shuffle):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(part.labels)), 64, shuffle)


torch.manual_seed(0)
fabric = Fabric(accelerator="auto", devices=1, precision="bf16-mixed")
data = fashion_subset()
network = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
network, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
train_batches = fabric.setup_dataloaders(batches(data.train, True))
double = DoubleHead(network, batches(data.calib, True), follow=optimizer)
for _ in range(5):
    for step, (x, y) in enumerate(train_batches):
        fabric.backward(F.cross_entropy(network(x), y))
        optimizer.step()
        optimizer.zero_grad()
        with fabric.autocast():
            double.step(step / len(train_batches))
with fabric.autocast(), torch.no_grad():
    model = double.finish()
    x, y = batches(data.test, False).dataset.tensors
    p = Predictions(model(x.to(fabric.device)).cpu(), y)
fabric.print(f"calibrated: accuracy {metrics.accuracy(p):.3f}  ECE {metrics.ece(p):.3f}")
