"""The experts of the layer: forward and backward on index arrays, with no buffer of routed tokens."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Activation, get_activation
from blaze_jax.checks import as_array, shown
from blaze_jax.dispatch import EMPTY_SLOT, check_experts, int32_experts
from blaze_jax.explicit_mesh import explicit_mesh, per_device, token_axes
from blaze_jax.implementation import Implementation, choose_implementation, kernels_of
from blaze_jax.layer_observer import TracedLayer, tell_observers
from blaze_jax.reverse_mode import REVERSE_MODE_ONLY, differentiated_once
from pallas_kernels.compat import reverse_mode_token, vary_over, varying_axes
from pallas_kernels.contract import accumulator_dtype

Save = Literal["pre_activations", "inputs"]

PRE_ACTIVATION_NAMES = ("moe_gate", "moe_up")
"""Names of the saved pre-activations, for `jax.checkpoint_policies.save_only_these_names`."""

INDEX_NAME = "moe_indices"
"""Name of the index arrays, for the same policies."""

RESIDUAL_NAMES = (*PRE_ACTIVATION_NAMES, INDEX_NAME)
"""Names of all that the experts' backward pass needs beside the layer's inputs."""

_FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)

_AXES = {
    "x": "Td",
    "experts": "TK",
    "weights": "TK",
    "w_gate": "Edn",
    "w_up": "Edn",
    "w_down": "End",
    "b_gate": "En",
    "b_up": "En",
    "b_down": "Ed",
}


def expert_ffn(
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
    save: Save = "pre_activations",
    implementation: Implementation | None = None,
    dispatched: Any = None,
) -> Float[Array, "T d"]:
    """`y[t] = Σ_k weights[t, k] · FFN_e(x[t])` with `e = experts[t, k]` and `FFN_e(x) = act(x·W_gate, x·W_up)·W_down`.

    Every pair is computed, none is dropped or padded. The arithmetic runs in the dtype of `x` with float32
    accumulation; weights of another dtype are converted a slice at a time (by the Hopper kernels, an array or a block
    of its columns at a time). Two runs give the same bits.

    Args:
      x: tokens, float32, bfloat16 or float16 (float64 where jax has it enabled).
      w_gate: gate weights; None for an ungated activation.
      w_up: up weights.
      w_down: down weights.
      weights: routing weights.
      experts: expert ids; -1 marks an empty slot, which contributes nothing.
      b_gate: gate biases, or None.
      b_up: up biases, or None.
      b_down: down biases, or None; weighted like the rest of the expert's output.
      activation: a name of `ACTIVATION_NAMES` or an `Activation`.
      save: what the backward pass keeps. "pre_activations": x, the gate and up pre-activations, weights and indices.
        "inputs": x, weights and indices; the pre-activations are computed again (22% more arithmetic for a gated
        activation).
      implementation: None for the best that can run here, or "mosaic_gpu" or "xla".
      dispatched: `Routing.dispatched` of the routing that `experts` comes from, which saves grouping the rows again
        where the same implementation routed. The output is the same without.

    Returns:
      The output, in the dtype of `x`. Differentiable in `x`, `weights`, the expert weights and the biases; a gradient
      has the dtype of its argument.

    Raises:
      ValueError: a shape, dtype or option that does not fit, or, where values are known, an expert id out of range.
        Under tracing the output row of a token with such an id is NaN. An activation that closes over a traced array.
      NotImplementedError: the implementation demanded cannot run here; any derivative but the first in reverse mode.
    """
    act = get_activation(activation)
    if save not in get_args(Save):
        raise ValueError(f"{save=} must be one of {', '.join(get_args(Save))}")
    optional = {"w_gate": w_gate, "w_up": w_up, "b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    given = {"x": x, "experts": experts, "weights": weights, "w_down": w_down}
    given |= {name: value for name, value in optional.items() if value is not None}
    arrays = {name: as_array(name, given[name]) for name in _AXES if name in given}
    up_weights, up_biases = _projections(act, arrays)
    _check_arguments(arrays)
    x = arrays["x"]
    _check_closure(act, x, up_weights)
    if x.shape[0] == 0:
        return x

    tokens = (x, arrays["weights"], arrays["experts"])
    params = Parameters(up_weights, up_biases, arrays["w_down"], arrays.get("b_down"))
    mesh = explicit_mesh(tokens, params)
    if mesh is None:
        return _compute(tokens, params, act, save, implementation, dispatched)
    # What `dispatched` holds are all devices' rows; each one groups its own.
    compute = partial(_compute, activation=act, save=save, implementation=implementation, dispatched=None)
    return per_device(compute, mesh, token_axes(*tokens), tokens, params, lambda spec: spec)


def _compute(tokens, params: "Parameters", activation, save, implementation, dispatched) -> Float[Array, "T d"]:
    """The experts' output for `tokens = (x, weights, experts)`."""
    x, weights, experts = tokens
    biases = params.up_biases if params.b_down is None else (*params.up_biases, params.b_down)
    implementation = choose_implementation(implementation, x, (*params.up_weights, params.w_down), biases)
    tell_observers(TracedLayer.of(x, params.up_weights, params.w_down, experts, activation, save, implementation))
    token = reverse_mode_token(REVERSE_MODE_ONLY, *jax.tree.leaves((x, params, weights)))
    num_experts = params.w_down.shape[0]
    experts = int32_experts(experts, num_experts)
    indices = _dispatch(experts, num_experts, implementation, dispatched)
    args = (x, params, weights, experts)
    # Inside shard_map replicated weights meet sharded tokens: made varying here, their gradient is summed over devices.
    args, indices = vary_over((args, checkpoint_name(indices, INDEX_NAME)), varying_axes(args))
    return _expert_ffn(_Settings(activation, save, implementation), token, *args, indices)


