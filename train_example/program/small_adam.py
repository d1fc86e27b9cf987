"""Adam whose moments take 8 bits, and updates of 16-bit parameters by stochastic rounding, as optax transformations.

A moment is kept in blocks of 256 numbers (arXiv 2110.02861): 8 bits for each, and a float32 scale, the block's largest
magnitude. The code c of a number x is the cube root of its share of that, x = scale · (c / levels)³, which is fine
where numbers are small; for the second moment x is its root. On gradients of the preset `tiny` this strays from Adam's
updates by 3% to 4%, that paper's code by 4% to 5%, multiples of one step by 8% to 18%; in the head, where a block has
frequent bytes beside bytes that never come, by 14%, 29% and 69%.

The second moment's codes are rounded up or down by chance, in proportion. Rounded to the nearest they would only ever
rise where a number is small beside its block's largest: a step lets it fall by 5%, less than half a code there.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, Key, UInt32

BLOCK = 256
"""Numbers that share a scale."""

_SIGNED, _UNSIGNED = 127, 255
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


class Coded(NamedTuple):
    """Numbers in 8 bits.

    Attributes:
      codes: int8 from -127 to 127, or uint8, in the order of the array that they are of.
      scales: float32, the largest magnitude of each block.
    """

    codes: Integer[Array, "blocks 256"]
    scales: Float[Array, " blocks"]


class SmallAdamState(NamedTuple):
    """What `scale_by_small_adam` carries from step to step.

    Attributes:
      steps: int32, steps done.
      mean: running means of the gradients, `Coded` or float32 arrays.
      root: square roots of the running means of their squares, the same.
    """

    steps: Int[Array, ""]
    mean: optax.Params
    root: optax.Params


def scale_by_small_adam(
    b1: float, b2: float, eps: float = 1e-8, coded: Callable[[optax.Params], optax.Params] | None = None
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with moments of 8 bits.

    Args:
      b1: decay of the mean.
      b2: decay of the mean of squares.
      eps: is added to the root that the mean is divided by.
      coded: marks the parameters whose moments take 8 bits; the others', and those of a size that 256 does not divide,
        are float32. None for all.

    Returns:
      A transformation of float32 gradients, whose `update` takes `key=`, a key of `jax.random`: a run with equal keys
      has equal bits.
    """

    def init(params: optax.Params) -> SmallAdamState:
        marked = jax.tree.map(lambda _: True, params) if coded is None else coded(params)

        def zeros(param: Array, in_codes: bool, dtype: DTypeLike) -> Coded | Array:
            if not in_codes or param.size % BLOCK:
                return jnp.zeros(param.shape, jnp.float32)
            blocks = param.size // BLOCK
            return Coded(jnp.zeros((blocks, BLOCK), dtype), jnp.zeros(blocks, jnp.float32))

        mean, root = (
            jax.tree.map(lambda p, m, dtype=dtype: zeros(p, m, dtype), params, marked)
            for dtype in (jnp.int8, jnp.uint8)
        )
        return SmallAdamState(jnp.int32(0), mean, root)

    def moments(gradient: Array, mean: Coded | Array, root: Coded | Array) -> tuple[Array, Array]:
        new_mean = b1 * _decoded(mean, gradient.shape) + (1 - b1) * gradient
        return new_mean, jnp.sqrt(b2 * _decoded(root, gradient.shape) ** 2 + (1 - b2) * gradient**2)

    def update(
        updates: optax.Updates, state: SmallAdamState, params: optax.Params | None = None, *, key: Key[Array, ""]
    ) -> tuple[optax.Updates, SmallAdamState]:
        count = state.steps + 1
        gradients, structure = jax.tree.flatten(updates)
        means, roots = structure.flatten_up_to(state.mean), structure.flatten_up_to(state.root)
        found = []
        for at, (gradient, mean, root) in enumerate(zip(gradients, means, roots, strict=True)):
            new_mean, new_root = moments(gradient, mean, root)
            scales = None
            if isinstance(mean, Coded):
                scales = largest(new_mean), largest(new_root)
                # Computed again, to be encoded: the compiler would keep both in float32 until their scales are known.
                new_mean, new_root = moments(gradient, *lax.optimization_barrier((mean, root)))
            step = new_mean / (1 - b1**count) / (new_root / jnp.sqrt(1 - b2**count) + eps)
            if scales is not None:
                bits = random_bits(jax.random.fold_in(key, at), gradient.shape)
                new_mean, new_root = encode(new_mean, scales[0]), encode_positive(new_root, scales[1], bits)
            found.append((step, new_mean, new_root))
        steps, new_means, new_roots = (structure.unflatten(column) for column in zip(*found, strict=True))
        return steps, SmallAdamState(count, new_means, new_roots)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def largest(x: Float[Array, "..."]) -> Float[Array, " blocks"]:
    """The scales of the blocks of an array."""
    return jnp.max(jnp.abs(x.reshape(-1, BLOCK)), axis=1)


