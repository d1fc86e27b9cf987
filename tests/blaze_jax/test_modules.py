"""The modules of flax.linen and flax.nnx: what they share with `moe` and with each other, and what only one has.

Only linen has collections and lifted transformations; only nnx has views, and sows under `nnx.capture`.
"""

from dataclasses import replace
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import blaze_jax
from blaze_jax import MoE, MoEConfig, init, moe, update_selection_bias
from blaze_jax.checks import warn_once
from blaze_jax.layer import statistics
from blaze_jax.nnx import AuxiliaryLoss, RouterState
from tests.layers import (
    CONFIGS,
    DOORS,
    WIDTH,
    created,
    gradients_through,
    layer,
    nnx_module,
    random_parameters,
    random_tokens,
    unboxed,
)
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import make_mesh

MODULES = ("linen", "nnx")
over_modules = pytest.mark.parametrize("module", MODULES)
COLLECTIONS = ["losses", "intermediates", "router_state"]
PLAIN, EVERYTHING = CONFIGS["plain"], CONFIGS["everything"]


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@over_modules
@pytest.mark.default_cases("*-plain-False", "linen-everything-True")
def test_parameters_are_those_of_the_configuration(module, name, use_bias):
    expected = CONFIGS[name].parameters(WIDTH, use_bias=use_bias)
    boxes = jax.eval_shape(partial(created, module, CONFIGS[name], use_bias=use_bias, param_dtype=jnp.bfloat16))
    axes = {name: box.names if module == "linen" else box.out_sharding for name, box in boxes.items()}
    assert axes == {name: parameter.axes for name, parameter in expected.items()}
    assert {name: p.shape for name, p in unboxed(boxes).items()} == {name: p.shape for name, p in expected.items()}
    chex.assert_type(jax.tree.leaves(boxes), jnp.bfloat16)


@over_modules
@pytest.mark.default_cases("*")
def test_initialisers_are_used(module):
    fill = {
        name: partial(lambda value, key, shape, dtype: jnp.full(shape, value, dtype), value)
        for name, value in {"router_init": 1.0, "kernel_init": 2.0, "bias_init": 3.0}.items()
    }
    params = jax.jit(lambda: unboxed(created(module, EVERYTHING, use_bias=True, **fill)))()
    values = {name: np.unique(value).tolist() for name, value in params.items()}
    assert values.pop("w_router") == [1.0]
    assert values == {name: [3.0] if name.startswith("b_") else [2.0] for name in values}


def test_same_initial_distribution():
    makers = {m: lambda m=m: unboxed(created(m, EVERYTHING, use_bias=True)) for m in MODULES}
    makers["function"] = lambda: init(jax.random.key(0), EVERYTHING, WIDTH, use_bias=True)
    linen, *others = (jax.tree.map(np.std, jax.jit(make)()) for make in makers.values())
    assert linen.keys() == EVERYTHING.parameters(WIDTH, use_bias=True).keys()
    assert {name for name, deviation in linen.items() if deviation == 0} == {"b_up", "b_down"}
    for own in others:
        assert own.keys() == linen.keys()
        for name, deviation in linen.items():
            assert 0.7 * deviation <= own[name] <= 1.4 * deviation, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "leading", "dtype"),
    [
        *((name, (2, 15), None) for name in CONFIGS),
        ("everything", (2, 15), "bfloat16"),
        ("everything", (), None),
        ("everything", (0,), None),
    ],
)
@over_modules
@pytest.mark.ci_cases("nnx-everything-leading4-bfloat16", "linen-everything-leading1-None")
def test_same_bits_as_the_function(module, name, leading, dtype):
    config, x = CONFIGS[name], random_tokens(*leading)
    params = random_parameters(config, use_bias=True)
    out, expected = (gradients_through(door, params, x, config, dtype) for door in (module, "function"))
    assert_same_bits(out, expected)


def collected_by_linen(config, x, bias, train, **options):
    variables = {"params": random_parameters(config), "router_state": {"selection_bias": bias}}
    _, state = jax.jit(partial(MoE(config, **options).apply, train=train, mutable=COLLECTIONS))(variables, x)
    losses, watched = ({n: value for n, (value,) in state[kind].items()} for kind in COLLECTIONS[:2])
    return losses, watched, state["router_state"]["selection_bias"]


@partial(nnx.jit, static_argnames="train")
def collect(module, x, train):
    return nnx.capture(module, AuxiliaryLoss, nnx.Intermediate)(x, train=train)