class Parameters(NamedTuple):
    """Weights of the experts: gate and up (or up alone) with their biases (or none), then down."""

    up_weights: tuple[Float[Array, "E d n"], ...]
    up_biases: tuple[Float[Array, "E n"], ...]
    w_down: Float[Array, "E n d"]
    b_down: Float[Array, "E d"] | None


class Indices(NamedTuple):
    groups: Any  # the kernels' own kind of row groups
    token_index_map: Int[Array, "T K"]


@dataclass(frozen=True)
class _Settings:
    activation: Activation
    save: Save
    implementation: Implementation


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_ffn(settings: _Settings, token, x, params: Parameters, weights, experts, indices: Indices):
    _, hidden = _up(settings, x, params, indices, keep_pre_activations=False)
    return _down(settings, hidden, params, weights, experts, indices)


def _forward(settings, _, x, params, weights, experts, indices):
    keep = settings.save == "pre_activations"
    pre_activations, hidden = _up(settings, x, params, indices, keep_pre_activations=keep)
    names = PRE_ACTIVATION_NAMES[-len(params.up_weights) :] if keep else ()
    kept = tuple(checkpoint_name(p, name) for p, name in zip(pre_activations, names, strict=True))
    y = _down(settings, hidden, params, weights, experts, indices)
    return y, (x, params, weights, indices, kept if keep else None)


def _backward(settings, residuals, dy):
    x, params, weights, indices, pre_activations = residuals
    if pre_activations is None:
        # Without the barrier XLA would see that these were computed before, and keep them.
        x, dy = lax.optimization_barrier((x, dy))
        pre_activations, _ = _up(settings, x, params, indices, keep_pre_activations=True)
    dx, d_params, d_weights = _grads(settings, x, params, weights, indices, pre_activations, dy)
    return None, dx, d_params, d_weights, None, None


_expert_ffn.defvjp(_forward, _backward)


def _dispatch(experts, num_experts: int, implementation: Implementation, dispatched) -> Indices:
    """Rows by expert: those known already, if this implementation grouped them."""
    kernels = kernels_of(implementation)
    if dispatched is not None and not (isinstance(dispatched, tuple) and len(dispatched) == 2):
        raise ValueError(f"dispatched={shown(dispatched)} must be what Routing.dispatched is, or None")
    if dispatched is None or not isinstance(dispatched[0], kernels.RowGroups):
        return Indices(*kernels.dispatch(experts, num_experts))
    groups, position = dispatched
    if position.shape != experts.shape or groups.offsets.shape != (num_experts + 1,):
        sizes = f"(T, K) = {position.shape} and E={groups.offsets.shape[0] - 1}"
        raise ValueError(f"dispatched is of {sizes}, must be of the experts given, {experts.shape} and E={num_experts}")
    return Indices(groups, position)


