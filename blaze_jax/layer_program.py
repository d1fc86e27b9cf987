"""The layer's program: the router, the experts and the shared experts, here or on each device of a mesh.

Tokens are split as `axis_name` says, a `Parallelism`, or the mesh that they are on. `devices_of` makes of all these the
axes of one `jax.shard_map`, or none; `_Program` runs in it, or here. Over devices, each routes and keeps its own
tokens, wherever their experts are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, UInt32

from blaze_jax.activations import Activation, get_activation
from blaze_jax.adapters import added, for_kernels
from blaze_jax.casts import is_made
from blaze_jax.checks import as_array
from blaze_jax.config import MoEConfig
from blaze_jax.dense import compute_all_experts, dense_ffn
from blaze_jax.dispatch import Grouped
from blaze_jax.exchange import gather_shards
from blaze_jax.experts import layer_form
from blaze_jax.explicit_mesh import (
    explicit_mesh,
    flatten_tokens,
    in_sequences,
    meshes_of,
    per_device,
    placed,
    restore_shape,
    token_axes,
    tokens_in_order,
    unflattened,
)
from blaze_jax.given_routing import ExpertFactors, GivenRouting
from blaze_jax.neighbour_losses import neighbour_losses
from blaze_jax.parallelism import Parallelism, is_inside_shard_map
from blaze_jax.plan import Projection
from blaze_jax.router_product import router_logits, split_on_gpus
from blaze_jax.routing import AxisName, Routing, axis_names, route_and_group, routing_specs
from blaze_jax.transformations import compiled_once
from pallas_kernels.compat import axes_of_vmap, has_symbolic_sizes, vary_over, varying_axes
from pallas_kernels.contract import EMPTY_SLOT, accumulator_dtype


class Devices(NamedTuple):
    """The devices that share the tokens of a call.

    Attributes:
      mesh: what `jax.shard_map` is to take all axes of; None on one device, and inside the caller's `jax.shard_map`.
      axes: the mesh axes that split the tokens, in this order.
      explicit: the mesh with explicit axes on which the arrays are; None without one.
    """

    mesh: Mesh | AbstractMesh | None = None
    axes: tuple[str, ...] = ()
    explicit: AbstractMesh | None = None


def devices_of(
    x: Float[Array, "... d"], params: Mapping[str, Array], parallel: Parallelism | None, may_split: bool
) -> Devices:
    """The devices that share the tokens `x`, as `parallel`, an enclosing `jax.shard_map` and the arrays' mesh say.

    Explicit axes split the tokens that they split by type. Automatic ones split them all, if `may_split`, or if another
    axis has a role in `parallel`: XLA itself splits neither kernels nor loops over experts, so that every device would
    compute the same. Axes over which an enclosing `vmap` splits its examples are left to it.
    """
    if parallel is not None and is_inside_shard_map(parallel):
        return Devices(axes=parallel.axes)
    explicit, mesh = explicit_mesh(x, params), jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        mesh = (parallel and parallel.mesh) or next(iter(meshes_of(x, params)), mesh)
    split = token_axes(x)
    free = set(mesh.auto_axes)
    if parallel is None and free:
        may_split = may_split and not mesh.manual_axes and not has_symbolic_sizes((x, params))
        free = set(mesh.axis_names) if may_split else set()
    given = () if parallel is None else parallel.axes
    free = free.union(split) - axes_of_vmap() - set(given)
    axes = tuple(axis for axis in mesh.axis_names if axis in free)
    if parallel is not None:
        axes = replace(parallel, data=(*parallel.axes_of("data"), *axes)).axes
    elif explicit is None and math.prod(mesh.shape[axis] for axis in axes) == 1:
        return Devices()
    in_place = (*split, *(axis for axis in axes if axis not in split))  # so that tokens stay where they are
    return Devices(mesh, in_place, explicit)


def run_layer(
    x: Float[Array, "... d"],
    params: Mapping[str, Array],
    selection_bias,
    given: GivenRouting,
    key: Array | None = None,
    *,
    config: MoEConfig,
    train: bool,
    axis_name: AxisName,
    parallel: Parallelism | None,
    experts: Callable[..., Array],
) -> tuple[Float[Array, "... d"], Routing]:
    """`moe`; inside `jax.shard_map` of this device's tokens and parts of parameters, else of all.

    `experts` without a form for layers are given all tokens, and run as they are: they may close over arrays.
    """
    config = replace(config, router=config.router.for_phase(train))
    given_all = layer_form(experts) is None
    devices = devices_of(x, params, parallel, may_split=axis_name is None and not given_all)
    explicit, segment_ids = devices.explicit, given.segment_ids
    given = given._replace(segment_ids=None)
    specs = dict.fromkeys(params, P())
    if parallel is not None:
        sizes = parallel.sizes(devices.mesh)
        specs = parallel.specs(config, x.shape[-1], use_bias="b_down" in params, sizes=sizes)
        specs = {name: P() if is_made(params[name]) else spec for name, spec in specs.items()}  # which nobody splits
    if given_all:
        devices = Devices(explicit=explicit)
        params = {name: placed(a, P(), explicit) if name.startswith(_DENSE) else a for name, a in params.items()}

    program = _Program(config, axis_names(axis_name), devices.axes, parallel, specs, experts)
    in_order = given_all or not given.treats_tokens_apart(config.router)
    if key is not None and config.router.jitter:
        elsewhere = axis_names(axis_name) if devices.mesh else (*axis_names(axis_name), *devices.axes)
        given = given._replace(seeds=_seeds(key, x.shape[:-1], elsewhere))
    if selection_bias is not None and devices.mesh is not None:
        selection_bias = as_array("selection_bias", selection_bias)
    (y, logits), routing = run_program(program, devices, x, given, params, selection_bias, in_order)
    if logits is not None:
        sequences = in_sequences((unflattened(logits, x, explicit, in_order), given.mask, segment_ids), x, explicit)
        axes = (*program.outer_axes, *(devices.axes if devices.mesh is None else ()))
        names, chunk = config.losses_between_neighbours, config.chunk_tokens
        of_neighbours = neighbour_losses(*sequences, names=names, chunk_tokens=chunk, axes=axes)
        routing = routing._replace(other_losses={**routing.other_losses, **of_neighbours})
    losses = auxiliary_losses(routing, config)
    return restore_shape(y, x, explicit, in_order), routing._replace(weighted_losses=losses)


class Program(Protocol):
    """What each device does with its tokens, for `run_program`."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split the tokens."""
        ...

    @property
    def specs(self) -> Mapping[str, P]:
        """How each parameter is split."""
        ...

    def routing_specs(self, by_token: P) -> Any:
        """How the routing is split, where what there is of a token is split `by_token`."""
        ...

    def layer(
        self, num_tokens: int, by_token: tuple[Array, GivenRouting], shards: Mapping[str, Array], state, /
    ) -> Any:
        """The output of this device's tokens, and the routing, a tuple with `experts` and `weights` of each token.

        The output may be a tree of what there is of each token. `num_tokens` of all devices count; those past them are
        padding. `state` is what the parameters are not.
        """
        ...


