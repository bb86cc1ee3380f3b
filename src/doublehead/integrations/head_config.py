"""A calibration head as plain JSON and back, so that a saved model finds its head again without a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from doublehead.double_head import CalibrationHead, DoubleHead
from doublehead.head_bank import HeadBank, HeadSpec


def describe(double: DoubleHead, n_classes: int) -> dict[str, Any]:
    """What is needed to put an equal head beside an equal network; its weights are saved apart.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> facts = describe(DoubleHead(net, kind="mlp"), 3)
    >>> facts["layer"], facts["heads"][0]["hidden"]
    ('2', 4)
    """
    head, tap = double.head, double._tap
    specs: tuple[HeadSpec, ...]
    if isinstance(head, CalibrationHead):
        spec = HeadSpec(
            kind=head.kind,
            hidden=head.hidden,
            reads=head.reads,  # type: ignore[arg-type]
            dropout=head.dropout,
            standardise=not isinstance(head.standardise, nn.Identity),
        )
        specs, bank = (spec,), False
    elif isinstance(head, HeadBank):
        specs, bank = head.specs, True
    else:
        raise TypeError(
            f"only a CalibrationHead or a HeadBank can be described in a file, got {type(head).__name__}"
        )
    heads = [asdict(one) for one in specs]
    return {
        "layer": tap.name,
        "n_features": tap.n_features,
        "n_classes": n_classes,
        "bank": bank,
        "heads": heads,
    }


def rebuild(model: nn.Module, facts: Mapping[str, Any]) -> DoubleHead:
    """`model` with a head as `describe` wrote it down; its weights are still those of a fresh one."""
    specs = [HeadSpec(**{**spec, "reads": _reads(spec["reads"])}) for spec in facts["heads"]]
    sizes = facts["n_features"], facts["n_classes"]
    head = HeadBank(*sizes, specs) if facts["bank"] else specs[0].make(*sizes)
    if not facts["layer"]:  # nothing reads the features, so no layer is looked for
        return put_head(DoubleHead(model, facts["n_classes"], reads="statistics", hidden=0), head)
    return DoubleHead(
        model, facts["n_classes"], layer=facts["layer"], n_features=facts["n_features"], head=head
    )


def put_head(double: DoubleHead, head: nn.Module) -> DoubleHead:
    """Give a DoubleHead another head."""
    double.head = head
    double._ddp_params_and_buffers_to_ignore = [f"head.{key}" for key in head.state_dict()]
    return double


def _reads(value: Any) -> Any:
    return value if isinstance(value, str) else tuple(value)
