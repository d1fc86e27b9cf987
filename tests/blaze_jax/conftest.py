"""The portable experts, as a CPU computes them and as accelerators do."""

from functools import partial

import pytest

from blaze_jax import expert_ffn
from tests.expert_problems import batched, results


@pytest.fixture(params=["xla", "xla_batched"])
def kernels(request):
    """The output and gradients of a problem: a tile of one expert at a time, or several experts a turn."""
    return partial(results, expert_ffn) if request.param == "xla" else batched


@pytest.fixture
def traced_anew(monkeypatch):
    """Every call of the layer is traced by itself, with what a test has changed in the library."""
    monkeypatch.setattr("blaze_jax.transformations.are_observers", lambda: True)
