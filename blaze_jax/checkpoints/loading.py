"""`load`: the parameters of one layer of a public checkpoint."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.checkpoints.block import Block, Source, find_block
from blaze_jax.checkpoints.folder import DTYPES, Folder
from blaze_jax.checkpoints.layer import Layer
from blaze_jax.checkpoints.layouts import SELECTION_BIAS
from blaze_jax.checkpoints.pieces import pieces, read_piece
from blaze_jax.checkpoints.shards import Shards
from blaze_jax.checks import check_integers
from blaze_jax.config import MoEConfig, Parameter, check_config
from blaze_jax.progress import counted

READERS = 2
"""Threads that read, each a matrix at most, and its copy that is turned: together less than two experts."""

type Shardings = Sharding | Mapping[str, Sharding] | None


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
      dtype: of the parameters; None for the file's, bfloat16 where it is compressed. The selection bias is float32.
      sharding: where each parameter goes: one sharding for all, or one by name, which leaves out those of the default
        device; None for that device. Only what this process's devices hold is read.

    Returns:
      The layer, for functions, linen and nnx.

    Raises:
      CheckpointError: a tensor is missing, unknown, or of another shape or type, or a file is broken.
      ValueError: an argument does not fit.
      MissingExtraError: safetensors is not installed.
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
    """An array of the host on the devices."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _load_kernels(block: Block, shardings: dict[str, Sharding], dtypes: dict[str, np.dtype]) -> dict[str, Array]:
    kernels = {name: parameter for name, parameter in block.entries.items() if parameter.kind == "kernel"}
    shards = {name: Shards(parameter.shape, dtypes[name], shardings[name]) for name, parameter in kernels.items()}
    # An expert's matrices lie together in the file, and its gate and up projection may lie in one another.
    steps = sorted(
        (expert, name)
        for name, parameter in kernels.items()
        for expert in range(parameter.shape[0] if len(parameter.shape) == 3 else 1)
    )

    def load_matrix(step: tuple[int, str]) -> None:
        expert, name = step
        _load_matrix(block.sources[name], name, kernels[name], expert, shards[name], dtypes[name])

    with ThreadPoolExecutor(READERS) as pool:
        done = pool.map(load_matrix, steps)
        for _ in counted(steps, "matrix"):
            next(done)
    return {name: shards.pop(name).array() for name in kernels}


def _load_matrix(
    sources: list[Source], name: str, parameter: Parameter, expert: int, shards: Shards, dtype: np.dtype
) -> None:
    source = sources[expert if len(sources) > 1 else 0]
    for bounds, part in shards.wanted(expert):
        for piece in pieces(source, part):
            values = read_piece(source, name, parameter, expert, piece, dtype, shards.first_device(bounds))
            shards.store(bounds, expert, piece, values)


def _read_whole(source: Source, name: str, parameter: Parameter) -> np.ndarray:
    """A small entry: the router's matrix, or a bias."""
    *leading, width = parameter.shape
    outputs = source.tensor.outputs(name, width, slice(0, width))
    if parameter.kind == "router":
        return source.values.read().T
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
    default = SingleDeviceSharding(jnp.zeros(()).devices().pop())
    if sharding is None:
        return dict.fromkeys(names, default)
    if not isinstance(sharding, Mapping):
        raise ValueError(f"{sharding=} must be a Sharding, a mapping from names to them, or None")
    if unknown := sharding.keys() - set(names):
        raise ValueError(f"sharding names {', '.join(sorted(unknown))}, must name some of {', '.join(names)}")
    return {name: sharding.get(name, default) for name in names}
