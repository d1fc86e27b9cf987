"""The loops over rows that the portable kernels are built from: every row once, and little else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import xla
from pallas_kernels.xla.loops import (
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    Turn,
    accelerator_turn,
    cpu_turn,
    map_rows,
    read_rows,
    sum_rows,
    turns_of,
)
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import Rows, over_alignments
from tests.routings import ROUTINGS


def in_turns(turn, function, *arguments):
    """`function` compiled with this turn, or with what is chosen here for None."""
    if turn is None:
        return jax.jit(function)(*arguments)
    with turns_of(*turn):
        return jax.jit(function)(*arguments)


def count_and_expert(rows, groups):
    """How often `map_rows` writes each row, and the expert it writes it for."""

    def compute(own, tile, buffers):
        return read_rows(buffers[0], tile) + 1, jnp.broadcast_to(own[0], (*tile.turn, 1))

    ids = jnp.arange(rows.num_experts, dtype=jnp.int32)[:, None, None]
    start = (jnp.zeros((rows.num_rows, 1), jnp.int32), jnp.full((rows.num_rows, 1), -1, jnp.int32))
    return tuple(a[:, 0] for a in map_rows(groups, (ids,), lambda own: own, compute, start))


def own_and_visited(rows, groups):
    """Each expert's rows as `sum_rows` counts them: its own, and those of its tiles."""

    def terms(tile):
        own = tile.mine.sum(1, dtype=jnp.float32)
        return own, jnp.full_like(own, tile.turn.rows)

    out = (jax.ShapeDtypeStruct((rows.num_experts, 1), jnp.float32),) * 2
    return tuple(a[:, 0] for a in sum_rows(groups, terms, out))


@pytest.mark.parametrize("turn", [None, Turn(1, 5), Turn(4, 16), Turn(64, 256)], ids=str)
@over_alignments
@pytest.mark.parametrize("routing", ["random", "empty_slots", "more_experts_than_rows", "many_tiles", "single_token"])
@pytest.mark.default_cases(
    "random-1-Turn(experts=1, rows=5)", "empty_slots-8-None", "more_experts_than_rows-1-Turn(experts=4, rows=16)"
)
def test_every_row_once(routing, row_alignment, turn):
    rows = Rows(xla, routing, row_alignment=row_alignment)
    (count, expert), (own, visited) = in_turns(
        turn, lambda groups: (count_and_expert(rows, groups), own_and_visited(rows, groups)), rows.groups
    )
    assert_same_bits(count, (rows.expert >= 0).astype(np.int32))
    assert_same_bits(expert, rows.expert.astype(np.int32))
    assert_same_bits(own, np.diff(rows.groups.expert_token_offsets).astype(np.float32))
    assert (np.asarray(visited) >= own).all()


@over_alignments
@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_expert_at_a_time_costs_little(routing, row_alignment):
    rows = Rows(xla, routing, row_alignment=row_alignment)
    _, visited = jax.jit(partial(own_and_visited, rows))(rows.groups)
    tile = cpu_turn(rows.groups).rows
    assert_same_bits(visited, (-(-np.diff(rows.groups.expert_token_offsets) // tile) * tile).astype(np.float32))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("width", [1, 1792, 10**9])
def test_tiles_are_at_most_an_experts_share_and_turns_of_an_accelerator_fit(routing, width):
    rows = Rows(xla, routing)
    (_, tile), share = cpu_turn(rows.groups), rows.num_rows / rows.num_experts
    assert tile <= min(MAX_TILE_ROWS, rows.num_rows, max(MIN_TILE_ROWS, share))
    turn = accelerator_turn(rows.groups, width)
    assert 1 <= turn.rows <= rows.num_rows
    assert 1 <= turn.experts <= max(1, rows.num_experts // 2)


def test_turns_of_a_piece_suit_its_experts_rows():
    everything, (part, _) = xla.in_parts(xla.dispatch(jnp.arange(256)[:, None] % 8, 8), 2)
    block = xla.of_experts(everything, 1, 1)
    assert cpu_turn(block) == cpu_turn(everything)
    assert accelerator_turn(block, 1).rows == accelerator_turn(everything, 1).rows
    assert accelerator_turn(part, 1).rows < accelerator_turn(everything, 1).rows
