"""An array that is put together matrix by matrix, each on the devices that hold a part of it."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array

from blaze_jax.checkpoints.pieces import Device, Piece

type Bounds = tuple[tuple[int, int], ...]


class Shards:
    """The parts of one kernel on this process's devices, empty at first.

    Args:
      shape: of the whole array, `(E, in, out)` or `(in, out)`.
      dtype: of the array.
      sharding: how it lies over devices.
    """

    def __init__(self, shape: tuple[int, ...], dtype, sharding: Sharding):
        self.shape, self.sharding = shape, sharding
        self._devices: dict[Bounds, list[Device]] = defaultdict(list)
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            bounds = zip(index or (slice(None),) * len(shape), shape, strict=True)
            self._devices[tuple(part.indices(size)[:2] for part, size in bounds)].append(device)
        self._parts = {
            (bounds, device): (_HostPart if device.platform == "cpu" else _DevicePart)(
                tuple(stop - start for start, stop in bounds), dtype, device
            )
            for bounds, devices in self._devices.items()
            for device in devices
        }

    def wanted(self, expert: int) -> Iterator[tuple[Bounds, Piece]]:
        """The distinct parts of an expert's matrix that devices here hold, and which of theirs it is."""
        for bounds in self._devices:
            *leading, rows, columns = bounds
            if all(start <= expert < stop for start, stop in leading):
                yield bounds, Piece(slice(*rows), slice(*columns))

    def first_device(self, bounds: Bounds) -> Device:
        return self._devices[bounds][0]

    def store(self, bounds: Bounds, expert: int, piece: Piece, values: Array) -> None:
        """Puts `values` where that piece of the expert belongs, on every device that holds it."""
        *leading, rows, columns = bounds
        at = [expert - start for start, _ in leading]
        at += [piece.rows.start - rows[0], piece.columns.start - columns[0]]
        for device in self._devices[bounds]:
            self._parts[bounds, device].store(tuple(at), values)

    def array(self) -> Array:
        """The array, after all its pieces were stored; only once."""
        parts = [self._parts.pop(key).array() for key in list(self._parts)]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


class _HostPart:
    """A part on a CPU device: the memory that is filled becomes the device's array without a copy."""

    def __init__(self, shape: tuple[int, ...], dtype, device: Device):
        self._values, self._device = _aligned_empty(shape, np.dtype(dtype)), device

    def store(self, at: tuple[int, ...], values: Array) -> None:
        rows, columns = (slice(start, start + size) for start, size in zip(at[-2:], values.shape, strict=True))
        self._values[(*at[:-2], rows, columns)] = np.asarray(values)

    def array(self) -> Array:
        return jax.device_put(self._values, self._device)


class _DevicePart:
    """A part on an accelerator. A piece is there before the next is read, or many would fill the host's memory."""

    def __init__(self, shape: tuple[int, ...], dtype, device: Device):
        self._values = jnp.zeros(shape, dtype, device=device)
        self._device = device
        self._lock = Lock()

    def store(self, at: tuple[int, ...], values: Array) -> None:
        values = jax.device_put(values, self._device).block_until_ready()
        with self._lock:
            self._values = _update(self._values, values, np.asarray(at, np.int32))

    def array(self) -> Array:
        return self._values


@partial(jax.jit, donate_argnums=0)
def _update(whole: Array, values: Array, at: Array) -> Array:
    values = values.reshape((1,) * (whole.ndim - values.ndim) + values.shape)
    return lax.dynamic_update_slice(whole, values, tuple(at))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of the alignment at which jax takes it over."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
