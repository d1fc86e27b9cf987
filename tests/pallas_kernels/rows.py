"""Rows grouped by expert, random operands, and numpy views of them."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax.activations import get_activation
from pallas_kernels import ampere, xla
from pallas_kernels.mosaic.row_groups import ROW_ALIGNMENT, SPARE_ROWS, TILE_ROWS
from tests.numerics import TOLERANCE, assert_close, assert_same_bits
from tests.routings import ROUTINGS

D, N = 72, 136

needs_interpreter = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 12),
    reason="the interpreter of jax before 0.12 rejects barriers that are used right",
)

ACTIVATIONS = {1: get_activation("gelu").function, 2: get_activation("swiglu").function}
"""By the number of projections."""

over_alignments = pytest.mark.parametrize("row_alignment", [1, 8])

portable_dispatch = jax.jit(xla.dispatch, static_argnums=1, static_argnames=("row_alignment", "spare_rows"))


def dispatch(kernels, experts, num_experts, row_alignment=None):
    """Rows of groups that start at multiples of `row_alignment`, by default of what the kernels like."""
    if kernels is xla:
        return portable_dispatch(jnp.asarray(experts), num_experts, row_alignment=row_alignment or 1)
    assert row_alignment in (None, ROW_ALIGNMENT)
    return kernels.dispatch(jnp.asarray(experts), num_experts)


def first_columns(kernels) -> tuple[int, ...]:
    """Where blocks of 8 of D columns may start: without bulk copies, at multiples of 16 bytes."""
    return 0, 16 if kernels is ampere else 5, D - 8


def tolerance(kernels, dtype: str) -> float:
    """Of products of `dtype`: tensor cores round float32 to 10 bits."""
    return 1e-3 if dtype == "float32" and kernels is not xla else TOLERANCE[dtype]


class Rows:
    """A routing's rows. Those past the last group, which no kernel may touch, are there whenever slots are empty.

    Attributes:
      groups: what the kernels take.
      token: token of each row, T for padding.
      expert: expert of each row, -1 past the last group.
    """

    def __init__(self, kernels, routing: str, row_alignment: int | None = None):
        experts, self.num_experts = ROUTINGS[routing]
        self.num_tokens = len(experts)
        self.groups = dispatch(kernels, experts, self.num_experts, row_alignment)
        self.token = np.asarray(self.groups.expert_token_indices)
        expert = np.repeat(np.arange(self.num_experts), np.diff(self.groups.expert_token_offsets))
        self.expert = np.pad(expert, (0, self.num_rows - expert.size), constant_values=-1)
        self.rng = np.random.default_rng(0)

    @property
    def num_rows(self) -> int:
        return self.token.size

    @property
    def owned(self) -> np.ndarray:
        """Mask of the rows that stand for a pair: neither padding nor past the last group."""
        return self.token < self.num_tokens

    def normal(self, *shape, dtype="float32", fan_in=1):
        return jnp.asarray(self.rng.standard_normal(shape) / np.sqrt(fan_in), dtype)

    def of_rows(self, *shape, dtype="float32"):
        """Random values of every row, zero in padding, as every kernel leaves it there."""
        values = self.normal(self.num_rows, *shape, dtype=dtype)
        return jnp.where(self.owned.reshape(-1, *(1 for _ in shape)), values, 0)

    def gather(self, tokens) -> np.ndarray:
        """Each row's token in float64, zeros in padding."""
        padded = np.concatenate([wide(tokens), np.zeros((1, tokens.shape[1]))])
        return padded[self.token]

    def per_row(self, array) -> np.ndarray:
        """Each row's expert's slice in float64, zeros past the last group."""
        return np.concatenate([wide(array), np.zeros((1, *array.shape[1:]))])[self.expert]

    def sum_by_expert(self, terms) -> np.ndarray:
        """Sum of the rows of every expert."""
        out = np.zeros((self.num_experts, *terms.shape[1:]))
        for row in np.flatnonzero(self.owned):
            out[self.expert[row]] += terms[row]
        return out


def wide(array) -> np.ndarray:
    return np.asarray(array, np.float64)


def product(rows, matrices) -> np.ndarray:
    """Every row times its own matrix."""
    return np.einsum("ra,rab->rb", rows, matrices)


def expert_outputs(rows, hidden, w_down, b_down):
    out = product(wide(hidden), rows.per_row(w_down))
    return out if b_down is None else out + rows.per_row(b_down)


def assert_down_backward(kernels, rows, dtype, biases, projections):
    dy = rows.normal(rows.num_tokens, D, dtype=dtype)
    w_down = rows.normal(rows.num_experts, N, D, fan_in=D)
    b_down = rows.normal(rows.num_experts, D) if biases else None
    pre = tuple(rows.of_rows(N, dtype=dtype) for _ in range(projections))
    row_weights = rows.of_rows()
    activation = ACTIVATIONS[projections]
    run = jax.jit(lambda *args: kernels.down_backward(*args, activation=activation))
    d_pre, weighted_hidden, d_weights = run(dy, w_down, b_down, pre, row_weights, rows.groups)

    hidden, activation_vjp = jax.vjp(activation, *(p.astype(jnp.float32) for p in pre))
    dy_rows, weight = rows.gather(dy), wide(row_weights)[:, None]
    d_hidden = product(dy_rows, rows.per_row(w_down).swapaxes(1, 2))
    expected_d_pre = activation_vjp(jnp.asarray(weight * d_hidden, jnp.float32))
    expected_d_weights = (expert_outputs(rows, hidden, w_down, b_down) * dy_rows).sum(-1)
    owned = rows.owned
    assert_close([d[owned] for d in d_pre], [d[owned] for d in expected_d_pre], tolerance(kernels, dtype))
    assert_close(weighted_hidden[owned], (weight * wide(hidden))[owned], tolerance(kernels, dtype))
    assert_close(d_weights[owned], expected_d_weights[owned], tolerance(kernels, dtype))
    assert d_weights.dtype == jnp.float32
    assert {d.dtype.name for d in (*d_pre, weighted_hidden)} == {dtype}


def assert_same_as_portable(experts, num_experts, out):
    expected = portable_dispatch(jnp.asarray(experts), num_experts, row_alignment=8, spare_rows=SPARE_ROWS)
    assert_same_bits(out._replace(tiles=None), expected)
    assert_is_schedule(out)


def assert_is_schedule(out):
    """Tiles cut each group from its start on, group after group; the unused ones are zero."""
    tiles, offsets = out.tiles, np.asarray(out.expert_token_offsets)
    expected = [
        (expert, row, min(TILE_ROWS, stop - row))
        for expert, (start, stop) in enumerate(pairwise(offsets))
        for row in range(start, stop, TILE_ROWS)
    ]
    expected += [(0, 0, 0)] * (tiles.num_tiles - len(expected))
    assert list(zip(*(np.asarray(a).tolist() for a in tiles.arrays), strict=True)) == expected
