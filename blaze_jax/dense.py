"""Feed-forward products without groups: the shared experts', and all experts for every token as one wide product.

Like the experts' kernels they apply the activation to the products' accumulators, and their backward pass keeps the
pre-activations and takes the products in the tokens' dtype.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Float

from blaze_jax.activations import Activation
from blaze_jax.exchange import gather_shards
from blaze_jax.layer_observer import TracedLayer, tell_observers
from blaze_jax.parallelism import Parallelism
from blaze_jax.plan import Projection
from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import accumulator_dtype


def dense_ffn(
    tokens: Float[Array, "T d"],
    ups: Sequence[Projection],
    w_down: Float[Array, "n d"] | Float[Array, "E n d"],
    activation: Activation,
    gate: Float[Array, "T 1"] | Float[Array, "T E 1"] | None = None,
) -> Float[Array, "T d"]:
    """`(gate · act(tokens·W + b, ...))·W_down`, in the tokens' dtype, with matrices `(d, n)` or stacks `(E, d, n)`.

    A stack is one matrix of width E·n. A gate scales what is hidden: what it gives the output is then not kept for it.
    """
    dtype = tokens.dtype
    wide = accumulator_dtype(dtype)

    def products(tokens, weights, result_dtype=dtype):
        weights = [weight.astype(dtype) for weight in weights]
        if w_down.ndim == 2:
            return tuple(jnp.dot(tokens, weight, preferred_element_type=result_dtype) for weight in weights)
        return tuple(jnp.einsum("td,edn->ten", tokens, w, preferred_element_type=result_dtype) for w in weights)

    def activated(gate, biases, *pre_activations):
        pre_activations = (p.astype(wide) for p in pre_activations)
        result = activation.function(*map(_plus, pre_activations, biases))
        return (result if gate is None else gate * result).astype(dtype)

    @jax.custom_vjp
    def hidden(tokens, weights, biases, gate):
        return activated(gate, biases, *products(tokens, weights, wide))

    def forward(tokens, weights, biases, gate):
        pre_activations = products(tokens, weights, wide)
        kept = tokens, weights, biases, gate, tuple(p.astype(dtype) for p in pre_activations)
        return activated(gate, biases, *pre_activations), kept

    def backward(residuals, d_hidden):
        tokens, weights, biases, gate, pre_activations = residuals
        d_gate, d_biases, *d_products = jax.vjp(activated, gate, biases, *pre_activations)[1](d_hidden)
        return *jax.vjp(products, tokens, weights)[1](tuple(d_products)), d_biases, d_gate

    hidden.defvjp(forward, backward)
    weights, biases = [up.weight for up in ups], tuple(up.bias for up in ups)
    hidden_values = hidden(tokens, weights, biases, gate)
    if w_down.ndim == 2:
        return jnp.dot(hidden_values, w_down.astype(dtype))
    return jnp.einsum("ten,end->td", hidden_values, w_down.astype(dtype))


def _plus(pre_activation, bias):
    return pre_activation if bias is None else pre_activation + bias.astype(pre_activation.dtype)[None]


def compute_all_experts(
    x: Float[Array, "T d"],
    params: Mapping[str, Array],
    weights: Float[Array, "T E"],
    *,
    activation: Activation,
    parallel: Parallelism | None,
    specs: Mapping[str, P],
) -> Float[Array, "T d"]:
    """`y[t] = Σ_e weights[t, e] · FFN_e(x[t])` over all experts, as one product of width E·n.

    With `parallel`, inside `jax.shard_map`, tokens and weights are this device's, and parameters its parts: its
    experts, or its part of their width, get the tokens of its whole group.
    """
    names = [f"{kind}_{name}" for name in ("gate", "up", "down") for kind in "wb" if f"{kind}_{name}" in params]
    fsdp, expert, tensor, group = (), (), (), ()
    if parallel is not None:
        fsdp, expert, tensor = map(parallel.axes_of, ("fsdp", "expert", "tensor"))
        group = parallel.group
    own = {name: gather_shards(params[name], specs[name], fsdp) for name in names}
    own, x, weights = vary_over((own, x, weights), varying_axes(own, x, weights))
    if group:
        x, weights = (lax.all_gather(array, group, tiled=True) for array in (x, weights))
    num_experts, width, model_width = own["w_down"].shape
    if expert:
        weights = lax.dynamic_slice_in_dim(weights, lax.axis_index(expert) * num_experts, num_experts, axis=1)
    sizes = x.shape[0], model_width, width, num_experts, num_experts
    tell_observers(TracedLayer(*sizes, x.dtype.name, own["w_down"].dtype.name, activation, "pre_activations", "xla"))
    ups = [Projection(own[f"w_{name}"], own.get(f"b_{name}")) for name in ("gate", "up") if f"w_{name}" in own]
    y = dense_ffn(x, ups, own["w_down"], activation, weights[:, :, None])
    if "b_down" in own:  # devices that share an expert's width add its bias once
        bias = own["b_down"] if not tensor else jnp.where(lax.axis_index(tensor) == 0, own["b_down"], 0)
        y += (weights @ bias.astype(weights.dtype)).astype(y.dtype)
    return lax.psum_scatter(y, group, tiled=True) if group else y
