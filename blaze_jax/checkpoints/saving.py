"""Layers, written: which tensors they are in the public formats, each made of a layer's arrays as it is written."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.adapters import is_adapter
from blaze_jax.checkpoints.folder import DTYPES, Folder, has_tensors
from blaze_jax.checkpoints.layouts import (
    LAYOUTS,
    PLAIN,
    SCALES,
    SELECTION_BIAS,
    Layout,
    Tensor,
    block_names,
    entries,
)
from blaze_jax.checkpoints.loading import Layer, values_of
from blaze_jax.checkpoints.writing import NewTensor, write_tensors
from blaze_jax.checks import check_booleans, check_integers
from blaze_jax.config import MoEConfig, Parameter, check_config

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(
    folder: str | Path,
    layers: Mapping[int, Layer],
    config: MoEConfig,
    *,
    dtype: DTypeLike | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes layers in the public formats that they name.

    Each call adds files, and their tensors to the folder's `model.safetensors.index.json`; a folder of a single
    `model.safetensors` gets them into that file, which is written anew. One expert's matrix is fetched from the devices
    at a time. What was read compressed is written in the type that it has now. A reader sees all layers of a call as
    they were, or all as they are afterwards.

    Several processes may save different layers into one folder at the same time. Where arrays lie on devices of several
    processes, gather them first, and let one process save each layer.

    Args:
      folder: to write into; made where it is missing.
      layers: by their numbers in the model.
      config: the layers' configuration. A selection bias of zeros is left out of a layout that has no place for one.
      dtype: the tensors' type, float32, float16 or bfloat16; None for each array's own. A selection bias stays float32.
      overwrite: whether the layers take the place of those that are there, whatever their layout; files that hold other
        tensors, too, are written anew without them. Otherwise a layer that is there is an error.

    Returns:
      The files that hold the layers.

    Raises:
      ValueError: a layer is not what the configuration says, does not fit its layout, or lies on devices of several
        processes.
      CheckpointError: the folder holds tensors of one of the layers' blocks already, or is broken.
    """
    check_config(config)
    check_integers(**{f"layers[{number!r}]": number for number in layers})
    check_booleans(overwrite=overwrite)
    folder = Path(folder)
    there = Folder(folder).names if has_tensors(folder) else []
    tensors = [
        tensor for number, layer in layers.items() for tensor in layer_tensors(number, layer, config, dtype, there)
    ]
    starts = tuple(start for number in layers for start in block_names(number))
    if overwrite and any(name.startswith(starts) and name.endswith(SCALES) for name in there):
        warnings.warn(
            f"{folder} had layers {', '.join(map(str, layers))} compressed, and has them in full now: the "
            "quantization_config of its config.json does not say so",
            stacklevel=2,
        )
    stem = "-".join(["layers", *(f"{number:05}" for number in layers)][:9])
    return write_tensors(folder, tensors, stem, starts, overwrite=overwrite)


def layer_tensors(
    number: int, layer: Layer, config: MoEConfig, dtype: DTypeLike | None = None, there: Collection[str] = ()
) -> list[NewTensor]:
    """Returns the tensors of one layer, as `save` writes them beside those that are there; for the rest see `save`."""
    writable = [name for name, layout in LAYOUTS.items() if not any(tensor.mxfp4 for tensor in layout.tensors)]
    if layer.layout not in writable:
        raise ValueError(f"layout={layer.layout!r} must be one of {', '.join(writable)}")
    layout, values = LAYOUTS[layer.layout], values_of(layer)
    headless = any(name.startswith(layout.prefixes[1].partition("{")[0]) for name in there)
    prefix = layout.prefixes[headless].format(layer=number)
    expected = _checked_entries(values, layout, config)
    if SELECTION_BIAS in expected and not layout.of([SELECTION_BIAS]):
        if np.any(np.asarray(values[SELECTION_BIAS])):
            raise ValueError(
                f"the layout {layout.name!r} has no place for the layer's selection_bias, which is not zero; by_expert "
                "and fused have one, of layers without b_down"
            )
        del expected[SELECTION_BIAS]  # a zero one changes nothing, and is what `load` makes of none
    tensors = []
    for tensor in layout.of(expected):
        arrays = tuple(values[name] for name in tensor.parameters)
        chosen = np.dtype(arrays[0].dtype if dtype is None else dtype)
        if tensor.parameters == (SELECTION_BIAS,):
            chosen = np.dtype(np.float32)
        if _NAMES.get(chosen) not in PLAIN:
            raise ValueError(f"dtype={chosen} must be one of {', '.join(str(DTYPES[name]) for name in PLAIN)}")
        shape = tensor.shape(expected[tensor.parameters[0]])
        in_turn = arrays[0].ndim == 3 and tensor.joined_along != 1  # rows of all experts' matrices lie together there
        together = range(config.num_experts) if in_turn else [None]
        for expert, name in enumerate(tensor.names(config.num_experts)):
            parts = partial(_parts, tensor, arrays, [expert] if tensor.of_one_expert else together, chosen)
            name = f"{prefix}{layout.block}.{name}"
            tensors.append(NewTensor(name, _NAMES[chosen], shape, parts))
    return tensors


def _parts(
    tensor: Tensor, arrays: tuple[Array, ...], experts: Sequence[int | None], dtype: np.dtype
) -> Iterator[np.ndarray]:
    return (np.asarray(_as_stored(tensor, arrays, expert, dtype)) for expert in experts)


@partial(jax.jit, static_argnums=(0, 3))
def _as_stored(tensor: Tensor, arrays: tuple[Array, ...], expert, dtype: np.dtype) -> Array:
    """Returns the matrix of one expert, or the whole entry, as the file has it."""
    if expert is not None:
        arrays = tuple(lax.dynamic_index_in_dim(array, expert, keepdims=False) for array in arrays)
    return tensor.join(arrays).astype(dtype)


def _checked_entries(values: Mapping[str, Array], layout: Layout, config: MoEConfig) -> dict[str, Parameter]:
    """Returns the entries that the layer must have; ValueError unless it has them, and the layout has room for them."""
    if getattr(values.get("w_router"), "ndim", 0) != 2:
        raise ValueError("the layer has no matrix 'w_router'")
    if adapters := sorted(filter(is_adapter, values)):
        raise ValueError(f"the layer has adapters, {adapters[0]}: merge them first, or write them by save_adapters")
    expected = entries(config, values["w_router"].shape[0], "b_down" in values)
    if wrong := sorted(expected.keys() ^ values.keys()):
        raise ValueError(f"the layer has {', '.join(values)}, must have {', '.join(expected)}: {wrong[0]}")
    for name, parameter in expected.items():
        if values[name].shape != parameter.shape:
            raise ValueError(f"the layer's {name} has shape {values[name].shape}, must be {parameter.shape}")
        if not getattr(values[name], "is_fully_addressable", True):
            raise ValueError(
                f"the layer's {name} lies on devices of several processes, must be gathered in one, "
                "which then saves it: jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
            )
    room = layout.parameters | {SELECTION_BIAS}  # see there
    joined = {name for tensor in layout.of(expected) for name in tensor.parameters}
    if wrong := sorted((expected.keys() - room) | (joined - expected.keys())):
        raise ValueError(f"the layout {layout.name!r} does not fit a layer with {', '.join(expected)}: {wrong[0]}")
    return expected