def _up(settings: _Settings, x, params: Parameters, indices: Indices, *, keep_pre_activations: bool):
    """Pre-activations (none unless kept, and where nobody uses them) and activation of every row."""

    def run(keep_pre_activations, x, params, indices):
        return kernels_of(settings.implementation).up_projection(
            x,
            params.up_weights,
            params.up_biases,
            indices.groups,
            activation=settings.activation.function,
            keep_pre_activations=keep_pre_activations,
        )

    alone, both = partial(run, False), partial(run, True)
    up = differentiated_once(both, alone) if keep_pre_activations else differentiated_once(alone)
    return up(x, params, indices)


def _down(settings: _Settings, hidden, params: Parameters, weights, experts, indices: Indices):
    """The layer's output from the activation of every row."""

    @differentiated_once
    def run(hidden, params, weights, experts, indices):
        kernels = kernels_of(settings.implementation)
        # An id out of range, E, cannot raise under tracing; it must not pass for an empty slot either.
        weights = jnp.where(experts == EMPTY_SLOT, 0, jnp.where(experts < params.w_down.shape[0], weights, jnp.nan))

        def rows(first_column, num_columns):
            return kernels.down_projection(
                hidden, params.w_down, params.b_down, indices.groups, first_column, num_columns
            )

        num_experts, n, d = params.w_down.shape
        most = kernels.column_block(hidden.shape[0], d, n, num_experts, hidden.dtype)
        return combine_columns(kernels, rows, d, most, hidden.dtype, indices, weights)

    return run(hidden, params, weights, experts, indices)


def _grads(settings: _Settings, x, params: Parameters, weights, indices: Indices, pre_activations, dy):
    """Gradients of tokens, parameters and routing weights."""

    @differentiated_once
    def run(x, params, weights, indices, pre_activations, dy):
        kernels = kernels_of(settings.implementation)
        groups, position = indices.groups, indices.token_index_map
        row_weights = jnp.zeros(groups.num_rows, weights.dtype).at[position].set(weights, mode="drop")
        d_pre_activations, weighted_hidden, d_row_weights = kernels.down_backward(
            dy,
            params.w_down,
            params.b_down,
            pre_activations,
            row_weights,
            groups,
            activation=settings.activation.function,
        )
        d_weights = d_row_weights.at[position].get(mode="fill", fill_value=0).astype(weights.dtype)
        d_down, d_down_bias = kernels.down_weight_gradients(
            weighted_hidden,
            dy,
            row_weights,
            groups,
            dtype=params.w_down.dtype,
            bias_dtype=None if params.b_down is None else params.b_down.dtype,
        )
        d_up, d_up_biases = kernels.up_weight_gradients(
            x,
            d_pre_activations,
            groups,
            dtypes=tuple(w.dtype for w in params.up_weights),
            bias_dtypes=tuple(b.dtype for b in params.up_biases),
        )

        def rows(first_column, num_columns):
            return kernels.up_backward(d_pre_activations, params.up_weights, groups, first_column, num_columns)

        num_experts, n, d = params.w_down.shape
        most = kernels.column_block(groups.num_rows, d, n, num_experts, x.dtype)
        dx = combine_columns(kernels, rows, d, most, x.dtype, indices, None)
        return dx, Parameters(d_up, d_up_biases, d_down, d_down_bias), d_weights

    return run(x, params, weights, indices, pre_activations, dy)