def encode(x: Float[Array, "..."], scales: Float[Array, " blocks"]) -> Coded:
    """Numbers of any sign, each as its nearest code; `scales` are `largest(x)`."""
    blocks, root = _roots(x, scales)
    return Coded((jnp.sign(blocks) * jnp.round(root * _SIGNED)).astype(jnp.int8), scales)


def encode_positive(x: Float[Array, "..."], scales: Float[Array, " blocks"], bits: UInt32[Array, "..."]) -> Coded:
    """Numbers of at least 0, each as one of its two nearest codes by chance, in proportion; none but 0 becomes 0."""
    blocks, root = _roots(x, scales)
    chance = (bits.reshape(blocks.shape) >> 8).astype(jnp.float32) * 2.0**-24
    code = jnp.minimum(jnp.floor(root * _UNSIGNED + chance), _UNSIGNED)
    return Coded(jnp.where(blocks > 0, jnp.maximum(code, 1), 0).astype(jnp.uint8), scales)


def decode(coded: Coded, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """The float32 numbers of that shape."""
    levels = _SIGNED if coded.codes.dtype == jnp.int8 else _UNSIGNED
    share = coded.codes.astype(jnp.float32) / levels
    return (coded.scales[:, None] * share * share * share).reshape(shape)


def _decoded(moment: Coded | Array, shape: tuple[int, ...]) -> Array:
    return decode(moment, shape) if isinstance(moment, Coded) else moment


def _roots(x: Array, scales: Array) -> tuple[Array, Array]:
    """The blocks, and the cube root of each number's share of its scale."""
    blocks = x.reshape(-1, BLOCK)
    return blocks, jnp.cbrt(jnp.abs(blocks) / jnp.maximum(scales, _SMALLEST)[:, None])


def apply_updates(params: optax.Params, updates: optax.Updates, key: Key[Array, ""]) -> optax.Params:
    """`optax.apply_updates` of float32 updates; the sums are rounded by chance where parameters are bfloat16.

    Rounded to the nearest, an update of less than half a unit in the last place, 1/512 of the parameter, would be lost.
    Rounded up or down in proportion to the distance, the sum has the right mean.
    """
    leaves, structure = jax.tree.flatten(params)
    new = []
    for at, (param, update) in enumerate(zip(leaves, structure.flatten_up_to(updates), strict=True)):
        total = param.astype(jnp.float32) + update
        if param.dtype == jnp.bfloat16:
            total = round_by_chance(total, random_bits(jax.random.fold_in(key, at), total.shape))
        new.append(total.astype(param.dtype))
    return structure.unflatten(new)


def update_by_chance(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    key: Key[Array, ""],
) -> tuple[optax.Params, optax.OptState]:
    """New parameters, rounded as `apply_updates` does, and the optimizer's new state; it computes in float32."""
    of_moments, of_params = jax.random.split(key)
    wide = jax.tree.map(lambda param: param.astype(jnp.float32), params)
    updates, state = optimizer.update(gradients, state, wide, key=of_moments)
    return apply_updates(params, updates, of_params), state


def by_chance(optimizer: optax.GradientTransformationExtraArgs, seed: int) -> optax.GradientTransformation:
    """An optimizer whose updates lead to parameters that are rounded by chance, as `update_by_chance` does.

    It is of float32 gradients, and draws the keys that `optimizer` takes from the seed and its own count of steps.
    """

    def init(params: optax.Params) -> tuple[Array, optax.OptState]:
        return jnp.int32(0), optimizer.init(params)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params) -> tuple[Any, Any]:
        steps, inner = cast(Any, state)
        key = jax.random.fold_in(jax.random.key(seed), steps)
        new, inner = update_by_chance(optimizer, updates, inner, params, key)
        change = jax.tree.map(lambda new, param: new.astype(jnp.float32) - param.astype(jnp.float32), new, params)
        return change, (steps + 1, inner)

    return optax.GradientTransformation(init, cast(Any, update))


def round_by_chance(x: Float[Array, "..."], bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Float32 numbers as one of their two nearest in bfloat16, by chance; what is infinite or no number stays so."""
    sums = lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)  # the bits below, as a magnitude, carry or do not
    rounded = lax.bitcast_convert_type(sums & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def random_bits(key: Key[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """A hash of each number's place and the key: a sixth of the arithmetic of `jax.random.bits`, which would show.

    The mixer is lowbias32 of https://github.com/skeeto/hash-prospector, with a half of the key before each product.
    """
    first, second = jax.random.key_data(key)
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) ^ first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