def collected_by_nnx(config, x, bias, train, **options):
    module = nnx_module(random_parameters(config), config, **options)
    module.selection_bias[...] = bias
    _, *sown = collect(module, x, train=train)
    losses, watched = ({name: jax.tree.leaves(value)[0] for name, value in kind.items()} for kind in sown)
    return losses, watched, module.selection_bias[...]


COLLECTED = {"linen": collected_by_linen, "nnx": collected_by_nnx}


@pytest.mark.parametrize("train", [True, False])
@over_modules
@pytest.mark.default_cases("*-True")
@pytest.mark.ci_cases("*")
def test_losses_and_statistics_are_the_layers_and_the_bias_moves_in_training(module, train):
    x, bias = random_tokens(30), jnp.zeros(6)
    _, routing = layer(x, random_parameters(EVERYTHING), EVERYTHING, train=train)
    losses, watched, after = COLLECTED[module](EVERYTHING, x, bias, train)
    assert_close(losses, routing.weighted_losses)
    assert_same_bits(watched, statistics(routing))
    moved = update_selection_bias(bias, routing.demand, EVERYTHING.bias_update_rate)
    assert_same_bits(after, moved if train else bias)


@over_modules
@pytest.mark.default_cases("*")
def test_frozen_selection_bias(module):
    config = replace(EVERYTHING, bias_update_rate=0.0, selection_bias=True)
    frozen = jnp.array([9.0, 9, 0, 0, 0, 0])
    _, watched, after = COLLECTED[module](config, random_tokens(30), frozen, True)
    assert watched["tokens_per_expert"].tolist() == [30, 30, 0, 0, 0, 0]
    assert_same_bits(after, frozen)


@over_modules
@pytest.mark.slow
def test_selection_bias_of_every_device_is_that_of_all_tokens(module):
    x, bias, split = random_tokens(32), jnp.zeros(6), jax.P("data")
    _, routing = layer(x, random_parameters(EVERYTHING), EVERYTHING, selection_bias=bias)
    expected = update_selection_bias(bias, routing.demand, EVERYTHING.bias_update_rate)

    def after(x):  # what each device has: the spec of the bias promises nothing
        return COLLECTED[module](EVERYTHING, x, bias, True, axis_name="data")[2][None]

    sharded = jax.shard_map(after, mesh=make_mesh({"data": 4}), in_specs=split, out_specs=split, check_vma=False)
    assert_same_bits(np.asarray(jax.jit(sharded)(x)), np.tile(expected, (4, 1)))


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "param_dtype", "out"),
    [
        (None, "bfloat16", "float32", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
    ],
)
@over_modules
@pytest.mark.default_cases("*-bfloat16-bfloat16", "linen-*")
def test_dtype_of_the_computation(module, dtype, x_dtype, param_dtype, out):
    """The router may be wider, and modules may hold parameters of another dtype than they would initialise."""
    params = random_parameters(PLAIN, dtype=param_dtype) | {"w_router": jnp.ones((WIDTH, 6))}
    run = partial(DOORS[module], config=PLAIN, dtype=dtype)
    y, _ = jax.eval_shape(run, params, random_tokens(5, dtype=x_dtype))
    assert y.dtype == out


