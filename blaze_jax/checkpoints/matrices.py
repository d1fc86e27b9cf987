"""Matrices of a checkpoint on their way to devices: cut into slices, read, decoded, turned, and put together there.

`cut` says which slices of a matrix are read at a time, `read_slices` reads some and gives them the layer's orientation
and type on a device, and `Shards` is the array that they fill: the parts of it that this process's devices hold.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax.checkpoints.decode import FLOAT8_BLOCK, MXFP4_BLOCK, MXFP4_NAN, decode_float8, decode_mxfp4
from blaze_jax.checkpoints.folder import Stored
from blaze_jax.checkpoints.layouts import Source
from blaze_jax.config import Parameter
from blaze_jax.json_file import CheckpointError

SLICE_BYTES = 16 << 20
"""Bytes that are read at a time, at most about: most experts' matrices whole, which are then stored in one run."""

type Device = Any  # jax.Device, which is no type for a type checker

type Slices = tuple[slice, slice]
"""A rectangle of a matrix `(in, out)`: rows of its inputs, columns of its outputs."""

type Bounds = tuple[tuple[int, int], ...]
"""First and end of a device's part of an array, for each axis."""

type Decoder = Callable[..., Array]


def _plain(values: Array, dtype: DTypeLike) -> Array:
    return values.astype(dtype)


_UNITS: dict[Decoder, tuple[int, int]] = {_plain: (1, 1), decode_mxfp4: (MXFP4_BLOCK, 1)}
_UNITS |= {decode_float8: (FLOAT8_BLOCK, FLOAT8_BLOCK)}
"""Rows and columns that only decode together."""


