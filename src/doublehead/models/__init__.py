"""The paper's networks, made by name: images or text -> features -> one last linear layer -> logits."""

from doublehead.models.small_cnn import SmallCNN
from doublehead.models.table import MODELS, Network, build, parse_input
from doublehead.models.text_cnn import GlobalPoolingCNN, TextCNN
from doublehead.models.tree_lstm import TreeLSTM
from doublehead.models.wide_resnet import WideResNet

__all__ = [
    "MODELS",
    "GlobalPoolingCNN",
    "Network",
    "SmallCNN",
    "TextCNN",
    "TreeLSTM",
    "WideResNet",
    "build",
    "parse_input",
]
