"""Values written to the rows that own them."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def place_values(values: Num[Array, "..."], rows: Int[Array, "..."], num_rows: int) -> Num[Array, " R"]:
    """`(num_rows,)` zeros with each value in its row, which no other value has; a row of `num_rows` drops its value.

    XLA is told that no row is written twice. Otherwise it would sort the values where it must give equal bits in every
    run; so dropped values need distinct rows as well.
    """
    beyond = num_rows + jnp.arange(rows.size, dtype=rows.dtype).reshape(rows.shape)
    distinct = jnp.where(rows < num_rows, rows, beyond)
    return jnp.zeros(num_rows, values.dtype).at[distinct].set(values, mode="drop", unique_indices=True)
