"""The whole layer as functions: its parameters, router to output, and what training wants to know."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from blaze_jax.adapters import frozen, is_adapter, with_dropout
from blaze_jax.casts import is_made
from blaze_jax.checks import as_array, check_dtypes, shown, warn_once
from blaze_jax.config import MoEConfig, Parameter, check_config
from blaze_jax.exchange import own_part
from blaze_jax.experts import expert_ffn, layer_form
from blaze_jax.given_routing import GivenRouting
from blaze_jax.layer_program import auxiliary_losses, run_layer
from blaze_jax.parallelism import Parallelism, is_inside_shard_map, mesh_of
from blaze_jax.quantized import check_quantized
from blaze_jax.routing import AxisName, Routing
from blaze_jax.transformations import compiled_once
from pallas_kernels.contract import EMPTY_SLOT, accumulator_dtype


def init(
    key: Array,
    config: MoEConfig,
    width: int,
    *,
    use_bias: bool = False,
    dtype: DTypeLike = jnp.float32,
    kernel_init: Callable = jax.nn.initializers.lecun_normal(),
    bias_init: Callable = jax.nn.initializers.zeros,
    router_init: Callable = jax.nn.initializers.lecun_normal(),
) -> dict[str, Array]:
    """Parameters for `moe`.

    They are whole also inside `jax.shard_map`: call it outside, or initialise a module with `parallel` there.

    Args:
      key: a key of `jax.random`.
      config: the layer.
      width: d, the width of a token.
      use_bias: biases on all projections of the experts.
      dtype: the parameters' dtype.
      kernel_init: initialiser of each expert's matrices.
      bias_init: initialiser of the biases.
      router_init: initialiser of the router's matrix.

    Returns:
      Arrays named and shaped as `config.parameters(width, use_bias=use_bias)` says.

    Raises:
      ValueError: `config` is no MoEConfig, `width` no positive int, or `dtype` not floating.
    """
    check_dtypes(dtype=dtype)
    initializers = {"kernel": kernel_init, "bias": bias_init, "router": router_init}
    parameters = new_parameters(config, width, use_bias=use_bias, dtype=dtype, initializers=initializers)
    keys = jax.random.split(key, len(parameters))
    return {name: p.draw(key) for key, (name, p) in zip(keys, parameters.items(), strict=True)}


def init_adapters(key: Array, config: MoEConfig, width: int) -> dict[str, Array]:
    """The adapters' parameters alone, to stand beside those of a layer that is there already.

    Args:
      key: a key of `jax.random`.
      config: the layer.
      width: d, the width of a token.

    Returns:
      Arrays named and shaped as `config.parameters(width)` says; none where the configuration has no adapter.
    """
    of_others: dict[str, Callable] = dict.fromkeys(["router", "kernel", "bias"], jax.nn.initializers.zeros)
    parameters = new_parameters(config, width, use_bias=False, dtype=jnp.float32, initializers=of_others)
    keys = jax.random.split(key, len(config.adapter_names))
    return {name: parameters[name].draw(key) for name, key in zip(config.adapter_names, keys, strict=True)}


class NewParameter(NamedTuple):
    """A parameter that is to be initialised.

    Attributes:
      axes: a logical name per axis.
      spec: how it is to be split over the mesh of a `Parallelism`; None without one, and inside `jax.shard_map`.
      draw: makes the value of a key; inside `jax.shard_map` over the axes of a `Parallelism`, this device's part of it.
    """

    axes: tuple[str | None, ...]
    spec: P | None
    draw: Callable[[Array], Array]


def new_parameters(
    config: MoEConfig,
    width: int,
    parallel: Parallelism | None = None,
    *,
    use_bias: bool,
    dtype: DTypeLike,
    initializers: Mapping[str, Callable],
) -> dict[str, NewParameter]:
    """The parameters of `config.parameters(width)`, by name; `initializers` has one of each kind.

    Raises:
      ValueError: the mesh lacks an axis, or the devices along one do not divide what it splits.
    """
    parameters = check_config(config).parameters(width, use_bias=use_bias)
    inside = parallel is not None and is_inside_shard_map(parallel)
    like_torch = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    of_kinds: dict[str, Callable] = {
        "gain": jax.nn.initializers.ones,
        "lora_a": like_torch,
        "lora_b": jax.nn.initializers.zeros,
    }
    initializers, specs = of_kinds | dict(initializers), {}
    if parallel is not None and (inside or mesh_of(parallel)):
        specs = parallel.specs(config, width, use_bias=use_bias)
    new = {}
    for name, parameter in parameters.items():
        spec, part = (None, specs[name]) if inside else (specs.get(name), P())
        own_dtype = config.adapter.dtype if config.adapter and is_adapter(name) else dtype
        draw = partial(initial_value, initializers[parameter.kind], parameter=parameter, dtype=own_dtype, part=part)
        new[name] = NewParameter(parameter.axes, spec, draw)
    return new


def moe(
    x: Float[Array, "... d"],
    params: Mapping[str, Array],
    config: MoEConfig,
    *,
    selection_bias: Float[Array, " E"] | None = None,
    train: bool = False,
    mask: Bool[Array, "..."] | None = None,
    expert_ids: Int[Array, "... slots"] | None = None,
    segment_ids: Int[Array, "..."] | None = None,
    key: Array | None = None,
    axis_name: AxisName = None,
    parallel: Parallelism | None = None,
    experts: Callable[..., Array] = expert_ffn,
) -> tuple[Float[Array, "... d"], Routing]:
    """Routes every token, applies its experts and the shared experts, and adds them up.

    Args:
      x: tokens with any leading shape; the arithmetic runs in their dtype, the router in float32. bfloat16 and
        float16 tokens take the fastest kernels.
      params: arrays named and shaped as `config.parameters(d)` says, with biases if there is a "b_down"; `init` makes
        them.
      config: the layer.
      selection_bias: added to the scores for selection only; given if and only if `config.has_selection_bias`.
      train: whether token rounding and jitter apply; evaluation uses the plain choice.
      mask: True for real tokens. The others, as padding, go nowhere and cost no rows: their output and gradient are 0,
        whatever they hold, and they count in no loss, statistic, capacity or rounding.
      expert_ids: the experts of every token, -1 for none, chosen earlier or elsewhere: the router only weighs them, see
        `route`. With `routing.experts.reshape(*x.shape[:-1], -1)` of an earlier call, this one replays it.
      segment_ids: integers, equal for tokens of one text, where several are packed into a sequence: no loss counts
        tokens of different ones as neighbours. A sequence is along the last leading dimension of `x`; inside
        `jax.shard_map`, what a device has of it.
      key: a key of `jax.random` for the router's jitter and the dropout of adapters in training, which need one; the
        same on all devices.
      axis_name: inside `jax.shard_map`, the mesh axes over which tokens are split, one or several: losses, demand and
        statistics are then those of all their devices; () if each device means only its own. With None, a training
        step inside `jax.shard_map` warns.
      parallel: which axes of a mesh split tokens, experts and parameters, for the whole layer to run on its devices.
        Inside `jax.shard_map` over all of its axes, `x` and `params` are what this device has: tokens are split over
        all of the axes, parameters as `parallel.specs` says. With None, tokens are split as their type says on a mesh
        whose axes are all explicit, and over all axes of any other.
      experts: what computes the experts, called as `expert_ffn` is here. That function itself takes up the pairs that
        the router's kernels have grouped. Another one groups them anew, and gets all tokens where axes are automatic.

    Returns:
      `(y, routing)`: the output in the shape and dtype of `x`, and what the router decided, over the leading dimensions
      flattened into T. Add `sum(routing.weighted_losses.values())` to the training loss.

    Raises:
      ValueError: `params`, `selection_bias`, `mask`, `expert_ids`, `segment_ids` or `key` do not match the
        configuration or each other, `x` is not a floating array, or the mesh does not fit: what an axis splits must be
        a multiple of its devices.
    """
    x = as_tokens(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be a floating array (..., d), got {x.dtype} of shape {x.shape}")
    if parallel is not None and (axis_name is not None or layer_form(experts) is None):
        raise ValueError("parallel takes the place of axis_name, and no other experts can be given with it")
    inside = parallel is not None and is_inside_shard_map(parallel)
    params = _checked_parameters(params, config, x, parallel if inside else None)
    made = [type(p).__name__ for p in params.values() if is_made(p)]
    if made and parallel is not None and (parallel.group or parallel.fsdp):
        raise ValueError(f"{parallel=} splits parameters, which a {made[0]} among them cannot be: leave data only")
    _check_selection_bias(selection_bias, config)
    if train and axis_name is None and parallel is None:
        warn_inside_shard_map()
    if train and config.random_stream:
        key = _checked_key(key, config)
    if config.adapter is not None:
        params = frozen(params)
        if train and config.adapter.dropout and key is not None:
            params = with_dropout(params, config.adapter, jax.random.fold_in(key, 1))
    run = run_layer if layer_form(experts) is None else _run_compiled
    options = {"axis_name": axis_name, "parallel": parallel, "experts": experts}
    given = GivenRouting(mask, expert_ids, segment_ids).checked(x.shape[:-1], config.num_experts)
    return run(x, params, selection_bias, given, key, config=config, train=train, **options)


_run_compiled = compiled_once("config", "train", "axis_name", "parallel", "experts")(run_layer)


def _check_selection_bias(selection_bias, config: MoEConfig) -> None:
    """Raises ValueError unless there is one just where the configuration has one: the choice depends on it."""
    if config.has_selection_bias and selection_bias is None:
        raise ValueError(
            f"selection_bias=None, but {config} has one: give the checkpoint's, or jnp.zeros({config.num_experts}) "
            "where training starts"
        )
    if selection_bias is not None and not config.has_selection_bias:
        raise ValueError(
            f"selection_bias={shown(selection_bias)} must be None, because {config} has none: set selection_bias=True "
            "there, or a bias_update_rate"
        )


def _checked_key(key, config: MoEConfig) -> Array:
    """The key; raises ValueError unless it is one, of either kind."""
    if isinstance(key, jax.Array):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim == (0 if typed else 1) and (typed or key.dtype == jnp.uint32):
            return key
    who = config.router if config.router.jitter else config.adapter
    raise ValueError(
        f"key={shown(key)} must be a key of jax.random, because {who} has {config.random_stream} in training"
    )


def statistics(routing: Routing) -> dict[str, Array]:
    """Values to watch in training, by name: tokens of each expert, share of dropped choices, entropy in nats."""
    return {name: getattr(routing, name) for name in ("tokens_per_expert", "dropped_share", "entropy")}


def skipped(x: Float[Array, "... d"], config: MoEConfig, train: bool = False) -> tuple[Float[Array, "... d"], Routing]:
    """Zeros of the types that `moe` returns, as if no token chose any expert."""
    wide, tokens = accumulator_dtype(x.dtype), math.prod(x.shape[:-1])
    zero, counts = jnp.zeros((), wide), jnp.zeros(config.num_experts, jnp.int32)
    slots = (tokens, config.num_experts if train and config.router.train == "dense" else config.slots)
    experts, weights = jnp.full(slots, EMPTY_SLOT, jnp.int32), jnp.zeros(slots, wide)
    losses = dict.fromkeys(config.other_loss_weights, zero)
    losses |= {"activity_loss": zero} if config.router.scoring == "relu" else {}
    routing = Routing(experts, weights, counts, counts, zero, zero, zero, zero, losses, {})
    return jnp.zeros_like(x), routing._replace(weighted_losses=auxiliary_losses(routing, config))


def warn_inside_shard_map() -> None:
    """Warns that what a training step learns of its tokens is one device's, inside `jax.shard_map`."""
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        warn_once(
            f"inside jax.shard_map over {', '.join(axes)}, the router's losses, demand and statistics are those of one "
            "device's tokens: give axis_name, the mesh axes that split the tokens, or axis_name=() if that is meant"
        )


