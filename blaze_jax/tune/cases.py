"""What is tuned at given sizes: every kernel on a layer's real indices and activations, with its candidates."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax.activations import get_activation
from blaze_jax.token_sums import block_width, combine_columns
from pallas_kernels import ampere, hopper
from pallas_kernels.contract import Dispatch, Kernels
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TILE_ROWS, TileSchedule
from pallas_kernels.tuning.parameters import (
    MMA,
    ColumnBlock,
    MmaTuning,
    TileTuning,
    Tuning,
    block_kib,
    heuristic,
    shape_key,
)

_ACTIVATION = get_activation("swiglu").function

_ORDERS = ((0, 4), (0, 8), (1, 8), (0, 16), (1, 4), (1, 16), (1, 1))
"""`minor_dim` and `tile_width`, the more likely ones first. Rings are left full: fewer slots only wait more."""

_MMA_RINGS = (
    (256, 64, 3),
    (256, 64, 4),
    (256, 32, 6),
    (256, 32, 4),
    (128, 64, 3),
    (128, 64, 6),
    (128, 32, 6),
    (256, 64, 2),
)
"""`columns`, `k_step` and `stages`, the more likely ones first."""

_SWEEPS = (2, 4)
_ABREAST = (1, 4, 8, 16)


class Operands(NamedTuple):
    """Arrays of a layer of gated experts, or their shapes; d_pre stands for what has the shape of pre."""

    x: Float[Array, "T d"]
    up_weights: tuple[Float[Array, "E d n"], ...]
    w_down: Float[Array, "E n d"]
    weights: Float[Array, "T K"]
    dispatch: Dispatch[TileSchedule]
    row_weights: Float[Array, " R"]
    pre: tuple[Float[Array, "R n"], ...]
    hidden: Float[Array, "R n"]
    block: Float[Array, "R columns"]


class Case(NamedTuple):
    """A kernel to tune.

    Attributes:
      kernel: its name.
      shape: its place in a table.
      run: `(tuning, operands) -> results`.
      by_row: whether the results are rows; those past the last expert's are never written.
      candidates: different ways to run it, the heuristic's first.
    """

    kernel: str
    shape: str
    run: Callable[[Any, Operands], Any]
    by_row: bool
    candidates: tuple[Tuning, ...]


def make_operands(x, w_gate, w_up, w_down, weights, experts, *, kernels: Kernels = hopper) -> Operands:
    """What the kernels of a layer take, from the layer's own arguments."""
    dispatch = kernels.dispatch(experts, w_down.shape[0])
    row_weights = jnp.zeros(dispatch.num_rows, weights.dtype).at[dispatch.token_index_map].set(weights, mode="drop")
    columns = block_width(x.shape[1], ColumnBlock().columns)
    pre, hidden = kernels.up_projection(x, (w_gate, w_up), (), dispatch, activation=_ACTIVATION)
    block = kernels.down_projection(hidden, w_down, None, dispatch, 0, columns)
    return Operands(x, (w_gate, w_up), w_down, weights, dispatch, row_weights, pre, hidden, block)


