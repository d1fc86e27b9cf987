"""Weight gradients: the tests of all families, tiles of every shape, and every GPU that they are compiled for."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ampere import weight_gradients
from pallas_kernels.ampere.tile import Tile
from pallas_kernels.ampere.tuning import LARGE, SMALL, SMALL_FLOAT32
from pallas_kernels.simt.dispatch import dispatch
from pallas_kernels.simt.language import interpreted
from tests.numerics import assert_same_bits
from tests.pallas_kernels.conftest import AMPERE
from tests.pallas_kernels.rows import D, N, Rows
from tests.pallas_kernels.test_weight_gradients import (
    test_down_weight_gradients,
    test_gradients_of_an_unused_expert_are_zero,
    test_rows_of_no_expert_do_not_count,
    test_sums_are_accumulated_wide_and_rounded_once,
    test_up_weight_gradients,
)

__all__ = [
    "test_down_weight_gradients",
    "test_gradients_of_an_unused_expert_are_zero",
    "test_rows_of_no_expert_do_not_count",
    "test_sums_are_accumulated_wide_and_rounded_once",
    "test_up_weight_gradients",
]


@pytest.fixture(params=[AMPERE])
def kernels():
    with interpreted():
        yield SimpleNamespace(
            dispatch=dispatch,
            up_weight_gradients=weight_gradients.up_weight_gradients,
            down_weight_gradients=weight_gradients.down_weight_gradients,
        )
