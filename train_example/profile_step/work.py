"""The least that a training step must compute, read and write, part by part, and the least memory it needs.

Counted is the model's own arithmetic, without what is computed again for less memory. A matrix product counts three
times, for its result and the gradients of both factors; attention counts the lower half of the scores, twice forward
and five times backward.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from blaze_jax.benchmark.rates import Work, kernel_work
from blaze_jax.benchmark.sizes import Sizes
from train_example.config import VOCABULARY, TrainConfig

_FLOAT32 = 4


def step_work(config: TrainConfig, num_parameters: int) -> Mapping[str, list[Work]]:
    """The work of each part of a step, one `Work` for what can be one kernel."""
    model, item = config.model, jnp.dtype(config.dtype).itemsize
    tokens, d = config.batch_size * config.sequence_length, model.width
    moe_layers, all_layers = model.num_layers - model.num_dense_layers, model.num_layers
    heads_width = d // model.num_heads * model.num_kv_heads

    def product(inner: int, outer: int) -> list[Work]:
        size = item * (tokens * inner + inner * outer + tokens * outer)
        return [Work(2.0 * tokens * inner * outer, size)] * 3

    def feed_forward(width: int) -> list[Work]:
        return (2 * product(d, width) + product(width, d)) if width else []

    kernels = kernel_work(Sizes(tokens, d, model.expert_width, model.num_experts, model.experts_per_token), item)
    dispatch = [work for name, work in kernels.items() if "dispatch" in name]
    experts = [work for name, work in kernels.items() if "dispatch" not in name]
    scores = Work(0.0, 4.0 * _FLOAT32 * tokens * model.num_experts)
    query, pair = item * tokens * d, item * tokens * heads_width
    forward = Work(2.0 * tokens * config.sequence_length * d, 2 * query + 2 * pair)
    backward = Work(5.0 * tokens * config.sequence_length * d, 4 * query + 4 * pair)
    momentum = jnp.dtype(config.momentum_dtype).itemsize
    return {
        "experts": experts * moe_layers,
        "router and dispatch": [*product(d, model.num_experts), scores, *dispatch] * moe_layers,
        "dense feed-forward": feed_forward(model.shared_width) * moe_layers
        + feed_forward(model.dense_width) * model.num_dense_layers,
        "attention": [forward, backward] * all_layers,
        "projections": (2 * product(d, d) + 2 * product(d, heads_width)) * all_layers,
        # Forward the residual and a branch in, their sum and its norm out; backward as many.
        "norms and residuals": [Work(0.0, 4.0 * query)] * (2 * (2 * all_layers + 1)),
        "embedding, head, loss": 2 * product(d, VOCABULARY) + [Work(0.0, 3.0 * _FLOAT32 * tokens * VOCABULARY)],
        # The gradients are read twice, for their norm and for the update.
        "optimizer": [Work(0.0, float(num_parameters) * (2 * item + 4 * _FLOAT32 + 2 * momentum))],
        "casts and copies": [Work(0.0, float(num_parameters) * (_FLOAT32 + item) if item != _FLOAT32 else 0.0)],
    }


def memory_floor(config: TrainConfig, num_parameters: int) -> Mapping[str, float]:
    """Bytes of the state, and of what the backward pass takes from the forward pass where nothing is computed again.

    The latter are the inputs of all products and norms, queries, keys, values and outputs of attention, and the
    pre-activations of the experts. What lives for a layer only is not counted.
    """
    model, item = config.model, jnp.dtype(config.dtype).itemsize
    tokens, d = config.batch_size * config.sequence_length // config.accumulate, model.width
    copies = 2 * item if item != _FLOAT32 else _FLOAT32  # the working copy and its gradients, or float32 gradients
    accumulated = _FLOAT32 if config.accumulate > 1 else 0
    momentum = jnp.dtype(config.momentum_dtype).itemsize
    keys_and_values = 2 * d // model.num_heads * model.num_kv_heads
    of_every_layer = 6 * d + keys_and_values  # both norms' inputs and outputs, queries, attention's output
    of_moe_layer = 2 * (model.experts_per_token * model.expert_width + model.shared_width)
    of_dense_layer = 3 * model.dense_width  # two pre-activations and the activation
    moe_layers = model.num_layers - model.num_dense_layers
    values = model.num_layers * of_every_layer + moe_layers * of_moe_layer + model.num_dense_layers * of_dense_layer
    if config.remat != "none":
        values = model.num_layers * d  # the blocks' inputs
    if config.remat == "except-experts":
        values += moe_layers * 2 * model.experts_per_token * model.expert_width
    return {
        "float32 parameters": float(num_parameters) * _FLOAT32,
        "optimizer's moments": float(num_parameters) * (_FLOAT32 + momentum),
        "working copy and gradients": float(num_parameters) * (copies + accumulated),
        "kept for the backward pass": float(item) * tokens * values,
    }
