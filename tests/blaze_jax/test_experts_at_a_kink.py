"""A pre-activation that float32 cannot tell from zero: ReLU's derivative jumps there, and one unit's gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import expert_ffn
from blaze_jax.oracle import dense_expert_ffn
from pallas_kernels import ampere, hopper
from tests.expert_problems import batched, make_problem, results
from tests.numerics import TOLERANCE, assert_close, scaled_error
from tests.pallas_kernels.rows import needs_interpreter
from tests.routings import EMPTY, random_experts

T, E, K, D, N = 17, 11, 3, 120, 104
TOKEN, EXPERT, UNIT = 5, 4, 7

GPUS = {"hopper": ("9.0", hopper), "ampere": ("8.0", ampere)}


@pytest.fixture(params=["xla", "xla_batched", *(pytest.param(name, marks=needs_interpreter) for name in GPUS)])
def family(request, monkeypatch):
    """The portable kernels in both forms, and those for GPUs in their interpreters."""
    if request.param not in GPUS:
        yield partial(results, expert_ffn) if request.param == "xla" else batched
        return
    capability, family = GPUS[request.param]
    monkeypatch.setattr("blaze_jax.implementation.compute_capability", lambda: capability)
    jax.clear_caches()
    # While dP of one tile takes the place of P, another tile is read with rows of the next expert, which nobody
    # uses: in one of three runs the search for races on Hopper calls that one.
    with family.interpreted(detect_races=False):
        yield partial(results, expert_ffn, implementation="mosaic_gpu")
    jax.clear_caches()


def problem_at_a_kink():
    """A token whose pre-activation in one unit is 2^-30 - 1 + 1, and whose dy pulls at that unit, in bfloat16."""
    experts = random_experts(T, K, range(E))
    experts[::4, 1] = EMPTY
    experts[TOKEN] = [EXPERT, EMPTY, (EXPERT + 1) % E]
    problem = make_problem(experts, E, d=D, n=N, activation="relu", dtype="bfloat16")
    w_up = problem.params["w_up"].at[EXPERT, :, UNIT].set(jnp.array([-1, 1] + [0] * (D - 2), jnp.bfloat16))
    x = problem.x.at[TOKEN, :2].set(jnp.array([1, 2**-30], jnp.bfloat16))
    b_up = problem.params["b_up"].at[EXPERT, UNIT].set(1)
    dy = problem.dy.at[TOKEN].set(8 * problem.params["w_down"][EXPERT, UNIT])
    return problem._replace(x=x, dy=dy, params=problem.params | {"w_up": w_up, "b_up": b_up})


def in_float64(problem):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, results(dense_expert_ffn, problem.cast(jnp.float64), activation="relu"))


@pytest.mark.default_cases("xla", "ampere")
def test_a_pre_activation_that_rounds_to_zero_turns_one_unit_off_and_nothing_else(family):
    problem = problem_at_a_kink()
    out, truth = family(problem, activation="relu"), in_float64(problem)

    without = problem.params["b_up"].at[EXPERT, UNIT].add(-(2.0**-7))
    off = in_float64(problem._replace(params=problem.params | {"b_up": without}))
    assert_close(out, off, TOLERANCE["bfloat16"])

    jumps = {"x": (TOKEN,), "w_up": (EXPERT, slice(None), UNIT), "b_up": (EXPERT, UNIT)}
    for name, value in out.items():
        error = np.asarray(value, np.float64) - truth[name]
        if name in jumps:
            assert scaled_error(value, truth[name]) > 0.02, name  # of the whole
            error[jumps[name]] = 0
        assert np.linalg.norm(error) < TOLERANCE["bfloat16"] * np.linalg.norm(truth[name]), name
