"""Three lines in your own training loop."""
# ruff: noqa: B007

import torch
import torch.nn.functional as F

import doublehead as dh
from doublehead.data import fashion_subset

splits = fashion_subset()  # real images that come with the package; yours go here


def batches(part, size=100):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return list(zip(images.split(size), torch.from_numpy(part.labels).split(size)))


train_batches, calib_batches = batches(splits.train), batches(splits.calib)
network = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

double = dh.DoubleHead(network, calib_batches, follow=optimizer)  # 1: data the network never trains on
for epoch in range(10):
    for step, (x, y) in enumerate(train_batches):
        loss = F.cross_entropy(network(x), y)  # your loop, as it was
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        double.step(progress=step / len(train_batches))  # 2: every 10th call trains the heads once
model = double.finish()  # 3: network and calibration as one module

x, y = batches(splits.test, 6000)[0]
main, calib = model.heads(x)  # model(x) gives the calibrated log-probabilities
print(dh.metrics.ece(dh.Predictions(main, y)), "->", dh.metrics.ece(dh.Predictions(calib, y)))
