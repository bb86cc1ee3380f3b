"""Distribution shift: a guard lowers the confidence on corrupted images and changes no prediction."""

import torch
import torch.nn.functional as F

from doublehead import Predictions, ShiftGuard, calibrate, metrics
from doublehead.data import DATASETS, Shifts, corrupt, fashion_subset
from doublehead.models import build

splits, normalise = fashion_subset().first(4000, 2500, 2000), DATASETS["fashion"].normalise  # yours go here


def tensors(part):
    return normalise(torch.from_numpy(part.images).permute(0, 3, 1, 2) / 255), torch.from_numpy(part.labels)


torch.manual_seed(0)
network, (x, y) = build("small_cnn", n_classes=10), tensors(splits.train)
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
for _ in range(8):
    for rows in torch.randperm(len(y)).split(100):
        F.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

calib_batches = list(zip(*(part.split(250) for part in tensors(splits.calib))))  # never trained on
calibrated = calibrate(network, calib_batches, method="temperature")
guarded = ShiftGuard(calibrated).fit(calib_batches, Shifts(share=1.0, normalise=normalise))

x, y = tensors(splits.test)
pale = normalise(corrupt(normalise.undo(x), "contrast", 4, torch.Generator()))
for images, kind in ((x, "clean"), (pale, "pale")):
    for model, name in ((calibrated, "calibrated"), (guarded, "guarded")):
        with torch.no_grad():
            p = Predictions(model(images), y)
        print(f"{kind} {name}: accuracy {metrics.accuracy(p):.4f}, ECE {metrics.ece(p):.4f}")
