"""The portable kernels made to compute a piece of the rows at a time, as the Hopper kernels do over several GPUs.

Rows that a piece does not write are NaN until another piece does.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from pallas_kernels import xla


def _row(groups):
    return jnp.arange(groups.num_rows, dtype=jnp.int32)


def in_parts(groups, parts):
    """See `simt.dispatch.in_parts`; the tiles of a piece say which rows are its own."""
    of_part = groups.token_index_map.shape[0] // parts
    used = _row(groups) < groups.expert_token_offsets[-1]
    everything = groups._replace(expert_token_offsets=groups.expert_token_offsets[::parts], tiles=used)

    def part(p):
        tokens = groups.expert_token_indices - p * of_part
        mine = used & (tokens >= 0) & (tokens < of_part)
        return everything._replace(
            expert_token_indices=jnp.where(mine, tokens, of_part),
            token_index_map=groups.token_index_map[p * of_part : (p + 1) * of_part],
            tiles=mine,
        )

    return everything, tuple(map(part, range(parts)))


def of_experts(groups, first, experts, *, counted_from=None):
    """See `simt.dispatch.of_experts`."""
    offsets, row = groups.expert_token_offsets, _row(groups)
    mine = (row >= offsets[first]) & (row < offsets[first + experts])
    begin = first if counted_from is None else counted_from
    return groups._replace(
        expert_token_indices=jnp.where(mine, groups.expert_token_indices, groups.token_index_map.shape[0]),
        expert_token_offsets=offsets[begin : first + experts + 1],
        tiles=mine if groups.tiles is None else mine & groups.tiles,
    )


def _rolled(tree, rows, shift):
    """Arrays with as many rows, each moved by so many."""
    return jax.tree.map(lambda a: jnp.roll(a, shift, axis=0) if a.shape[0] == rows else a, tree)


def _from_row_zero(groups, num_experts):
    """The portable kernels' groups begin at row 0, and they want one for every expert."""
    first = groups.expert_token_offsets[0]
    offsets = jnp.pad(groups.expert_token_offsets - first, (0, num_experts + 1 - groups.num_experts - 1), mode="edge")
    tokens = jnp.roll(groups.expert_token_indices, -first)
    return first, groups._replace(expert_token_indices=tokens, expert_token_offsets=offsets, tiles=None)


def _rows(out, mine, into):
    if mine is None:  # all at once
        return out

    def choose(new, old):
        return jnp.where(mine.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, out, jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), out) if into is None else into)


def up_projection(x, weights, biases, groups, *, into=None, **options):
    first, moved = _from_row_zero(groups, weights[0].shape[0])
    out = xla.up_projection(x, weights, biases, moved, **options)
    return _rows(_rolled(out, groups.num_rows, first), groups.tiles, into)


def down_projection(hidden, w_down, b_down, groups, *columns, into=None):
    first, moved = _from_row_zero(groups, w_down.shape[0])
    out = xla.down_projection(_rolled(hidden, groups.num_rows, -first), w_down, b_down, moved, *columns)
    return _rows(_rolled(out, groups.num_rows, first), groups.tiles, into)


def up_backward(d_pre, weights, groups, *columns, into=None):
    first, moved = _from_row_zero(groups, weights[0].shape[0])
    out = xla.up_backward(_rolled(d_pre, groups.num_rows, -first), weights, moved, *columns)
    return _rows(_rolled(out, groups.num_rows, first), groups.tiles, into)


def down_backward(dy, w_down, b_down, pre, row_weights, groups, *, into=None, **options):
    first, moved = _from_row_zero(groups, w_down.shape[0])
    rows = _rolled((pre, row_weights), groups.num_rows, -first)
    out = xla.down_backward(dy, w_down, b_down, *rows, moved, **options)
    d_pre, weighted_hidden, d_row_weights = _rolled(out, groups.num_rows, first)
    d_row_weights = d_row_weights if groups.tiles is None else jnp.where(groups.tiles, d_row_weights, 0)
    return _rows(d_pre, groups.tiles, pre), _rows(weighted_hidden, groups.tiles, into), d_row_weights


def _joined(parts):
    return jnp.concatenate(parts) if isinstance(parts, tuple) else parts


def up_weight_gradients(x, d_pre, groups, **options):
    first, moved = _from_row_zero(groups, groups.num_experts)
    return xla.up_weight_gradients(_joined(x), _rolled(d_pre, groups.num_rows, -first), moved, **options)


def down_weight_gradients(weighted_hidden, dy, row_weights, groups, **options):
    first, moved = _from_row_zero(groups, groups.num_experts)
    weighted_hidden, row_weights = _rolled((weighted_hidden, row_weights), groups.num_rows, -first)
    return xla.down_weight_gradients(weighted_hidden, _joined(dy), row_weights, moved, **options)


def family():
    """The portable family with these in its place where it computes in pieces."""
    own = {name: globals()[name] for name in ("in_parts", "of_experts", "up_projection", "down_projection")}
    own |= {"up_backward": up_backward, "down_backward": down_backward}
    own |= {"up_weight_gradients": up_weight_gradients, "down_weight_gradients": down_weight_gradients}
    return SimpleNamespace(**{name: getattr(xla, name) for name in dir(xla) if not name.startswith("_")} | own)
