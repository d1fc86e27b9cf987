"""How many output columns the layer works on at a time."""


def column_block(num_rows: int, d: int, n: int, num_experts: int, dtype) -> int:
    """The most columns of a block. The experts' outputs only ever exist as rows of that width.

    Args:
      num_rows: R, rows of all experts.
      d: width of a token.
      n: width of an expert.
      num_experts: E.
      dtype: of the rows.
    """
    del num_rows, d, n, num_experts, dtype
    return 512
