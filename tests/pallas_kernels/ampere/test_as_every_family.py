"""The tests of all families, of the operations that these kernels have so far."""

from tests.pallas_kernels.test_down_projection_and_backward import (
    test_down_projection,
    test_expert_without_rows_is_never_read,
)
from tests.pallas_kernels.test_up_projection_and_backward import (
    test_activation_without_pre_activations,
    test_up_projection,
)

__all__ = [
    "test_activation_without_pre_activations",
    "test_down_projection",
    "test_expert_without_rows_is_never_read",
    "test_up_projection",
]
