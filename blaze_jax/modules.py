"""What the modules of linen and nnx share: whether they train, where parameters live, and calls in one step.

Parameters are split over the devices of a mesh as a `Parallelism` says, from the start. A module that is called several
times in a step moves its selection bias once, by the demand of all the calls.
"""

from collections.abc import Mapping
from typing import NamedTuple
from weakref import finalize

import jax
import numpy as np
from jax import P
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from blaze_jax.checks import warn_once
from blaze_jax.config import MoEConfig
from blaze_jax.parallelism import Parallelism, is_inside_shard_map
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


class Placement(NamedTuple):
    """How the parameters of a module are split, by name.

    Attributes:
      parts: inside `jax.shard_map` over the axes of a `Parallelism`, where each device makes its part; empty elsewhere.
      specs: elsewhere, over the mesh of the `Parallelism` or that of `jax.set_mesh`; empty without one.
    """

    parts: Mapping[str, P]
    specs: Mapping[str, P]


def placement_of(
    parallel: Parallelism | None, config: MoEConfig, model_width: int, *, use_bias: bool = False
) -> Placement:
    """Where the parameters of `config.parameters(model_width)` belong.

    Raises:
      ValueError: the mesh lacks an axis, or the devices along one do not divide what it splits.
    """
    inside = parallel is not None and is_inside_shard_map(parallel)
    if parallel is None or not (inside or mesh_of(parallel)):
        return Placement({}, {})
    specs = parallel.specs(config, model_width, use_bias=use_bias)
    return Placement(specs, {}) if inside else Placement({}, specs)


def mesh_of(parallel: Parallelism) -> Mesh | AbstractMesh | None:
    """The mesh that it was given, or that of `jax.set_mesh`; None without one."""
    mesh = parallel.mesh or jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names else None


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


def bias_of_step(module, bias: Float[Array, " E"]) -> BiasOfStep:
    """The step whose calls of the module, if there is one, have left just that array; else it begins here."""
    step = _STEPS.get(id(module))
    return step if step is not None and step.moved is bias else BiasOfStep(bias, 0, bias)


def remember(module, step: BiasOfStep) -> None:
    """Keeps the step for further calls of the module, if there is one."""
    if module is None:
        return
    if id(module) not in _STEPS:
        finalize(module, _STEPS.pop, id(module), None)
    _STEPS[id(module)] = step
