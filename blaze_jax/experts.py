"""The experts of the layer as a function: its arguments checked, and the kernels chosen."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Activation, get_activation
from blaze_jax.adapters import is_adapter
from blaze_jax.casts import apart, check_casts, is_made
from blaze_jax.checks import as_array, warn_once
from blaze_jax.dispatch import Grouped, check_experts, group_by_expert, int32_experts
from blaze_jax.exchange import HERE, Transport, gathered
from blaze_jax.experts_vjp import INDEX_NAME, experts_output
from blaze_jax.explicit_mesh import explicit_mesh, per_device, token_axes
from blaze_jax.gradient_sums import GradientSums, sums_on_offer
from blaze_jax.implementation import Implementation, choose_implementation, kernels_of
from blaze_jax.layer_observer import TracedLayer, tell_observers
from blaze_jax.low_rank import has_adapters
from blaze_jax.parallelism import Parallelism
from blaze_jax.plan import (
    ROW_BUDGET,
    ROW_MULTIPLE,
    Parameters,
    Plan,
    Projection,
    Save,
    Tokens,
    check_mean_experts,
    token_ranges,
)
from blaze_jax.precision import Precision, check_precision, kernels_in_fp8
from blaze_jax.quantized import any_quantized, check_quantized, decoded
from blaze_jax.transformations import REVERSE_MODE_ONLY, compiled_once
from pallas_kernels.compat import (
    has_symbolic_sizes,
    reverse_mode_token,
    vary_over,
    varying_axes,
    when_lowered_unsplit,
)
from pallas_kernels.contract import accumulator_dtype
from pallas_kernels.family import Kernels

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


_PARTS = ("w_{}", "b_{}", "w_{}_lora_a", "w_{}_lora_b")
"""What a projection has, by the names of parameters."""


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
    mean_experts: float | None = None,
    save: Save = "pre_activations",
    precision: Precision | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "T d"]:
    """`y[t] = Σ_k weights[t, k] · FFN_e(x[t])` with `e = experts[t, k]` and `FFN_e(x) = act(x·W_gate, x·W_up)·W_down`.

    Every pair is computed, none is dropped or padded. The arithmetic runs in the dtype of `x` with float32
    accumulation; weights of another dtype are converted a slice at a time (by the kernels for GPUs, an array or a block
    of its columns at a time). Two runs give the same bits. On NVIDIA GPUs, operands of float32 products are rounded to
    tf32, unless jax's default matmul precision is "highest".

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
      mean_experts: experts that a token has on average, if many slots are empty. Buffers then have 1.25 times as many
        rows as that makes, and not T·K. Rows beyond them are computed in further turns, and again in the backward pass:
        no routing loses a pair or needs more memory, but takes longer. None for K.
      save: what the backward pass keeps. "pre_activations": x, the gate and up pre-activations, weights and indices.
        "int8": the same, with pre-activations in 8 bits and a scale for each row and block of columns: half the memory,
        the output unchanged, and gradients about 3 times as far from float32's as bfloat16's own. "inputs": x, weights
        and indices; the pre-activations are computed again (22% more arithmetic for a gated activation).
      precision: None, or "fp8" for products of rows in 8 bits (e4m3, a scale for each row and each column of weights),
        forward and backward; the weights' gradients are computed as without. It needs an NVIDIA Hopper GPU and 16-bit
        tokens, or plain XLA, which rounds in the same way and is no faster for it.
      implementation: None for the best that can run here, or "mosaic_gpu" or "xla".

    Returns:
      The output, in the dtype of `x`. Differentiable in `x`, `weights`, the expert weights and the biases; a gradient
      has the dtype of its argument.

    Raises:
      ValueError: a shape, dtype or option that does not fit, or, where values are known, an expert id out of range.
        Under tracing the output row of a token with such an id is NaN. An activation that closes over a traced array.
      NotImplementedError: the implementation demanded cannot run here; any derivative but the first in reverse mode.
    """
    optional = {"w_gate": w_gate, "w_up": w_up, "b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    params = {"w_down": w_down} | {name: value for name, value in optional.items() if value is not None}
    options = {"activation": activation, "save": save, "precision": precision, "implementation": implementation}
    return compute_experts(x, params, weights, experts, mean_experts=mean_experts, **options)


def compute_experts(
    x,
    params: Mapping[str, Array],
    weights,
    experts,
    *,
    activation: str | Activation,
    save: Save,
    implementation: Implementation | None,
    precision: Precision | None = None,
    mean_experts: float | None = None,
    grouped: Grouped | None = None,
    parallel: Parallelism | None = None,
    specs: Mapping[str, P] | None = None,
    frozen: bool = False,
) -> Float[Array, "T d"]:
    """`expert_ffn` in a layer, with parameters by name, of which it takes the experts'.

    The pairs of `experts` may be grouped already: the same kernels do not group them again. With `parallel`, inside
    `jax.shard_map`, tokens and ids are this device's, and parameters its parts, as `specs` says. Adapters among the
    parameters, such as `w_gate_lora_a` and `w_gate_lora_b`, are added to their weights, where `frozen` says that they
    alone have gradients; their ranks are those that the kernels take.
    """
    act = get_activation(activation)
    if save not in get_args(Save):
        raise ValueError(f"{save=} must be one of {', '.join(get_args(Save))}")
    check_precision(precision)
    given = {"x": x, "experts": experts, "weights": weights, **params}
    check_quantized(params, frozen)
    names = [name for name in _AXES if name in given]
    arrays = {name: given[name] if is_made(given[name]) else as_array(name, given[name]) for name in names}
    x, weights, experts = (arrays[name] for name in ("x", "weights", "experts"))
    adapters = {name: array for name, array in params.items() if is_adapter(name)}
    shards = apart(_in_order(act, arrays | adapters))
    check_casts(shards, act, save)
    if save == "int8" and has_adapters((*shards.ups, shards.down)):
        raise ValueError(
            f"{save=} cannot keep pre-activations that adapters are added to: pre_activations or inputs can"
        )
    shared = parallel if parallel and (parallel.group or parallel.fsdp) else None
    if shared is None:
        _check_arguments(arrays)
    _check_closure(act, x, shards)
    check_mean_experts(mean_experts, experts.shape[1])
    if x.shape[0] == 0:
        return x
    options = {"activation": act, "save": save, "precision": precision, "implementation": implementation}
    options |= {"mean_experts": mean_experts, "frozen": frozen}
    if shared is None:
        return _compute_where_tokens_are((x, weights, experts), shards, grouped, **options)

    tensor = shared.axes_of("tensor")
    b_down = shards.down.bias
    if tensor and b_down is not None:  # devices that share an expert's width add its bias once
        b_down = jnp.where(lax.axis_index(tensor) == 0, b_down, 0)
        shards = shards._replace(down=shards.down._replace(bias=b_down))
    transport = Transport(
        expert=shared.axes_of("expert"),
        tensor=tensor,
        exchange=shared.exchange_for(math.ceil(mean_experts or experts.shape[1]), lax.axis_size(shared.group)),
        fsdp=shared.axes_of("fsdp"),
        specs=tuple(jax.tree.leaves(_in_order(act, specs or {}))),
        keep=shared.keep_gathered,
    )
    budget = {"row_budget": shared.row_budget, "chunks": shared.chunks}
    return _compute((x, weights, experts), shards, None, transport, **budget, **options)


vars(expert_ffn)["in_a_layer"] = compute_experts  # whoever calls it in a layer has more to tell: see `layer_form`


def layer_form(experts: Callable[..., Array]) -> Callable[..., Array] | None:
    """What a layer calls in the place of `experts`, called as `compute_experts` is; None for functions without.

    A function declares it by the attribute `in_a_layer`, which those that wrap it by `functools.wraps` have, too.
    """
    return None if hasattr(experts, "__wrapped__") else getattr(experts, "in_a_layer", None)


@compiled_once("activation", "save", "precision", "implementation", "mean_experts", "frozen")
def _compute_where_tokens_are(tokens, params: Parameters, grouped: Grouped | None, **options) -> Float[Array, "T d"]:
    mesh = explicit_mesh(tokens, params)
    if mesh is None:
        return _compute(tokens, params, grouped, **options)
    by_token = P(token_axes(*tokens) or None)
    return per_device(partial(_compute, **options), mesh, (by_token, P()), by_token, tokens, params, explicit=mesh)


MOST_BLOCKS = 8
"""Devices from each of which a block of experts comes by itself; more are gathered from at once."""


def _compute(
    tokens,
    shards: Parameters,
    grouped: Grouped | None = None,
    transport: Transport = HERE,
    *,
    activation: Activation,
    save: Save,
    precision: Precision | None,
    implementation: Implementation | None,
    mean_experts: float | None,
    row_budget: float | None = ROW_BUDGET,
    chunks: int = 1,
    frozen: bool = False,
) -> Float[Array, "T d"]:
    """The experts' output for `tokens = (x, weights, experts)` of this device.

    `shards` are what this device has of the parameters, `grouped` the pairs by expert, if they are, `row_budget` the
    rows of a buffer as a multiple of those expected, and `chunks` the number of those in which the tokens travel.
    """
    x, weights, experts = tokens
    if transport is HERE and (mean_experts is None or has_symbolic_sizes(x)):
        mean_experts = row_budget = None  # on one device no more rows can come than there are slots
    expected = experts.shape[1] if mean_experts is None else mean_experts
    params = jax.eval_shape(lambda p: transport.parameters(decoded(p, x.dtype), x.dtype), shards)
    weights_here, biases, adapters, *_ = zip(*params.ups, params.down, strict=True)
    biases = tuple(bias for bias in biases if bias is not None)
    implementation = choose_implementation(implementation, x, weights_here, biases)
    kernels = kernels_of(implementation, dtype=x.dtype)
    num_experts, width, model_width = weights_here[-1].shape
    plain = kernels
    if precision == "fp8":
        expected_rows = x.shape[0] // chunks * expected * lax.axis_size(transport.tensor)
        kernels = kernels_in_fp8(kernels, x, weights_here, expected_rows)
    if kernels is plain:
        shards = shards.without("cast")
    if transport is HERE and any_quantized(shards):
        products = [tuple(projection.weight for projection in of) for of in (shards.ups, [shards.down])]
        few_pairs = not has_symbolic_sizes(experts) and experts.size < num_experts  # as in generation
        if few_pairs and not all(kernels.decodes(weights, x.dtype) for weights in products):
            shards, experts, grouped = *_of_used_experts(shards, experts), None
            num_experts = experts.size
    sizes = x.shape[0], model_width, width, num_experts, math.ceil(expected)
    dtypes = x.dtype.name, weights_here[0].dtype.name
    tell_observers(TracedLayer(*sizes, *dtypes, activation, save, implementation))
    token = reverse_mode_token(REVERSE_MODE_ONLY, *jax.tree.leaves((x, shards, weights)))
    experts = int32_experts(experts, num_experts * transport.expert_devices)

    ranges = offered = None
    if transport is HERE:
        offered = sums_on_offer()
        experts = when_lowered_unsplit(_warn_of_unsplit, experts)
        ranges = token_ranges(experts.shape[0], math.ceil(expected), num_experts, width * x.dtype.itemsize)
    if not any(a is not None for a in adapters):  # adapters' products take all rows at once
        transport = _as_they_arrive(transport, kernels, num_experts)

    def chunk(x, weights, experts) -> Tokens:
        trips = transport.trips(experts, num_experts)
        experts, most_pairs = transport.experts_here(trips, experts, num_experts)
        experts = transport.by_block(experts, num_experts)
        if ranges:
            dispatch = ranges.dispatch(partial(group_by_expert, kernels, num_experts=num_experts), experts)
        elif grouped and grouped.kernels.dispatch is kernels.dispatch:
            dispatch = grouped.dispatch
        else:
            dispatch = group_by_expert(kernels, *_with_part(experts, num_experts, transport.parts))
        dispatch, most_pairs = checkpoint_name((dispatch, most_pairs), INDEX_NAME)
        return Tokens(x, gathered(transport, trips, weights), experts, dispatch, trips, most_pairs)

    chunked = tuple(map(chunk, *(_in_chunks(array, chunks) for array in (x, weights, experts))))
    rows = None
    if row_budget is not None:
        tokens_at_once = ranges.size if ranges else max(c.x.shape[0] for c in chunked)
        share = tokens_at_once * expected * lax.axis_size(transport.tensor)
        multiples = math.ceil(row_budget * share / ROW_MULTIPLE) + num_experts * transport.parts  # a gap for each group
        rows = multiples * ROW_MULTIPLE
    plan = Plan(activation, save, kernels, transport, rows, ranges, frozen, any_quantized(shards))
    # Inside shard_map replicated weights meet sharded tokens: made varying here, their gradient is summed over devices.
    chunked, shards = vary_over((chunked, shards), varying_axes(chunked, shards))
    if offered is None or frozen:  # whose matrices have no gradients: the sums are refused
        outputs, _ = experts_output(plan, token, chunked, shards)
    else:
        like = _in_order(activation, offered.arrays)
        flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), like)
        sums = GradientSums(flat, offered.layer * num_experts)
        outputs, flat = experts_output(plan, token, chunked, shards, sums)
        offered.give_back(jax.tree.map(lambda array, given: array.reshape(given.shape), flat, like))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)


def _of_used_experts(params: Parameters, experts: Int[Array, "T K"]) -> tuple[Parameters, Int[Array, "T K"]]:
    """The parameters of T·K experts, all that are used among them, and their numbers there: others are not decoded."""
    num_experts = params.down.weight.shape[0]
    experts = int32_experts(experts, num_experts)
    known = (experts >= 0) & (experts < num_experts)
    is_used = jnp.zeros(num_experts, bool).at[jnp.where(known, experts, num_experts)].set(True, mode="drop")
    (used,) = jnp.nonzero(is_used, size=experts.size, fill_value=0)
    place = jnp.cumsum(is_used, dtype=jnp.int32)[jnp.where(known, experts, 0)] - 1
    return jax.tree.map(lambda p: p[used], params), jnp.where(known, place, experts)


def _as_they_arrive(transport: Transport, kernels: Kernels, num_experts: int) -> Transport:
    """`transport`, with what arrives computed part by part and block by block, where the kernels can do so."""
    own_first = own_experts_first = False
    if kernels.overlaps and kernels.in_parts and transport.exchange == "permute" and transport.devices > 1:
        own_first = kernels.dispatch_unsupported(num_experts * transport.devices) is None
    if kernels.overlaps and kernels.of_experts and transport.splits_experts and not transport.keep:
        own_experts_first = 1 < lax.axis_size(transport.fsdp) <= MOST_BLOCKS
    return dataclasses.replace(transport, own_first=own_first, own_experts_first=own_experts_first)


def _warn_of_unsplit(devices: int) -> None:
    warn_once(
        f"the experts are compiled for {devices} devices, each of which computes all tokens, because XLA does not "
        "split them: say which mesh axes do, by Parallelism(mesh, data=...) for moe or a module, or by jax.shard_map"
    )


def _with_part(experts: Int[Array, "T K"], num_experts: int, parts: int) -> tuple[Int[Array, "T K"], int]:
    """Ids of an expert and a part of the tokens, which are in parts one after the other, and how many there are."""
    if parts == 1:
        return experts, num_experts
    part = jnp.arange(experts.shape[0], dtype=jnp.int32)[:, None] // (experts.shape[0] // parts)
    known = (experts >= 0) & (experts < num_experts)
    return jnp.where(known, experts * parts + part, num_experts * parts), num_experts * parts


def _in_chunks(array: Array, chunks: int) -> list[Array]:
    """The array in parts of about equal lengths, none of them empty."""
    return [array] if chunks == 1 else jnp.array_split(array, min(chunks, array.shape[0]))


def _check_closure(activation: Activation, x, params: Parameters) -> None:
    """Raises ValueError if the activation closes over a traced array: it has no gradient, and leaks from its trace."""
    pre_activation = jax.ShapeDtypeStruct((1, params.down.weight.shape[1]), accumulator_dtype(x.dtype))
    traced = jax.make_jaxpr(lambda *pre: activation.function(*pre))(*(pre_activation for _ in params.ups))
    if any(isinstance(value, Tracer) for value in traced.consts):
        raise ValueError(
            f"activation {activation.name!r} closes over a traced array: its values must be constants, "
            "neither learned nor arguments of a transformed function"
        )


def _in_order(activation: Activation, arrays: Mapping[str, Any]) -> Parameters:
    """The projections that the activation takes, in its order; an ungated one takes a single one up."""
    weights, biases = ({n: arrays[f"{kind}_{n}"] for n in ("gate", "up") if f"{kind}_{n}" in arrays} for kind in "wb")
    if len(weights) != (2 if activation.gated else 1):
        need = "both w_gate and w_up" if activation.gated else "w_up alone (w_gate=None)"
        got = " and ".join(f"w_{name}" for name in weights) or "neither"
        raise ValueError(f"activation {activation.name!r} takes {need}, got {got}")
    if biases and biases.keys() != weights.keys():
        got = " and ".join(f"b_{name}" for name in biases)
        raise ValueError(f"biases must be given for every up projection of {activation.name!r} or for none, got {got}")
    names = (*weights, "down")
    *ups, down = (Projection(*(cast(Any, arrays.get(part.format(name))) for part in _PARTS)) for name in names)
    return Parameters(tuple(ups), down)


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