def tuning_cases(operands: Operands, kernels: Kernels = hopper) -> list[Case]:
    """Every kernel of a family in the order of a training step, those with nothing to choose here left out."""
    mma = kernels is ampere
    d, (num_experts, n, _) = operands.x.shape[1], operands.w_down.shape
    num_rows, dtype = operands.hidden.shape[0], operands.x.dtype
    columns = operands.block.shape[1]
    tiles = operands.dispatch.tiles.num_tiles
    narrow, wide = -(-n * 2 // TILE_COLUMNS), -(-n // TILE_COLUMNS)  # column tiles of both projections, and of one
    row_tiles = -(-d // TILE_ROWS)  # of a weight gradient
    block_tiles = -(-columns // TILE_COLUMNS)

    layer = shape_key(num_rows, dtype, d=d, n=n, E=num_experts)

    def tiled(kernel, run, by_row, *tiles):
        if mma:
            default = heuristic(MmaTuning, MMA + kernel, layer)
            return Case(MMA + kernel, layer, partial(run, kernels), by_row, mma_candidates(default, dtype))
        default = heuristic(TileTuning, kernel, layer)
        return Case(kernel, layer, partial(run, kernels), by_row, orders(default, *tiles))

    column_blocks = (heuristic(ColumnBlock, "column_block", layer), ColumnBlock(256))
    column_blocks = _distinct(column_blocks, lambda t: block_width(d, t.columns))
    cases = [
        tiled("up_projection", _up_projection, True, tiles, narrow),
        tiled("down_projection", _down_projection, True, tiles, block_tiles),
        tiled("down_backward", _down_backward, True, tiles, wide),
        tiled("down_weight_gradients", _down_weight_gradients, False, row_tiles, wide),
        tiled("up_weight_gradients", _up_weight_gradients, False, row_tiles, narrow),
        tiled("up_backward", _up_backward, True, tiles, block_tiles),
    ]
    if not mma:
        cases.append(Case("column_block", layer, partial(_column_block, kernels), False, column_blocks))
    return [case for case in cases if len(case.candidates) > 1]


def orders(default: TileTuning, row_tiles: int, column_tiles: int) -> tuple[TileTuning, ...]:
    """The default, and other orders that differ from it and each other on so many tiles."""
    shape = (row_tiles, column_tiles)
    if min(shape) == 1:
        return (default,)
    others = [replace(default, minor_dim=dim, tile_width=width) for dim, width in _ORDERS]
    return _distinct((default, *others), lambda t: (t.minor_dim, min(t.tile_width, shape[t.minor_dim])))


def mma_candidates(default: MmaTuning, dtype) -> tuple[MmaTuning, ...]:
    """The default, and other rings and orders that a block of this GPU can have."""
    rings = [ring for ring in _MMA_RINGS if jnp.dtype(dtype).itemsize == 2 or ring[1] == 64]
    others = [MmaTuning(*ring, default.abreast, sweep) for ring in rings[:3] for sweep in _SWEEPS]
    others += [MmaTuning(*ring, default.abreast) for ring in rings]
    others += [replace(default, abreast=rows) for rows in _ABREAST]
    return _distinct((default, *(t for t in others if t.shared_bytes <= block_kib() * 1024)), lambda t: t)


def _distinct[K](candidates: Iterable[K], effect: Callable[[K], object]) -> tuple[K, ...]:
    """The first candidate of each effect."""
    first: dict[object, K] = {}
    for candidate in candidates:
        first.setdefault(effect(candidate), candidate)
    return tuple(first.values())


def _up_projection(kernels, tuning, o: Operands):
    return kernels.up_projection(o.x, o.up_weights, (), o.dispatch, activation=_ACTIVATION, tuning=tuning)


def _down_projection(kernels, tuning, o: Operands):
    return kernels.down_projection(o.hidden, o.w_down, None, o.dispatch, 0, o.block.shape[1], tuning=tuning)


def _down_backward(kernels, tuning, o: Operands):
    return kernels.down_backward(
        o.x, o.w_down, None, o.pre, o.row_weights, o.dispatch, activation=_ACTIVATION, tuning=tuning
    )


def _down_weight_gradients(kernels, tuning, o: Operands):
    gradient, _ = kernels.down_weight_gradients(
        o.hidden, o.x, o.row_weights, o.dispatch, dtype=o.w_down.dtype, bias_dtype=None, tuning=tuning
    )
    return gradient


def _up_weight_gradients(kernels, tuning, o: Operands):
    dtypes = tuple(w.dtype for w in o.up_weights)
    return kernels.up_weight_gradients(o.x, o.pre, o.dispatch, dtypes=dtypes, bias_dtypes=(), tuning=tuning)


def _up_backward(kernels, tuning, o: Operands):
    return kernels.up_backward(o.pre, o.up_weights, o.dispatch, 0, o.block.shape[1], tuning=tuning)


def _column_block(kernels, tuning, o: Operands):
    """Both loops over blocks of columns: the forward pass's last step, and the backward pass's."""
    down = partial(kernels.down_projection, o.hidden, o.w_down, None, o.dispatch)
    up = partial(kernels.up_backward, o.pre, o.up_weights, o.dispatch)
    return [
        combine_columns(kernels, rows, o.w_down, o.dispatch, weights, o.x.dtype, tuning.columns)
        for rows, weights in ((down, o.weights), (up, None))
    ]
