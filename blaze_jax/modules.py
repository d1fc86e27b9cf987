"""What the modules of linen and nnx share: the call of the layer, and what they tell of training.

A module that is called several times in a step moves its selection bias once, by the demand of all the calls.
"""

from collections.abc import Mapping
from typing import NamedTuple
from weakref import finalize

import numpy as np
from jaxtyping import Array, Float, Int

from blaze_jax.atomic_experts import AtomicRouting, atomic_moe
from blaze_jax.checks import warn_once
from blaze_jax.config import MoEConfig
from blaze_jax.layer import in_common_dtype, moe, skipped
from blaze_jax.routing import Routing, update_selection_bias


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
    router = config.router
    differs = {"bias_update_rate": config.bias_update_rate, "token_rounding": router.token_rounding}
    differs |= {"dropout": config.adapter.dropout if config.adapter else 0.0}
    differs |= {"jitter": router.jitter, "dense training": router.train == "dense"}
    if train is None and any(differs.values()):
        name = next(name for name, value in differs.items() if value)
        warn_once(
            f"the MoE layer's {name} applies in training only, and train was left out, which counts as evaluation: "
            "say train=True or train=False"
        )


def warn_of_atomic_evaluation(train: bool | None) -> None:
    """Warns where nobody said whether atomic experts are training."""
    if train is None:
        warn_once(
            "atomic experts normalise by the tokens of a call in training only, and train was left out, which counts "
            "as evaluation: say train=True or train=False"
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


def warn_of_frozen_statistics() -> None:
    """Warns that the running statistics cannot move."""
    warn_once(
        "the atomic experts' batch_stats do not move in training, because they are not mutable: apply with "
        "mutable=['batch_stats'] (in nn.scan also variable_axes), or evaluation normalises by statistics of no token"
    )


class BiasOfStep(NamedTuple):
    """The selection bias of a module in a training step.

    Attributes:
      start: what the step began with, by which every call routes.
      demand: the tokens that chose each expert in the calls so far.
      moved: what the calls so far have made of it: what the module's variable holds.
    """

    start: Float[Array, " E"]
    demand: Int[Array, " E"] | int
    moved: Float[Array, " E"]

    def after(self, demand: Int[Array, " E"], rate: float) -> "BiasOfStep":
        """With one call more, of that demand."""
        demand = self.demand + demand
        return self._replace(demand=demand, moved=update_selection_bias(self.start, demand, rate))


_STEPS: dict[int, BiasOfStep] = {}
"""By the `id` of modules that last no longer than a step: those that linen binds, and those of nnx in a trace."""


def call_layer(
    module,
    params: Mapping[str, Array],
    x: Float[Array, "... d"],
    bias,
    *,
    train: bool | None,
    skip: bool,
    lasts,
    **given,
) -> tuple[Float[Array, "... d"], Routing, Float[Array, " E"] | None]:
    """The output of a module with these fields, the routing, and its selection bias if the call has moved it.

    Args:
      module: has the fields `config`, `dtype`, `axis_name`, `parallel` and `experts`.
      params: its parameters.
      x: tokens.
      bias: its selection bias; None without one.
      train: whether it is training.
      skip: whether nothing is to be computed.
      lasts: the object that lasts for a step, for several calls of which the bias moves once; None without one.
      **given: `mask`, `expert_ids`, `segment_ids` and `key`, see `moe`.
    """
    config: MoEConfig = module.config
    x = in_common_dtype(x, module.dtype, params)
    if skip:
        return *skipped(x, config, bool(train)), None
    moves = train and config.bias_update_rate
    step = _STEPS.get(id(lasts)) if moves else None
    if step is None or step.moved is not bias:  # calls of a step have left just that array, or it begins here
        step = BiasOfStep(bias, 0, bias)
    options = {name: getattr(module, name) for name in ("axis_name", "parallel", "experts")} | given
    y, routing = moe(x, params, config, selection_bias=step.start, train=bool(train), **options)
    if bias is None or not moves:
        return y, routing, None
    step = step.after(routing.demand, config.bias_update_rate)
    if lasts is not None:
        if id(lasts) not in _STEPS:
            finalize(lasts, _STEPS.pop, id(lasts), None)
        _STEPS[id(lasts)] = step
    return y, routing, step.moved


def call_atomic_layer(
    module, params: Mapping[str, Array], x: Float[Array, "... d"], statistics, *, train: bool | None, mask
) -> tuple[Float[Array, "... d"], AtomicRouting]:
    """The output and the routing of a module with the fields `config`, `dtype`, `axis_name` and `parallel`."""
    x = in_common_dtype(x, module.dtype, params)
    options = {"train": bool(train), "mask": mask, "axis_name": module.axis_name, "parallel": module.parallel}
    return atomic_moe(x, params, statistics, module.config, **options)
