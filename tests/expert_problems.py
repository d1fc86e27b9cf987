"""Arguments of `expert_ffn` for a routing, and its output and all gradients in one call."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blaze_jax import expert_ffn
from blaze_jax.activations import get_activation
from pallas_kernels.xla.loops import Turn, turns_of

KERNELS = [f"moe_{name}" for name in ("dispatch_count", "dispatch_place", "combine")]
KERNELS += [f"moe_{name}" for name in ("up_projection", "down_projection", "down_backward", "up_backward")]
KERNELS += ["moe_up_weight_gradients", "moe_down_weight_gradients"]
"""What the kernels of a step are called in its program."""


class Problem(NamedTuple):
    """What `expert_ffn` is called with, and the gradient `dy` of its output."""

    x: Array
    params: dict[str, Array | None]
    weights: Array
    experts: Array
    dy: Array

    def cast(self, dtype) -> "Problem":
        """The same problem with every floating array in `dtype`."""
        return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, self)


def make_problem(
    experts, num_experts, *, d=20, n=12, activation="swiglu", biases=True, dtype="float32", param_dtype=None, seed=0
) -> Problem:
    """Random values of order one, in magnitude as in a trained layer."""
    rng = np.random.default_rng(seed)
    param_dtype = param_dtype or dtype

    def normal(*shape, fan_in=1):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(fan_in), param_dtype)

    tokens, slots = experts.shape
    gated = get_activation(activation).gated
    params = {
        "w_gate": normal(num_experts, d, n, fan_in=d) if gated else None,
        "w_up": normal(num_experts, d, n, fan_in=d),
        "w_down": normal(num_experts, n, d, fan_in=n),
    }
    if biases:
        params |= {
            "b_gate": normal(num_experts, n) if gated else None,
            "b_up": normal(num_experts, n),
            "b_down": normal(num_experts, d),
        }
    return Problem(
        x=normal(tokens, d).astype(dtype),
        params=params,
        weights=jnp.asarray(rng.uniform(0.1, 1, (tokens, slots)), param_dtype),
        experts=jnp.asarray(experts),
        dy=normal(tokens, d).astype(dtype),
    )


def results(function, problem: Problem, **options) -> dict[str, Array]:
    """Output "y" and the gradient of every differentiable argument, by its name; compiled once per shape.

    Unless told so, a GPU multiplies float32 in fewer bits.
    """
    with jax.default_matmul_precision("highest"):
        return _results(function, tuple(options.items()), *problem)


RAGGED = Turn(4, 7)


def batched(problem: Problem, turn: Turn = RAGGED, **options) -> dict[str, Array]:
    """`results` as accelerators compute them, forced on whatever runs these tests."""
    with turns_of(*turn):
        return results(experts_in(turn), problem, implementation="xla", **options)


@cache
def experts_in(turn: Turn):
    """`expert_ffn` as a function of its own for each turn, so that jax compiles each."""
    return partial(expert_ffn)


def lowered(platform: str, problem, **options) -> str:
    """The program for `results` of `expert_ffn` on a platform that need not be there; the problem may be of shapes."""
    traced = _results.trace(expert_ffn, tuple(options.items()), *problem)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def apply(function, x, params, weights, experts, **options) -> Array:
    """`function` of the expert arguments, parameters given by name."""
    params = {"w_gate": None} | params
    return function(x, weights=weights, experts=experts, **params, **options)


@partial(jax.jit, static_argnums=(0, 1))
def _results(function, options, x, params, weights, experts, dy):
    y, vjp = jax.vjp(lambda *args: apply(function, *args, experts, **dict(options)), x, params, weights)
    dx, d_params, d_weights = vjp(dy.astype(y.dtype))
    present = {name: gradient for name, gradient in d_params.items() if gradient is not None}
    return {"y": y, "x": dx, "weights": d_weights, **present}
