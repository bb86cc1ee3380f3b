"""A binary classifier with one output, trained with BCEWithLogitsLoss: it stays one, with calibrated logits."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import doublehead as dh

torch.manual_seed(0)
images, digits = load_digits(return_X_y=True)
x, y = (
    torch.from_numpy(images).float() / 16,
    torch.from_numpy(digits >= 5).float(),
)  # five and above: a yes or no
order = torch.randperm(len(x))
(x_train, x_calib, x_test), (y_train, y_calib, y_test) = (
    part[order].split([300, 500, 997]) for part in (x, y)
)

network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(network.parameters(), 0.01)
double = dh.DoubleHead(network, (x_calib, y_calib), follow=optimizer)
for _ in range(200):
    loss = F.binary_cross_entropy_with_logits(network(x_train)[:, 0], y_train)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    double.step()
model = double.finish()

with torch.no_grad():
    for name, logit in (("network alone", network(x_test)), ("calibrated", model(x_test))):  # (B, 1) both
        p = dh.Predictions.from_binary(logit, y_test.long())
        print(f"{name:14s} NLL {dh.metrics.nll(p):.3f}  ECE {dh.metrics.ece(p):.3f}")
