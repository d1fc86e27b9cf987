"""The model of a configuration, with the experts' layer that it names; its first state; and the memory a step takes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blaze_jax import Parallelism, expert_ffn
from blaze_jax.benchmark.memory import MemoryPlan, plan_of
from blaze_jax.benchmark.peers import UnavailableError, sorted_layer, tokamax_ragged_dot
from pallas_kernels.compile_only import compile_for_gpu
from train_example.compile_step import jit_once
from train_example.config import ExpertsLayer, TrainConfig, UserError
from train_example.model import Decoder
from train_example.program.devices import state_shardings
from train_example.program.layerwise import Layerwise
from train_example.public_models.weights import load_params
from train_example.step import TrainState, init_state, make_optimizer, make_train_step

_H200_BYTES = 141 * 10**9


def make_model(config: TrainConfig, parallel: Parallelism | None = None) -> Decoder:
    """The model of a run.

    Raises:
      UserError: its layer of experts is not installed, or not for a mesh.
    """
    if parallel is not None and config.experts_layer.startswith("sort"):
        raise UserError(f"--experts-layer {config.experts_layer} runs on one device: leave --mesh out")
    moe = config.model.moe(save=config.save, precision=config.precision, implementation=config.implementation)
    if parallel is not None and config.optimizer == "adam8":
        raise UserError("--optimizer adam8 runs on one device: leave --mesh out")
    return Decoder(
        config.model,
        moe,
        jnp.dtype(config.dtype),
        remat=config.remat,
        experts=experts_function(config.experts_layer),
        attention=config.attention,
        unroll=config.unroll or config.optimizer == "adam8",
        parallel=parallel,
        dense_twin=moe.dense_twin(config.model.width) if config.experts_layer == "dense-twin" else None,
    )


def generating_model(config: TrainConfig) -> Decoder:
    """The model of a run on one device, to generate with.

    Conventional experts know no padding; this library's take the same parameters.
    """
    conventional = config.experts_layer.startswith("sort")
    return make_model(replace(config, experts_layer="blaze_jax") if conventional else config)


def experts_function(experts_layer: ExpertsLayer) -> Callable[..., Array]:
    """The function that `blaze_jax.MoE` calls for its experts.

    The conventional ones are SwiGLU without biases, for tokens whose slots are all in use.

    Raises:
      UserError: it is not installed.
    """
    if experts_layer in ("blaze_jax", "dense-twin"):
        return expert_ffn
    try:
        layer = sorted_layer(jax.lax.ragged_dot if experts_layer == "sort+ragged_dot" else tokamax_ragged_dot())
    except UnavailableError as error:
        raise UserError(f"--experts-layer {experts_layer} cannot run: {error}") from error

    def experts(x, w_gate, w_up, w_down, weights, experts, *, activation, b_gate, b_up, b_down, **options):
        if activation != "swiglu" or not (b_gate is b_up is b_down is None):
            raise ValueError(f"experts_layer={experts_layer!r} has no {activation=} or biases, only swiglu")
        return layer(x, *(w.astype(x.dtype) for w in (w_gate, w_up, w_down)), weights, experts)

    return experts


def first_state(config: TrainConfig, model: Decoder, restored: Callable[[TrainState], TrainState] | None) -> TrainState:
    """The state to go on from: `restored(like)`, the public model's, or a fresh one, split as the mesh has it."""
    init, like = partial(init_state, config, model), state_shapes(config, model)
    shardings = state_shardings(model.parallel, like, model.moe, config.model.width)
    if restored is not None:
        if shardings is not None:
            like = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, shardings)
        return restored(like)
    if config.optimizer == "adam8":
        layerwise = Layerwise(config, model)
        if config.checkpoint:
            return layerwise.begin(load_params(config.checkpoint, model, dtype=config.dtype), {}, jit_once)
        return layerwise.init(jit_once)
    if config.checkpoint:
        params = load_params(config.checkpoint, model, shardings and shardings.params)
        make_moments = jit_once(make_optimizer(config).init, shardings and shardings.optimizer_state)
        step = jax.device_put(jnp.int32(0), shardings and shardings.step)
        return TrainState(step, params, {}, make_moments(params))
    return jit_once(init, shardings)()


def state_shapes(config: TrainConfig, model: Decoder) -> Any:
    """The shapes and dtypes of a training state."""
    return jax.eval_shape(
        Layerwise(config, model).init if config.optimizer == "adam8" else partial(init_state, config, model)
    )


def memory_plan(config: TrainConfig) -> str:
    """The memory that a step needs on an H200, in a line, by the compiler's own plan: with no GPU, and no weights.

    The attention is XLA's, which keeps its scores: cuDNN's can be compiled on a GPU only, and needs less.

    Raises:
      UserError: the compiler for an H200 is not installed.
    """
    model = make_model(replace(config, implementation=config.implementation or "mosaic_gpu", attention="xla"))
    microbatches = (config.accumulate, config.batch_size // config.accumulate, config.sequence_length + 1)
    batch = jax.ShapeDtypeStruct(microbatches, np.int32)

    def planned(function: Callable, *arguments: Any, donated: tuple[int, ...] = (0,)) -> MemoryPlan | None:
        return plan_of(compile_for_gpu(function, *arguments, donate_argnums=donated).memory)

    try:
        if config.optimizer == "adam8":
            plan = Layerwise(config, model).plan(batch, planned)
        else:
            plan = planned(make_train_step(config, model), state_shapes(config, model), batch)
    except NotImplementedError as error:
        raise UserError(f"--compile-only h200: {error}") from error
    if plan is None:
        raise UserError("--compile-only h200: this version of jax's plugin says nothing of the memory")
    fits = "fits on one" if plan.total <= _H200_BYTES else f"takes {-(-plan.total // _H200_BYTES)} or more"
    return (
        f"{config.batch_size} × {config.sequence_length} tokens a step, trained: {config.trained}: "
        f"{plan.total / 1e9:.0f} GB, of which state and batch {plan.arguments / 1e9:.0f} GB; {fits} H200"
    )