def cut(source: Source, whole: Slices) -> Iterator[Slices]:
    """Yields slices of about `SLICE_BYTES` of a rectangle, cut along the axis that the file runs along slowest."""
    rows, columns = whole
    turned = source.tensor.outputs_first
    long, other = (columns, rows) if turned else (rows, columns)
    step = max(SLICE_BYTES // (2 * FLOAT8_BLOCK * (other.stop - other.start)), 1) * FLOAT8_BLOCK
    bounds = [long.start, *range(long.start // FLOAT8_BLOCK * FLOAT8_BLOCK + step, long.stop, step), long.stop]
    for start, stop in pairwise(bounds):
        yield (rows, slice(start, stop)) if turned else (slice(start, stop), columns)


def read_slices(
    source: Source, name: str, parameter: Parameter, expert: int, slices: Slices, dtype: DTypeLike, device: Device
) -> Array:
    """Returns those slices of a kernel on the device: of the expert's matrix `(in, out)`, or of one for every token."""
    tensor, values, scales = source
    *leading, inputs, width = parameter.shape
    lead = (expert,) if leading and not tensor.of_one_expert else ()
    decode = _plain if scales is None else decode_mxfp4 if tensor.mxfp4 else decode_float8
    rows, columns = (
        _cover(part, unit, size) for part, unit, size in zip(slices, _UNITS[decode], (inputs, width), strict=True)
    )
    outputs = tensor.outputs(name, width, columns)
    if scales is None:
        parts = [values.read(*lead, *((outputs, rows) if tensor.outputs_first else (rows, outputs)))]
    elif tensor.mxfp4:
        blocks = _blocks(rows, MXFP4_BLOCK)
        numbers = values.read(*lead, outputs, blocks)
        parts = [numbers.reshape(len(numbers), -1), _read_scales(scales, *lead, outputs, blocks)]
    else:
        blocks = _blocks(outputs, FLOAT8_BLOCK), _blocks(rows, FLOAT8_BLOCK)
        parts = [values.read(outputs, rows), _read_scales(scales, *blocks)]

    turn = tensor.outputs_first
    # On a CPU, XLA's copy from the host turns a matrix ten times faster than numpy; elsewhere the device turns it.
    if turn and device.platform == "cpu":
        parts, turn = [part.T for part in parts], False
    parts = jax.device_put(parts, device)
    if scales is None and not turn and parts[0].dtype == dtype:
        return parts[0]
    inside = tuple(
        (part.start - around.start, part.stop - around.start)
        for part, around in zip(slices, (rows, columns), strict=True)
    )
    return _decoded(parts, decode, turn, inside, np.dtype(dtype))


def _read_scales(tensor: Stored, *index: int | slice) -> np.ndarray:
    """Reads scales; CheckpointError if one is no finite number, which no model has, and which would spoil its block."""
    scales = tensor.read(*index)
    wrong = scales == MXFP4_NAN if scales.dtype == np.uint8 else ~np.isfinite(scales)
    if wrong.any():
        raise CheckpointError(f"{tensor} has scales that are no finite numbers")
    return scales


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _decoded(parts: list[Array], decode: Decoder, turn: bool, inside: tuple[tuple[int, int], ...], dtype) -> Array:
    if turn:
        parts = [part.T for part in parts]
    return decode(*parts, dtype)[tuple(slice(*bounds) for bounds in inside)]


def _cover(part: slice, unit: int, size: int) -> slice:
    """Returns the least run of whole units around a part."""
    blocks = _blocks(part, unit)
    return slice(blocks.start * unit, min(blocks.stop * unit, size))


def _blocks(part: slice, unit: int) -> slice:
    return slice(part.start // unit, -(-part.stop // unit))


class Shards:
    """The parts of one kernel on this process's devices, empty at first.

    Args:
      shape: the whole array's shape, `(E, in, out)` or `(in, out)`.
      dtype: the array's type.
      sharding: how it lies over devices.
    """

    def __init__(self, shape: tuple[int, ...], dtype, sharding: Sharding):
        self.shape, self.sharding = shape, sharding
        self._parts: dict[Bounds, list[_HostPart | _DevicePart]] = defaultdict(list)
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            slices = zip(index or (slice(None),) * len(shape), shape, strict=True)
            bounds = tuple(part.indices(size)[:2] for part, size in slices)
            kind = _HostPart if device.platform == "cpu" else _DevicePart
            self._parts[bounds].append(kind(tuple(stop - start for start, stop in bounds), dtype, device))

    def wanted(self, expert: int) -> Iterator[tuple[Bounds, Slices, Device]]:
        """Yields the distinct parts of an expert's matrix that devices here hold, and one such device for each."""
        for bounds, parts in self._parts.items():
            *leading, rows, columns = bounds
            if all(start <= expert < stop for start, stop in leading):
                yield bounds, (slice(*rows), slice(*columns)), parts[0].device

    def store(self, bounds: Bounds, expert: int, slices: Slices, values: Array) -> None:
        """Puts `values` where those slices of the expert belong, on every device that holds them."""
        *leading, rows, columns = bounds
        at = [expert - start for start, _ in leading]
        at += [part.start - start for part, (start, _) in zip(slices, (rows, columns), strict=True)]
        for part in self._parts[bounds]:
            part.store(tuple(at), values)

    def array(self) -> Array:
        """Returns the array, after all of it was stored; only once."""
        parts = [part.array() for bounds in list(self._parts) for part in self._parts.pop(bounds)]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


class _HostPart:
    """A part on a CPU device: the memory that is filled becomes the device's array without a copy."""

    def __init__(self, shape: tuple[int, ...], dtype, device: Device):
        self._values, self.device = _aligned_empty(shape, np.dtype(dtype)), device

    def store(self, at: tuple[int, ...], values: Array) -> None:
        rows, columns = (slice(start, start + size) for start, size in zip(at[-2:], values.shape, strict=True))
        self._values[(*at[:-2], rows, columns)] = np.asarray(values)

    def array(self) -> Array:
        return jax.device_put(self._values, self.device)


class _DevicePart:
    """A part on an accelerator. A slice is there before the next is read, or many would fill the host's memory."""

    def __init__(self, shape: tuple[int, ...], dtype, device: Device):
        self._values, self.device, self._lock = jnp.zeros(shape, dtype, device=device), device, Lock()

    def store(self, at: tuple[int, ...], values: Array) -> None:
        values = jax.device_put(values, self.device).block_until_ready()
        with self._lock:
            self._values = _update(self._values, values, np.asarray(at, np.int32))

    def array(self) -> Array:
        return self._values


@partial(jax.jit, donate_argnums=0)
def _update(whole: Array, values: Array, at: Array) -> Array:
    values = values.reshape((1,) * (whole.ndim - values.ndim) + values.shape)
    return lax.dynamic_update_slice(whole, values, tuple(at))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory of the alignment at which jax takes it over."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
