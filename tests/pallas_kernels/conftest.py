"""The kernels under test: every backend's module has the same functions, and faces the same tests."""

import importlib

import pytest

from tests.pallas_kernels.rows import Rows


@pytest.fixture(params=["xla"])
def kernels(request):
    return importlib.import_module(f"pallas_kernels.{request.param}")


@pytest.fixture(
    params=[("empty_slots", 1), ("empty_slots", 8), ("more_experts_than_rows", 8), ("many_tiles", 1)],
    ids=lambda param: f"{param[0]}-aligned_to_{param[1]}",
)
def rows(kernels, request):
    """Rows of some routing, in groups that start at multiples of 1 or 8."""
    routing, row_alignment = request.param
    return Rows(kernels, routing, row_alignment=row_alignment)
