"""Layers in pinned host memory, which come to the device one after the other, each under the work of the one before.

They come by a loop in Python: the copy of the next layer is asked for before this layer is called, and a layer is not
asked for until the one three before it is done. Of the ways that jax has of saying this it is within 2% of the fastest
(one program with every layer in it, whose copies stand behind barriers), and has one program for all layers, which
compiles once, and is the one that runs on layers that are resident: so the bits are the same.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from blaze_jax import checkpoints
from blaze_jax.checkpoints.folder import DTYPES
from blaze_jax.checkpoints.writing import NewTensor, write_tensors
from blaze_jax.config import MoEConfig
from blaze_jax.offload.compression import Bits, Compressed, compress
from pallas_kernels.codings import CODINGS, Form, QuantizedWeight, is_quantized

type Tree = Any

BUFFERS = 3
"""Layers that are on the device at a time beside the resident ones: at work, on its way, and asked for."""

POOL_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable that limits jax's pool of pinned host memory, 64 GB by default; read when jax starts."""

_SHAPE = "shape"


class HostMemoryError(MemoryError):
    """The host's memory does not suffice for the layers. The message is one line that says what would."""


class ExpertStore:
    """Layers in pinned host memory.

    Args:
      layers: a tree of arrays for each layer, all alike, as one layer's variables; of numpy or jax.
      bits: of the codes of exponents with which stacks of matrices in bfloat16 (arrays of three axes) are compressed,
        3 or 4; None for weights as they are. Leaves that are `Compressed` already stay so, and so do those that are a
        `QuantizedWeight`, which the layer decodes: one whose config has `adapter=LoRA(targets=())`, or adapters.
      resident: numbers of layers that stay on the device, decoded by whoever uses them like the others.
      device: where the layers are computed; None for the first.

    Attributes:
      sharding: of a layer on the device.

    Raises:
      HostMemoryError: the layers do not fit the host's memory, or jax's pool of it.
      ValueError: layers are not alike, or there is none.
    """

    def __init__(
        self,
        layers: Iterable[Tree],
        *,
        bits: Bits | None = None,
        resident: Collection[int] = (),
        device: Any = None,
    ):
        device = device or jax.local_devices()[0]
        self._host, self.sharding = (
            SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", _device_memory(device))
        )
        self._layers: list[Tree] = []
        total = 0
        for number, layer in enumerate(layers):
            layer = jax.tree.map(partial(_compressed, bits), layer, is_leaf=_is_one_weight)
            if number not in resident:
                total += tree_bytes(layer)
                check_host_memory(tree_bytes(layer), total, device.platform)
            sharding = self.sharding if number in resident else self._host
            self._layers.append(jax.block_until_ready(jax.device_put(layer, sharding)))
        if not self._layers:
            raise ValueError("layers must have one at least")
        self._share_capacities()
        kinds = {_kind(layer) for layer in self._layers}
        if len(kinds) > 1:
            raise ValueError(f"layers must be alike in structure, shapes and types, got {len(kinds)} kinds of them")
        self.resident = frozenset(resident)
        self.streamed = tuple(at for at in range(len(self._layers)) if at not in self.resident)
        self._next: tuple[int, Tree] | None = None
        self._running: deque[Any] = deque()

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path,
        layers: Sequence[int],
        config: MoEConfig,
        *,
        dtype: DTypeLike | None = None,
        base: Form | None = None,
        **options: Any,
    ) -> "ExpertStore":
        """Reads these layers as variables of `blaze_jax.MoE`, without a copy on the device.

        Args:
          folder: see `blaze_jax.checkpoints.load`.
          layers: their numbers in the model.
          config: what a layer is.
          dtype: the parameters' type; None for the file's.
          base: the form of the experts' weights, see `blaze_jax.checkpoints.load`; None for plain numbers.
          **options: of the store.
        """
        files = checkpoints.Folder(folder)
        sharding = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

        def one(layer: int) -> Tree:
            return checkpoints.load(files, layer, config, dtype=dtype, sharding=sharding, base=base).variables

        return cls(map(one, layers), **options)

    @classmethod
    def open(cls, folder: str | Path, **options: Any) -> "ExpertStore":
        """Reads what `save` has written, of layers that are dicts of dicts; compressed ones stay as they are."""
        files = checkpoints.Folder(folder)
        numbers = {int(name.split(".")[0]) for name in files.names}
        return cls((_read(files, f"{number}.") for number in sorted(numbers)), **options)

    def save(self, folder: str | Path) -> None:
        """Writes the layers to safetensors files, compressed arrays in pieces as they are in memory.

        Raises:
          CheckpointError: the folder has such layers already, or cannot be written.
        """
        for number, layer in enumerate(self._layers):
            write_tensors(Path(folder), _pieces(layer, f"{number}."), f"layer-{number:05}")

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, number: int) -> Tree:
        """A layer on the device; nothing is kept of it here."""
        return jax.device_put(self._layers[number], self.sharding)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer, on the host and on the link."""
        return tree_bytes(self._layers[0])

    def fold(self, step: Callable[[int, Tree, Tree], Tree], carry: Tree) -> Tree:
        """`carry = step(number, layer, carry)` for every layer in order, while the next one travels.

        `step` calls a compiled function, which takes a `Compressed` leaf through `decompressed`. Behind the last layer
        the first one is on its way again, for the next pass.
        """
        for number in range(len(self)):
            layer = self._layers[number]
            if number not in self.resident:
                layer = self._arrived(number)
            carry = step(number, layer, carry)
            del layer
            if number not in self.resident:
                self._running.append(_mark(jax.tree.leaves(carry)[0]))  # step may give the carry's memory away
                while len(self._running) > BUFFERS - 2:
                    jax.block_until_ready(self._running.popleft())
        return carry

    def _arrived(self, number: int) -> Tree:
        """The layer, on its way at least; and the next one is asked for, before any work on this one is."""
        if self._next is None or self._next[0] != number:
            self._next = number, self[number]
        layer = self._next[1]
        following = self.streamed[(self.streamed.index(number) + 1) % len(self.streamed)]
        self._next = following, self[following] if following != number else layer
        return layer

    def _share_capacities(self) -> None:
        """Gives the escapes of all layers the room of the largest: then one program takes every layer."""
        flat = [jax.tree.leaves(layer, is_leaf=_is_compressed) for layer in self._layers]
        most = [
            max((len(leaf.escapes) for leaf in leaves if _is_compressed(leaf)), default=0)
            for leaves in zip(*flat, strict=False)
        ]
        for at, layer in enumerate(self._layers):
            leaves, structure = jax.tree.flatten(layer, is_leaf=_is_compressed)
            for i, leaf in enumerate(leaves):
                if _is_compressed(leaf) and len(leaf.escapes) < most[i]:
                    leaves[i] = jax.device_put(leaf.with_capacity(most[i]), leaf.planes.sharding)
            self._layers[at] = structure.unflatten(leaves)


def tree_bytes(tree: Tree) -> int:
    """Bytes of all arrays of a tree, which may be shapes alone."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def allow_host_memory(num_bytes: int) -> None:
    """Lets jax pin so many bytes of host memory, unless the user has said how much; to be called before jax starts.

    Not more: the pool grows in powers of two, and would take up to twice of what is needed.
    """
    gb = math.ceil(num_bytes * 1.05 / 2**30) + 1
    if gb > 64:
        os.environ.setdefault(POOL_LIMIT, str(gb))