def block_width(width: int, most: int) -> int:
    """Columns of a block of `most` at most, where there are `width` in all: never all of them, if they are many."""
    return min(most, -(-width // 128) * 64, width)


def combine_columns(
    kernels, rows: Callable, width: int, most: int, dtype, indices: Indices, weights
) -> Float[Array, "T width"]:
    """Combines `rows(first_column, num_columns)` a block of columns at a time: only one block of rows is ever alive."""
    block = block_width(width, most)

    def step(i, y):
        # A last narrow block reaches back over columns that are done.
        first_column = jnp.minimum(i * block, width - block)
        return kernels.combine(rows(first_column, block), indices.token_index_map, weights, y, first_column)

    y = lax.empty((indices.token_index_map.shape[0], width), dtype)  # every column is written
    y = vary_over(y, varying_axes(indices))
    return lax.fori_loop(0, -(-width // block), step, y)


def _check_closure(activation: Activation, x, up_weights) -> None:
    """Raises ValueError if the activation closes over a traced array: it has no gradient, and leaks from its trace."""
    pre_activation = jax.ShapeDtypeStruct((1, up_weights[0].shape[-1]), accumulator_dtype(x.dtype))
    traced = jax.make_jaxpr(lambda *pre: activation.function(*pre))(*(pre_activation for _ in up_weights))
    if any(isinstance(value, Tracer) for value in traced.consts):
        raise ValueError(
            f"activation {activation.name!r} closes over a traced array: its values must be constants, "
            "neither learned nor arguments of a transformed function"
        )


def _projections(activation: Activation, arrays: dict[str, Array]):
    """The up weights and biases that the activation takes, in its order; an ungated one takes a single pair."""
    weights, biases = ([arrays.get(f"{kind}_{name}") for name in ("gate", "up")] for kind in "wb")
    present = tuple(w for w in weights if w is not None)
    if len(present) != (2 if activation.gated else 1):
        need = "both w_gate and w_up" if activation.gated else "w_up alone (w_gate=None)"
        got = (
            " and ".join(name for name, w in zip(("w_gate", "w_up"), weights, strict=True) if w is not None)
            or "neither"
        )
        raise ValueError(f"activation {activation.name!r} takes {need}, got {got}")
    present_biases = tuple(b for w, b in zip(weights, biases, strict=True) if w is not None and b is not None)
    if len(present_biases) != sum(b is not None for b in biases) or len(present_biases) not in (0, len(present)):
        got = " and ".join(name for name, b in zip(("b_gate", "b_up"), biases, strict=True) if b is not None)
        raise ValueError(f"biases must be given for every up projection of {activation.name!r} or for none, got {got}")
    return present, present_biases


def _check_arguments(arrays: dict[str, Array]) -> None:
    """Raises ValueError naming an array whose dtype or shape does not fit: of several, the one that differs."""

    def fail(name, rule):
        raise ValueError(f"{name} has shape {arrays[name].shape}, must be {rule}")

    for name, array in arrays.items():
        if name == "experts":  # which `check_experts` checks
            continue
        if array.dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}, must be float32, bfloat16, float16 or float64")
        axes = f"({', '.join(_AXES[name])})"
        if array.ndim != len(_AXES[name]):
            fail(name, f"{axes}: reshape leading dimensions into one" if name == "x" else axes)
        for axis, size in zip(_AXES[name], array.shape, strict=True):
            if size == 0 and axis in "Edn":
                fail(name, f"{axes} with {axis} at least 1")

    shapes = [dict(zip(_AXES[name], array.shape, strict=False)) for name, array in arrays.items()]
    sizes: dict[str, int] = {}
    for axis in "EdnTK":
        if axis == "T":
            check_experts(arrays["experts"], sizes["E"])
        sizes[axis] = _usual_size(axis, shapes, sizes)
    for name, array in arrays.items():
        expected = {axis: sizes[axis] for axis in _AXES[name]}
        if array.shape != tuple(expected.values()):
            named = ", ".join(f"{axis}={size}" for axis, size in expected.items())
            fail(name, f"{tuple(expected.values())}: ({', '.join(expected)}) with {named}")


def _usual_size(axis: str, shapes: list[dict[str, int]], known: dict[str, int]) -> int:
    """The size of an axis in most shapes that have it, counting those that fit the known sizes if there are any."""
    having = [shape for shape in shapes if axis in shape]
    fitting = [shape for shape in having if all(shape.get(other, size) == size for other, size in known.items())]
    return Counter(shape[axis] for shape in fitting or having).most_common(1)[0][0]
