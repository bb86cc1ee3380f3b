"""Three lines in your own training loop: the example of the README."""
# ruff: noqa: B007

import torch
import torch.nn.functional as F

from doublehead import Alternation, DoubleHead, Predictions, metrics, refit
from doublehead.data import fashion_subset

splits = fashion_subset()  # real images that come with the package; yours go here


def batches(part, size=100):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return list(zip(images.split(size), torch.from_numpy(part.labels).split(size)))


train_batches, calib_batches = batches(splits.train), batches(splits.calib)
network = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

model = DoubleHead(network)  # 1: any torch classifier
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
alternation = Alternation(model, calib_batches, lr=optimizer)  # 2: data it never trains on
for epoch in range(10):
    model.train()
    for step, (x, y) in enumerate(train_batches):
        loss = F.cross_entropy(model(x), y)  # the network's own logits, as before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alternation.step(progress=step / len(train_batches))  # 3: one step of the head in ten
refit(model, calib_batches)  # and fit it to the finished network

x, y = batches(splits.test, 6000)[0]
main, calib = model.eval().heads(x)  # model(x) gives the calibrated logits
print(metrics.ece(Predictions(main, y)), "->", metrics.ece(Predictions(calib, y)))
