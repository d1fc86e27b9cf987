"""The row kernels: up and down projection, and back through both."""

from collections.abc import Callable
from functools import partial
from operator import add

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import simt
from pallas_kernels.ampere.operands import HALF
from pallas_kernels.ampere.quantization import load_quantized, quantized_shapes, store_quantized
from pallas_kernels.ampere.row_matmul import (
    add_bias,
    biases_of,
    for_rows,
    row_matmul,
    store_half,
    store_rows,
    store_sums,
)
from pallas_kernels.contract import Dispatch, Quantized
from pallas_kernels.mosaic.row_groups import TileSchedule, bias_part, sum_in_order
from pallas_kernels.simt.elementwise import value, with_gradients
from pallas_kernels.simt.matrices import CHUNK
from pallas_kernels.simt.threads import combine_lanes, when
from pallas_kernels.simt.values import Long, minimum, select
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import MmaTuning


@traced_once("activation", "keep_pre_activations", "quantize", "tuning")
def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    quantize: bool = False,
    tuning: MmaTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"] | Quantized, ...], Float[Array, "R n"]]:
    """Pre-activations (gate and up, or up alone) and activation of every row; see the portable twin.

    A tile holds equal parts of each projection, and a warp the same columns of both, so that the activation is computed
    from the float32 sums.
    """
    n = weights[0].shape[2]

    def end(biases, results, where, sums, _):
        *pre_activations, hidden = results
        bias = biases_of(biases, where, n)

        def end_rows(first, of_rows):
            pre = [add_bias(values, own) for values, own in zip(of_rows, bias, strict=True)]
            if pre_activations:
                for values, (projection, column) in zip(pre, where.halves, strict=True):
                    store_kept(pre_activations[projection], where, first, column, values, n)
            operands = [pre] if len(weights) == 2 else [[half] for half in pre]  # for each activation
            for own, (_, column) in zip(operands, where.halves, strict=False):
                activated = [
                    [value(activation, numbers) for numbers in zip(*of_columns, strict=True)]
                    for of_columns in zip(*own, strict=True)
                ]
                store_half(hidden, where, first, column, activated, n)

        for_rows(where, sums, end_rows)

    rows = jax.ShapeDtypeStruct((groups.num_rows, n), x.dtype)
    kept, store_kept = rows, store_half
    if quantize:
        kept, store_kept = quantized_shapes(*rows.shape), partial(store_quantized, num_rows=groups.num_rows)
    *pre_activations, hidden = row_matmul(
        "up_projection",
        groups,
        (x,),
        weights,
        gathered=True,
        num_columns=n,
        extra=tuple(b.astype(jnp.float32) for b in biases),
        results=[kept] * (len(weights) * keep_pre_activations) + [rows],
        end=end,
        tuning=tuning,
    )
    return tuple(pre_activations), hidden


