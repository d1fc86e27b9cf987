"""The router's jitter: what it does to the logits, where its random numbers come from, and that all devices agree."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType

from blaze_jax import MoE, MoEConfig, Parallelism, Router, moe
from blaze_jax.router_product import router_logits
from tests.layers import nnx_module, random_parameters, random_tokens
from tests.numerics import assert_close, assert_same_bits
from tests.over_devices import make_mesh, put

JITTER = 0.3
CONFIG = MoEConfig(num_experts=6, experts_per_token=2, expert_width=8, router=Router(jitter=JITTER), z_loss_weight=0.1)
PLAIN = replace(CONFIG, router=Router())
KEY = jax.random.key(7)
PARAMS, X = random_parameters(CONFIG), random_tokens(32)


@partial(jax.jit, static_argnums=2, static_argnames="train")
def layer(params, x, config, key=None, train=True):
    return moe(x, params, config, key=key, train=train)


def test_logits_are_those_of_tokens_times_uniform_numbers():
    """The factors are seen one by one through a router that is the identity."""
    with jax.enable_x64(True):
        x = jnp.ones((500, 8), jnp.float64)
        seeds = jax.random.bits(KEY, (500, 2), jnp.uint32)
        factors = router_logits(x, {"w_router": jnp.eye(8)}, seeds, jitter=JITTER)
        assert factors.dtype == jnp.float64
        tokens, w_router = random_tokens(500, dtype="float64")[:, :8], random_tokens(6, dtype="float64")[:, :8].T

        def total(logits, x, w):
            return jnp.sin(logits(x, w)).sum()

        run = partial(lambda x, w: router_logits(x, {"w_router": w}, seeds, jitter=JITTER))
        out = jax.value_and_grad(partial(total, run), (0, 1))(tokens, w_router)
        ref = jax.value_and_grad(partial(total, lambda x, w: (x * factors) @ w), (0, 1))(tokens, w_router)
    assert_close(out, ref)
    factors = np.asarray(factors)
    assert 1 - JITTER <= factors.min() < 1 - 0.9 * JITTER
    assert 1 + 0.9 * JITTER < factors.max() <= 1 + JITTER
    assert abs(factors.mean() - 1) < 0.02
    assert abs(factors.std() - JITTER / np.sqrt(3)) < 0.01
    assert np.unique(factors).size == factors.size


@pytest.mark.slow
def test_it_serves_training_only_and_follows_the_key():
    y, routing = layer(PARAMS, X, CONFIG, KEY)
    assert_same_bits((y, routing), layer(PARAMS, X, CONFIG, KEY))
    assert_same_bits(layer(PARAMS, X, CONFIG, train=False), layer(PARAMS, X, PLAIN, train=False))
    for other in (layer(PARAMS, X, CONFIG, jax.random.key(8)), layer(PARAMS, X, PLAIN)):
        assert (np.asarray(other[1].weights) != np.asarray(routing.weights)).any(1).mean() > 0.9
    assert_same_bits(layer(PARAMS, X, CONFIG, jax.random.PRNGKey(7)), (y, routing))


def test_the_product_on_gpus_sees_the_same_tokens():
    x, seeds = random_tokens(64, dtype="bfloat16"), jax.random.bits(KEY, (64, 2), jnp.uint32)

    def total(x, w_router, split):
        return jnp.sin(router_logits(x, {"w_router": w_router}, seeds, split=split, jitter=JITTER)).sum()

    out, ref = (jax.value_and_grad(total, (0, 1))(x, PARAMS["w_router"], split) for split in (True, False))
    assert_close(out, ref)


@pytest.mark.parametrize("key", [None, 3, jnp.zeros(2), jax.random.split(KEY)], ids=str)
@pytest.mark.default_cases("*")
def test_a_missing_key_is_named(key):
    with pytest.raises(ValueError, match=r"key=.* must be a key of jax.random, because Router"):
        moe(X, PARAMS, CONFIG, key=key, train=True)


@pytest.mark.slow
def test_linen_takes_it_from_a_stream():
    model, variables = MoE(CONFIG, train=True), {"params": PARAMS}
    apply = jax.jit(partial(model.apply, mutable=["losses"]))
    (y, _), (again, _), (other, _) = (apply(variables, X, rngs={"jitter": jax.random.key(seed)}) for seed in (0, 0, 1))
    assert_same_bits(y, again)
    assert (np.asarray(y) != np.asarray(other)).any(1).all()
    with pytest.raises(Exception, match="jitter"):
        model.apply(variables, X, mutable=["losses"])
    assert_close(model.apply(variables, X, train=False), layer(PARAMS, X, PLAIN, train=False)[0])


@pytest.mark.slow
def test_linen_gives_each_repetition_its_own_numbers_in_a_scan():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = nn.remat(MoE)
            scanned = nn.scan(
                lambda block, x, _: (block(x), block(x)),
                variable_broadcast="params",
                variable_axes={"losses": 0, "intermediates": 0},
                split_rngs={"params": False, "jitter": True},
                length=2,
            )
            return scanned(block(CONFIG, train=True), x, None)[1]

    stacked = {"params": {"CheckpointMoE_0": PARAMS}}

    def loss(variables):
        first, second = Stack().apply(variables, jnp.zeros_like(X) + X, mutable=["losses"], rngs={"jitter": KEY})[0]
        return jnp.square(first).sum() + jnp.square(second).sum()

    gradients = jax.jit(jax.grad(loss))(stacked)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_nnx_keeps_a_stream():
    config = replace(CONFIG, load_balancing_weight=0, z_loss_weight=0)
    module, twin = (nnx_module(PARAMS, config, train=True) for _ in range(2))
    call = nnx.jit(lambda module, x: module(x))
    first, second = call(module, X), call(module, X)
    assert (np.asarray(first) != np.asarray(second)).any(1).all()
    assert_same_bits(first, call(twin, X))
    gradient = nnx.jit(nnx.grad(lambda module: nnx.remat(lambda m, x: m(x))(module, X).sum()))(module)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    module.eval()
    assert_close(call(module, X), layer(PARAMS, X, PLAIN, train=False)[0])
    assert not any("rngs" in map(str, path) for path, _ in nnx.to_flat_state(nnx.state(nnx_module(PARAMS, PLAIN))))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["automatic", "explicit", "parallel", "axis_name", "parallel inside"])
@pytest.mark.ci_cases("explicit")
def test_over_a_mesh_each_token_has_the_numbers_of_one_device(way):
    axes = {"data": 4} if way in ("automatic", "explicit", "axis_name") else {"fsdp": 2, "expert": 2}
    mesh = make_mesh(axes, AxisType.Explicit if way == "explicit" else AxisType.Auto)
    parallel = Parallelism(fsdp="fsdp", expert="expert") if "parallel" in way else None
    config = replace(CONFIG, num_experts=8)
    params, x = random_parameters(config), X if "inside" in way or way == "axis_name" else X[:30]

    def run(params, x):
        name = "data" if way == "axis_name" else None
        return moe(x, params, config, key=KEY, train=True, parallel=parallel, axis_name=name)[0]

    step = run
    if "inside" in way or way == "axis_name":
        spec = P(tuple(axes))
        specs = parallel.specs(config, x.shape[1], sizes=axes) if parallel else P()
        step = jax.shard_map(run, mesh=mesh, in_specs=(specs, spec), out_specs=spec)
    with jax.set_mesh(mesh):
        x_there = (
            put(x, P("data") if way == "automatic" else P(), mesh) if way != "automatic" else put(X, P("data"), mesh)
        )
        out = jax.jit(step)(put(params, P(), mesh), x_there)
    assert_close(np.asarray(out), np.asarray(layer(params, X if way == "automatic" else x, config, KEY)[0]))
