"""Tiles of the kernels that every GPU has, by the rules and the package's table, compile and spill nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.activations import get_activation
from pallas_kernels import ampere
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.tuning.parameters import KINDS, MMA


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
@pytest.mark.parametrize(
    ("pairs", "d", "n", "num_experts"),
    [(2**18, 1536, 256, 128), (2**18, 4096, 1024, 128), (2**18, 1024, 4096, 16), (2**16, 512, 2048, 4)],
)
def test_tiles_compile_without_spills_at_the_sizes_that_were_tuned(pairs, d, n, num_experts):
    x, up = array(pairs // 8, d, dtype=jnp.bfloat16), array(num_experts, d, n, dtype=jnp.bfloat16)
    token_ids, down = array(x.shape[0], 8, dtype="int32"), array(num_experts, n, d, dtype=jnp.bfloat16)
    program = compile_for_gpu(partial(experts, num_experts), token_ids, x, (up, up), down, gpu="h200")
    kernels = {f"moe_{name.removeprefix(MMA)}" for name in KINDS if name.startswith(MMA)}
    assert kernels <= {kernel.name for kernel in program.kernels}
    assert program.spill_bytes == {}