FORMS = {
    "function": lambda x, config: moe(x, random_parameters(PLAIN), config),
    "init": lambda x, config: init(jax.random.key(0), config, WIDTH),
    "linen": lambda x, config: MoE(config).init(jax.random.key(0), x),
    "nnx": lambda x, config: blaze_jax.nnx.MoE(WIDTH, config, rngs=nnx.Rngs(0))(x),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.default_cases("*")
def test_misuse_of_a_form_is_named(form):
    for config in ("plain", None, {}):
        with pytest.raises(ValueError, match=r"config=.* must be a MoEConfig"):
            FORMS[form](random_tokens(3), config)
    for x in (jnp.zeros(()), jnp.zeros((3, 0)), "tokens", None) if form in MODULES else ():
        with pytest.raises(ValueError, match=r"x(=.*)? must be a"):
            FORMS[form](x, PLAIN)
    for name, wrong in ((n, w) for n in ("dtype", "param_dtype") for w in ("bf16", jnp.int32, 3) if form in MODULES):
        with pytest.raises(ValueError, match=rf"^{name}=.*{wrong}.* must be a floating dtype or its name"):
            created(form, PLAIN, **{name: wrong})


def test_there_is_state_only_with_a_selection_bias_and_none_of_the_first_tokens():
    for config, collections in ((PLAIN, {"params"}), (EVERYTHING, {"params", "router_state"})):
        variables = jax.eval_shape(MoE(config).init, jax.random.key(0), random_tokens(30))
        assert set(variables) == collections
    assert not nnx.to_flat_state(nnx.state(blaze_jax.nnx.MoE(WIDTH, PLAIN, rngs=nnx.Rngs(0)), RouterState))


class Scanned(nn.Module):
    """Residual layers in a scan, which recompute themselves in the backward pass or do not."""

    config: MoEConfig
    length: int = 2
    remat: bool = False
    collected: tuple[str, ...] = ("losses",)

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(MoE) if self.remat else MoE
        scanned = nn.scan(
            lambda module, x, _: (x + module(x), None),
            variable_axes=dict.fromkeys(("params", *self.collected), 0),
            split_rngs={"params": True},
            length=self.length,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(layer(self.config, name="moe"), x, None)[0]


def assert_warned_of_once(message: str, call) -> None:
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=message):
        call()
    call()


IN_TRAINING_ONLY = "bias_update_rate applies in training only, and train was left out"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (PLAIN, {}, "collects .* load_balancing_loss: apply with mutable"),
        (EVERYTHING, {"train": True, "mutable": ["losses"]}, r"bias does not move .* mutable=\['router_state'\]"),
        (EVERYTHING, {"mutable": ["losses", "router_state"]}, IN_TRAINING_ONLY),
        (Scanned(PLAIN, collected=()), {"mutable": ["losses"]}, r"in nn.scan also variable_axes=\{'losses': 0\}"),
    ],
    ids=["losses", "router_state", "train", "scan"],
)
@pytest.mark.default_cases("*")
def test_what_nobody_collects_of_linen_is_warned_of(config, options, message):
    module = MoE(config) if isinstance(config, MoEConfig) else config
    variables = jax.eval_shape(module.init, jax.random.key(0), random_tokens(3))
    assert_warned_of_once(
        message, partial(jax.eval_shape, partial(module.apply, **options), variables, random_tokens(3))
    )


def test_what_nobody_collects_of_nnx_is_warned_of():
    x, module = random_tokens(3), nnx_module(random_parameters(EVERYTHING), EVERYTHING)
    for message, run in [
        ("nobody collects .* and z_loss: call the model through nnx.capture", lambda module: module(x, train=True)),
        (IN_TRAINING_ONLY, lambda module: nnx.capture(module, AuxiliaryLoss)(x)),
    ]:
        assert_warned_of_once(message, partial(nnx.eval_shape, run, module))


@pytest.mark.parametrize("form", ["attribute", "static argument"])
def test_rematerialised_training_of_linen(form):
    config, x = CONFIGS["rounded"], random_tokens(30)
    params = {"params": random_parameters(config)}
    layer = (
        partial(nn.remat(MoE)(config, train=True).apply, mutable=["losses"])
        if form == "attribute"
        else lambda params, x: nn.remat(MoE, static_argnums=(2,))(config).apply(params, x, True, mutable=["losses"])
    )
    trained, plain = (jax.jit(partial(MoE(config).apply, train=t, mutable=["losses"])) for t in (True, False))
    (out, sown), (ref, ref_sown) = jax.jit(layer)(params, x), trained(params, x)
    assert_same_bits((out, sown), (ref, ref_sown))
    assert np.any(np.asarray(out) != np.asarray(plain(params, x)[0]))


def test_traced_train_of_linen_is_named():
    params = {"params": random_parameters(PLAIN)}
    with pytest.raises(ValueError, match=r"must be True, False or None, and not traced: under nn\.remat .* MoE"):
        nn.remat(MoE)(PLAIN).apply(params, random_tokens(3), train=True, mutable=["losses"])


@pytest.mark.slow
def test_scanned_and_rematerialised_layers_of_linen():
    x = random_tokens(12)
    variables = jax.jit(Scanned(PLAIN, 3).init)(jax.random.key(0), x)
    assert variables["params"]["moe"]["w_up"].names == ("layers", "expert", "embed", "expert_mlp")
    params = nn.unbox(variables["params"])

    def loss(params, remat):
        y, sown = Scanned(PLAIN, 3, remat).apply({"params": params}, x, mutable=["losses"])
        (balance,) = sown["losses"]["moe"]["load_balancing_loss"]
        chex.assert_shape(balance, (3,))
        return jnp.square(y).mean() + balance.sum()

    def loss_of_loop(params):
        y, balance = x, 0
        for i in range(3):
            own = jax.tree.map(lambda a, i=i: a[i], params["moe"])
            out, routing = moe(y, own, PLAIN)
            y, balance = y + out, balance + 0.01 * routing.load_balancing_loss
        return jnp.square(y).mean() + balance

    reference = jax.jit(jax.value_and_grad(loss_of_loop))(params)
    for remat in (False, True):
        assert_close(jax.jit(jax.value_and_grad(partial(loss, remat=remat)))(params), reference)