def run_program(
    program: Program, devices: Devices, x: Float[Array, "... d"], given: GivenRouting, params, state, in_order: bool
) -> tuple[Any, Any]:
    """The output of `program.layer` on these devices, which `restore_shape` takes, and the routing in order."""
    explicit = devices.explicit
    by_token = flatten_tokens(x, explicit, in_order), _flattened(given, x, explicit, in_order)
    if devices.mesh is not None:
        y, routing = _over_mesh(program, devices.mesh, explicit, by_token, params, state)
    else:
        # A constant, as what modules are initialised with, is the same on all devices, to jax's check.
        by_token = vary_over(by_token, frozenset(devices.axes))
        y, routing = program.layer(by_token[0].shape[0] * lax.axis_size(devices.axes), by_token, params, state)
    chosen, weights = tokens_in_order((routing.experts, routing.weights), x, explicit, in_order)
    return y, routing._replace(experts=chosen, weights=weights)


def not_padding(num_tokens: int, own: int, axes: tuple[str, ...]) -> Bool[Array, " own"] | None:
    """Which of this device's `own` tokens are among the first `num_tokens` of all; None where there are no others."""
    if not axes or num_tokens == own * lax.axis_size(axes):
        return None
    return lax.axis_index(axes) * own + jnp.arange(own, dtype=jnp.int32) < num_tokens


def _seeds(key: Array, shape: tuple[int, ...], axes: tuple[str, ...]) -> UInt32[Array, "... 2"]:
    """Random bits for each token: those that it has on one device, if devices along `axes` have the others."""
    if not axes:
        return jax.random.bits(key, (*shape, 2), jnp.uint32)
    number = math.prod(shape)
    seeds = jax.random.bits(key, (lax.axis_size(axes) * number, 2), jnp.uint32)
    return lax.dynamic_slice_in_dim(seeds, lax.axis_index(axes) * number, number).reshape(*shape, 2)


def _flattened(given: GivenRouting, x: Float[Array, "... d"], mesh: AbstractMesh | None, in_order: bool):
    """What is given of the tokens of `flatten_tokens(x, ...)`, split as they are."""

    def flat(array):
        by_token = array if array.ndim == x.ndim else array[..., None]
        split = (*jax.typeof(x).sharding.spec[:-1], None) if mesh is not None else ()
        return flatten_tokens(placed(by_token, P(*split), mesh), mesh, in_order).reshape(-1, *array.shape[x.ndim - 1 :])

    return jax.tree.map(flat, given)


