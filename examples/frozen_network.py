"""A network that is already trained: one call calibrates it, in seconds."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import Predictions, calibrate, metrics
from doublehead.data import fashion_subset


def batches(part, shuffle):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(part.labels)), 64, shuffle)


torch.manual_seed(0)
data = fashion_subset()
network = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(network.parameters(), 1e-3)
for _ in range(8):  # stands for your own training
    for x, y in batches(data.train, True):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()

model = calibrate(network, batches(data.calib, False), train_data=batches(data.train, False))
print("calibrated by", model.head.in_words())

with torch.no_grad():
    main, calib = model.heads(torch.from_numpy(data.test.images).flatten(1).float() / 255)
for name, logits in (("network alone", main), ("calibrated", calib)):
    p = Predictions(logits, data.test.labels)
    accuracy, ece, nll = metrics.accuracy(p), metrics.ece(p), metrics.nll(p)
    print(f"{name:14s} accuracy {accuracy:.3f}  ECE {ece:.3f}  NLL {nll:.3f}")
