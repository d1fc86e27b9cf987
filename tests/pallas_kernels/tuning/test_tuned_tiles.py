"""The package's tiles for the kernels that every GPU has compile and spill nothing at the sizes they are for."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.activations import get_activation
from pallas_kernels import ampere
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.tuning import files
from pallas_kernels.tuning.parameters import H200, KINDS, MMA, parse

TUNED = {place[1:] for place in files.package_tunings(parse) if place[0] == H200 and place[1].startswith(MMA)}
SHAPES = sorted({shape for _, shape in TUNED})


def array(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def experts(num_experts, token_ids, x, w_up, w_down):
    groups = ampere.dispatch(token_ids, num_experts)
    weights = jnp.ones(groups.num_rows)
    options = {"activation": get_activation("swiglu").function}
    pre, hidden = ampere.up_projection(x, w_up, (), groups, **options)
    out = ampere.down_projection(hidden, w_down, None, groups, 0, 512)
    d_pre, weighted, d_weights = ampere.down_backward(x, w_down, None, pre, weights, groups, **options)
    down = ampere.down_weight_gradients(weighted, x, weights, groups, dtype=x.dtype, bias_dtype=None)
    up = ampere.up_weight_gradients(x, d_pre, groups, dtypes=(x.dtype,) * 2, bias_dtypes=())
    return out, d_weights, down, up, ampere.up_backward(d_pre, w_up, groups, 0, 512)


@pytest.mark.compile_only
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_the_package_compile_without_spills(shape):
    kernels = {name for name in KINDS if name.startswith(MMA)}
    assert {name for name, of_shape in TUNED if of_shape == shape} == kernels
    logarithm, d, n, num_experts, dtype = re.fullmatch(r"rows=2\^(\d+),d=(\d+),n=(\d+),E=(\d+),(\w+)", shape).groups()
    d, n, num_experts = int(d), int(n), int(num_experts)
    x, up = array(2 ** int(logarithm) // 8, d, dtype=dtype), array(num_experts, d, n, dtype=dtype)
    token_ids, down = array(x.shape[0], 8, dtype="int32"), array(num_experts, n, d, dtype=dtype)
    program = compile_for_gpu(partial(experts, num_experts), token_ids, x, (up, up), down, gpu="h200")
    assert {f"moe_{name.removeprefix(MMA)}" for name in kernels} <= {kernel.name for kernel in program.kernels}
    assert program.spill_bytes == {}
