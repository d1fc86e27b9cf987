"""Arguments of `expert_ffn` for a routing, its output and all gradients in one call, and the kernels it may run on."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from blaze_jax import expert_ffn
from blaze_jax.activations import get_activation
from blaze_jax.oracle import dense_expert_ffn
from tests.numerics import TOLERANCE, assert_close
from tests.routings import ROUTINGS

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


RAGGED = (4, 7)
"""Experts and rows of a turn, several as accelerators take them, that divide neither experts nor rows."""


class Family(NamedTuple):
    """Kernels under test: `expert_ffn` on them, problems that suit them, and how near the oracle they come."""

    function: Callable
    suits: dict[str, Any]
    tolerance: dict[str, float]

    def problem(self, routing: str, **options) -> Problem:
        return make_problem(*ROUTINGS[routing], **self.suits | options)

    def results(self, problem: Problem, **options) -> dict[str, Array]:
        return results(self.function, problem, **options)

    def assert_matches_oracle(self, problem: Problem, save="pre_activations", **options) -> dict[str, Array]:
        """Asserts that output and gradients are near those of float32, and returns them."""
        out = self.results(problem, save=save, **options)
        truth = results(dense_expert_ffn, problem.cast(jnp.float32), **options)
        assert_close(out, truth, self.tolerance[problem.x.dtype.name])
        return out


_SMALL, _TILES, _LARGE = {"d": 20, "n": 12}, {"d": 24, "n": 40}, {"d": 320, "n": 256, "dtype": "bfloat16"}
_TF32 = TOLERANCE | {"float32": 2e-3, "float16": 5e-3}
_ON_GPUS = TOLERANCE | {"float32": 1e-2}
FAMILIES = {
    name: Family(partial(expert_ffn, implementation=implementation), suits, tolerance)
    for name, implementation, suits, tolerance in [
        ("xla", "xla", _SMALL, TOLERANCE),
        ("xla_batched", "xla", _SMALL, TOLERANCE),
        ("ampere", "mosaic_gpu", _TILES, _TF32),
        ("hopper", "mosaic_gpu", _TILES, _TF32),
        ("own_on_gpu", "mosaic_gpu", _LARGE, _ON_GPUS),
        ("ampere_on_gpu", "mosaic_gpu", _LARGE, _ON_GPUS),
    ]
}
"""The portable kernels as CPUs and as accelerators run them, those for GPUs interpreted, and on a GPU."""


def on(*families):
    """Has a test run on these families instead of those that its fixture `kernels` would take."""
    return pytest.mark.parametrize("kernels", families, indirect=True)


def each_on_gpus(*cases: tuple) -> list:
    """Cases, the values of a test's parameters after `kernels`, with each family that a GPU runs."""
    return [pytest.param(f, *case, marks=pytest.mark.gpu) for f in ("own_on_gpu", "ampere_on_gpu") for case in cases]


ON_GPUS = each_on_gpus(())
on_gpus = on(*ON_GPUS)
