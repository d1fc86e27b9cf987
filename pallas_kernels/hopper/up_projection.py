"""Up projection: gathered token rows through the gate and up weights of their expert, then the activation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper.elementwise import value
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.ragged_store import packed_tile, store_buffer, store_buffers, store_rows
from pallas_kernels.hopper.row_matmul import RowMatmul, row_matmul, tile_panel
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TileSchedule
from pallas_kernels.mosaic.traced_once import traced_once
from pallas_kernels.tuning.parameters import TileTuning, find_tuning, shape_key


@traced_once("activation", "keep_pre_activations", "tuning")
def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    tuning: TileTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """Pre-activations (gate and up, or up alone) and activation of every row; see the portable twin.

    A tile holds `256 / len(weights)` columns of each projection side by side, so one wgmma multiplies a gathered tile
    with both. The activation is computed from the float32 accumulators and stored at the end of its tile; the packed
    pre-activations follow under the next tile. Where they are not kept, the activation does.
    """
    weights = tuple(w.astype(x.dtype) for w in weights)
    num_experts, d, n = weights[0].shape
    shape = shape_key(groups.num_rows, x.dtype, d=d, n=n, E=num_experts)
    width = TILE_COLUMNS // len(weights)  # of a projection's part of a tile
    panels = width // PANEL
    column_tiles = -(-n // width)

    def place(panel, column_tile):
        """The projection that a panel of a tile belongs to, and its first column there."""
        return panel // panels, column_tile * width + panel % panels * PANEL

    def load(inputs, expert, row, column_tile, k, lhs, rhs, barrier):
        for panel in range(TILE_COLUMNS // PANEL):
            projection, column = place(panel, column_tile)
            block = inputs[2 + projection].at[expert, pl.ds(k * K_STEP, K_STEP), pl.ds(column, PANEL)]
            plgpu.copy_gmem_to_smem(block, rhs.at[pl.ds(panel * PANEL, PANEL)], barrier)

    def finish(accumulator, where, inputs, outputs, scratch):
        bias = inputs[-1] if biases else None
        packed, activated = {}, []
        for panel in range(panels):
            own = range(panel, TILE_COLUMNS // PANEL, panels)  # of each projection
            pre = [tile_panel(accumulator, p, where, bias) for p in own]
            for p, values in zip(own, pre, strict=True):
                packed[p] = values.astype(x.dtype)
            activated.append(value(activation, pre).astype(x.dtype))
            if keep_pre_activations:
                column = place(panel, where.column_tile)[1]
                store_rows(activated[-1], store_buffer(scratch[0], panel, where), outputs[-1], where, column)
        held = [packed[p] for p in range(TILE_COLUMNS // PANEL)] if keep_pre_activations else activated
        return lax.concatenate(held, 1)

    def store(packed, panel, where, inputs, outputs, scratch):
        projection, column = place(panel, where.column_tile)  # the activation's panels are those of the first
        values = packed[:, panel * PANEL : (panel + 1) * PANEL]
        store_rows(values, store_buffer(scratch[0], panel, where), outputs[projection], where, column)

    bias = ()
    if biases:  # in the order of a tile's columns
        padded = [jnp.pad(b.astype(jnp.float32), ((0, 0), (0, column_tiles * width - n))) for b in biases]
        bias = (jnp.concatenate([b.reshape(-1, column_tiles, width) for b in padded], axis=2),)

    rows = jax.ShapeDtypeStruct((groups.num_rows, n), x.dtype)
    held_panels = TILE_COLUMNS // PANEL if keep_pre_activations else panels
    *pre_activations, hidden = row_matmul(
        RowMatmul(
            name="moe_up_projection",
            inputs=(x, groups.expert_token_indices, *weights, *bias),
            outputs=(rows,) * (len(weights) + 1 if keep_pre_activations else 1),
            num_column_tiles=column_tiles,
            k_steps=-(-x.shape[1] // K_STEP),
            gathers=True,
            transposed_weights=False,
            copies=TILE_COLUMNS // PANEL,
            load=load,
            finish=finish,
            store=store,
            held=packed_tile(x.dtype, held_panels * PANEL),
            chunks=held_panels,
            scratch=(store_buffers(x.dtype),),
            registers=(88, 208),
            tuning=find_tuning(TileTuning, "up_projection", tuning, shape),
        ),
        groups.tiles,
    )
    return tuple(pre_activations) if keep_pre_activations else (), hidden
