"""The layer's configuration: what it allows, and which parameters it asks for."""

import dataclasses
import pickle

import pytest

from blaze_jax import ACTIVATION_NAMES, Activation, MoEConfig, Router
from blaze_jax.activations import get_activation

SIZES = {"num_experts": 6, "experts_per_token": 2, "expert_width": 5}


def config(**changes) -> MoEConfig:
    return MoEConfig(**SIZES | changes)


def shapes(parameters):
    return {name: parameter.shape for name, parameter in parameters.items()}


def test_gated_parameters():
    assert shapes(config().parameters(4)) == {
        "w_router": (4, 6),
        "w_gate": (6, 4, 5),
        "w_up": (6, 4, 5),
        "w_down": (6, 5, 4),
    }


def test_ungated_parameters_with_biases_and_shared_experts():
    assert shapes(config(activation="gelu", shared_width=7).parameters(4, use_bias=True)) == {
        "w_router": (4, 6),
        "w_up": (6, 4, 5),
        "w_down": (6, 5, 4),
        "b_up": (6, 5),
        "b_down": (6, 4),
        "shared_w_up": (4, 7),
        "shared_w_down": (7, 4),
    }


def test_every_axis_is_named():
    sizes = {"embed": 4, "expert": 6, "expert_mlp": 5, "mlp": 7}
    for name, parameter in config(shared_width=7).parameters(4, use_bias=True).items():
        assert parameter.shape == tuple(sizes[axis] for axis in parameter.axes), name
        assert parameter.kind == ("router" if name == "w_router" else "bias" if name[0] == "b" else "kernel")


def test_hashable_and_equal_by_value():
    assert hash(config()) == hash(config())
    assert config() == config()
    assert config() != config(shared_width=1)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().num_experts = 3


