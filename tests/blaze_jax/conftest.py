"""The families of kernels that the experts run on, and layers that are traced anew."""

from contextlib import ExitStack

import jax
import pytest

from blaze_jax.implementation import FAMILIES, demanded_family
from pallas_kernels.xla.loops import turns_of
from tests import expert_problems


@pytest.fixture(params=["xla", "xla_batched", *expert_problems.ON_GPUS])
def kernels(request):
    """A family of kernels: the portable ones in both forms, those for GPUs on one, and for whom asks, interpreted."""
    name = request.param
    with ExitStack() as around:
        if name == "xla_batched":
            around.enter_context(turns_of(*expert_problems.RAGGED))
        elif name != "xla":
            around.enter_context(demanded_family(None if name == "own_on_gpu" else name.removesuffix("_on_gpu")))
            around.callback(jax.clear_caches)
            jax.clear_caches()  # of what was traced for others
        if name in FAMILIES:
            # While dP of one tile takes the place of P, another tile is read with rows of the next expert, which nobody
            # uses: in one of three runs the search for races on Hopper calls that one.
            around.enter_context(FAMILIES[name].interpreted(detect_races=name != "hopper"))
        yield expert_problems.FAMILIES[name]


@pytest.fixture
def traced_anew(monkeypatch):
    """Every call of the layer is traced by itself, with what a test has changed in the library."""
    monkeypatch.setattr("blaze_jax.transformations.are_observers", lambda: True)
