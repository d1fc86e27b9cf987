"""Whether the modules train or evaluate, and their warnings about it."""

import numpy as np

from blaze_jax.config import MoEConfig
from blaze_jax.routing import Routing
from blaze_jax.warn import warn_once


def check_train(train: bool | None) -> bool | None:
    """`train`, if it is a bool, of Python or numpy, or None.

    Raises:
      ValueError: it is something else, a traced value for example.
    """
    if not isinstance(train, bool | np.bool | None):
        raise ValueError(
            f"{train=} must be True, False or None, and not traced: under nn.remat or nnx.remat, make it static "
            "or give it to the module, MoE(..., train=True)"
        )
    return None if train is None else bool(train)


def warn_of_missing_train(train: bool | None, config: MoEConfig) -> None:
    """Warns where nobody said whether it is training, and that makes a difference."""
    if train is None and (config.bias_update_rate or config.router.token_rounding):
        name = "bias_update_rate" if config.bias_update_rate else "token_rounding"
        warn_once(
            f"the MoE layer's {name} applies in training only, and train was left out, which counts as evaluation: "
            "say train=True or train=False"
        )


def warn_of_lost_losses(train: bool | None, routing: Routing, remedy: str) -> None:
    """Warns that nobody collects the weighted losses, unless it is evaluation."""
    if train is not False:
        warn_once(
            f"nobody collects the MoE layer's {' and '.join(routing.weighted_losses)}: {remedy} and add them to the "
            "training loss, set their weights in MoEConfig to 0, or say train=False in evaluation"
        )


def warn_of_frozen_bias(remedy: str) -> None:
    """Warns that a selection bias with an update rate cannot move."""
    warn_once(f"the MoE layer's selection_bias does not move in training, because it is not mutable: {remedy}")
