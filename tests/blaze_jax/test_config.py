"""The layer's configuration: what it allows, and which parameters it asks for."""

import dataclasses
import math
import pickle
import re

import pytest

from blaze_jax import ACTIVATION_NAMES, Activation, MoEConfig, Router
from blaze_jax.activations import get_activation

SIZES = {"num_experts": 6, "experts_per_token": 2, "expert_width": 5}


def config(**changes) -> MoEConfig:
    return MoEConfig(**SIZES | changes)


OF_EXPERTS = {"w_router": (4, 6), "w_up": (6, 4, 5), "w_down": (6, 5, 4)}
BIASES = {"b_up": (6, 5), "b_down": (6, 4)}
SHARED = {"shared_w_up": (4, 7), "shared_w_down": (7, 4)}
GATE = {"shared_gate": (4, 1)}
IDENTITY = Activation("identity", lambda x: x, gated=False)


@pytest.mark.parametrize(
    ("changes", "use_bias", "shapes"),
    [
        ({}, False, OF_EXPERTS | {"w_gate": (6, 4, 5)}),
        ({"activation": "gelu", "shared_width": 7}, True, OF_EXPERTS | BIASES | SHARED),
        ({"activation": "gelu", "shared_width": 7, "shared_gate": True}, True, OF_EXPERTS | BIASES | SHARED | GATE),
        ({"activation": IDENTITY}, False, OF_EXPERTS),
    ],
)
@pytest.mark.default_cases("*")
def test_shapes_of_the_parameters(changes, use_bias, shapes):
    parameters = config(**changes).parameters(4, use_bias=use_bias)
    assert {name: parameter.shape for name, parameter in parameters.items()} == shapes


def test_every_axis_is_named():
    sizes = {"embed": 4, "expert": 6, "expert_mlp": 5, "mlp": 7, None: 1}
    for name, parameter in config(shared_width=7, shared_gate=True).parameters(4, use_bias=True).items():
        assert parameter.shape == tuple(sizes[axis] for axis in parameter.axes), name
        assert parameter.kind == ("router" if name == "w_router" else "bias" if name[0] == "b" else "kernel")


def test_frozen_and_hashable_and_equal_by_value():
    assert hash(config()) == hash(config())
    assert config() == config()
    assert config() != config(shared_width=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().num_experts = 3


def of_router(**options) -> MoEConfig:
    return config(router=Router(**options))


WEIGHTS = ("load_balancing_weight", "z_loss_weight", "bias_update_rate")
COUNTS = ("num_groups", "groups_per_token", "rounding_tile", "rounding_slots")
MISUSES = [
    (config, (*SIZES, "shared_width"), (1.5, "8", True), "must be an integer"),
    (config, ("num_experts", "expert_width"), (0,), "must be at least 1"),
    (config, ("experts_per_token",), (0, 7), "must be from 1 to num_experts=6"),
    (config, WEIGHTS, ("0.1", True, None), "must be a number"),
    (config, (*WEIGHTS, "shared_width"), (-1,), "must not be negative"),
    (config, WEIGHTS, (math.nan, math.inf), "must not be negative or infinite"),
    (config, ("shared_gate",), (True,), "must be left out where shared_width=0"),
    (config, ("shared_gate",), (1, None), "must be True or False"),
    (config, ("activation",), ("tanh", ["swiglu"], None), "must be an Activation or one of swiglu"),
    (config, ("router",), ("sigmoid", None), "must be a Router"),
    (config, ("save",), ("all",), "must be one of pre_activations, int8, inputs"),
    (config, ("implementation",), ("cuda",), "must be None or one of mosaic_gpu, xla"),
    (Router, COUNTS, (None, 1.5), "must be an integer"),
    (Router, ("expert_capacity",), ("2", 1.5), "must be an integer"),
    (Router, ("weight_scale", "capacity_factor", "jitter"), ("2", True), "must be a number"),
    (Router, ("jitter",), (-0.1, 1.0, math.nan), "must be at least 0 and less than 1"),
    (Router, ("weight_norm",), ("rms", "2", 0.5, math.nan), "must be None, or 'rms' of scoring='relu', or a number of"),
    (Router, ("weight_scale",), (0, math.nan, math.inf), "must be positive and finite"),
    (Router, ("capacity_factor",), (0.0, math.nan, math.inf), "must be None or positive and finite"),
    (Router, ("expert_capacity",), (0,), "must be None or at least 1"),
    (Router, ("num_groups", "rounding_tile"), (0,), "must be at least 1"),
    (Router, ("rounding_slots",), (-1,), "must be at least 0"),
    (of_router, ("num_groups",), (4,), "must be a divisor of num_experts=6"),
    (of_router, ("groups_per_token",), (0, 4), "must be from 1 to num_groups="),
    (Router, ("scoring",), ("top", ["softmax"]), "must be one of softmax, softmax_selected, sigmoid"),
    (Router, ("normalize_weights",), ("no",), "must be None, True or False"),
    (Router, ("token_rounding",), ("even",), "must be None or one of up, down, nearest"),
]


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [(make, name, value, message) for make, names, values, message in MISUSES for name in names for value in values],
)
@pytest.mark.default_cases("*")
def test_wrong_value_is_named(make, name, value, message):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} {message}")):
        make(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 6}, "groups_per_token=1 must be enough to choose experts_per_token=2 from 1 experts"),
        (
            {"expert_capacity": 2, "capacity_factor": 1.0},
            "expert_capacity=2 and capacity_factor=1.0 exclude each other",
        ),
        ({"expert_capacity": 2, "token_rounding": "up"}, "expert_capacity=2 and token_rounding='up' exclude each"),
        ({"capacity_factor": 1.0, "token_rounding": "up"}, "capacity_factor=1.0 and token_rounding='up' exclude each"),
    ],
)
@pytest.mark.default_cases("*")
def test_options_that_exclude_each_other_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        of_router(**options)


@pytest.mark.parametrize("width", ["10", 0, 2.0])
def test_width_of_the_model_is_named(width):
    with pytest.raises(ValueError, match=f"model_width={width!r} must be"):
        config().parameters(width)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_pickled(activation):
    own = config(activation=get_activation(activation), router=Router(num_groups=3, groups_per_token=2))
    again = pickle.loads(pickle.dumps(own))
    assert (again, hash(again)) == (own, hash(own))
