"""The Hopper kernels compiled to machine code for an H200 that need not be there: no spills, and memory as planned.

A compilation takes about ten seconds of one core, whatever the sizes. Each serves every test that asks for it.
"""

import re
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import expert_ffn
from blaze_jax.activations import get_activation
from pallas_kernels import hopper
from pallas_kernels.compile_only import Compiled, compile_for_gpu
from tests.expert_problems import KERNELS, Problem, apply

pytestmark = pytest.mark.compile_only

MIB = 2**20


class Layer(NamedTuple):
    """T tokens, d model width, n expert width, E experts, K per token, and what makes other kernels of them."""

    T: int
    d: int
    n: int
    E: int
    K: int
    dtype: str = "bfloat16"
    param_dtype: str = "bfloat16"
    activation: str = "swiglu"
    biases: bool = False
    save: str = "pre_activations"

    def __str__(self):
        sizes, variant = self[:5], (v for v, d in zip(self[5:], Layer._field_defaults.values(), strict=True) if v != d)
        return "-".join(str(v) if v is not True else "biases" for v in (*sizes, *variant))

    def problem(self) -> Problem:
        """Shapes of the layer's arguments and of its output's gradient."""
        T, d, n, E, K = self[:5]
        array = partial(jax.ShapeDtypeStruct, dtype=self.param_dtype)
        gated = get_activation(self.activation).gated
        params = {"w_gate": array((E, d, n)) if gated else None, "w_up": array((E, d, n)), "w_down": array((E, n, d))}
        if self.biases:
            params |= {"b_gate": array((E, n)) if gated else None, "b_up": array((E, n)), "b_down": array((E, d))}
        tokens = jax.ShapeDtypeStruct((T, d), self.dtype)
        weights = jax.ShapeDtypeStruct((T, K), jnp.float32)
        return Problem(tokens, params, weights, jax.ShapeDtypeStruct((T, K), jnp.int32), tokens)

    def forward(self, x, params, weights, experts):
        """The output, and the function from its gradient to the arguments'."""

        def run(x, params, weights):
            options = {"activation": self.activation, "save": self.save, "implementation": "mosaic_gpu"}
            return apply(expert_ffn, x, params, weights, experts, **options)

        return jax.vjp(run, x, params, weights)

    def step(self, x, params, weights, experts, dy):
        y, vjp = self.forward(x, params, weights, experts)
        return y, vjp(dy)


FINE = Layer(24576, 1536, 256, 128, 8)
WIDE = Layer(32768, 4096, 1024, 128, 8)
NARROW = Layer(65536, 1024, 4096, 16, 4)
LONG = Layer(2097152, 512, 2048, 4, 1)
LONG_AGAIN = LONG._replace(save="inputs")

MEMORY = {FINE: (197, 540), WIDE: (1032, 2400), NARROW: (4104, 6700), LONG: (16480, 18600), LONG_AGAIN: (40, 1600)}
"""MiB: kept for the backward pass beyond x and the weights; alive at once in forward and backward together."""

SMALL = Layer(37, 320, 256, 6, 2)

LAYERS = [
    *MEMORY,
    Layer(32768, 4096, 256, 256, 16),
    SMALL._replace(dtype="float16", param_dtype="float16", activation="geglu"),
    SMALL._replace(dtype="float16", param_dtype="float32", activation="gelu"),
    SMALL._replace(param_dtype="float32", activation="clamped_swiglu"),
    SMALL._replace(biases=True),
    Layer(1, 8, 8, 1, 1, activation="relu2"),
    Layer(100, 72, 200, 5, 3, param_dtype="float32", activation="silu", biases=True),
]


@cache
def compiled(layer: Layer) -> Compiled:
    """Forward and backward of the layer, compiled once."""
    problem = layer.problem()
    present = {name: p for name, p in problem.params.items() if p is not None}
    weights = tuple(p for name, p in present.items() if name.startswith("w_"))
    biases = tuple(p for name, p in present.items() if name.startswith("b_"))
    if reason := hopper.unsupported(problem.x, weights, biases):
        pytest.skip(f"the kernels cannot do this yet: {reason}")
    return compile_for_gpu(layer.step, *problem)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_no_kernel_spills(layer):
    program = compiled(layer)
    assert {kernel.name for kernel in program.kernels} >= set(KERNELS)
    assert program.spill_bytes == {}


@pytest.mark.parametrize("layer", MEMORY, ids=str)
def test_memory_of_a_training_step(layer):
    saved_limit, temporaries_limit = MEMORY[layer]
    *arguments, _ = layer.problem()
    _, residuals = jax.eval_shape(layer.forward, *arguments)
    forwarded = jax.tree.leaves(arguments[:2])
    saved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(residuals))
    saved -= sum(a.size * a.dtype.itemsize for a in forwarded)
    assert saved / MIB <= saved_limit
    assert compiled(layer).memory.temp_size_in_bytes / MIB <= temporaries_limit


def test_the_host_knows_how_often_a_loop_turns():
    """Else it would wait for the device before each turn."""
    loops = re.findall(r" while\(.*", compiled(FINE).executable.as_text())
    assert len(loops) == 2  # over the columns of both passes
    assert [loop for loop in loops if '"known_trip_count":{"n":"3"}' not in loop] == []
