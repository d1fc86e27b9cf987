"""Blocks take tiles when they are free: each is taken once, and its results have the same bits whoever takes it."""

from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import hopper
from pallas_kernels.hopper import tile_queue
from pallas_kernels.hopper.inline_interpreter import COUNTED
from pallas_kernels.mosaic import launches
from pallas_kernels.mosaic.interpreter import at_random, tiles_taken
from pallas_kernels.tuning.parameters import NARROW, TileTuning
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, D, N, Rows, needs_interpreter

ORDERS = {
    "alone": (1, lambda tiles, _: [0] * tiles),
    "one takes all": (2, lambda tiles, _: [0] * tiles),
    "the others start when none is left": (5, lambda tiles, blocks: [blocks - 1] * tiles),
    "in turns": (2, lambda tiles, blocks: [tile % blocks for tile in range(tiles)]),
    "two start late": (3, lambda tiles, blocks: [max(tile - tiles // 2, 0) % blocks for tile in range(tiles)]),
    "at random": (5, at_random),
}
"""How many blocks there are, and who takes which tile."""


KERNELS = ("up_projection", "down_projection", "down_backward", "up_backward")
KERNELS += ("up_weight_gradients", "down_weight_gradients")


def call(kernel: str, rows: Rows, **options):
    """What a kernel returns. No tile reads rows that another writes, which would look like a race."""
    x = rows.normal(rows.num_tokens, D, dtype="bfloat16")
    up_weights = tuple(rows.normal(rows.num_experts, D, N, fan_in=D, dtype="bfloat16") for _ in range(2))
    w_down = rows.normal(rows.num_experts, N, D, fan_in=N, dtype="bfloat16")
    pre = tuple(rows.of_rows(N, dtype="bfloat16") for _ in range(2))
    biases = [rows.normal(rows.num_experts, width) for width in (N, N, D)]
    row_weights, groups, activation = rows.of_rows(), rows.groups, {"activation": ACTIVATIONS[2]}
    arguments, own_options = {
        "up_projection": ((x, up_weights, biases[:2], groups), activation),
        "down_projection": ((pre[0], w_down, biases[2], groups, 0, D), {}),
        "down_backward": ((x, w_down, None, pre, row_weights, groups), activation),
        "up_backward": ((pre, up_weights, groups, 0, D), {}),
        "up_weight_gradients": ((x, pre, groups), {"dtypes": ("bfloat16",) * 2, "bias_dtypes": ()}),
        "down_weight_gradients": ((pre[0], x, row_weights, groups), {"dtype": "float32", "bias_dtype": None}),
    }[kernel]
    return getattr(hopper, kernel)(*arguments, **own_options, **options)


def run(kernel, routing="whole_tiles_and_a_tail", shares="dynamic", minor_dim=0, columns=256, keep=True, **interpreted):
    """The kernel's results, without rows of no pair."""
    tuning = TileTuning(minor_dim=minor_dim, tile_width=2, shares=shares, columns=columns)
    with hopper.interpreted(**interpreted):
        rows = Rows(hopper, routing)
        results = call(kernel, rows, tuning=tuning, **({} if keep else {"keep_pre_activations": False}))
        owned = rows.owned
        return [np.asarray(r[owned] if len(r) == owned.size else r, np.float32) for r in jax.tree.leaves(results)]


@cache
def by_fixed_shares(kernel):
    return run(kernel, shares="fixed", blocks=2)


@pytest.fixture
def counters(monkeypatch):
    """What the counter of each kernel said when it started and when it ended."""
    seen = []

    def kernel(*arguments, **options):
        launch = actual(*arguments, **options)

        def call(*operands):
            results = launch(*operands)
            seen.append((operands[-1], results[-1]))
            return results

        return call

    actual = launches.kernel
    monkeypatch.setattr(launches, "kernel", kernel)
    return seen


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize(
    ("kernel", "order"),
    [*((kernel, "at random") for kernel in KERNELS), *zip(KERNELS, list(ORDERS)[:-1], strict=False)],
)
def test_the_bits_of_fixed_shares(kernel, order, counters):
    blocks, takers = ORDERS[order]
    assert_same_bits(run(kernel, blocks=blocks, takers=takers), by_fixed_shares(kernel))
    before, after = (np.asarray(a) for a in counters[0])
    assert len(before) == blocks
    asked = [sorted(row[left == COUNTED]) for row, left in zip(before, after, strict=True)]
    tiles = sum(map(len, asked)) - blocks
    assert sorted(number for own in asked for number in own[:-1]) == [*range(tiles)]
    assert all(own[-1] >= tiles for own in asked)  # each block stops at the first number that is no tile's


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kernel", NARROW)
def test_the_bits_of_wide_tiles(kernel):
    assert_same_bits(run(kernel, columns=128, blocks=2), by_fixed_shares(kernel))


@needs_interpreter
@pytest.mark.parametrize("columns", [128, 256])
def test_activations_alone(columns):
    kept = by_fixed_shares("up_projection")[-1:]
    assert_same_bits(run("up_projection", columns=columns, keep=False, blocks=2), kept)


@needs_interpreter
@pytest.mark.slow
def test_rows_forth_in_one_column_and_back_in_the_next():
    assert_same_bits(run("up_projection", "random", minor_dim=1), run("up_projection", "random"))


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.ci_cases("up_projection")
def test_tiles_without_rows(kernel):
    run(kernel, "all_slots_empty", blocks=2)


@pytest.mark.parametrize(("sizes", "dynamic"), [((1, 2), False), ((2, 1), True)])
def test_tiles_are_counted_out_where_a_kernel_is_one_of_several_devices(sizes, dynamic):
    """Of the axes, `shard_map` maps the first."""
    found = []

    def look(x):
        found.append([tile_queue.is_dynamic(shares) for shares in (None, "fixed", "dynamic")])
        return x

    mesh = jax.make_mesh(sizes, ("mapped", "other"), (AxisType.Auto,) * 2)
    jax.shard_map(look, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"mapped"})(np.ones(8))
    look(np.ones(8))
    assert found[0] == [dynamic, False, True]
    assert found[-1] == [False, False, True]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_the_interpreter_leave_out_no_tile(order):
    blocks, takers = ORDERS[order]
    with hopper.interpreted(takers=takers):
        taken = tiles_taken(7, blocks)
    assert sorted(taken[taken < 7]) == list(range(7))
    assert (taken == 7).any(1).all()  # and every block learns that none is left
