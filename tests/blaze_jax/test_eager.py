"""Calls without `jax.jit`: what the first one compiled serves the next, and stays in step with what it looked at."""

import logging
import time
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

import blaze_jax
from blaze_jax import Activation, MoE, MoEConfig, Parallelism, build_dispatch, expert_ffn, init, moe, route
from blaze_jax.implementation import demanded_family
from blaze_jax.layer_observer import observed_layers

CONFIG = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, shared_width=8, z_loss_weight=0.1)
WIDTH = 16
MAPS = Path("/proc/self/maps")


def problem(config=CONFIG):
    x = jax.random.normal(jax.random.key(0), (8, 2, WIDTH))
    return x, init(jax.random.key(1), config, WIDTH)


def loss_of(x, params, **options):
    y, routing = moe(x, params, CONFIG, train=True, **options)
    return (y**2).sum() + sum(routing.weighted_losses.values())


def functional(**options):
    x, params = problem()
    return partial(moe, x, params, CONFIG, **options), partial(jax.grad(partial(loss_of, **options), (0, 1)), x, params)


def of_experts():
    x, p = problem()
    routing = route(x.reshape(-1, WIDTH) @ p["w_router"], 2)
    weights = (p["w_gate"], p["w_up"], p["w_down"])

    def run(x, weights):
        return expert_ffn(x.reshape(-1, WIDTH), *weights, routing.weights, routing.experts)

    return partial(run, x, weights), partial(jax.grad(lambda *a: (run(*a) ** 2).sum(), (0, 1)), x, weights)


def of_routing():
    logits = jax.random.normal(jax.random.key(0), (16, 8))

    def run(logits):
        routing = route(logits, 2)
        build_dispatch(routing.experts, 8)
        return routing

    return partial(run, logits), partial(jax.grad(lambda logits: run(logits).weights[:, 0].sum()), logits)


def linen():
    x, _ = problem()
    layer = MoE(CONFIG)
    params = nn.unbox(layer.init(jax.random.key(0), x))["params"]

    def loss(params):
        y, sown = layer.apply({"params": params}, x, train=True, mutable=["losses"])
        return (y**2).sum() + sum(map(jnp.sum, jax.tree.leaves(sown)))

    return partial(layer.apply, {"params": params}, x, train=False), partial(jax.grad(loss), params)


def of_nnx():
    x, _ = problem()
    layer = blaze_jax.nnx.MoE(WIDTH, CONFIG, rngs=nnx.Rngs(0))
    return partial(layer, x, train=False), partial(nnx.grad(lambda layer: (layer(x, train=False) ** 2).sum()), layer)


def other_experts():
    return functional(experts=partial(expert_ffn))


def batched():
    x, params = problem()
    forward = jax.vmap(lambda x: moe(x, params, CONFIG)[0])
    return partial(forward, x), partial(jax.grad(lambda x: (forward(x) ** 2).sum()), x)


def rematerialised():
    x, params = problem()
    run = jax.checkpoint(loss_of)
    return partial(run, x, params), partial(jax.grad(run, (0, 1)), x, params)


def over_mesh(kind, roles):
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    x, params = problem()
    place = partial(jax.device_put, device=NamedSharding(mesh, P()))
    x, params = jax.device_put(x, NamedSharding(mesh, P("data"))), jax.tree.map(place, params)
    options = {"parallel": Parallelism(mesh, **roles)} if roles else {}

    gradient = jax.grad(partial(loss_of, **options), (0, 1))

    def with_mesh():  # without it, jax itself cannot seed a gradient on an explicit mesh
        with jax.set_mesh(mesh):
            return gradient(x, params)

    explicit = kind == AxisType.Explicit
    return partial(moe, x, params, CONFIG, **options), with_mesh if explicit else partial(gradient, x, params)


CALLS = {
    "moe": functional,
    "expert_ffn": of_experts,
    "route": of_routing,
    "linen": linen,
    "nnx": of_nnx,
    "other_experts": other_experts,
    "vmap": batched,
    "checkpoint": rematerialised,
    "automatic_mesh": partial(over_mesh, AxisType.Auto, {}),
    "explicit_mesh": partial(over_mesh, AxisType.Explicit, {}),
    "parallel": partial(over_mesh, AxisType.Auto, {"data": "data", "expert": "expert"}),
    "parallel_explicit": partial(over_mesh, AxisType.Explicit, {"data": "data", "expert": "expert"}),
}


