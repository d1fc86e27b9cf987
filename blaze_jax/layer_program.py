"""The layer's program: the router, the experts and the shared experts, here or on each device of a mesh.

Over devices, each routes and keeps its own tokens, wherever their experts are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Float

from blaze_jax.checks import as_array
from blaze_jax.config import MoEConfig
from blaze_jax.dispatch import Grouped
from blaze_jax.exchange import gather_shards
from blaze_jax.experts import compute_experts, experts_over_devices
from blaze_jax.explicit_mesh import (
    explicit_axes,
    explicit_mesh,
    flatten_tokens,
    meshes_of,
    reshard,
    restore_shape,
    token_axes,
    tokens_in_order,
)
from blaze_jax.parallelism import Parallelism, names_of
from blaze_jax.router import Router
from blaze_jax.routing import AxisName, Routing, route_and_group, router_logits
from blaze_jax.shared_experts import shared_experts
from pallas_kernels.compat import axes_of_vmap, has_symbolic_sizes, vary_over, varying_axes
from pallas_kernels.contract import EMPTY_SLOT

type Specs = Mapping[str, P]


def is_inside_shard_map(parallel: Parallelism) -> bool:
    """Whether an enclosing `jax.shard_map` is over all these axes; ValueError if it is over some."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    inside = [axis for axis in parallel.axes if axis in manual]
    if inside and len(inside) < len(parallel.axes):
        missing = ", ".join(axis for axis in parallel.axes if axis not in manual)
        raise ValueError(
            f"jax.shard_map is over {', '.join(inside)} but not over {missing}: it must be over all or none"
        )
    return bool(inside)


def over_automatic_axes(*arrays) -> Parallelism | None:
    """Tokens split over all axes of the mesh of `arrays`, or of `jax.set_mesh`, if one of them is automatic.

    XLA itself splits neither kernels nor loops over experts: every device would compute all tokens.

    Returns:
      None without such a mesh, inside `jax.shard_map`, and where sizes are symbolic. Axes over which an enclosing
      `vmap` splits its examples are left to it.
    """
    mesh = next(iter(meshes_of(*arrays)), None)
    if mesh is None or mesh.manual_axes or AxisType.Auto not in mesh.axis_types or has_symbolic_sizes(arrays):
        return None
    axes = tuple(axis for axis in mesh.axis_names if axis not in axes_of_vmap())
    return Parallelism(mesh, data=axes) if math.prod(mesh.shape[axis] for axis in axes) > 1 else None


def layer_here(
    x: Float[Array, "... d"],
    params: Mapping[str, Array],
    selection_bias,
    *,
    config: MoEConfig,
    train: bool,
    axis_name: AxisName,
    experts: Callable[..., Array] | None = None,
) -> tuple[Float[Array, "... d"], Routing]:
    """`moe` of tokens that are here, or split by their type over a mesh with explicit axes.

    Other `experts` run as they are, and not in a program of ours: they may close over arrays.
    """
    router, mesh = config.router.for_phase(train), explicit_mesh(x, params)
    in_order = experts is not None or not router.treats_tokens_apart()
    tokens = flatten_tokens(x, mesh, in_order)

    def dense(*prefixes: str) -> dict[str, Array]:
        own = _named(params, prefixes)
        return own if mesh is None else reshard(own, mesh)

    def compute(routing: Routing, grouped: Grouped | None):
        function: Callable[..., Array] = experts or partial(compute_experts, grouped)
        return function(
            tokens,
            params.get("w_gate"),
            params["w_up"],
            params["w_down"],
            routing.weights,
            routing.experts,
            **{name: params.get(name) for name in ("b_gate", "b_up", "b_down")},
            **_options(config),
        )

    route = partial(_route_and_group, config, router, selection_bias, axis_name=axis_name)
    y, routing = _layer(tokens, dense, config, route, compute)
    return _finished(y, routing, x, mesh, in_order, config)


