"""One network of each family in timm and torchvision, random weights, tiny images, beside a DoubleHead."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead import PAPER, DoubleHead, ShiftGuard
from doublehead.shift_guard import N_LAYERS
from doublehead.system import require
from doublehead.tasks import find_logits

TIMM = {
    "resnet10t": 32, "skresnet18": 32, "seresnet18": 32, "resnest14d": 32, "densenet121": 32, "dla34": 32,
    "vit_tiny_patch16_224": 32, "deit_tiny_distilled_patch16_224": 32, "cait_xxs24_224": 32, "convit_tiny": 32,
    "pit_ti_224": 32, "eva02_tiny_patch14_224": 28, "levit_128s": 32, "xcit_nano_12_p16_224": 32, "coat_tiny": 32,
    "pvt_v2_b0": 32, "visformer_tiny": 32, "gmlp_ti16_224": 32, "resmlp_12_224": 32,
    "convnext_atto": 32, "edgenext_xx_small": 32, "mambaout_femto": 32, "starnet_s1": 32, "poolformer_s12": 32,
    "mobilenetv3_small_050": 32, "efficientnet_b0": 32, "ghostnet_050": 32, "mobilevit_xxs": 64, "regnety_002": 32,
    "repvgg_a0": 32, "cspresnet50": 32, "hrnet_w18_small": 32, "rexnet_100": 32, "hgnet_tiny": 32,
    "repvit_m0_9": 32, "lcnet_035": 32, "swin_tiny_patch4_window7_224": 32, "crossvit_tiny_240": 240,
}  # fmt: skip
TORCHVISION = {
    "resnet18": 32, "squeezenet1_1": 32, "densenet121": 32, "googlenet": 32, "shufflenet_v2_x0_5": 32,
    "mobilenet_v2": 32, "mnasnet0_5": 32, "regnet_y_400mf": 32, "efficientnet_b0": 32, "mobilenet_v3_small": 32,
}  # fmt: skip
# Their logits are the mean of two heads' (one is tapped), or come after a ReLU on the layer's maps.
NOT_LINEAR = ("deit_tiny_distilled_patch16_224", "crossvit_tiny_240", "repvit_m0_9", "squeezenet1_1")
# What a shift guard says to them: no normalisation layers, or such as see several rows for each sample.
NOT_GUARDED = {
    "squeezenet1_1": "must have normalisation layers",
    "levit_128s": "one row for each of the 2 samples",
    "mobilevit_xxs": "one row for each of the 2 samples",
}
LAST_LAYER = ("resmlp_12_224",)  # read there, for want of normalisation layers


def network(library: str, name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    if library == "torchvision":
        made: nn.Module = require("torchvision.models", extra="models").get_model(name, num_classes=7)
        return made
    create = require("timm", extra="models").create_model
    try:
        return create(name, num_classes=7, img_size=size)
    except TypeError:  # fully convolutional
        return create(name, num_classes=7)


def gradients(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)  # dropout and stochastic depth
    F.cross_entropy(find_logits(net.train()(x)), y).backward()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return found


def check_guard(net: nn.Module, name: str, x: Tensor) -> None:
    """A shift guard finds layers that see one row for each sample, or says that there are none."""
    if name in NOT_GUARDED:
        with pytest.raises((ValueError, RuntimeError), match=NOT_GUARDED[name]):
            ShiftGuard(net).eval()(x)
        return
    guard = ShiftGuard(net).eval()
    observed, _ = guard.observe([(x, torch.zeros(2, dtype=torch.long))])
    assert observed.stages.shape == (2, sum(guard.tap.widths))
    assert (1 if name in LAST_LAYER else 2) <= len(guard.tap.layers) <= N_LAYERS
    with torch.no_grad():
        want, got = net.eval()(x), guard(x)
    torch.testing.assert_close(observed.logits, want)
    assert torch.equal(got.argmax(1), want.argmax(1))


@pytest.mark.parametrize(
    ("library", "name", "size"),
    [("timm", *pair) for pair in TIMM.items()] + [("torchvision", *pair) for pair in TORCHVISION.items()],
)
def test_features_logits_and_gradients(library: str, name: str, size: int) -> None:
    net = network(library, name, size)
    x, y = torch.randn(2, 3, size, size), torch.tensor([1, 5])
    check_guard(copy.deepcopy(net), name, x)
    state = copy.deepcopy(net.state_dict())
    alone = gradients(net, x, y)
    net.load_state_dict(state)
    with torch.no_grad():
        want = net.eval()(x)
    net.train()

    answers = want.argmax(1)  # so that the batch is not skipped as worse than guessing
    double = DoubleHead(net, [(x, answers)], every=1, heads=PAPER)
    before = [p.clone() for p in double.bank.parameters()]
    assert double.step(0.5)
    assert all(not torch.equal(a, b) for a, b in zip(before, double.bank.parameters()))
    assert net.training
    assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    beside = gradients(net, x, y)
    net.load_state_dict(state)
    assert alone.keys() == beside.keys()
    assert all(torch.equal(alone[key], beside[key]) for key in alone)
    assert len(alone) > 0.9 * len(list(net.parameters())) or name == "googlenet"  # its side branches rest

    model = double.finish()
    with torch.no_grad():
        output, features, logits, _ = double.reader.run((x,), {})
        torch.testing.assert_close(output, want, rtol=0, atol=0)
        layer = net.get_submodule(double.reader.layer)
        assert features.shape == (2, double.reader.n_features)
        if name not in NOT_LINEAR:
            made = F.linear(features, layer.weight.flatten(1), layer.bias)
            torch.testing.assert_close(made, logits, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model(x), model.head(want, features).log_softmax(1))
        assert model(x).shape == (2, 7)
