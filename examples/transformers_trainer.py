"""Hugging Face: a Trainer, one callback, a saved model with its calibration. It also runs under `torchrun`."""

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from doublehead.data import fashion_subset
from doublehead.integrations.transformers import DoubleHeadTrainerCallback, load_calibrated


def rows(part):
    pixels = torch.from_numpy(part.images).permute(0, 3, 1, 2).float() / 255
    return [{"pixel_values": image, "labels": label} for image, label in zip(pixels, part.labels)]


data = fashion_subset().first(2000, 1000, 1000)
test = rows(data.test)
config = ViTConfig(  # random weights; from_pretrained gives you trained ones
    image_size=28, patch_size=7, num_channels=1, num_labels=10,
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
)  # fmt: skip
args = TrainingArguments(
    "trained", num_train_epochs=3, learning_rate=3e-3, per_device_train_batch_size=32, save_strategy="no",
    report_to=[], disable_tqdm=True, use_cpu=True,
)  # fmt: skip
calibration = DoubleHeadTrainerCallback(rows(data.calib), every=2)  # data the model never trains on
trainer = Trainer(
    ViTForImageClassification(config),
    args,
    train_dataset=rows(data.train),
    eval_dataset=test,
    callbacks=[calibration],
)
trainer.train()
numbers = trainer.evaluate()  # in every process: they share the work
trainer.save_model("trained")
if trainer.is_world_process_zero():  # this one has written the files
    print(calibration.model.head.choice)
    print(f"NLL of the model {numbers['eval_nll_main']:.3f} calibrated {numbers['eval_nll_calib']:.3f}")
    probs = load_calibrated("trained")(pixel_values=test[0]["pixel_values"][None]).logits.softmax(-1)
    print(f"reloaded with its head: class {int(probs.argmax())}, confidence {probs.max().item():.2f}")