def _over_mesh(
    program: Program,
    mesh: Mesh | AbstractMesh,
    explicit: AbstractMesh | None,
    by_token: tuple[Array, GivenRouting],
    params,
    state,
) -> tuple[Any, Any]:
    """`program.layer` on each device of the mesh, of its own tokens and parameters."""
    axes, (tokens, given) = program.axes, by_token
    num_tokens, number = tokens.shape[0], math.prod(mesh.shape[axis] for axis in axes)
    whole, split = P(), P(axes or None)
    padding = 0
    if axes != token_axes(tokens):  # which divide them
        padding = -num_tokens % number or (0 if num_tokens else number)
    if padding:
        tokens, (mask, ids, _, seeds) = placed(by_token, whole, explicit)
        mask = mask if mask is None else jnp.pad(mask, (0, padding))
        ids = ids if ids is None else jnp.pad(ids, ((0, padding), (0, 0)), constant_values=EMPTY_SLOT)
        seeds = seeds if seeds is None else jnp.pad(seeds, ((0, padding), (0, 0)))
        tokens, given = jnp.pad(tokens, ((0, padding), (0, 0))), GivenRouting(mask, ids, seeds=seeds)
    specs = (split, dict(program.specs), whole), (split, program.routing_specs(split))
    free = set(mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)
    arguments = (tokens, given), params, state
    y, routing = per_device(partial(program.layer, num_tokens), mesh, *specs, *arguments, explicit=explicit, axes=free)
    if not padding:
        return y, routing
    of_tokens = y, routing.experts, routing.weights
    y, chosen, weights = jax.tree.map(lambda a: placed(a, whole, explicit)[:num_tokens], of_tokens)
    return y, routing._replace(experts=chosen, weights=weights)


_DENSE = ("w_router", "b_router", "router_", "w_latent_", "shared_")
"""How the names of parameters begin that every token needs."""