def initial_value(initializer: Callable, key: Array, parameter: Parameter, dtype, part: P = P()) -> Array:
    """`initializer(key, shape, dtype)`, called for each expert of a stack, so that its fan-in is that of one expert.

    With a `part`, inside `jax.shard_map`, this device's part of the same numbers. Where devices share an expert, each
    makes its numbers one expert at a time.
    """
    if parameter.kind not in ("kernel", "lora_a") or len(parameter.shape) == 2:
        return own_part(initializer(key, parameter.shape, dtype), part)

    def of_one(key):
        return own_part(initializer(key, parameter.shape[1:], dtype), P(*part[1:]))

    keys = own_part(jax.random.split(key, parameter.shape[0]), P(*part[:1]))
    return jax.lax.map(of_one, keys) if any(part[1:]) else jax.vmap(of_one)(keys)


def as_tokens(x: ArrayLike) -> Float[Array, "... d"]:
    """`x` as an array; ValueError unless it has a width."""
    x = as_array("x", x)
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"x must be a floating array (..., d) with d at least 1, got {x.dtype} of shape {x.shape}")
    return x


def in_common_dtype(x: Array, dtype: DTypeLike | None, params: Mapping[str, Array]) -> Array:
    """`x` in `dtype`; for None in the common dtype of `x` and the experts' parameters, also where jax promotes none.

    The router's do not count: it computes in float32 whatever they are. Nor do adapters, which are often wider.
    """
    given = [array.dtype for name, array in params.items() if "router" not in name and not is_adapter(name)]
    with jax.numpy_dtype_promotion("standard"):
        return x.astype(dtype or jnp.result_type(x.dtype, *given))