def check_host_memory(more: int, total: int, platform: str) -> None:
    """Raises HostMemoryError unless `more` bytes are available, and `total` fit the pool of pinned memory."""
    available = _available()
    if available is not None and more > available:
        raise HostMemoryError(
            f"the layers need {total / 1e9:.1f} GB of host memory and more, and for {more / 1e9:.1f} GB of them only "
            f"{available / 1e9:.1f} GB are left: compress them (bits=4 or 3), or keep more of them on the GPU"
        )
    limit = float(os.environ.get(POOL_LIMIT, 64)) * 2**30
    if platform == "gpu" and total > limit:
        needed = math.ceil(total * 1.05 / 2**30) + 1
        raise HostMemoryError(
            f"jax pins at most {limit / 2**30:.0f} GiB of host memory, {total / 2**30:.1f} GiB and more are needed: "
            f"set {POOL_LIMIT}={needed} or more before jax starts"
        )


def _available() -> int | None:
    """Bytes that the host, or this container's share of it, can still give; None where neither tells."""
    found = []
    with suppress(OSError, KeyError, ValueError):
        found.append(1024 * _numbers(Path("/proc/meminfo"))["MemAvailable:"])
    with suppress(OSError, KeyError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(limit - used + _numbers(group / "memory.stat")["file"])  # what is cached of files gives way
    return min(found, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}


def _device_memory(device: Any) -> str:
    return device.default_memory().kind


def _is_compressed(leaf: Any) -> bool:
    return isinstance(leaf, Compressed)


def _is_one_weight(leaf: Any) -> bool:
    return _is_compressed(leaf) or is_quantized(leaf)


def _compressed(bits: Bits | None, leaf: Any) -> Any:
    if bits is None or _is_one_weight(leaf) or leaf.ndim != 3 or leaf.dtype != jnp.bfloat16:
        return leaf
    return compress(leaf, bits)


def _kind(layer: Tree) -> Any:
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@jax.jit
def _mark(array: jax.Array) -> jax.Array:
    """A number that is there when the array is, and takes none of its memory."""
    return array[(0,) * array.ndim]


def _pieces(tree: Tree, prefix: str) -> Iterator[NewTensor]:
    """The arrays of a tree as tensors; a compressed one is several, behind its name and, where it has one, its form."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_one_weight):
        name = prefix + ".".join(key.key for key in path)
        parts = {"": leaf}
        if _is_compressed(leaf):
            parts = {f".{field}": value for field, value in vars(leaf).items()}
            parts[f".{_SHAPE}"] = np.array(leaf.shape, np.int64)
        elif is_quantized(leaf):
            parts = {f".{leaf.form}.values": leaf.values, f".{leaf.form}.scales": leaf.scales}
        for suffix, array in parts.items():
            values = np.asarray(array)
            yield NewTensor(name + suffix, names[values.dtype], values.shape, lambda values=values: iter([values]))


def _read(files: checkpoints.Folder, prefix: str) -> Tree:
    tree: Tree = {}
    for name in files.names:
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split(".")
            at = tree
            for key in path:
                at = at.setdefault(key, {})
            at[last] = files[name].read()
    return _joined(tree)


def _joined(tree: Tree) -> Tree:
    """Makes compressed arrays of their pieces."""
    if not isinstance(tree, dict):
        return tree
    if _SHAPE in tree and "planes" in tree:
        return Compressed(**{**tree, _SHAPE: tuple(int(size) for size in tree[_SHAPE])})
    if len(tree) == 1 and (form := next(iter(tree))) in CODINGS:
        return QuantizedWeight(**tree[form], form=form)
    return {name: _joined(value) for name, value in tree.items()}
