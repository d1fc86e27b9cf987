"""The kernels under test: every backend's module has the same functions, and faces the same tests."""

import pytest

from pallas_kernels import ampere, hopper, xla
from pallas_kernels.mosaic.row_groups import ROW_ALIGNMENT
from pallas_kernels.xla.loops import turns_of
from tests.pallas_kernels.rows import Rows, needs_interpreter

HOPPER = "mosaic_gpu"
PORTABLE = ("xla", "xla_batched")
AMPERE = "ampere"
SLOW_INTERPRETED = {"more_experts_than_rows"}  # its dozens of empty experts cost most; other routings have some, too


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pycollect_makeitem():
    """Leaves out what kernels for GPUs cannot do, or do too slowly in the interpreter, before a default is chosen."""
    made = yield
    if isinstance(made, list):
        made = [item for item in made if not hasattr(item, "callspec") or _possible(**item.callspec.params)]
    return made


def _possible(kernels=None, rows=(None, None), row_alignment=ROW_ALIGNMENT, dtype=None, first=0, **_) -> bool:
    if kernels in PORTABLE:  # rows of one alignment each: what the forms share is tested once
        return rows[1] is None or kernels == PORTABLE[rows[1] == 1]
    if kernels not in (HOPPER, AMPERE):
        return True
    aligned = (rows[1] or 0) % ROW_ALIGNMENT == row_alignment % ROW_ALIGNMENT == first % ROW_ALIGNMENT == 0
    return aligned and rows[0] not in SLOW_INTERPRETED and not (kernels == HOPPER and dtype == "float32")


@pytest.fixture
def detect_races():
    """Whether interpreted kernels are watched for races; a test that cannot have it sets this, and says why."""
    return True


@pytest.fixture(params=["xla", "xla_batched", pytest.param(HOPPER, marks=needs_interpreter), AMPERE])
def kernels(request, detect_races):
    """A family of kernels; those for GPUs run in the interpreter, where a race is an error.

    "xla_batched" are the portable ones as an accelerator runs them: several turns of several experts.
    """
    if request.param == "xla":
        yield xla
        return
    if request.param == "xla_batched":
        with turns_of(experts=4, rows=24):
            yield xla
        return
    family = hopper if request.param == HOPPER else ampere
    with family.interpreted(detect_races=detect_races):
        yield family


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
    return Rows(kernels, routing, row_alignment=row_alignment)