def layer_over_devices(
    x: Float[Array, "... d"],
    params: dict[str, Array],
    selection_bias,
    *,
    config: MoEConfig,
    train: bool,
    parallel: Parallelism,
) -> tuple[Float[Array, "... d"], Routing]:
    """`moe`; inside `jax.shard_map` of this device's tokens and parts of parameters, else of all."""
    router = config.router.for_phase(train)
    inside = is_inside_shard_map(parallel)
    explicit = None if inside else explicit_mesh(x, params)
    mesh = jax.sharding.get_abstract_mesh()
    mesh = mesh if mesh.axis_names else parallel.mesh or explicit or mesh
    split = () if inside else token_axes(x)
    if not inside:
        parallel = _with_axes_without_a_role(parallel, mesh, split)
    axes = (*split, *(axis for axis in parallel.axes if axis not in split))  # so that tokens stay where they are
    sizes = parallel.sizes(mesh)
    specs = parallel.specs(config, x.shape[-1], use_bias="b_down" in params, sizes=sizes)
    run = partial(_on_this_device, config=config, router=router, parallel=parallel, specs=specs, axes=axes)
    in_order = not router.treats_tokens_apart()
    if inside:
        # A constant, as what modules are initialised with, is the same on all devices, to jax's check.
        tokens = vary_over(x.reshape(-1, x.shape[-1]), frozenset(parallel.axes))
        y, routing = run(tokens, params, selection_bias, num_tokens=tokens.shape[0] * math.prod(sizes.values()))
        return _finished(y, routing, x, None, in_order, config)

    tokens = flatten_tokens(x, explicit, in_order)
    num_tokens, devices = tokens.shape[0], math.prod(sizes.values())
    by_token, whole = P(axes), P()
    padding = -num_tokens % devices or (0 if num_tokens else devices)
    if padding:
        tokens = jnp.pad(_placed(tokens, whole, explicit), ((0, padding), (0, 0)))
    fields: dict[str, Any] = dict.fromkeys(Routing._fields, whole) | {"experts": by_token, "weights": by_token}
    over_devices = jax.shard_map(
        partial(run, num_tokens=num_tokens),
        mesh=mesh,
        in_specs=(by_token, dict(specs), whole),
        out_specs=(by_token, Routing(**fields)),
        axis_names=set(mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes),
        check_vma=False,  # with it jax 0.12 cannot differentiate the error function of a GELU
    )
    placed = {name: _placed(array, specs[name], explicit) for name, array in params.items()}
    bias = None if selection_bias is None else _placed(as_array("selection_bias", selection_bias), whole, explicit)
    y, routing = jax.jit(over_devices)(_placed(tokens, by_token, explicit), placed, bias)
    if padding:
        y, *of_tokens = (_placed(a, whole, explicit)[:num_tokens] for a in (y, routing.experts, routing.weights))
        routing = routing._replace(experts=of_tokens[0], weights=of_tokens[1])
    return _finished(y, routing, x, explicit, in_order, config)


def _layer(
    tokens: Float[Array, "T d"], dense: Callable, config: MoEConfig, route: Callable, compute: Callable
) -> tuple[Float[Array, "T d"], Routing]:
    """The output of these tokens and what the router decided.

    Args:
      tokens: all tokens, or those of one device.
      dense: whole parameters whose names begin with one of its arguments.
      config: the layer.
      route: the routing of logits, and its pairs grouped by expert if they are.
      compute: the experts' output of these two.
    """
    with jax.named_scope("router"):  # profilers show these names
        routing, grouped = route(router_logits(tokens, dense("w_router", "b_router")))
    with jax.named_scope("experts"):
        y = compute(routing, grouped)
    if config.shared_width:
        with jax.named_scope("shared_experts"):
            y = y + shared_experts(tokens, dense("shared_"), config=config)
    return y, routing


def _finished(y, routing: Routing, x, mesh, in_order: bool, config: MoEConfig) -> tuple[Float[Array, "... d"], Routing]:
    """The output in the shape of `x`, and the routing in the order of its tokens, with weighted losses."""
    experts, weights = tokens_in_order((routing.experts, routing.weights), x, mesh, in_order)
    losses = auxiliary_losses(routing, config)
    routing = routing._replace(experts=experts, weights=weights, weighted_losses=losses)
    return restore_shape(y, x, mesh, in_order), routing


def auxiliary_losses(routing: Routing, config: MoEConfig) -> dict[str, Float[Array, ""]]:
    """The losses to add to the training loss, already weighted by `config`, by name; those of weight 0 are left out."""
    losses = {}
    if config.load_balancing_weight:
        losses["load_balancing_loss"] = config.load_balancing_weight * routing.load_balancing_loss
    if config.z_loss_weight:
        losses["z_loss"] = config.z_loss_weight * routing.z_loss
    return losses


