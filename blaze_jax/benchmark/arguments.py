"""The command line."""

import argparse
from pathlib import Path

from blaze_jax.benchmark.mesh import parse_mesh, parse_variant
from blaze_jax.benchmark.peers import PEERS
from blaze_jax.benchmark.sizes import PRESET_NAMES, Sizes
from blaze_jax.implementation import FAMILIES

_MODES = (
    ("kernels", "a table of our kernels, each against what this device can do"),
    ("routing", "the router and the index building, and XLA's top_k and sorts"),
    ("scaling", "time and memory per token, from 8k to 2M tokens"),
    ("token-rounding", "the experts with plain top-k against token rounding"),
)

_EPILOG = (
    "Times on a GPU are device time, by the profiler: kernels without the gaps between them, each run on an emptied L2 "
    "cache. On other platforms they are wall time, and the default sizes are small."
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, `sys.argv` for None; errors end the program with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m blaze_jax.benchmark",
        description="Times the experts, forward and forward+backward, and what a JAX user would otherwise run.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Sizes.parse, action="append", default=[], metavar="T,d,n,E,K", help="sizes; repeatable")
    add("--preset", choices=PRESET_NAMES, action="append", default=[], help="a layer of a public model; repeatable")
    add("--tokens", type=int, default=16384, metavar="T", help="tokens of the presets (16384)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(bfloat16 on a GPU, float32 elsewhere)")
    add("--implementation", choices=("mosaic_gpu", "xla"), help="of our kernels (the best that can run)")
    add("--family", choices=tuple(FAMILIES), help="of our kernels for GPUs (that of the GPU)")
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="PEER", help=f"of {', '.join(PEERS)} (all)")
    add("--same-experts", action="store_true", help="route all tokens to the same K experts, in the comparison")
    add("--float32-weights", action="store_true", help="time our layer with float32 weights, too, in the comparison")
    add("--repeats", type=int, default=20, metavar="N", help="timed runs of each, taking turns (20)")
    add(
        "--limit-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="a peer's call that takes longer is not timed (20)",
    )
    mode = parser.add_mutually_exclusive_group()
    for name, text in _MODES:
        mode.add_argument(f"--{name}", action="store_true", help=text)
    mode.add_argument("--compile-only", choices=("h200",), help="the memory table, without a GPU")
    mode.add_argument("--compile-time", choices=("h200",), help="to trace, lower and compile layers, without a GPU")
    mode.add_argument("--recorded", type=Path, nargs="+", metavar="FILE", help="take these results, measure nothing")
    mode.add_argument("--mesh", type=parse_mesh, metavar="ROLE=N,...", help="the experts over N devices against one")
    add(
        "--variant",
        type=parse_variant,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="fields of Parallelism for --mesh, such as exchange=permute,chunks=2; repeatable (default)",
    )
    add("--layers", type=int, default=1, metavar="N", help="of --mesh, one after the other (1)")
    add(
        "--case-seconds",
        type=float,
        default=240.0,
        metavar="S",
        help="a case of --mesh that takes longer is ended (240)",
    )
    add("--json", type=Path, metavar="FILE", help="write all results")
    add("--plot", type=Path, metavar="FOLDER", help="draw the results as PNG files")
    arguments = parser.parse_args(argv)
    for name in ("repeats", "tokens", "limit_seconds", "layers", "case_seconds"):
        value = getattr(arguments, name)
        least = 1 if isinstance(value, int) else 0
        if not value >= least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if arguments.family and arguments.mesh:
        parser.error("--family is not for --mesh, whose cases are processes of their own")
    if arguments.recorded and arguments.plot is None:
        parser.error("--recorded needs --plot FOLDER: there is nothing else to do with the results")
    for name in ("routing", "scaling", "token_rounding", "recorded"):
        if getattr(arguments, name) and (arguments.preset or (arguments.config and name != "token_rounding")):
            parser.error(f"--{name.replace('_', '-')} has sizes of its own: leave --config and --preset out")
    return arguments
