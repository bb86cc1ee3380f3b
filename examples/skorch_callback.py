"""skorch: a callback of a few lines trains calibration heads beside the network."""

import numpy as np
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

import doublehead as dh
from doublehead.data import fashion_subset


class Calibrate(Callback):
    def __init__(self, calib_data):
        self.calib_data = calib_data

    def on_train_begin(self, net, **_):
        self.double = dh.DoubleHead(net.module_, self.calib_data, follow=net.optimizer_)

    def on_batch_end(self, net, training=False, **_):
        if training:
            self.double.step()

    def on_train_end(self, net, **_):
        self.model = self.double.finish()


def arrays(part):
    return part.images.reshape(len(part.labels), -1).astype(np.float32) / 255, part.labels.astype(np.int64)


torch.manual_seed(0)
data = fashion_subset()
network = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(-1))
calibration = Calibrate(arrays(data.calib))
NeuralNetClassifier(network, max_epochs=5, lr=0.1, train_split=None, callbacks=[calibration]).fit(
    *arrays(data.train)
)
print(calibration.model.report(arrays(data.test)))
