"""What differs between jax releases, or is not yet part of its documented interface, in one place."""

from functools import cache

import jax
import jaxlib.version
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def varying_axes(*arrays) -> frozenset[str]:
    """Mesh axes of an enclosing `jax.shard_map` over which any of `arrays` differs from device to device."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays)))


def vary_over(tree, axes: frozenset[str]):
    """Marks every array of `tree` as varying over the mesh `axes`; the transpose sums its gradient over them.

    Inside `shard_map`, a replicated weight next to sharded tokens needs this once, and a loop's initial value needs it
    to have the type of what the loop writes. Outside `shard_map`, `axes` is empty and nothing happens.
    """

    def vary(array):
        missing = tuple(sorted(axes - varying_axes(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, tree)


def top_k(operand: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, with the operand and the results laid out in rows.

    XLA's kernel for GPUs works on rows whatever the layout it is given: next to a transpose it gave wrong ids without
    complaint (jax 0.11.2).
    """
    rows = Layout(tuple(range(operand.ndim)))
    values, ids = lax.top_k(with_layout_constraint(operand, rows), k)
    return with_layout_constraint(values, rows), with_layout_constraint(ids, rows)


def remember_assembler_version() -> None:
    """Lets jaxlib 0.11 ask NVIDIA's assembler for its version once and not for every truth value that a kernel uses.

    It starts a process for each answer, 500 of them and 4 s of 7 for the kernels of a layer. jaxlib 0.12 remembers.
    """
    if jaxlib.version.__version_info__ >= (0, 12):
        return
    try:
        from jax._src.lib.mosaic_gpu import _mosaic_gpu_ext as extension  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # without jax's CUDA plugin nothing asks
        return
    extension._get_ptxas_isa_version = cache(extension._get_ptxas_isa_version)
