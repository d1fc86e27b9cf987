"""`--compile-time h200`: how long a model of several layers takes to be traced, lowered and compiled, with no GPU."""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.inputs import forward_and_backward
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.config import MoEConfig
from blaze_jax.layer import moe
from pallas_kernels.compile_only import absent, kernel_hashes, on_gpu

LAYERS = (1, 3, 24)
"""Layers of the models: they stand one after the other in the program, as a Python loop has them."""


def measure_compile_time(sizes: Sizes, dtype) -> dict[str, Any]:
    """Seconds for the gradient of models of `LAYERS` layers, and the kernels in the lowered program.

    Wall time, and CPU time of the process and of the assemblers that it starts. Each model has a process of its own,
    where jax and the compiler have started but nothing is compiled that could serve it.

    Raises:
      NotImplementedError: jax's CUDA plugin is not installed, or the kernels cannot do these sizes.
    """
    absent()  # complains here and not in another process
    name = jnp.dtype(dtype).name
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        models = [processes.submit(_model, sizes, name, layers).result() for layers in LAYERS]
    return {
        "kind": "compile_time",
        "target": "h200",
        "sizes": sizes._asdict(),
        "dtype": name,
        "models": models,
    }


def _gradient(sizes: Sizes, dtype, layers: int) -> tuple[Callable, tuple]:
    """Forward and backward pass of `x + moe(x)`, so many times with parameters of its own; and its arguments' types."""
    config = MoEConfig(
        num_experts=sizes.num_experts,
        experts_per_token=sizes.experts_per_token,
        expert_width=sizes.expert_width,
        implementation="mosaic_gpu",
    )
    array = jax.ShapeDtypeStruct
    parameters = {name: array(p.shape, dtype) for name, p in config.parameters(sizes.model_width).items()}

    def model(x, all_parameters):
        for own in all_parameters:
            x = x + moe(x, own, config)[0]
        return x

    tokens = array((sizes.num_tokens, sizes.model_width), dtype)
    return forward_and_backward(model), (tokens, [parameters] * layers, tokens)


def _model(sizes: Sizes, dtype, layers: int) -> dict[str, Any]:
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(jnp.negative).lower(on_gpu(jax.ShapeDtypeStruct((1,), dtype))).compile()
    function, arguments = _gradient(sizes, dtype, layers)
    times = {}
    traced = _timed(times, "trace", lambda: jax.jit(function).trace(*on_gpu(arguments)))
    lowered = _timed(times, "lower", traced.lower)
    kernels = kernel_hashes(lowered)
    _timed(times, "compile", lowered.compile)
    return {"layers": layers, "kernels": len(kernels), "different_kernels": len(set(kernels)), **times}


def _timed(times: dict[str, float], stage: str, run: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    out = run()
    times[f"{stage}_s"], times[f"{stage}_cpu_s"] = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
    return out
