"""Efficiency to expect of layers over many GPUs, by formula: `python -m blaze_jax.benchmark.expected`."""

from blaze_jax.benchmark.sizes import preset
from blaze_jax.benchmark.traffic import traffic
from blaze_jax.parallelism import Parallelism

TFLOPS = 600
"""Of one H200's experts, forward and backward: 581 (back to back) to 627 at 32768,4096,1024,128,8."""

LINK, NETWORK = 250, 45
"""GB/s that a GPU receives inside a host, as measured of collectives on two H200s, and of 400 Gbit/s between hosts."""

HOST = 8
"""GPUs of a host."""

SMS, COLLECTIVE_SMS = 132, 24
"""Of the GPU, and of those what NCCL's channels take while they run."""

TOKENS = 16384
"""Of each GPU."""


def expected(model: str, devices: int) -> tuple[float, float, float]:
    """Milliseconds of communication, and the share of linear with all of it exposed and with all of it hidden.

    Experts are split over the GPUs of a host, parameters are gathered over the hosts. What is hidden costs the SMs that
    move it, and cannot take less time than the links do.
    """
    sizes = preset(model, TOKENS)
    axes = {"expert": min(devices, HOST), "fsdp": max(1, devices // HOST)}
    moved = traffic(sizes, Parallelism(expert="expert", fsdp="fsdp"), axes, 2, backward=True)
    compute = 3 * sizes.forward_flops / TFLOPS / 1e9
    inside, between = moved.tokens / LINK / 1e6, moved.parameters / NETWORK / 1e6
    hidden = max(compute + (inside + between) * COLLECTIVE_SMS / SMS, inside, between)
    return inside + between, compute / (compute + inside + between), compute / hidden


def main() -> None:
    """Prints the table of the performance notes."""
    print("| GPUs | " + " | ".join(f"{model}: ms, exposed, hidden" for model in MODELS) + " |")
    print("|---|" + "---|" * len(MODELS))
    for exponent in range(1, 11):
        cells = ("{:.1f}, {:.2f}, {:.2f}".format(*expected(model, 1 << exponent)) for model in MODELS)
        print(f"| {1 << exponent} | " + " | ".join(cells) + " |")


MODELS = ("mixtral", "qwen3-30b-a3b", "deepseek-v3")
"""Of the presets."""

if __name__ == "__main__":
    main()
