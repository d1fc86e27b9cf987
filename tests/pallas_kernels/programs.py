"""Programs with every kernel of the experts, of a family, to be compiled for GPUs that need not be there."""

import jax
import jax.numpy as jnp


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def up_and_back(kernels, activation, tuning_of, x, w_up, b_up, w_down, b_down, row_weights, groups, quantize=False):
    """What an activation changes, and how many projections there are, and whether pre-activations are quantized."""
    options = {"activation": activation, "tuning": tuning_of("up_projection"), "quantize": quantize}
    pre, hidden = kernels.up_projection(x, w_up, b_up, groups, **options)
    options = {"activation": activation, "tuning": tuning_of("down_backward")}
    d_pre, *others = kernels.down_backward(x, w_down, b_down, pre, row_weights, groups, **options)
    return hidden, others, kernels.up_backward(d_pre, w_up, groups, 128, 256, tuning=tuning_of("up_backward"))


def down_and_gradients(kernels, dtypes, tuning_of, x, rows, w_down, b_down, row_weights, groups):
    """What no activation changes; the gradients of two projections are of `dtypes`."""
    out = kernels.down_projection(rows, w_down, b_down, groups, 128, 256, tuning=tuning_of("down_projection"))
    options = {"dtypes": dtypes, "bias_dtypes": dtypes, "tuning": tuning_of("up_weight_gradients")}
    up = kernels.up_weight_gradients(x, (rows, rows), groups, **options)
    options = {"dtype": x.dtype, "bias_dtype": x.dtype, "tuning": tuning_of("down_weight_gradients")}
    return out, up, kernels.down_weight_gradients(rows, x, row_weights, groups, **options)
