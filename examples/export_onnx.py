"""Network and calibration as one ONNX file, and its outputs from ONNX Runtime."""

import numpy as np
import onnxruntime
import torch
from torch import nn

from doublehead import Predictions, calibrate
from doublehead.data import fashion_subset
from doublehead.integrations.export import model_card

data = fashion_subset().first(2000, 1000, 500)
images, calib, test = (
    torch.from_numpy(part.images).permute(0, 3, 1, 2).float() / 255
    for part in (data.train, data.calib, data.test)
)
network = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(network.parameters(), 1e-2)
for _ in range(30):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images), torch.from_numpy(data.train.labels)).backward()
    optimizer.step()
model = calibrate(network, (calib, data.calib.labels))
log_probs = model(test).detach()

card = model_card(
    "tiny-fashion", dataset="fashion-mnist", data="2,000 images of clothes; 1,000 more to calibrate.",
    method="An MLP, calibrated after training.", test=Predictions(log_probs, data.test.labels),
)  # fmt: skip
path = model.export("exported", test[:2], to="onnx", card=card)

session = onnxruntime.InferenceSession(path)
probs, label, confidence = session.run(["probs", "label", "confidence"], {"input": test.numpy()})
print("largest difference", float(np.abs(probs - log_probs.exp().numpy()).max()))
print(f"class {label[0]} with confidence {confidence[0]:.2f}, truly {data.test.labels[0]}")
