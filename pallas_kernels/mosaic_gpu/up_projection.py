"""Up projection: gathered token rows through the gate and up weights of their expert, then the activation."""

from collections.abc import Callable

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_gpu.inline import K_STEP
from pallas_kernels.mosaic_gpu.ragged_store import CHUNK, packed_tile, store_buffer, store_buffers, store_rows
from pallas_kernels.mosaic_gpu.row_groups import TILE_COLUMNS, RowGroups
from pallas_kernels.mosaic_gpu.row_matmul import RowMatmul, row_matmul
from pallas_kernels.mosaic_gpu.support import no_biases


def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: RowGroups,
    *,
    activation: Callable[..., Array],
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """Pre-activations (gate and up, or up alone) and activation of every row; see the portable twin.

    A tile holds `256 / len(weights)` columns of each projection side by side, so one wgmma multiplies a gathered tile
    with both. The activation is computed from the float32 accumulators and stored at the end of its tile; the packed
    pre-activations follow under the next tile.
    """
    no_biases(*biases)
    weights = tuple(w.astype(x.dtype) for w in weights)
    n = weights[0].shape[2]
    panel = TILE_COLUMNS // len(weights)
    chunks_per_panel = panel // CHUNK

    def load(inputs, expert, row, column_tile, k, lhs, rhs, barrier):
        for i, weight in enumerate(inputs[2:]):
            block = weight.at[expert, pl.ds(k * K_STEP, K_STEP), pl.ds(column_tile * panel, panel)]
            plgpu.copy_gmem_to_smem(block, rhs.at[:, pl.ds(i * panel, panel)], barrier)

    def finish(accumulator, where, inputs, outputs, scratch):
        for chunk in range(chunks_per_panel):
            columns = [accumulator[:, p * panel + chunk * CHUNK :][:, :CHUNK] for p in range(len(weights))]
            hidden = activation(*columns).astype(x.dtype)
            store_rows(
                hidden,
                store_buffer(scratch[0], chunk, where),
                outputs[-1],
                where,
                where.column_tile * panel + chunk * CHUNK,
            )
        return accumulator.astype(x.dtype)

    def store(packed, chunk, where, inputs, outputs, scratch):
        output = outputs[chunk // chunks_per_panel]
        column = where.column_tile * panel + chunk % chunks_per_panel * CHUNK
        store_rows(
            packed[:, chunk * CHUNK : (chunk + 1) * CHUNK],
            store_buffer(scratch[0], chunk, where),
            output,
            where,
            column,
        )
        return packed

    rows = jax.ShapeDtypeStruct((groups.num_rows, n), x.dtype)
    *pre_activations, hidden = row_matmul(
        RowMatmul(
            name="moe_up_projection",
            inputs=(x, groups.token_indices, *weights),
            outputs=(rows,) * (len(weights) + 1),
            num_column_tiles=-(-n // panel),
            k_steps=-(-x.shape[1] // K_STEP),
            gathers=True,
            transposed_weights=False,
            copies=len(weights),
            load=load,
            finish=finish,
            store=store,
            held=packed_tile(x.dtype),
            chunks=TILE_COLUMNS // CHUNK,
            scratch=(store_buffers(x.dtype),),
        ),
        groups.tiles,
    )
    return tuple(pre_activations), hidden
