"""Distribution shift: the images of a stream lose contrast, the guard raises an alarm and lowers the confidence."""

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
calibrated = calibrate(network, calib_batches)
guarded = ShiftGuard(calibrated).fit(calib_batches, Shifts(1.0, normalise, together=True))

x, y = tensors(splits.test)
low_contrast = normalise(corrupt(normalise.undo(x), "contrast", 5, torch.Generator()))
for kind, images in (("clean", x), ("low contrast", low_contrast)):
    for rows in torch.arange(len(y)).split(500):
        with torch.no_grad():
            before, after = (Predictions(model(images[rows]), y[rows]) for model in (calibrated, guarded))
        alarm = f"ALARM since image {guarded.shift.since}" if guarded.shift.alarm else "no alarm"
        print(f"{kind}: {alarm}, ECE {metrics.ece(after):.4f} (without the guard {metrics.ece(before):.4f})")
