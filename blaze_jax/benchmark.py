"""Times `expert_ffn` against a dense FFN of the same arithmetic: `python -m blaze_jax.benchmark`."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from blaze_jax.activations import get_activation
from blaze_jax.experts import expert_ffn
from blaze_jax.routing import route
from blaze_jax.version import __version__


class Sizes(NamedTuple):
    """T tokens, d model width, n expert width, E experts, K experts per token."""

    num_tokens: int
    model_width: int
    expert_width: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def parse(cls, text: str) -> "Sizes":
        """Sizes from "T,d,n,E,K"."""
        try:
            sizes = cls(*(int(part) for part in text.split(",")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r} must be five whole numbers T,d,n,E,K") from None
        if min(sizes) < 1 or sizes.experts_per_token > sizes.num_experts:
            raise argparse.ArgumentTypeError(f"{text!r} must have sizes of at least 1 and K of at most E")
        return sizes

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the three products of every (token, slot) pair."""
        return 6 * self.num_tokens * self.experts_per_token * self.model_width * self.expert_width


DEFAULT_SIZES = Sizes(4096, 512, 512, 16, 2)


def expert_inputs(sizes: Sizes, dtype) -> tuple:
    """Random `(x, w_gate, w_up, w_down, weights, experts)` under uniformly random routing."""
    tokens, d, n, num_experts, slots = sizes
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(key, *shape):
        return (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype)

    routing = route(jax.random.normal(keys[4], (tokens, num_experts)), slots)
    matrices = (normal(keys[i], num_experts, *shape) for i, shape in ((1, (d, n)), (2, (d, n)), (3, (n, d))))
    return jax.random.normal(keys[0], (tokens, d)).astype(dtype), *matrices, routing.weights, routing.experts


def dense_ffn(x, w_gate, w_up, w_down):
    """One expert for every row."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gate, up = (jnp.dot(x, w, preferred_element_type=wide) for w in (w_gate, w_up))
    return jnp.dot(get_activation("swiglu").function(gate, up).astype(x.dtype), w_down)


def forward_and_backward(function: Callable) -> Callable:
    """`function` and its gradient with respect to all floating arguments but the cotangent, given last."""

    def run(*args):
        *inputs, cotangent = args
        floating = [i for i, a in enumerate(inputs) if jnp.issubdtype(a.dtype, jnp.floating)]

        def of_floating(*values):
            merged = list(inputs)
            for i, value in zip(floating, values, strict=True):
                merged[i] = value
            return function(*merged)

        y, vjp = jax.vjp(of_floating, *(inputs[i] for i in floating))
        return y, vjp(cotangent)

    return run


def interleaved_seconds(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Wall time of each call, the calls taking turns, so that a drift of the machine touches all alike."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(sizes: Sizes, dtype, repeats: int) -> None:
    """Prints a line each for the layer and the dense FFN, forward and forward+backward, and their ratio."""
    inputs = expert_inputs(sizes, dtype)
    x, w_gate, w_up, w_down, *_ = inputs
    rows = jnp.tile(x, (sizes.experts_per_token, 1))
    one_expert = (rows, w_gate[0], w_up[0], w_down[0])
    passes = {
        "forward": (expert_ffn, inputs, dense_ffn, one_expert, 1),
        "forward+backward": (
            forward_and_backward(expert_ffn),
            (*inputs, x),
            forward_and_backward(dense_ffn),
            (*one_expert, rows),
            3,
        ),
    }
    for name, (ours, our_args, dense, dense_args, factor) in passes.items():
        our_call, dense_call = jax.jit(ours), jax.jit(dense)
        calls = {
            "expert_ffn": lambda f=our_call, a=our_args: f(*a),
            "dense FFN": lambda f=dense_call, a=dense_args: f(*a),
        }
        seconds = interleaved_seconds(calls, repeats)
        for label, times in seconds.items():
            median = statistics.median(times)
            rate = factor * sizes.forward_flops / median / 1e9
            spread = f"{min(times) * 1e3:.1f}-{max(times) * 1e3:.1f}"
            print(f"  {name:17s} {label:11s} {median * 1e3:9.1f} ms ({spread})  {rate:7.0f} GFLOP/s")
        ratios = [a / b for a, b in zip(seconds["expert_ffn"], seconds["dense FFN"], strict=True)]
        print(f"  {name:17s} ratio       {statistics.median(ratios):9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m blaze_jax.benchmark", description=__doc__)
    parser.add_argument("--config", type=Sizes.parse, action="append", metavar="T,d,n,E,K", help="sizes; repeatable")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each, interleaved")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats} must be at least 1")
    device = jax.devices()[0]
    print(f"blaze_jax {__version__}, jax {jax.__version__}, {device.platform} {device.device_kind}, {arguments.dtype}")
    for sizes in arguments.config or [DEFAULT_SIZES]:
        print("T={}, d={}, n={}, E={}, K={}".format(*sizes))
        compare(sizes, jnp.dtype(arguments.dtype), arguments.repeats)


if __name__ == "__main__":
    main()
