"""Public models, read: their description, and the parameters of one layer, as functions, linen and nnx take them.

`load` finds a layer's tensors by `layouts`, and brings each expert's matrices to the devices that hold them: cut into
slices that are read, decoded, turned, and stored into each device's part of the array.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from blaze_jax.adapters import is_adapter
from blaze_jax.checkpoints.folder import Folder, copied
from blaze_jax.checkpoints.layouts import SELECTION_BIAS, Block, Source, find_block
from blaze_jax.checks import check_integers
from blaze_jax.config import MoEConfig, check_config
from blaze_jax.huggingface import PublicModel, read_public_model
from blaze_jax.nnx import MoE
from blaze_jax.progress import counted
from blaze_jax.quantized import WEIGHTS, check_form, inputs_multiple
from pallas_kernels.codings import CODINGS, FLOAT8_BLOCK, UNCODED, Coding, Form, QuantizedWeight

READERS = 2
"""Threads that read, each a matrix at most, and its copy that is turned: together less than two experts."""

SLICE_BYTES = 16 << 20
"""Bytes that are read at a time, at most about: most experts' matrices whole, which are then stored in one run."""

type Device = Any  # jax.Device, which is no type for a type checker

type Slices = tuple[slice, slice]
"""A rectangle of a matrix `(in, out)`: rows of its inputs, columns of its outputs."""

type Bounds = tuple[tuple[int, int], ...]
"""First and end of a part of an array, for each axis."""

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

        Adapters of the module stay, unless the layer has some.

        Raises:
          ValueError: the module's parameters are others, by name or shape.
        """
        values = values_of(self)
        with_adapters = any(map(is_adapter, values))
        names = {name for name in module.parameter_names if with_adapters or not is_adapter(name)}
        names |= {SELECTION_BIAS} if module.config.has_selection_bias else set()
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
    """Reads a `config.json` of a public family, of those that the page on public checkpoints lists.

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
    base: Form | None = None,
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
      base: the form in which the experts' weights stay compressed, as a `QuantizedWeight`, for a layer that trains
        adapters alone; None for plain numbers. What the file has in that form is kept bit by bit, other numbers are
        compressed by the device. Such weights are not split over devices.

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
    dtypes = {name: _dtype(sources) if dtype is None else np.dtype(dtype) for name, sources in block.sources.items()}
    dtypes[SELECTION_BIAS] = np.dtype(np.float32)
    kept = {name: UNCODED._replace(dtypes=(dtype,)) for name, dtype in dtypes.items()}
    if base is not None:
        for name in filter(block.entries.__contains__, WEIGHTS):
            _check_compressible(name, block.entries[name].shape, check_form(base), shardings[name])
            kept[name] = CODINGS[base]
    loaded: dict[str, Any] = {
        name: QuantizedWeight(*arrays, form=base) if base and name in WEIGHTS else arrays[0]
        for name, arrays in _load_kernels(block, shardings, kept).items()
    }
    for name, parameter in block.entries.items():
        if parameter.kind != "kernel":
            values = copied(block.sources[name][0].arrays[0]).astype(dtypes[name])
            loaded[name] = place(values, shardings[name])
    params = {name: loaded[name] for name in block.entries if name != SELECTION_BIAS}
    return Layer(params, loaded.get(SELECTION_BIAS), block.layout.name.removesuffix("_mxfp4"))


def _check_compressible(name: str, shape: tuple[int, ...], base: Form, sharding: Sharding) -> None:
    """Raises ValueError unless a kernel can be kept in that form."""
    if shape[-2] % inputs_multiple(base):
        raise ValueError(f"{base=} takes inputs in {inputs_multiple(base)}s, but {name} has {shape[-2]}")
    if not sharding.is_fully_replicated:
        raise ValueError(f"{base=} cannot be split over devices: leave {name} out of {sharding=}")