@traced_once("num_columns", "tuning")
def down_projection(
    hidden: Float[Array, "R n"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    tuning: MmaTuning | None = None,
) -> Float[Array, "R columns"]:
    """Columns `first_column`, a multiple of 8, to `first_column + num_columns` of every row's expert output."""
    biases = () if b_down is None else (b_down,)
    columns = first_column, num_columns
    return _columns("down_projection", groups, (hidden,), (w_down,), columns, biases, tuning=tuning)


@traced_once("num_columns", "tuning")
def up_backward(
    d_pre_activations: tuple[Float[Array, "R n"], ...],
    weights: tuple[Float[Array, "E d n"], ...],
    groups: Dispatch[TileSchedule],
    first_column: Int[Array, ""] | int,
    num_columns: int,
    *,
    tuning: MmaTuning | None = None,
) -> Float[Array, "R columns"]:
    """`Σ dP · Wᵀ` over the projections, into the same sums; see the portable twin."""
    columns = first_column, num_columns
    return _columns("up_backward", groups, d_pre_activations, weights, columns, transposed=True, tuning=tuning)


def _columns(kernel, groups, lhs, weights, columns, biases=(), **options) -> Float[Array, "R columns"]:
    """The products of every row with some columns of its expert's weights, plus the biases of these."""
    first_column, num_columns = columns

    def end(biases, results, where, sums, _):
        store_sums(results, where, sums, num_columns, biases_of(biases, where, num_columns))

    own_biases = (lax.dynamic_slice_in_dim(b.astype(jnp.float32), first_column, num_columns, axis=1) for b in biases)
    results = [jax.ShapeDtypeStruct((groups.num_rows, num_columns), lhs[0].dtype)]
    options |= {"first_column": first_column, "num_columns": num_columns, "extra": tuple(own_biases)}
    return row_matmul(kernel, groups, lhs, weights, results=results, end=end, **options)[0]


@traced_once("activation", "tuning")
def down_backward(
    dy: Float[Array, "T d"],
    w_down: Float[Array, "E n d"],
    b_down: Float[Array, "E d"] | None,
    pre_activations: tuple[Float[Array, "R n"] | Quantized, ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    tuning: MmaTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"], Float[Array, " R"]]:
    """Gradients of the pre-activations, weighted activation, gradient of the row weights; see the portable twin.

    At the end of a tile its pre-activations come through the ring of operand slots, unless they are quantized. The
    gradient of a row weight is the sum of 32 columns at a time, which are then added up in order.
    """
    num_rows, n, num_pre, dtype = groups.num_rows, w_down.shape[1], len(pre_activations), dy.dtype
    derivative = with_gradients(activation, num_pre)
    quantized = isinstance(pre_activations[0], Quantized)

    def end(extra, results, where, sums, pieces):
        row_weights, pre_activations = extra if quantized else (extra, ())
        if quantized:
            pieces = [partial(load_piece, pre_activations, where, piece) for piece in range(2 * len(sums))]
        rows = [where.row + where.lane // 4 + i for i in range(0, 16 * len(sums), 8)]
        row_weights = [row_weights[minimum(row, num_rows - 1)] for row in rows]
        for piece, load in enumerate(pieces):
            of_rows, half = divmod(piece, 2)
            for i in range(2):
                first_row = 16 * of_rows + 8 * i
                with when(where.rows > first_row):  # a branch of their own, as in `for_rows`
                    d_hidden = [d[2 * i : 2 * i + 2] for d in sums[of_rows][half]]
                    pre, weight = load(8 * i), row_weights[2 * of_rows + i]
                    finish_rows(results, where, first_row, where.halves[half][1], d_hidden, pre, weight)

    def load_piece(pre_activations, where, piece, first_row):
        of_rows, half = divmod(piece, 2)
        first_row, column = 16 * of_rows + first_row, where.halves[half][1]
        return [load_quantized(p, where, first_row, column, n, num_rows) for p in pre_activations]

    def finish_rows(results, where, first_row, column, d_hidden, pre, weight):
        """The end of 8 rows of half a panel. With more at once the registers of some activations run out."""
        d_pre, weighted = [[] for _ in pre], []
        d_weight = simt.Float(0.0)
        for eight, of_columns in enumerate(d_hidden):
            known = column + eight * CHUNK < n
            own = []
            for i, d in enumerate(of_columns):
                hidden, gradients = derivative([p[eight][i] for p in pre], weight * d)
                d_weight = d_weight + select(known, d * hidden, 0.0)
                own.append((weight * hidden, *gradients))
            for result, values in zip((weighted, *d_pre), zip(*own, strict=True), strict=True):
                result.append(list(values))
        for result, values in zip(results, (*d_pre, weighted), strict=False):
            store_rows(result, where, first_row, column, values, n)
        row = where.lane // 4 + first_row
        total = combine_lanes(add, d_weight, 4)
        with when((where.lane % 4).equals(0) & (row < where.rows) & (column < n)):
            results[-1][Long(column // HALF) * num_rows + (where.row + row)] = total

    *d_pre, weighted_hidden, d_row_weights = row_matmul(
        "down_backward",
        groups,
        (dy,),
        (w_down,),
        gathered=True,
        transposed=True,
        num_columns=n,
        extra=(row_weights.astype(jnp.float32), pre_activations) if quantized else row_weights.astype(jnp.float32),
        in_place=() if quantized else pre_activations,  # a tile has read a piece before it writes it
        results=[
            *[jax.ShapeDtypeStruct((num_rows, n), dtype)] * (num_pre * quantized + 1),
            jax.ShapeDtypeStruct((-(-n // HALF), num_rows), jnp.float32),
        ],
        end=end,
        tuning=tuning,
    )
    of_an_expert = jnp.arange(num_rows) < groups.expert_token_offsets[-1]
    d_row_weights = jnp.where(of_an_expert, sum_in_order(d_row_weights), 0)
    if b_down is not None:
        d_row_weights += bias_part(dy, b_down, groups)
    return tuple(d_pre), weighted_hidden, d_row_weights
