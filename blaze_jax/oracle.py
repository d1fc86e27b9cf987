"""The truth the layer is tested against: every expert for every token, densely, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Activation, get_activation
from pallas_kernels.contract import EMPTY_SLOT, accumulator_dtype


def dense_expert_ffn(
    x: Float[Array, "T d"],
    w_gate: Float[Array, "E d n"] | None,
    w_up: Float[Array, "E d n"] | None,
    w_down: Float[Array, "E n d"],
    weights: Float[Array, "T K"],
    experts: Int[Array, "T K"],
    *,
    b_gate: Float[Array, "E n"] | None = None,
    b_up: Float[Array, "E n"] | None = None,
    b_down: Float[Array, "E d"] | None = None,
    activation: str | Activation = "swiglu",
) -> Float[Array, "T d"]:
    """`expert_ffn` by its definition, `E` times the arithmetic, from inputs upcast to float32 (float64 stays).

    Same arguments as `expert_ffn`; differentiable by plain autodiff.
    """
    act = get_activation(activation)

    def project(array, weight, bias, subscripts):
        out = jnp.einsum(subscripts, array, _upcast(weight), precision=jax.lax.Precision.HIGHEST)
        return out if bias is None else out + _upcast(bias)

    x = _upcast(x)
    pre_activations = [project(x, w, b, "td,edn->ten") for w, b in ((w_gate, b_gate), (w_up, b_up)) if w is not None]
    expert_outputs = project(act.function(*pre_activations), w_down, b_down, "ten,end->ted")
    weights = jnp.where(experts == EMPTY_SLOT, 0, _upcast(weights))
    share = jax.nn.one_hot(experts, w_down.shape[0], dtype=x.dtype) * weights[..., None]
    return jnp.einsum("tke,ted->td", share, expert_outputs, precision=jax.lax.Precision.HIGHEST)


def _upcast(array: Array) -> Array:
    return array.astype(accumulator_dtype(array.dtype))
