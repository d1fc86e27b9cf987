"""`python -m blaze_jax.benchmark`."""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from blaze_jax.benchmark.environment import describe, environment
from blaze_jax.benchmark.kernels import measure_kernels, print_kernels
from blaze_jax.benchmark.sizes import CPU_SIZES, GPU_SIZES, Sizes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m blaze_jax.benchmark", description=__doc__)
    parser.add_argument("--config", type=Sizes.parse, action="append", metavar="T,d,n,E,K", help="sizes; repeatable")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each, interleaved")
    parser.add_argument("--kernels", action="store_true", help="a table of our kernels")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats} must be at least 1")
    values = environment()
    print(describe(values))
    records = []
    for sizes in arguments.config or (GPU_SIZES if jax.default_backend() == "gpu" else CPU_SIZES):
        print(f"{sizes}, {arguments.dtype}", flush=True)
        records.append(measure_kernels(sizes, jnp.dtype(arguments.dtype), repeats=arguments.repeats))
        print_kernels(records[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": values, "records": records}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
