"""A class for every pixel: metrics without holding the set, and a network that stays a segmenter."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import doublehead as dh

VOID = 255  # pixels that do not count

torch.manual_seed(0)
images, digits = load_digits(return_X_y=True)
x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
ink = x[:, 0]  # pixels of the digit's class where there is ink, 10 elsewhere, pale ones do not count
y = torch.where(ink > 0.5, torch.from_numpy(digits)[:, None, None], 10)
y = torch.where((ink > 0.2) & (ink <= 0.5), VOID, y)
order = torch.randperm(len(x))
x, y = x[order], y[order]

network = nn.Sequential(nn.Conv2d(1, 32, 7, padding=3), nn.ReLU(), nn.Conv2d(32, 11, 1))
optimizer = torch.optim.Adam(network.parameters(), 0.02)
for _ in range(100):
    optimizer.zero_grad()
    F.cross_entropy(network(x[:200]), y[:200], ignore_index=VOID).backward()
    optimizer.step()

model = dh.calibrate(
    network, (x[200:700], y[200:700]), ignore_index=VOID, positions=10_000
)  # drawn from all that count
for name, net in (("network alone", network), ("calibrated", model)):
    stream = dh.Stream(ignore_index=VOID)
    for images, labels in zip(x[700:].split(100), y[700:].split(100)):
        with torch.no_grad():
            stream.add(net(images), labels)  # (B, 11, 8, 8)
    found = stream.summary().values
    print(f"{name:14s} {found['n']:,} pixels  NLL {found['nll']:.3f}  ECE {found['ece']:.3f}")
