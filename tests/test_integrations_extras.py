"""Without its package an integration names the extra to install, and the rest of doublehead works."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from doublehead import calibrate


@pytest.mark.parametrize("package", ["lightning", "transformers", "sklearn"])  # names of module and extra too
def test_importing_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"doublehead.integrations.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"'{package}'.*pip install 'doublehead\[{package}\]'"):
        importlib.import_module(f"doublehead.integrations.{package}")


def test_exporting_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    model = calibrate(nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
    with pytest.raises(ImportError, match=r"'onnxscript'.*pip install 'doublehead\[export\]'"):
        model.export(tmp_path, torch.randn(2, 4))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"'safetensors'.*pip install 'doublehead\[export\]'"):
        model.save(tmp_path)