def test_importing_all_names_leaves_flax_alone():
    names = {}
    exec("from flax import nnx\nfrom blaze_jax import *", names)
    assert names["nnx"].__name__ == "flax.nnx"
    assert names["MoE"] is MoE


def test_nnx_sows_under_capture_only():
    module, x = nnx_module(random_parameters(EVERYTHING), EVERYTHING), random_tokens(30)
    before = nnx.state(module)
    y = nnx.jit(lambda module, x: module(x, train=False))(module, x)
    chex.assert_trees_all_equal(nnx.state(module), before)
    assert_same_bits(collect(module, x, train=False)[0], y)


def test_nnx_tabulates_layers_that_differ():
    rngs, x = nnx.Rngs(0), random_tokens(3)
    first, second = (blaze_jax.nnx.MoE(WIDTH, PLAIN, rngs=rngs) for _ in range(2))
    assert not np.array_equal(first.w_up[...], second.w_up[...])
    assert "w_router" in nnx.tabulate(first, x)


as_told = nnx.jit(lambda module, x: nnx.capture(module, AuxiliaryLoss)(x)[0])


@pytest.mark.slow
def test_train_as_modules_of_nnx_are_told():
    config, x = CONFIGS["rounded"], random_tokens(30)
    params = random_parameters(config)
    told, module = nnx_module(params, config, train=True), nnx_module(params, config)
    train, plain = (collect(module, x, train=train)[0] for train in (True, False))
    assert np.any(np.asarray(train) != np.asarray(plain))
    assert_same_bits(as_told(told, x), train)
    told.eval()
    assert_same_bits(as_told(told, x), plain)
    module.train()
    assert_same_bits(as_told(module, x), train)
    assert_same_bits(nnx.jit(nnx.remat(lambda module, x: nnx.capture(module, AuxiliaryLoss)(x)[0]))(module, x), train)


@pytest.mark.parametrize("told", [None, True, False])
def test_view_of_nnx_trains_or_evaluates(told):
    x = random_tokens(30)

    class Block(nnx.Module):
        def __init__(self):
            self.moe = nnx_module(random_parameters(EVERYTHING), EVERYTHING, train=told)
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dropout(self.moe(x))

    block = Block()
    evaluates, trains = (nnx.view(block, deterministic=deterministic) for deterministic in (True, False))
    assert (evaluates.moe.deterministic, trains.moe.deterministic) == (True, False)
    assert block.moe.deterministic == (None if told is None else not told)
    assert nnx.view(block, only=nnx.Dropout, deterministic=True).moe.deterministic == block.moe.deterministic
    as_told(evaluates, x)
    assert not block.moe.selection_bias[...].any()
    as_told(trains, x)
    assert trains.moe.selection_bias[...].any()
    trains.eval()
    assert trains.moe.deterministic
    assert "deterministic" in nnx.view_info(block.moe)


class ReturnsLosses(nnx.Module):
    """The layer for `nnx.bridge.to_linen`, which knows no `nnx.capture`."""

    def __init__(self, config, *, rngs):
        self.moe = blaze_jax.nnx.MoE(WIDTH, config, train=True, rngs=rngs)

    def __call__(self, x):
        y, losses = nnx.capture(self.moe, AuxiliaryLoss)(x)
        return y, sum(jax.tree.leaves(losses))


def test_losses_of_nnx_reach_a_linen_model():
    x, params = random_tokens(30), random_parameters(PLAIN)
    y, loss = jax.jit(nnx.bridge.to_linen(ReturnsLosses, PLAIN).apply)({"params": {"moe": params}}, x)
    ref, losses = jax.jit(partial(DOORS["linen"], config=PLAIN))(params, x)
    assert_same_bits((y, loss), (ref, *losses.values()))


def test_train_of_numpy():
    told = blaze_jax.nnx.MoE(WIDTH, PLAIN, train=np.True_, rngs=nnx.Rngs(0))
    assert told.deterministic is False
    assert nnx.eval_shape(lambda module, x: module(x, train=np.False_), told, random_tokens(1)).shape == (1, WIDTH)
    with pytest.raises(ValueError, match="train=1 must be True, False or None"):
        blaze_jax.nnx.MoE(WIDTH, PLAIN, train=1, rngs=nnx.Rngs(0))
