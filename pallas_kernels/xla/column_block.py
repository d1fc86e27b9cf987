"""How many output columns the layer works on at a time."""


def column_block(num_rows: int, d: int, n: int, num_experts: int, dtype) -> int:
    """Columns of a block at most: rows of that width are all there ever is of the experts' outputs.

    Args:
      num_rows: R, rows of all experts.
      d: width of a token.
      n: width of an expert.
      num_experts: E.
      dtype: of the rows.
    """
    del num_rows, d, n, num_experts, dtype
    return 512
