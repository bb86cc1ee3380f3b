"""Loops as public scripts and frameworks write them: the companion changes nothing, and its model is calibrated."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader

from doublehead import Calibrated, DoubleHead, calibrate
from doublehead.system import require
from tiny_networks import assert_same, small_net, some_data

pytestmark = pytest.mark.usefixtures("few_fits")
N_CLASSES = 4


class Script:
    """What a script shares: shuffled batches, its log, and the companion, which does nothing where there is none."""

    def __init__(self, beside: bool) -> None:
        torch.manual_seed(3)
        self.batches, self.calib = DataLoader(some_data(96, 1), 16, shuffle=True), some_data(300, 2)
        self.test = some_data(64, 9)[:]
        self.beside, self.double, self.log, self.n_steps = beside, None, [], 0
        self.model: Calibrated | None = None

    def start(self, network: nn.Module, optimizer: Any, **options: Any) -> None:
        if self.beside:
            self.double = DoubleHead(network, self.calib, follow=optimizer, every=2, **options)

    def step(self) -> None:
        self.n_steps += 1
        if self.double is not None:
            self.double.step()

    def finish(self, network: nn.Module | None = None) -> None:
        if self.double is not None:
            beside = self.double
            self.model = calibrate(network, self.calib, beside=beside) if network else beside.finish()

    def epoch(self, network: nn.Module, optimizer: Any, loss: Any = F.cross_entropy) -> float:
        """A plain epoch, and the validation loss after it."""
        network.train()
        for x, y in self.batches:
            optimizer.zero_grad()
            loss(network(x), y).backward()
            optimizer.step()
            self.step()
        return self.validate(network)

    @torch.no_grad()
    def validate(self, network: nn.Module) -> float:
        network.eval()
        x, y = self.test
        self.log.append(float(F.cross_entropy(network(x), y)))
        return self.log[-1]


def log_softmax(script: Script) -> nn.Module:
    """pytorch/examples mnist: the network returns log-probabilities, Adadelta, a step schedule."""
    net = small_net(nn.LogSoftmax(1))
    optimizer = torch.optim.Adadelta(net.parameters(), 1.0)
    scheduler = StepLR(optimizer, 1, 0.7)
    script.start(net, optimizer)
    for _ in range(3):
        script.epoch(net, optimizer, F.nll_loss)
        scheduler.step()
    script.finish()
    return net


def ema_and_mixup(script: Script) -> nn.Module:
    """torchvision's reference script: warm-up, mixed labels, averaged weights, which are what is calibrated."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True)
    warm = [LinearLR(optimizer, 0.01, total_iters=1), StepLR(optimizer, 1, 0.5)]
    scheduler = SequentialLR(optimizer, warm, milestones=[1])
    script.start(net, optimizer)
    average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    for _ in range(3):
        net.train()
        for x, y in script.batches:
            share, target = torch.rand(()), F.one_hot(y, N_CLASSES).float()
            mixed = share * x + (1 - share) * x.flip(0)
            target = share * target + (1 - share) * target.flip(0)
            F.cross_entropy(net(mixed), target, label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(net)
            script.step()
        scheduler.step()
        script.validate(average)
    script.finish(average)
    return average.module


def grad_scaler(script: Script) -> nn.Module:
    """The AMP recipe: autocast, a GradScaler, clipped gradients, a OneCycle schedule on every step."""
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=3 * len(script.batches))
    scaler = torch.amp.GradScaler("cpu")
    script.start(net, optimizer)
    for _ in range(3):
        net.train()
        for x, y in script.batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            with torch.autocast("cpu", torch.bfloat16):
                script.step()
        script.validate(net)
    script.finish()
    return net


