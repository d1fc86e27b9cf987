"""Public models, read: their description, and the parameters of one layer, as functions, linen and nnx take them.

`load` checks a layer's tensors by `layouts`, and `matrices` brings each expert's matrices to the devices that hold
them.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from blaze_jax.checkpoints.folder import DTYPES, Folder
from blaze_jax.checkpoints.layouts import SELECTION_BIAS, Block, Source, find_block
from blaze_jax.checkpoints.matrices import Shards, cut, read_slices
from blaze_jax.checks import check_integers
from blaze_jax.config import MoEConfig, Parameter, check_config
from blaze_jax.huggingface import PublicModel, read_public_model
from blaze_jax.nnx import MoE
from blaze_jax.progress import counted

READERS = 2
"""Threads that read, each a matrix at most, and its copy that is turned: together less than two experts."""

type Shardings = Sharding | Mapping[str, Sharding] | None


class Layer(NamedTuple):
    """One layer of a checkpoint.

    Attributes:
      params: arrays by name, what `blaze_jax.moe` takes.
      selection_bias: `(E,)` float32, the layer's other argument; None where it has none.
      layout: the public format, in which `save` writes the layer.
    """

    params: dict[str, Array]
    selection_bias: Float[Array, " E"] | None = None
    layout: str = "by_expert"

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for `apply` of the linen module `blaze_jax.MoE`."""
        if self.selection_bias is None:
            return {"params": self.params}
        return {"params": self.params, "router_state": {"selection_bias": self.selection_bias}}

    def put_into(self, module: MoE) -> MoE:
        """Sets the variables of a `blaze_jax.nnx.MoE`, also of one from `nnx.eval_shape`, and returns it.

        Raises:
          ValueError: the module's parameters are others, by name or shape.
        """
        values = values_of(self)
        names = {*module.parameter_names, *((SELECTION_BIAS,) if module.config.has_selection_bias else ())}
        if names != values.keys():
            raise ValueError(f"the module has {', '.join(sorted(names))}; the layer has {', '.join(sorted(values))}")
        for name, value in values.items():
            if getattr(module, name).shape != value.shape:
                raise ValueError(f"the module's {name} has shape {getattr(module, name).shape}, must be {value.shape}")
            getattr(module, name).set_value(value)
        return module

    @classmethod
    def of(cls, module: MoE, layout: str = "by_expert") -> "Layer":
        """Returns the layer that a `blaze_jax.nnx.MoE` holds now."""
        bias = module.selection_bias[...] if module.config.has_selection_bias else None
        return cls({name: getattr(module, name)[...] for name in module.parameter_names}, bias, layout)


def values_of(layer: Layer) -> dict[str, Array]:
    """Returns the parameters, and the selection bias where there is one, by name."""
    bias = {} if layer.selection_bias is None else {SELECTION_BIAS: layer.selection_bias}
    return dict(layer.params) | bias


def read_model(config: Mapping[str, Any] | str | Path) -> PublicModel[MoEConfig]:
    """Reads a `config.json` of Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, Kimi-K2, GLM-4.5 or gpt-oss.

    Auxiliary losses have the weights of the file where transformers would add them, which `output_router_logits` says,
    and no weight otherwise; the selection bias is frozen. `dataclasses.replace(model.layer, ...)` sets what else
    training should do.

    Args:
      config: what the file holds, the file, or its folder.

    Raises:
      CheckpointError: a field is missing, unknown, of another type, or contradicts another; the message names it.
    """
    return read_public_model(config, MoEConfig)


