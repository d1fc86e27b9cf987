"""The kernels under test: every backend's module has the same functions, and faces the same tests."""

import pytest

from pallas_kernels import hopper, xla
from pallas_kernels.xla.row_groups import turns_of
from tests.pallas_kernels.rows import Rows, needs_interpreter

SLOW_INTERPRETED = {"more_experts_than_rows"}  # its dozens of empty experts cost most; other routings have some, too


@pytest.fixture
def detect_races():
    """Whether interpreted kernels are watched for races; a test that cannot have it sets this, and says why."""
    return True


@pytest.fixture(params=["xla", "xla_batched", pytest.param("mosaic_gpu", marks=needs_interpreter)])
def kernels(request, detect_races):
    """A module of kernels; those for Hopper run in the interpreter, where a race is an error.

    "xla_batched" are the portable ones as an accelerator runs them: several turns of several experts.
    """
    if request.param == "xla":
        yield xla
        return
    if request.param == "xla_batched":
        with turns_of(experts=4, rows=24):
            yield xla
        return
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype") == "float32":
        pytest.skip("the tensor cores take bfloat16 or float16")
    with hopper.interpreted(detect_races=detect_races):
        yield hopper


@pytest.fixture(
    params=[
        ("empty_slots", 1),
        ("empty_slots", 8),
        ("more_experts_than_rows", 8),
        ("many_tiles", 1),
        ("whole_tiles_and_a_tail", 8),
    ],
    ids=lambda param: f"{param[0]}-aligned_to_{param[1]}",
)
def rows(kernels, request):
    """Rows of some routing, in groups that start at multiples of 1 or 8."""
    routing, row_alignment = request.param
    if kernels is hopper and routing in SLOW_INTERPRETED:
        pytest.skip("slow in the interpreter")
    return Rows(kernels, routing, row_alignment=row_alignment)
