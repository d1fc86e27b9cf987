"""The dispatch kernels: the same bits as the portable form, in the interpreter anywhere and on a Hopper GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, simt
from tests.numerics import assert_same_bits
from tests.pallas_kernels.rows import assert_same_as_portable
from tests.routings import ROUTINGS, random_experts


def interpret(experts, num_experts, **options):
    with simt.interpreted():
        return hopper.dispatch(jnp.asarray(experts), num_experts, **options)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(partial(interpret, blocks=1), id="a block"),
        pytest.param(partial(interpret, blocks=3), id="blocks"),
        pytest.param(hopper.dispatch, id="gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing(routing, run):
    experts, num_experts = ROUTINGS[routing]
    assert_same_as_portable(experts, num_experts, run(jnp.asarray(experts), num_experts))


@pytest.mark.parametrize("num_experts", [33, 300])
def test_many_experts(num_experts):
    experts = random_experts(61, 5, range(0, num_experts, 3))
    assert_same_as_portable(experts, num_experts, interpret(experts, num_experts, blocks=2))


def test_other_ids_are_empty_slots():
    experts = np.array([[0, 5], [-3, 1], [2, 0]], np.int32)
    assert_same_as_portable(experts, 2, interpret(experts, 2, blocks=2))


@pytest.mark.parametrize(
    ("tokens", "slots", "num_experts"), [(24576, 8, 128), (2**21, 1, 4), (1, 1, 1), (77, 32, 1024)]
)
def test_lowers_for_cuda(tokens, slots, num_experts):
    experts = jax.ShapeDtypeStruct((tokens, slots), jnp.int32)
    lowered = jax.jit(lambda e: hopper.dispatch(e, num_experts)).trace(experts)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "moe_dispatch_count" in text
    assert "moe_dispatch_place" in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "slots", "num_experts"), [(24576, 8, 128), (262144, 8, 256), (2**21, 1, 4), (5000, 32, 1024)]
)
def test_sizes_on_the_gpu(tokens, slots, num_experts):
    experts = np.random.default_rng(0).integers(0, num_experts, (tokens, slots), np.int32)
    first = hopper.dispatch(jnp.asarray(experts), num_experts)
    assert_same_as_portable(experts, num_experts, first)
    assert_same_bits(hopper.dispatch(jnp.asarray(experts), num_experts), first)