def place(values: np.ndarray, sharding: Sharding) -> Array:
    """Returns an array of the host on the devices."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _load_kernels(block: Block, shardings: dict[str, Sharding], kept: dict[str, Coding]) -> dict[str, list[Array]]:
    """Returns each kernel's arrays, of which each device's part is filled in place, a matrix's slice at a time."""
    shapes = {name: parameter.shape for name, parameter in block.entries.items() if parameter.kind == "kernel"}
    parts: dict[tuple[str, Bounds], dict[Device, list[np.ndarray | Array]]] = defaultdict(dict)
    for name, shape in shapes.items():
        for device, index in shardings[name].addressable_devices_indices_map(shape).items():
            slices = zip(index or (slice(None),) * len(shape), shape, strict=True)
            bounds = tuple(part.indices(size)[:2] for part, size in slices)
            stored = _stored_shapes([stop - start for start, stop in bounds], kept[name])
            types = [np.dtype(dtype) for dtype in kept[name].dtypes]
            parts[name, bounds][device] = [
                _empty(size, dtype, device) for size, dtype in zip(stored, types, strict=True)
            ]
    # An expert's matrices lie together in the file, and its gate and up projection may lie in one another.
    matrices = sorted(
        (expert, name, bounds)
        for name, bounds in parts
        for expert in (range(*bounds[0]) if len(bounds) == 3 else range(1))
    )
    lock = Lock()

    def load_matrix(matrix: tuple[int, str, Bounds]) -> None:
        expert, name, bounds = matrix
        held, source = parts[name, bounds], block.sources[name][expert]
        for slices in cut(source, *(slice(*part) for part in bounds[-2:])):
            arrays = read_slices(source, slices, kept[name], next(iter(held)))
            wanted = zip([slice(expert, expert + 1), *slices][-len(bounds) :], bounds, strict=True)
            first = [part.start - start for part, (start, _) in wanted]
            for number, (values, steps) in enumerate(zip(arrays, kept[name].steps, strict=True)):
                at = [*first[:-2], *(start // step for start, step in zip(first[-2:], steps, strict=True))]
                for device, wholes in held.items():
                    if isinstance(whole := wholes[number], np.ndarray):
                        sizes = (*(1 for _ in at[:-2]), *values.shape)
                        whole[tuple(slice(a, a + size) for a, size in zip(at, sizes, strict=True))] = np.asarray(values)
                        continue
                    # There before the next slice is read, or many would fill the host's memory.
                    there = jax.device_put(values, device).block_until_ready()
                    with lock:
                        wholes[number] = _update(wholes[number], there, np.array(at, np.int32))

    with ThreadPoolExecutor(READERS) as pool:
        done = pool.map(load_matrix, matrices)
        for _ in counted(matrices, "matrix"):
            next(done)
    arrays: dict[str, list[list[Array]]] = defaultdict(list)
    for (name, _), held in parts.items():
        arrays[name] += [[jax.device_put(whole, device) for whole in wholes] for device, wholes in held.items()]
    return {
        name: [
            jax.make_array_from_single_device_arrays(stored, shardings[name], list(of_devices))
            for stored, *of_devices in zip(_stored_shapes(shape, kept[name]), *arrays[name], strict=True)
        ]
        for name, shape in shapes.items()
    }


def _stored_shapes(shape: Sequence[int], coding: Coding) -> list[tuple[int, ...]]:
    """Returns the shapes of the arrays that hold matrices of that shape."""
    return [
        (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], steps, strict=True)))
        for steps in coding.steps
    ]


def _is_host(device: Device) -> bool:
    return device.platform == "cpu"


def _empty(shape: Sequence[int], dtype: np.dtype, device: Device) -> np.ndarray | Array:
    """Returns memory to be filled, on a CPU such that jax takes it over as it is."""
    if not _is_host(device):
        return jnp.empty(shape, dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


@partial(jax.jit, donate_argnums=0)
def _update(whole: Array, values: Array, at: Array) -> Array:
    values = values.reshape((1,) * (whole.ndim - values.ndim) + values.shape)
    return lax.dynamic_update_slice(whole, values, tuple(at))


def cut(source: Source, rows: slice, columns: slice) -> Iterator[Slices]:
    """Yields slices of about `SLICE_BYTES` of a rectangle, cut along the axis that the file runs along slowest."""
    turned = _is_turned(source.arrays[0])
    long, other = (columns, rows) if turned else (rows, columns)
    step = max(SLICE_BYTES // (2 * FLOAT8_BLOCK * (other.stop - other.start)), 1) * FLOAT8_BLOCK
    bounds = [long.start, *range(long.start // FLOAT8_BLOCK * FLOAT8_BLOCK + step, long.stop, step), long.stop]
    for start, stop in pairwise(bounds):
        yield (rows, slice(start, stop)) if turned else (slice(start, stop), columns)


def read_slices(source: Source, slices: Slices, kept: Coding, device: Device) -> Sequence[Array]:
    """Returns those slices of a matrix on the device, in the coding in which they are kept: as they are, or anew."""
    arrays, inside = source.read(*slices)
    # On a CPU, XLA's copy from the host turns a matrix ten times faster than numpy; elsewhere the device turns it.
    turn = not _is_host(device) and _is_turned(source.arrays[0])
    values = jax.device_put([array.T if turn else array for array in arrays], device)
    if source.coding.decode is kept.decode and not turn and all(map(_has_dtype, values, kept.dtypes)):
        return values
    return _recoded(values, source.coding, turn, inside, kept)


def _has_dtype(array: Array, dtype: DTypeLike) -> bool:
    return array.dtype == dtype


def _is_turned(matrix: np.ndarray) -> bool:
    """Tells whether a matrix `(in, out)` lies `(out, in)` in the file."""
    return matrix.strides[0] < matrix.strides[1]


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _recoded(values: list[Array], coding: Coding, turn: bool, inside: Slices, kept: Coding) -> Sequence[Array]:
    if turn:
        values = [value.T for value in values]
    if kept.encode is None:
        return [coding.decode(*values, kept.dtypes[0])[inside]]
    if coding.decode is kept.decode:
        return values
    return kept.encode(coding.decode(*values, jnp.float32)[inside])


def _dtype(sources: list[Source]) -> np.dtype:
    stored = {source.arrays[0].dtype if source.coding is UNCODED else np.dtype(jnp.bfloat16) for source in sources}
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
