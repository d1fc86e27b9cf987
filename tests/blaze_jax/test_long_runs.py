"""What many calls leave behind: memory mappings, threads, open files and memory of the process do not grow."""

import gc
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from blaze_jax import MoE, moe
from tests.layers import CONFIGS, random_parameters, random_tokens

CONFIG = CONFIGS["everything"]


def resources() -> dict[str, int]:
    gc.collect()
    proc = Path("/proc/self")
    pages = int((proc / "statm").read_text().split()[1])
    return {
        "mappings": len((proc / "maps").read_text().splitlines()),
        "threads": threading.active_count(),
        "open files": len(os.listdir(proc / "fd")),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


MOST = {"mappings": 16, "threads": 0, "open files": 0, "memory": 16 * 2**20}
"""How much each may grow: the allocator asks for a little more now and then."""


def eager_call(params, x, _):
    def loss(params):
        bias = jnp.zeros(CONFIG.num_experts)
        y, routing = moe(x, params, CONFIG, selection_bias=bias, train=True)
        return jnp.square(y).sum() + sum(routing.weighted_losses.values())

    return jax.grad(loss)(params)


OPTIMIZER = optax.sgd(1e-3)


@jax.jit
def step(params, x, state):
    def loss(params):
        variables = {"params": params, "router_state": {"selection_bias": jnp.zeros(CONFIG.num_experts)}}
        module = MoE(CONFIG, use_bias=True)
        y, sown = module.apply(variables, x, train=True, mutable=["losses", "router_state"])
        return jnp.square(y).mean() + sum(jax.tree.leaves(sown["losses"]))

    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


def training_step(params, x, state):
    params, state = step(params, x, state)
    return params


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.ci_cases("training_step-50-2000")
@pytest.mark.parametrize(("call", "warm", "calls"), [(eager_call, 5, 50), (training_step, 50, 2000)])
def test_nothing_grows(call, warm, calls):
    params, x = random_parameters(CONFIG, use_bias=True), random_tokens(16)
    state = OPTIMIZER.init(params)
    for _ in range(warm):
        jax.block_until_ready(call(params, x, state))
    before = resources()
    for _ in range(calls):
        jax.block_until_ready(call(params, x, state))
    grown = {name: after - before[name] for name, after in resources().items()}
    assert all(grown[name] <= most for name, most in MOST.items()), grown
