"""Rows computed part of the tokens by part of the tokens have the bits that all at once have."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hopper
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, D, N, needs_interpreter

PARTS, TOKENS, EXPERTS, SLOTS = 3, 40, 3, 2


def grouped(rng):
    """The pairs of all parts' tokens by expert and part; some slots are empty."""
    experts = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(PARTS * TOKENS)])
    part = np.arange(PARTS * TOKENS)[:, None] // TOKENS
    keys = np.where(rng.uniform(size=experts.shape) < 0.1, -1, experts * PARTS + part)
    keys = np.where((part == 1) & (experts == 2), -1, keys)  # a part without rows of one expert
    return hopper.dispatch(jnp.asarray(keys, jnp.int32), EXPERTS * PARTS)


@needs_interpreter
def test_parts_fill_the_same_rows():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    tokens, gradients = normal(PARTS * TOKENS, D), normal(PARTS * TOKENS, D)
    weights, w_down, b_down = (normal(EXPERTS, D, N), normal(EXPERTS, D, N)), normal(EXPERTS, N, D), normal(EXPERTS, D)
    # No watching for races: down_backward reads whole tiles, of which a neighbour's rows may be written meanwhile.
    with hopper.interpreted(detect_races=False):
        groups = grouped(rng)
        row_weights = jnp.asarray(rng.uniform(size=groups.num_rows), jnp.float32)
        everything, parts = hopper.in_parts(groups, PARTS)

        def forth_and_back(xs, dys, parts):
            up = None
            for x, part in zip(xs, parts, strict=True):
                up = hopper.up_projection(x, weights, (), part, activation=ACTIVATIONS[2], into=up)
            pre, weighted_hidden, d_row_weights = up[0], None, []
            for dy, part in zip(dys, parts, strict=True):
                pre, weighted_hidden, d_row_weight = hopper.down_backward(
                    dy, w_down, b_down, pre, row_weights, part, activation=ACTIVATIONS[2], into=weighted_hidden
                )
                d_row_weights.append(d_row_weight)
            return *up[0], up[1], *pre, weighted_hidden, sum(d_row_weights)

        at_once = jax.jit(forth_and_back)((tokens,), (gradients,), (everything,))
        in_parts = jax.jit(forth_and_back)(jnp.split(tokens, PARTS), jnp.split(gradients, PARTS), parts)
    used = int(everything.expert_token_offsets[-1])
    assert used > PARTS * TOKENS
    for whole, split in zip(at_once, in_parts, strict=True):
        assert_same_bits(whole[:used], split[:used])
    for part, index_map in zip(parts, np.split(np.asarray(everything.token_index_map), PARTS), strict=True):
        np.testing.assert_array_equal(part.token_index_map, index_map)
