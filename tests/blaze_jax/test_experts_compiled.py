"""The experts compiled for an H200 that need not be there: no spills, memory as planned, nothing copied or atomic.

A compilation of the Hopper kernels takes about ten seconds of one core, whatever the sizes. Each serves every test that
asks for it.
"""

import math
import re
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from blaze_jax import expert_ffn
from blaze_jax.benchmark.sizes import BOTH, FORWARD, Sizes, forward_and_backward, of_floating
from pallas_kernels.compile_only import Compiled, compile_for_gpu
from tests.expert_problems import KERNELS, Problem, apply

MIB = 2**20
FIRST_PASS = "first pass under jax.checkpoint"


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
    implementation: str = "mosaic_gpu"

    def __str__(self):
        sizes, variant = self[:5], (v for v, d in zip(self[5:], Layer._field_defaults.values(), strict=True) if v != d)
        return "-".join(str(v) if v is not True else "biases" for v in (*sizes, *variant))

    def problem(self) -> Problem:
        """Shapes of the layer's arguments and of its output's gradient."""
        config = Sizes(*self[:5]).config(activation=self.activation)
        shapes = {name: p.shape for name, p in config.parameters(self.d, use_bias=self.biases).items()}
        array, pairs = jax.ShapeDtypeStruct, (self.T, self.K)
        params = {name: array(shape, self.param_dtype) for name, shape in shapes.items() if name != "w_router"}
        tokens = array((self.T, self.d), self.dtype)
        return Problem(tokens, params, array(pairs, jnp.float32), array(pairs, jnp.int32), tokens)

    def run(self, *arguments):
        options = {name: getattr(self, name) for name in ("activation", "save", "implementation")}
        return apply(expert_ffn, *arguments, **options)

    def first_pass(self, x, *others):
        return jax.vjp(jax.checkpoint(lambda x: self.run(x, *others)), x)[0]


FINE = Layer(24576, 1536, 256, 128, 8)
WIDE = Layer(32768, 4096, 1024, 128, 8)
NARROW = Layer(65536, 1024, 4096, 16, 4)
LONG = Layer(2097152, 512, 2048, 4, 1)
SHORTER = LONG._replace(T=131072)
LONG_AGAIN = LONG._replace(save="inputs")
NARROW_INT8, LONG_INT8 = (layer._replace(save="int8") for layer in (NARROW, LONG))
SMALL = Layer(37, 320, 256, 6, 2)
PORTABLE = {layer: layer._replace(implementation="xla") for layer in (FINE, NARROW)}

SAVED = {FINE: 197, WIDE: 1032, NARROW: 4104, LONG: 16480, LONG_AGAIN: 40, NARROW_INT8: 2118, LONG_INT8: 8510}
"""MiB kept for the backward pass beyond x and the weights."""

TEMPORARIES = [
    (FINE, BOTH, 540),
    (WIDE, BOTH, 2400),
    (NARROW, BOTH, 6700),
    (NARROW, FIRST_PASS, 2500),
    (LONG, BOTH, 17400),
    (SHORTER, BOTH, 1400),
    (LONG_AGAIN, BOTH, 1600),
    (NARROW_INT8, BOTH, 8400),  # of one layer: P and dP do not share their memory
    (LONG_INT8, BOTH, 10400),
    (PORTABLE[FINE], BOTH, 504),  # 1.3 times what a loop over tiles of 128 rows takes
    (PORTABLE[FINE], FORWARD, 388),
    (PORTABLE[NARROW], BOTH, 8329),
    (PORTABLE[NARROW], FORWARD, 2500),
    (PORTABLE[NARROW], FIRST_PASS, 2500),
]
"""MiB alive at once in a pass."""

LAYERS = [
    *SAVED,
    Layer(32768, 4096, 256, 256, 16),
    SMALL._replace(dtype="float16", param_dtype="float16", activation="geglu"),
    SMALL._replace(dtype="float16", param_dtype="float32", activation="gelu"),
    SMALL._replace(param_dtype="float32", activation="clamped_swiglu"),
    SMALL._replace(biases=True),
    SMALL._replace(n=328, biases=True, activation="gelu", save="int8"),
    Layer(1, 8, 8, 1, 1, activation="relu2"),
    Layer(100, 72, 200, 5, 3, param_dtype="float32", activation="silu", biases=True),
]

over_portable = pytest.mark.parametrize("layer", PORTABLE.values(), ids=str)


@cache
def compiled(layer: Layer, phase: str) -> Compiled:
    """A pass of the layer, compiled once."""
    *inputs, dy = layer.problem()
    if phase == BOTH:
        return compile_for_gpu(forward_and_backward(layer.run), *inputs, dy)
    return compile_for_gpu(layer.run if phase == FORWARD else layer.first_pass, *inputs)


@pytest.mark.compile_only
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_no_kernel_spills(layer):
    program = compiled(layer, BOTH)
    assert {kernel.name for kernel in program.kernels} >= set(KERNELS)
    assert program.spill_bytes == {}


@pytest.mark.compile_only
@pytest.mark.parametrize(("layer", "phase", "limit"), TEMPORARIES, ids=str)
@pytest.mark.default_cases("24576-*", f"*-xla-{FIRST_PASS}-*")
def test_memory_of_a_pass(layer, phase, limit):
    assert compiled(layer, phase).memory.temp_size_in_bytes / MIB <= limit


@pytest.mark.parametrize(("layer", "limit"), SAVED.items(), ids=str)
def test_what_is_kept_for_the_backward_pass(layer, limit):
    *inputs, _ = layer.problem()
    _, residuals = jax.eval_shape(partial(of_floating, layer.run), inputs)
    kept, given = (sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree)) for tree in (residuals, inputs[:2]))
    assert (kept - given) / MIB <= limit


@pytest.mark.compile_only
def test_the_host_knows_how_often_a_loop_turns():
    """Else it would wait for the device before each turn."""
    loops = re.findall(r" while\(.*", compiled(FINE, BOTH).executable.as_text())
    assert len(loops) == 2  # over the columns of both passes
    assert [loop for loop in loops if '"known_trip_count":{"n":"3"}' not in loop] == []


@pytest.mark.compile_only
@over_portable
def test_loops_copy_no_weights_and_no_buffers(layer):
    loops, _, entry = compiled(layer, BOTH).executable.as_text().partition("\nENTRY")
    assert entry
    copied = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", loops)]
    # The zeros that two gradients start from are one array, of which there is a copy before the loop.
    assert sum(elements > layer.E * layer.d * layer.n // 2 for elements in copied) <= 1


@pytest.mark.compile_only
@over_portable
def test_no_scatter_is_atomic(layer):
    scatters = re.findall(r".* scatter\(.*", compiled(layer, BOTH).executable.as_text())
    rows = [line for line in scatters if re.search(r"= bf16\[", line)]
    assert all("unique_indices=true" in line for line in rows)
    assert bool(rows) == (layer == PORTABLE[FINE])  # the other size takes one expert a turn, whose rows are a slice