@dataclass(frozen=True)
class _Program:
    """What one device does with its tokens.

    Attributes:
      config: the layer, with the router of this phase.
      outer_axes: mesh axes of the caller, over which losses and statistics are summed, too.
      axes: mesh axes that split the tokens.
      parallel: the roles of axes; None if they split tokens alone.
      specs: how each parameter is split.
      experts: what computes the experts, see `moe`.
    """

    config: MoEConfig
    outer_axes: tuple[str, ...]
    axes: tuple[str, ...]
    parallel: Parallelism | None
    specs: Mapping[str, P]
    experts: Callable[..., Array]

    def routing_specs(self, by_token: P) -> Routing:
        return routing_specs(by_token)

    def layer(
        self, num_tokens: int, by_token: tuple[Array, GivenRouting], shards: Mapping[str, Array], state
    ) -> tuple[tuple[Float[Array, "T d"], Float[Array, "T E"] | None], Routing]:
        """The output of this device's tokens with its parts of the parameters, and what the router decided.

        And the logits, where losses between neighbours need them. `num_tokens` of all devices count; those past them
        are padding.
        """
        config, (tokens, given) = self.config, by_token
        if given.mask is not None:  # whatever padding holds, a NaN too, must not reach a gradient
            tokens = jnp.where(given.mask[:, None], tokens, 0)

        def dense(*prefixes: str) -> dict[str, Array]:
            own = {name: shard for name, shard in shards.items() if name.startswith(prefixes)}
            whole = {name: gather_shards(shard, self.specs[name], self.axes) for name, shard in own.items()}
            return vary_over(whole, varying_axes(tokens))

        options = {"activation": config.activation, "save": config.save, "implementation": config.implementation}
        options |= {"precision": config.precision} if config.precision or layer_form(self.experts) else {}
        with jax.named_scope("router"):  # profilers show these names
            split = split_on_gpus(config.implementation, tokens)
            product = {"split": split, "jitter": config.router.jitter}
            of_router = dense("w_router", "b_router")
            if config.adapter is not None:
                of_router = added(of_router, config.adapter)
            logits = router_logits(tokens, of_router, given.seeds, **product)
            given = given._replace(seeds=None)
            of_experts = ExpertFactors(state, dense("router_gain").get("router_gain"))
            routing, grouped = self._route(num_tokens, logits, given, of_experts)
        inner, latent = tokens, dense("w_latent_")
        if latent:
            with jax.named_scope("latent"):
                inner = tokens @ latent["w_latent_in"].astype(tokens.dtype)
        with jax.named_scope("experts"):
            compute, specs = layer_form(self.experts), self.specs
            all_experts = compute and config.router.train == "dense" and given.expert_ids is None
            if config.adapter is not None:
                shared = [f"{name}_lora_a" for name in ("w_gate", "w_up", "w_down")] if config.adapter.shared else []
                shards, specs = for_kernels({**shards, **dense(*shared)}, specs, config.adapter)
                if all_experts or not compute:  # which know of no adapters
                    shards = added(shards, replace(config.adapter, alpha=config.adapter.rank))
            if all_experts:
                of_experts = {"activation": get_activation(config.activation), "parallel": self.parallel}
                y = compute_all_experts(inner, shards, routing.weights, specs=specs, **of_experts)
            elif compute:
                options |= {"grouped": grouped, "parallel": self.parallel, "specs": specs}
                options |= {} if config.adapter is None else {"frozen": True}
                expected = config.experts_to_expect
                options["mean_experts"] = None if expected is None else min(expected, routing.experts.shape[1])
                y = compute(inner, shards, routing.weights, routing.experts, **options)
            else:
                weights = (shards.get("w_gate"), shards["w_up"], shards["w_down"])
                biases = {name: shards.get(name) for name in ("b_gate", "b_up", "b_down")}
                y = self.experts(inner, *weights, routing.weights, routing.experts, **biases, **options)
        if latent:
            with jax.named_scope("latent"):
                y = y @ latent["w_latent_out"].astype(y.dtype)
        if config.shared_width:
            with jax.named_scope("shared_experts"):
                y = y + shared_experts(tokens, dense("shared_"), activation=config.activation)
        y = y if given.mask is None else jnp.where(given.mask[:, None], y, 0)
        return (y, logits if config.losses_between_neighbours else None), routing

    def _route(
        self, num_tokens: int, logits: Float[Array, "T E"], given: GivenRouting, of_experts: ExpertFactors
    ) -> tuple[Routing, Grouped | None]:
        """This device's tokens routed, with losses and statistics of all; and its own pairs grouped, if they are."""
        config, axes, own = self.config, self.axes, logits.shape[0]
        options = {"of_experts": of_experts, "implementation": config.implementation}
        options["mutual_information"] = config.mutual_information_weight > 0
        route = partial(route_and_group, experts_per_token=config.experts_per_token, router=config.router, **options)
        if not axes:
            return route(logits, axis_name=self.outer_axes, given=given)
        first, devices = lax.axis_index(axes) * own, lax.axis_size(axes)
        if given.treats_tokens_apart(config.router):
            if (counts := not_padding(num_tokens, own, axes)) is not None:
                logits = jnp.where(counts[:, None], logits, -jnp.inf)
            return route(logits, axis_name=(*self.outer_axes, *axes), given=given)
        # Capacity and rounding look at all tokens: every device then routes them all.
        gathered = jax.tree.map(lambda a: lax.all_gather(a, axes, tiled=True)[:num_tokens], (logits, given))
        routing, _ = route(gathered[0], axis_name=self.outer_axes, given=gathered[1])
        padding = ((0, own * devices - num_tokens), (0, 0))
        chosen = jnp.pad(routing.experts, padding, constant_values=EMPTY_SLOT)
        chosen, weights = (lax.dynamic_slice_in_dim(a, first, own) for a in (chosen, jnp.pad(routing.weights, padding)))

        def as_on_all(array):  # where jax's check has to see that it is
            if not varying_axes(array):
                return array
            return (lax.pmean if jnp.issubdtype(array.dtype, jnp.floating) else lax.pmax)(array, axes)

        return jax.tree.map(as_on_all, routing)._replace(experts=chosen, weights=weights), None


def auxiliary_losses(routing: Routing, config: MoEConfig) -> dict[str, Float[Array, ""]]:
    """The losses to add to the training loss, already weighted by `config`, by name; those of weight 0 are left out."""
    losses = {}
    if config.load_balancing_weight:
        losses["load_balancing_loss"] = config.load_balancing_weight * routing.load_balancing_loss
    if config.z_loss_weight:
        losses["z_loss"] = config.z_loss_weight * routing.z_loss
    losses |= {name: weight * routing.other_losses[name] for name, weight in config.other_loss_weights.items()}
    return losses


@compiled_once("activation")
def shared_experts(
    tokens: Float[Array, "T d"], params: Mapping[str, Array], *, activation: str | Activation
) -> Float[Array, "T d"]:
    """The output of the shared experts, a dense FFN that every token passes through, in the tokens' dtype.

    With a parameter `shared_gate`, `(d, 1)`, a token's output is scaled by the sigmoid of its product with that.
    """
    act, dtype = get_activation(activation), tokens.dtype
    names = ("shared_w_gate", "shared_w_up") if act.gated else ("shared_w_up",)
    gate = None
    if "shared_gate" in params:
        product = jnp.dot(tokens, params["shared_gate"].astype(dtype), preferred_element_type=accumulator_dtype(dtype))
        gate = jax.nn.sigmoid(product)
    ups = [Projection(params[name], None) for name in names]
    return dense_ffn(tokens, ups, params["shared_w_down"], act, gate)
