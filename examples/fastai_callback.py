"""fastai: a callback of a few lines trains calibration heads beside the network."""

import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import Learner  # with fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from torch import nn

import doublehead as dh
from doublehead.data import fashion_subset


class Calibrate(Callback):
    def __init__(self, calib_data):
        self.calib_data = calib_data

    def before_fit(self):
        self.companion = dh.DoubleHead(self.model, self.calib_data, follow=self.opt)

    def after_batch(self):
        if self.training:
            self.companion.step()

    def after_fit(self):
        self.calibrated = self.companion.finish()


def arrays(part):
    return torch.from_numpy(part.images).flatten(1).float() / 255, torch.from_numpy(part.labels)


torch.manual_seed(0)
data = fashion_subset()
train, calib, test = (arrays(part) for part in (data.train, data.calib, data.test))
loaders = DataLoaders(*(DataLoader(list(zip(*part)), bs=64, shuffle=part is train) for part in (train, test)))
network, calibration = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)), Calibrate(calib)
Learner(loaders, network, loss_func=nn.CrossEntropyLoss(), cbs=[calibration]).fit_one_cycle(3, 1e-2)
print(calibration.calibrated.report(test))
