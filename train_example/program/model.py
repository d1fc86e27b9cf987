"""The model of a configuration, with the experts' layer that it names; its first state; and the memory a step takes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Array

from blaze_jax import LoRA, Parallelism, expert_ffn
from blaze_jax.benchmark.memory import MemoryPlan, plan_of
from blaze_jax.benchmark.peers import UnavailableError, sorted_layer, tokamax_ragged_dot
from blaze_jax.implementation import demanded_family
from blaze_jax.quantized import Form
from pallas_kernels.compile_only import compile_for_gpu
from pallas_kernels.compile_only.gpus import GPUS
from train_example.config import Base, ExpertsLayer, TrainConfig, UserError
from train_example.model import Decoder
from train_example.program.adapters import load_adapters, parse_adapter
from train_example.program.devices import state_shardings
from train_example.program.host_embedding import with_host_embedding
from train_example.program.jit_once import jit_once
from train_example.program.layerwise import Layerwise, trains_by_blocks
from train_example.public_models.adapted import AdaptedProjection
from train_example.public_models.gpt_oss import decoder_class
from train_example.public_models.weights import load_params, params_like, random_params
from train_example.step import TrainState, Tree, init_state, make_optimizer, make_train_step

GPU_BYTES = {
    name: gigabytes * 10**9 for name, gigabytes in {"h200": 141, "h100": 80, "a100": 80, "rtx4090": 24}.items()
}


def make_model(config: TrainConfig, parallel: Parallelism | None = None) -> Decoder:
    """The model of a run.

    Raises:
      UserError: its layer of experts is not installed, or not for a mesh.
    """
    if parallel is not None and config.experts_layer.startswith("sort"):
        raise UserError(f"--experts-layer {config.experts_layer} runs on one device: leave --mesh out")
    for option, given in (
        ("--adapter", config.adapter is not None),
        ("--optimizer adam8", trains_by_blocks(config)),
    ):
        if parallel is not None and given:
            raise UserError(f"{option} trains on one device: leave --mesh out")
    if config.adapter is not None:
        adapter, adapted = parse_adapter(config.adapter)
        if config.optimizer == "adam8":
            adapter = replace(adapter, dtype=jnp.dtype(config.dtype))
    else:  # compressed experts are frozen, with or without adapters
        adapter, adapted = (None if config.base == "bf16" else LoRA(targets=())), ()
    options = {"save": config.save, "precision": config.precision, "implementation": config.implementation}
    moe = config.model.moe(adapter=adapter, **options)
    return decoder_class(config.model)(
        config.model,
        moe,
        jnp.dtype(config.dtype),
        remat=config.remat,
        experts=experts_function(config.experts_layer),
        attention=config.attention,
        unroll=config.unroll or trains_by_blocks(config),
        parallel=parallel,
        projection=partial(AdaptedProjection, adapter=adapter, adapted=adapted)
        if adapted or config.base_attention != "bf16"
        else nn.DenseGeneral,
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
    if config.adapter is not None:
        state = jit_once(init)() if restored is None else restored(like)
        if restored is None and config.adapter_from:
            state = state._replace(params=load_adapters(config.adapter_from, model))
        frozen = frozen_base(config, model)
        return state._replace(frozen=with_host_embedding(frozen) if config.embedding == "host" else frozen)
    shardings = state_shardings(model.parallel, like, model.moe, config.model.width)
    if restored is not None:
        if shardings is not None:
            like = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, shardings)
        return restored(like)
    if trains_by_blocks(config):
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


def frozen_base(config: TrainConfig, model: Decoder) -> Tree:
    """What is not trained beside adapters: the public model's parameters, or without one random ones, for timing."""
    options: dict[str, Any] = {"dtype": jnp.bfloat16} | _forms(config)
    if config.checkpoint:
        return load_params(config.checkpoint, model, **options)
    return random_params(model, **options, seed=config.seed)


def form_of(base: Base) -> Form | None:
    """The form in which a part of a base stays compressed; None for numbers as they are."""
    return None if base == "bf16" else base


def _forms(config: TrainConfig) -> dict[str, Form | None]:
    return {"base": form_of(config.base), "attention": form_of(config.base_attention)}


def state_shapes(config: TrainConfig, model: Decoder) -> Any:
    """The shapes and dtypes of a training state, without a frozen base."""
    return jax.eval_shape(
        Layerwise(config, model).init if trains_by_blocks(config) else partial(init_state, config, model)
    )


def memory_plan(config: TrainConfig, gpu: str) -> str:
    """The memory that a step needs on a GPU, in a line, by the compiler's own plan: with no GPU, and no weights.

    The attention is XLA's, which keeps its scores: cuDNN's can be compiled on a GPU only, and needs less.

    Raises:
      UserError: the compiler for it is not installed.
    """
    model = make_model(replace(config, implementation=config.implementation or "mosaic_gpu", attention="xla"))
    state = state_shapes(config, model)
    if config.adapter is not None:
        frozen = unflatten_dict(params_like(model, None, jnp.bfloat16, **_forms(config)))
        state = state._replace(frozen=with_host_embedding(frozen) if config.embedding == "host" else frozen)
    microbatches = (config.accumulate, config.batch_size // config.accumulate, config.sequence_length + 1)
    batch = jax.ShapeDtypeStruct(microbatches, np.int32)

    def planned(function: Callable, *arguments: Any, donated: tuple[int, ...] = (0,)) -> MemoryPlan | None:
        return plan_of(compile_for_gpu(function, *arguments, gpu=gpu, donate_argnums=donated).memory)

    try:
        own = "hopper" if GPUS[gpu].capability == (9, 0) and config.dtype == "bfloat16" else "ampere"
        with demanded_family(own if model.moe.implementation == "mosaic_gpu" else None):
            if trains_by_blocks(config):
                plan = Layerwise(config, model).plan(batch, planned)
            else:
                plan = planned(make_train_step(config, model), state, batch)
    except NotImplementedError as error:
        raise UserError(f"--compile-only {gpu}: {error}") from error
    if plan is None:
        raise UserError(f"--compile-only {gpu}: this version of jax's plugin says nothing of the memory")
    there = GPU_BYTES[gpu]
    fits = "fits on one" if plan.total <= there else f"takes {-(-plan.total // there)} or more"
    trained = config.trained
    if config.adapter is not None:
        number = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        trained = f"adapters of {number / 1e6:,.0f} million parameters beside a base in {config.base}"
    return (
        f"{config.batch_size} × {config.sequence_length} tokens a step, trained: {trained}: "
        f"{plan.total / 1e9:.1f} GB ({plan.total / 2**30:.1f} GiB), of which state and batch "
        f"{plan.arguments / 1e9:.1f} GB; {fits} {gpu.upper()}"
    )
