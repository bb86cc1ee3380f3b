"""Your own training loop with a calibration head: the three lines marked + are all that is new."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doublehead import Alternation, DoubleHead, Predictions, metrics
from doublehead.data import fashion_subset


def batches(part, shuffle):
    images = torch.from_numpy(part.images).flatten(1).float() / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(part.labels)), 64, shuffle)


torch.manual_seed(0)
data = fashion_subset()
train_batches, calib_batches = batches(data.train, True), batches(data.calib, True)
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
model = DoubleHead(model, kind="temperature")  # + any classifier
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
alternation = Alternation(model, calib_batches, lr=optimizer)  # + data the network never trains on

for _ in range(10):
    model.train()
    for step, (x, y) in enumerate(train_batches):
        loss = F.cross_entropy(model(x), y)  # training mode: the network's own logits, as before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alternation.step(progress=step / len(train_batches))  # +

model.eval()  # evaluation mode: calibrated logits
with torch.no_grad():
    main, calib = zip(*(model.heads(x) for x, _ in batches(data.test, False)))
for name, logits in (("network alone", main), ("calibrated", calib)):
    p = Predictions(torch.cat(logits), data.test.labels)
    accuracy, ece, nll = metrics.accuracy(p), metrics.ece(p), metrics.nll(p)
    print(f"{name:14s} accuracy {accuracy:.3f}  ECE {ece:.3f}  NLL {nll:.3f}")