def test_an_activation_of_ones_own():
    own = Activation("identity", lambda x: x, gated=False)
    assert "w_gate" not in config(activation=own).parameters(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"experts_per_token": 0}, "experts_per_token=0 must be from 1 to num_experts=6"),
        ({"experts_per_token": 7}, "experts_per_token=7 must be from 1 to num_experts=6"),
        ({"expert_width": 0}, "expert_width=0 must be at least 1"),
        ({"num_experts": 6.0}, "num_experts=6.0 must be an integer"),
        ({"experts_per_token": True}, "experts_per_token=True must be an integer"),
        ({"expert_width": 5.0}, "expert_width=5.0 must be an integer"),
        ({"shared_width": 1.5}, "shared_width=1.5 must be an integer"),
        ({"expert_width": "8"}, "expert_width='8' must be an integer"),
        ({"activation": "tanh"}, "activation='tanh' must be"),
        ({"activation": ["swiglu"]}, r"activation=\['swiglu'\] must be"),
        ({"activation": None}, "activation=None must be"),
        ({"router": "sigmoid"}, "router='sigmoid' must be a Router"),
        ({"router": None}, "router=None must be a Router"),
        ({"router": Router}, "router=<class .* must be a Router"),
        ({"shared_width": -1}, "shared_width=-1 must not be negative"),
        ({"load_balancing_weight": -0.5}, "load_balancing_weight=-0.5 must not be negative"),
        ({"load_balancing_weight": float("nan")}, "load_balancing_weight=nan must"),
        ({"load_balancing_weight": "0.1"}, "load_balancing_weight='0.1' must be a number"),
        ({"load_balancing_weight": True}, "load_balancing_weight=True must be a number"),
        ({"z_loss_weight": None}, "z_loss_weight=None must be a number"),
        ({"z_loss_weight": float("nan")}, "z_loss_weight=nan must not be"),
        ({"bias_update_rate": float("inf")}, "bias_update_rate=inf must not be negative or infinite"),
        ({"bias_update_rate": "1e-3"}, "bias_update_rate='1e-3' must be a number"),
        ({"z_loss_weight": -0.5}, "z_loss_weight=-0.5 must not be negative"),
        ({"bias_update_rate": -0.5}, "bias_update_rate=-0.5 must not be negative"),
        ({"save": "all"}, "save='all' must be one of pre_activations, inputs"),
        ({"implementation": "cuda"}, "implementation='cuda' must be"),
    ],
)
def test_invalid_field_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "top"}, "scoring='top' must be one of softmax, softmax_selected, sigmoid"),
        ({"normalize_weights": "no"}, "normalize_weights='no' must be None, True or False"),
        ({"weight_scale": 0}, "weight_scale=0 must be positive"),
        ({"weight_scale": float("inf")}, "weight_scale=inf must be positive and finite"),
        ({"weight_scale": "2"}, "weight_scale='2' must be a number"),
        ({"weight_scale": True}, "weight_scale=True must be a number"),
        ({"weight_scale": float("nan")}, "weight_scale=nan must be positive"),
        ({"scoring": ["softmax"]}, r"scoring=\['softmax'\] must be one of"),
        ({"capacity_factor": "1"}, "capacity_factor='1' must be a number"),
        ({"capacity_factor": float("nan")}, "capacity_factor=nan must be None or positive"),
        ({"expert_capacity": "2"}, "expert_capacity='2' must be an integer"),
        ({"num_groups": None}, "num_groups=None must be an integer"),
        ({"num_groups": 2.0}, "num_groups=2.0 must be an integer"),
        ({"groups_per_token": 1.0}, "groups_per_token=1.0 must be an integer"),
        ({"num_groups": 0}, "num_groups=0 must be at least 1"),
        ({"num_groups": 4}, "num_groups=4 must be a divisor of num_experts=6"),
        ({"num_groups": 3, "groups_per_token": 0}, "groups_per_token=0 must be from 1 to num_groups=3"),
        ({"num_groups": 3, "groups_per_token": 4}, "groups_per_token=4 must be from 1 to num_groups=3"),
        ({"num_groups": 6}, "groups_per_token=1 must be enough to choose experts_per_token=2 from 1 experts"),
        ({"expert_capacity": 0}, "expert_capacity=0 must be None or at least 1"),
        ({"expert_capacity": 1.5}, "expert_capacity=1.5 must be an integer"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be None or positive"),
        ({"capacity_factor": float("inf")}, "capacity_factor=inf must be None or positive and finite"),
        ({"token_rounding": "even"}, "token_rounding='even' must be None or one of up, down, nearest"),
        ({"rounding_tile": 0}, "rounding_tile=0 must be at least 1"),
        ({"rounding_tile": 2.5}, "rounding_tile=2.5 must be an integer"),
        ({"rounding_slots": 1.5}, "rounding_slots=1.5 must be an integer"),
        ({"rounding_slots": -1}, "rounding_slots=-1 must be at least 0"),
        (
            {"expert_capacity": 2, "capacity_factor": 1.0},
            "expert_capacity=2 and capacity_factor=1.0 exclude each other",
        ),
        (
            {"expert_capacity": 2, "token_rounding": "up"},
            "expert_capacity=2 and token_rounding='up' exclude each other",
        ),
        (
            {"capacity_factor": 1.0, "token_rounding": "up"},
            "capacity_factor=1.0 and token_rounding='up' exclude each other",
        ),
    ],
)
def test_invalid_router_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        config(router=Router(**options))


@pytest.mark.parametrize("options", [{"scoring": "bad"}, {"weight_scale": 0}, {"num_groups": 0}, {"rounding_tile": 0}])
def test_router_is_checked_on_construction(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        Router(**options)


@pytest.mark.parametrize("width", ["10", 0, 2.0])
def test_width_of_the_model_is_named(width):
    with pytest.raises(ValueError, match=f"model_width={width!r} must be"):
        config().parameters(width)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_pickled(activation):
    own = config(activation=get_activation(activation), router=Router(num_groups=3, groups_per_token=2))
    again = pickle.loads(pickle.dumps(own))
    assert (again, hash(again)) == (own, hash(own))
