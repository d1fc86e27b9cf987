"""The tests of all families."""

from tests.pallas_kernels.test_combine import test_sums_each_tokens_rows
from tests.pallas_kernels.test_down_projection_and_backward import (
    test_down_backward,
    test_down_backward_where_no_tile_reads_rows_of_the_next,
    test_down_projection,
    test_expert_without_rows_is_never_read,
)
from tests.pallas_kernels.test_up_projection_and_backward import (
    test_activation_without_pre_activations,
    test_up_backward,
    test_up_projection,
)
from tests.pallas_kernels.test_weight_gradients import (
    test_down_weight_gradients,
    test_gradients_of_an_unused_expert_are_zero,
    test_rows_of_no_expert_do_not_count,
    test_sums_are_accumulated_wide_and_rounded_once,
    test_up_weight_gradients,
)

__all__ = [
    "test_activation_without_pre_activations",
    "test_down_backward",
    "test_down_backward_where_no_tile_reads_rows_of_the_next",
    "test_down_projection",
    "test_down_weight_gradients",
    "test_expert_without_rows_is_never_read",
    "test_gradients_of_an_unused_expert_are_zero",
    "test_rows_of_no_expert_do_not_count",
    "test_sums_are_accumulated_wide_and_rounded_once",
    "test_sums_each_tokens_rows",
    "test_up_backward",
    "test_up_projection",
    "test_up_weight_gradients",
]