def plateau_and_early_stopping(script: Script) -> nn.Module:
    """A schedule and a stop that follow the validation loss; the best weights are loaded at the end."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    script.start(net, optimizer)
    best, kept, waited = float("inf"), net.state_dict(), 0
    while waited < 2 and len(script.log) < 12:
        loss = script.epoch(net, optimizer)
        scheduler.step(loss)
        script.log.append(optimizer.param_groups[0]["lr"])
        waited = 0 if loss < best else waited + 1
        if loss < best:
            best, kept = loss, {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(kept)
    script.finish()
    return net


def layer_decay_and_accumulation(script: Script) -> nn.Module:
    """timm's train.py with a ViT: no_weight_decay(), rates that differ by layer, two batches a step."""
    vit, optim = (require(f"timm.{name}", extra="models") for name in ("models.vision_transformer", "optim"))
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    net = vit.VisionTransformer(num_classes=N_CLASSES, **sizes)
    script.start(net, None)
    optimizer = optim.create_optimizer_v2(net, "adamw", lr=1e-2, weight_decay=0.05, layer_decay=0.7)
    groups = optimizer.param_groups
    script.log += [(one["lr_scale"], one["weight_decay"], len(one["params"])) for one in groups]
    for _ in range(3):
        net.train()
        for one, two in pairwise(script.batches):
            for x, y in (one, two):
                (F.cross_entropy(net(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            script.step()
        script.validate(net)
    script.finish()
    return net


def saved_and_resumed(script: Script) -> nn.Module:
    """Checkpoints of network, optimizer and companion after each epoch; every epoch goes on from the file's state."""
    state: dict[str, Any] = {}
    for epoch in range(3):
        torch.manual_seed(10 + epoch)
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        script.start(net, optimizer)
        for name, part in (("net", net), ("optimizer", optimizer), ("double", script.double)):
            if name in state:
                part.load_state_dict(state[name])
        script.epoch(net, optimizer)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        if script.double is not None:
            state["double"] = script.double.state_dict()
            assert script.double.calls == (epoch + 1) * len(script.batches)
    script.finish()
    return net


def under_accelerate(script: Script, precision: str = "no", accumulate: int = 1) -> nn.Module:
    accelerate = require("accelerate", extra="transformers")
    how = {"mixed_precision": precision, "gradient_accumulation_steps": accumulate}
    with pytest.MonkeyPatch.context() as patch:
        # Those of other tests stay as they are.
        for name in ("AcceleratorState", "PartialState", "GradientState"):
            patch.setattr(getattr(accelerate.state, name), "_shared_state", {})
        accelerator = accelerate.Accelerator(cpu=True, **how)
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, batches = accelerator.prepare(net, optimizer, script.batches)
        script.start(model, optimizer)
        for _ in range(3):
            model.train()
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                with accelerator.autocast():
                    script.step()
        script.finish()
    return net


def under_fabric(script: Script, precision: str = "32-true", accumulate: int = 1) -> nn.Module:
    make = require("lightning.fabric", extra="lightning").Fabric
    fabric = make(accelerator="cpu", devices=1, precision=precision)
    net = small_net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    script.start(model, optimizer)
    for _ in range(3):
        model.train()
        for number, (x, y) in enumerate(fabric.setup_dataloaders(script.batches), 1):
            fabric.backward(F.cross_entropy(model(x), y) / accumulate)
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            with fabric.autocast():
                script.step()
    script.finish()
    return net


def under_skorch(script: Script) -> nn.Module:
    skorch = pytest.importorskip("skorch")

    class Calibrate(skorch.callbacks.Callback):
        def on_train_begin(self, net: Any, **_: Any) -> None:
            script.start(net.module_, net.optimizer_)

        def on_batch_end(self, net: Any, training: bool = False, **_: Any) -> None:
            if training:
                script.step()

    options = {"criterion": nn.CrossEntropyLoss, "batch_size": 16, "lr": 0.1, "iterator_train__shuffle": True}
    x, y = (part.numpy() for part in script.batches.dataset.tensors)
    options |= {"max_epochs": 3, "train_split": None, "verbose": 0, "callbacks": [Calibrate()]}
    trained = skorch.NeuralNetClassifier(small_net(), **options).fit(x, y)
    script.finish()
    return trained.module_


def under_fastai(script: Script) -> nn.Module:
    require("torchvision", extra="models")  # which fastai imports
    pytest.importorskip("fastai")
    from fastai.callback.core import Callback
    from fastai.callback.schedule import Learner
    from fastai.data.core import DataLoaders

    class Calibrate(Callback):
        def before_fit(self) -> None:
            script.start(self.model, self.opt)

        def after_batch(self) -> None:
            if self.training:
                script.step()

    net, data = small_net(), DataLoaders(script.batches, DataLoader(some_data(32, 3), 16))
    learner = Learner(data, net, loss_func=nn.CrossEntropyLoss(), cbs=[Calibrate()])
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(3, 1e-2)
    script.finish()
    return net


LOOPS = [
    log_softmax, ema_and_mixup, grad_scaler, plateau_and_early_stopping, layer_decay_and_accumulation,
    saved_and_resumed, under_accelerate, partial(under_accelerate, precision="bf16"),
    partial(under_accelerate, accumulate=2), under_fabric, partial(under_fabric, precision="bf16-mixed", accumulate=2),
    under_skorch, under_fastai,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: getattr(loop, "__name__", "of other options"))
def test_script(loop: Callable[[Script], nn.Module]) -> None:
    if loop is layer_decay_and_accumulation and find_spec("timm") is None:
        pytest.skip("needs timm")
    alone = Script(beside=False)
    plain = loop(alone)
    beside = Script(beside=True)
    network = loop(beside)
    assert alone.log == beside.log
    assert_same(plain.state_dict(), network.state_dict())
    model, (x, _) = beside.model, alone.test
    assert model.network is network
    assert (beside.double.skipped, beside.double.active) == (0, True)
    assert beside.double.calls == alone.n_steps >= 12
    with torch.no_grad():
        main, calib = model.heads(x)
        torch.testing.assert_close(model(x).exp().sum(1), torch.ones(len(x)))
        torch.testing.assert_close(main, plain.eval()(x).log_softmax(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(main.argmax(1), calib.argmax(1))