def load(
    folder: str | Path | Folder,
    layer: int,
    config: MoEConfig,
    *,
    dtype: DTypeLike | None = None,
    sharding: Shardings = None,
) -> Layer:
    """Reads the block of experts of one layer.

    Names, shapes and types of all its tensors are checked first. Then each expert's matrices go straight to the
    devices that hold them, a matrix at a time, and compressed ones are decoded there: beside what a CPU device keeps,
    the host's memory never holds two experts.

    Args:
      folder: with `model.safetensors`, or `model.safetensors.index.json` and the files that it names.
      layer: number of the layer in the model, from 0.
      config: what the layer is, as `MoEConfig.from_huggingface` says. With a `bias_update_rate` and without
        `selection_bias=True`, a selection bias that the files do not have is zero.
      dtype: the parameters' type; None for the file's, bfloat16 where it is compressed. The selection bias is float32.
      sharding: where each parameter goes: one sharding for all, or one by name, which leaves out those of the default
        device; None for that device. Only what this process's devices hold is read.

    Returns:
      The layer, for functions, linen and nnx.

    Raises:
      CheckpointError: a tensor is missing, unknown, or of another shape or type, or a file is broken.
      ValueError: an argument does not fit.
    """
    check_config(config)
    check_integers(layer=layer)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={jnp.dtype(dtype).name} must be floating")
    folder = folder if isinstance(folder, Folder) else Folder(folder)
    block = find_block(folder, layer, config)
    shardings = _shardings(sharding, list(block.entries))
    dtypes = {name: _dtype(sources, name, dtype) for name, sources in block.sources.items()}
    loaded = _load_kernels(block, shardings, dtypes)
    for name, parameter in block.entries.items():
        if parameter.kind != "kernel":
            if name in block.sources:
                values = _read_whole(block.sources[name][0], name, parameter).astype(dtypes[name])
            else:
                values = np.zeros(parameter.shape, np.float32)
            loaded[name] = place(values, shardings[name])
    params = {name: loaded[name] for name in block.entries if name != SELECTION_BIAS}
    return Layer(params, loaded.get(SELECTION_BIAS), block.layout.name.removesuffix("_mxfp4"))


def place(values: np.ndarray, sharding: Sharding) -> Array:
    """Returns an array of the host on the devices."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _load_kernels(block: Block, shardings: dict[str, Sharding], dtypes: dict[str, np.dtype]) -> dict[str, Array]:
    kernels = {name: parameter for name, parameter in block.entries.items() if parameter.kind == "kernel"}
    shards = {name: Shards(parameter.shape, dtypes[name], shardings[name]) for name, parameter in kernels.items()}
    # An expert's matrices lie together in the file, and its gate and up projection may lie in one another.
    matrices = sorted(
        (expert, name)
        for name, parameter in kernels.items()
        for expert in range(parameter.shape[0] if len(parameter.shape) == 3 else 1)
    )

    def load_matrix(matrix: tuple[int, str]) -> None:
        expert, name = matrix
        sources = block.sources[name]
        source = sources[expert if len(sources) > 1 else 0]
        for bounds, part, device in shards[name].wanted(expert):
            for slices in cut(source, part):
                values = read_slices(source, name, kernels[name], expert, slices, dtypes[name], device)
                shards[name].store(bounds, expert, slices, values)

    with ThreadPoolExecutor(READERS) as pool:
        done = pool.map(load_matrix, matrices)
        for _ in counted(matrices, "matrix"):
            next(done)
    return {name: shards.pop(name).array() for name in kernels}


def _read_whole(source: Source, name: str, parameter: Parameter) -> np.ndarray:
    """Reads a small entry: the router's matrix, or a bias."""
    if parameter.kind == "router":
        return source.values.read().T
    *leading, width = parameter.shape
    outputs = source.tensor.outputs(name, width, slice(0, width))
    return source.values.read(*(slice(0, size) for size in leading), outputs)


def _dtype(sources: list[Source], name: str, dtype: DTypeLike | None) -> np.dtype:
    if name == SELECTION_BIAS:
        return np.dtype(np.float32)
    if dtype is not None:
        return np.dtype(dtype)
    stored = {np.dtype(jnp.bfloat16) if source.scales else DTYPES[source.values.dtype] for source in sources}
    return np.dtype(jnp.result_type(*stored))


def _shardings(sharding: Shardings, names: list[str]) -> dict[str, Sharding]:
    if isinstance(sharding, Sharding):
        return dict.fromkeys(names, sharding)
    if sharding is not None and not isinstance(sharding, Mapping):
        raise ValueError(f"{sharding=} must be a Sharding, a mapping from names to them, or None")
    chosen = sharding or {}
    if unknown := chosen.keys() - set(names):
        raise ValueError(f"sharding names {', '.join(sorted(unknown))}, must name some of {', '.join(names)}")
    default = SingleDeviceSharding(jnp.zeros(()).devices().pop())
    return {name: chosen.get(name, default) for name in names}
