"""How many output columns the layer works on at a time."""

from pallas_kernels.tuning.parameters import ColumnBlock, find_tuning, shape_key


def column_block(num_rows: int, d: int, n: int, num_experts: int, dtype, *, tuning: ColumnBlock | None = None) -> int:
    """Columns of a block at most, as tuned for this layer; see the portable twin."""
    shape = shape_key(num_rows, dtype, d=d, n=n, E=num_experts)
    return find_tuning(ColumnBlock, "column_block", tuning, shape).columns
