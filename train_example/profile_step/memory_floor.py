"""The least memory that a training step needs, by what it holds."""

from collections.abc import Mapping

import jax.numpy as jnp

from train_example.config import TrainConfig

_FLOAT32 = 4


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