@pytest.fixture
def compiled(caplog):
    """How many programs were compiled since the last call of this."""
    jax.config.update("jax_log_compiles", True)
    caplog.set_level(logging.WARNING, "jax")

    def count():
        programs = [record for record in caplog.messages if record.startswith("Compiling ")]
        caplog.clear()
        return len(programs)

    jax.jit(lambda x: -x)(1.0)
    assert count() == 1
    yield count
    jax.config.update("jax_log_compiles", False)


@pytest.mark.default_cases("moe", "route", "linen", "nnx", "other_experts", "parallel_explicit")
@pytest.mark.parametrize("name", CALLS)
def test_only_the_first_call_compiles(name, compiled):
    for call in CALLS[name]():
        first = call()  # which another test may have compiled
        compiled()
        again = call()
        assert not compiled()
        jax.tree.map(np.testing.assert_array_equal, first, again)


def seconds(call):
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


@pytest.mark.default_cases("nnx", "expert_ffn", "linen")
@pytest.mark.parametrize("name", ["moe", "nnx", "linen", "expert_ffn", "parallel"])
def test_takes_ten_jitted_calls_and_ten_milliseconds_at_most(name):
    for call in CALLS[name]():
        jitted = call if name == "nnx" else jax.jit(call)  # whose gradient takes a module
        call(), jitted()
        best = best_jitted = float("inf")
        for _ in range(100):  # on a busy machine, the best of many
            best, best_jitted = min(best, seconds(call)), min(best_jitted, seconds(jitted))
            if best <= 10 * best_jitted + 10e-3:
                break
        assert best <= 10 * best_jitted + 10e-3


@pytest.mark.skipif(not MAPS.exists(), reason="counts memory mappings as Linux tells them")
def test_thousands_of_calls_keep_nothing():
    forward, gradient = functional()
    forward(), gradient()
    before = len(MAPS.read_bytes().splitlines())
    for _ in range(2000):
        y, _ = forward()
    for _ in range(50):
        dx, _ = gradient()
    jax.block_until_ready((y, dx))
    assert len(MAPS.read_bytes().splitlines()) <= before + 20  # of other threads, whose memory comes and goes


def test_a_closed_over_array_of_other_experts_is_not_kept():
    """Other experts are not compiled by the layer: what they close over may change."""
    x, params = problem()
    factors = [jnp.float32(1)]

    def experts(x, *arguments, **options):
        return factors[0] * expert_ffn(x, *arguments, **options)

    config = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8)
    params = {name: params[name] for name in config.parameters(WIDTH)}
    once, _ = moe(x, params, config, experts=experts)
    factors[0] = jnp.float32(3)
    thrice, _ = moe(x, params, config, experts=experts)
    np.testing.assert_array_equal(np.asarray(thrice), 3 * np.asarray(once))


def test_an_equal_activation_serves_again_and_another_does_not(compiled):
    x, params = problem()

    def run(function):
        return moe(x, params, MoEConfig(**{**vars(CONFIG), "activation": Activation("mine", function, gated=True)}))[0]

    def product(gate, up):
        return gate * up

    first = run(product)
    compiled()
    np.testing.assert_array_equal(run(product), first)
    assert not compiled()
    assert (np.asarray(run(lambda gate, up: gate * up + 1)) != np.asarray(first)).any()


def test_observers_are_told_of_every_call():
    x, params = problem()
    moe(x, params, CONFIG)
    with observed_layers() as seen:
        moe(x, params, CONFIG)
        moe(x, params, CONFIG)
    assert len(seen) == 2


def test_what_is_demanded_around_a_call_counts():
    """The kernels demanded are no argument, but a program with others is another one."""
    x, params = problem()
    logits = jnp.zeros((16, 4))
    texts = []
    for family in ("hopper", "ampere"):
        with demanded_family(family):
            call = partial(expert_ffn, implementation="mosaic_gpu")
            bfloat16 = [
                a.astype(jnp.bfloat16)
                for a in (x.reshape(-1, WIDTH), *(params[f"w_{n}"] for n in ("gate", "up", "down")))
            ]
            routing = route(logits, 2)
            texts.append(str(jax.make_jaxpr(call)(*bfloat16, routing.weights, routing.experts)))
    assert texts[0] != texts[1]
