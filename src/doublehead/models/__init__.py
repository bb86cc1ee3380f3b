"""The networks of the paper, built by name: input -> features -> one last linear layer -> logits."""

from doublehead.models.images import SmallCNN, WideResNet
from doublehead.models.table import MODELS, Network, build, parse_input
from doublehead.models.text import GlobalPoolingCNN, TextCNN, TreeLSTM
from doublehead.models.transformer import MiniLM

__all__ = [
    "MODELS",
    "GlobalPoolingCNN",
    "MiniLM",
    "Network",
    "SmallCNN",
    "TextCNN",
    "TreeLSTM",
    "WideResNet",
    "build",
    "parse_input",
]
