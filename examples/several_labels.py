"""Several labels per image: which segments of a seven-segment display would show the digit in the picture?"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import doublehead as dh

LIT = torch.tensor([119, 18, 93, 91, 58, 107, 111, 82, 127, 123])  # a bit for each segment of 0 to 9

torch.manual_seed(0)
images, digits = load_digits(return_X_y=True)
order = torch.randperm(len(images))
x = torch.from_numpy(images).float()[order] / 16
y = ((LIT[torch.from_numpy(digits)[order]][:, None] >> torch.arange(7)) & 1).float()  # (N, 7)

network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 7))
optimizer = torch.optim.Adam(network.parameters(), 0.01)
double = dh.DoubleHead(network, (x[200:900], y[200:900]), follow=optimizer)
noisy = torch.where(torch.rand(200, 7) < 0.1, 1 - y[:200], y[:200])  # some training labels are wrong
for _ in range(300):
    optimizer.zero_grad()
    F.binary_cross_entropy_with_logits(network(x[:200]), noisy).backward()
    optimizer.step()
    double.step()
after = dh.calibrate(network, (x[200:900], y[200:900]))  # without heads trained beside, for comparison
model = double.finish(keep="best")  # a yes may become a no where that is as accurate on held-back data

print(model.head.in_words())
with torch.no_grad():
    for name, one in (("network alone", network), ("calibrate", after), ("DoubleHead", model)):
        p = dh.Predictions.multilabel(one(x[900:]), y[900:])  # logits (N, 7) of all three
        print(f"{name:14s} NLL {dh.metrics.nll(p):.3f}  ECE {dh.metrics.ece(p):.3f}")
print(dh.evaluate(p))  # all labels pooled, and each with its floor
