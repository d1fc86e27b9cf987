"""The oracle itself, against a loop over tokens and slots."""

import numpy as np
import pytest

from blaze_jax.oracle import dense_expert_ffn
from tests.expert_problems import apply, make_problem
from tests.numerics import assert_close
from tests.routings import ROUTINGS


def looped(problem, activation):
    x, params, weights, experts, _ = (
        {k: None if v is None else np.asarray(v, np.float64) for k, v in part.items()}
        if isinstance(part, dict)
        else np.asarray(part)
        for part in problem
    )
    y = np.zeros(x.shape)
    for (token, slot), expert in np.ndenumerate(experts):
        if expert >= 0:
            up = x[token] @ params["w_up"][expert] + params["b_up"][expert]
            if activation == "swiglu":
                gate = x[token] @ params["w_gate"][expert] + params["b_gate"][expert]
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                hidden = np.maximum(up, 0) ** 2
            y[token] += weights[token, slot] * (hidden @ params["w_down"][expert] + params["b_down"][expert])
    return y


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("routing", ["random", "empty_slots", "same_expert_twice", "every_expert"])
def test_is_a_sum_over_slots(routing, activation):
    problem = make_problem(*ROUTINGS[routing], activation=activation)
    out = apply(dense_expert_ffn, *problem[:4], activation=activation)
    assert_close(out, looped(problem, activation))


def test_computes_in_float32():
    problem = make_problem(*ROUTINGS["random"], dtype="bfloat16")
    out = apply(dense_expert_ffn, *problem[:4])
    assert out.dtype == np.float32
    assert_close(out, looped(problem, "swiglu"))