def _route_and_group(config: MoEConfig, router: Router, selection_bias, logits, *, axis_name: AxisName = None):
    return route_and_group(logits, config.experts_per_token, router, selection_bias, axis_name, config.implementation)


def _options(config: MoEConfig) -> dict[str, Any]:
    """The options of `expert_ffn` that the configuration has."""
    return {"activation": config.activation, "save": config.save, "implementation": config.implementation}


def _named(params: Mapping[str, Array], prefixes: tuple[str, ...]) -> dict[str, Array]:
    return {name: array for name, array in params.items() if name.startswith(prefixes)}


def _with_axes_without_a_role(parallel: Parallelism, mesh, split: tuple[str, ...]) -> Parallelism:
    """`parallel` where axes without a role split tokens, too, lest devices along them compute the same.

    These are automatic axes, but not those over which an enclosing `vmap` splits its examples, and the axes `split`.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = {axis for axis, kind in kinds if kind == AxisType.Auto} - axes_of_vmap()
    more = (axis for axis in mesh.axis_names if axis in free.union(split) and axis not in parallel.axes)
    return replace(parallel, data=(*parallel.axes_of("data"), *more))


def _placed(array: Array, spec: P, mesh) -> Array:
    """On a mesh with explicit axes, where it has to be said; of automatic axes beside them it must not be."""
    if mesh is None:
        return array
    explicit = explicit_axes(mesh)
    said = (tuple(name for name in names_of(axes) if name in explicit) or None for axes in spec)
    return jax.sharding.reshard(array, NamedSharding(mesh, P(*said)))


def _on_this_device(
    tokens: Float[Array, "T d"],
    shards,
    selection_bias,
    *,
    config: MoEConfig,
    router: Router,
    parallel: Parallelism,
    specs: Specs,
    axes: tuple[str, ...],
    num_tokens: int,
) -> tuple[Float[Array, "T d"], Routing]:
    """The layer on one device: `num_tokens` are all devices' tokens that count, those past them are padding.

    Tokens are split over `axes`, those of `parallel` in this order.
    """

    def dense(*prefixes: str) -> dict[str, Array]:
        own = _named(shards, prefixes)
        whole = {name: gather_shards(shard, specs[name], parallel.axes) for name, shard in own.items()}
        return vary_over(whole, varying_axes(tokens))

    def compute(routing: Routing, _):
        options = _options(config)
        return experts_over_devices(parallel, specs, shards, tokens, routing.weights, routing.experts, **options)

    return _layer(tokens, dense, config, partial(_route, config, router, selection_bias, axes, num_tokens), compute)


def _route(
    config: MoEConfig,
    router: Router,
    selection_bias,
    axes: tuple[str, ...],
    num_tokens: int,
    logits: Float[Array, "T E"],
) -> tuple[Routing, None]:
    """This device's tokens routed, with the losses and statistics of all; what is grouped are no device's pairs."""
    own, route = logits.shape[0], partial(_route_and_group, config, router, selection_bias)
    first = lax.axis_index(axes) * own
    if router.treats_tokens_apart():
        if num_tokens % own or num_tokens < own * lax.axis_size(axes):
            counts = first + jnp.arange(own, dtype=jnp.int32) < num_tokens
            logits = jnp.where(counts[:, None], logits, -jnp.inf)
        return route(logits, axis_name=axes)[0], None
    # Capacity and rounding look at all tokens: every device then routes them all.
    routing, _ = route(lax.all_gather(logits, axes, tiled=True)[:num_tokens])
    padding = ((0, own * lax.axis_size(axes) - num_tokens), (0, 0))
    experts = jnp.pad(routing.experts, padding, constant_values=EMPTY_SLOT)
    mine = (lax.dynamic_slice_in_dim(a, first, own) for a in (experts, jnp.pad(routing.weights, padding)))
    same = {
        name: (lax.pmean if jnp.issubdtype(a.dtype, jnp.floating) else lax.pmax)(a, axes)
        for name, a in routing._asdict().items()
        if name not in ("experts", "weights", "weighted_losses")
    }
    experts, weights = mine
    return Routing(experts=experts, weights=weights, weighted_losses={}, **same), None
