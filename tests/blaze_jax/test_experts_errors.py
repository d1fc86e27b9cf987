"""Misuse of `expert_ffn` raises an error that names the argument, what it was and what it must be."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from blaze_jax import expert_ffn
from tests.expert_problems import apply, make_problem
from tests.numerics import assert_same_bits
from tests.routings import random_experts


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def ids(*rows):
    return jnp.array(rows * 3)


UNGATED = {"activation": "gelu", "w_gate": None}
NO_BIASES = {"b_gate": None, "b_up": None, "b_down": None}

MISUSES = {
    "x of integers": ({"x": zeros(6, 4, dtype=jnp.int32)}, "x has dtype int32, must be float32"),
    "x of text": ({"x": "tokens"}, "x='tokens' must be an array"),
    "w_down of nothing": ({"w_down": None}, "w_down=None must be an array"),
    "w_up without width": ({"w_up": zeros(3, 4, 0)}, r"w_up has shape \(3, 4, 0\), .* with n at least 1"),
    "ungated w_up": ({**UNGATED, **NO_BIASES, "w_up": zeros(3, 2, 4)}, r"\(3, 2, 4\), must be \(3, 4, 2\)"),
    "ungated w_down": ({**UNGATED, **NO_BIASES, "w_down": zeros(3, 4, 2)}, r"\(3, 4, 2\), must be \(3, 2, 4\)"),
    "weights of text": ({"weights": [["a", "b"]]}, "weights=.* must be an array"),
    "experts of text": ({"experts": "ids"}, "experts='ids' must be an array"),
    "activation in a list": ({"activation": ["swiglu"]}, r"activation=\['swiglu'\] must be an Activation or one of"),
    "save in a list": ({"save": ["inputs"]}, r"save=\['inputs'\] must be one of"),
    "w_up of integers": ({"w_up": zeros(3, 4, 2, dtype=jnp.int8)}, "w_up has dtype int8"),
    "no experts": ({"w_down": zeros(0, 2, 4)}, r"w_down has shape \(0, 2, 4\), must be .* with E at least 1"),
    "weights of integers": ({"weights": zeros(6, 2, dtype=jnp.int32)}, "weights has dtype int32"),
    "experts of floats": ({"experts": zeros(6, 2)}, "experts must be an integer array .*, got float32"),
    "experts of rank 1": ({"experts": zeros(6, dtype=jnp.int32)}, r"experts .* of shape \(6,\)"),
    "K above E": ({"experts": ids([0] * 4, [0] * 4), "weights": zeros(6, 4)}, "experts has K=4 slots .* 1 to E=3"),
    "id of no expert": ({"experts": ids([0, 1], [0, 3])}, r"experts\[1, 1\] = 3 must be .* from 0 to 2, or -1"),
    "id below empty": ({"experts": ids([-2, 1], [0, 1])}, r"experts\[0, 0\] = -2 must be .* from 0 to 2, or -1"),
    "gate missing": ({"w_gate": None, "b_gate": None}, "'swiglu' takes both w_gate and w_up, got w_up"),
    "up missing": ({"w_up": None, "b_up": None}, "'swiglu' takes both w_gate and w_up, got w_gate"),
    "gate for ungated": ({"activation": "gelu"}, r"'gelu' takes w_up alone \(w_gate=None\), got w_gate and w_up"),
    "up missing for ungated": ({**UNGATED, "w_up": None}, r"'gelu' takes w_up alone \(w_gate=None\), got neither"),
    "bias of a missing gate": (UNGATED, "biases must be .* got b_gate and b_up"),
    "one bias of two": ({"b_gate": None}, "biases must be given for every up projection of 'swiglu' .* got b_up"),
    "activation": ({"activation": "tanh"}, "activation='tanh' must be an Activation or one of swiglu"),
    "save": ({"save": "everything"}, "save='everything' must be one of pre_activations, int8, inputs"),
    "implementation": ({"implementation": "triton"}, "implementation='triton' must be None or one of mosaic_gpu, xla"),
    "x without width": ({"x": zeros(6, 0)}, r"x has shape \(6, 0\), must be \(T, d\) with d at least 1"),
    "experts of another T": ({"experts": zeros(5, 2, dtype=jnp.int32)}, r"experts has shape \(5, 2\), .*T=6"),
}

SHAPES = {"x": (6, 4), "w_gate": (3, 4, 2), "w_up": (3, 4, 2), "w_down": (3, 2, 4), "weights": (6, 2)}
SHAPES |= {"b_gate": (3, 2), "b_up": (3, 2), "b_down": (3, 4)}


def call(**changes):
    problem = make_problem(random_experts(6, 2, range(3)), 3, d=4, n=2)
    arguments = {"x": problem.x, **problem.params, "weights": problem.weights, "experts": problem.experts}
    return expert_ffn(**arguments | changes)


def test_the_unchanged_call_is_no_misuse():
    assert np.isfinite(call()).all()


@pytest.mark.parametrize(("changes", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


WRONG_SHAPES = [(name, shape[1:], "(") for name, shape in SHAPES.items()]
for name, shape in SHAPES.items():
    sizes = np.add(shape, np.eye(len(shape), dtype=int)).tolist()  # each axis one longer, in turn
    WRONG_SHAPES += [(name, tuple(wrong), shape) for wrong in sizes]


@pytest.mark.parametrize(("name", "wrong", "right"), WRONG_SHAPES, ids=str)
@pytest.mark.default_cases("*")
def test_wrong_shape_is_named(name, wrong, right):
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {wrong}, must be {right}")):
        call(**{name: zeros(*wrong)})


@pytest.mark.parametrize("name", ["x of integers", "w_up without width", "experts of another T", "K above E"])
def test_misuse_is_named_under_jit(name):
    changes, message = MISUSES[name]
    with pytest.raises(ValueError, match=message):
        jax.jit(call)(**changes)


def test_implementation_that_cannot_run_this():
    message = r"implementation='mosaic_gpu' cannot run this: d=\d must be a multiple of 8"
    with pytest.raises(NotImplementedError, match=message):
        call(implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("dtype", "wrong"), [("uint32", 2**32 - 1), ("int64", 2**32 + 1), ("int64", -(2**32)), ("uint8", 255), ("int8", -2)]
)
def test_ids_out_of_range_are_nan_under_tracing_in_any_dtype(dtype, wrong):
    with jax.enable_x64(True):
        experts = jnp.asarray(np.array([[0, 1], [wrong, 2], [2, 0]] * 2, dtype))
        problem = make_problem(np.zeros((6, 2), np.int32), 3, d=4, n=2)
        y = jax.jit(partial(apply, expert_ffn))(*problem._replace(experts=experts)[:4])
    assert np.isnan(y[1::3]).all()
    assert np.isfinite(np.delete(y, [1, 4], 0)).all()


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_weight_of_an_empty_slot_counts_for_nothing(weight):
    problem = make_problem(random_experts(6, 2, range(3)), 3, d=4, n=2)
    experts = problem.experts.at[::2, 1].set(-1).at[3].set(-1)
    clean = jnp.where(experts == -1, 0, problem.weights)

    @jax.jit
    @jax.value_and_grad
    def loss(weights):
        return jnp.square(apply(expert_ffn, problem.x, problem.params, weights, experts)).sum()

    value, expected = (loss(w) for w in (jnp.where(experts == -1, weight, problem.weights), clean))
    assert_same_bits(value, expected)
