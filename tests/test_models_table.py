"""build: names, options, inputs, and the parameter counts that other people have published."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from doublehead.models import MODELS, build
from samples import refused
from tiny_networks import tiny_bert

VECTORS = {"words": {"vectors": torch.zeros(4, 8)}, "trees": {"vectors": torch.zeros(4, 8)}, "images": {}}
needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm")


def built(name: str, n_classes: int, **options: object) -> nn.Module:
    with torch.device("meta"):  # shapes without memory
        return build(name, n_classes, **options)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# Published: torchvision's own table of models (num_params), for 1,000 classes and 224x224.
# Then widely used CIFAR-10 ports of the same networks. The small stem has 64 * 3 * (49 - 9) = 7,680 weights fewer.
# For DenseNet-121 the ports count 6,956,298: they leave out the BatchNorm behind the stem (2 * 64 numbers).
@needs_torchvision
@pytest.mark.parametrize(
    ("name", "imagenet", "cifar"),
    [
        ("resnet18", 11_689_512, 11_173_962),
        ("resnet50", 25_557_032, 23_520_842),
        ("resnet101", 44_549_160, 42_512_970),
        ("resnet152", 60_192_808, 58_156_618),
        ("densenet121", 7_978_856, 6_956_298 + 2 * 64),
    ],
)
def test_published_parameter_counts(name, imagenet, cifar):
    assert count(built(name, 1000, input=(3, 224, 224))) == imagenet
    assert count(built(name, 10)) == cifar


# Zagoruyko and Komodakis, Table 4, in millions; 36,479,194 is what the authors' code counts.
def test_wide_resnet_parameter_counts():
    for depth, width, published in ((28, 10, 36.5), (40, 4, 8.9), (16, 8, 11.0), (40, 1, 0.6), (22, 8, 17.2)):
        n = count(built("wide_resnet28_10", 10, depth=depth, width=width))
        assert n / 1e6 == pytest.approx(published, abs=0.051)
        assert depth != 28 or n == 36_479_194


def test_text_network_parameter_counts():
    # Kim: widths 3, 4, 5 x 100 maps over 300 numbers; then 300 -> 2.
    textcnn = built("textcnn", 2, vectors=torch.zeros(7, 300))
    assert count(textcnn) - 7 * 300 == (3 + 4 + 5) * 300 * 100 + 300 + 300 * 2 + 2
    # Mukhoti et al.'s code: three convolutions of width 5 and 128 channels over 100 numbers, 128 -> 128 -> 20.
    gp_cnn = built("gp_cnn", 20, vectors=torch.zeros(7, 100))
    assert count(gp_cnn) - 7 * 100 == (100 + 128 + 128) * 128 * 5 + 3 * 128 + 128 * 128 + 128 + 128 * 20 + 20


# Tai et al., Table 1: 316,800 for the constituency Tree-LSTM (150 units), without word vectors and last layer. They add
# a bias with each matrix, so that each gate has two; ours have one.
def test_tree_lstm_parameter_counts():
    binary = built("tree_lstm", 5, vectors=torch.zeros(7, 300))
    assert count(binary.cell) + 5 * 150 == 316_800


@needs_torchvision
@pytest.mark.parametrize("name", MODELS)
def test_last_layer_is_the_named_one(name, tmp_path):
    row = MODELS[name]
    if row.reads == "word pieces":
        tiny_bert(tmp_path)
        network = build(name, 7, weights=tmp_path)
    else:
        network = built(name, 7, **VECTORS[row.reads])
    linear = [m for m in network.modules() if isinstance(m, nn.Linear) and m.out_features == 7]
    assert linear[-1] is getattr(network, row.classifier)


@needs_torchvision
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "wide_resnet28_10", "small_cnn"])
def test_channels_follow_the_input(name):
    for channels, side in ((1, 8), (4, 66)):
        network = built(name, 7, input=(channels, side, side))
        first = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
        assert first.in_channels == channels
        assert network(torch.zeros(2, channels, side, side, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_the_documentation_lists_every_network_and_option(name):
    table = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in table if line.startswith("|") and f"`{name}`" in line]
    cells = [set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")]
    assert cells[3] == {MODELS[name].classifier}
    assert cells[4] == set(MODELS[name].options)


NEAR = {
    "resnet5O": "resnet50",
    "ResNet-50": "resnet50",
    "wideresnet": "wide_resnet28_10",
    "treelstm": "tree_lstm",
}


@pytest.mark.parametrize("name", [*NEAR, "qqq"])
def test_unknown_name_lists_near_ones(name):
    hint = f"; did you mean .*{NEAR[name]}" if name in NEAR else "$"
    refused(f"network must be one of resnet18, .* got '{name}'{hint}", build, name, 10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wide_resnet28_10", {"dept": 10}, "unexpected keyword argument 'dept'"),
        ("textcnn", {}, "missing 1 required keyword-only argument: 'vectors'"),
        ("gp_cnn", {"input": (3, 9, 9), "vectors": torch.zeros(4, 8)}, r"None for gp_cnn, .* got \(3,"),
        ("wide_resnet28_10", {"depth": 27}, "depth must be 6 n"),
        ("wide_resnet28_10", {"depth": 4}, "depth must be 6 n"),
    ],
)
def test_options_are_checked(name, options, message):
    refused(message, build, name, 10, error=(TypeError, ValueError), **options)
    for n_classes in (1, 0, 2.5, True, "10"):
        refused("n_classes must be .* got ", build, name, n_classes, **options)


@needs_timm
def test_timm_network():
    network = build("timm/test_resnet", 7, input=(1, 32, 32), drop_rate=0.25)
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert network.drop_rate == 0.25
    refused("timm has no network 'resnet51'; did you mean .*resnet5", build, "timm/resnet51", 7)
    refused("no_such_option", build, "timm/test_resnet", 7, no_such_option=1, error=TypeError)


def test_network_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def ours(n_classes, width=8): return nn.Linear(width, n_classes)\n"
        "def theirs(width, **options): return nn.Linear(width, options['num_classes'])\n"
        "def told(num_classes, input): return nn.Linear(len(input), num_classes)\n"
        "def silent(width): return nn.Linear(width, 3)\n"
        "def wrong(n_classes): return 'network'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build("my_nets:ours", 7, width=5).weight.shape == (7, 5)
    assert build("my_nets:theirs", 7, width=5).weight.shape == (7, 5)
    assert build("my_nets:told", 7, input=(3, 4, 4)).weight.shape == (7, 3)
    assert build("my_nets:ours", 7, input=(3, 4, 4)).weight.shape == (7, 8)
    refused("unexpected keyword argument 'depth'", build, "my_nets:ours", 7, depth=5, error=TypeError)
    with pytest.raises(TypeError, match=r"n_classes or num_classes, got \('width',\)"):
        build("my_nets:silent", 7, width=5)
    refused("'my_nets:wrong' must .* got str", build, "my_nets:wrong", 7, error=TypeError)
    refused("cannot import network 'my_nets:our'", build, "my_nets:our", 7)
    refused("cannot import network 'my_net.sub:ours'", build, "my_net.sub:ours", 7)
    del sys.modules["my_nets"]


def test_error_inside_a_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused("package_that_is_not_there", build, "needs_more:ours", 7, error=ModuleNotFoundError)


@needs_torchvision
def test_network_from_torchvision_by_import():
    assert build("torchvision.models:squeezenet1_1", 7)(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
