"""The order in which tiles are computed changes no bit: a tile writes nothing but its own rows."""

import jax
import pytest

from pallas_kernels import hopper
from pallas_kernels.tuning.parameters import TileTuning
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import ACTIVATIONS, D, N, Rows, needs_interpreter


@needs_interpreter
@pytest.mark.slow
def test_rows_forth_in_one_column_and_back_in_the_next():
    with hopper.interpreted():
        rows = Rows(hopper, "random")
        x = rows.normal(rows.num_tokens, D, dtype="bfloat16")
        weights = tuple(rows.normal(rows.num_experts, D, N, fan_in=D) for _ in range(2))

        @jax.jit
        def hidden(x):
            orders = TileTuning(), TileTuning(minor_dim=1)
            up = [
                hopper.up_projection(x, weights, (), rows.groups, activation=ACTIVATIONS[2], tuning=o) for o in orders
            ]
            return [hidden[rows.owned] for _, hidden in up]

        assert_same_bits(*hidden(x))
