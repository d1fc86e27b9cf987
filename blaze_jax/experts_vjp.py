"""The custom VJP of the experts: what is kept, what is computed again, and no buffer of routed tokens.

With rows r of pairs (token t, expert e), in the order of the experts, and g_r a row's routing weight:

    P = x[t] · W_up[e]      H = act(P)      y[t] = Σ_r g_r · H · W_down[e]

Kept are x, the weights, the index arrays, and P or nothing. Backward, with dy the gradient of y:

    dH = g_r · dy[t] · W_down[e]ᵀ     dP = dH · act'(P)     dg_r = ⟨H, dy[t] · W_down[e]ᵀ⟩
    dW_down[e] = Σ_r (g_r · H)ᵀ · dy[t]     dW_up[e] = Σ_r x[t]ᵀ · dP     dx[t] = Σ_r dP · W_up[e]ᵀ

(MoEBlaze, arXiv 2601.05296). The gathers x[t] and dy[t] happen inside the kernels; H is computed from P again.

Over devices, x and dy are gathered and y and dx scattered, each by the transpose of the other, and so are the weights
and their gradients. Tokens may come in parts: their rows are computed as they arrive, into the same P, and those sums
that leave come before those that stay. With a budget of rows, P is kept of as many rows, and the others are computed in
further turns.

On one device, tokens whose H would be most of the memory are computed a range at a time, in both passes.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from blaze_jax.expert_rows import Parameters, Settings, Tokens
from blaze_jax.experts_backward import add_trees, gradients_in_ranges, part_gradients
from blaze_jax.experts_forward import hidden_only, output_in_ranges, part_output, pre_activations_and_hidden

PRE_ACTIVATION_NAMES = ("moe_gate", "moe_up")
"""Names of the saved pre-activations, for `jax.checkpoint_policies.save_only_these_names`."""

INDEX_NAME = "moe_indices"
"""Name of the index arrays, for the same policies."""

RESIDUAL_NAMES = (*PRE_ACTIVATION_NAMES, INDEX_NAME)
"""Names of all that the experts' backward pass needs in addition to the layer's inputs."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts_output(settings: Settings, token, parts: tuple[Tokens, ...], shards: Parameters) -> tuple[Array, ...]:
    """The layer's output `(T, d)` for each part; `token` raises where it is differentiated in forward mode."""
    return tuple(y for y, *_ in _outputs(settings, parts, shards, hidden_only))


def _forward(settings: Settings, _, parts: tuple[Tokens, ...], shards: Parameters):
    up_projection = pre_activations_and_hidden if settings.save == "pre_activations" else hidden_only
    outputs, pre_activations, gathered = zip(*_outputs(settings, parts, shards, up_projection), strict=True)
    if settings.save == "pre_activations":
        names = PRE_ACTIVATION_NAMES[-len(pre_activations[0]) :]
        kept = tuple(tuple(map(checkpoint_name, p, names)) for p in pre_activations)
    else:
        kept = None
    parts = tuple(part._replace(experts=None) for part in parts)  # pyright: ignore[reportArgumentType]  (of no use)
    return outputs, (parts, shards, kept, gathered if settings.transport.keep else None)


def _outputs(settings: Settings, parts: tuple[Tokens, ...], shards: Parameters, up_projection: Callable):
    """Of each part: the output, pre-activations of the first turn's rows, and what was gathered."""
    transport = settings.transport
    if transport.fsdp:  # XLA would gather the parameters of all layers at once
        x, shards = lax.optimization_barrier((parts[0].x, shards))
        parts = (parts[0]._replace(x=x), *parts[1:])
    params = transport.parameters(shards, parts[0].x.dtype)
    compute = partial(part_output, settings, params, up_projection)
    for part in parts:
        y, pre_activations, xs = output_in_ranges(settings.ranges, compute, part) if settings.ranges else compute(part)
        yield y, pre_activations, (xs, params)


def _backward(settings: Settings, residuals, d_outputs):
    parts, shards, kept, gathered = residuals
    transport = settings.transport
    xs = [part.x for part in parts] if gathered is None else [xs for xs, _ in gathered]
    if kept is None or gathered is None:  # XLA would see that what follows was computed before, and keep it
        xs, shards, d_outputs = lax.optimization_barrier((xs, shards, d_outputs))
    params, scatter_params = jax.vjp(lambda s: transport.parameters(s, parts[0].x.dtype), shards)
    params = params if gathered is None else gathered[0][1]
    dxs, d_params, d_weights = [], None, []
    for i, part in enumerate(parts):
        x, dy = xs[i], transport.arrivals(part.plan, d_outputs[i])
        if gathered is None and (kept is None or not transport.own_first):
            x = transport.arrivals(part.plan, lax.optimization_barrier((x, dy[-1]))[0])
        compute = partial(part_gradients, settings, params)
        if settings.ranges:
            own = part._replace(x=x[0])
            gradients = gradients_in_ranges(settings.ranges, compute, params, own, dy[0], kept and kept[i])
        else:
            gradients = compute(part, x, dy, kept and kept[i])
        dxs.append(gradients[0])
        d_weights.append(gradients[2])
        d_params = gradients[1] if d_params is None else add_trees(d_params, gradients[1])
    d_parts = tuple(Tokens(dx, dw, None, None) for dx, dw in zip(dxs, d_weights, strict=True))  # pyright: ignore[reportArgumentType]
    return None, d_parts, scatter_params(d_params)[0]


experts_output.defvjp(_forward, _backward)
