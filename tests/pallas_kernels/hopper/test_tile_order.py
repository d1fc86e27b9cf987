"""The order of tiles changes no bit, and lets the compiler drop no kernel."""

import jax
import jax.numpy as jnp
import pytest

from blaze_jax.activations import get_activation
from pallas_kernels import hopper
from pallas_kernels.compile_only import absent, on_gpu
from pallas_kernels.tuning.parameters import TileTuning
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, D, N, Rows, needs_interpreter


@needs_interpreter
@pytest.mark.slow
def test_rows_forth_in_one_column_and_back_in_the_next():
    with hopper.interpreted():
        rows = Rows(hopper, "random")
        x = rows.normal(rows.num_tokens, D, dtype="bfloat16")
        weights = tuple(rows.normal(rows.num_experts, D, N, fan_in=D) for _ in range(2))

        @jax.jit
        def hidden(x):
            orders = TileTuning(), TileTuning(minor_dim=1)
            up = [
                hopper.up_projection(x, weights, (), rows.groups, activation=ACTIVATIONS[2], tuning=o) for o in orders
            ]
            return [hidden[rows.owned] for _, hidden in up]

        assert_same_bits(*hidden(x))


@pytest.mark.compile_only
def test_kernels_multiply(tmp_path, monkeypatch):
    """In stripes of four rows of tiles, which leave no narrower one: what provably divides by zero is unreachable."""
    tokens, d, n, num_experts, slots = 512, 1024, 512, 8, 4  # 24 row tiles
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    tuning = TileTuning(minor_dim=0, tile_width=4)
    activation = get_activation("swiglu").function

    def kernels(x, ups, down, row_weights, experts):
        groups = hopper.dispatch(experts, num_experts)
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

    rows = jax.eval_shape(lambda e: hopper.dispatch(e, num_experts), array(tokens, slots, dtype=jnp.int32)).num_rows
    weights = array(num_experts, d, n), array(num_experts, d, n)
    arrays = (
        array(tokens, d),
        weights,
        array(num_experts, n, d),
        array(rows, dtype=jnp.float32),
        array(tokens, slots, dtype=jnp.int32),
    )
    with jax.default_device(absent()):  # compile_for_gpu reads a report that is not printed where code is written
        jax.jit(kernels).lower(*on_gpu(arrays)).compile()
    written = {file.stem: file.read_text() for file in tmp_path.glob("*.ptx") if "dispatch" not in file.name}
    kernels_written = {name.rpartition("_")[0] for name in written}  # jax may compile one twice, under two numbers
    assert len(kernels_written) == 6, sorted(written)
    assert [name for name, text in written.items() if "wgmma.mma_async" not in text] == []
