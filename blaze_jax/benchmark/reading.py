"""`python -m blaze_jax.benchmark.reading`: how fast a layer of a public checkpoint is read, next to the bare file.

It writes a layer of 128 experts of 4096 × 1536 × 3 numbers in bfloat16, 4.8 GB, unless told otherwise, and reads it in
turns: with `checkpoints.load` into arrays of jax, and as a file into memory. Both read what the operating system has
cached, unless the file is larger than its cache, so that a disk cannot hide what the reader costs.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from blaze_jax.benchmark.environment import describe, environment
from blaze_jax.checkpoints.loading import load
from blaze_jax.checkpoints.writing import NewTensor, write_tensors
from blaze_jax.config import MoEConfig

DESCRIPTION = "Times reading a layer of a public checkpoint, and reading its file into memory."


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m blaze_jax.benchmark.reading", description=DESCRIPTION)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=4096, help="of a token")
    parser.add_argument("--expert-width", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where the file is written, and removed from again; a temporary one")
    arguments = parser.parse_args(argv)
    config = MoEConfig(num_experts=arguments.experts, experts_per_token=8, expert_width=arguments.expert_width)
    print(describe(environment()))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = write_layer(Path(folder), config, arguments.width)
        size = path.stat().st_size
        of_file, of_layer = [], []
        for _ in range(arguments.repeats):
            of_file.append(_seconds(lambda: np.fromfile(path, np.uint8)))
            of_layer.append(_seconds(lambda: load(path.parent, 0, config).params))
            for what, seconds in (("file", of_file), ("layer", of_layer)):
                print(f"{what}: {seconds[-1]:.2f} s, {size / seconds[-1] / 1e9:.2f} GB/s", flush=True)
    share = statistics.median(of_file) / statistics.median(of_layer)
    print(f"{size / 1e9:.1f} GB: the layer is read at {share:.0%} of the file's speed, of medians")
    return 0


def write_layer(folder: Path, config: MoEConfig, width: int) -> Path:
    """Writes a layer of random bits as Qwen3-MoE has it."""
    prefix = "model.layers.0.mlp."
    shapes = {"gate_proj": (config.expert_width, width), "up_proj": (config.expert_width, width)}
    shapes["down_proj"] = (width, config.expert_width)
    dtype = np.dtype(jnp.bfloat16)
    numbers = np.random.default_rng(0).integers(0, 2**15, config.expert_width * width, np.uint16).view(dtype)
    tensors = [
        NewTensor(f"{prefix}experts.{expert}.{name}.weight", dtype, shape, lambda: [numbers])
        for expert in range(config.num_experts)
        for name, shape in shapes.items()
    ]
    router = np.zeros((config.num_experts, width), dtype)
    tensors.append(NewTensor(f"{prefix}gate.weight", dtype, router.shape, lambda: [router]))
    return write_tensors(folder, tensors)[0]


def _seconds(read) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(read())
    seconds = time.perf_counter() - start
    del result
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