def _checked_parameters(
    params: Mapping[str, Array], config: MoEConfig, x: Float[Array, "... d"], parallel: Parallelism | None = None
) -> dict[str, Array]:
    """The parameters as arrays, if they are those of the configuration, or with `parallel` one device's part."""
    check_config(config)
    if not isinstance(params, Mapping):
        raise ValueError(f"params={shown(params)} must be a mapping from names to arrays, see config.parameters")
    expected = config.parameters(x.shape[-1], use_bias="b_down" in params)
    shapes = {name: parameter.shape for name, parameter in expected.items()}
    if parallel is not None:
        shards = parallel.shards(config, x.shape[-1], use_bias="b_down" in params)
        shapes = {name: shards[name].shape for name in expected}
    check_quantized(params, frozen=config.adapter is not None)
    return check_arrays("params", params, shapes, config, f"for x of shape {x.shape}")


def check_arrays(
    argument: str, given: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], config: object, why: str
) -> dict[str, Array]:
    """What is given, as arrays; ValueError unless it is floating arrays of these names and shapes, and plain ones."""
    if missing := shapes.keys() - given.keys():
        raise ValueError(f"{argument} lacks {', '.join(sorted(missing))}, which {config} asks for")
    if unknown := given.keys() - shapes.keys():
        raise ValueError(f"{argument} has {', '.join(sorted(map(str, unknown)))}, which {config} has no use for")
    if boxed := [name for name in shapes if hasattr(given[name], "unbox")]:
        raise ValueError(
            f"{argument}[{boxed[0]!r}] is boxed, as flax.linen's init returns it: give flax.linen.unbox({argument})"
        )
    arrays: dict[str, Any] = {
        name: given[name] if is_made(given[name]) else as_array(f"{argument}[{name!r}]", given[name]) for name in shapes
    }
    for name, shape in shapes.items():
        if not jnp.issubdtype(arrays[name].dtype, jnp.floating):
            raise ValueError(f"{argument}[{name!r}] has dtype {arrays[name].dtype}, must be floating")
        if arrays[name].shape != shape:
            raise ValueError(f"{argument}[{name!r}] has shape {arrays[name].shape}, must be {shape} {why}")
    return arrays
