"""The image networks: shapes, gradients, compilation, saved weights."""

import copy
import hashlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.models import MODELS, SmallCNN, WideResNet, build
from doublehead.models import images as networks
from doublehead.system import require
from samples import refused

IMAGES = [name for name, row in MODELS.items() if row.reads == "images"]
SMALLER = {"wide_resnet28_10": {"depth": 10, "width": 1}}  # the same code at a fraction of the time


def need_torchvision() -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")


def make(name: str, **options: object) -> nn.Module:
    if name.startswith(("resnet", "densenet")):
        need_torchvision()
    torch.manual_seed(0)
    return build(name, 7, **{**SMALLER.get(name, {}), **options})


def some_images(name: str, side: int = 8) -> Tensor:
    """(2, C, H, W); a quarter of the usual side where the network allows it, for speed."""
    return torch.randn(2, 1, 28, 28) if name == "small_cnn" else torch.randn(2, 3, side, side)


@pytest.mark.parametrize("name", IMAGES)
def test_forward_and_backward(name):
    network, images = make(name), some_images(name)
    logits = network(images)
    assert logits.shape == (2, 7)
    F.cross_entropy(logits, torch.tensor([1, 2])).backward()
    for label, parameter in network.named_parameters():
        assert parameter.grad is not None, label
        assert torch.isfinite(parameter.grad).all(), label


@pytest.mark.parametrize("name", ["wide_resnet28_10", "small_cnn"])
def test_compiled_whole_gives_the_same_step(name):
    network, images = make(name), some_images(name)
    compiled = torch.compile(copy.deepcopy(network), backend="aot_eager", fullgraph=True)
    for each in (network, compiled):
        F.cross_entropy(each(images), torch.tensor([1, 2])).backward()
    for one, other in zip(network.parameters(), compiled.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "before_pool"), [("resnet18", (512, 4, 4)), ("densenet121", (1024, 4, 4))])
def test_small_stem_keeps_the_resolution(name, before_pool):
    """32 pixels are halved three times, by the stages alone."""
    network = make(name, input=(3, 32, 32))
    module = network.layer4 if name == "resnet18" else network.features
    shapes = []
    module.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape[1:])))
    network.eval()(torch.zeros(1, 3, 32, 32))
    assert shapes == [before_pool]


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_plain_stem_is_torchvision_itself(name):
    network = make(name, input=(3, 224, 224))
    torch.manual_seed(0)
    options = {"zero_init_residual": True} if name.startswith("resnet") else {}
    get_model = require("torchvision.models", extra="models").get_model
    peer = get_model(name, weights=None, num_classes=7, **options)
    assert str(network) == str(peer)
    ours, theirs = network.state_dict(), peer.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_wide_resnet_equals_the_paper_written_out():
    """Table 1 of Zagoruyko and Komodakis with pre-activation, one operation after the other."""
    network = WideResNet(5, depth=16, width=2).double().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for numbers in (module.running_mean, module.weight, module.bias):
                nn.init.normal_(numbers)
    state, images = network.state_dict(), torch.randn(2, 3, 12, 12).double()

    def normed(x: Tensor, key: str) -> Tensor:
        mean, var = state[f"{key}.running_mean"], state[f"{key}.running_var"]
        x = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
        return (x * state[f"{key}.weight"][:, None, None] + state[f"{key}.bias"][:, None, None]).clamp(min=0)

    x = F.conv2d(images, state["stem.weight"], padding=1)
    for group in (1, 2, 3):
        for block in (0, 1):
            key, stride = f"group{group}.{block}", 2 if group > 1 and block == 0 else 1
            active = normed(x, f"{key}.norm1")
            y = F.conv2d(active, state[f"{key}.conv1.weight"], stride=stride, padding=1)
            y = F.conv2d(normed(y, f"{key}.norm2"), state[f"{key}.conv2.weight"], padding=1)
            x = y + (F.conv2d(active, state[f"{key}.shortcut.weight"], stride=stride) if block == 0 else x)
    features = normed(x, "norm").flatten(2).mean(2)
    assert features.shape == (2, 128)
    expected = features @ state["classifier.weight"].T + state["classifier.bias"]
    torch.testing.assert_close(network(images), expected)


@pytest.mark.parametrize(("size", "channels"), [((28, 28), (4, 6, 8)), ((32, 20), (4,)), ((9, 7), (3, 3))])
def test_small_cnn_takes_any_size_and_channels(size, channels):
    network = SmallCNN(5, channels=channels, hidden=6, size=size, in_channels=2)
    assert network(torch.zeros(2, 2, *size)).shape == (2, 5)


def saved(tmp_path, n_classes: int, **options: object) -> tuple[nn.Module, str]:
    safetensors = pytest.importorskip("safetensors.torch")
    need_torchvision()
    torch.manual_seed(3)
    network = build("resnet18", n_classes, **options)
    path = tmp_path / "weights.safetensors"
    safetensors.save_file(network.state_dict(), path)
    return network, str(path)


def test_weights_from_a_file_with_another_number_of_classes(tmp_path):
    source, path = saved(tmp_path, 3)
    same, other = build("resnet18", 3, weights=path), build("resnet18", 5, weights=path)
    assert torch.equal(same.fc.weight, source.fc.weight)
    assert torch.equal(other.conv1.weight, source.conv1.weight)
    assert torch.equal(other.layer4[1].bn2.weight, source.layer4[1].bn2.weight)
    assert other.fc.weight.shape == (5, 512)


def test_weights_that_do_not_fit(tmp_path):
    _, path = saved(tmp_path, 3, input=(3, 224, 224))
    refused(r"input above 64x64 .*(?s:.)*conv1.weight", build, "resnet18", 3, weights=path)
    refused("no.safetensors", build, "resnet18", 3, weights="no.safetensors", error=FileNotFoundError)
    refused(r"one of .*IMAGENET1K_V1.* for resnet18, got 'BEST'", build, "resnet18", 3, weights="BEST")


def test_published_weights_are_checked_and_never_unpickled(tmp_path, monkeypatch):
    """A file served in place of torchvision's: taken when its checksum fits, refused when it holds code."""
    need_torchvision()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    known = require("torchvision.models", extra="models").get_model_weights("resnet18")["IMAGENET1K_V1"]

    def served(content: object, digest: str = "") -> dict[str, Tensor]:
        torch.save(content, tmp_path / "file")
        digest = digest or hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()[:8]
        file = (tmp_path / "file").rename(tmp_path / f"net-{digest}.pth")
        monkeypatch.setattr(known.value, "url", file.as_uri())
        return networks._read("resnet18", "IMAGENET1K_V1")

    content = {"block.denselayer1.norm.1.weight": torch.ones(2), "fc.bias": torch.zeros(1)}
    assert sorted(served(content)) == ["block.denselayer1.norm1.weight", "fc.bias"]
    refused("Weights only load failed", served, {"fc.bias": SmallCNN(3)}, error=Exception)
    refused("invalid hash value", served, {}, "00000000", error=RuntimeError)
