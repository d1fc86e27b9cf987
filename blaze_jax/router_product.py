"""The router's logits, as exact as float32, and how tensor cores compute them.

A product in float32 runs on a GPU's CUDA cores, at a twentieth of the rate of bfloat16. But three numbers of bfloat16,
with 8 bits of precision each, add up to one of float32, and tokens in bfloat16 are exact as they are. So one product of
bfloat16 with three times as many columns, summed up in float32, is at least as exact as that in float32.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

from blaze_jax.implementation import Implementation
from blaze_jax.transformations import REVERSE_MODE_ONLY, compiled_once
from pallas_kernels.compat import reverse_mode_token
from pallas_kernels.contract import accumulator_dtype
from pallas_kernels.mosaic.device import on_nvidia_gpu


def split_on_gpus(implementation: Implementation | None, tokens: Float[Array, "T d"]) -> bool:
    """Whether `router_logits` is to split the product: for tokens in bfloat16 where the kernels for GPUs may run."""
    on_gpu = implementation == "mosaic_gpu" or (implementation is None and on_nvidia_gpu())
    return on_gpu and tokens.dtype == jnp.bfloat16


@compiled_once("split", "jitter")
def router_logits(
    tokens: Float[Array, "T d"],
    params: Mapping[str, Array],
    seeds: UInt32[Array, "T 2"] | None = None,
    *,
    split: bool = False,
    jitter: float = 0.0,
) -> Float[Array, "T E"]:
    """The product of the tokens and the router's matrix, in float32 or wider, plus its bias if there is one.

    With `split`, for tokens in bfloat16, the product and those of its derivative are products of bfloat16. With
    `seeds`, each token is first taken times random numbers of its own, from 1 - jitter to 1 + jitter, in its own type.
    """
    if seeds is not None:  # the backward pass draws the numbers again

        @jax.checkpoint
        def jittered(tokens, params, seeds):
            return router_logits(_jittered(tokens, seeds, jitter), params, split=split)

        return jittered(tokens, params, seeds)
    wide = accumulator_dtype(tokens.dtype)
    w_router = params["w_router"]

    @jax.checkpoint  # the backward pass widens the tokens again, or it would keep a wide copy of them
    def product(tokens, w_router):
        return jnp.dot(tokens.astype(wide), w_router.astype(wide), precision=lax.Precision.HIGHEST)

    if split:
        if w_router.dtype != jnp.bfloat16:
            w_router = w_router.astype(wide)
        logits = _split_product(reverse_mode_token(REVERSE_MODE_ONLY, tokens, w_router), tokens, w_router)
    else:
        logits = product(tokens, w_router)
    return logits + params["b_router"].astype(wide)[None] if "b_router" in params else logits


def _jittered(tokens: Float[Array, "T d"], seeds: UInt32[Array, "T 2"], jitter: float) -> Float[Array, "T d"]:
    wide = accumulator_dtype(tokens.dtype)

    def factors(seed):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(key, tokens.shape[1:], wide, 1 - jitter, 1 + jitter)

    return (tokens.astype(wide) * jax.vmap(factors)(seeds)).astype(tokens.dtype)


@jax.custom_vjp
def _split_product(token, x: Float[Array, "T d"], w: Float[Array, "d E"]) -> Float[Array, "T E"]:
    """`x · w` in float32, of `x` in bfloat16 and `w` in float32 or, as one part, in bfloat16."""
    return _product_of_parts(x, _parts(w))


def _forward(token, x, w):
    return _split_product(token, x, w), (x, w)


def _backward(residuals, dy):
    """The gradient of `w` is a product like the first. That of `x` is rounded to bfloat16, and needs no third parts."""
    x, w = residuals
    (w1, *smaller), (dy1, dy2, dy3) = _parts(w), _parts(dy)
    pairs = [(dy1, w1), (dy2, w1), *((dy1, w2) for w2 in smaller[:1])]
    of_dy, of_w = (jnp.concatenate(parts, 1) for parts in zip(*pairs, strict=True))
    dw = _product_of_parts(x.T, [dy1, dy2, dy3])
    return None, _product(of_dy, of_w.T, x.dtype), dw.astype(w.dtype)


_split_product.defvjp(_forward, _backward)


def _product(a: Float[Array, "m k"], b: Float[Array, "k n"], dtype=jnp.float32) -> Float[Array, "m n"]:
    """The product of bfloat16 factors in `dtype`, summed up in float32 whatever precision is the default."""
    return jnp.dot(a, b, precision=lax.Precision.DEFAULT, preferred_element_type=dtype)


def _parts(array: Float[Array, "rows columns"]) -> list[Array]:
    """Three bfloat16 arrays that add up to a float32 one, the largest numbers first; one in bfloat16 is its own part.

    XLA takes a cast there and back for nothing and leaves it out, but not a rounding.
    """
    if array.dtype == jnp.bfloat16:
        return [array]
    parts = []
    for _ in range(3):
        part = lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        array = array - part
    return parts


def _product_of_parts(a: Float[Array, "m k"], parts: list[Array]) -> Float[Array, "m n"]:
    """The product with the sum of the parts, those of the smallest numbers added up first."""
    products = jnp.split(_product(a, jnp.concatenate(parts, 1)), len(parts), axis=1)
    return sum(products[-2::-1], products[-1])
