"""Calls without `jax.jit`: what the first one compiled serves the next, and stays in step with what it looked at."""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding

from blaze_jax import Activation, MoE, MoEConfig, Parallelism, build_dispatch, expert_ffn, moe, route
from blaze_jax.implementation import demanded_family
from blaze_jax.layer_observer import observed_layers
from tests.expert_problems import apply, make_problem
from tests.layers import nnx_module, random_parameters, random_tokens
from tests.over_devices import make_mesh
from tests.routings import random_experts

CONFIG = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, shared_width=8, z_loss_weight=0.1)
X, PARAMS = random_tokens(8, 2), random_parameters(CONFIG)
EXPERTS = make_problem(random_experts(16, 2, range(4)), 4, d=16, n=8)
MAPS = Path("/proc/self/maps")


def layer(arguments, **options):
    y, routing = moe(*arguments, CONFIG, train=True, **options)
    return y, routing.weighted_losses


def of_experts(arguments):
    return apply(expert_ffn, *arguments, EXPERTS.experts)


def of_routing(logits):
    routing = route(logits, 2)
    build_dispatch(routing.experts, 10)
    return routing.weights, routing.z_loss


def linen(params):
    return MoE(CONFIG).apply({"params": params}, X, train=True, mutable=["losses"])


def over_mesh(kind, **roles):
    mesh = make_mesh({"data": 2, "expert": 2}, kind)
    placed = jax.device_put((X, PARAMS), (NamedSharding(mesh, P("data")), NamedSharding(mesh, P())))
    return partial(layer, parallel=Parallelism(mesh, **roles) if roles else None), placed


ROLES = {"data": "data", "expert": "expert"}
CALLS = {
    "moe": lambda: (layer, (X, PARAMS)),
    "expert_ffn": lambda: (of_experts, EXPERTS[:3]),
    "route": lambda: (of_routing, X.reshape(-1, X.shape[-1])),
    "linen": lambda: (linen, PARAMS),
    "nnx": lambda: (lambda module: module(X, train=False), nnx_module(PARAMS, CONFIG)),
    "other_experts": lambda: (partial(layer, experts=partial(expert_ffn)), (X, PARAMS)),
    "vmap": lambda: (jax.vmap(lambda x: layer((x, PARAMS))), X),
    "checkpoint": lambda: (jax.checkpoint(layer), (X, PARAMS)),
    "automatic_mesh": partial(over_mesh, AxisType.Auto),
    "explicit_mesh": partial(over_mesh, AxisType.Explicit),
    "parallel": partial(over_mesh, AxisType.Auto, **ROLES),
    "parallel_explicit": partial(over_mesh, AxisType.Explicit, **ROLES),
}


def calls(name) -> list:
    """The function, and its gradient to all that it is given."""
    run, argument = CALLS[name]()
    differentiate = nnx.grad if name == "nnx" else jax.grad
    gradient = differentiate(lambda argument: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(run(argument))))

    def with_mesh():  # without it, jax itself cannot seed a gradient on an explicit mesh
        with jax.set_mesh(argument[0].sharding.mesh):
            return gradient(argument)

    return [partial(run, argument), with_mesh if "explicit" in name else partial(gradient, argument)]


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


@pytest.mark.slow
@pytest.mark.ci_cases("route", "linen", "nnx", "other_experts", "parallel_explicit")
@pytest.mark.parametrize("name", CALLS)
def test_only_the_first_call_compiles(name, compiled):
    for call in calls(name):
        first = call()  # which another test may have compiled
        compiled()
        again = call()
        assert not compiled()
        jax.tree.map(np.testing.assert_array_equal, first, again)


def seconds(call):
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def plain_gradient():
    """The least that jax itself differentiates, which says how fast this machine is."""
    return jax.grad(lambda x: jnp.square(x).sum())(X)


@pytest.mark.default_cases("linen")
@pytest.mark.ci_cases("nnx")
@pytest.mark.parametrize("name", ["moe", "nnx", "linen", "expert_ffn", "parallel"])
def test_takes_ten_jitted_calls_and_twelve_plain_gradients_at_most(name):
    for call in calls(name):
        jitted = call if name == "nnx" else jax.jit(call)  # whose gradient takes a module
        timed = [call, jitted, plain_gradient]
        best = [float("inf")] * 3
        for function in timed:
            function()
        for _ in range(100):  # on a busy machine, the best of many
            best = [min(so_far, seconds(function)) for so_far, function in zip(best, timed, strict=True)]
            if best[0] <= 10 * best[1] + 12 * best[2]:
                break
        assert best[0] <= 10 * best[1] + 12 * best[2], best


@pytest.mark.slow
@pytest.mark.skipif(not MAPS.exists(), reason="counts memory mappings as Linux tells them")
def test_thousands_of_calls_keep_nothing():
    forward, gradient = calls("moe")
    forward(), gradient()
    before = len(MAPS.read_bytes().splitlines())
    for call, times in ((forward, 2000), (gradient, 50)):
        for _ in range(times):
            last = call()
        jax.block_until_ready(last)
    assert len(MAPS.read_bytes().splitlines()) <= before + 20  # of other threads, whose memory comes and goes


def test_a_closed_over_array_of_other_experts_is_not_kept():
    """Other experts are not compiled by the layer: what they close over may change."""
    config = MoEConfig(num_experts=4, experts_per_token=2, expert_width=8)
    params, factors = random_parameters(config), [jnp.float32(1)]

    def experts(x, *arguments, **options):
        return factors[0] * expert_ffn(x, *arguments, **options)

    once, _ = moe(X, params, config, experts=experts)
    factors[0] = jnp.float32(3)
    thrice, _ = moe(X, params, config, experts=experts)
    np.testing.assert_array_equal(np.asarray(thrice), 3 * np.asarray(once))


def test_an_equal_activation_serves_again_and_another_does_not(compiled):
    def run(function):
        return moe(X, PARAMS, replace(CONFIG, activation=Activation("mine", function, gated=True)))[0]

    def product(gate, up):
        return gate * up

    first = run(product)
    compiled()
    np.testing.assert_array_equal(run(product), first)
    assert not compiled()
    assert (np.asarray(run(lambda gate, up: gate * up + 1)) != np.asarray(first)).any()


def test_observers_are_told_of_every_call():
    moe(X, PARAMS, CONFIG)
    with observed_layers() as seen:
        moe(X, PARAMS, CONFIG)
        moe(X, PARAMS, CONFIG)
    assert len(seen) == 2


def test_what_is_demanded_around_a_call_counts():
    """The kernels demanded are no argument, but a program with others is another one."""
    arguments, texts = EXPERTS.cast("bfloat16")[:4], set()
    for family in ("hopper", "ampere"):
        call = partial(apply, expert_ffn, implementation="mosaic_gpu")  # which jax has not traced
        with demanded_family(family):
            texts.add(str(jax.make_jaxpr(call)(*arguments)))
    assert len(texts) == 2
