"""Learning rates as functions of progress through the run."""

from __future__ import annotations

import math

from doublehead.training.config import Config


def learning_rate(config: Config, progress: float) -> float:
    """The network's learning rate when `progress` of the run (0..1) is over.

    >>> config = Config(lr=0.1, schedule="steps", milestones=(0.5, 0.75))
    >>> [round(learning_rate(config, at), 4) for at in (0.0, 0.5, 0.8)]
    [0.1, 0.01, 0.001]
    """
    rate = config.lr
    if config.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * progress))
    elif config.schedule == "steps":
        rate *= 0.1 ** sum(progress >= at for at in config.milestones)
    return rate * min(1.0, progress / config.warmup) if config.warmup else rate
