"""Arithmetic and traffic of each kernel of the layer, by its name."""

from typing import NamedTuple

from blaze_jax.benchmark.sizes import Sizes


class Work(NamedTuple):
    """Floating-point operations, and the bytes that must be read and written at least once."""

    flops: float
    bytes: float


def kernel_work(sizes: Sizes, itemsize: int) -> dict[str, Work]:
    """Work of each kernel in a forward and backward pass over the whole layer, by the words that its name contains."""
    tokens, d, n, experts, slots = sizes
    pairs = tokens * slots
    product = 2.0 * pairs * d * n
    matrix = experts * d * n * itemsize
    wide, narrow, token = pairs * d * itemsize, pairs * n * itemsize, tokens * d * itemsize
    ids = 4.0 * pairs
    return {
        "moe_up_projection": Work(2 * product, token + 2 * matrix + 3 * narrow),
        "moe_down_projection": Work(product, narrow + matrix + wide),
        "moe_combine": Work(4.0 * pairs * d, 2 * (wide + token + ids)),  # once in each direction
        "moe_down_backward": Work(product, token + matrix + 5 * narrow),
        "moe_down_weight_gradients": Work(product, token + narrow + matrix),
        "moe_up_weight_gradients": Work(2 * product, token + 2 * narrow + 2 * matrix),
        "moe_up_backward": Work(2 * product, 2 * narrow + 2 * matrix + wide),
        "moe_dispatch_count": Work(0.0, ids),
        "moe_dispatch_place": Work(0.0, 3 * ids),
    }


def work_of(kernel_name: str, table: dict[str, Work]) -> Work | None:
    """Work of the kernel that the profiler calls so, None for one that the table lacks."""
    matches = [name for name in table if name in kernel_name]
    return table[max(matches, key=len)] if matches else None
