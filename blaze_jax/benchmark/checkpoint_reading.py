"""How fast a layer of a public checkpoint is read, next to the bare file.

Both are read in turns, with `checkpoints.load` into arrays of jax, and as a file into memory. Both read what the
operating system has cached, unless the file is larger than its cache, so that a disk cannot hide what the reader costs.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from blaze_jax.benchmark.results import Record
from blaze_jax.benchmark.sizes import Sizes
from blaze_jax.checkpoints.loading import load
from blaze_jax.checkpoints.saving import NewTensor, write_tensors
from blaze_jax.config import MoEConfig


def measure_reading(sizes: Sizes, dtype=None, *, repeats: int, folder: str | None = None) -> Record:
    """Writes a layer's file in bfloat16 into `folder`, or a temporary one, times both readers, and removes it."""
    config = MoEConfig(**sizes.config_fields())
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = write_layer(Path(place), config, sizes.model_width)
        size, seconds = path.stat().st_size, {"file": [], "layer": []}
        for _ in range(repeats):
            seconds["file"].append(_seconds(lambda: np.fromfile(path, np.uint8)))
            seconds["layer"].append(_seconds(lambda: load(path.parent, 0, config).params))
    share = statistics.median(seconds["file"]) / statistics.median(seconds["layer"])
    return {"kind": "reading", "sizes": sizes._asdict(), "bytes": size, "seconds": seconds, "share_of_file": share}


def write_layer(folder: Path, config: MoEConfig, width: int) -> Path:
    """Writes a layer of random bits as Qwen3-MoE has it."""
    prefix, n = "model.layers.0.mlp.", config.expert_width
    shapes = {"gate_proj": (n, width), "up_proj": (n, width), "down_proj": (width, n)}
    dtype = np.dtype(jnp.bfloat16)
    numbers = np.random.default_rng(0).integers(0, 2**15, n * width, np.uint16).view(dtype)
    tensors = [
        NewTensor(f"{prefix}experts.{expert}.{name}.weight", "BF16", shape, lambda: [numbers])
        for expert in range(config.num_experts)
        for name, shape in shapes.items()
    ]
    router = np.zeros((config.num_experts, width), dtype)
    tensors.append(NewTensor(f"{prefix}gate.weight", "BF16", router.shape, lambda: [router]))
    return write_tensors(folder, tensors)[0]


def _seconds(read: Callable) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(read())
    seconds = time.perf_counter() - start
    del result
    return seconds
