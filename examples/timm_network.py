"""timm and torchvision: any classifier by name; its last layer is found automatically."""

import timm
import torch
import torch.nn.functional as F

from doublehead import DoubleHead
from doublehead.data import fashion_subset

data = fashion_subset().first(640, 320, 200)


def batches(part, size=64):
    images = torch.from_numpy(part.images).permute(0, 3, 1, 2).float() / 255
    return list(zip(F.interpolate(images, 32).split(size), torch.from_numpy(part.labels).split(size)))


torch.manual_seed(0)
network = timm.create_model("mobilenetv3_small_050", num_classes=10, in_chans=1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
double = DoubleHead(network, batches(data.calib), every=2, follow=optimizer)
train_batches = batches(data.train)
for _ in range(2):
    for step, (x, y) in enumerate(train_batches):
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        double.step(step / len(train_batches))
model = double.finish()

with torch.no_grad():
    main, calib = model.heads(batches(data.test, 200)[0][0])
for name, log_probs in (("network alone", main), ("calibrated", calib)):
    print(f"{name:14s} mean confidence {log_probs.exp().amax(1).mean():.3f}")
