"""A module that is called several times in a step: its selection bias moves once, by the demand of all the calls."""

from typing import NamedTuple
from weakref import finalize

from jaxtyping import Array, Float, Int

from blaze_jax.routing import update_selection_bias


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
