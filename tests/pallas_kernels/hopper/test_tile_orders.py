"""No order of tiles lets the compiler drop a kernel: what provably divides by zero is unreachable for LLVM."""

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.activations import get_activation
from pallas_kernels import hopper
from pallas_kernels.compile_only import absent, on_gpu
from pallas_kernels.tuning.parameters import TileTuning

pytestmark = pytest.mark.compile_only

T, D, N, E, K = 512, 1024, 512, 8, 4  # 24 row tiles


def test_kernels_multiply(tmp_path, monkeypatch):
    """In stripes of four rows of tiles, which leave no narrower one."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    tuning = TileTuning(minor_dim=0, tile_width=4)
    activation = get_activation("swiglu").function

    def kernels(x, ups, down, row_weights, experts):
        groups = hopper.dispatch(experts, E)
        pre, hidden = hopper.up_projection(x, ups, (), groups, activation=activation, tuning=tuning)
        out = hopper.down_projection(hidden, down, None, groups, 0, 512, tuning=tuning)
        back = hopper.up_backward(pre, ups, groups, 0, 512, tuning=tuning)
        d_down, _ = hopper.down_weight_gradients(
            hidden, x, row_weights, groups, dtype=x.dtype, bias_dtype=None, tuning=tuning
        )
        options = {"dtypes": (x.dtype,) * 2, "bias_dtypes": ()}
        d_ups, _ = hopper.up_weight_gradients(x, pre, groups, tuning=tuning, **options)
        d_pre = hopper.down_backward(x, down, None, pre, row_weights, groups, activation=activation, tuning=tuning)
        return out, back, d_down, d_ups, d_pre

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = jax.eval_shape(lambda e: hopper.dispatch(e, E), array(T, K, dtype=jnp.int32)).num_rows
    weights = array(E, D, N), array(E, D, N)
    arrays = (array(T, D), weights, array(E, N, D), array(rows, dtype=jnp.float32), array(T, K, dtype=jnp.int32))
    with jax.default_device(absent()):  # compile_for_gpu reads a report that is not printed where code is written
        jax.jit(kernels).lower(*on_gpu(arrays)).compile()
    written = {file.stem: file.read_text() for file in tmp_path.glob("*.ptx") if "dispatch" not in file.name}
    kernels_written = {name.rpartition("_")[0] for name in written}  # jax may compile one twice, under two numbers
    assert len(kernels_written) == 6, sorted(written)
    assert [name for name, text in written.items() if "wgmma.mma_async" not in text] == []
