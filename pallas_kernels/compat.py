"""What differs between jax releases, or is not yet part of its documented interface, in one place."""

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.export import is_symbolic_dim


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
    """`lax.top_k`, on GPUs with the operand and the results laid out in rows.

    XLA's kernel for GPUs works on rows whatever the layout it is given: next to a transpose it gave wrong ids without
    complaint (jax 0.11.2). Elsewhere nothing is laid out, since `jax.export` cannot serialise a layout.
    """
    rows = Layout(tuple(range(operand.ndim)))

    def in_rows(operand):
        values, ids = lax.top_k(with_layout_constraint(operand, rows), k)
        return with_layout_constraint(values, rows), with_layout_constraint(ids, rows)

    return lax.platform_dependent(operand, cuda=in_rows, rocm=in_rows, default=lambda o: tuple(lax.top_k(o, k)))


def has_symbolic_sizes(*arrays) -> bool:
    """Whether a size of any of `arrays` is symbolic, as in `jax.export` for any batch size."""
    return any(is_symbolic_dim(size) for array in jax.tree.leaves(arrays) for size in array.shape)
