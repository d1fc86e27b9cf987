"""How tokens and parameters come to the devices that compute with them, and what is made of them goes back.

Both are linear maps inside `jax.shard_map`, each with its transpose: what goes to several devices comes back as a sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jaxtyping import Array, Float, Int

from pallas_kernels.compat import vary_over, varying_axes
from pallas_kernels.contract import EMPTY_SLOT, accumulator_dtype

Exchange = Literal["all_gather", "permute", "all_to_all"]

type Axes = str | tuple[str, ...]


class Trips(NamedTuple):
    """Which of a device's T tokens go to which of the D devices of its group, for "all_to_all".

    Attributes:
      send_tokens: `(S,)` int32, the tokens to send, by device; T past the last. S is `T·min(D, K')`, for at most K'
        devices a token.
      places: `(T, K')` int32, where in `send_tokens` each trip of a token is; S for none.
      starts: `(D,)` int32, where in `send_tokens` those to each device start.
      counts: `(D,)` int32, how many those are.
    """

    send_tokens: Int[Array, " S"]
    places: Int[Array, "T _"]
    starts: Int[Array, " D"]
    counts: Int[Array, " D"]


@dataclass(frozen=True)
class Transport:
    """Between the devices of a group, and from those that store parameters.

    Attributes:
      expert, tensor: mesh axes along which tokens travel; together, the group.
      exchange: how they do.
      fsdp: mesh axes along which parameters are gathered.
      specs: how the experts' parameters are split, in the order of `jax.tree.leaves`.
      keep: whether the backward pass keeps what was gathered.
      own_first: whether tokens are computed with as they arrive, this device's own before the others'; for "permute".
      own_experts_first: the same for experts that are split along `fsdp`.
    """

    expert: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    exchange: Exchange = "all_gather"
    fsdp: tuple[str, ...] = ()
    specs: tuple[P, ...] = ()
    keep: bool = True
    own_first: bool = False
    own_experts_first: bool = False

    @property
    def group(self) -> tuple[str, ...]:
        return (*self.expert, *self.tensor)

    @property
    def in_step(self) -> frozenset[str]:
        """Mesh axes whose devices must transport equally often: XLA's permutation waits for other groups, too."""
        permutes = self.exchange == "permute" and self.devices > 1
        return frozenset(jax.sharding.get_abstract_mesh().manual_axes if permutes else self.group)

    @property
    def devices(self) -> int:
        """How many devices the group has."""
        return lax.axis_size(self.group)

    def gather(self, trips: Trips | None, tokens: Float[Array, "T ..."]) -> Float[Array, "T_group ..."]:
        """The group's tokens: `T` of each device, in the order of the devices; zeros where one sent fewer."""
        if self.devices == 1:
            return tokens
        if trips is not None:
            return _send(self.group, trips, tokens)
        if self.exchange == "permute":
            return jnp.concatenate(self._rotations(tokens))
        return lax.all_gather(tokens, self.group, tiled=True)

    def scatter(self, trips: Trips | None, tokens: Float[Array, "T_group ..."]) -> Float[Array, "T ..."]:
        """The transpose of `gather`: each token's sum over the devices it went to, on its own device."""
        if self.devices == 1:
            return tokens
        if trips is not None:
            return _send_back(self.group, trips, tokens)
        if self.exchange == "permute":
            parts = jnp.split(tokens, self.devices)
            return reduce(jnp.add, (_rotated(part, self.group, -shift) for shift, part in enumerate(parts)))
        return lax.psum_scatter(tokens, self.group, tiled=True)

    @property
    def parts(self) -> int:
        """In how many parts the group's tokens are computed with."""
        return self.devices if self.own_first else 1

    def arrivals(self, trips: Trips | None, tokens: Float[Array, "T ..."]) -> tuple[Float[Array, "T_part ..."], ...]:
        """The group's tokens in the parts in which they arrive: `gather`'s, if all are computed with at once."""
        return self._rotations(tokens) if self.own_first else (self.gather(trips, tokens),)

    def departures(self, trips: Trips | None, parts: int) -> list[Callable | None]:
        """For each of `parts`, what brings the sums of its tokens' rows to their device; None for those that stay."""
        if parts > 1:
            return [None, *(partial(_rotated, group=self.group, shift=-shift) for shift in range(1, parts))]
        return [partial(self.scatter, trips) if self.devices > 1 else None]

    def _rotations(self, tokens):
        return tuple(_rotated(tokens, self.group, shift) for shift in range(self.devices))

    @property
    def expert_devices(self) -> int:
        """How many devices of the group share out the experts."""
        return lax.axis_size(self.expert)

    def trips(self, experts: Int[Array, "T K"], experts_per_device: int) -> Trips | None:
        """Which tokens with these experts' ids travel where: `gather` and `scatter` need it for "all_to_all"."""
        if self.devices == 1 or self.exchange != "all_to_all":
            return None
        return _trips(experts, experts_per_device, self.devices, self.expert_devices)

    def experts_here(
        self, trips: Trips | None, experts: Int[Array, "T K"], num_experts: int
    ) -> tuple[Int[Array, "T_group K"], Int[Array, ""] | None]:
        """Ids of the group's tokens, as this device counts its own experts: -1 for others', E for no expert at all.

        And how many pairs (token, expert) the device of the group has that has the most, if all devices know that.
        """
        if self.devices == 1:
            return experts, None
        experts = self.gather(trips, experts + 1) - 1  # zero, where there is no token, becomes an empty slot
        first = lax.axis_index(self.expert) * num_experts
        unknown = experts >= num_experts * self.expert_devices
        most_pairs = None
        if trips is None:
            device = jnp.arange(self.expert_devices, dtype=experts.dtype)
            most_pairs = jnp.max(jnp.sum((experts // num_experts)[..., None] == device, axis=(0, 1), dtype=jnp.int32))
        return jnp.where(unknown, num_experts, own_experts(experts, first, num_experts)), most_pairs

    @property
    def blocks(self) -> int:
        """In how many blocks of experts this device computes."""
        return lax.axis_size(self.fsdp) if self.own_experts_first else 1

    @property
    def splits_experts(self) -> bool:
        """Whether `fsdp` splits all parameters by experts, so that a device has all of its own ones."""
        return all(_has(spec[0], self.fsdp) and not any(_has(s, self.fsdp) for s in spec[1:]) for spec in self.specs)

    def parameters(self, shards, dtype):
        """The parameters that this device computes with, or its own block; in `dtype` if they have to travel."""
        if not self.fsdp:
            return shards
        leaves, structure = jax.tree.flatten(shards)
        leaves = [leaf.astype(dtype) for leaf in leaves]
        if not self.own_experts_first:
            leaves = [gather_shards(leaf, spec, self.fsdp) for leaf, spec in zip(leaves, self.specs, strict=True)]
        return jax.tree.unflatten(structure, leaves)

    def block_arrives(self, own, block: int, after):
        """Parameters of a block of experts, of which this device has `own`; they leave after `after` is computed."""
        own, _ = lax.optimization_barrier((own, after))
        return jax.tree.map(partial(_rotated, group=self.fsdp, shift=-block), own)

    def block_departs(self, gradients, block: int, after):
        """The transpose of `block_arrives`."""
        gradients, _ = lax.optimization_barrier((gradients, after))
        return jax.tree.map(partial(_rotated, group=self.fsdp, shift=block), gradients)

    def by_block(self, experts: Int[Array, "T K"], num_experts: int) -> Int[Array, "T K"]:
        """Ids of this device's `num_experts` experts, counted in the order in which their parameters arrive."""
        if self.blocks == 1:
            return experts
        first = lax.axis_index(self.fsdp) * (num_experts // self.blocks)
        known = (experts >= 0) & (experts < num_experts)
        return jnp.where(known, (experts - first) % num_experts, experts)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered(transport: Transport, trips: Trips | None, tokens: Float[Array, "T ..."]) -> Float[Array, "T_group ..."]:
    """`transport.gather`, with the transpose that it has."""
    return transport.gather(trips, tokens)


def _gathered_forward(transport: Transport, trips: Trips | None, tokens):
    return transport.gather(trips, tokens), trips


def _gathered_backward(transport: Transport, trips: Trips | None, gradient):
    return None, transport.scatter(trips, gradient)


gathered.defvjp(_gathered_forward, _gathered_backward)


def gather_shards(shard: Array, spec: P, axes: Sequence[str]) -> Array:
    """The array of which every device has the part that `spec` says, whole along the mesh `axes`."""
    for dimension, names in enumerate(spec):
        if mine := tuple(name for name in names_of(names) if name in axes):
            shard = lax.all_gather(shard, mine, axis=dimension, tiled=True)
    return shard


def own_part(array: Array, spec: P) -> Array:
    """This device's part of an array that is split as `spec` says, inside `jax.shard_map`."""
    for dimension, axes in enumerate(spec):
        if axes:
            size = array.shape[dimension] // lax.axis_size(axes)
            array = lax.dynamic_slice_in_dim(array, lax.axis_index(axes) * size, size, dimension)
    return array


def own_experts(experts: Int[Array, "T K"], first: Int[Array, ""] | int, number: int) -> Int[Array, "T K"]:
    """Ids as they count among `number` experts, of which `first` is the first: -1 for those of others."""
    mine = (experts >= first) & (experts < first + number)
    return jnp.where(mine, experts - first, EMPTY_SLOT)


def _has(names, axes: Sequence[str]) -> bool:
    return any(name in axes for name in names_of(names))


def names_of(axes: Axes | None) -> tuple[str, ...]:
    """One axis, several or none as a tuple."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _rotated(part: Array, group: tuple[str, ...], shift: int) -> Array:
    """The part of the device `shift` places before this one in the group."""
    if not shift:
        return part
    ordered, places = _in_the_order_of_the_mesh(group)
    return lax.ppermute(part, ordered, list(zip(places, places[shift:] + places[:shift], strict=True)))


def _in_the_order_of_the_mesh(group: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    """The axes as `lax.ppermute` counts devices along them, and where each device is there that `group` counts.

    Other collectives count as `group` does, whatever the order of its axes.
    """
    ordered = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in group)
    devices = np.arange(lax.axis_size(group)).reshape([lax.axis_size(axis) for axis in ordered])
    return ordered, devices.transpose([ordered.index(axis) for axis in group]).ravel().tolist()


def _trips(experts: Int[Array, "T K"], experts_per_device: int, devices: int, expert_devices: int) -> Trips:
    """Each token goes once to every device that has an expert of its: neighbours, if they share an expert's width."""
    num_tokens, slots = experts.shape
    sharing = devices // expert_devices
    # An id out of range travels, too, for the output to tell of it.
    target = jnp.clip(experts // experts_per_device, 0, expert_devices - 1)
    target = jnp.where(experts == EMPTY_SLOT, expert_devices, target)
    goes = (target[:, :, None] == jnp.arange(expert_devices, dtype=target.dtype)[None, None]).any(1)
    goes = jnp.repeat(goes, sharing, axis=1).astype(jnp.int32)
    counts = goes.sum(0)
    starts = jnp.cumsum(counts) - counts
    size = num_tokens * min(devices, slots * sharing)
    place = jnp.where(goes > 0, starts[None] + jnp.cumsum(goes, axis=0) - goes, size)
    token = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], place.shape)
    send_tokens = jnp.full(size, num_tokens, jnp.int32).at[place].set(token, mode="drop")
    earlier = jnp.tril(jnp.ones((slots, slots), bool), -1)[None]
    again = ((target[:, :, None] == target[:, None, :]) & earlier).any(2) | (target == expert_devices)
    neighbours = target[:, :, None] * sharing + jnp.arange(sharing, dtype=target.dtype)[None, None]
    places = jnp.take_along_axis(place, jnp.minimum(neighbours, devices - 1).reshape(num_tokens, -1), axis=1)
    places = jnp.where(jnp.repeat(again, sharing, axis=1), size, places)
    return Trips(send_tokens, places, starts, counts)


def _send(group: tuple[str, ...], trips: Trips, tokens: Float[Array, "T ..."]) -> Float[Array, "D*T ..."]:
    """Every token to the devices it goes to; each device's tokens start at a multiple of T."""
    num_tokens = tokens.shape[0]
    rows = tokens.at[trips.send_tokens].get(mode="fill", fill_value=0)
    devices = lax.axis_size(group)
    arriving = _to_each_other(trips.counts, group)

    def ragged(rows, trips, arriving):
        room = vary_over(jnp.zeros((devices * num_tokens, *rows.shape[1:]), rows.dtype), varying_axes(rows, trips))
        first = jnp.full(devices, lax.axis_index(group) * num_tokens, jnp.int32)
        return lax.ragged_all_to_all(rows, room, trips.starts, trips.counts, first, arriving, axis_name=group)

    def padded(rows, trips, _):
        row = jnp.arange(num_tokens, dtype=jnp.int32)[None]
        index = jnp.where(row < trips.counts[:, None], trips.starts[:, None] + row, rows.shape[0])
        blocks = rows.at[index].get(mode="fill", fill_value=0)
        return _to_each_other(blocks, group).reshape(devices * num_tokens, *rows.shape[1:])

    return lax.platform_dependent(rows, trips, arriving, cpu=padded, default=ragged)


def _send_back(group: tuple[str, ...], trips: Trips, tokens: Float[Array, "D*T ..."]) -> Float[Array, "T ..."]:
    """The transpose of `_send`: the sum of each token's rows, accumulated wide, in the order of its trips."""
    devices, size = lax.axis_size(group), trips.send_tokens.shape[0]
    num_tokens = tokens.shape[0] // devices
    arriving, homes = _to_each_other(trips.counts, group), _to_each_other(trips.starts, group)

    def ragged(tokens, trips, arriving, homes):
        room = vary_over(jnp.zeros((size, *tokens.shape[1:]), tokens.dtype), varying_axes(tokens, trips))
        first = jnp.arange(devices, dtype=jnp.int32) * num_tokens
        return lax.ragged_all_to_all(tokens, room, first, arriving, homes, trips.counts, axis_name=group)

    def padded(tokens, trips, *_):
        blocks = _to_each_other(tokens.reshape(devices, num_tokens, *tokens.shape[1:]), group)
        row = jnp.arange(size, dtype=jnp.int32)
        device = jnp.searchsorted(trips.starts, row, side="right").astype(jnp.int32) - 1
        index = device * num_tokens + row - trips.starts[device]
        return blocks.reshape(tokens.shape)[index]  # rows past the last are read by nobody

    rows = lax.platform_dependent(tokens, trips, arriving, homes, cpu=padded, default=ragged)
    wide = accumulator_dtype(rows.dtype)
    total = jnp.zeros((num_tokens, *rows.shape[1:]), wide)
    for trip in range(trips.places.shape[1]):
        total += rows.at[trips.places[:, trip]].get(mode="fill", fill_value=0).astype(wide)
    return total.astype(tokens.dtype)


def _to_each_other(blocks: Array, group: tuple[str, ...]) -> Array:
    """Block i of every device to device i."""
    return lax.all_to_all(blocks, group, split_axis=0, concat_axis=0, tiled=True)


HERE = Transport()
"""On one device: nothing travels."""
