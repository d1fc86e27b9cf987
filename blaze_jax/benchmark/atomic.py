"""The forms in which experts of one neuron are computed, against each other: where they cross."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp

from blaze_jax.activations import get_activation
from blaze_jax.atomic_experts import AtomicConfig, atomic_moe, best_pairs, init
from blaze_jax.atomic_forms import Form, choose_form, compute_pairs, computed_pairs
from blaze_jax.benchmark.compiling import compile_together
from blaze_jax.benchmark.results import Record, head
from blaze_jax.benchmark.sizes import Sizes, forward_and_backward
from blaze_jax.benchmark.timing import time_calls, wall_times

WHOLE_LAYER = "whole layer"
"""The router, and the form that the layer chooses."""

MOST_OPERATIONS = 1e15
"""A form that takes more is not timed: seconds on a GPU."""


def measure_atomic(sizes: Sizes, dtype, *, repeats: int, implementation=None) -> Record:
    """Times forward+backward of experts of one neuron (n = 1) in each of their forms, and with their router.

    "in_products" of the gathered form is how many pairs the grouped form computes while one is gathered, which is what
    `atomic_forms.PAIRS_OF_A_GATHER` is to be; `DENSE_EXPERTS` is the largest E for which "dense" is the fastest.
    """
    tokens, d, width, num_experts, slots = sizes
    if width != 1:
        raise ValueError(f"{sizes} has experts of width n={width}, must be of one neuron, n=1")
    config = AtomicConfig(num_experts=num_experts, experts_per_token=slots, implementation=implementation)
    keys = jax.random.split(jax.random.key(0), 4)
    params = jax.jit(partial(init, config=config, width=d, dtype=dtype))(keys[0])
    x = jax.random.normal(keys[1], (tokens, d), jnp.float32).astype(dtype)
    rows, columns = (jax.nn.log_softmax(jax.random.normal(key, (tokens, config.grid_side))) for key in keys[2:])

    @jax.jit
    def routed(rows, columns):
        row, column = best_pairs(rows, columns, slots)
        weights = jnp.exp(jnp.take_along_axis(rows, row, 1) + jnp.take_along_axis(columns, column, 1))
        return weights, row * config.grid_side + column

    arguments = x, params["w_up"], params["w_down"], *routed(rows, columns)
    options = {"activation": get_activation(config.activation).function, "implementation": implementation}
    calls = {}
    for form in get_args(Form):
        if 12 * tokens * d * computed_pairs(form, num_experts, slots) < MOST_OPERATIONS:
            run = forward_and_backward(partial(compute_pairs, form=form, **options))
            calls[form] = partial(run, *arguments, x)

    def layer(x, params):
        return atomic_moe(x, params, config.batch_statistics(), config, train=True)[0]

    calls[WHOLE_LAYER] = partial(forward_and_backward(layer), x, params, x)
    lowered = {name: jax.jit(call.func).lower(*call.args) for name, call in calls.items()}
    calls = {name: partial(run, *calls[name].args) for name, run in compile_together(lowered).items()}
    timings, walls = time_calls(calls, repeats=repeats), wall_times(calls, repeats=repeats)
    rows_of_table = {}
    for name, timing in timings.items():
        wall_us = walls[name].us
        rows_of_table[name] = {**timing.record(), "wall_us": wall_us, "ns_per_pair": 1e3 * wall_us / sizes.pairs}
    if {"grouped", "gathered"} <= rows_of_table.keys():
        computed = computed_pairs("grouped", num_experts, slots)
        ratio = walls["gathered"].us / walls["grouped"].us
        rows_of_table["gathered"]["in_products"] = ratio * computed / slots
    chosen = choose_form(num_experts, slots)
    return head("atomic", sizes, dtype) | {"chosen": chosen, "forms": rows_of_table}
